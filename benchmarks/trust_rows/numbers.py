"""Row 5: inject NaN, Inf and spikes into a run at every kind of place, in each precision, with each technique.

With NonFiniteGuard, weights, averages and optimizer states are finite at the end, and skipped steps are counted. If the
run cannot recover, it ends with a correct error, on the command line with exit code 4.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from benchmarks.trust_rows import Piece
from benchmarks.trust_rows.resumes import quiet
from lit_efficient.models.networks.gpt import GPTBlock
from lit_efficient.testing import Block, Toy, data

VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "1e25": 1e25, "1e38": 1e38}
PLACES = ("input", "loss", "gradient", "activation", "weight", "state", "rate", "validation")
PASSING = ("input", "loss", "gradient", "activation")  # of one batch: the run can go on without it
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
ROWS = 16  # Four batches an epoch.
AT = 5  # The fault occurs in the second of three epochs.


class Fault(L.Callback):
    """Puts a value into a batch's work.

    Args:
        place: Where.
        value: Which, one of VALUES.
        at: In which batch.
    """

    def __init__(self, place: str, value: str, at: int = AT) -> None:
        self.place = place
        self.value = VALUES[value]
        self.at = at
        self.done = False
        self.step = 0
        self.before: dict[str, Tensor] = {}  # weights at the start of the batch
        self.after: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx != self.at:
            return
        self.done = True
        self.step = trainer.global_step
        self.before = {name: t.detach().clone() for name, t in pl_module.state_dict().items()}
        parameter = next(p for group in trainer.optimizers[0].param_groups for p in group["params"] if p.requires_grad)
        if self.place == "input":
            batch[0].view(-1)[0] = self.value
        elif self.place == "loss":
            pl_module.factor = self.value
        elif self.place == "gradient":
            self._hooks.append(parameter.register_hook(self._spoiled))
        elif self.place == "activation":
            block = next(part for part in pl_module.modules() if isinstance(part, Block | GPTBlock))
            self._hooks.append(block.register_forward_hook(lambda module, args, out: out * self.value))
        elif self.place == "weight":
            parameter.data.view(-1)[0] = self.value
        elif self.place == "state":
            states = trainer.optimizers[0].state[parameter]
            next(t for t in states.values() if is_float(t) and t.ndim).view(-1)[0] = self.value
        elif self.place == "rate":
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = self.value

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self.at:
            self.after = {name: t.detach().clone() for name, t in pl_module.state_dict().items()}
            self._undo(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._undo(pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.place == "validation":
            pl_module.factor = self.value
            self.done = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._undo(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """For a process that is looked at from outside."""
        Path("wrong.txt").write_text(" ".join(not_finite(pl_module.state_dict())))

    def _spoiled(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = self.value
        return gradient

    def _undo(self, module: Any) -> None:
        module.factor = 1.0
        while self._hooks:
            self._hooks.pop().remove()


class Faulty(Toy):
    """The toy, whose losses may be multiplied.

    Args:
        optimizer: Name of one of torch or of ours.
    """

    def __init__(self, optimizer: str = "", network: Any = None) -> None:
        self.factor = 1.0
        self.kind = optimizer
        super().__init__("init", network) if network else super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value) if name in ("factor", "kind") else super().__setattr__(name, value)

    def _sample_loss(self, batch: Any) -> Tensor:
        return super()._sample_loss(batch) * self.factor

    def configure_optimizers(self) -> Any:
        if not self.kind:
            return super().configure_optimizers()
        import lit_efficient

        kind: Any = getattr(lit_efficient, self.kind, None) or getattr(torch.optim, self.kind)
        return kind(self.net.parameters(), lr=1e-3)


class Rows(L.LightningDataModule):
    """The toy's data, for the command line."""

    def train_dataloader(self) -> Any:
        return data(ROWS)

    def val_dataloader(self) -> Any:
        return data()


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in a nest, with where they are."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors(item, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from tensors(item, f"{name}/{i}")


def not_finite(value: Any) -> list[str]:
    return [name for name, t in tensors(value) if is_float(t) and not t.float().isfinite().all()]


# In Python, with the guard -------------------------------------------------------------------------------------------

OPTIMIZERS = ("SGD", "Lion", "MuonAdamW", "GroupedAdafactor", "FusedAdamW", "Adafactor", "RMSprop")
TECHNIQUES = (
    *("EMA", "PowerEMA", "CheckpointAverage", "ScheduleFree", "LowBitOptimizer", "LoRA", "TokenWeightedAccumulation"),
    *("OptimizerInBackward", "OffloadOptimizer", "GaLore", "APOLLO", "StochasticDepth", "ActivationCheckpointing"),
    *("SNRWeighting", "QuantizeBase+LoRA", "EMA+OptimizerInBackward", "EMA+LowBitOptimizer", "KahanSummation"),
    *("StochasticRounding", "EMA+KahanSummation", "AdaptiveGradientClipping", "GradientClipping", "WeightClipping"),
    *("SpikeGuard", "GradientNoiseScale", "SelectiveBackprop", "LossCurriculum", "LabelSmoothing", "MixtureOfExperts"),
    *("MixtureOfDepths", "BatchRamp", "OptimizerSchedule", "ActivationOffload", "QuantizationAwareTraining"),
)
BESIDE = ("nothing", "accumulation", "clipping", *OPTIMIZERS, *TECHNIQUES)


