"""What a technique declares: its place in the one order, what it changes, what it cannot be combined with.

A technique says *what* it changes, in a few small methods, and never *when*:

* :meth:`Declaration.transform` changes the network, right after the module's own ``configure_model``;
* :meth:`Declaration.on_read` changes it earlier, while its weights are read from files, for who would act first;
* :meth:`Declaration.rewrite_optimizer` changes each optimizer, right after ``configure_optimizers``;
* :meth:`Declaration.trains` names the parameters that must be in one of them;
* :meth:`Declaration.after_step` changes the weights after each step, before averages see them;
* :meth:`LossHooks.sample_weights` weighs the samples' losses, right after ``training_step``;
* :meth:`LossHooks.extra_loss` adds a term to the loss, there, too.

This file knows neither Lightning nor how techniques are applied (:mod:`lit_efficient.application`).
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, is_dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.errors import ConflictError

if TYPE_CHECKING:
    from lit_efficient.internals.hugging_face_loading import Replacing

HELD = "_lit_efficient_held"  # the note on a module of what is frozen for now


class Phase(IntEnum):
    """The one order in which techniques act, whatever their order in the trainer's list. Ties: by class name."""

    ARCHITECTURE = 10  # decides which blocks there are: everything later must see the final network
    QUANTIZE = 20  # compresses the base weights before anything trainable is put beside them
    ADAPT = 30  # puts adapters on the base as it will be stored
    FREEZE = 40  # decides what trains, adapters included
    RECOMPUTE = 50  # wraps the finished forward: what is recomputed must be what was computed
    LAYOUT = 60  # changes memory formats and number formats, not values
    COMPILE = 70  # traces what all of the above made
    SHARD = 80  # splits parameters that nothing may replace any more
    OPTIMIZER = 90  # sees the parameters as they will be stepped
    ROUND = 93  # stores what the optimizer's step computes, whatever class it has become
    STEP = 97  # moves the finished optimizer's step elsewhere
    LOSS = 100  # acts in every step, on what the module returned
    CONSTRAIN = 105  # says what holds for the weights after each step
    AVERAGE = 110  # shadows the weights after the step


@dataclass(frozen=True)
class Report:
    """What a technique touched: logged once at the start of a fit and kept in the run's summary.

    Args:
        summary: One clause for people, as in ``"12 of 12 blocks, rates 0.04 to 0.50"``.
        modules: Dotted names of the modules that were changed.
        parameters: Number of elements of the parameters that were touched.
        bytes_saved: Bytes that this saves for certain, or 0.
        details: Further figures by name.
    """

    summary: str
    modules: tuple[str, ...] = ()
    parameters: int = 0
    bytes_saved: int = 0
    details: Mapping[str, float | int | str] = field(default_factory=dict)

    def figures(self) -> dict[str, float | int | str]:
        """The report as flat numbers and strings for a logger."""
        figures: dict[str, float | int | str] = {"summary": self.summary, "modules": len(self.modules)}
        figures |= {"parameters": self.parameters, "bytes_saved": self.bytes_saved}
        return figures | dict(self.details)


