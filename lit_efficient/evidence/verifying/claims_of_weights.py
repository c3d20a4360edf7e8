"""Claims about the weights that a training changes, and about learning rates."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, techniques_of
from lit_efficient.evidence.fits import Fit
from lit_efficient.evidence.verifying.claims import Batch, Claim, Subject, Verdict, first_batch, loss_of, order_of
from lit_efficient.internals.torch_optimizers import INNER_SCHEDULERS
from lit_efficient.internals.wraps import temporarily

Rates: TypeAlias = list[list[list[float]]]  # of each step, each schedule and each parameter group


class Trains(Claim):
    """Every trainable parameter trains."""

    name = "trains"
    sentence = "each trainable parameter is in one optimizer, gets a gradient and changes"
    unit = "parameters that do not train"

    def check(self, subject: Subject) -> Verdict:
        trace = subject.plain
        module = trace.fit.module
        holders = Counter(key for one in trace.fit.trainer.optimizers for key in _parameters(one))
        named = dict(module.named_parameters())
        stepped = {name for name, p in named.items() if id(p) in holders}
        twice = {name for name, p in named.items() if holders[id(p)] > 1}
        # Parameters that no optimizer holds, or that are frozen temporarily, are reported separately.
        ours = trace.trainable & stepped
        reached = {name for step in trace.gradients for name in step}
        nonzero = {name for step in trace.gradients for name, norm in step.items() if norm.count_nonzero()}
        still = {name for name in ours if same(trace.start[name], trace.end[name])}
        unreached = still - reached
        unused: set[str] = set()
        # The check of used layers takes another fit.
        if unreached:
            used = subject.within(_used)
            unused = {name for name in unreached if _owner(module, name) not in used}
        # An optimizer may leave a parameter without a gradient unchanged on purpose.
        unmoved = still & nonzero
        rounded = {name for name in unmoved if trace.end[name].itemsize < 4}
        # The last reason of a parameter counts.
        wrong = {
            **dict.fromkeys(
                _meant(trace.fit) - trace.trainable - trace.later, "its technique trains it, but it is frozen"
            ),
            **dict.fromkeys(trace.trainable - stepped, "no optimizer holds it"),
            **dict.fromkeys(twice, "several optimizers hold it, and each updates it"),
            **dict.fromkeys(unreached - unused, "no gradient reaches it, though its layer is used"),
            **dict.fromkeys((reached - nonzero) & ours, "its gradient is zero in every step"),
            **dict.fromkeys(unmoved - rounded, "it has a gradient but does not change"),
        }
        notes = {
            "that the training step does not use, or uses without gradients": unused,
            "whose updates are rounded away in 16 bits": rounded,
            "that are frozen temporarily": trace.later,
        }
        uncovered = tuple(
            f"{len(names)} parameters {text}, first {min(names)}" for text, names in notes.items() if names
        )
        why = f"{len(trace.trainable)} trainable parameters over {len(trace.gradients)} steps"
        return self.measured(len(wrong), 0, why, lambda: _first(subject, wrong), uncovered)


class Frozen(Claim):
    """Frozen parameters do not change."""

    name = "frozen"
    sentence = "frozen parameters keep every bit, next to adapters too, and tied ones stay tied"
    unit = "parameters that changed"

    def check(self, subject: Subject) -> Verdict:
        trace = subject.plain
        module = trace.fit.module
        moved = {name for name, _ in module.named_parameters() if not same(trace.start.get(name), trace.end[name])}
        wrong = dict.fromkeys(moved - trace.trainable - trace.thawed, "it is frozen but changed")
        techniques = techniques_of(trace.fit.trainer)
        adapting = [type(technique).__name__ for technique in techniques if technique.phase is Phase.ADAPT]
        if adapting:
            reason = f"{' and '.join(adapting)} does not train it, but it changed"
            wrong |= dict.fromkeys(moved - _meant(trace.fit) - wrong.keys(), reason)
        now = dict(module.named_parameters(remove_duplicate=False))
        for names in trace.tied:
            if len({id(now[name]) for name in names if name in now}) > 1:
                wrong[names[0]] = f"it is no longer tied to {names[1]}"
        number = len(trace.end) - len(trace.trainable)
        why = f"{number} tensors that do not train, before and after {len(trace.gradients)} steps"
        uncovered = ("buffers, such as statistics of BatchNorm",)
        return self.measured(len(wrong), 0, why, lambda: _first(subject, wrong), uncovered)


def same(one: Tensor | None, other: Tensor) -> bool:
    """True if a tensor is bit-equal to another; false if it did not exist."""
    return one is not None and torch.equal(one, other)


def _meant(fit: Fit) -> set[str]:
    """Return the names of the parameters that techniques claim to train."""
    hooks = [technique for technique in techniques_of(fit.trainer) if isinstance(technique, OptimizerHooks)]
    meant = {id(p) for technique in hooks for p in technique.trains(fit.module)}
    return {name for name, p in fit.module.named_parameters() if id(p) in meant}


def _used(trainer: Trainer, module: LightningModule) -> set[str]:
    """Return the names of the modules that a training step calls with gradients enabled."""
    used = set()

    def note(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if torch.is_grad_enabled():
                used.add(name)

        return hook

    for name, part in module.named_modules():
        part.register_forward_pre_hook(note(name))
    loss_of(module, first_batch(trainer))
    return used


def _owner(module: nn.Module, name: str) -> str:
    """Return the module whose forward reads a parameter. Lists of parameters have no forward."""
    owner = name.rpartition(".")[0]
    while isinstance(module.get_submodule(owner), nn.ParameterList | nn.ParameterDict):
        owner = owner.rpartition(".")[0]
    return owner


def _first(subject: Subject, wrong: Mapping[str, str]) -> str:
    """Return the first wrong parameter in order of computation, with its reason."""
    order = subject.within(lambda trainer, module: order_of(module, first_batch(trainer)))
    place = {name: i for i, name in enumerate(order)}
    own = list(subject.plain.end)
    first = min(wrong, key=lambda name: (place.get(name.rpartition(".")[0], len(place)), own.index(name)))
    return f"{first}: {wrong[first]}"


class Scheduled(Claim):
    """Optimizers use the learning rates of their schedules."""

    name = "schedule"
    sentence = "each schedule acts: optimizers use its rate, which is the logged rate"
    unit = "largest relative difference of rates"

    def check(self, subject: Subject) -> Verdict:
        """Record the schedulers and the rates of some steps, then step new schedulers by hand."""
        seen = _RateRecorder()
        with _built_schedulers() as built:
            trace = subject.train(4, prepare=lambda fit: fit.trainer.callbacks.append(seen), slim=True)
        module = trace.fit.module
        # Schedulers inside of others are stepped by these.
        inner = {id(one) for scheduler in built for one in vars(scheduler).get(INNER_SCHEDULERS, ())}
        parameters = {id(p) for p in module.parameters()}
        kept = {id(config.scheduler) for config in seen.configs}
        wrong = {}
        for one in built:
            if id(one) not in kept | inner and _parameters(one.optimizer) & parameters:
                wrong[f"{type(one).__name__}, which was built for the optimizer's parameters but not returned"] = (
                    math.inf
                )
        for name in seen.strangers:
            wrong[f"{name}, which changes the rates of another optimizer"] = math.inf
        if not wrong and not seen.configs:
            return self.idle("there is no learning-rate schedule")
        uncovered = [
            f"{type(config.scheduler).__name__}, which waits for a metric"
            for config in seen.configs
            if isinstance(config.scheduler, ReduceLROnPlateau)
        ]
        if all(rates == seen.rates[0] for rates in seen.rates):
            uncovered.append(f"changes of rates: they are constant in these {len(seen.rates)} steps")
        hooks = (module.optimizer_step, module.lr_scheduler_step)
        own = not all(hook.__module__.startswith(("lightning.", "pytorch_lightning.")) for hook in hooks)
        if own or not module.automatic_optimization:
            uncovered.append("rates that the module sets itself")
        elif not wrong:
            wrong = _off(seen.rates, subject.within(lambda trainer, _: _by_hand(trainer, seen.epochs)))
        why = f"the rates of {len(seen.rates)} steps, and those of schedules that are stepped by hand"
        return self.compared(wrong, 1e-6, why, tuple(uncovered))


class _RateRecorder(Callback):
    """Records the rate of each parameter group in each step, and the schedules.

    Attributes:
        configs: Lightning's configurations of the schedules.
        strangers: Schedulers of optimizers that the trainer does not use.
        epochs: Epoch of each step.
    """

    def __init__(self) -> None:
        self.configs: list[Any] = []
        self.strangers: list[str] = []
        self.rates: Rates = []
        self.epochs: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self.configs = list(trainer.lr_scheduler_configs)
        ours = {id(one) for one in trainer.optimizers}
        schedulers = [config.scheduler for config in self.configs]
        self.strangers = [type(one).__name__ for one in schedulers if id(one.optimizer) not in ours]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.epochs.append(trainer.current_epoch)
        self.rates.append(_now(self.configs))


def _now(configs: Sequence[Any]) -> list[list[float]]:
    return [[float(group["lr"]) for group in config.scheduler.optimizer.param_groups] for config in configs]


def _by_hand(trainer: Trainer, epochs: list[int]) -> Rates:
    """Return the rates of the schedules at steps in the given epochs."""
    configs = trainer.lr_scheduler_configs
    rates = [_now(configs)]
    for step in range(1, len(epochs)):
        for config in configs:
            before = step - 1
            done = step
            if config.interval != "step":
                before = epochs[before]
                done = epochs[done]
            if not isinstance(config.scheduler, ReduceLROnPlateau):
                for _ in range(done // config.frequency - before // config.frequency):
                    config.scheduler.step()
        rates.append(_now(configs))
    return rates


def _off(found: Rates, right: Rates) -> dict[str, float]:
    """Return the relative differences of rates from the right ones, with descriptions as keys."""
    off = {}
    for step, (ours, theirs) in enumerate(zip(found, right), start=1):
        for one, other in zip(ours, theirs):
            for group, (a, b) in enumerate(zip(one, other), start=1):
                text = f"step {step}, group {group}: {a:.3g}, but the schedule says {b:.3g}"
                off[text] = abs(a - b) / max(abs(b), 1e-30)
    return off


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


@contextlib.contextmanager
def _built_schedulers() -> Iterator[list[LRScheduler]]:
    """Record the schedulers that are built."""
    built: list[LRScheduler] = []
    begin = LRScheduler.__init__

    def noted(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        built.append(self)
        begin(self, *args, **kwargs)

    with temporarily(LRScheduler, __init__=noted):
        yield built


OF_WEIGHTS: tuple[Claim, ...] = (Trains(), Frozen(), Scheduled())
