"""Contract suite for techniques, in the way of scikit-learn's ``check_estimator``.

    check_technique(Clamp, effect=stays_small, neutral=lambda: Clamp(limit=1e9))

A check builds the technique, trains a toy with it, and raises an ``AssertionError`` that names the broken rule.
:data:`CHECKS` lists the checks, for a test runner that reports each of them: ``check(Case(make, effect))``. Only the
author knows the purpose of a technique: ``effect`` gets a :class:`Run` and asserts the purpose.
"""

import copy
import dataclasses
import functools
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient.application import transform_by
from lit_efficient.application.gradients import gradients_of
from lit_efficient.application.ledger import ledger, reports_of
from lit_efficient.declaration import Report, parts_of, techniques_of
from lit_efficient.errors import CheckpointError
from lit_efficient.files.checkpoints import load_verified
from lit_efficient.files.records import rebuild
from lit_efficient.internals.torch_modules import forward_hooks
from lit_efficient.optimizers.in_backward import InBackward
from lit_efficient.technique import PrecisionTechnique, Technique

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

WIDTH = 16


# The toy -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Residual block, [..., width] -> [..., width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Network of equal blocks between a stem and a head, [..., WIDTH] -> [..., WIDTH]."""

    def __init__(self, width: int = WIDTH, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ToyMethods:
    """Methods of a LightningModule, for both namespaces of Lightning.

    Args:
        where: Hook in which the network is built: ``init``, ``setup`` or ``configure_model``.
        network: Class of the network, [B, WIDTH] -> [B, WIDTH]. A network with the attribute ``takes_labels`` is also
            given ``labels`` [B], and returns losses [B].
    """

    prediction = "eps"
    automatic_optimization: bool

    def __init__(self, where: str = "init", network: Callable[[], nn.Module] = Net) -> None:
        super().__init__()
        self.where, self.network = where, network
        self.net: Any = None
        self.seen: dict[str, Any] = {}  # figures of the last training step, for effects
        if where == "init":
            self._build()

    def _build(self) -> None:
        if self.net is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1)
                self.net = self.network()

    def setup(self, stage: str) -> None:
        """Build the network if ``where`` names this hook."""
        if self.where == "setup":
            self._build()

    def configure_model(self) -> None:
        """Build the network if ``where`` names this hook."""
        if self.where == "configure_model":
            self._build()

    def _sample_loss(self, batch: Sequence[Tensor]) -> Tensor:
        """Return losses [B]. The task is to reverse a row, or, with labels, to find its largest number."""
        (x,) = batch
        if getattr(self.network, "takes_labels", False):
            return self.net(x, labels=x.argmax(-1))
        return (self.net(x) - x.flip(-1)).square().mean(-1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss and the further keys of the loss protocol."""
        draw = torch.rand(())
        sample_loss = self._sample_loss(batch)
        log_snr = batch[0].detach().mean(-1) * 4
        self.seen = {"sample_loss": sample_loss.detach(), "log_snr": log_snr, "draw": draw}
        self.seen |= {"tokens": self.num_tokens(batch), "rows": batch[0].detach()}
        if sample_loss.requires_grad:
            sample_loss.register_hook(functools.partial(self.seen.__setitem__, "influence"))
        loss = sample_loss.mean()
        self.log("train/loss", loss.detach())  # type: ignore[attr-defined]
        return {"loss": loss, "sample_loss": sample_loss, "log_snr": log_snr}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val/loss", self._sample_loss(batch).mean())  # type: ignore[attr-defined]

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("test/loss", self._sample_loss(batch).mean())  # type: ignore[attr-defined]

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the output of the network."""
        return self.net(batch[0])

    def num_tokens(self, batch: Any) -> int:
        """Return a number that differs between batches, as for sequences of different lengths."""
        return int((batch[0] > 0).sum())

    def configure_optimizers(self) -> Any:
        """Return AdamW with two groups, and a schedule."""
        optimizer = torch.optim.AdamW(self.groups(), lr=1e-2, betas=(0.8, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def groups(self) -> list[dict[str, Any]]:
        """Return two parameter groups: matrices with weight decay, and the others without."""
        decay = [p for p in self.net.parameters() if p.ndim > 1]
        rest = [p for p in self.net.parameters() if p.ndim <= 1]
        return [{"params": decay, "weight_decay": 0.1, "name": "decay"}, {"params": rest, "lr": 5e-3, "name": "rest"}]


class Toy(ToyMethods, L.LightningModule):
    """Toy module for ``lightning.pytorch``."""


def data(rows: int = 8, batch_size: int = 4, shuffle: bool = False) -> DataLoader:
    """Return a loader of rows of WIDTH random numbers, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(rows, WIDTH, generator=generator, device="cpu")
    return DataLoader(TensorDataset(numbers), batch_size, shuffle=shuffle)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 2,
}


def trainer(callbacks: Sequence[object] = (), *, namespace: Any = L, **arguments: Any) -> Any:
    """Return a trainer on the CPU without output, for one epoch unless ``arguments`` say otherwise."""
    precisions = [part for part in callbacks if isinstance(part, PrecisionTechnique)]
    others = [part for part in callbacks if not any(part is precision for precision in precisions)]
    plugins = [*precisions, *arguments.pop("plugins", ())] or None
    return namespace.Trainer(callbacks=others, plugins=plugins, **{**QUIET, "max_epochs": 1, **arguments})


# A run and its records -----------------------------------------------------------------------------------------------


@dataclass
class Step:
    """Record of one training batch, at the end of ``on_train_batch_end``."""

    number: int  # optimizer steps so far
    loss: Tensor  # the loss that was differentiated
    seen: dict[str, Any]  # figures of the toy; "influence" [B] is d loss / d sample_loss
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]  # after the backward pass, accumulated over the batches of the step
    rates: list[float]  # learning rates of the first optimizer's groups


@dataclass
class Run:
    """Record of a finished run.

    Args:
        trainer: The trainer.
        module: The trained toy; its network is ``module.net``.
        start: Weights at the start of training, by name.
        steps: One entry for each batch.
        checkpoint: Full checkpoint of the end of the last epoch, loaded with ``weights_only=True``.
        reports: Reports of the techniques, by name.
    """

    trainer: Any
    module: Any
    start: dict[str, Tensor] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)

    def technique(self, name: str) -> Any:
        """Return the callback or precision whose class has this name, or ``None``."""
        return next((part for part in parts_of(self.trainer) if type(part).__name__ == name), None)

    def exported(self) -> dict[str, Any]:
        """Return a weights-only checkpoint, saved after the end of the run."""
        with tempfile.TemporaryDirectory() as folder:
            self.trainer.save_checkpoint(Path(folder) / "weights.ckpt", weights_only=True)
            return load(Path(folder) / "weights.ckpt")

    def state(self) -> dict[str, Any]:
        """Return all states that training continues from: weights, optimizers, schedulers."""
        return {
            "weights": weights(self.module),
            "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs],
            "val/loss": self.trainer.callback_metrics["val/loss"],
        }


class Watch(L.Callback):
    """Callback that fills a :class:`Run` and saves a checkpoint at the end of each epoch. It has no state."""

    def __init__(self, run: Run, folder: Path, saves: bool = True) -> None:
        self.run, self.folder, self.saves = run, folder, saves
        self.gradients: dict[str, Tensor] = {}
        self._taken: dict[str, Tensor] = {}

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        self.run.start = weights(pl_module)
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, InBackward):
                optimizer.in_backward.watchers.append(functools.partial(self._take, pl_module))
        self.run.reports = reports_of(pl_module, techniques_of(trainer))

    def on_after_backward(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        early = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, InBackward)]
        taken = {p for optimizer in early for p in optimizer.gradients_taken}
        away = {p: g for o in trainer.optimizers if o not in early for p, g in gradients_of(o).items()}
        here = [(name, p) for name, p in pl_module.named_parameters() if p not in taken and p not in away]
        left = [(n, p.grad) for n, p in here] + [(n, away.get(p)) for n, p in pl_module.named_parameters()]
        self.gradients = self._taken | {name: g.detach().clone() for name, g in left if g is not None}
        self._taken = {}

    def _take(self, module: nn.Module, parameter: Any) -> None:
        """Record a gradient that is freed before the end of the backward pass."""
        name = next(name for name, p in module.named_parameters() if p is parameter)
        self._taken[name] = parameter.grad.detach().clone()

    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: Any, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        seen, now = dict(pl_module.seen), weights(pl_module)
        self.run.steps.append(Step(trainer.global_step, outputs["loss"], seen, now, self.gradients, rates))

    def on_train_epoch_end(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        if not self.saves:
            return
        try:
            trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt", weights_only=False)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise AssertionError(f"state cannot be saved, it must be primitives and tensors: {error}") from error


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of a module's weights and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def load(path: Path) -> dict[str, Any]:
    """Return a checkpoint, read without running code from it."""
    try:
        return dict(load_verified(path))
    except CheckpointError as error:
        raise AssertionError(
            f"state must be primitives and tensors, which load with weights_only=True: {error}"
        ) from error


def assert_equal(a: object, b: object, what: str = "") -> None:
    """Assert that nested states are equal bit by bit; the error names the paths that differ."""
    differences = list(_differences(a, b, ""))
    assert not differences, f"{what}{': ' if what else ''}{len(differences)} differ, first: {differences[:3]}"


def _differences(a: Any, b: Any, path: str) -> Iterator[str]:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a, b):
            yield path
    elif isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            yield f"{path}: keys {sorted(set(map(str, a)) ^ set(map(str, b)))}"
        for key in a.keys() & b.keys():
            yield from _differences(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b)):
            yield from _differences(x, y, f"{path}/{i}")
    elif a != b:
        yield f"{path}: {a!r} != {b!r}"


_WHERE = ("init", "setup", "configure_model")
HOOKS = (
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_train_end",
    "on_fit_end",
    "teardown",
)


# The checks ----------------------------------------------------------------------------------------------------------


_PLAIN: dict[Any, dict[str, Any]] = {}


@dataclass(frozen=True)
class Case:
    """Techniques that act together on the toy, and their expected effect. See :func:`check_technique`."""

    make: Callable[[], Sequence[Technique]]
    effect: Callable[[Run], object]
    neutral: Callable[[], Sequence[Technique]] | None = None
    changes: bool = True
    shadows: bool = False
    repacks: bool = False
    network: Callable[[], nn.Module] = Net
    trainer: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 8

    def toy(self, where: str = "configure_model") -> Toy:
        """Return the module, not yet trained."""
        return Toy(where, self.network)

    def plain(self) -> dict[str, Any]:
        """Return the state of a run without techniques. It is shared by many cases and must not be changed."""
        key = (self.network, self.rows, repr(sorted(self.trainer.items())))
        if key not in _PLAIN:
            _PLAIN[key] = self.fit([], saves=False).state()
        return _PLAIN[key]

    def fit(self, techniques: Sequence[Any], module: object = None, **arguments: Any) -> Run:
        """Train the toy with ``techniques`` in a temporary folder, and return the record."""
        with tempfile.TemporaryDirectory() as folder:
            return self.fit_in(Path(folder), techniques, module, **arguments)

    def fit_in(
        self, folder: Path, techniques: Sequence[object], module: object = None, *,
        ckpt_path: Path | None = None, saves: bool = True, **more: object,
    ) -> Run:  # fmt: skip
        """Train the toy with ``techniques``, save a checkpoint of each epoch in ``folder``, and return the record."""
        run = Run(None, self.toy() if module is None else module)
        run.trainer = trainer([*techniques, Watch(run, folder, saves)], **self.trainer, **more)
        torch.manual_seed(0)
        run.trainer.fit(run.module, data(self.rows), data(), ckpt_path=ckpt_path)
        if saves:
            run.checkpoint = load(folder / f"{run.trainer.current_epoch - 1}.ckpt")
        else:
            run.checkpoint = {}
        return run


def check_arguments(case: Case) -> None:
    """Check that arguments are attributes of the same name, and that checkpoints keep them as primitives."""
    for technique in case.make():
        kind, given = type(technique), technique.arguments()
        odd = {name: value for name, value in given.items() if " at 0x" in str(value)}
        assert not odd, f"{kind.__name__}: arguments must be primitives, got {odd}"
        again = rebuild(kind, given).arguments()
        assert again == given, f"{kind.__name__}: arguments must be attributes as given, {given} became {again}"
        pickle.dumps(technique.record())


def check_acts(case: Case) -> None:
    """Check that it acts wherever the network is built, reports, loads base checkpoints, and saves without effects."""
    plain = case.plain()["weights"]
    state = torch.get_rng_state()
    transform_by(case.toy("init"), case.make())
    assert torch.equal(state, torch.get_rng_state()), "transform draws from torch's generator: use one of its own"
    runs = {where: case.fit(case.make(), case.toy(where), saves=where == "setup") for where in _WHERE}
    for where, run in runs.items():
        now = weights(run.module)
        silent = {type(t).__name__ for t in techniques_of(run.trainer)} - run.reports.keys()
        if lost := plain.keys() - now.keys():
            try:
                copy.deepcopy(run.module).load_state_dict(plain)
            except RuntimeError as error:
                raise AssertionError(f"a base checkpoint no longer loads: {sorted(lost)[:3]} are gone") from error
        assert not silent, f"{silent} report nothing: return a Report from transform, rewrite_optimizer or describe"
        reshaped = [name for name in plain if name in now and plain[name].shape != now[name].shape]
        assert case.repacks or not reshaped, f"weights have other shapes (repacks=False): {reshaped[:3]}"
        same = all(torch.equal(now[name], tensor) for name, tensor in plain.items() if name in now)
        assert same is not case.changes, (
            f"built in {where}, the weights are {'not ' * case.changes}those of a plain run"
        )
        assert_equal(runs["init"].steps[-1].weights, run.steps[-1].weights, f"built in {where}, not in init")
    case.effect(runs["setup"])  # the run that has saved; `check_resumes` asserts the effect for `configure_model`


def check_neutral(case: Case) -> None:
    """Check that training at the neutral setting equals plain Lightning bit for bit."""
    if case.neutral is not None:
        usual = dataclasses.replace(case, trainer={})
        assert_equal(usual.plain(), usual.fit(case.neutral(), saves=False).state(), "neutral is not plain Lightning")


def check_effect_is_real(case: Case) -> None:
    """Check that the effect does not hold for a run without the techniques: else it would test nothing.

    The techniques are added to the trainer after the run, so that an effect that asks them for figures is refuted by
    their figures.
    """
    run = case.fit([])
    run.trainer.callbacks += [technique for technique in case.make() if isinstance(technique, L.Callback)]
    try:
        case.effect(run)
    except Exception:
        return
    raise AssertionError("the effect also holds for a run without the technique: assert what only the technique does")


def check_resumes(case: Case) -> None:
    """Check that an epoch, a checkpoint and an epoch with new objects equal two epochs without a stop."""
    with tempfile.TemporaryDirectory() as folder:
        whole = case.fit_in(Path(folder), case.make(), max_epochs=2)
        half = Path(folder) / "0.ckpt"
        resumed = case.fit_in(Path(folder), [*reversed(case.make())], ckpt_path=half, max_epochs=2)
    done, expected = resumed.trainer.global_step, whole.trainer.global_step
    assert done == expected, f"resumed, it ends after {done} steps instead of {expected}"
    assert_equal(whole.state(), resumed.state(), "resumed is not uninterrupted")
    assert_equal(whole.checkpoint["callbacks"], resumed.checkpoint["callbacks"], "resumed, callbacks' states")
    case.effect(whole)


def check_loads_safely(case: Case) -> None:
    """Check that full and weights-only checkpoints load with ``weights_only=True`` and name the techniques."""
    run = case.fit(case.make())
    expected = {type(technique).__name__: technique.arguments() for technique in case.make()}
    named = {record["name"]: record["arguments"] for record in run.checkpoint["lit_efficient"]["techniques"]}
    assert named == expected, f"the checkpoint names {named}, not what was given: {expected}"
    run.exported()


def check_stages(case: Case) -> None:
    """Check that a module is transformed once in two rounds of fit, validation, test and prediction."""
    module = case.toy()
    hooks: set[int] = set()
    for _ in range(2):
        run = trainer(case.make(), **case.trainer)
        run.fit(module, data(case.rows), data())
        before, kinds = weights(module), [type(part) for part in module.modules()]
        hooks.add(forward_hooks(module))
        run.validate(module, data(), verbose=False)
        run.test(module, data(), verbose=False)
        predicted = run.predict(module, data())[0]
        assert_equal(before, weights(module), "evaluation changes the weights")
        assert kinds == [type(part) for part in module.modules()], "evaluation changes the network"
        hooks.add(forward_hooks(module))
    assert len(hooks) == 1, f"runs and evaluation leave forward hooks behind: {sorted(hooks)} of them"
    with torch.no_grad():
        same = torch.equal(predicted, module.eval().net(next(iter(data()))[0]))
    assert same is not case.shadows, f"predictions are {'not ' * case.shadows}of other weights than the module's"
    done = [entry.record["name"] for entry in ledger(module)]
    assert len(done) == len(set(done)), f"transformed more than once: {done}"


def check_cleans_up(case: Case, hooks: Sequence[str] = HOOKS) -> None:
    """Check that no wrap is left after a run, nor after an exception in any of ``hooks``."""
    module = case.toy()
    before = _wraps(module)
    for hook in (*hooks, None):
        bombs = [] if hook is None else [_bomb(hook)]
        try:
            saves = hook == "on_save_checkpoint"
            case.fit([*case.make(), *bombs], module.train(), saves=saves, num_sanity_val_steps=1)
        except _BombError:
            pass
        else:
            assert hook is None, f"{hook} was not called"
        left = _wraps(module) - before - {"on_save_checkpoint"}  # stays: a trainer can save after its teardown
        assert not left, f"{left} of the module stay wrapped after {hook or 'a run'}: call super() in that hook"


def check_deep_copy(case: Case) -> None:
    """Check that a deep copy in the middle of a run is independent of the module."""
    copies: list[Any] = []

    class Copy(L.Callback):
        def on_train_batch_end(self, trainer: "Trainer", pl_module: "LightningModule", *_: object) -> None:
            if not copies:
                copies.append(copy.deepcopy(pl_module, {id(trainer): None}))  # without the trainer

    module = case.fit([*case.make(), Copy()], saves=False).module
    (twin,) = copies
    states = {part: weights(part) for part in (module, twin)}
    assert _moved(twin, states[module]), "what the module learns after it was copied goes into the copy"
    case.fit(case.make(), module, saves=False)
    assert_equal(states[twin], weights(twin), "training the module changes its deep copy")
    learned, states[module] = _moved(module, states[module]), weights(module)
    case.fit(case.make(), twin, saves=False)
    assert_equal(states[module], weights(module), "training the deep copy changes the module")
    lost = learned - _moved(twin, states[twin])
    assert not lost, f"in a deep copy some weights no longer train (a closure on forward?): {sorted(lost)[:3]}"


def _moved(module: nn.Module, before: Mapping[str, Tensor]) -> set[str]:
    return {name for name, tensor in module.state_dict().items() if not torch.equal(before[name], tensor)}


def check_standalone(case: Case) -> None:
    """Check that training is equal in the standalone namespace ``pytorch_lightning``."""
    import pytorch_lightning

    states = []
    for namespace in (L, pytorch_lightning):
        kind = type("Toy", (ToyMethods, namespace.LightningModule), {})
        run = Run(trainer(case.make(), namespace=namespace, **case.trainer), kind("configure_model", case.network))
        torch.manual_seed(0)
        run.trainer.fit(run.module, data(case.rows), data())
        states.append(run.state())
    assert_equal(states[0], states[1], "pytorch_lightning is not lightning.pytorch")


CHECKS: tuple[Callable[[Case], None], ...] = (
    check_arguments,
    check_acts,
    check_effect_is_real,
    check_neutral,
    check_resumes,
    check_loads_safely,
    check_stages,
    check_cleans_up,
    check_deep_copy,
    check_standalone,
)


def check_technique(
    make: Callable[[], Technique],
    effect: Callable[[Run], object],
    *,
    neutral: Callable[[], Technique] | None = None,
    changes: bool = True,
    shadows: bool = False,
    repacks: bool = False,
    network: Callable[[], nn.Module] = Net,
) -> None:
    """Run all of :data:`CHECKS` on a technique.

    Args:
        make: Function that builds the technique at a setting that visibly changes the toy's training.
        effect: Function that asserts the purpose of the technique for a run with it, and fails for a run without it.
        neutral: Function that builds the technique at a setting under which training equals plain Lightning, if any.
        changes: Whether ``make`` changes the weights at the end of a short run.
        shadows: Whether evaluation uses other weights than the module's own.
        repacks: Whether a weight gets another shape under its old name.
        network: Class of the toy's network, if the technique cannot act on :class:`Net` (linear layers and norms).

    Raises:
        AssertionError: From the first check that fails.
    """
    plain = None if neutral is None else lambda: [neutral()]
    case = Case(lambda: [make()], effect, plain, changes, shadows, repacks, network)
    for check in CHECKS:
        check(case)


class _BombError(Exception):
    pass


def _bomb(hook: str) -> L.Callback:
    def explode(*_: object, **__: object) -> None:
        raise _BombError(hook)

    bomb = L.Callback()
    setattr(bomb, hook, explode)
    return bomb


def _wraps(module: nn.Module) -> set[str]:
    return {name for name, value in module.__dict__.items() if callable(value)} | (
        {"_lit_efficient_session"} & module.__dict__.keys()
    )
