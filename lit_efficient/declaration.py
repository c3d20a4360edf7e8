"""Base class of what a technique declares: its phase, its traits, what it changes and what it cannot be combined with.

A technique declares *what* it changes, in a few small methods, and never *when*:

* :meth:`Declaration.transform` changes the network, right after the module's own ``configure_model``;
* :meth:`Declaration.after_step` changes the weights after each optimizer step, before averages read them.

Methods that fewer techniques need are in mix-ins, each in one file with the code that calls them:

* :class:`lit_efficient.application.loss.LossHooks` weighs the losses of samples and adds terms to the loss;
* :class:`lit_efficient.application.gradients.GradientHooks` changes gradients between the backward pass and the step;
* :class:`lit_efficient.application.optimizers.OptimizerHooks` rewrites optimizers and declares trained parameters;
* :class:`lit_efficient.application.checkpoints.CheckpointHooks` changes what is saved, loaded and exported.

This file imports no Lightning.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import nn
from torch.optim import Optimizer

from lit_efficient.errors import ChecksTypes, ConfigurationError, ConflictError
from lit_efficient.traits import Trait, conflict_of, traits_of_class

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# "0 of 19 matrices", "0 B less per token", "0.0 MiB saved"
_NOTHING = re.compile(r"(?<![\w.,])0(\.0+)? (of \d|B\b|[KMGT]i?B\b|bytes)")
HELD = "_lit_efficient_held"  # attribute of a module with the names of parameters that are frozen for now


class Phase(IntEnum):
    """The order in which techniques act, whatever their order in the trainer's list. Ties are broken by class name."""

    ARCHITECTURE = 10  # decides which blocks there are: everything later must see the final network
    QUANTIZE = 20  # compresses the base weights before trainable parameters are added to them
    ADAPT = 30  # adds adapters to the base as it will be stored
    FREEZE = 40  # decides what trains, adapters included
    RECOMPUTE = 50  # wraps the finished forward: what is recomputed must be what was computed
    LAYOUT = 60  # changes memory formats and number formats, not values
    COMPILE = 70  # traces the result of all phases above
    SHARD = 80  # splits parameters that nothing may replace any more
    OPTIMIZER = 90  # sees the parameters as they will be stepped
    ROUND = 93  # stores what the optimizer's step computes, whatever class it has become
    STEP = 97  # moves the finished optimizer's step elsewhere
    LOSS = 100  # acts in every step, on what training_step returned
    GUARD = 101  # judges the gradients as the backward pass has left them, and may leave out the step
    GRADIENT = 102  # changes the gradients: centralises them, adds noise
    CLIP = 103  # bounds the gradients that the optimizer gets, after all changes; gradient_clip_val comes next
    CONSTRAIN = 105  # restores constraints on the weights after each step
    AVERAGE = 110  # averages the weights after the step


