"""Row 2: a run that is stopped after any batch and resumed ends with the same bits and logged rows as a whole run.

The comparison covers the final checkpoint (weights, optimizer states, averages, schedulers, loops) and the rows that
were logged after the batch.
"""

from __future__ import annotations

import atexit
import csv
import functools
import inspect
import io
import itertools
import json
import logging
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from benchmarks.trust_rows import Piece

BATCHES = 6  # of an epoch, of two
WINDOWS = (1, 4)  # batches of an optimizer step: four of six leave a short window


class Rows(Logger):
    """Logger that keeps the rows of a run."""

    name = "rows"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({"step": step, **metrics})

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
        """What a run was made of is no row."""


class Saves(L.Callback):
    """Callback that saves at the end and, if asked to, after each batch."""

    def __init__(self, folder: Path, rows: Rows, every: bool) -> None:
        self.folder = folder
        self.rows = rows
        self.every = every
        self.points: list[tuple[Path, int]] = []  # a checkpoint, and how many rows there are at the end of its batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.every:
            path = self.folder / f"{len(self.points) + 1:02d}.ckpt"
            trainer.save_checkpoint(path, weights_only=False)
            logs = not pl_module.automatic_optimization or not trainer.fit_loop._should_accumulate()
            self.points.append((path, len(self.rows.rows) + logs))  # Lightning logs after the last hook

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / "end.ckpt", weights_only=False)


@dataclass
class Whole:
    """Result of an uninterrupted run."""

    end: dict[str, Any]
    rows: list[dict[str, Any]]
    points: list[tuple[Path, int]]


@dataclass
class Fit:
    """Description of a run: module, data, techniques, length."""

    module: Any
    data: Any
    callbacks: list[Any]
    arguments: dict[str, Any] = field(default_factory=dict)

    def run(self, folder: Path, ckpt_path: Path | None = None) -> tuple[dict[str, Any], Rows, Saves]:
        from lit_efficient.testing import load, trainer

        rows = Rows()
        saves = Saves(folder, rows, every=ckpt_path is None)
        made = trainer([*self.callbacks, saves], logger=rows, log_every_n_steps=1, **self.arguments)
        L.seed_everything(0 if ckpt_path is None else 99, verbose=False)
        loaders = {"datamodule": self.data} if isinstance(self.data, L.LightningDataModule) else dict(
            zip(("train_dataloaders", "val_dataloaders"), self.data, strict=True)
        )  # fmt: skip
        made.fit(self.module, **loaders, ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)
        return load(folder / "end.ckpt"), rows, saves


@contextmanager
def quiet() -> Iterator[None]:
    """Without what runs print, and without warnings."""
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


@functools.cache
def root() -> Path:
    """A folder for the runs that many cases resume; it is gone when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="lit_efficient_resumes_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def whole(make: Callable[..., Fit], *names: Any) -> Whole:
    """Return the uninterrupted run of ``make(*names)``. Run it once and cache it."""
    folder = Path(tempfile.mkdtemp(dir=root()))
    with quiet():
        end, rows, saves = make(*names).run(folder)
    assert all(tensor.isfinite().all() for tensor in end["state_dict"].values()), (
        f"{names} diverge: nothing is compared"
    )
    return Whole(end, rows.rows, saves.points)


def point(run: Whole, part: int, of: int) -> tuple[Path, int]:
    """The checkpoint after ``part`` of ``of`` parts of the batches."""
    return run.points[max(1, part * len(run.points) // of) - 1]


def difference(run: Whole, kept: int, end: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the differences of a resumed run from the whole one, '' if there are none."""
    from lit_efficient.testing import assert_equal

    try:
        for key in sorted(run.end.keys() | end.keys()):
            assert_equal(run.end.get(key), end.get(key), key)
    except AssertionError as error:
        return str(error)[:300]
    left = run.rows[kept:]
    if [row["step"] for row in rows] != [row["step"] for row in left]:
        return f"rows of steps {[row['step'] for row in left]} became {[row['step'] for row in rows]}"
    odd = [(a, b) for a, b in zip(left, rows, strict=True) if a != b]
    return f"a row {odd[0][0]} became {odd[0][1]}" if odd else ""