def _settings() -> Iterator[tuple[str, ...]]:
    for place, value, precision, beside in itertools.product(PLACES, VALUES, PRECISIONS, BESIDE):
        low = {"KahanSummation", "StochasticRounding"} & {*beside.split("+")}
        if low and precision != "bf16-true":  # they keep what bfloat16 would lose
            continue
        if precision == "16-mixed" and not {"OptimizerInBackward", "OffloadOptimizer"}.isdisjoint(beside.split("+")):
            continue  # refused: gradients are unscaled when all are there
        if place == "state" and beside in ("SGD", "APOLLO", "GaLore", "LowBitOptimizer", "EMA+LowBitOptimizer"):
            continue  # none, or codes
        for action in ("raise",) if "OptimizerInBackward" in beside else ("raise", "skip"):
            yield place, value, precision, beside, action


def _found_late(place: str, value: str) -> bool:
    """Whether nothing before the step can know of it: a fault of memory, a rate beyond all bounds."""
    return place in ("weight", "state") or (place == "rate" and value in ("1e25", "1e38"))


@functools.cache
def _cases(late: bool) -> list[str]:
    """Each place, precision and technique once, and each two of these, the value and the action."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    settings = [setting for setting in _settings() if _found_late(*setting[:2]) is late]
    for place, value, precision, beside, action in settings:
        groups.setdefault((place, precision, beside), []).append((place, value, precision, beside, action))
    found = []
    drawn = random.Random(0)
    met = set[tuple[str, str]]()

    def take(setting: tuple[str, ...]) -> None:
        met.update(itertools.combinations(setting, 2))
        found.append(" ".join(setting))

    for same in groups.values():
        drawn.shuffle(same)
        take(max(same, key=lambda setting: len({*itertools.combinations(setting, 2)} - met)))
    for setting in settings:
        if not met.issuperset(itertools.combinations(setting, 2)):
            take(setting)
    return found


def _fit(place: str, value: str, precision: str, beside: str, action: str) -> tuple[Any, Fault, Any, str]:
    """The trainer, the fault and the guard of a run, and the error that it ended with."""
    from lit_efficient import DivergedError, NonFiniteGuard, SafeCheckpointIO
    from lit_efficient.testing import trainer
    from tests.contract.table import CASES, make_all, network_of

    names = [name for name in beside.split("+") if name in CASES]
    arguments: dict[str, Any] = {
        key: v for name in names for key, v in CASES[name].trainer.items() if key != "precision"
    }
    arguments |= {"accumulate_grad_batches": 2} if beside == "accumulation" else {}
    arguments |= {"gradient_clip_val": 1.0} if beside == "clipping" else {}
    fault = Fault(place, value)
    guard = NonFiniteGuard(action, 2)  # type: ignore[arg-type]
    module = Faulty(beside if beside in OPTIMIZERS else "", network_of(*names))
    made = trainer(
        [*make_all(*names), guard, fault], max_epochs=3, precision=precision, plugins=[SafeCheckpointIO()], **arguments
    )
    torch.manual_seed(0)
    error = ""
    try:
        made.fit(module, data(ROWS), data())
    except DivergedError as diverged:
        error = str(diverged)
    assert fault.done
    return made, fault, guard, error


@functools.cache
def _undisturbed(precision: str, beside: str, action: str) -> dict[str, Tensor]:
    made, *_ = _fit("validation", "1e25", precision, beside, action)
    return {name: t.clone() for name, t in made.lightning_module.state_dict().items()}


def _try_guarded(case: str, folder: Path) -> str:
    with quiet():
        return _judge(*case.split())


def _judge(place: str, value: str, precision: str, beside: str, action: str) -> str:
    made, fault, guard, error = _fit(place, value, precision, beside, action)
    module = made.lightning_module
    scales = precision == "16-mixed"
    wrong = [f"weights{name}" for name in not_finite(dict(module.state_dict()))]
    wrong += [f"optimizer{name}" for name in not_finite([o.state_dict()["state"] for o in made.optimizers])]
    for callback in made.callbacks:
        wrong += [f"{name} of {type(callback).__name__}" for name in not_finite(callback.state_dict())]
    ended = (
        f"after {made.global_step} steps with {error!r}" if error else f"as if nothing were, {guard.skipped} left out"
    )
    if wrong and not (_found_late(place, value) and "are not finite" in error and _refuses(made)):
        return f"it ended {ended}; not finite: {', '.join(wrong[:3])}"
    if error and "NonFiniteGuard" not in error:
        return f"the guard did not see it: {error}"
    if "not finite in weights" in error and not wrong:
        return f"it says what is not so: {error}"
    bad = value in ("nan", "inf", "-inf")
    if place == "validation":
        same = all(torch.equal(t, _undisturbed(precision, beside, action)[n]) for n, t in module.state_dict().items())
        return "" if same and not error else f"a validation changed the training: it ended {ended}"
    if place in ("weight", "state", "rate") and bad and not error:
        return f"it ended {ended}"
    if place not in PASSING or scales or not bad:
        return ""
    if action == "raise":
        return "" if error and fault.step == made.global_step else f"it ended {ended}"
    if error or guard.skipped != 1 or made.fit_loop.total_batch_idx + 1 != 12:
        return f"it ended {ended}"
    changed = [name for name, t in fault.before.items() if not torch.equal(t, fault.after[name])]
    return f"the step that was left out has changed {changed[:3]}" if changed else ""


def _refuses(made: Any) -> bool:
    """Whether nothing of this is ever saved."""
    from lit_efficient import DivergedError

    try:
        made.save_checkpoint("late.ckpt", weights_only=False)
    except DivergedError:
        return True
    return False


# By the command line, which leaves no fit without a guard ------------------------------------------------------------


def _spoken() -> list[str]:
    settings = itertools.product(PLACES, VALUES, ("32-true", "bf16-true", "bf16-mixed"), ("ema", "schedule_free", "-"))
    return [
        f"{place} {value} {precision} {overlay} {guard} {saves} {at}"
        for place, value, precision, overlay in settings
        for guard, saves, at in itertools.product(("raise", "skip"), ("saves", "never"), (AT, 11))
    ]


def _main(arguments: list[str]) -> None:
    import sys

    from lit_efficient.__main__ import main

    torch.set_num_threads(1)
    with quiet():
        code = main(arguments)
    sys.exit(code)


def _try_spoken(case: str, folder: Path) -> str:
    from lit_efficient.testing import load
    from tests import processes

    place, value, precision, overlay, guard, saves, at = case.split()
    own = "benchmarks.trust_rows.numbers"
    words = ["fit", "--allow-import", "benchmarks", "--model", f"{own}.Faulty", "--data", f"{own}.Rows"]
    words += [] if overlay == "-" else ["-c", f"techniques/{overlay}"]
    words += ["--trainer.accelerator=cpu", "--trainer.max_epochs=3", f"--trainer.precision={precision}"]
    words += ["--trainer.logger=false", "--trainer.enable_model_summary=false", "--trainer.default_root_dir=runs"]
    words += [f"--trainer.enable_checkpointing={'true' if saves == 'saves' else 'false'}"]
    words += [f"--trainer.callbacks+={own}.Fault", f"--trainer.callbacks.place={place}"]
    words += [f"--trainer.callbacks.value={value}", f"--trainer.callbacks.at={at}"]
    if guard == "skip":  # the command line gives each fit one that raises, which nothing takes out
        words += ["--trainer.callbacks+=NonFiniteGuard", "--trainer.callbacks.action=skip"]
    code = processes.run(_main, words, log=folder / "log")
    log = (folder / "log").read_text()
    if code not in (0, 4) or (code == 4) != ("the run has diverged" in log):
        return f"code {code}: {log.strip().splitlines()[-1:]}"
    for path in folder.rglob("*.ckpt"):
        content = load(path)
        kept = {name: t for name, t in tensors(content["callbacks"]) if t.ndim}  # of Lightning's some begin at infinity
        wrong = not_finite([content["state_dict"], content["optimizer_states"], kept])
        if wrong:
            return f"code {code}; {path.name} has {', '.join(wrong[:3])}"
    ended = folder / "wrong.txt"
    if code == 0 and (not ended.exists() or ended.read_text()):
        return f"code 0, but not finite at the end: {ended.read_text()[:100]}"
    bad = value in ("nan", "inf", "-inf") and place != "validation"
    goes_on = guard == "skip" and place in PASSING
    return f"code {code}" if bad and (code == 0) is not goes_on else ""


PIECES = (
    Piece(
        5,
        "numbers-guarded",
        "NaN, Inf, 1e25 or 1e38 in an input, the loss, a gradient, activations, the rate or the validation's loss of "
        "one batch, in four precisions, beside each of 44 optimizers and techniques, with NonFiniteGuard raising or "
        "skipping (each place x precision x technique, and each value and action beside each of these): weights, "
        "averages and optimizers' states are finite at the end, a step that is left out is counted and changes "
        "nothing, a validation changes nothing",
        lambda: _cases(False),
        _try_guarded,
        in_ci=3,
    ),
    Piece(
        5,
        "numbers-late",
        "the same in a weight or a state of the optimizer in memory, or a rate of 1e25 or 1e38: all is finite at the "
        "end, or an error names the weights that are not, at the next step, or whose states are not, at the end, and "
        "no checkpoint takes them",
        lambda: _cases(True),
        _try_guarded,
        in_ci=1,
    ),
    Piece(
        5,
        "numbers-said",
        "the same by the command line, in the midst or in the last batch, with checkpoints and without: no checkpoint "
        "holds them, a run whose weights are not finite at the end ends with code 4 and says that it has diverged",
        _spoken,
        _try_spoken,
        in_ci=0,
    ),
)
