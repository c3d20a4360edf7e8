"""Base class of techniques that align features with those of a frozen teacher: recording of layers, and projections.

    loss <- loss + weight * term(head(student features), teacher features)    for optimizer steps < stop_at

The teacher is an attribute of the technique and not part of the module. A mix-in records the calls of layers during a
step only, so that copies and pickles of the module contain no activations. Heads (projections) are submodules of the
module, so that optimizers, devices and data parallelism include them. Checkpoints store them apart from the weights,
which load and export as those of a module without heads.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.application.ledger import ledger
from lit_efficient.application.loss import LossHooks
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, checks_types, must_fit, refusal
from lit_efficient.internals.torch_dispatch import backward_runs
from lit_efficient.internals.torch_modules import LoadsPartly
from lit_efficient.internals.wraps import temporarily
from lit_efficient.losses.feature_matching import match_tokens, square_of, to_tokens
from lit_efficient.mechanisms.averages.weights import placed_like, whole
from lit_efficient.models.libraries.teachers import Teacher, feature_of, name_of
from lit_efficient.surgery import WideLayer, count, mix_in, own_draws
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

PROJECTIONS = ("none", "linear", "mlp")
_ASIDE = "training_only"  # key in checkpoints: tensors by their name in the module
Call = tuple[tuple[Any, ...], dict[str, Any], Any]  # arguments, keyword arguments, output


class Tapped(nn.Module):
    """Mix-in of a layer that appends its calls to lists while :func:`listening` is active."""

    _taps: dict[str, list[Call]]

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Return the layer's own output, and record the call."""
        output = super().forward(*args, **kwargs)
        if not backward_runs():  # gradient checkpointing repeats recorded calls in the backward pass
            for calls in self._taps.values():
                calls.append((args, kwargs, output))
        return output


def tap(layer: nn.Module) -> None:
    """Extend a layer, in place, so that :func:`listening` can record its calls."""
    mix_in(layer, Tapped, _taps={})


@contextmanager
def listening(root: nn.Module, names: Sequence[str], who: str) -> Iterator[dict[str, list[Call]]]:
    """Context that records the calls of tapped layers.

    Args:
        root: Module that contains the layers.
        names: Dotted names of the layers.
        who: Name of the technique. Techniques record independently of each other.

    Returns:
        The calls of each layer by name. The lists grow in the context and are emptied at its end.
    """
    calls: dict[str, list[Call]] = {name: [] for name in names}
    layers: dict[str, Any] = {name: root.get_submodule(name) for name in calls}
    for name, layer in layers.items():
        layer._taps[who] = calls[name]
    try:
        yield calls
    finally:
        for layer in layers.values():
            layer._taps.pop(who, None)
        calls.clear()  # the outputs keep the autograd graph of the step alive


def calls_with_gradient(calls: Sequence[Call]) -> list[Call]:
    """Return the calls whose output has a gradient, or all if none has.

    Tasks also run their network without gradients in a step, such as `FewStepDiffusion` for its targets.
    """
    return [call for call in calls if feature_of(call[2]).requires_grad] or list(calls)


class Heads(LoadsPartly, nn.ModuleDict):
    """Projections of a technique by name."""


class ConvolvedTokens(nn.Conv2d):
    """Convolution over tokens that form a square map, row by row: [B, N, D] -> [B, N, D']."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the convolved tokens, [B, N, D']."""
        maps = tokens.transpose(1, 2).unflatten(2, square_of(tokens))  # (B, D, H, W)
        return super().forward(maps).flatten(2).transpose(1, 2)


def make_head(kind: str, inputs: int, outputs: int, hidden: int = 2048, bias: bool = True) -> nn.Module:
    """Return a projection of the last dimension, [..., inputs] -> [..., outputs].

    Args:
        kind: ``none``, ``linear``, ``mlp`` (three layers with SiLU, as in REPA), ``mlp2`` (two layers with SiLU and
            inputs + outputs hidden features, as in Self-Flow) or ``conv`` (3 x 3 convolution over a square map of
            tokens, as in iREPA).
        inputs: Width of the student's features.
        outputs: Width of the teacher's features.
        hidden: Hidden width of the MLP.
        bias: Add a bias to the linear projection.
    """
    if kind == "none":
        return nn.Identity()
    if kind == "linear":
        head: nn.Module = nn.Linear(inputs, outputs, bias=bias)
    elif kind == "conv":
        head = ConvolvedTokens(inputs, outputs, 3, padding=1)
    elif kind == "mlp2":
        head = nn.Sequential(nn.Linear(inputs, inputs + outputs), nn.SiLU(), nn.Linear(inputs + outputs, outputs))
    else:
        sizes = (nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, outputs))
        head = nn.Sequential(*sizes)
    mix_in(head, WideLayer)  # the head trains in full, even if a technique freezes other layers
    return head


