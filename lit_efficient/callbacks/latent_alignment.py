"""VF loss: train an autoencoder whose latents relate to each other as a frozen encoder's features do.

    L = w_a weight (mean relu(|cos(z_i, z_j) - cos(f_i, f_j)| - m1) + mean relu(1 - m2 - cos(W z_i, f_i)))
    w_a = |grad of the module's loss| / |grad of L|, both at the encoder's last layer

Saves: training steps of the diffusion model on the latents; the paper reports FID 2.11 on ImageNet in 64 epochs
Costs: the encoder's forward, W while training, and for w_a a backward pass of each loss down to the latent
Source: Yao et al. (2025), https://arxiv.org/abs/2501.01423
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
from lit_efficient.models.libraries.teachers import Teacher, find_teacher, input_width_of, only_module
from lit_efficient.traits import Trait


class LatentAlignment(Alignment):
    """Align the latents of an autoencoder under training with features of a frozen encoder (VF loss).

    The latents are what the decoder is called with; positions are compared on their grid, to which the features are
    interpolated. Cosines between positions use the latents themselves, those with the features a linear map without
    bias, which trains with the module and is left out of exports.

    Args:
        teacher: A module, in code or by ``class_path``; ``data.NAME``, a network of the data module; the folder, hub
            name or ``config.json`` (random weights) of a transformers vision model.
        teacher_layer: Pattern for the layer of the teacher; ``""`` is its output, of models of transformers and timm
            the last tokens or maps before pooling. One vector an image is refused.
        weight: Weight of the term, at least 0; 0 measures it and trains as without.
        loss: Its margins, and whether the weight is adaptive.
        stop_at: Optimizer step from which on neither term nor encoder is computed; ``None``: never.
        encoder: Pattern for the end of the encoder's name: at its last weight the gradients are compared.
        decoder: Pattern for the end of the name of the module that is called with the latents. A ``post_quant_conv``
            beside it, as in diffusers' AutoencoderKL, is called with them first and takes its place.
        images: Dotted path of the images in a batch.
        image_size: Side that images are resized to for the teacher; ``None``: as its config says.
        head: Widths and seed of the linear map.

    Raises:
        ConfigurationError: For an argument out of range, without such modules, and without images in the batch.
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
        "speed": (0, "an autoencoder whose latents diffusion learns in fewer steps")
    }

    def __init__(
        self,
        teacher: str | nn.Module,
        teacher_layer: str = "",
        weight: float = 0.1,
        loss: VFLoss = VFLoss(),  # noqa: B008 (frozen)
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
            if (given := getattr(head, name)) is not None:
                raise refusal("LatentAlignment", f"head.{name}", "None: it is for HiddenAlignment", given)
        self.head, self.seed = head, head.seed
        self.check_common()

    def check(self, trainer: Any, module: Any) -> None:
        traits = traits_of(trainer.strategy)
        if traits.shards and not traits.is_zero and self.loss.adaptive:
            raise ConflictError(
                f"LatentAlignment: the adaptive weight takes gradients of one weight, which {traits.name} gathers for "
                "its block alone: set loss.adaptive=False, or use strategy='ddp'"
            )

    def find(self, data: Any) -> Teacher:
        assert self.teacher is not None
        images = {"image_size": self.image_size, "skip_tokens": self.head.skip_tokens, "tokens": True}
        return find_teacher(self.teacher, [self.teacher_layer], who="LatentAlignment", data=data, **images)

    def listens_to(self, module: nn.Module) -> list[str]:
        only_module(module, self.encoder, "LatentAlignment: encoder")
        return [entrance(module, only_module(module, self.decoder, "LatentAlignment: decoder"))]

    def build_heads(self, module: nn.Module) -> dict[str, nn.Module]:
        (name,) = self.names(module)
        latents = (f"the input of {name!r}", input_width_of(module, name))
        sides = [latents, self.teacher_width(self.teacher_layer)]
        argument = "head.widths: [latents', teacher's]"
        return {"0": self.head_between(sides, self.head.widths, argument, "linear", bias=False)}

    def term(self, calls: Mapping[str, list[Call]], output: Any, module: nn.Module, batch: Any) -> Tensor:
        (name,) = self.names(module)
        if not calls[name]:
            raise ConfigurationError(
                f"LatentAlignment: training_step never called {name!r} (its forward): name what it calls in decoder"
            )
        assert self._teacher is not None
        features = self._teacher.of_images(member(batch, self.images, "LatentAlignment"))[self.teacher_layer]
        terms = []
        for args, kwargs, _ in calls[name]:
            latents = feature_of(args or kwargs)
            ours, theirs = match_positions(latents, features, "LatentAlignment")
            projected = self.project(module, "0", ours, name, theirs)
            terms.append(vf_loss(ours, projected, theirs, self.loss.distance_margin, self.loss.cosine_margin))
        return mean(terms)

    def scale(self, term: Tensor, output: Any, module: Any) -> Tensor | float:
        last = last_weight(module, self.encoder) if self.loss.adaptive else None
        if last is None:
            return self.weight
        loss = output if isinstance(output, Tensor) else output["loss"]
        ratio = gradient_ratio(loss, term, last)
        module.log("train/latent_alignment_ratio", ratio, batch_size=1)
        return self.weight * ratio


def entrance(module: nn.Module, decoder: str) -> str:
    """Dotted name of what is called with the latents: the decoder, or the 1x1 convolution in front of it."""
    name = ".".join([*decoder.split(".")[:-1], "post_quant_conv"])
    return name if name in dict(module.named_modules()) else decoder


def last_weight(module: nn.Module, encoder: str) -> nn.Parameter | None:
    """The last weight that trains, in order of definition, of the module that a pattern names; frozen it has none."""
    name = only_module(module, encoder, "LatentAlignment: encoder")
    weights = [p for p in module.get_submodule(name).parameters() if p.requires_grad and p.ndim > 1]
    return weights[-1] if weights else None
