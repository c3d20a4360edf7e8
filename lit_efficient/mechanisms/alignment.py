"""What techniques share that pull features towards those of a frozen teacher: taps, heads, and where heads are kept.

    loss <- loss + weight * term(head(student features), teacher features)    for optimizer steps < stop_at

The teacher lives in the technique, outside of the module. Layers are listened to through a mix-in that records nothing
between steps, so copies and pickles of the module are clean. Heads are submodules of the module, so that optimizers,
devices and data parallelism find them; in checkpoints they stand beside the weights, which load and export as if they
had never been.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.application.ledger import ledger
from lit_efficient.application.loss import LossHooks
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, refusal
from lit_efficient.internals.torch_dispatch import backward_runs
from lit_efficient.internals.torch_modules import LoadsPartly
from lit_efficient.internals.wraps import temporarily
from lit_efficient.losses.feature_matching import match_tokens, square_of, to_tokens
from lit_efficient.mechanisms.averages.weights import placed_like, whole
from lit_efficient.mechanisms.blocks.freezing import WideLayer
from lit_efficient.models.libraries.teachers import Teacher, feature_of, name_of
from lit_efficient.surgery import count, mix_in, own_draws
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

PROJECTIONS = ("none", "linear", "mlp")
_ASIDE = "training_only"  # in checkpoints: tensors by the name they have in the module
Call = tuple[tuple[Any, ...], dict[str, Any], Any]  # arguments, keyword arguments, output


class Tapped(nn.Module):
    """Mix-in of a layer that shows its calls to who listens at the moment."""

    _taps: dict[str, list[Call]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As without the mix-in."""
        output = super().forward(*args, **kwargs)
        for calls in () if backward_runs() else self._taps.values():
            calls.append((args, kwargs, output))  # in a backward pass a checkpoint repeats what was recorded
        return output


def tap(layer: nn.Module) -> None:
    """Make a layer one that can be listened to."""
    mix_in(layer, Tapped, _taps={})


@contextmanager
def listening(root: nn.Module, names: Sequence[str], who: str) -> Iterator[dict[str, list[Call]]]:
    """The calls of tapped layers by dotted name, as they happen while the context is open."""
    calls: dict[str, list[Call]] = {name: [] for name in names}
    layers: dict[str, Any] = {name: root.get_submodule(name) for name in calls}
    for name, layer in layers.items():
        layer._taps[who] = calls[name]
    try:
        yield calls
    finally:
        for layer in layers.values():
            layer._taps.pop(who, None)
        calls.clear()  # they hold the step's graph


class Heads(LoadsPartly, nn.ModuleDict):
    """Projections by name."""


class ConvolvedTokens(nn.Conv2d):
    """A convolution over tokens that fill a square, row by row: [B, N, D] -> [B, N, D']."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens to tokens."""
        return super().forward(tokens.transpose(1, 2).unflatten(2, square_of(tokens))).flatten(2).transpose(1, 2)


def make_head(kind: str, inputs: int, outputs: int, hidden: int = 2048, bias: bool = True) -> nn.Module:
    """A projection of the last dimension: [..., inputs] -> [..., outputs].

    Args:
        kind: ``none``, ``linear``, ``mlp`` of three layers with SiLU, as in REPA, or ``conv`` of three by three tokens
            of a square, as in iREPA.
        inputs: Width of the student's features.
        outputs: Width of the teacher's.
        hidden: Hidden width of the MLP.
        bias: Whether a linear one has a bias.
    """
    if kind == "none":
        return nn.Identity()
    if kind == "linear":
        head: nn.Module = nn.Linear(inputs, outputs, bias=bias)
    elif kind == "conv":
        head = ConvolvedTokens(inputs, outputs, 3, padding=1)
    else:
        sizes = (nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, outputs))
        head = nn.Sequential(*sizes)
    mix_in(head, WideLayer)  # it trains whole, whatever else is frozen
    return head


