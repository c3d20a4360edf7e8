"""Precedence of the config over the checkpoint that a fit resumes: rates, decay, betas and schedules.

A checkpoint of this command line contains what its optimizers and schedulers were built with. Options that the config
builds with other values now are set after the restore. A schedule with other rates or another length is replayed from
its first step to the present one.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lit_efficient.cli.tree import numbered
from lit_efficient.errors import CheckpointError
from lit_efficient.mechanisms.trials.rate_range import set_rate
from lit_efficient.optimizers.rates import nested_schedulers

Build = dict[str, list[dict[str, Any]]]
"""Class and options of each of the ``optimizers``, class and first state of each of the ``schedulers``."""

Schedule = tuple[LRSchedulerConfig, dict[str, Any], dict[str, Any]]
"""Lightning's record of a schedule, the checkpoint's build of it and the present one."""

_SCHEDULED = ("lr", "momentum", "betas")  # options that schedules change
_ADVICE = "Resume with what it was trained with, or begin a new run"


class ConfigWins(Callback):
    """Saves the config and the build in checkpoints, and sets the config's options after a restore.

    Args:
        config: The config, as plain data.
        changed: Keys that had other values when the checkpoint was trained: ``{key: (then, now)}``.
    """

    def __init__(self, config: Mapping[str, object], changed: Mapping[str, tuple[object, object]]) -> None:
        self.config = {key: value for key, value in config.items() if key not in ("config", "ckpt_path")}
        self.changed = changed
        self._now: Build = {}  # the build of this run
        self._then: Build | None = None  # the build of the checkpoint's run
        self._sizes: list[list[int]] | None = None  # parameters in each group of the checkpoint's optimizers
        self._schedules: list[dict[str, Any]] = []  # states of the checkpoint's, which Lightning will restore
        self._resumes = False
        self._arguments: dict[
            tuple[int, str], int | float | str
        ] = {}  # of callbacks before the restore, by index and name

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._now = _built(trainer)
        self._check(trainer)

    def on_load_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._resumes = True
        names = numbered(type(callback).__name__ for callback in trainer.callbacks)
        for place, (callback, name) in enumerate(zip(trainer.callbacks, names)):
            prefix = f"trainer.callbacks.{name}."
            for argument in (key.removeprefix(prefix) for key in self.changed if key.startswith(prefix)):
                for attribute in {argument, f"_{argument}"} & vars(callback).keys():  # a property cannot be set
                    value = getattr(callback, attribute)
                    if isinstance(value, int | float | str):
                        self._arguments[place, attribute] = value
        self._then = checkpoint.get("lit_efficient", {}).get("built")
        self._schedules = checkpoint.get("lr_schedulers", [])
        groups = [state.get("param_groups") for state in checkpoint.get("optimizer_states", [])]
        if "optimizer_states" in checkpoint and all(isinstance(of_one, list) for of_one in groups):  # not in shards
            self._sizes = [[len(group["params"]) for group in of_one] for of_one in groups]
        self._check(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint.setdefault("lit_efficient", {}).update(config=self.config, built=self._now)

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if not self._resumes:
            return
        for (place, argument), value in self._arguments.items():
            setattr(trainer.callbacks[place], argument, value)  # some callbacks restore their arguments, too
        for optimizer, built in zip(trainer.optimizers, self._now["optimizers"]):
            for group, now in zip(optimizer.param_groups, built["groups"]):
                missing = [name for name in now if name not in group]
                needed = [name for name in missing if name in optimizer.defaults]
                if needed:
                    raise CheckpointError(
                        f"ckpt_path: the optimizer's state there has no {needed[0]!r}, which "
                        f"{type(optimizer).__name__} needs. {_ADVICE}"
                    )
                # The options of a scheduler that the checkpoint's run did not have.
                group |= {name: now[name] for name in missing}
        if self._then is None:
            rank_zero_warn(
                "ckpt_path: the checkpoint does not hold what its optimizer was built with (it is older, or was not "
                "written by this command line): the optimizer goes on with the checkpoint's rate, decay and betas"
            )
            return
        for said in _set(trainer, self._then, self._now):
            rank_zero_info(f"The config wins: {said}")
        if self._then["optimizers"] != self._now["optimizers"]:
            for optimizer in trainer.optimizers:
                _check_state(optimizer)

    def _check(self, trainer: Trainer) -> None:
        """Refuse the state of another optimizer, as soon as both builds are known."""
        if not self._resumes or not self._now:
            return
        now = [one["class"] for one in self._now["optimizers"]]
        if self._then is None:
            then = now
        else:
            then = [one["class"] for one in self._then["optimizers"]]
        kinds = [{type(one).__name__, *getattr(one, "goes_on_from", ())} for one in trainer.optimizers]
        if len(then) != len(kinds) or any(one not in kind for one, kind in zip(then, kinds)):
            raise CheckpointError(
                f"ckpt_path: the checkpoint was trained with {', '.join(then)}, whose state {', '.join(now)} cannot "
                f"go on with. {_ADVICE}"
            )
        ours = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        if self._sizes is not None and self._sizes != ours:
            raise CheckpointError(
                f"ckpt_path: the checkpoint's optimizer holds {self._sizes} parameters by group, this run's {ours}: "
                f"other parameters train. {_ADVICE}"
            )
        if self._then is None:
            for config, built, state in zip(trainer.lr_scheduler_configs, self._now["schedulers"], self._schedules):
                alone = _alone(config.scheduler, state, built["state"])
                if alone:
                    raise CheckpointError(
                        f"ckpt_path: the checkpoint's scheduler is not a {built['class']}: only one of the two states "
                        f"has {', '.join(sorted(alone))}. {_ADVICE}"
                    )
        else:  # a scheduler of another class begins with its own state
            for index, (before, built) in enumerate(zip(self._then["schedulers"], self._now["schedulers"])):
                if before["class"] != built["class"] and index < len(self._schedules):
                    self._schedules[index] = copy.deepcopy(built["state"])


def _alone(scheduler: LRScheduler, state: Mapping[str, object], built: Mapping[str, object]) -> set[str]:
    """Return the keys that tell the states of two classes of schedulers apart.

    Private keys, and keys that are derived from arguments, are ignored: they differ between versions of torch.

    Args:
        scheduler: The scheduler of this run.
        state: The state in the checkpoint.
        built: The state of the new scheduler.
    """
    arguments = {name for one in nested_schedulers([scheduler]) for name in inspect.signature(type(one)).parameters}
    arguments |= {f"{name}s" for name in arguments}  # one value for each group
    of_torch = type(scheduler).__module__.startswith("torch.")  # other schedulers may add keys while they step

    def compare(state: Mapping[str, Any], built: Mapping[str, Any]) -> set[str]:
        found = {key for key in built.keys() - state.keys() if key.lstrip("_") in arguments}
        if of_torch:
            more = state.keys() - built.keys() - {"verbose"}  # torch 2.7 removed it
            found |= {key for key in more if not key.startswith("_")}
        for key in state.keys() & built.keys():
            if isinstance(state[key], list) and isinstance(built[key], list):
                for inner_state, inner_built in zip(state[key], built[key]):
                    if isinstance(inner_state, dict) and isinstance(inner_built, dict):
                        found |= compare(inner_state, inner_built)
        return found

    return compare(state, built)


def _built(trainer: Trainer) -> Build:
    """Return the options of optimizers and the states of schedulers, before a checkpoint is restored."""
    optimizers = []
    for optimizer in trainer.optimizers:
        groups = [_options(group) for group in optimizer.param_groups]
        optimizers.append({"class": type(optimizer).__name__, "groups": groups})
    schedulers = []
    for config in trainer.lr_scheduler_configs:
        scheduler = config.scheduler
        kind = type(scheduler).__name__
        schedulers.append({"class": kind, "state": scheduler.state_dict(), **_functions(scheduler)})
    return copy.deepcopy({"optimizers": optimizers, "schedulers": schedulers})


def _functions(scheduler: LRScheduler) -> dict[str, object]:
    """Return values of the functions of a schedule at some steps: the state does not contain the functions."""
    functions = [f for one in nested_schedulers([scheduler]) for f in getattr(one, "lr_lambdas", ())]
    if functions:
        return {"functions": [_values(function) for function in functions]}
    return {}


def _values(function: Callable[[int], float]) -> list[float]:
    values = []
    with suppress(Exception):  # a function of the user's may fail beyond its last step
        for n in range(17):
            values.append(float(function(2**n)))
    return values


def _options(group: Mapping[str, object]) -> dict[str, Any]:
    plain = {name: value for name, value in group.items() if name != "params"}
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in plain.items()}


def _set(trainer: Trainer, then: Build, now: Build) -> list[str]:
    """Set the options that differ between the two builds in the restored optimizers and schedulers.

    Returns:
        One sentence for each option that was set.
    """
    said = []
    unscheduled = bool(then["schedulers"]) and not now["schedulers"]
    reductions = [_reductions(trainer, optimizer, then, now) for optimizer in trainer.optimizers]
    for optimizer, before, built in zip(trainer.optimizers, then["optimizers"], now["optimizers"]):
        for index, (group, old, new) in enumerate(zip(optimizer.param_groups, before["groups"], built["groups"])):
            held = _options(group)
            for name in new:
                if name == "fused" and before["class"] != built["class"]:  # another class keeps the kernel of its state
                    continue
                # The value that the removed schedule ended with.
                left = unscheduled and name in _SCHEDULED and held[name] != new[name]
                if not left and (name not in old or old[name] == new[name]):
                    continue
                value = new[name]
                if name == "lr" and not unscheduled and old["lr"] and group["lr"] != old["lr"]:
                    # A schedule or a callback has scaled the rate. The new rate is scaled like the old one.
                    value = float(group["lr"]) * new["lr"] / old["lr"]
                set_rate(group, value, name)
                was = held[name] if left else old[name]
                sentence = f"{type(optimizer).__name__}, group {index}: {name} {was!r} -> {new[name]!r}"
                begun = any(optimizer.state.get(p) for p in group["params"])
                if begun and _only_begins(optimizer, {**held, name: was}, name, new[name]):
                    sentence += ", without effect: it shapes states when they begin, and the checkpoint's states exist"
                said.append(sentence)
    for optimizer, built, factors in zip(trainer.optimizers, now["optimizers"], reductions):
        said += _run_anew(trainer, optimizer, then, now, built["groups"], factors)
    return said


def _only_begins(optimizer: Any, options: Mapping[str, object], name: str, value: object) -> bool:
    """Return whether an option affects the steps of a new optimizer, but not of one that has states already."""

    def steps(first: object, then: object) -> Tensor:
        parameter = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
        accepted = inspect.signature(type(optimizer)).parameters
        taken = {key: given for key, given in options.items() if key in accepted} | {name: first}
        twin = type(optimizer)([parameter], **taken)
        for step in range(4):
            parameter.grad = torch.tensor([[1.0, -1.0], [0.5, -2.0]], dtype=torch.float64) * (1 + 0.1 * step)
            twin.step()
            twin.param_groups[0][name] = then
        return parameter.detach()

    try:
        before = steps(options[name], options[name])
        return torch.equal(before, steps(options[name], value)) and not torch.equal(before, steps(value, value))
    except Exception:  # the optimizer has other arguments, or needs other shapes
        return False


def _check_state(optimizer: Any) -> None:
    """Refuse options that need states missing from the checkpoint. A step of a parameter of one element shows it."""
    for group in optimizer.param_groups:
        states = [optimizer.state[p] for p in group["params"] if optimizer.state.get(p)]
        parameter = torch.nn.Parameter(torch.zeros(()))
        try:
            twin = type(optimizer)([{**_options(group), "params": [parameter]}])
            parameter.grad = torch.zeros(())
            twin.step()
        except Exception:  # the optimizer has other arguments, or needs other shapes
            return
        for state in states[:1]:
            fresh = twin.state[parameter]
            twin.state[parameter] = {key: fresh.get(key, torch.zeros(())) for key in state}
            try:
                twin.step()
            except Exception as error:  # other errors come from the zeros, which may be no valid state
                if isinstance(error, KeyError) and any(key in fresh for key in error.args):
                    raise CheckpointError(
                        f"ckpt_path: the optimizer's state there has no {error}, which {type(optimizer).__name__} "
                        f"needs with the config's arguments. {_ADVICE}"
                    ) from None


def _schedules(trainer: Trainer, optimizer: Optimizer, then: Build, now: Build) -> list[Schedule]:
    """Return Lightning's record, the checkpoint's build and the present build of each schedule of an optimizer."""
    before = [*then["schedulers"], *[{"class": None, "state": {}}] * len(now["schedulers"])]
    rows = zip(trainer.lr_scheduler_configs, before, now["schedulers"])
    return [row for row in rows if row[0].scheduler.optimizer is optimizer]


def _follows(config: LRSchedulerConfig) -> bool:
    return isinstance(config.scheduler, ReduceLROnPlateau)


def _reductions(trainer: Trainer, optimizer: Optimizer, then: Build, now: Build) -> list[float]:
    """Return the factor by which schedules that follow metrics have changed the rate of each group.

    It is the restored rate, divided by the rate that the other schedules alone lead to.
    """
    schedules = _schedules(trainer, optimizer, then, now)
    groups = optimizer.param_groups
    others = any(before["class"] != built["class"] for _, before, built in schedules)
    if others or len({_follows(config) for config, *_ in schedules}) < 2:
        return [1.0] * len(groups)
    held = copy.deepcopy([_options(group) for group in groups])
    states = [one.scheduler.state_dict() for one, *_ in schedules]
    built = then["optimizers"][trainer.optimizers.index(optimizer)]["groups"]
    _replay(trainer, optimizer, [(config, before, True) for config, before, _ in schedules], built)
    factors = [old["lr"] / float(group["lr"]) if float(group["lr"]) else 1.0 for group, old in zip(groups, held)]
    for (config, *_), state in zip(schedules, states):
        config.scheduler.load_state_dict(state)
    for group, old in zip(groups, held):
        group |= {name: old[name] for name in _SCHEDULED[1:] if name in old}
        set_rate(group, old["lr"])
    return factors


def _replay(
    trainer: Trainer,
    optimizer: Optimizer,
    schedules: Sequence[tuple[LRSchedulerConfig, dict[str, Any], bool]],
    groups: Sequence[Mapping[str, Any]],
) -> list[int]:
    """Replay schedules from their first steps to the present, in the order of a fit.

    Schedules that follow a metric are left out: their metrics are not known any more.

    Returns:
        The number of steps of each schedule.
    """
    counts = []
    steps: list[Any] = []
    for config, _, same in schedules:
        late = config.interval == "epoch"
        taken = (trainer.current_epoch if late else trainer.global_step) // config.frequency
        if same:
            taken = getattr(config.scheduler, "last_epoch", taken)  # ChainedScheduler has no counter
        counts.append(0 if _follows(config) else taken)
        steps += [((step + 1) / counts[-1], late, len(counts), config.scheduler) for step in range(counts[-1])]
    for group, built in zip(optimizer.param_groups, groups):
        group |= {name: built[name] for name in _SCHEDULED[1:] if name in built}
        set_rate(group, built["lr"])
    for config, built, _ in schedules:
        if not _follows(config):
            config.scheduler.load_state_dict(copy.deepcopy(built["state"]))
    with warnings.catch_warnings():
        # Warnings of the first run, and that the optimizer has not stepped in between.
        warnings.simplefilter("ignore")
        try:
            for *_, scheduler in sorted(steps, key=lambda step: step[:3]):
                scheduler.step()
        except ValueError as error:  # of a schedule that has ended
            raise CheckpointError(
                f"ckpt_path: {type(scheduler).__name__} cannot get where the run is: {error}"
            ) from None
    return counts


def _run_anew(
    trainer: Trainer,
    optimizer: Optimizer,
    then: Build,
    now: Build,
    groups: Sequence[Mapping[str, Any]],
    factors: list[float],
) -> list[str]:
    """Replay the schedules of an optimizer if one of them is built with other arguments now.

    Returns:
        One sentence for each schedule that was changed.
    """
    schedules = _schedules(trainer, optimizer, then, now)
    parts = [(config, built, before["class"] == built["class"]) for config, before, built in schedules]
    changed = [before != built for _, before, built in schedules]
    kept = [_follows(config) and same for config, _, same in parts]  # their metrics cannot be replayed
    counts = [0] * len(parts)
    if any(other and not keep for other, keep in zip(changed, kept)):
        counts = _replay(trainer, optimizer, parts, groups)
        for group, factor in zip(optimizer.param_groups, factors):
            set_rate(group, float(group["lr"]) * factor)
    said = []
    for (config, before, built), keep, count in compress(zip(schedules, kept, counts), changed):
        scheduler = config.scheduler
        how = f"as if it had been so for its {count} steps"
        if _follows(config):
            old = before["state"] if keep else {}
            new = {name: value for name, value in built["state"].items() if not keep or old.get(name) != value}
            scheduler.load_state_dict({**scheduler.state_dict(), **new})
            how = "with the config's arguments" if keep else "from its beginning"
        rates = ", ".join(f"{float(group['lr']):.3g}" for group in optimizer.param_groups)
        said.append(f"{type(scheduler).__name__} {how}; the rate is {rates}")
    return said