def resume(part: int, of: int, make: Callable[..., Fit], *names: Any) -> str:
    """Resume a run in this process. Return the differences."""
    run = whole(make, *names)
    path, kept = point(run, part, of)
    with quiet():
        end, rows, _ = make(*names).run(Path.cwd(), path)
    return difference(run, kept, end, rows.rows)


# Techniques ----------------------------------------------------------------------------------------------------------


def _techniques(names: tuple[str, ...], window: int) -> Fit:
    from lit_efficient.testing import data
    from tests.contract.table import case, make_all

    chosen = case(*names)
    made = make_all(*dict.fromkeys((*names, "ExactResume")))
    window = max(window, chosen.trainer.get("accumulate_grad_batches", 1))
    arguments = {"max_epochs": 2, "val_check_interval": 3, **chosen.trainer, "accumulate_grad_batches": window}
    return Fit(chosen.toy(), (data(4 * BATCHES, shuffle=True), data()), made, arguments)


# Those that cannot be under accumulation.
ONE_WINDOW = {"OptimizerInBackward"}


def _names(size: int, count: int) -> list[tuple[str, ...]]:
    """So many sets of techniques that no conflict refuses."""
    from tests.contract.table import NAMES, allowed

    names = [name for name in NAMES if name != "Compile" or size == 1]  # seconds for each of several techniques
    sets = [(name,) for name in names] if size == 1 else []
    draw = random.Random(f"sets of {size}")
    while len(sets) < count:
        one = tuple(sorted(draw.sample(names, size)))
        if one not in sets and allowed(*dict.fromkeys((*one, "ExactResume"))):
            sets.append(one)
    return sets


def _case(names: tuple[str, ...], window: int, part: int) -> str:
    return f"{'+'.join(names)} {window} a step, after {part} of {2 * BATCHES}"


def _read(name: str) -> tuple[tuple[str, ...], int, int]:
    names, rest = name.split(" ", 1)
    window, part = rest.removesuffix(f" of {2 * BATCHES}").split(" a step, after ")
    return tuple(names.split("+")), int(window), int(part)


@functools.cache
def _alone() -> list[str]:
    return [
        _case(names, window, part)
        for names in _names(1, 0)
        for window in WINDOWS
        if window == 1 or names[0] not in ONE_WINDOW
        for part in range(1, 2 * BATCHES)
    ]


@functools.cache
def _together(size: int, count: int) -> list[str]:
    found = []
    for names in _names(size, count):
        draw = random.Random(" ".join(names))
        window = 1 if ONE_WINDOW & {*names} else draw.choice(WINDOWS)
        found.append(_case(names, window, draw.randrange(1, 2 * BATCHES)))
    return found


def _try_techniques(case: str, folder: Path) -> str:
    names, window, part = _read(case)
    return resume(part, 2 * BATCHES, _techniques, names, window)


# Options: settings of a technique, and of optimizers, that have another state or another start -----------------------

_STARTS = ("pissa", "olora", "eva", "corda", "lora_ga", "lora_fa")


def _muon(**arguments: Any) -> Callable[[Any, Any], Any]:
    return lambda x, module: x.MuonAdamW(x.muon_groups(module), 0.01, **arguments)


def _soap(x: Any, module: Any) -> Any:
    from pytorch_optimizer import SOAP

    return SOAP(module.parameters(), 0.01, precondition_frequency=2)


OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "MuonAdamW": _muon(),
    "MuonAdamW polar_express": _muon(polar_express=True),
    "MuonAdamW muon_eq": _muon(muon_eq="row"),
    "MuonAdamW muon_plus": _muon(muon_plus="column_row"),
    "MuonAdamW normuon": _muon(normuon=0.95),
    "MuonAdamW dion": _muon(dion=0.25),
    "MuonAdamW heads": lambda x, module: x.MuonAdamW(x.muon_groups(module, heads={"up.weight": 4}), 0.01),
    "SOAP": _soap,
}
# The case of the contract whose network is trained, and the callbacks.
OPTIONS: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    **{f"LoRA {one}": ("LoRA", lambda x, one=one: [x.LoRA(rank=2, variant=one, save_base=True)]) for one in _STARTS},
    "LoRA loftq": (
        "LoRA",
        lambda x: [x.QuantizeBase(keep_source=True), x.LoRA(rank=2, variant="loftq", save_base=True)],
    ),
    "QuantizeBase experts": (
        "ExpertsBackend",
        lambda x: [x.QuantizeBase(experts=True), x.LoRA(rank=2, targets="all-linear+experts", save_base=True)],
    ),
    "MixtureOfExperts bias_rate": (
        "MixtureOfExperts",
        lambda x: [x.MixtureOfExperts(4, 1, balance_loss=0.0, bias_rate=0.1)],
    ),
    "OptimizerSchedule AdamC": ("EMA", lambda x: [x.OptimizerSchedule(follow_rate=1.0)]),
    "AsyncCheckpoint": ("EMA", lambda x: [x.EMA(0.8), x.AsyncCheckpoint()]),
    **{f"{name} with EMA": ("EMA", lambda x: [x.EMA(0.8)]) for name in OPTIMIZERS},
}


def _option(name: str, window: int) -> Fit:
    import lit_efficient
    from lit_efficient.testing import data
    from tests.contract.table import case

    of, callbacks = OPTIONS[name]
    module = case(of).toy()
    optimizer = OPTIMIZERS.get(name.removesuffix(" with EMA"))
    if optimizer is not None:
        module.configure_optimizers = lambda: optimizer(lit_efficient, module)
    made = [*callbacks(lit_efficient), lit_efficient.ExactResume(3)]
    arguments = {"max_epochs": 2, "val_check_interval": 3, "accumulate_grad_batches": window}
    arguments |= {"plugins": [lit_efficient.SafeCheckpointIO()]}
    return Fit(module, (data(4 * BATCHES, shuffle=True), data()), made, arguments)


def _options() -> list[str]:
    return [_case((name,), window, part) for name in OPTIONS for window in WINDOWS for part in range(1, 2 * BATCHES)]


def _try_option(case: str, folder: Path) -> str:
    name, rest = case.split(" a step, after ")
    name, _, window = name.rpartition(" ")
    return resume(int(rest.split()[0]), 2 * BATCHES, _option, name, int(window))


# Schedulers ----------------------------------------------------------------------------------------------------------

_RATE = 0.005
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.0005, _RATE, 3, mode="triangular2"),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 7),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 3, 7], 0.5),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9 if n % 2 else 1.05),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, _RATE, total_steps=20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 15, 2.0),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.7, patience=0, cooldown=1, threshold=0.2),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 8)], [3]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.8),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.0005, 4),
}
MONITORS = ("val/loss", "train/loss", "train/loss_epoch")


