"""Claims of `verify`, and the short fits of the user's own module on which they are checked. They leave no traces.

    class Causal(Claim):
        name, sentence, unit = "causal", "no position sees a later one", "relative change"

        def check(self, subject: Subject) -> Verdict: ...

A claim does not trust the code that it tests. Its reference is computed here, by autograd and by arithmetic on recorded
values.
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
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer

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
from lit_efficient.surgery import computed
from lit_efficient.traits import Trait, has_trait

T = TypeVar("T")
Tensors: TypeAlias = Mapping[str, Tensor]  # by name
Differences: TypeAlias = Mapping[str, float]  # relative differences by name
Batch: TypeAlias = Any  # tensors in any structure
silence = partial(quiet, logging.WARNING, warns=False)  # verdicts replace warnings


@dataclass(frozen=True)
class Verdict:
    """Result of the check of a claim.

    Args:
        claim: Name of the claim.
        held: True if the claim holds, False if it fails, ``None`` if it does not apply or could not be tried.
        number: Measured number.
        tolerance: Largest number with which the claim holds.
        unit: Meaning of the number, such as "largest relative difference of gradients".
        why: Description of the comparison, or reason why the claim does not apply or could not be tried.
        where: For a failure, the first layer in order of computation with a wrong output, gradient or weight.
        uncovered: Parts of the training that the check did not cover.
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
    """A property that a training should have.

    Attributes:
        name: Short name.
        sentence: The property in a sentence.
        unit: Meaning of the number that the check measures.
    """

    name: ClassVar[str]
    sentence: ClassVar[str]
    unit: ClassVar[str] = "largest relative difference"

    @abstractmethod
    def check(self, subject: "Subject") -> Verdict:
        """Return whether the property holds for the subject's fit."""

    def measured(
        self,
        number: float,
        tolerance: float,
        why: str,
        where: str | Callable[[], str] = "",
        uncovered: tuple[str, ...] = (),
        unit: str = "",
    ) -> Verdict:
        """Return a verdict that holds if ``number`` is at most ``tolerance``, and so never for NaN.

        Args:
            number: The measured number.
            tolerance: The largest number with which the claim holds.
            why: Description of the comparison.
            where: Place of a failure, or a function that finds it; the function is called for a failure only.
            uncovered: Parts that the check did not cover.
            unit: Meaning of the number, if it is not the claim's usual one.
        """
        holds = number <= tolerance
        place = ""
        if not holds:
            # Finding the place takes more steps, which are made for a failure only.
            place = where if isinstance(where, str) else where()
        return Verdict(self.name, holds, number, tolerance, unit or self.unit, why, place, uncovered)

    def compared(
        self,
        off: Differences,
        tolerance: float,
        why: str,
        uncovered: tuple[str, ...] = (),
        order: Callable[[], list[str]] = list,
    ) -> Verdict:
        """Return a verdict that holds if all differences are at most ``tolerance``.

        ``order`` returns the names of the layers in order of computation, to find the first difference.
        """

        def where() -> str:
            return first_layer(off, tolerance, order())

        return self.measured(max(off.values(), default=0.0), tolerance, why, where, uncovered)

    def idle(self, why: str) -> Verdict:
        """Return the verdict that the claim does not apply or could not be tried."""
        return Verdict(self.name, None, why=why)


@dataclass
class Trace:
    """Record of a fit, with all tensors on the CPU.

    Args:
        fit: The fit, after its end.
        slim: If true, ``weights`` is empty and ``gradients`` holds norms.
        start: Weights and buffers before the first step.
        losses: Loss of each batch; 0 for a step that returned none.
        batches: Copies of the batches, as the training step received them.
        gradients: For each optimizer step the gradients before clipping, or their 2-norms.
        weights: The parameters after each optimizer step.
        end: Weights and buffers after the last step.
        trainable: Parameters that require a gradient when training starts.
        later: Parameters that techniques have frozen temporarily at that time.
        thawed: Parameters that require a gradient at the start of some batch.
        tied: For each parameter that had several names before the fit, these names.
        resting: Layers in evaluation mode at the start of the last batch.
    """

    fit: Fit
    slim: bool = False
    start: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    end: dict[str, Tensor] = field(default_factory=dict)
    trainable: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)
    thawed: set[str] = field(default_factory=set)
    tied: list[list[str]] = field(default_factory=list)
    resting: set[str] = field(default_factory=set)


