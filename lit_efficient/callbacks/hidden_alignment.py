"""REPA: align a block of a diffusion backbone, which sees noise, with a frozen encoder's view of the clean image.

    loss <- loss - weight * mean_i cos(h(x_i), f_i),    h: a three-layer MLP on the block's tokens, f: the encoder's
    iREPA   h: a convolution of three by three tokens;    f <- (f - share mean f) / std f, over the image's tokens
    HASTE   the term ends when its gradient at the block's output turns against the task's
    REG     the encoder's class token is one more token, noised and denoised with the latents: `variant.class_token`

Saves: training steps; the paper reports 17.5 times fewer to the same FID for SiT-XL on ImageNet with DINOv2
Costs: the encoder's forward in each step until `stop_at` (none with features in the batch), and the MLP while training
Source: Yu et al. (2024), https://arxiv.org/abs/2410.06940; iREPA: Singh et al. (2025),
    https://arxiv.org/abs/2512.10794; HASTE, without its alignment of attention maps: Wang et al. (2025),
    https://arxiv.org/abs/2505.16792; REG: Wu et al. (2025), https://arxiv.org/abs/2507.01467
"""

from lightning.pytorch import LightningModule, Trainer
from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_efficient.declaration import Phase
from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.losses.feature_matching import gradient_cosine, repa_loss, spatial_norm
from lit_efficient.mechanisms.alignment import (
    PROJECTIONS,
    Alignment,
    AlignmentHead,
    Call,
    GradientConflict,
    make_head,
    match_positions,
    mean,
    member,
    unknown_width,
)
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.models.libraries.teachers import CLASS, Teacher, find_teacher, only_module, width_of
from lit_efficient.surgery import moved, parents
from lit_efficient.traits import Trait

_UNMEASURED = {"below": 0, "measured": -1, "last": -1}  # measurements in a row; the step of the last; the last step


