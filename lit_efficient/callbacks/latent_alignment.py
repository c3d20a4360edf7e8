"""VF loss: train an autoencoder whose latents are similar to each other where a frozen encoder's features are.

    L = w_a weight (mean relu(|cos(z_i, z_j) - cos(f_i, f_j)| - m1) + mean relu(1 - m2 - cos(W z_i, f_i)))
    w_a = |grad of the module's loss| / |grad of L|, both at the encoder's last layer
    REPA-E   L: the alignment of a diffusion transformer on the latents, which trains with the autoencoder; see
             :mod:`lit_efficient.mechanisms.end_to_end`

Saves: training steps of a diffusion model on the latents; the paper reports FID 2.11 on ImageNet in 64 epochs
Costs: the forward pass of the frozen encoder; the matrix W during training; for w_a a backward pass of each loss down
    to the latents; with REPA-E the training of the transformer and a pass through its aligned blocks
Source: Yao et al. (2025), https://arxiv.org/abs/2501.01423; REPA-E: Leng et al. (2025),
    https://arxiv.org/abs/2504.10483
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from lit_efficient.declaration import Phase
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.losses.feature_matching import VFLoss, gradient_ratio, vf_loss
from lit_efficient.mechanisms.alignment import (
    Alignment,
    AlignmentHead,
    Call,
    feature_of,
    match_positions,
    mean,
    member,
)
from lit_efficient.mechanisms.end_to_end import EndToEnd, JointDiffusion
from lit_efficient.models.libraries.teachers import Teacher, find_teacher, input_width_of, only_module
from lit_efficient.surgery import moved
from lit_efficient.traits import Trait


class LatentAlignment(Alignment):
    """Align the latents of an autoencoder, while it trains, with the features of a frozen encoder (VF loss, REPA-E).

    The latents are the input of the decoder. The features are interpolated to the grid of the latents. Cosines between
    positions are computed from the latents themselves. Cosines with the features are computed from a linear map of the
    latents without bias, which trains with the module and is not exported.

    With ``loss: EndToEnd`` a diffusion transformer trains on the latents at the same time, with the module's optimizer.
    The gradient of its alignment reaches the autoencoder, that of its loss of diffusion does not. It is no part of
    exports: train another one on latents of the autoencoder. ``train/latent_alignment_network`` is its loss.

    Args:
        teacher: The frozen encoder: a module (in code, or by ``class_path``); ``data.NAME``, a network of the data
            module; or the folder, hub name or ``config.json`` (for random weights) of a transformers vision model.
        teacher_layer: Pattern for the layer of the teacher. ``""`` is its output; for models of transformers and timm,
            these are the last tokens or maps before pooling. One vector per image is refused.
        weight: Weight of the term, at least 0 (1.5 in REPA-E). With 0 it is logged but has no effect on training.
        loss: Margins of the VF loss, and whether the weight is adaptive; or `EndToEnd`, the transformer of REPA-E.
        stop_at: Optimizer step from which the term and the teacher are no longer computed; ``None`` for never.
        encoder: Pattern for the end of the name of the autoencoder's encoder. The adaptive weight compares the
            gradients of its last weight.
        decoder: Pattern for the end of the name of the module whose input are the latents. If there is a
            ``post_quant_conv`` next to it, as in diffusers' AutoencoderKL, the input of that module is used.
        images: Dotted path of the images in a batch.
        image_size: Side length in pixels to which images are resized for the teacher; ``None`` for the size in the
            teacher's config.
        head: Widths and seed of the linear map.

    Raises:
        ConfigurationError: For an argument out of range, if encoder or decoder is not found, and if the batch has no
            images.
        ConflictError: If the teacher shares parameters with the module, and with manual optimization.
    """

    phase = Phase.FREEZE
    traits = frozenset({Trait.MATCHES_FEATURES, Trait.RETAINS_GRAPH, Trait.TRAINING_ONLY})
    conflicts: ClassVar[dict[str, str]] = {
        "ActivationCheckpointing(save=...)": (
            "gradients are measured before the backward pass, and results that are kept by operator can be used only "
            "once: leave save out"
        ),
    }
    heads_name = "latent_alignment_heads"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "speed": (0, "diffusion models need fewer training steps on the latents of such an autoencoder")
    }

    def __init__(
        self,
        teacher: str | nn.Module,
        teacher_layer: str = "",
        weight: float = 0.1,
        loss: VFLoss | EndToEnd = VFLoss(),  # noqa: B008 (frozen)
        stop_at: int | None = None,
        encoder: str = "encoder",
        decoder: str = "decoder",
        images: str = "images",
        image_size: int | None = None,
        head: AlignmentHead = AlignmentHead(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        check_number("LatentAlignment", "image_size", image_size, least=1, whole=True, null=True)
        self.teacher = teacher
        self.teacher_layer = teacher_layer
        self.weight = weight
        self.loss = loss
        self.stop_at = stop_at
        self.encoder = encoder
        self.decoder = decoder
        self.images = images
        self.image_size = image_size
        for name in ("spatial_norm", "class_layer"):
            given = getattr(head, name)
            if given is not None:
                raise refusal("LatentAlignment", f"head.{name}", "None (only HiddenAlignment uses it)", given)
        self.head = head
        self.seed = head.seed
        self._of_network: Tensor | None = None  # loss of the transformer in this step
        self.check_common()
        if isinstance(loss, EndToEnd):
            if weight == 0:
                raise refusal("LatentAlignment", "weight", "above 0 for EndToEnd", weight)
            self.traits = self.traits - {Trait.RETAINS_GRAPH}
            self.conflicts = {}  # type: ignore[misc]

    def check(self, trainer: Any, module: nn.Module) -> None:
        traits = traits_of(trainer.strategy)
        if traits.shards and not traits.is_zero and isinstance(self.loss, VFLoss) and self.loss.adaptive:
            raise ConflictError(
                f"LatentAlignment: the adaptive weight needs the gradient of one weight, which {traits.name} gathers "
                "only while its block runs. Set loss.adaptive=False, or use strategy='ddp'"
            )

    def find(self, data: object) -> Teacher:
        assert self.teacher is not None
        images: dict[str, Any] = {"image_size": self.image_size, "skip_tokens": self.head.skip_tokens, "tokens": True}
        return find_teacher(self.teacher, [self.teacher_layer], who="LatentAlignment", data=data, **images)

    def listens_to(self, module: nn.Module) -> list[str]:
        only_module(module, self.encoder, "LatentAlignment: encoder")
        return [entrance(module, only_module(module, self.decoder, "LatentAlignment: decoder"))]

    def build_heads(self, module: nn.Module) -> dict[str, nn.Module]:
        (name,) = self.names(module)
        latents = (f"the input of {name!r}", input_width_of(module, name))
        if isinstance(self.loss, EndToEnd):
            channels = self.loss.backbone.channels
            if latents[1] not in (None, channels):
                allowed = f"{latents[1]}, as the latents have"
                raise refusal("LatentAlignment", "loss.backbone.channels", allowed, channels)
            teacher, width = self.teacher_width(self.teacher_layer)
            if self.head.widths is not None:
                width = self.head.widths[1]
            if width is None:
                raise ConfigurationError(
                    f"LatentAlignment: the width of the features of {teacher} is unknown: set head.widths"
                )
            return {"0": JointDiffusion(self.loss, width)}
        sides = [latents, self.teacher_width(self.teacher_layer)]
        argument = "head.widths: [latents', teacher's]"
        return {"0": self.head_between(sides, self.head.widths, argument, "linear", bias=False)}

    def term(self, calls: Mapping[str, list[Call]], output: object, module: nn.Module, batch: object) -> Tensor:
        (name,) = self.names(module)
        if not calls[name]:
            raise ConfigurationError(
                f"LatentAlignment: training_step never called the forward of {name!r}. Set decoder to the module that "
                "it calls with the latents"
            )
        assert self._teacher is not None
        features = self._teacher.of_images(member(batch, self.images, "LatentAlignment"))[self.teacher_layer]
        terms = []
        losses = []
        for args, kwargs, _ in calls[name]:
            latents = feature_of(args or kwargs)
            if isinstance(self.loss, EndToEnd):
                labels = None
                if self.loss.backbone.num_classes:
                    labels = moved(member(batch, "labels", "LatentAlignment"), latents.device)
                term, loss = self.heads(module)["0"](latents, features, labels)
                terms.append(term)
                losses.append(loss)
                continue
            ours, theirs = match_positions(latents, features, "LatentAlignment")
            projected = self.project(module, "0", ours, name, theirs)
            terms.append(vf_loss(ours, projected, theirs, self.loss.distance_margin, self.loss.cosine_margin))
        self._of_network = mean(losses) if losses else None
        return mean(terms)

    def extra_loss(self, output: object, module: Any, batch: object) -> Tensor | None:
        """Return the weighted term, plus the loss of the transformer of REPA-E."""
        term = super().extra_loss(output, module, batch)
        own = self._of_network
        self._of_network = None
        if own is None or term is None:
            return term
        module.log("train/latent_alignment_network", own.detach(), batch_size=1)
        return term + own

    def scale(self, term: Tensor, output: Any, module: Any) -> Tensor | float:
        if not isinstance(self.loss, VFLoss) or not self.loss.adaptive:
            return self.weight
        last = last_weight(module, self.encoder)
        if last is None:  # the encoder is frozen, so that there are no gradients to compare
            return self.weight
        loss = output if isinstance(output, Tensor) else output["loss"]
        ratio = gradient_ratio(loss, term, last)
        module.log("train/latent_alignment_ratio", ratio, batch_size=1)
        return self.weight * ratio


def entrance(module: nn.Module, decoder: str) -> str:
    """Return the dotted name of the module whose input are the latents.

    It is the decoder, or the 1x1 convolution before it, which has another name in the same parent.
    """
    parent = decoder.rpartition(".")[0]
    name = f"{parent}.post_quant_conv".lstrip(".")
    if name in dict(module.named_modules()):
        return name
    return decoder


def last_weight(module: nn.Module, encoder: str) -> nn.Parameter | None:
    """Return the last trained weight of the module that ``encoder`` matches, in order of definition.

    The result is ``None`` if the module is frozen.
    """
    name = only_module(module, encoder, "LatentAlignment: encoder")
    weights = [p for p in module.get_submodule(name).parameters() if p.requires_grad and p.ndim > 1]
    if not weights:
        return None
    return weights[-1]
