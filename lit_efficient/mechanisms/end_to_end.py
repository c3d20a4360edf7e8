"""Diffusion transformer that trains together with an autoencoder, whose latents its alignment shapes (REPA-E).

    z: latents;  n(z): batch norm without scale and shift;  x_t = (1 - t) n(z) + t eps;  f: features of a frozen encoder
    autoencoder   -mean_i cos(h(x_t, t)_i, f_i)    through z, with frozen weights and running statistics of n
    transformer   |v(x_t, t) - (eps - n(z))|^2 - weight mean_i cos(h(x_t, t)_i, f_i)    with z detached

h: tokens after a block, projected. The loss of diffusion would make the latents simple, and not good to generate:
it trains the transformer alone.

Source: Leng et al. (2025), https://arxiv.org/abs/2504.10483.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import check_number, checks_types, refusal
from lit_efficient.internals.torch_modules import StaysFloat32
from lit_efficient.losses import diffusion
from lit_efficient.losses.feature_matching import repa_loss
from lit_efficient.mechanisms.alignment import make_head, match_positions
from lit_efficient.models.networks.dit import DiT, DiTConfig
from lit_efficient.surgery import NewLayer

_EPS = 1e-4  # of the batch norm in the authors' code


@checks_types
@dataclass(frozen=True)
class EndToEnd:
    """Settings of the diffusion transformer that trains together with an autoencoder (REPA-E).

    Args:
        backbone: Shape of the transformer. Its channels and size are those of the latents; it takes no text.
        block: Number of the block, counted from 1, whose tokens are aligned (the paper: 8 of 28).
        weight: Weight of the alignment in the loss of the transformer, at least 0.
        hidden: Hidden width of the projection, at least 1.
        label_dropout: Probability that a label is hidden from the transformer in its own loss, in [0, 1).
    """

    backbone: DiTConfig = DiTConfig()  # noqa: RUF009 (frozen)
    block: int = 2
    weight: float = 0.5
    hidden: int = 2048
    label_dropout: float = 0.1

    def __post_init__(self) -> None:
        check_number("EndToEnd", "block", self.block, least=1, most=self.backbone.depth, whole=True)
        check_number("EndToEnd", "weight", self.weight, least=0)
        check_number("EndToEnd", "hidden", self.hidden, least=1, whole=True)
        check_number("EndToEnd", "label_dropout", self.label_dropout, least=0, below=1)
        variant = self.backbone.variant
        for name, value in (
            ("context_width", self.backbone.context_width),
            ("variant.class_token.features", variant.class_token.features),
            ("variant.interval", variant.interval),
        ):
            if value:
                raise refusal("EndToEnd", f"backbone.{name}", repr(type(value)()), value)


class JointDiffusion(StaysFloat32, NewLayer):
    """The transformer, the projection of its tokens, and the normalisation of the latents.

    Args:
        settings: Settings of the loss.
        features: Width of the encoder's features.
    """

    float32 = ("",)

    def __init__(self, settings: EndToEnd, features: int) -> None:
        super().__init__()
        backbone = settings.backbone
        self.settings = settings
        self._begun = False  # whether a batch was seen, so that the counter of a GPU is read only once
        self.norm = nn.BatchNorm2d(backbone.channels, eps=_EPS, affine=False)
        self.network = DiT(backbone)
        self.head = make_head("mlp", backbone.width, features, settings.hidden)

    def forward(self, latents: Tensor, features: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the alignment, whose gradient reaches the latents alone, and the loss of the transformer.

        Args:
            latents: Latents of the autoencoder, [B, c, h, w].
            features: Features of the clean images, [B, N, D], [B, D, H, W] or [B, D].
            labels: Labels [B]; for a transformer with classes.
        """
        latents = latents.float()
        t = torch.rand(len(latents), dtype=torch.float32, device=latents.device)
        eps = torch.randn_like(latents)
        normalised = self._normalised(latents)
        seen = normalised.detach().requires_grad_()
        value = self._alignment(self._noisy(seen, eps, t), t, features, labels)[0]
        # Taken here, because a backward pass through these blocks would reach their weights.
        (gradient,) = torch.autograd.grad(value, seen)
        aligned = value.detach() + ((normalised - seen.detach()) * gradient).sum()
        shown = labels
        if labels is not None and self.settings.label_dropout:
            hidden = torch.rand(len(latents), device=latents.device) < self.settings.label_dropout
            shown = torch.where(hidden, self.network.null_class, labels)
        clean = self.norm(latents.detach())
        noisy = self._noisy(clean, eps, t)
        own, tokens, c, named = self._alignment(noisy, t, features, shown)
        for block in self.network.blocks[self.settings.block :]:
            tokens = block(tokens, c, **named)
        velocity = self.network.leave(tokens, c, (latents.shape[2], latents.shape[3]))
        error = (velocity - diffusion.target(clean, eps, t, "flow", "flow")).square().mean()
        return aligned, error + self.settings.weight * own

    def _normalised(self, latents: Tensor) -> Tensor:
        """Return latents normalised by the running statistics, which begin as those of the first batch."""
        if not self._begun and not self.norm.num_batches_tracked:
            with torch.no_grad():
                variance, mean = torch.var_mean(latents, dim=(0, 2, 3))
                self.norm.running_mean.copy_(mean)  # type: ignore[union-attr]
                self.norm.running_var.copy_(variance)  # type: ignore[union-attr]
        self._begun = True
        return F.batch_norm(latents, self.norm.running_mean, self.norm.running_var, eps=_EPS)

    def _noisy(self, clean: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        return diffusion.add_noise(clean, eps, t, "flow")

    def _alignment(
        self, x: Tensor, t: Tensor, features: Tensor, labels: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor | None]]:
        """Return minus the mean cosine, and the state of the transformer behind the aligned block."""
        tokens, c, named = self.network.enter(x, t, labels)
        for block in self.network.blocks[: self.settings.block]:
            tokens = block(tokens, c, **named)
        ours, theirs = match_positions(tokens, features, "EndToEnd")
        return repa_loss(self.head(ours), theirs), tokens, c, named