class Subject:
    """The fit on which claims are checked. It is made anew for each run of a few steps.

    Args:
        source: Makes the fit.
        folder: Folder below which runs may write.
        full: Use a large model in its full size.
        shortened: Description of how a large model was made smaller.
        alone: Run a fit of several processes in this process only.
    """

    def __init__(
        self, source: FitSource, folder: Path, full: bool = False, shortened: str = "", alone: bool = True
    ) -> None:
        self.source = source
        self.folder = Path(folder)
        self.full = full
        self.shortened = shortened
        self.alone = alone

    def fit(
        self, change: Change = AS_IT_IS, *, steps: int = 1, traces: Callable[[Callback], bool] = leaves_traces
    ) -> Fit:
        """Return a fit of a few optimizer steps, without validation, loggers and checkpoints.

        Args:
            change: Change of the fit.
            steps: Number of optimizer steps.
            traces: Function that tells which callbacks to leave out, by default those that leave traces.
        """
        with silence():
            fit = self.source.make(change)
        trainer = fit.trainer
        # Claims about a single process do not need the others.
        if self.alone and trainer.world_size > 1:
            run_alone(trainer)
        # Trial steps inside of these short fits would take most of the time.
        kept = [one for one in trainer.callbacks if not traces(one) and not has_trait(one, Trait.TRIES_STEPS)]
        trainer.callbacks = [*kept, _Short(steps)]
        trainer.loggers = [DummyLogger()] if trainer.loggers else []
        trainer.num_sanity_val_steps = 0
        trainer.accumulate_grad_batches = min(2, trainer.accumulate_grad_batches)
        # Schedulers may wait for a metric of the validation, so one batch is kept.
        trainer.limit_val_batches = min(1, trainer.limit_val_batches)
        set_default_root_dir(trainer, tempfile.mkdtemp(dir=self.folder))
        return fit

    def run(self, fit: Fit) -> None:
        """Train without output."""
        with silence(), _interruptible():
            fit.run()

    @cached_property
    def plain(self) -> Trace:
        """A slim trace of five steps of the unchanged fit."""
        return self.train(5, slim=True)

    def train(
        self, steps: int, change: Change = AS_IT_IS, prepare: Callable[[Fit], object] = id, slim: bool = False
    ) -> Trace:
        """Train for a few optimizer steps and return the record.

        Args:
            steps: Number of optimizer steps.
            change: Change of the fit.
            prepare: Function that receives the fit before it runs.
            slim: Record no weights between the steps, and only norms of gradients.
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
        traces: Callable[[Callback], bool] = leaves_traces,
    ) -> T:
        """Return the result of ``probe(trainer, module)`` inside a fit, which is discarded afterwards.

        The probe runs after ``steps`` optimizer steps. With 0 it runs before the first batch, when techniques are
        applied and optimizers are built. Values that the module logs in the probe are discarded.
        """
        fit = self.fit(change, steps=steps + 1, traces=traces)
        inside = _Inside(probe, steps)
        fit.trainer.callbacks.append(inside)
        # The probe ends the fit by an exception, since a trainer has no way to stop before its first batch.
        with contextlib.suppress(_Over):
            self.run(fit)
            raise ConfigurationError("verify: the fit ended before the claim could be checked")
        return inside.found


class _Short(Callback):
    """Ends a fit after a number of optimizer steps. Schedules are built for its whole length before."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A resumed run may be at its end.
        loop = trainer.fit_loop
        loop.max_epochs = -1
        loop.epoch_loop.max_steps = -1
        loop.min_epochs = None
        loop.epoch_loop.min_steps = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + self.steps