class Scheduled(L.LightningModule):
    """Dropout and draws of its own, and a schedule."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.schedule = name
        self.config = config

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.net(batch) - torch.randn(())).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.net(batch + torch.randn(4)).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), _RATE, momentum=0.9)
        return [optimizer], [{"scheduler": SCHEDULES[self.schedule](optimizer), "strict": False, **self.config}]


def _scheduled(name: str, interval: str, frequency: int, monitor: str, window: int) -> Fit:
    from lit_efficient import ExactResume
    from tests.callbacks.resume_kit import Augmented

    config = {"interval": interval, "frequency": frequency, **({"monitor": monitor} if monitor else {})}
    loaders = DataLoader(Augmented(3 * BATCHES), 3, shuffle=True), DataLoader(Augmented(4), 2)
    arguments = {"max_epochs": 2, "val_check_interval": 3, "accumulate_grad_batches": window}
    return Fit(Scheduled(name, config), loaders, [ExactResume()], arguments)


@functools.cache
def _schedules() -> list[str]:
    theirs = {
        name
        for name, kind in vars(lr_scheduler).items()
        if inspect.isclass(kind) and issubclass(kind, lr_scheduler.LRScheduler) and not name.startswith("_")
    } - {"LRScheduler"}
    assert theirs <= {*SCHEDULES}, f"torch has further ones: {theirs - {*SCHEDULES}}"
    settings = itertools.product(sorted(SCHEDULES), ("step", "epoch"), (1, 2), ("", *MONITORS), WINDOWS)
    return [
        f"{name} {interval} {frequency} {monitor or '-'} {window} {part}"
        for name, interval, frequency, monitor, window in settings
        if bool(monitor) == (name == "ReduceLROnPlateau")
        for part in range(1, 2 * BATCHES)
    ]


def _try_schedule(case: str, folder: Path) -> str:
    name, interval, frequency, monitor, window, part = case.split()
    arguments = name, interval, int(frequency), "" if monitor == "-" else monitor, int(window)
    return resume(int(part), 2 * BATCHES, _scheduled, *arguments)


# Tasks ---------------------------------------------------------------------------------------------------------------

SETS = {
    "EMA": lambda x, folder, low: [x.EMA(0.8), x.StochasticDepth(0.5)],
    "LoRA": lambda x, folder, low: [
        x.LoRA(rank=2, save_base=True),  # a run that goes on begins with other draws
        x.PowerEMA([0.1, 0.25], snapshot_every_n_steps=2, dirpath=str(folder / "ema")),
    ],
    "ScheduleFree": lambda x, folder, low: [x.ScheduleFree(warmup_steps=2), x.StochasticDepth(0.5)],
    "CheckpointAverage": lambda x, folder, low: [
        x.CheckpointAverage(last_k=2, every_n_steps=1),
        *([x.KahanSummation()] if low else ()),
    ],
    "LowBitOptimizer": lambda x, folder, low: [
        x.LowBitOptimizer(min_size=0, keep_32bit=()),
        x.TokenWeightedAccumulation("auto"),
    ],
}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


def _language(folder: Path, x: Any) -> tuple[Any, Any]:
    source = folder / "source"
    if not source.exists():
        source.mkdir(parents=True)
        for i in range(12):
            (source / f"file{i}.py").write_text(f"def function_{i}(self):\n    return self.value + {i}\n\n\n" * 4)
    config = x.GPTConfig(dim=16, depth=2, num_heads=2, max_length=32, dropout=0.2)
    files = x.CorpusFiles([str(source)])
    data = x.PythonCorpus(
        vocab_size=300, sequence_length=16, batch_size=2, val_fraction=0.2, files=files, cache_dir=str(folder)
    )
    return x.LanguageModeling(config, learning_rate=1e-2, warmup_steps=2), data


def _diffusion(folder: Path, x: Any) -> tuple[Any, Any]:
    backbone = x.DiTConfig(channels=2, size=4, patch_size=2, width=32, depth=2, heads=2)
    encoder = x.AutoencoderConfig(latent_channels=2, width=8)
    steps = {"autoencoder_steps": 20, "judge_steps": 20}
    data = x.LatentDigits(image_size=16, autoencoder=encoder, batch_size=16, cache_dir=str(folder), **steps)
    module = x.LatentDiffusion(backbone=backbone, sampling_steps=2, samples=x.Samples(10), label_dropout=0.3)
    return module, data


TASKS = {"LanguageModeling": _language, "LatentDiffusion": _diffusion}


def _task(folder: Path, task: str, techniques: str, precision: str, window: int) -> Fit:
    import lit_efficient

    torch.manual_seed(0)
    module, data = TASKS[task](folder / task, lit_efficient)
    made = [*SETS[techniques](lit_efficient, folder, precision == "bf16-true"), lit_efficient.ExactResume(3)]
    arguments = {"max_steps": 2 * BATCHES // window, "max_epochs": -1, "accumulate_grad_batches": window}
    arguments |= {"val_check_interval": 4, "limit_train_batches": BATCHES + 2, "limit_val_batches": 1}
    arguments |= {"precision": precision, "gradient_clip_val": 1.0, "plugins": [lit_efficient.SafeCheckpointIO()]}
    return Fit(module, data, made, arguments)


def _tasks() -> list[str]:
    settings = itertools.product(TASKS, SETS, PRECISIONS, (1, 2), range(1, 2 * BATCHES))
    return [
        f"{task} {techniques} {precision} {window} {part}"
        for task, techniques, precision, window, part in settings
        if task == "LanguageModeling" or techniques != "LowBitOptimizer"
    ]


def _go_on(name: tuple[Any, ...], path: Path) -> None:
    torch.set_num_threads(1)
    with quiet():
        _, rows, _ = _task(*name).run(Path.cwd(), path)
    torch.save(rows.rows, "rows.pt")


def _try_task(case: str, folder: Path) -> str:
    """The resumed run is one of a fresh process."""
    from lit_efficient.testing import load
    from tests import processes

    task, techniques, precision, window, part = case.split()
    name = root(), task, techniques, precision, int(window)
    run = whole(_task, *name)
    path, kept = point(run, int(part), 2 * BATCHES)
    if processes.run(_go_on, name, path, log=folder / "log"):
        return (folder / "log").read_text().strip().splitlines()[-1]
    return difference(run, kept, load(folder / "end.ckpt"), torch.load(folder / "rows.pt"))


# Loggers -------------------------------------------------------------------------------------------------------------

LOGGERS = {"csv": "loggers/csv", "tensorboard": "loggers/tensorboard", "wandb": "loggers/wandb"}
TIMED = ("samples_per_second", "tokens_per_second", "data_wait", "peak_memory_gib")  # no two runs have them alike


class Stop(L.Callback):
    """Sends this process the signal, in the batch, that the environment names: both runs have one config."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        name, at = os.environ.get("STOP", " -1").split(" ")
        if trainer.fit_loop.total_batch_idx == int(at):
            os.kill(os.getpid(), getattr(signal, name))


