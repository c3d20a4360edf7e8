"""What a claim of `verify` is, and what it is checked on: short fits of the user's own, which leave no trace.

    class Causal(Claim):
        name, sentence = "causal", "no position sees a later one"

        def check(self, subject: Subject) -> Verdict: ...

A claim does not trust what it tests: its reference is computed here, by autograd and arithmetic on what was recorded.
"""

import contextlib
import copy
import inspect
import logging
import math
import signal
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lit_efficient.application.gradients import gradients_of
from lit_efficient.declaration import held
from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource
from lit_efficient.evidence.verifying.recorded_calls import detached, floats, recorded
from lit_efficient.internals.lightning_data import combined_loader
from lit_efficient.internals.lightning_loops import accumulates
from lit_efficient.internals.lightning_strategies import run_alone
from lit_efficient.internals.lightning_trainer import arrived, set_default_root_dir, set_trainer, trainer_of
from lit_efficient.mechanisms.adapters.merge import whole_state
from lit_efficient.mechanisms.averages.batch_norm import silent
from lit_efficient.mechanisms.rewind import set_random_states
from lit_efficient.mechanisms.trials.steps import leaves_traces, quiet, schedule
from lit_efficient.traits import Trait, has_trait

T = TypeVar("T")
silence = partial(quiet, logging.WARNING, warns=False)  # what there is to say is in verdicts


@dataclass(frozen=True)
class Verdict:
    """What came out of the check of a claim.

    Args:
        claim: The claim's name.
        held: ``None``: it does not apply here, and ``why`` says why.
        number: What was measured.
        tolerance: The most that ``number`` may be.
        unit: What is measured, as in "largest relative difference of gradients".
        why: One sentence: what was compared with what, why it does not apply, or why it could not be tried.
        where: Of a failure: the first layer, in order of computation, whose output, gradient or weight differs.
        uncovered: What the claim did not cover.
    """

    claim: str
    held: bool | None
    number: float | None = None
    tolerance: float | None = None
    unit: str = ""
    why: str = ""
    where: str = ""
    uncovered: tuple[str, ...] = ()


class Claim(ABC):
    """One thing that ought to be true of a training. ``name`` is short; ``sentence`` is what is claimed."""

    name: ClassVar[str]
    sentence: ClassVar[str]

    @abstractmethod
    def check(self, subject: "Subject") -> Verdict:
        """Whether it is true of the subject's fit."""

    def measured(
        self,
        number: float,
        tolerance: float,
        unit: str,
        why: str,
        where: str | Callable[[], str] = "",
        uncovered: tuple[str, ...] = (),
    ) -> Verdict:
        """It holds if a number is at most a tolerance; one that is not finite never is. ``where`` is asked if not."""
        held = number <= tolerance
        place = "" if held else where if isinstance(where, str) else where()
        return Verdict(self.name, held, number, tolerance, unit, why, place, uncovered)

    def compared(
        self,
        off: Mapping[str, float],
        tolerance: float,
        unit: str,
        why: str,
        uncovered: tuple[str, ...] = (),
        order: Callable[[], list[str]] | None = None,
    ) -> Verdict:
        """It holds if all are off by at most a tolerance; the first that is not, in the ``order`` of layers if one is
        given, is where it fails.
        """

        def where() -> str:
            return first_layer(off, tolerance, [] if order is None else order())

        return self.measured(max(off.values(), default=0.0), tolerance, unit, why, where, uncovered)

    def idle(self, why: str) -> Verdict:
        """It does not apply, or cannot be tried."""
        return Verdict(self.name, None, why=why)


@dataclass
class Trace:
    """What was seen of a fit, on the CPU."""

    fit: Fit  # the fit, which is over
    slim: bool = False
    start: dict[str, Tensor] = field(default_factory=dict)  # weights and buffers before the first step, by name
    losses: list[float] = field(default_factory=list)  # of each batch; 0 of steps that return none
    batches: list[Any] = field(default_factory=list)  # as the training step got them, copied
    # by name, of each optimizer step, as they were before clipping; their 2-norms, if ``slim``
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    # after each optimizer step, the parameters by name; empty, if ``slim``
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    end: dict[str, Tensor] = field(default_factory=dict)  # weights and buffers after the last step, by name
    # names of the parameters that require a gradient when training starts
    trainable: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)  # names of those that techniques have frozen for now when it starts
    # names of the parameters that require one when some later batch begins
    thawed: set[str] = field(default_factory=set)
    # names that one parameter had before the fit, for each that had several
    tied: list[list[str]] = field(default_factory=list)
    # names of the layers that are in evaluation mode when the last batch begins
    resting: set[str] = field(default_factory=set)


