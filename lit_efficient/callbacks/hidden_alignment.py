"""REPA: align a block of a diffusion backbone, which gets noise, with a frozen encoder's features of the clean image.

    loss <- loss - weight * mean_i cos(h(x_i), f_i),    h: a three-layer MLP on the block's tokens, f: the encoder's
    iREPA   h: a convolution of three by three tokens;    f <- (f - share mean f) / std f, over the image's tokens
    LayerSync   f: the tokens after a later block of the same network, without gradient and without a projection
    Self-Flow   f: those of the network with averaged weights (EMA), which sees the same latents less noisy. Each token
                has one of two times, and f all of them at the earlier one: `TimestepSampling.second_share`
    HASTE   the term ends when its gradient at the block's output points against the gradient of the task
    REG     the encoder's class token is one more token, noised and denoised with the latents: `variant.class_token`

Saves: training steps; the paper reports 17.5 times fewer to the same FID for SiT-XL on ImageNet with DINOv2
Costs: the encoder's forward in each step until `stop_at` (none with features in the batch), and the MLP in training;
    nothing of both with LayerSync; with Self-Flow a forward pass of the network, and 6 width^2 operations for each
    token and block of a DiT, a third of the block's, because the modulation depends on the token
Source: Yu et al. (2024), https://arxiv.org/abs/2410.06940; iREPA: Singh et al. (2025),
    https://arxiv.org/abs/2512.10794; HASTE, without its alignment of attention maps: Wang et al. (2025),
    https://arxiv.org/abs/2505.16792; REG: Wu et al. (2025), https://arxiv.org/abs/2507.01467; LayerSync:
    Haghighi et al. (2025), https://arxiv.org/abs/2510.12581; Self-Flow: Chefer et al. (2026),
    https://arxiv.org/abs/2603.06507
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_efficient.declaration import Phase
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.losses.feature_matching import gradient_cosine, repa_loss, spatial_norm
from lit_efficient.mechanisms.alignment import (
    PROJECTIONS,
    Alignment,
    AlignmentHead,
    Call,
    GradientConflict,
    calls_with_gradient,
    listening,
    match_positions,
    mean,
    member,
)
from lit_efficient.mechanisms.averages.shadow import ShadowWeights
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.models.libraries.teachers import CLASS, Teacher, feature_of, find_teacher, only_module, width_of
from lit_efficient.models.probes.modes import call_with, evaluating
from lit_efficient.surgery import moved, parents
from lit_efficient.traits import Trait

_AVERAGE = "average."  # prefix of a teacher that is a block of the module with averaged weights


class HiddenAlignment(Alignment):
    """Align the tokens after a block of a diffusion backbone with a frozen encoder of the clean images (REPA).

    With TokenRouting only the tokens are aligned that a block on the route has processed, as in SPRINT's own code.

    The encoder's features come from the first of these: ``features`` of the batch, if they are cached there (then no
    encoder runs); ``images`` of the batch; or latents of the batch (``latents``, or the posterior's ``mean``), which
    the module's ``codec`` decodes. Images are in [-1, 1]. Encoders of transformers and timm get them in their size,
    channels and normalisation, other modules get them unchanged. The encoder is not a part of the module, and exports
    leave the head out.

    Args:
        block: Number of the block, counted from 1 (the paper: 8 of 28), or a pattern for the end of its dotted name.
        teacher: A module, in code or by ``class_path``; ``data.NAME``, a network of the data module (``data.judge`` of
            ``LatentDigits``, a small classifier that it trains by itself); the folder, hub name or ``config.json``
            (random weights) of a transformers vision model. ``None``: features are in the batch. A number: that later
            block of the module itself, counted from 1 (LayerSync, which has projection ``none``). ``average.N``: that
            block N with the averaged weights of the trainer's `EMA` (Self-Flow, which has projection ``mlp2``, weight
            0.8 and decay 0.9999). Then ``training_step`` must return a function ``cleaner`` that runs the network on
            less noisy inputs, as `LatentDiffusion` does with a ``timestep_sampling.second_share``.
        teacher_layer: Pattern for the name of the teacher's layer. ``""`` is its output; of models of transformers and
            timm it is the last tokens or maps before pooling. A layer with one vector per image raises an error.
        weight: Weight of the term, at least 0. With 0 the term is computed and logged, but not added.
        stop_at: Optimizer step from which on neither term nor encoder is computed; or a ``GradientConflict``, which
            ends both for good, also for a resumed run (logged: ``train/hidden_alignment_cosine``); ``None`` for never.
        projection: ``mlp`` of three layers, ``mlp2`` of two, ``linear``, ``conv`` over a square of tokens, or ``none``
            (equal widths).
        hidden: Hidden width of the MLP, at least 1.
        source: ``auto``, or the dotted path of images or features in a batch.
        image_size: Side to which images are resized; ``None``: the side in the encoder's config.
        head: Widths and seed of the projection, and settings for the encoder's tokens.

    Raises:
        ConfigurationError: For an argument out of range, if there is no such block, and if the batch has no clean
            image.
        ConflictError: If the teacher shares parameters with the module, and with manual optimization.
    """

    phase = Phase.FREEZE
    traits = frozenset({Trait.MATCHES_FEATURES, Trait.TRAINING_ONLY})
    needs = ("teacher",)
    heads_name = "hidden_alignment_heads"
    helps = {"speed": (0, "fewer steps of diffusion, if an image encoder's features help")}

    def __init__(
        self,
        block: int | str,
        teacher: str | nn.Module | int | None = None,
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
        if not isinstance(block, str) and (not isinstance(block, int) or block < 1):
            raise refusal("HiddenAlignment", "block", "a whole number of at least 1 or a pattern", block)
        check_choice("HiddenAlignment", "projection", projection, (*PROJECTIONS, "mlp2", "conv"))
        check_number("HiddenAlignment", "hidden", hidden, least=1, whole=True)
        check_number("HiddenAlignment", "image_size", image_size, least=1, whole=True, null=True)
        if teacher is None and head.widths is None:
            raise ConfigurationError(
                "HiddenAlignment: without a teacher the features are in the batch, so that their width is unknown: set "
                "head.widths"
            )
        self.own_block = _own_block(teacher, block)
        self._averaged = isinstance(teacher, str) and self.own_block is not None
        self.block = block
        self.teacher = teacher
        self.teacher_layer = teacher_layer
        self.weight = weight
        self.stop_at = stop_at
        self.projection = projection
        self.hidden = hidden
        self.source = source
        self.image_size = image_size
        self.head = head
        self.seed = head.seed
        self._conflict = stop_at if isinstance(stop_at, GradientConflict) else None
        self._clean: tuple[object, dict[str, Tensor]] | None = None  # the last batch and its features
        self._below = 0  # consecutive measurements below the limit
        self._measured = -1  # step of the last measurement
        self._last = -1  # last step with the term, once it has ended
        if (teacher is None or self.own_block is not None) and head.class_layer is not None:
            raise refusal("HiddenAlignment", "head.class_layer", "None without an encoder", head.class_layer)
        if self.own_block is not None and teacher_layer:
            raise refusal("HiddenAlignment", "teacher_layer", "'' for a teacher that is a block", teacher_layer)
        self.check_common()
        if self._conflict is not None:
            if weight == 0:
                raise refusal("HiddenAlignment", "stop_at", "a step or None with weight 0", stop_at)
            self.traits = self.traits | {Trait.RETAINS_GRAPH}
            once = (
                "gradients are measured before the backward pass, and results that are kept by operator can be used "
                "only once: leave save out"
            )
            self.conflicts = {**self.conflicts, "ActivationCheckpointing(save=...)": once}  # type: ignore[misc]

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        if not self._averaged:
            return
        if _shadow(trainer) is None:
            raise ConfigurationError(
                f"HiddenAlignment: teacher={self.teacher!r} is the module with averaged weights: add "
                "EMA(decay=0.9999, warmup=None)"
            )
        traits = traits_of(trainer.strategy)
        if traits.shards:
            raise ConflictError(
                f"HiddenAlignment: teacher={self.teacher!r} needs whole weights, and {traits.name} shards them: use "
                "strategy='ddp'"
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.global_step == 0:  # a new run; for a resumed one the checkpoint is read later
            self.load_state_dict({})
        super().setup(trainer, pl_module, stage)

    def find(self, data: object) -> Teacher | None:
        """Return the encoder, or ``None`` if its features are in the batch, or of the module itself."""
        if self.teacher is None or self.own_block is not None:
            return None
        return find_teacher(
            self.teacher,
            [self.teacher_layer],
            who="HiddenAlignment",
            data=data,
            image_size=self.image_size,
            skip_tokens=self.head.skip_tokens,
            tokens=True,
            class_layer=self.head.class_layer,
        )

    def listens_to(self, module: nn.Module) -> list[str]:
        """Return the name of the block, and of the block of the module that is its teacher."""
        if isinstance(self.block, str):
            found = [only_module(module, self.block, "HiddenAlignment: block")]
        else:
            found = [self._numbered(module, "block", self.block)]
        if self.own_block is not None:
            found.append(self._numbered(module, "teacher", self.own_block))
        return found

    def _numbered(self, module: nn.Module, argument: str, number: int) -> str:
        blocks = find_blocks(module, who="HiddenAlignment", example="block='layers.3'")
        if number > len(blocks):
            raise refusal("HiddenAlignment", argument, f"at most {len(blocks)}, the number of blocks", number)
        return blocks[number - 1][0]

    def build_heads(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return the projection h."""
        name, *own = self.names(module)
        sides = [(repr(name), width_of(module, name))]
        if own:
            sides.append((repr(own[0]), width_of(module, own[0])))
        else:
            sides.append(self.teacher_width(self.teacher_layer))
        argument = "head.widths: [block's, teacher's]"
        return {"0": self.head_between(sides, self.head.widths, argument, self.projection, self.hidden)}

    def term(self, calls: Mapping[str, list[Call]], output: object, module: nn.Module, batch: object) -> Tensor:
        """Return minus the mean cosine."""
        name, *own = self.names(module)
        if not calls[name]:
            raise ConfigurationError(
                f"HiddenAlignment: training_step never ran {name!r}: set block to the name of a module that it runs"
            )
        with_gradient = {one: calls_with_gradient(recorded) for one, recorded in calls.items()}
        if self._averaged:
            features = _without_class_token(module, own[0], self._average_features(output, module, own[0]))
            targets = [features] * len(with_gradient[name])
        elif own:
            targets = [_without_class_token(module, own[0], feature_of(one[2])) for one in with_gradient[own[0]]]
        else:
            targets = [self.clean_features(module, batch)] * len(with_gradient[name])
        routed = getattr(module.get_submodule(name), "tokens_run", None)  # set by TokenRouting
        terms = []
        for features, clean in zip(self.features(with_gradient[name], module, name), targets):
            if self.projection == "conv" and features.ndim == 4 and features.shape[2] != features.shape[3]:
                raise ConfigurationError("HiddenAlignment: projection='conv' needs a square of tokens; use mlp")
            ours, theirs = match_positions(_without_class_token(module, name, features), clean, "HiddenAlignment")
            if self.head.spatial_norm is not None:
                theirs = spatial_norm(theirs, self.head.spatial_norm)
            mask = None
            if routed is not None:
                mask = features.new_zeros(features.shape[:2]).scatter(1, routed, 1.0)[:, : ours.shape[1]]
            terms.append(repa_loss(self.project(module, "0", ours, name, theirs), theirs, mask))
        return mean(terms)

    def _average_features(self, output: object, module: Any, name: str) -> Tensor:
        """Return the output of a block of the module with averaged weights, for the cleaner view of the batch."""
        view = output.get("cleaner") if isinstance(output, Mapping) else None
        if view is None:
            raise ConfigurationError(
                f"HiddenAlignment: teacher={self.teacher!r} needs a less noisy view of the batch, but "
                f"{type(module).__name__}.training_step returned no function `cleaner`: set "
                "timestep_sampling.second_share of LatentDiffusion, for example to 0.25"
            )
        shadow = _shadow(module.trainer)
        assert shadow is not None  # check() has seen it
        average = shadow.average(module)
        weights = {}
        for key, parameter in module.named_parameters():
            weights[key] = parameter.detach()  # before the first update, and of parameters that are not averaged
            if average is not None and key in average:
                weights[key] = moved(average[key], parameter.device).to(parameter.dtype)
        with torch.no_grad(), evaluating(module), listening(module, [name], f"{type(self).__name__} average") as calls:
            call_with(module, weights, view)
            return feature_of(calls[name][-1][2])

    @property
    def until(self) -> int | None:
        """Optimizer step from which on nothing is computed, whatever the gradients are."""
        if self._conflict is None:
            return super().until
        return self._conflict.latest

    def active(self, module: LightningModule) -> bool:
        """Return whether the term is computed in this step."""
        return super().active(module) and (self._last < 0 or module.trainer.global_step <= self._last)

    def scale(self, term: Tensor, output: Any, module: Any) -> Tensor | float:
        """Return the weight. Every few steps, compare the gradients of the term and of the loss."""
        step = module.trainer.global_step
        conflict = self._conflict
        if conflict is None or step % conflict.every or step == self._measured:
            return self.weight
        self._measured = step
        name = self.names(module)[0]
        loss = output if isinstance(output, Tensor) else output["loss"]
        cosine = gradient_cosine(loss, term, self.features(calls_with_gradient(self._calls[name]), module, name))
        cosine = module.trainer.strategy.reduce(cosine, reduce_op="mean")  # all ranks must end in the same step
        module.log("train/hidden_alignment_cosine", cosine, batch_size=1)
        value = float(cosine)
        if value:  # 0 if one of them has no gradient, as in the first step of a DiT: not a measurement
            self._below = self._below + 1 if value < conflict.below else 0
        if self._below >= conflict.patience:
            self._last = step
            rank_zero_info(
                f"HiddenAlignment: ends after step {step}: its gradient was against the task's in {self._below} "
                "measurements"
            )
        return self.weight

    def state_dict(self) -> dict[str, object]:
        """Return the results of the measurements."""
        if self._conflict is None:
            return {}
        return {"below": self._below, "measured": self._measured, "last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._below = state_dict.get("below", 0)
        self._measured = state_dict.get("measured", -1)
        self._last = state_dict.get("last", -1)

    def clean_features(self, module: Any, batch: object) -> Tensor:
        """Return the encoder's features of the batch's clean images, [B, N, D], [B, D, H, W] or [B, D]."""
        source = self.source
        if source == "auto" and isinstance(batch, Mapping):
            source = next((key for key in ("features", "images") if key in batch), "auto")
        if source == "features" or self._teacher is None:
            return moved(member(batch, "features" if source == "auto" else source, "HiddenAlignment"), module.device)
        return self._seen(module, batch, source)[self.teacher_layer]

    @property
    def gives_class_token(self) -> bool:
        """True if :meth:`class_token` can be called."""
        return self.head.class_layer is not None

    def class_token(self, module: LightningModule, batch: Any) -> Tensor:
        """Return the encoder's class token of the batch's clean images, [B, D]."""
        assert self._teacher is not None
        self._teacher.to(module.device)
        source = self.source
        if self.source == "auto" and "images" in batch:
            source = "images"
        return self._seen(module, batch, source)[CLASS]

    def _seen(self, module: nn.Module, batch: object, source: str) -> dict[str, Tensor]:
        """Return the encoder's features of the batch's clean images, computed once per step."""
        if self._clean is None or self._clean[0] is not batch or not module.training:
            if source == "auto":
                images = self._decoded(module, batch)
            else:
                images = member(batch, source, "HiddenAlignment")
            assert self._teacher is not None
            self._clean = batch, self._teacher.of_images(images)
        return self._clean[1]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._clean = None

    def _decoded(self, module: nn.Module, batch: object) -> Tensor:
        """Return images that the module's codec decodes from the batch's latents."""
        keys = batch if isinstance(batch, Mapping) else {}
        latents = keys.get("latents", keys.get("mean"))
        codec = getattr(module, "codec", None)
        if latents is None or codec is None:
            raise ConfigurationError(
                "HiddenAlignment: no clean image: the batch must have features, images, or latents (or mean) for a "
                f"module with a codec, but has {sorted(map(str, keys)) or 'no names'}. Or set source to their path"
            )
        return codec.decode(latents)


def _own_block(teacher: object, block: int | str) -> int | None:
    """Return the number of the module's block that is the teacher, or ``None`` for another teacher.

    Raises:
        ConfigurationError: If it is not a later block.
    """
    number: Any = teacher
    if isinstance(teacher, str) and teacher.startswith(_AVERAGE):
        digits = teacher.removeprefix(_AVERAGE)
        number = int(digits) if digits.isdecimal() else 0
    if not isinstance(number, int):
        return None
    first = block + 1 if isinstance(block, int) else 1
    if isinstance(number, bool) or number < first:
        raise refusal("HiddenAlignment", "teacher", "as a number that of a later block than block", teacher)
    return number


def _shadow(trainer: Any) -> ShadowWeights | None:
    """Return the technique that averages the weights, if there is one."""
    return next((one for one in trainer.callbacks if isinstance(one, ShadowWeights)), None)


def _without_class_token(module: nn.Module, block: str, features: Tensor) -> Tensor:
    """Return the tokens of the latents. A DiT with a class token has it last."""
    around = (module.get_submodule(name) for name in parents(block))
    has_class_token = any(getattr(part, "class_token", None) is not None for part in around)
    if has_class_token:
        return features[:, :-1]
    return features