@checks_types
@dataclass(frozen=True)
class AlignmentHead:
    """Settings of the projection between the module's and the teacher's features.

    Args:
        widths: Width of the module's features, and width of the teacher's features. Needed for features in a batch and
            for layers whose width cannot be determined.
        seed: Seed of the projection's weights.
        skip_tokens: Number of the teacher's class and register tokens, before those of the patches, that are ignored.
            None takes the number from the teacher.
        spatial_norm: Share of the mean over the image, above 0 and at most 1, that is subtracted from the teacher's
            tokens before each feature is divided by its standard deviation over the image (iREPA, with projection
            ``conv``). None disables the normalisation. HiddenAlignment only.
        class_layer: Pattern for the teacher's layer that returns the class token, or one vector for each image, which a
            DiT with ``variant.class_token`` denoises together with the latents (REG). HiddenAlignment only.
    """

    widths: list[int] | None = None
    seed: int = 0
    skip_tokens: int | None = None
    spatial_norm: float | None = None
    class_layer: str | None = None

    def __post_init__(self) -> None:
        check_number("AlignmentHead", "spatial_norm", self.spatial_norm, above=0, most=1, null=True)
        check_number("AlignmentHead", "skip_tokens", self.skip_tokens, least=0, whole=True, null=True)
        if self.widths is not None and (len(self.widths) != 2 or min(self.widths) < 1):
            raise refusal("AlignmentHead", "widths", "two numbers of at least 1", self.widths)


@checks_types
@dataclass(frozen=True)
class GradientConflict:
    """Criterion that ends alignment when its gradient conflicts with the gradient of the task.

    Args:
        below: Bound of the cosine similarity between both gradients at the block's output, at least -1 and at most 1.
        every: Number of optimizer steps between two measurements, at least 1. Each measurement costs a backward pass
            from the loss to the block.
        patience: Number of consecutive measurements below the bound that end alignment, at least 1.
        latest: Optimizer step at which alignment ends in any case; None for no such step.
    """

    below: float = 0.0
    every: int = 50
    patience: int = 3
    latest: int | None = None

    def __post_init__(self) -> None:
        check_number("GradientConflict", "below", self.below, least=-1, most=1)
        check_number("GradientConflict", "every", self.every, least=1, whole=True)
        check_number("GradientConflict", "patience", self.patience, least=1, whole=True)
        check_number("GradientConflict", "latest", self.latest, least=1, whole=True, null=True)