class Recorder(Callback):
    """Records a fit in a trace. It must be the last callback."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trace.start = state_of(pl_module)
        self._step = trainer.global_step
        self.trace.later = set(held(pl_module))  # it is empty after the fit
        self.trace.trainable = _trainable(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self.trace.batches.append(copy.deepcopy(batch))
        self.trace.thawed |= _trainable(pl_module)
        self.trace.resting = {name for name, part in pl_module.named_modules() if not part.training}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        found = {}
        for name, gradient in seen_gradients(pl_module, optimizer).items():
            if self.trace.slim:
                found[name] = gradient.detach().norm().cpu()
            else:
                found[name] = gradient.detach().to("cpu", copy=True)
        self.trace.gradients.append(found)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        loss: Any = outputs
        if isinstance(outputs, Mapping):
            loss = outputs.get("loss")
        if loss is None:
            loss = 0.0  # the step is skipped, or optimizes manually
        self.trace.losses.append(float(loss))
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            if not self.trace.slim:
                self.trace.weights.append({n: p.detach().to("cpu", copy=True) for n, p in pl_module.named_parameters()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trace.end = state_of(pl_module)


def _trainable(module: nn.Module) -> set[str]:
    return {name for name, parameter in module.named_parameters() if parameter.requires_grad}


def seen_gradients(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the gradients before an optimizer step by name; empty if the optimizer steps in the backward pass."""
    names = {id(p): name for name, p in module.named_parameters()}
    try:
        found = gradients_of(optimizer)
    except ConfigurationError:  # the gradients are freed already
        return {}
    return {names[id(p)]: gradient for p, gradient in found.items() if id(p) in names}


class _Over(Exception):
    """A probe has its result."""


class _Inside(Callback):
    """Runs a probe after a number of optimizer steps, and ends the fit."""

    def __init__(self, probe: Callable[[Any, Any], Any], steps: int) -> None:
        self.probe = probe
        self.steps = steps
        self.found: Any = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.steps:
            schedule(trainer, lambda _: None, lambda: self._look(trainer, pl_module), order=sys.maxsize)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step >= self.steps > 0 and not accumulates(trainer):
            self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, module: LightningModule) -> None:
        with silent(module):
            self.found = self.probe(trainer, module)
        raise _Over


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's weights and buffers by name, on the CPU."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in whole_state(module).items()}