def _log(logger: str, every: int, resumes: bool) -> None:
    """Run a fit by the command line in the working directory."""
    from lit_efficient.__main__ import main

    torch.set_num_threads(1)
    os.environ["WANDB_MODE"] = "offline"
    os.environ["WANDB_SILENT"] = "true"
    os.environ["WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"] = "0.01"  # its service keeps rows back for 15 seconds
    words = ["fit", "--allow-import", "tests", "--allow-import", "benchmarks", "--model", "tests.support_cli.ToyModel"]
    words += ["--model.noise=0.1", "--data", "tests.support_cli.ToyData", f"--data.rows={2 * BATCHES}"]
    words += ["-c", LOGGERS[logger], "--seed_everything=3", "--trainer.accelerator=cpu", "--trainer.max_epochs=2"]
    words += [f"--trainer.log_every_n_steps={every}", "--trainer.val_check_interval=3", "--trainer.default_root_dir=r"]
    words += ["--trainer.callbacks+=ExactResume", "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint"]
    words += ["--trainer.callbacks.every_n_train_steps=2", "--trainer.callbacks.filename=kept"]
    words += ["--trainer.callbacks.enable_version_counter=false"]
    words += ["--trainer.callbacks+=benchmarks.trust_rows.resumes.Stop"]
    words += ["--ckpt_path", "last"] if resumes else []
    sys.exit(main(words))


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a file of W&B: blocks of 32 KiB after 7 bytes, of parts with checksum, length and kind."""
    at = 7
    record = b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # no room for a part: the block's rest is empty
            at += 2**15 - at % 2**15
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part = data[at + 7 : at + 7 + size]
        at = at + 7 + size
        record = part if kind in (1, 2) else record + part
        if kind in (1, 4):
            yield record


def written(logger: str, folder: Path) -> list[dict[str, Any]]:
    """Return the logged rows in a folder, in order."""
    rows: list[dict[str, Any]] = []
    if logger == "csv":
        for table in sorted(folder.rglob("metrics.csv")):
            with table.open() as file:
                rows += [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    elif logger == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        for place in sorted({path.parent for path in folder.rglob("events.out.tfevents*")}):
            events = EventAccumulator(str(place)).Reload()
            for tag in events.Tags()["scalars"]:
                rows += [{"step": event.step, tag: event.value} for event in events.Scalars(tag)]
    else:
        from wandb.proto import wandb_internal_pb2

        for path in folder.rglob("run-*.wandb"):  # a run that goes on is one of its own, and may repeat rows
            own = []
            for data in _records(path.read_bytes()):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                kept = {key: value for key, value in items.items() if not key.startswith("_") and key not in TIMED}
                own += [{"step": kept.pop("trainer/global_step", None), **kept}] if items else []
            rows += [row for row in own if own.count(row) > rows.count(row)]
    left = ({key: value for key, value in row.items() if key not in TIMED} for row in rows)
    return sorted(
        (row for row in left if row.keys() - {"step", "hp_metric"}), key=lambda row: sorted(map(str, row.items()))
    )


@functools.cache
def _logged(logger: str, every: int) -> list[dict[str, Any]]:
    from tests import processes

    folder = Path(tempfile.mkdtemp(dir=root()))
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert not processes.run(_log, logger, every, False, log=folder / "log"), (folder / "log").read_text()
    finally:
        os.chdir(before)
    rows = written(logger, folder)
    assert len(rows) > BATCHES / every, (folder / "log").read_text()
    return rows


def _loggings() -> list[str]:
    settings = itertools.product(LOGGERS, (1, 2, 3), ("SIGTERM", "SIGKILL"), range(2 * BATCHES))
    # A SIGKILL before the first checkpoint leaves nothing to go on from.
    return [" ".join(map(str, one)) for one in settings if one[2] == "SIGTERM" or one[3] > 2]


def _try_logging(case: str, folder: Path) -> str:
    from tests import processes

    logger, every, name, at = case.split()
    run = _logged(logger, int(every))
    code = processes.run(_log, logger, int(every), False, log=folder / "log", env={"STOP": f"{name} {at}"})
    if code != (143 if name == "SIGTERM" else -9):
        return f"code {code}: {(folder / 'log').read_text().strip().splitlines()[-1:]}"
    if processes.run(_log, logger, int(every), True, log=folder / "log2"):
        return f"resumed: {(folder / 'log2').read_text().strip().splitlines()[-1:]}"
    rows = written(logger, folder)
    lost = [row for row in run if run.count(row) > rows.count(row)]
    more = [row for row in rows if rows.count(row) > run.count(row)]
    return f"{len(lost)} lost, {len(more)} too many: {(lost + more)[:2]}" if lost or more else ""


# Peers ---------------------------------------------------------------------------------------------------------------


def _stock(window: int) -> Fit:
    """The same toy under Lightning alone: dropout, shuffled data, momentum, a schedule by steps."""
    made = _scheduled("OneCycleLR", "step", 1, "", window)
    return Fit(made.module, made.data, [], made.arguments)


def _peer_cases() -> list[str]:
    return [f"{window} {part}" for window in (1, 2) for part in range(1, 2 * BATCHES)]


def _try_stock(case: str, folder: Path) -> str:
    window, part = map(int, case.split())
    run = whole(_stock, window)
    path, _ = point(run, part, 2 * BATCHES)
    with quiet():
        end, _, _ = _stock(window).run(folder, path)
    return _weights_differ(run.end["state_dict"], end["state_dict"])


def _weights_differ(one: dict[str, Any], other: dict[str, Any]) -> str:
    wrong = [name for name in one if not torch.equal(one[name], other[name])]
    return f"{len(wrong)} of {len(one)} weights differ" if wrong else ""


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


def _hugging_face(folder: Path, window: int, resume_from: str | None) -> dict[str, Any]:
    """The same network and number of batches under their Trainer, a checkpoint each step, at its defaults."""
    from transformers import Trainer, TrainingArguments

    x = torch.randn(3 * BATCHES, 4, generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=3, gradient_accumulation_steps=window, num_train_epochs=2,
        save_strategy="steps", save_steps=1, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        seed=0, learning_rate=0.005,
    )  # fmt: skip
    trainer = Trainer(_Net(), arguments, train_dataset=[{"x": row} for row in x])
    with quiet():
        trainer.train(resume_from_checkpoint=resume_from)
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@functools.cache
def _hugging_face_whole(window: int) -> tuple[Path, dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(dir=root()))
    return folder, _hugging_face(folder, window, None)


def _peer_steps() -> list[str]:
    return [f"{window} {step}" for window in (1, 2) for step in range(1, 2 * BATCHES // window)]


def _try_hugging_face(case: str, folder: Path) -> str:
    window, step = map(int, case.split())
    place, end = _hugging_face_whole(window)
    torch.manual_seed(99)
    return _weights_differ(end, _hugging_face(folder, window, str(place / f"checkpoint-{step}")))


PIECES = (
    Piece(
        2,
        "resume-tasks",
        "LanguageModeling and LatentDiffusion, tiny, with four sets of techniques, three precisions and windows of 1 "
        "and 2 batches, resumed after each batch in a fresh process: all bits of the checkpoint at the end and all "
        "logged rows are those of the uninterrupted run",
        _tasks,
        _try_task,
        in_ci=1,
    ),
    Piece(
        2,
        "resume-technique",
        "each technique alone, beside ExactResume, resumed after each batch of two epochs, windows of 1 and 4 batches, "
        "shuffled data: all bits and rows",
        _alone,
        _try_techniques,
        in_ci=2,
    ),
    Piece(
        2,
        "resume-pairs",
        "300 pairs of techniques that no conflict refuses, resumed after a batch: all bits and rows",
        lambda: _together(2, 300),
        _try_techniques,
        in_ci=1,
    ),
    Piece(
        2,
        "resume-triples",
        "100 triples of techniques that no conflict refuses, resumed after a batch: all bits and rows",
        lambda: _together(3, 100),
        _try_techniques,
        in_ci=1,
    ),
    Piece(
        2,
        "resume-options",
        "starts of LoRA, 4-bit experts, balancing by a bias, AdamC, asynchronous checkpoints, SOAP and variants of "
        "Muon, resumed after each batch of two epochs, windows of 1 and 4 batches: all bits and rows",
        _options,
        _try_option,
        in_ci=2,
    ),
    Piece(
        2,
        "resume-schedulers",
        "every scheduler of torch, stepped each step, each epoch and each second one, ReduceLROnPlateau with three "
        "monitors, resumed after each batch: all bits and rows",
        _schedules,
        _try_schedule,
        in_ci=2,
    ),
    Piece(
        2,
        "resume-loggers",
        "CSV, TensorBoard and W&B (offline, its file written each 10 ms, not each 15 s), a row each step, each second "
        "or third, stopped in any batch by SIGTERM or SIGKILL and resumed by `--ckpt_path last`: no row is lost, none "
        "is there twice (in W&B's run: a resumed one is another), all values are the same (but for times and memory)",
        _loggings,
        _try_logging,
        in_ci=0,
    ),
    Piece(
        2,
        "resume-stock-lightning",
        "a network with dropout, shuffled data and a schedule, resumed after each batch: the weights at the end",
        _peer_cases,
        _try_stock,
        subject="Lightning",
        in_ci=0,
    ),
    Piece(
        2,
        "resume-stock-transformers",
        "a network with dropout and shuffled data, resumed after each step by resume_from_checkpoint: the weights at "
        "the end",
        _peer_steps,
        _try_hugging_face,
        subject="Transformers",
        in_ci=0,
    ),
)