class Alignment(LossHooks, OptimizerHooks, CheckpointHooks, Technique):
    """Base of techniques that add a loss term between features of the module and of a frozen teacher.

    A subclass has the arguments ``teacher``, ``weight``, ``stop_at`` and ``seed``. It defines the recorded layers
    (:meth:`listens_to`), the projections (:meth:`build_heads`) and the term (:meth:`term`).
    """

    phase = Phase.FREEZE  # after adapters have frozen the base, so that they do not freeze the heads
    traits = frozenset({Trait.TRAINING_ONLY})
    alters = ("optimizer",)
    heads_name: ClassVar[str]  # attribute of the module, from which the name of the logged value is derived

    teacher: Any  # a module or its name, the number of a block of the module itself, or None
    weight: float
    stop_at: Any
    seed: int
    own_block: int | None = None  # number of the block of the module itself that is the teacher

    def __init__(self) -> None:
        super().__init__()
        self._teacher: Teacher | None = None
        self._calls: dict[str, list[Call]] = {}
        self._names: list[str] | None = None

    # Methods of subclasses.

    def find(self, data: object) -> Teacher | None:
        """Return the teacher, or None if the batches contain its features.

        Args:
            data: The data module, or None.
        """
        raise NotImplementedError

    def listens_to(self, module: nn.Module) -> list[str]:
        """Return the dotted names of the layers to record, in the same order in each call."""
        raise NotImplementedError

    def build_heads(self, module: nn.Module) -> dict[str, nn.Module]:
        """Return projections by name. The global generators are seeded, so that weights may be drawn."""
        raise NotImplementedError

    def term(self, calls: Mapping[str, list[Call]], output: object, module: nn.Module, batch: object) -> Tensor:
        """Return the alignment loss of one step without its weight, a scalar.

        Args:
            calls: Recorded calls of each layer by name.
            output: Output of the training step.
            module: The module.
            batch: The batch.
        """
        raise NotImplementedError

    def scale(self, term: Tensor, output: object, module: nn.Module) -> Tensor | float:
        """Return the factor of the term."""
        return self.weight

    @property
    def until(self) -> int | None:
        """Optimizer step from which on the term is not computed, or None."""
        stop_at: int | None = self.stop_at
        return stop_at

    # Methods of this class.

    def check_common(self) -> None:
        """Check the arguments that all subclasses have."""
        name = type(self).__name__
        if self.teacher is None or self.own_block is not None:  # others need the teacher's network to transform
            self.traits = self.traits | {Trait.REFUSES_EARLY}
        self.counts_steps = self.stop_at is not None
        check_number(name, "weight", self.weight, least=0)
        check_number(name, "stop_at", self.until, least=1, whole=True, null=True)
        check_number(name, "seed", self.seed, whole=True)
        if not (self.teacher is None or isinstance(self.teacher, str | nn.Module | int)) or self.teacher == "":
            raise refusal(name, "teacher", "a module or a name", self.teacher)

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments. A teacher module is given by its class and a digest of its weights."""
        with temporarily(self, teacher=None):
            arguments = super().arguments()
        if self.teacher is not None:
            arguments["teacher"] = name_of(self.teacher) if self.own_block is None else self.teacher
        return arguments

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._names = None
        if self._teacher is None:
            self._teacher = self.find(trainer.datamodule)
        ours = {id(parameter) for parameter in pl_module.parameters()}
        if self._teacher is not None and any(id(p) in ours for p in self._teacher.network.parameters()):
            raise ConflictError(
                f"{type(self).__name__}: the teacher shares parameters with the module, and freezing the teacher would "
                "freeze them. Give a copy (copy.deepcopy) that is not part of the module"
            )

    def transform(self, module: nn.Module) -> Report:
        if self._teacher is None:
            self._teacher = self.find(None)
        self._names = None
        names = self.names(module)
        for name in names:
            tap(module.get_submodule(name))
        with own_draws(self.seed):
            made = self.build_heads(module)
        like = next((p for p in module.parameters() if p.is_floating_point()), None)
        heads = Heads({name: head for name, head in made.items() if list(head.parameters())})
        if heads:
            # float32 or wider, because usual learning rates are too small to change bfloat16 weights.
            heads.to(torch.promote_types(next(heads.parameters()).dtype, torch.float32))
            if like is not None:
                heads.to(like.device)
            setattr(module, self.heads_name, heads)
        size = count(heads.parameters())
        until = ""
        if self.until is not None:
            until = f" until step {self.until}"
        return Report(
            f"{', '.join(n or type(module).__name__ for n in names)} by {self._described()}, weight {self.weight:g}"
            f"{until}; heads of {size:,} parameters train and are not exported",
            modules=tuple(names),
            parameters=size or None,
            details={"head_parameters": size},
            idle=not self.weight,
        )

    def teacher_width(self, layer: str) -> tuple[str, int | None]:
        """Return a description of a layer of the teacher, and the width of its features if it is known."""
        return f"the teacher's {layer!r}", None if self._teacher is None else self._teacher.width(layer)

    def head_between(
        self,
        sides: Sequence[tuple[str, int | None]],
        given: Sequence[int] | None,
        argument: str,
        projection: str,
        hidden: int = 2048,
        bias: bool = True,
    ) -> nn.Module:
        """Return a projection from the features of a layer to those of the teacher. See :func:`make_head`.

        Args:
            sides: Descriptions and widths of both features. A width is ``None`` if it is unknown.
            given: Widths that the user has set. They replace those of ``sides``.
            argument: Argument with which the user sets them, for errors.
            projection: Kind of the projection.
            hidden: Hidden width of an MLP.
            bias: Whether a linear projection has a bias.

        Raises:
            ConfigurationError: If a width is unknown, or the widths differ without a projection.
        """
        who = type(self).__name__
        widths: Sequence[int | None] = given or [width for _, width in sides]
        for (side, _), width in zip(sides, widths, strict=True):
            if width is None:
                raise ConfigurationError(f"{who}: the width of the features of {side} is unknown: set {argument}")
        ours, theirs = widths
        assert ours is not None
        assert theirs is not None
        if projection == "none" and ours != theirs:
            raise ConfigurationError(
                f"{who}: projection='none' needs equal widths, but {sides[0][0]} has {ours} and {sides[1][0]} has "
                f"{theirs}; use linear or mlp"
            )
        wanted = f"a projection {projection!r} from {ours} to {theirs} with hidden={hidden}"
        with must_fit(who, wanted, "hidden"):
            return make_head(projection, ours, theirs, hidden, bias)

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        return list(self.heads(module).parameters())

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        """Add the heads to the optimizer's first group, unless the optimizer contains them."""
        # configure_optimizers may have chosen parameters before the heads existed.
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        lost = [p for p in self.trains(module) if id(p) not in stepped]
        optimizer.param_groups[0]["params"].extend(lost)
        return next(entry.report for entry in ledger(module) if entry.record["name"] == type(self).__name__)

    def names(self, module: nn.Module) -> list[str]:
        """Return the names of the recorded layers, which are searched once in a run."""
        if self._names is None:
            self._names = self.listens_to(module)
        return self._names

    def heads(self, module: nn.Module) -> nn.ModuleDict:
        """Return the heads that :meth:`transform` has built, by name."""
        return getattr(module, self.heads_name, None) or nn.ModuleDict()

    def active(self, module: Any) -> bool:
        """Return whether the term is part of the loss in the present step."""
        return self.until is None or module.trainer.global_step < self.until

    def watch_step(self, module: nn.Module, batch: object) -> AbstractContextManager[None] | None:
        """Return a context that records the layers, or None if the term is not part of the loss."""
        if not self.active(module):
            return None
        return self._watched(module)

    @contextmanager
    def _watched(self, module: nn.Module) -> Iterator[None]:
        with listening(module, self.names(module), type(self).__name__) as self._calls:
            yield

    def extra_loss(self, output: object, module: Any, batch: object) -> Tensor | None:
        """Return the weighted term. Its value without the weight is logged as ``train/<name>``."""
        if not self.active(module):
            return self._nothing(module)
        if self._teacher is not None:
            self._teacher.to(module.device)
        with torch.set_grad_enabled(self.weight > 0):
            term = self.term(self._calls, output, module, batch)
        module.log(f"train/{self.heads_name.removesuffix('_heads')}", term.detach(), batch_size=1)
        if self.weight > 0:
            return term * self.scale(term, output, module)
        return self._nothing(module)

    def _nothing(self, module: nn.Module) -> Tensor | None:
        """Return None, or in distributed training a zero that depends on the heads.

        Data parallelism waits for a gradient of each parameter.
        """
        heads = list(self.heads(module).parameters())
        if not heads or not _several():
            return None
        return torch.stack([p.sum() * 0.0 for p in heads]).sum()

    def features(self, calls: Sequence[Call], module: nn.Module, name: str) -> list[Tensor]:
        """Return the outputs of a layer's recorded calls.

        Raises:
            ConfigurationError: If the layer trains but an output has no gradient.
        """
        found = [feature_of(output) for _, _, output in calls]
        trains = any(p.requires_grad for p in module.get_submodule(name).parameters())
        if trains and torch.is_grad_enabled() and any(not feature.requires_grad for feature in found):
            raise ConfigurationError(
                f"{type(self).__name__}: the output of {name!r} carries no gradient although the layer trains, because "
                "it ran without gradients. If it is inside a reentrant checkpoint, set use_reentrant=False"
            )
        return found

    def project(self, module: nn.Module, name: str, tokens: Tensor, layer: str, wanted: Tensor) -> Tensor:
        """Return the student's tokens projected by a head, or unchanged if there is no such head.

        Args:
            module: The module.
            name: Name of the head.
            tokens: Features of the student, [..., D].
            layer: Name of the student's layer, for messages.
            wanted: Features of the teacher, [..., D'].

        Raises:
            ConfigurationError: If a width is not the one for which the head was built, or if the widths differ without
                a head.
        """
        heads = self.heads(module)
        width = tokens.shape[-1]
        if name not in heads:
            if width != wanted.shape[-1]:
                raise ConfigurationError(
                    f"{type(self).__name__}: {layer!r} has features of width {width}, and without a projection it is "
                    f"compared with features of width {wanted.shape[-1]}. Give the widths, or a projection"
                )
            return tokens
        matrices = [weight for weight in heads[name].parameters() if weight.ndim > 1]
        for what, found, expected in (
            (repr(layer), width, matrices[0].shape[1]),
            ("the teacher's layer", wanted.shape[-1], matrices[-1].shape[0]),
        ):
            if found != expected:
                raise ConfigurationError(
                    f"{type(self).__name__}: {what} has features of width {found}, and its head was built for "
                    f"{expected}. Give the widths, or a projection"
                )
        return heads[name](tokens)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._calls = {}

    # Checkpoints contain the same weights as without the technique, and the heads under a separate key.

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Move the heads from the weights to a separate key. A checkpoint of weights alone keeps their names only."""
        aside = checkpoint["lit_efficient"].setdefault(_ASIDE, {})
        weights = {}
        for key, tensor in checkpoint["state_dict"].items():
            if not key.startswith(f"{cls.heads_name}."):
                weights[key] = tensor
            elif "callbacks" in checkpoint:
                aside[key] = whole(tensor)
            else:
                aside[key] = None
        checkpoint["state_dict"] = weights

    def read_checkpoint(self, checkpoint: Mapping[str, Any], module: LightningModule) -> None:
        aside: Mapping[str, Any] = checkpoint.get("lit_efficient", {}).get(_ASIDE, {})
        prefix = f"{self.heads_name}."
        heads = self.heads(module)
        own = heads.state_dict()
        kept = {}
        for name, tensor in aside.items():
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and tensor is not None:
                kept[key] = placed_like(tensor, own[key], own[key].dtype)
        if kept:
            heads.load_state_dict(kept)

    def _described(self) -> str:
        if self.teacher is None:
            return "features in the batch"
        if self.own_block is not None:
            return f"block {self.own_block} of the module"
        return name_of(self.teacher)


def match_positions(student: Tensor, teacher: Tensor, who: str) -> tuple[Tensor, Tensor]:
    """Return the tokens of student and teacher at the same positions, [B, N, D] and [B, N, D'].

    Args:
        student: Features of the student.
        teacher: Features of the teacher.
        who: Name of the technique, for messages.

    Raises:
        ConfigurationError: If the teacher gives one vector for each image, but the student has several positions.
    """
    if teacher.ndim == 2 and to_tokens(student).shape[1] > 1:
        raise ConfigurationError(
            f"{who}: the teacher's layer gives one vector for each image, {list(teacher.shape)}, so all positions "
            "would be aligned with the same vector. Name a layer of tokens or maps in teacher_layer"
        )
    return match_tokens(student, teacher, "grid" if teacher.ndim > 2 else "auto")


def member(batch: object, path: str, who: str) -> Any:
    """Return the item of a batch at a dotted path, which consists of keys of mappings and indices of sequences.

    Args:
        batch: The batch.
        path: The path, such as ``features.0``.
        who: Name of the technique, for messages.

    Raises:
        ConfigurationError: If the batch has no such item.
    """
    target = batch
    for part in path.split("."):
        if isinstance(target, Mapping) and part in target:
            target = target[part]
        elif isinstance(target, list | tuple) and part.isdecimal() and int(part) < len(target):
            target = target[int(part)]
        else:
            has: object = type(target).__name__
            if isinstance(target, Mapping):
                has = sorted(map(str, target))
            raise ConfigurationError(f"{who}: the batch has no {path!r}; it has {has}")
    return target


def mean(values: Sequence[Tensor]) -> Tensor:
    """Return the mean of scalars."""
    return torch.stack(list(values)).mean()


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