class Declaration:
    """What every technique says of itself. A subclass names its phase and overrides what it needs of the methods below.

    Constructor arguments are kept as attributes of the same name and checked in ``__init__``.
    """

    phase: ClassVar[Phase | None] = None  # None: neither network nor optimizer nor loss is touched
    # What it cannot work with: name of a class -> why, and the way out. ``Name(argument=...)`` is one for which that
    # argument is set, ``Name(group.argument='value')`` one that was given this value. Optimizers may have some, too.
    conflicts: ClassVar[Mapping[str, str]] = {}
    # What to use it for, of catalog.PURPOSES, the main one first -> rank and reason. The smaller the rank, the less it
    # costs; 0: it needs something else beside it, or is another training, and is not what to try first.
    helps: ClassVar[Mapping[str, tuple[int, str]]] = {}
    alters: ClassVar[tuple[str, ...]] = ()  # what a checkpoint must agree on: "weights", "optimizer"
    # What a step computes beside one without it: the "same" but for the order of sums, "rounded" to fewer bits, or what
    # is an "other" training.
    computes: ClassVar[str] = "other"
    after_sharding: ClassVar[bool] = False  # may transform a network whose parameters are DTensors already
    worst_case: bool = False  # set while memory is measured: draw nothing by chance that would spare some
    batch_weight: float | None = None  # how much the batch under way weighs in its step, by tokens perhaps
    refuses_early: bool = False  # its transform refuses by names, kinds and shapes alone: an empty copy will do
    needs_numbers: bool = True  # its transform reads the weights: false, and they may be read when all is sharded
    training_only: ClassVar[bool] = False  # checkpoints' weights are as without it: rebuilding a network leaves it out
    spares: ClassVar[bool] = False  # each step takes less than is measured
    draws_work: ClassVar[bool] = False  # what a step computes is drawn: figures of one step say little of another
    of_batch: ClassVar[str] = ""  # why its part of a batch's loss is not the mean of those of the batch's parts
    of_rows: ClassVar[str] = ""  # why it needs the rows of tokens whole
    sees_ahead: ClassVar[str] = (
        ""  # why a token of a training step follows from later ones, while in evaluation none does
    )
    leaves_traces: ClassVar[bool] = False  # writes or stops outside of the process: steps that are undone leave it out
    tries_steps: ClassVar[bool] = False  # runs steps before the first one and undoes them
    changes_accumulation: ClassVar[bool] = False  # sets trainer.accumulate_grad_batches in the run
    seeds_batches: ClassVar[bool] = False  # each batch is read with draws of its own, in whatever process
    resumes_with: ClassVar[Mapping[str, str]] = {}  # key of a config that a resumed run does not heed -> why
    needs: ClassVar[tuple[str, ...]] = ()  # arguments that one must choose though they have a default: cards show them
    keeps: ClassVar[str] = ""  # key of checkpoint["lit_efficient"] under which trim_checkpoint describes its parameters

    # What a subclass overrides.

    def check(self, trainer: Any, module: Any) -> None:
        """Raise :class:`ConflictError` if this trainer, strategy or module cannot work with the technique."""

    def transform(self, module: nn.Module) -> Report:
        """Change the network in place; must not need a trainer, and draws from generators of its own."""
        raise NotImplementedError

    def on_read(self, prefix: str) -> "Replacing | None":
        """What replaces layers of a network while its weights are read; asked of the technique that acts first.

        Args:
            prefix: Of the network's names in the module, with the dot.
        """
        return None

    def prepare_parameters(self, module: nn.Module) -> None:
        """Set ``requires_grad``, in each fit, right before ``configure_optimizers`` picks the parameters by it."""

    def trains(self, module: nn.Module) -> Iterable[nn.Parameter]:
        """What must be stepped, now or later in the run: a parameter of these that no optimizer holds is an error."""
        return ()

    def adapters(self, module: nn.Module) -> Iterable[nn.Parameter]:
        """Those of :meth:`trains` that must learn: a module none of whose ones get a gradient is an error where its
        frozen weights are read all the same, and a warning where they are not, unless others of the same name but for
        its numbers, such as experts, have one.
        """
        return ()

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        """Change one optimizer in place (see :func:`lit_efficient.surgery.become`)."""
        raise NotImplementedError

    def after_step(self, optimizer: Optimizer, module: nn.Module) -> None:
        """Change weights after each step of ``optimizer``, without gradients; averages see what this leaves.

        Change what the optimizer steps and what requires a gradient: beside adapters the rest is a frozen base.
        An optimizer that averages by itself offers the weights that it moves: the average keeps what is convex (a
        bound), and follows any other change.
        """
        raise NotImplementedError

    def write_checkpoint(self, checkpoint: dict[str, Any], module: Any) -> None:
        """Change what is about to be saved. Unlike ``on_save_checkpoint`` it also acts on weights-only checkpoints."""

    def read_checkpoint(self, checkpoint: Mapping[str, Any], module: Any) -> None:
        """Learn, in any stage, that the weights of ``checkpoint`` are about to be loaded."""

    def describe(self, module: nn.Module) -> Report | None:
        """What the technique acts on, where none of the methods above reports it."""
        return None

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Take out of a checkpoint what the transform makes redundant; called for as long as the module lives."""

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        """Whether what the transform put into the network is still there; adapters that were merged are not."""
        return True

    @classmethod
    def check_checkpoint(cls, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        """Raise :class:`CheckpointError` if the weights of a checkpoint do not belong to the transformed module."""

    @classmethod
    def convert_export(cls, state: dict[str, Any], checkpoint: Mapping[str, Any], module: Any = None) -> None:
        """Put into ``state``, and into ``module`` where there is one, the weights that training only imitated.

        Args:
            state: Weights by name, as an export will hold them; changed in place.
            checkpoint: What they were read from, with what :meth:`trim_checkpoint` wrote there.
            module: The trained module, for a comparison of what it computes then.
        """
        raise NotImplementedError

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments by name, as primitives."""
        parameters = inspect.signature(type(self)).parameters.values()
        return {p.name: _primitive(getattr(self, p.name)) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps of the technique, as primitives that load with ``weights_only=True``."""
        return {
            "name": type(self).__name__,
            "phase": int(self.phase or 0),
            "arguments": self.arguments(),
            "alters": list(self.alters),
        }


class LossHooks(Declaration):
    """What a technique says, too, that changes the loss of each step: ``class Weighting(LossHooks, Technique)``."""

    retains_graph: ClassVar[bool] = False  # takes gradients before the backward pass: what it needs is read twice

    def sample_weights(self, output: Mapping[str, Any], module: nn.Module) -> Tensor:
        """Weights [B] for the samples' losses, from what ``training_step`` returned."""
        raise NotImplementedError

    def weigh_inside(
        self, module: nn.Module, weights_of: Callable[[Mapping[str, Any]], Tensor]
    ) -> AbstractContextManager[None] | None:
        """For a module that returns no sample losses: a context around ``training_step`` that weighs them in there.

        ``weights_of`` gives the product of all techniques' weights [B] for what they would have been returned.
        """
        return None

    def watch_step(self, module: nn.Module, batch: Any) -> AbstractContextManager[None] | None:
        """A context around ``training_step`` in which the technique may listen to what the network computes."""
        return None

    def extra_loss(self, output: Any, module: nn.Module, batch: Any) -> Tensor | None:
        """A scalar to add to the loss that ``training_step`` returned in ``output``; ``None`` adds nothing."""
        raise NotImplementedError


def held(root: nn.Module) -> frozenset[str]:
    """Names of the parameters that a technique has frozen for now: they belong to what trains."""
    return frozenset(root.__dict__.get(HELD, ()))


def techniques_of(trainer: Any) -> list[Declaration]:
    """The trainer's techniques: those of its callbacks, in the order of its list, and its precision where it is one."""
    return [part for part in parts_of(trainer) if isinstance(part, Declaration)]


def parts_of(trainer: Any) -> list[Any]:
    """The trainer's callbacks, and what else of it may be a technique."""
    precision = getattr(getattr(trainer, "strategy", None), "precision_plugin", None)
    return [*trainer.callbacks, *([] if precision is None else [precision])]


def in_order(techniques: Iterable[Declaration]) -> list[Declaration]:
    """Declarations in the order in which they act."""
    return sorted(techniques, key=lambda technique: (technique.phase or 0, type(technique).__name__))


def overrides(technique: Declaration, method: str) -> bool:
    """Whether the technique's class defines one of the methods of the contract."""
    return defines(type(technique), method)


def defines(kind: type[Declaration], method: str) -> bool:
    """Whether a class of techniques defines one of the methods of the contract."""
    base = LossHooks if issubclass(kind, LossHooks) else Declaration
    ours, theirs = (getattr(cls, method, None) for cls in (kind, base))
    return getattr(ours, "__func__", ours) is not getattr(theirs, "__func__", theirs)  # of classmethods, too


def check_conflicts(parts: Sequence[object]) -> None:
    """Refuse a set of callbacks, optimizers and data that contains a declared conflict, or a technique twice.

    Raises:
        ConflictError: Naming both sides, the reason and the way out.
    """
    seen: set[type] = set()
    for part in (part for part in parts if isinstance(part, Declaration | Optimizer)):
        for other, reason in getattr(part, "conflicts", {}).items():
            if any(_is_excluded(one, other) for one in parts):
                raise ConflictError(f"{type(part).__name__} cannot be combined with {other}: {reason}")
    for technique in (part for part in parts if isinstance(part, Declaration)):
        name = type(technique).__name__
        if type(technique) in seen:
            raise ConflictError(f"{name} is listed twice in Trainer(callbacks=...); keep one of them")
        seen.add(type(technique))


def _is_excluded(part: object, key: str) -> bool:
    """Whether a key of ``conflicts`` means ``part``."""
    name, _, setting = key.removesuffix(")").partition("(")
    argument, _, wanted = setting.partition("=")
    given: Any = functools.reduce(lambda value, key: getattr(value, key, None), argument.split("."), part)
    fits = (given is not None and given is not False) if wanted == "..." else repr(given) == wanted
    return name in {base.__name__ for base in type(part).__mro__} and (fits or not argument)


def _primitive(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:
        value = value.item()  # a number of NumPy's, or a tensor: neither is what a record may hold
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=str) if isinstance(value, set | frozenset) else value
        return [_primitive(item) for item in items]
    if isinstance(value, Mapping):
        return {str(key): _primitive(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return _primitive(vars(value))
    return repr(value)