class Subject:
    """The fit that claims are checked on, made anew for each run of a few steps below a folder.

    ``full`` takes a large model as it is; else ``shortened`` is what was done to it, as a clause. ``alone``: a fit of
    several processes is one of this process alone.
    """

    def __init__(
        self, source: FitSource, folder: Path, full: bool = False, shortened: str = "", alone: bool = True
    ) -> None:
        self.source, self.folder, self.full, self.shortened = source, Path(folder), full, shortened
        self.alone = alone
        self._plain: Trace | None = None

    def fit(self, change: Change = AS_IT_IS, *, steps: int = 1, traces: Callable[[Any], bool] = leaves_traces) -> Fit:
        """A fit of a few optimizer steps without validation, loggers, checkpoints and whatever else leaves traces."""
        with silence():
            fit = self.source.make(change)
        trainer = fit.trainer
        if self.alone and trainer.world_size > 1:
            run_alone(trainer)
        kept = [one for one in trainer.callbacks if not traces(one) and not has_trait(one, Trait.TRIES_STEPS)]
        trainer.callbacks = [*kept, _Short(steps)]
        trainer.loggers = [DummyLogger()] if trainer.loggers else []
        trainer.num_sanity_val_steps = 0
        trainer.accumulate_grad_batches = min(2, trainer.accumulate_grad_batches)
        trainer.limit_val_batches = min(1, trainer.limit_val_batches)  # schedules and the like may ask for its metrics
        set_default_root_dir(trainer, tempfile.mkdtemp(dir=self.folder))
        return fit

    def run(self, fit: Fit) -> None:
        """Train in silence."""
        with silence(), _interruptible():
            fit.run()

    @property
    def plain(self) -> Trace:
        """A slim trace of five steps of the fit as it is, made once."""
        if self._plain is None:
            self._plain = self.train(5, slim=True)
        return self._plain

    def train(
        self, steps: int, change: Change = AS_IT_IS, prepare: Callable[[Fit], object] = id, slim: bool = False
    ) -> Trace:
        """Train a few optimizer steps, and note what happens; ``prepare`` is called with the fit before it is run.

        ``slim`` keeps no weights between the steps, and of gradients their norms.
        """
        trace = Trace(self.fit(change, steps=steps), slim)
        trace.tied = ties(trace.fit.module)
        prepare(trace.fit)
        trace.fit.trainer.callbacks.append(Recorder(trace))
        self.run(trace.fit)
        return trace

    def within(
        self,
        probe: Callable[[Any, Any], T],
        change: Change = AS_IT_IS,
        *,
        steps: int = 0,
        traces: Callable[[Any], bool] = leaves_traces,
    ) -> T:
        """What ``probe(trainer, module)`` returns inside a fit, after some optimizer steps.

        Without any that is before the first batch, where techniques are applied and optimizers built. What the module
        logs there goes nowhere, and the fit is thrown away.
        """
        fit = self.fit(change, steps=steps + 1, traces=traces)
        inside = _Inside(probe, steps)
        fit.trainer.callbacks.append(inside)
        with contextlib.suppress(_Over):
            self.run(fit)
            raise ConfigurationError("verify: the fit was over before there was anything to see")
        return inside.found


class _Short(Callback):
    """Ends a fit after so many optimizer steps; schedules have been made for its whole length by then."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        loop = trainer.fit_loop
        loop.max_epochs = loop.epoch_loop.max_steps = -1  # what is resumed may be at its end
        loop.min_epochs = loop.epoch_loop.min_steps = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + self.steps


class Recorder(Callback):
    """Notes what happens in a fit, as the last of its callbacks."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trace.start = state_of(pl_module)
        self._step = trainer.global_step
        self.trace.later = set(held(pl_module))  # a technique forgets it at the end
        self.trace.trainable = {name for name, p in pl_module.named_parameters() if p.requires_grad}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.trace.batches.append(copy.deepcopy(batch))
        self.trace.thawed |= {name for name, p in pl_module.named_parameters() if p.requires_grad}
        self.trace.resting = {name for name, part in pl_module.named_modules() if not part.training}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        found = seen_gradients(pl_module, optimizer)
        kept = torch.Tensor.norm if self.trace.slim else torch.Tensor.clone
        self.trace.gradients.append({name: kept(gradient.detach()).cpu() for name, gradient in found.items()})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.trace.losses.append(0.0 if loss is None else float(loss))  # none: left out, or manual optimization
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            if not self.trace.slim:
                self.trace.weights.append({n: p.detach().to("cpu", copy=True) for n, p in pl_module.named_parameters()})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.trace.end = state_of(pl_module)