class HiddenAlignment(Alignment):
    """Align the tokens after a block of a diffusion backbone with a frozen encoder of the clean images (REPA).

    Beside TokenRouting those tokens alone that a block on the route ran on, as in SPRINT's own code.

    Where the clean image comes from: ``features`` of the batch, if they are cached there (then no encoder runs), else
    ``images`` of the batch, else the latents (``latents``, or the posterior's ``mean``) are decoded by the module's
    ``codec``. Images are in [-1, 1]; encoders of transformers and timm get them in their size, channels and
    normalisation, any other module as they are. The encoder is no part of the module; the head is left out of exports.

    Args:
        block: After which block, counted from 1 (the paper: 8 of 28), or a pattern for the end of its dotted name.
        teacher: A module, in code or by ``class_path``; ``data.NAME``, a network of the data module (``data.judge`` of
            ``LatentDigits``, the small classifier that it trains itself); the folder, hub name or ``config.json``
            (random weights) of a transformers vision model; ``None``: features are in the batch.
        teacher_layer: Pattern for the layer of the teacher; ``""`` is its output, of models of transformers and timm
            the last tokens or maps before pooling. One vector an image is refused.
        weight: Weight of the term, at least 0; 0 measures it and trains as without.
        stop_at: Optimizer step from which on neither term nor encoder is computed, or a ``GradientConflict`` that ends
            both for good, of which a resumed run knows (logged: ``train/hidden_alignment_cosine``); ``None``: never.
        projection: ``mlp`` of three layers, ``linear``, ``conv`` over a square of tokens, or ``none`` (equal widths).
        hidden: Hidden width of the MLP, at least 1.
        source: ``auto``, or the dotted path of images or features in a batch.
        image_size: Side that images are resized to; ``None``: as the encoder's config says.
        head: Widths and seed of the projection, and what is done to the encoder's tokens.

    Raises:
        ConfigurationError: For an argument out of range, without such a block, and without a clean image in the batch.
        ConflictError: If the teacher shares parameters with the module, and with manual optimization.
    """

    phase = Phase.FREEZE
    traits = frozenset({Trait.MATCHES_FEATURES, Trait.TRAINING_ONLY})
    needs = ("teacher",)
    heads_name = "hidden_alignment_heads"
    _below: int
    _measured: int
    _last: int
    helps = {
        "speed": (0, "fewer steps of diffusion, with an image encoder to learn from")
    }

    def __init__(
        self,
        block: int | str,
        teacher: str | nn.Module | None = None,
        teacher_layer: str = "",
        weight: float = 0.5,
        stop_at: int | GradientConflict | None = None,
        projection: str = "mlp",
        hidden: int = 2048,
        source: str = "auto",
        image_size: int | None = None,
        head: AlignmentHead = AlignmentHead(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        if isinstance(block, int) and block < 1:
            raise refusal("HiddenAlignment", "block", "at least 1 or a pattern", block)
        check_choice("HiddenAlignment", "projection", projection, (*PROJECTIONS, "conv"))
        check_number("HiddenAlignment", "hidden", hidden, least=1, whole=True)
        check_number("HiddenAlignment", "image_size", image_size, least=1, whole=True, null=True)
        if teacher is None and head.widths is None:
            raise ConfigurationError(
                "HiddenAlignment: without a teacher the features are in the batch: give head.widths"
            )
        self.block = block
        self.teacher = teacher
        self.teacher_layer = teacher_layer
        self.weight = weight
        self.stop_at = stop_at
        self.projection = projection
        self.hidden = hidden
        self.source = source
        self.image_size = image_size
        self.head, self.seed = head, head.seed
        self._clean: tuple[Any, dict[str, Tensor]] | None = None
        if teacher is None and head.class_layer is not None:
            raise refusal("HiddenAlignment", "head.class_layer", "None without a teacher", head.class_layer)
        self.check_common()
        self.load_state_dict({})
        if self._conflict is not None:
            if weight == 0:
                raise refusal("HiddenAlignment", "stop_at", "a step or None with weight 0", stop_at)
            self.traits = self.traits | {Trait.RETAINS_GRAPH}
            kept = "gradients are measured before the backward pass, and what was kept by operator can be used once"
            self.conflicts = {**self.conflicts, "ActivationCheckpointing(save=...)": f"{kept}: leave save out"}  # type: ignore[misc]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.global_step == 0:  # another run; of one that goes on a checkpoint is read later
            self.load_state_dict({})
        super().setup(trainer, pl_module, stage)

    def find(self, data: Any) -> Teacher | None:
        """The encoder, unless its features are in the batch."""
        if self.teacher is None:
            return None
        images: dict[str, Any] = {"image_size": self.image_size, "skip_tokens": self.head.skip_tokens, "tokens": True}
        images["class_layer"] = self.head.class_layer
        return find_teacher(self.teacher, [self.teacher_layer], who="HiddenAlignment", data=data, **images)

    def listens_to(self, module: nn.Module) -> list[str]:
        """The block."""
        if isinstance(self.block, str):
            return [only_module(module, self.block, "HiddenAlignment: block")]
        blocks = find_blocks(module, who="HiddenAlignment", example="block='layers.3'")
        if self.block > len(blocks):
            allowed = f"at most {len(blocks)}, the number of blocks"
            raise refusal("HiddenAlignment", "block", allowed, self.block)
        return [blocks[self.block - 1][0]]

    def build_heads(self, module: nn.Module) -> dict[str, nn.Module]:
        """The projection h."""
        (name,) = self.names(module)
        given = None if self._teacher is None else self._teacher.width(self.teacher_layer)
        ours, theirs = self.head.widths or (width_of(module, name), given)
        if ours is None or theirs is None:
            what = f"{name!r}" if ours is None else f"the teacher's {self.teacher_layer!r}"
            raise unknown_width("HiddenAlignment", what, "give head.widths: [block's, teacher's]")
        if self.projection == "none" and ours != theirs:
            raise ConfigurationError(
                f"HiddenAlignment: projection='none' needs equal widths, got {ours} and {theirs}; use mlp or linear"
            )
        return {"0": make_head(self.projection, ours, theirs, self.hidden)}

    def term(self, calls: Mapping[str, list[Call]], output: Any, module: nn.Module, batch: Any) -> Tensor:
        """Minus the mean cosine."""
        (name,) = self.names(module)
        if not calls[name]:
            raise ConfigurationError(f"HiddenAlignment: training_step never ran {name!r}")
        clean, ran = self.clean_features(module, batch), getattr(module.get_submodule(name), "tokens_run", None)
        terms = []
        for features in self.features(calls[name], module, name):
            if self.projection == "conv" and features.ndim == 4 and features.shape[2] != features.shape[3]:
                raise ConfigurationError("HiddenAlignment: projection='conv' is for squares of tokens; use mlp")
            ours, theirs = match_positions(_of_latents(module, name, features), clean, "HiddenAlignment")
            if self.head.spatial_norm is not None:
                theirs = spatial_norm(theirs, self.head.spatial_norm)
            mask = None if ran is None else features.new_zeros(features.shape[:2]).scatter(1, ran, 1.0)
            mask = None if mask is None else mask[:, : ours.shape[1]]  # without the class token
            terms.append(repa_loss(self.project(module, "0", ours, name, theirs), theirs, mask))
        return mean(terms)

    @property
    def _conflict(self) -> GradientConflict | None:
        return self.stop_at if isinstance(self.stop_at, GradientConflict) else None

    @property
    def until(self) -> int | None:
        """Optimizer step from which on nothing is computed, whatever gradients say."""
        return super().until if self._conflict is None else self._conflict.latest

    def active(self, module: Any) -> bool:
        """Whether the term counts in this step."""
        return super().active(module) and (self._last < 0 or module.trainer.global_step <= self._last)

    def scale(self, term: Tensor, output: Any, module: Any) -> Tensor | float:
        """The weight; now and then the gradients are compared."""
        step = module.trainer.global_step
        conflict = self._conflict
        if conflict is not None and step % conflict.every == 0 and step != self._measured:
            self._measured = step
            (name,) = self.names(module)
            loss = output if isinstance(output, Tensor) else output["loss"]
            cosine = gradient_cosine(loss, term, self.features(self._calls[name], module, name))
            cosine = module.trainer.strategy.reduce(cosine, reduce_op="mean")  # all ranks end at once
            module.log("train/hidden_alignment_cosine", cosine, batch_size=1)
            if value := float(cosine):  # 0: one has no gradient, as in the first step of a DiT, and says nothing
                self._below = self._below + 1 if value < conflict.below else 0
            if self._below >= conflict.patience:
                self._last = step
                rank_zero_info(f"HiddenAlignment: ends after step {step}, {self._below} times against the task")
        return self.weight

    def state_dict(self) -> dict[str, Any]:
        """What was measured."""
        state = {"below": self._below, "measured": self._measured, "last": self._last}
        return {} if self._conflict is None else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._below, self._measured, self._last = (state_dict.get(k, d) for k, d in _UNMEASURED.items())

    def clean_features(self, module: Any, batch: Any) -> Tensor:
        """The encoder's features of the batch's clean images, [B, N, D], [B, D, H, W] or [B, D]."""
        keys: Any = batch if isinstance(batch, Mapping) else ()
        source = self.source
        if source == "auto":
            source = next((key for key in ("features", "images") if key in keys), "auto")
        if source == "features" or self._teacher is None:
            return moved(member(batch, "features" if source == "auto" else source, "HiddenAlignment"), module.device)
        return self._seen(module, batch, source)[self.teacher_layer]

    @property
    def gives_class_token(self) -> bool:
        """Whether :meth:`class_token` may be asked."""
        return self.head.class_layer is not None

    def class_token(self, module: Any, batch: Any) -> Tensor:
        """The encoder's class token of the batch's clean images, [B, D]."""
        assert self._teacher is not None
        self._teacher.to(module.device)
        source = "images" if self.source == "auto" and "images" in batch else self.source
        return self._seen(module, batch, source)[CLASS]

    def _seen(self, module: Any, batch: Any, source: str) -> dict[str, Tensor]:
        """The encoder's features of the batch's clean images, computed once a step."""
        if self._clean is None or self._clean[0] is not batch or not module.training:
            keys: Any = batch if isinstance(batch, Mapping) else ()
            images = member(batch, source, "HiddenAlignment") if source != "auto" else self._decoded(module, keys)
            assert self._teacher is not None
            self._clean = batch, self._teacher.of_images(images)
        return self._clean[1]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int) -> None:
        self._clean = None

    def _decoded(self, module: Any, batch: Any) -> Tensor:
        latents = next((batch[key] for key in ("latents", "mean") if key in batch), None)
        codec = getattr(module, "codec", None)
        if latents is None or codec is None:
            raise ConfigurationError(
                "HiddenAlignment: no clean image: the batch must hold features, images, or latents (or mean) for a "
                f"module with a codec; it holds {sorted(map(str, batch)) or 'no names'}. Or name them by source="
            )
        return codec.decode(latents)


def _of_latents(module: nn.Module, block: str, features: Tensor) -> Tensor:
    """Tokens without the class token, which a DiT with one has last."""
    around = (module.get_submodule(name) for name in parents(block))
    beside = any(getattr(part, "class_token", None) is not None for part in around)
    return features[:, :-1] if beside else features