def ties(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def drawn_batches(trainer: Trainer, count: int) -> list[Batch]:
    """Return the first training batches as the loader returns them.

    Raises:
        ConfigurationError: If the data has fewer batches.
    """
    found = [drawn for _, (drawn, *_) in zip(range(count), iter(combined_loader(trainer)))]
    if len(found) < count:
        raise ConfigurationError(f"verify: the training data has {len(found)} batches, but {count} are needed")
    return found


def first_batch(trainer: Trainer) -> Batch:
    """Return the first training batch, as the training step receives it."""
    return arrived(trainer, drawn_batches(trainer, 1)[0])


def twin(module: LightningModule) -> LightningModule:
    """Return a deep copy of a module in a fit, with the same trainer."""
    # Lightning does not copy the reference to the trainer.
    copied = copy.deepcopy(module, computed(module))
    set_trainer(copied, trainer_of(module))
    return copied


def loss_of(module: LightningModule, batch: Batch, batch_idx: int = 0, seed: int | dict[str, object] = 0) -> Tensor:
    """Return the loss of the module's own training step for a batch.

    Within a fit, techniques and the trainer's precision act on the step.

    Args:
        module: The module.
        batch: The batch.
        batch_idx: Index of the batch.
        seed: Seed of random numbers, or states of their generators.

    Raises:
        ConfigurationError: If the step returns no loss.
    """
    trainer = trainer_of(module)
    context: Any = contextlib.nullcontext()
    if trainer is not None:
        context = trainer.precision_plugin.train_step_context()
    if isinstance(seed, int):
        seed_everything(seed, verbose=False)
    else:
        set_random_states(seed)
    arguments = [batch, batch_idx][: len(inspect.signature(module.training_step).parameters)]
    with context:
        output = module.training_step(*arguments)
    loss = output
    if isinstance(output, Mapping):
        loss = output["loss"]
    if not isinstance(loss, Tensor):
        raise ConfigurationError(f"{type(module).__name__}.training_step returned no loss")
    return loss


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss by autograd, by parameter, without parameters that the loss does not depend on."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: gradient.detach() for name, gradient in zip(named, found) if gradient is not None}


def difference(one: Tensors, other: Tensors) -> dict[str, float]:
    """Return the relative differences of tensors from those of ``one``, by name.

    The difference of a tensor that is much smaller than the others may be rounding only, and is taken relative to a
    thousandth of the largest size. A tensor that is missing on one side, or not finite, differs by infinity.
    """
    # A norm grows with the number of elements, a root mean square does not.
    sizes = {name: _size(tensor.detach().double()) for name, tensor in one.items()}
    usual = max(sizes.values(), default=0.0) * 1e-3
    found = {}
    for name in dict.fromkeys([*one, *other]):
        found[name] = math.inf
        if name in one and name in other and one[name].shape == other[name].shape:
            # Differences in the last bits must not be lost in the subtraction.
            a = one[name].detach().cpu().double()
            b = other[name].detach().cpu().double()
            off = _size(a - b)
            size = max(sizes[name], usual)
            if torch.equal(a, b):
                found[name] = 0.0
            elif size and math.isfinite(off):
                found[name] = off / size
    return found


def _size(tensor: Tensor) -> float:
    return tensor.norm().item() / max(tensor.numel(), 1) ** 0.5


def order_of(module: LightningModule, batch: Batch) -> list[str]:
    """Return the names of modules in the order in which a training step completes them, and then of unused modules."""
    # A manual step runs its backward passes itself and returns no loss.
    automatic = module.automatic_optimization
    with recorded(module, lambda _: None) as calls, torch.set_grad_enabled(not automatic):
        try:
            loss_of(module, batch)
        except ConfigurationError:
            if automatic:
                raise
    return list(dict.fromkeys([*(call.name for call in calls), *(name for name, _ in module.named_modules())]))


def outputs_of(module: LightningModule, batch: Batch) -> dict[str, object]:
    """Return the output of each module in a training step, in order of computation, and the loss."""
    with recorded(module, detached) as calls, torch.no_grad():
        loss = loss_of(module, copy.deepcopy(batch))
    found: dict[str, object] = {}
    for call in calls:
        # The last call counts, because a network may be probed before.
        found.pop(call.name, None)
        found[call.name] = call.output
    return {**found, "the loss": loss.detach()}


def output_differences(right: Mapping[str, object], found: Mapping[str, object]) -> dict[str, float]:
    """Return the differences of outputs from the right ones, in order of computation, for modules on both sides."""
    off = {}
    for name, output in right.items():
        if name in found:
            ours = {str(i): tensor for i, tensor in enumerate(floats(output))}
            theirs = {str(i): tensor for i, tensor in enumerate(floats(found[name]))}
            off[name] = max(difference(ours, theirs).values(), default=0.0)
    return off


def tolerance_of(trainer: Trainer, module: nn.Module) -> float:
    """Return the largest relative difference that another order of sums may cause, in the precision of a training."""
    if "16" in str(trainer.precision) or any(p.itemsize < 4 for p in module.parameters() if p.is_floating_point()):
        return 0.1
    return 1e-3


def first_layer(differences: Differences, tolerance: float, order: list[str]) -> str:
    """Return the first name whose difference exceeds ``tolerance``, by the place of its module in ``order``."""
    place = {name: i for i, name in enumerate(order)}
    # A difference of NaN is not at most the tolerance.
    wrong = [name for name, off in differences.items() if not off <= tolerance]
    return min(wrong, key=lambda name: place.get(name.rpartition(".")[0], len(place)), default="")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C inside a fit. Lightning would exit, and ignore Ctrl-C from then on."""
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
                with contextlib.suppress(ValueError):  # outside of the main thread
                    signal.signal(number, handler)