def format_bytes(size: float) -> str:
    """Return a number of bytes as text with a binary unit: ``1.5 GiB``."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"


@dataclass(frozen=True)
class Report:
    """What a technique changed. Logged once at the start of a fit and kept in the run's summary.

    A report that states none of something, such as "0 of 19 matrices", is an error, unless it is ``idle``. This holds
    for each figure below that is given, for ``details`` whose names end with ``saved``, and for the summary.

    Args:
        summary: One clause for people, for example ``"12 of 12 blocks, rates 0.04 to 0.50"``.
        modules: Dotted names of the modules that were changed; None if the technique changes no modules.
        parameters: Number of elements of the parameters that were changed; None if the technique changes none.
        bytes_saved: Bytes that are saved for certain; None if the number is not known.
        details: Further figures by name.
        idle: Whether nothing changes for a reason that is no mistake, which the summary states. Examples are a device
            that needs no copies, and one of several optimizers.
    """

    summary: str
    modules: tuple[str, ...] | None = None
    parameters: int | None = None
    bytes_saved: int | None = None
    details: Mapping[str, float | int | str] = field(default_factory=dict)
    idle: bool = False

    def figures(self) -> dict[str, float | int | str]:
        """Return the report as flat numbers and strings for a logger."""
        figures: dict[str, float | int | str] = {
            "summary": self.summary,
            "modules": len(self.modules or ()),
            "parameters": self.parameters or 0,
            "bytes_saved": self.bytes_saved or 0,
        }
        return figures | dict(self.details)

    def states_nothing(self) -> bool:
        """Return whether the report states that there was nothing to change or to save, and is not ``idle``.

        Example:
            >>> Report("AdamW: 0 of 19 matrices").states_nothing()
            True
            >>> Report("AdamW: 10 of 19 matrices", parameters=4096, bytes_saved=0).states_nothing()
            True
        """
        stated: list[object] = [self.parameters, self.bytes_saved]
        if self.modules is not None:
            stated.append(len(self.modules))
        for name, value in self.details.items():
            if name.endswith("saved"):
                stated.append(value)
        nothing = any(isinstance(number, int | float) and number <= 0 for number in stated)
        return not self.idle and (nothing or _NOTHING.search(self.summary) is not None)

    def checked(self, technique: str) -> "Report":
        """Return the report, unless it states nothing.

        Raises:
            ConfigurationError: If it does, because the technique is then of no use.
        """
        if self.states_nothing():
            raise ConfigurationError(
                f"{technique} would change nothing: {self.summary}. Choose other arguments, or leave {technique} out"
            )
        return self


class Declaration(ChecksTypes):
    """Base of all techniques. A subclass sets its phase and overrides the methods that it needs.

    Constructor arguments are kept as attributes of the same name and checked in ``__init__``.
    """

    # Place in the order; None if neither network, optimizer, loss nor gradients are changed.
    phase: ClassVar[Phase | None] = None
    # Facts that other code asks for. A subclass lists all its traits, also those that its base class lists.
    traits: frozenset[Trait] = frozenset()
    # Traits that are declared with a reason, for messages.
    reasons: ClassVar[Mapping[Trait, str]] = {}
    # What it cannot be combined with, besides the traits of lit_efficient.traits.CONFLICTS. Maps the name of a class,
    # or a trait, to the reason and the way out. ``Name(argument=...)`` applies if that argument is set, and
    # ``Name(group.argument='value')`` if it has this value. Optimizers may declare traits and conflicts, too.
    conflicts: ClassVar[Mapping[str, str] | Mapping[str | Trait, str]] = {}
    # What it is good for, of catalog.PURPOSES, the main purpose first -> rank and reason. A technique with a smaller
    # rank costs less. Rank 0 is no first choice: it needs another technique, or changes the result.
    helps: ClassVar[Mapping[str, tuple[int, str]]] = {}
    # What a checkpoint can only be restored into with the same technique: "weights", "optimizer".
    alters: ClassVar[tuple[str, ...]] = ()
    # The result of a step compared with a step without it: "same" up to the order of sums, "rounded" to fewer bits, or
    # "other".
    computes: ClassVar[str] = "other"
    # Arguments with a default that users must choose all the same: cards show them.
    needs: ClassVar[tuple[str, ...]] = ()
    # Whether it counts optimizer steps by ``trainer.global_step``. An argument may decide.
    counts_steps: bool = False
    # Set while memory is measured: random choices must then take the most memory.
    worst_case: bool = False

    def check(self, trainer: "Trainer", module: Any) -> None:
        """Raise :class:`ConflictError` if this trainer, strategy or module cannot work with the technique."""

    def transform(self, module: nn.Module) -> Report:
        """Change the network in place. Must work without a trainer and draw from random generators of its own."""
        raise NotImplementedError

    def after_step(self, optimizer: Optimizer, module: nn.Module) -> None:
        """Change weights after each step of ``optimizer``, without gradients; averages see the result.

        Change only what the optimizer steps and what requires a gradient: with adapters the rest is a frozen base. For
        an optimizer that averages weights by itself, the weights given here are those that it moves. A bound on them
        also holds for their average.
        """
        raise NotImplementedError

    def describe(self, module: nn.Module) -> Report | None:
        """Return what the technique acts on, if no other method returns a report."""
        return None

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, as primitives."""
        parameters = inspect.signature(type(self)).parameters.values()
        return {p.name: _primitive(getattr(self, p.name)) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the technique, as primitives that load with ``weights_only=True``."""
        return {
            "name": type(self).__name__,
            "phase": int(self.phase or 0),
            "arguments": self.arguments(),
            "alters": list(self.alters),
        }


_Kind = TypeVar("_Kind", bound=Declaration)
Wrap = tuple[str, Callable[..., Any]]  # name of a method of the module, and the function around it


class Hooks(Declaration):
    """Base of the mix-ins. Each adds methods that a technique may override, and applies them to a run."""

    @classmethod
    def check_all(cls, trainer: "Trainer", module: "LightningModule", techniques: Sequence[object]) -> None:
        """Raise :class:`ConflictError` if this trainer or module cannot work with ``techniques``, all of this class."""

    @classmethod
    def wraps(cls, trainer: "Trainer", module: "LightningModule", techniques: Sequence[object]) -> list[Wrap]:
        """Return the wraps on the module's methods that apply ``techniques``, all of this class, in a run."""
        return []


def hooks_of(kind: type) -> list[type[Hooks]]:
    """Return the mix-ins of a class of techniques."""
    return [base for base in kind.__mro__ if Hooks in base.__bases__]


def held(root: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that a technique has frozen for now: they count as trained."""
    return frozenset(root.__dict__.get(HELD, ()))


def techniques_of(trainer: object) -> list[Declaration]:
    """Return the trainer's techniques: callbacks in the order of its list, then its precision if it is a technique."""
    return [part for part in parts_of(trainer) if isinstance(part, Declaration)]


def technique_of(trainer: object, kind: type[_Kind]) -> _Kind | None:
    """Return the trainer's technique of a class, or ``None``."""
    return next((technique for technique in techniques_of(trainer) if isinstance(technique, kind)), None)


def parts_of(trainer: Any) -> list[Any]:
    """Return the trainer's callbacks, and its precision plugin, which may be a technique."""
    precision = getattr(getattr(trainer, "strategy", None), "precision_plugin", None)
    return [*trainer.callbacks, *([] if precision is None else [precision])]


def in_order(techniques: Iterable[Declaration]) -> list[Declaration]:
    """Return techniques in the order in which they act."""
    return sorted(techniques, key=lambda technique: (technique.phase or 0, type(technique).__name__))


def overrides(technique: Declaration, method: str) -> bool:
    """Return whether the technique's class overrides a method of the contract."""
    return defines(type(technique), method)


def defines(kind: type[Declaration], method: str) -> bool:
    """Return whether a class of techniques overrides a method of the contract."""
    home = getattr(getattr(kind, method, None), "__module__", __name__)
    return home != __name__ and not home.startswith("lit_efficient.application")


def check_conflicts(parts: Sequence[object]) -> None:
    """Refuse a set of callbacks, optimizers and data that contains a declared conflict, or a technique twice.

    Raises:
        ConflictError: Naming both sides, the reason and the way out.
    """
    ours = [part for part in parts if isinstance(part, Declaration | Optimizer)]
    traits = {id(part): traits_of_part(part) for part in parts}
    for part in ours:
        for key, reason in getattr(part, "conflicts", {}).items():
            for other in parts:
                if other is not part and _is_excluded(other, key):
                    _refuse(part, type(other).__name__ if isinstance(key, Trait) else key, reason)
    for part in ours:  # after all pairs by name, whose reasons are more specific
        for other in parts:
            if type(other) is type(part):
                continue
            names = type(part).__name__, type(other).__name__
            reason = conflict_of(names[0], traits[id(part)], names[1], traits[id(other)])
            if reason:
                _refuse(part, names[1], reason)
    seen: set[type] = set()
    for technique in ours:
        if type(technique) in seen and isinstance(technique, Declaration):
            name = type(technique).__name__
            raise ConflictError(f"{name} is listed twice in Trainer(callbacks=...); keep one of them")
        seen.add(type(technique))


def _refuse(part: object, other: str, reason: str) -> None:
    raise ConflictError(f"{type(part).__name__} cannot be combined with {other}: {reason}")


def traits_of_part(part: object) -> frozenset[Trait]:
    """Return the traits of a callback or optimizer: those that it declares, or that we know of Lightning's classes."""
    names = [base.__name__ for base in type(part).__mro__]
    return traits_of_class(names, frozenset(getattr(part, "traits", ())))


def _is_excluded(part: object, key: str | Trait) -> bool:
    """Return whether a key of ``conflicts`` means ``part``."""
    if isinstance(key, Trait):
        return key in traits_of_part(part)
    name, _, setting = key.removesuffix(")").partition("(")
    if name not in {base.__name__ for base in type(part).__mro__}:
        return False
    argument, _, wanted = setting.partition("=")
    if not argument:
        return True
    given = functools.reduce(lambda value, key: getattr(value, key, None), argument.split("."), part)
    if wanted == "...":
        return given is not None and given is not False
    return repr(given) == wanted


def _primitive(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:
        value = value.item()  # a NumPy number or a tensor, which a record cannot hold
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        items = value
        if isinstance(value, set | frozenset):
            items = sorted(value, key=str)
        return [_primitive(item) for item in items]
    if isinstance(value, Mapping):
        return {str(key): _primitive(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return _primitive(vars(value))
    return repr(value)