@dataclass(frozen=True)
class AlignmentHead:
    """What a technique's projection goes between, and how it is made.

    Args:
        widths: [width of the module's features, width of the teacher's], for those that do not say it, as features in
            a batch.
        seed: Seed of its weights.
        skip_tokens: How many of the teacher's tokens, class and register tokens before those of the patches, are left
            out; None: as many as the teacher says it has.
        spatial_norm: Share of their mean over an image that the teacher's tokens lose, above 0 and at most 1, before
            each feature is divided by its deviation over the image (iREPA, with projection ``conv``); None: as they
            are. For HiddenAlignment.
        class_layer: Pattern for the teacher's layer with the class token, or one vector an image, that a DiT with
            ``variant.class_token`` is to denoise beside the latents (REG). For HiddenAlignment.
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


@dataclass(frozen=True)
class GradientConflict:
    """When alignment has done its work: its gradient no longer points where the task's does.

    Args:
        below: Bound for the cosine between both gradients at the block's output, at least -1 and at most 1.
        every: Optimizer steps between two measurements, at least 1; each costs a backward pass above the block.
        patience: How many measurements in a row must be below the bound, at least 1.
        latest: Optimizer step from which on it is over in any case; None: it need not end.
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
    """Base of techniques that add a term between features of the module and of a frozen teacher.

    A subclass has the arguments ``teacher``, ``weight``, ``stop_at`` and ``seed``, and says which layers it listens to
    (:meth:`listens_to`), which heads it needs (:meth:`build_heads`) and what the term is (:meth:`term`).
    """

    phase = Phase.FREEZE  # after adapters have frozen the base, which is not to freeze the heads
    traits = frozenset({Trait.TRAINING_ONLY})
    alters = ("optimizer",)
    heads_name: ClassVar[str]  # attribute of the module; also the name of the logged value

    teacher: str | nn.Module | None
    weight: float
    stop_at: Any
    seed: int

    def __init__(self) -> None:
        super().__init__()
        self._teacher: Teacher | None = None
        self._calls: dict[str, list[Call]] = {}
        self._names: list[str] | None = None

    # What a subclass says.

    def find(self, data: Any) -> Teacher | None:
        """The teacher; ``data`` is the data module, if there is one."""
        raise NotImplementedError

    def listens_to(self, module: nn.Module) -> list[str]:
        """Dotted names of the layers to listen to, always in one order."""
        raise NotImplementedError

    def build_heads(self, module: nn.Module) -> dict[str, nn.Module]:
        """Projections by name; random numbers may be drawn."""
        raise NotImplementedError

    def term(self, calls: Mapping[str, list[Call]], output: Any, module: nn.Module, batch: Any) -> Tensor:
        """The alignment of one step, a scalar, before its weight."""
        raise NotImplementedError

    def scale(self, term: Tensor, output: Any, module: nn.Module) -> Tensor | float:
        """What the term is multiplied by."""
        return self.weight

    @property
    def until(self) -> int | None:
        """Optimizer step from which on nothing is computed."""
        stop_at: int | None = self.stop_at
        return stop_at

    # What the base does.

    def check_common(self) -> None:
        """Check the arguments that all have in common."""
        name = type(self).__name__
        if self.teacher is None:  # otherwise the transform reads the teacher
            self.traits = self.traits | {Trait.REFUSES_EARLY}
        check_number(name, "weight", self.weight, least=0)
        check_number(name, "stop_at", self.until, least=1, whole=True, null=True)
        if isinstance(self.teacher, str) and not self.teacher:
            raise refusal(name, "teacher", "a module or a name", self.teacher)

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments; a teacher that was given in code as its class and a digest of its weights."""
        with temporarily(self, teacher=None):
            arguments = super().arguments()
        return arguments | {"teacher": None if self.teacher is None else name_of(self.teacher)}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._names = None
        if self._teacher is None:
            self._teacher = self.find(trainer.datamodule)
        ours = {id(parameter) for parameter in pl_module.parameters()}
        if self._teacher is not None and any(id(p) in ours for p in self._teacher.network.parameters()):
            raise ConflictError(
                f"{type(self).__name__}: the teacher shares parameters with the module, which would be frozen: give a "
                "copy (copy.deepcopy) that the module does not hold"
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
        heads = Heads({name: head for name, head in made.items() if any(True for _ in head.parameters())})
        if heads:
            wide = torch.promote_types(next(heads.parameters()).dtype, torch.float32)
            setattr(module, self.heads_name, heads.to(wide) if like is None else heads.to(like.device, wide))
        size = count(heads.parameters())
        until = "" if self.until is None else f" until step {self.until}"
        return Report(
            f"{', '.join(n or type(module).__name__ for n in names)} by {self._described()}, weight {self.weight:g}"
            f"{until}; heads of {size:,} parameters train and are not exported",
            modules=tuple(names),
            parameters=size,
            details={"head_parameters": size},
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
        return make_head(projection, ours, theirs, hidden, bias)

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        return list(self.heads(module).parameters())

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        """See that the heads are stepped: one that was built over other parts gets them in its first group."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        lost = [p for p in self.trains(module) if id(p) not in stepped]
        optimizer.param_groups[0]["params"].extend(lost)
        return next(entry.report for entry in ledger(module) if entry.record["name"] == type(self).__name__)

    def names(self, module: nn.Module) -> list[str]:
        """The layers' names, searched for once a run."""
        if self._names is None:
            self._names = self.listens_to(module)
        return self._names

    def heads(self, module: nn.Module) -> nn.ModuleDict:
        """The heads that :meth:`transform` has built, by name."""
        return getattr(module, self.heads_name, None) or nn.ModuleDict()

    def active(self, module: Any) -> bool:
        """Whether the term counts in this step."""
        return self.until is None or module.trainer.global_step < self.until

    def watch_step(self, module: nn.Module, batch: Any) -> AbstractContextManager[None] | None:
        """Listen to the layers while the term counts."""
        return self._watched(module) if self.active(module) else None

    @contextmanager
    def _watched(self, module: nn.Module) -> Iterator[None]:
        with listening(module, self.names(module), type(self).__name__) as self._calls:
            yield

    def extra_loss(self, output: Any, module: Any, batch: Any) -> Tensor | None:
        """The weighted term; its value is logged as ``train/<heads_name>`` without the weight."""
        if not self.active(module):
            return self._nothing(module)
        if self._teacher is not None:
            self._teacher.to(module.device)
        with torch.set_grad_enabled(self.weight > 0):
            term = self.term(self._calls, output, module, batch)
        module.log(f"train/{self.heads_name.removesuffix('_heads')}", term.detach(), batch_size=1)
        return term * self.scale(term, output, module) if self.weight > 0 else self._nothing(module)

    def _nothing(self, module: nn.Module) -> Tensor | None:
        """No term; on several processes a zero, because all of them wait for a gradient of each parameter."""
        heads = list(self.heads(module).parameters())
        return torch.stack([p.sum() * 0.0 for p in heads]).sum() if heads and _several() else None

    def features(self, calls: Sequence[Call], module: nn.Module, name: str) -> list[Tensor]:
        """The outputs of a layer's calls, which must carry gradients if the layer trains."""
        found = [feature_of(output) for _, _, output in calls]
        trains = any(p.requires_grad for p in module.get_submodule(name).parameters())
        if trains and torch.is_grad_enabled() and any(not feature.requires_grad for feature in found):
            raise ConfigurationError(
                f"{type(self).__name__}: the output of {name!r} carries no gradient although the layer trains: it ran "
                "without one, as inside a reentrant checkpoint (use_reentrant=False does)"
            )
        return found

    def project(self, module: nn.Module, name: str, tokens: Tensor, layer: str, wanted: Tensor) -> Tensor:
        """Tokens of ``layer`` through the head ``name``, or as they are, to compare with those ``wanted``."""
        weights = list(self.heads(module)[name].parameters()) if name in self.heads(module) else []
        ends = (weights[0].shape[1], next(w for w in reversed(weights) if w.ndim > 1).shape[0]) if weights else None
        sides = ((repr(layer), tokens.shape[-1]), ("the teacher's layer", wanted.shape[-1]))
        for (what, width), expected in zip(sides, ends or (wanted.shape[-1],) * 2, strict=True):
            if width != expected:
                built = "its head was built for" if ends else "without a projection it is compared with"
                raise ConfigurationError(
                    f"{type(self).__name__}: {what} has features of width {width}, and {built} {expected}: give the "
                    "widths, or a projection"
                )
        return self.heads(module)[name](tokens) if weights else tokens

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._calls = {}

    # Checkpoints: weights as without the technique, the heads beside them.

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Move the heads out of the weights; a checkpoint of weights alone keeps their names only."""
        state = checkpoint["state_dict"]
        own = [key for key in state if key.startswith(f"{cls.heads_name}.")]
        alone = "callbacks" not in checkpoint
        aside = checkpoint["lit_efficient"].setdefault(_ASIDE, {})
        aside.update({key: None if alone else whole(state[key]) for key in own})
        checkpoint["state_dict"] = {key: tensor for key, tensor in state.items() if key not in own}

    def read_checkpoint(self, checkpoint: Mapping[str, Any], module: Any) -> None:
        aside: Mapping[str, Any] = checkpoint.get("lit_efficient", {}).get(_ASIDE, {})
        prefix = f"{self.heads_name}."
        kept = {key.removeprefix(prefix): t for key, t in aside.items() if key.startswith(prefix) and t is not None}
        if kept:
            own = self.heads(module).state_dict()
            self.heads(module).load_state_dict(
                {key: placed_like(t, own[key], own[key].dtype) for key, t in kept.items()}
            )

    def _described(self) -> str:
        return name_of(self.teacher) if self.teacher is not None else "features in the batch"


def match_positions(student: Tensor, teacher: Tensor, who: str) -> tuple[Tensor, Tensor]:
    """Tokens of both, [B, N, D] each; a teacher that gives one vector an image has nothing to say of positions.

    Raises:
        ConfigurationError: For such a teacher of a student that has positions.
    """
    if teacher.ndim == 2 and to_tokens(student).shape[1] > 1:
        raise ConfigurationError(
            f"{who}: the teacher's layer gives one vector for each image, {list(teacher.shape)}, and all positions "
            "would be pulled to the same: name a layer of tokens or maps in teacher_layer"
        )
    return match_tokens(student, teacher, "grid" if teacher.ndim > 2 else "auto")


def member(batch: Any, path: str, who: str) -> Any:
    """What a dotted path names in a batch: keys of mappings, positions in sequences.

    Raises:
        ConfigurationError: If there is no such thing.
    """
    target = batch
    for part in path.split("."):
        if isinstance(target, Mapping) and part in target:
            target = target[part]
        elif isinstance(target, list | tuple) and part.isdecimal() and int(part) < len(target):
            target = target[int(part)]
        else:
            has = sorted(map(str, target)) if isinstance(target, Mapping) else type(target).__name__
            raise ConfigurationError(f"{who}: the batch has no {path!r}; it has {has}")
    return target


def mean(values: Sequence[Tensor]) -> Tensor:
    """Mean of scalars."""
    return torch.stack(list(values)).mean()


def _several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