def seen_gradients(module: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The gradients before a step, by name; none where parameters are stepped in the backward pass."""
    names = {id(p): name for name, p in module.named_parameters()}
    try:
        return {names[id(p)]: gradient for p, gradient in gradients_of(optimizer).items() if id(p) in names}
    except ConfigurationError:  # which refuses to show what is gone
        return {}


class _Over(Exception):
    """A probe has seen what it wanted."""


class _Inside(Callback):
    def __init__(self, probe: Callable[[Any, Any], Any], steps: int) -> None:
        self.probe, self.steps = probe, steps
        self.found: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.steps:
            schedule(trainer, lambda _: None, lambda: self._look(trainer, pl_module), order=sys.maxsize)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self.steps > 0 and not accumulates(trainer):
            self._look(trainer, pl_module)

    def _look(self, trainer: Any, module: Any) -> None:
        with silent(module):
            self.found = self.probe(trainer, module)
        raise _Over


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's weights and buffers by name, on the CPU."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in whole_state(module).items()}


def ties(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def drawn_batches(trainer: Any, count: int) -> list[Any]:
    """The first training batches as the loader gives them, of a trainer that has its loaders."""
    found = [drawn for _, (drawn, *_) in zip(range(count), iter(combined_loader(trainer)))]
    if len(found) < count:
        raise ConfigurationError(f"verify: the training data has {len(found)} batches, and {count} are needed")
    return found


def first_batch(trainer: Any) -> Any:
    """The first training batch, as the training step gets it."""
    return arrived(trainer, drawn_batches(trainer, 1)[0])


def twin(module: Any) -> Any:
    """A deep copy of a module in a fit, which knows the same trainer."""
    copied = copy.deepcopy(module)
    set_trainer(copied, trainer_of(module))
    return copied


def loss_of(module: Any, batch: Any, batch_idx: int = 0, seed: int | dict[str, Any] = 0) -> Tensor:
    """The loss that the module's own training step returns for a batch; draws follow from the seed, or states.

    Within a fit techniques act on it, and so does the trainer's precision.
    """
    trainer = trainer_of(module)
    context = contextlib.nullcontext() if trainer is None else trainer.precision_plugin.train_step_context()
    if isinstance(seed, int):
        seed_everything(seed, verbose=False)
    else:
        set_random_states(seed)
    several = len(inspect.signature(module.training_step).parameters) > 1
    with context:
        output = module.training_step(batch, *([batch_idx] if several else []))
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ConfigurationError(f"{type(module).__name__}.training_step returned no loss")
    return loss


def gradients(module: Any, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of a loss by autograd alone, by the parameters' names; without those that it does not reach."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g.detach() for name, g in zip(named, found) if g is not None}


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """By name how far tensors of ``other`` are from those of ``one``, relative to these.

    A tensor far smaller than the others is compared with a thousandth of their common size: it may be rounding alone.
    One that only one of the two has differs by infinity, and so does one with a number that is not finite.
    """
    sizes = {name: t.detach().double().norm().item() / max(t.numel(), 1) ** 0.5 for name, t in one.items()}
    usual = max(sizes.values(), default=0.0) * 1e-3
    found = {}
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other or one[name].shape != other[name].shape:
            found[name] = float("inf")
            continue
        a, b = one[name].detach().cpu().double(), other[name].detach().cpu().double()
        off = (a - b).norm().item() / max(a.numel(), 1) ** 0.5
        size = max(sizes[name], usual)
        found[name] = 0.0 if torch.equal(a, b) else off / size if size and math.isfinite(off) else float("inf")
    return found


def order_of(module: Any, batch: Any) -> list[str]:
    """Names of the modules in the order in which a training step is done with them, and last those it does not call."""
    automatic = module.automatic_optimization  # else the step goes back by itself, and returns no loss
    no_loss = contextlib.nullcontext() if automatic else contextlib.suppress(ConfigurationError)
    with recorded(module, lambda _: None) as calls, torch.set_grad_enabled(not automatic), no_loss:
        loss_of(module, batch)
    return list(dict.fromkeys([*(call.name for call in calls), *(name for name, _ in module.named_modules())]))


def outputs_of(module: Any, batch: Any) -> dict[str, Any]:
    """What each module returns in a training step, in order of computation, and the loss; without gradients."""
    with recorded(module, detached) as calls, torch.no_grad():
        loss = loss_of(module, copy.deepcopy(batch))
    last = {call.name: call for call in calls}  # a network may be probed first
    return {**{call.name: call.output for call in calls if call is last[call.name]}, "the loss": loss.detach()}


def output_differences(right: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """In order of computation how far outputs are from the right ones; modules that only one has are passed over."""
    off = {}
    for name, output in right.items():
        if name in found:
            a, b = ({str(i): t for i, t in enumerate(floats(one))} for one in (output, found[name]))
            off[name] = max(difference(a, b).values(), default=0.0)
    return off


def tolerance_of(trainer: Any, module: nn.Module) -> float:
    """How far sums of the same numbers in another order may be apart, in the precision of a training."""
    low = "16" in str(trainer.precision) or any(p.itemsize < 4 for p in module.parameters() if p.is_floating_point())
    return 0.1 if low else 1e-3


def first_layer(differences: Mapping[str, float], tolerance: float, order: list[str]) -> str:
    """Of what differs the first, or of parameters the one whose module comes first in an order of computation."""
    place = {name: i for i, name in enumerate(order)}
    wrong = [name for name, by in differences.items() if not by <= tolerance]
    return min(wrong, key=lambda name: place.get(name.rpartition(".")[0], len(place)), default="")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C be Ctrl-C: Lightning turns it into an exit, and does not listen from then on."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from end
        raise
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                with contextlib.suppress(ValueError):  # not in the main thread
                    signal.signal(number, handler)
