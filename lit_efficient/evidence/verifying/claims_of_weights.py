"""Claims on which weights a training moves, and at which rate: what should train does, what should not does not."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, techniques_of
from lit_efficient.evidence.verifying.claims import Claim, Subject, Verdict, first_batch, loss_of, order_of
from lit_efficient.internals.torch_optimizers import INNER_SCHEDULERS
from lit_efficient.internals.wraps import temporarily


class Trains(Claim):
    """Everything trains that should."""

    name, sentence = "trains", "each trainable parameter is in one optimizer, gets a gradient and moves"

    def check(self, subject: Subject) -> Verdict:
        trace = subject.plain
        module = trace.fit.module
        later, meant = trace.later, _meant(trace.fit)
        holders = Counter(key for one in trace.fit.trainer.optimizers for key in _parameters(one))
        stepped = {name for name, p in module.named_parameters() if id(p) in holders}
        twice = {name for name, p in module.named_parameters() if holders[id(p)] > 1}
        ours, steps = trace.trainable & stepped, trace.gradients
        reached = {name for step in steps for name in step}
        zero = {name for name in reached if not any(step[name].count_nonzero() for step in steps if name in step)}
        still = {name for name in ours if same(trace.start[name], trace.end[name])}
        unreached = still - reached
        used = subject.within(_used) if unreached else set()
        aside = {name for name in unreached if _owner(module, name) not in used}
        rounded = {name for name in still & reached - zero if trace.end[name].itemsize < 4}
        wrong = dict.fromkeys(meant - trace.trainable - later, "its technique trains it, and it is frozen")
        wrong |= dict.fromkeys(trace.trainable - stepped, "no optimizer holds it")
        wrong |= dict.fromkeys(twice, "several optimizers hold it, and each steps it")
        wrong |= dict.fromkeys(unreached - aside, "no gradient reaches it, though its layer is used")
        wrong |= dict.fromkeys(zero & ours, "its gradient is zero in every step")
        wrong |= dict.fromkeys(still & reached - zero - rounded, "it has a gradient and does not move")
        notes = {"that the training step leaves aside, or uses without gradients": aside}
        notes |= {"whose steps 16 bits round away": rounded, "that are frozen for now": later}
        uncovered = tuple(
            f"{len(names)} parameters {what}, first {min(names)}" for what, names in notes.items() if names
        )
        why = f"{len(trace.trainable)} trainable parameters over {len(trace.gradients)} steps"
        unit = "parameters that do not train"
        return self.measured(len(wrong), 0, unit, why, lambda: _first(subject, wrong), uncovered)


class Frozen(Claim):
    """Nothing trains that should not."""

    name, sentence = "frozen", "frozen parameters keep every bit, beside adapters too, and tied ones stay tied"

    def check(self, subject: Subject) -> Verdict:
        trace = subject.plain
        module, techniques = trace.fit.module, techniques_of(trace.fit.trainer)
        moved = {name for name, _ in module.named_parameters() if not same(trace.start.get(name), trace.end[name])}
        wrong = dict.fromkeys(moved - trace.trainable - trace.thawed, "it is frozen, and moved")
        adapting = [type(technique).__name__ for technique in techniques if technique.phase is Phase.ADAPT]
        if adapting:
            beside = f"it is none of what {' and '.join(adapting)} trains, and moved"
            wrong |= dict.fromkeys(moved - _meant(trace.fit) - wrong.keys(), beside)
        now = dict(module.named_parameters(remove_duplicate=False))
        for names in trace.tied:
            if len({id(now[name]) for name in names if name in now}) > 1:
                wrong[names[0]] = f"it is no longer tied to {names[1]}"
        number = len(trace.end) - len(trace.trainable)
        why = f"{number} tensors that do not train, before and after {len(trace.gradients)} steps"
        uncovered = ("buffers, such as statistics of BatchNorm",)
        return self.measured(len(wrong), 0, "parameters that moved", why, lambda: _first(subject, wrong), uncovered)


def same(one: Any, other: torch.Tensor) -> bool:
    """Whether a tensor is bit-equal to another; one that was not there is not."""
    return isinstance(one, torch.Tensor) and torch.equal(one, other)


def _meant(fit: Any) -> set[str]:
    """Names of the parameters that techniques say they train."""
    hooks = [technique for technique in techniques_of(fit.trainer) if isinstance(technique, OptimizerHooks)]
    meant = {id(p) for technique in hooks for p in technique.trains(fit.module)}
    return {name for name, p in fit.module.named_parameters() if id(p) in meant}


def _used(trainer: Any, module: Any) -> set[str]:
    """Names of the modules that a training step calls where gradients are recorded."""
    used = set()

    def hook(name: str) -> Any:
        return lambda *_: used.add(name) if torch.is_grad_enabled() else None

    for name, part in module.named_modules():
        part.register_forward_pre_hook(hook(name))
    loss_of(module, first_batch(trainer))
    return used


def _owner(module: nn.Module, name: str) -> str:
    """The module whose forward reads a parameter: lists of parameters have none."""
    owner = name.rpartition(".")[0]
    while isinstance(module.get_submodule(owner), nn.ParameterList | nn.ParameterDict):
        owner = owner.rpartition(".")[0]
    return owner


def _first(subject: Subject, wrong: Mapping[str, str]) -> str:
    """The first parameter in the order of computation, and what is wrong with it."""
    order = subject.within(lambda trainer, module: order_of(module, first_batch(trainer)))
    place = {name: i for i, name in enumerate(order)}
    own = list(subject.plain.end)
    first = min(wrong, key=lambda name: (place.get(name.rpartition(".")[0], len(place)), own.index(name)))
    return f"{first}: {wrong[first]}"


class Scheduled(Claim):
    """The rates that optimizers step with, against those of the schedules when they are stepped by hand."""

    name, sentence = "schedule", "each schedule acts: optimizers step with its rate, which is the one that is logged"

    def check(self, subject: Subject) -> Verdict:
        """Note the schedulers that are built, and the rates of some steps; then step new ones by hand."""
        seen, steps = _Rates(), 4
        with _built() as built:
            trace = subject.train(steps, prepare=lambda fit: fit.trainer.callbacks.append(seen), slim=True)
        module = trace.fit.module
        inner = {id(one) for scheduler in built for one in vars(scheduler).get(INNER_SCHEDULERS, ())}
        parameters = {id(p) for p in module.parameters()}
        ours = [one for one in built if id(one) not in inner and _parameters(one.optimizer) & parameters]
        kept = {id(config.scheduler) for config in seen.configs}
        wrong = {
            f"{type(one).__name__}, which was built over the optimizer's parameters": float("inf")
            for one in ours
            if id(one) not in kept
        }
        wrong |= {f"{name}, which moves the rates of another optimizer": float("inf") for name in seen.strangers}
        if not wrong and not seen.configs:
            return self.idle("there is no learning-rate schedule")
        plateaus = [type(c.scheduler).__name__ for c in seen.configs if isinstance(c.scheduler, ReduceLROnPlateau)]
        uncovered = tuple(f"{name}, which waits for a metric" for name in plateaus)
        if all(rates == seen.rates[0] for rates in seen.rates):
            uncovered = (*uncovered, f"how rates move: in these {len(seen.rates)} steps none does")
        hooks = (module.optimizer_step, module.lr_scheduler_step)
        own = not all(hook.__module__.startswith(("lightning.", "pytorch_lightning.")) for hook in hooks)
        if own or not module.automatic_optimization:
            uncovered = (*uncovered, "rates that the module sets by itself")
        elif not wrong:
            wrong = _off(seen.rates, subject.within(lambda trainer, _: _by_hand(trainer, seen.epochs)))
        why = f"the rates of {len(seen.rates)} steps, and those of the schedules when stepped by hand"
        return self.compared(wrong, 1e-6, "largest relative difference of rates", why, uncovered)


class _Rates(Callback):
    """Notes the rate of each group in each step, and who sets it."""

    def __init__(self) -> None:
        self.configs: list[Any] = []
        self.strangers: list[str] = []  # schedulers of optimizers that the trainer does not step
        self.rates: list[list[list[float]]] = []  # of each step, each schedule and each group
        self.epochs: list[int] = []  # of each step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.configs = list(trainer.lr_scheduler_configs)
        ours = {id(one) for one in trainer.optimizers}
        lost = [one.scheduler for one in self.configs if id(one.scheduler.optimizer) not in ours]
        self.strangers = [type(one).__name__ for one in lost]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.epochs.append(trainer.current_epoch)
        self.rates.append(_now(self.configs))


def _now(configs: list[Any]) -> list[list[float]]:
    return [[float(group["lr"]) for group in config.scheduler.optimizer.param_groups] for config in configs]


def _by_hand(trainer: Any, epochs: list[int]) -> list[list[list[float]]]:
    """The rates of the schedules at steps that fall into the given epochs."""
    rates, configs = [], trainer.lr_scheduler_configs
    for step, epoch in enumerate(epochs):
        for config in configs if step else ():
            done = step if config.interval == "step" else epoch
            before = step - 1 if config.interval == "step" else epochs[step - 1]
            if not isinstance(config.scheduler, ReduceLROnPlateau):
                for _ in range(done // config.frequency - before // config.frequency):
                    config.scheduler.step()
        rates.append(_now(configs))
    return rates


def _off(found: list[list[list[float]]], right: list[list[list[float]]]) -> dict[str, float]:
    """By step, schedule and group how far rates are from the right ones."""
    return {
        f"step {i + 1}, group {k + 1}: {a:.3g}, and the schedule says {b:.3g}": abs(a - b) / max(abs(b), 1e-30)
        for i, (ours, theirs) in enumerate(zip(found, right))
        for one, other in zip(ours, theirs)
        for k, (a, b) in enumerate(zip(one, other))
    }


def _parameters(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


@contextlib.contextmanager
def _built() -> Iterator[list[Any]]:
    """Note the schedulers that are built."""
    built: list[Any] = []
    begin = LRScheduler.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        built.append(self)
        begin(self, *args, **kwargs)

    with temporarily(LRScheduler, __init__=noted):
        yield built


OF_WEIGHTS: tuple[Claim, ...] = (Trains(), Frozen(), Scheduled())
