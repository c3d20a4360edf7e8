"""Small task that can be disturbed at named instants, by a signal or by another fault of a trial.

    TRUST_STRIKE='["forward", 3, "SIGTERM", 1]'    the process signals itself in its third forward pass, once

The file ``struck`` records each disturbance with its training step, and the number of training steps begun afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.checkpoints import load_verified
from lit_efficient.traits import Trait

STEPS = 6  # of 12 batches in 2 epochs, two for each step
_seen: Counter[str] = Counter()
_module: list[Any] = []  # the one that trains


def strike(place: str) -> None:
    """Send the signal that the environment names, if this place and turn match."""
    if "TRUST_STRIKE" not in os.environ:
        return
    where, nth, name, times, *delay = json.loads(os.environ["TRUST_STRIKE"])
    if place != where:
        return
    _seen[place] += 1
    if _seen[place] != nth or os.environ.get("TRUST_RANK", os.environ.get("RANK")) != os.environ.get("RANK"):
        return
    if delay:
        threading.Timer(delay[0], _send, (name, times)).start()
    else:
        _send(name, times)


def _send(name: str, times: int) -> None:
    trainer = _module[0]._trainer if _module else None
    with open("struck", "a") as file:
        file.write(f"step {trainer.global_step if trainer else 0}\n")
    if not name.startswith("SIG"):
        afflict(name)
        return
    for _ in range(times):
        if os.environ.get("TRUST_GROUP"):
            os.killpg(os.getpgrp(), getattr(signal, name))
        else:
            os.kill(os.getpid(), getattr(signal, name))


def afflict(fault: str) -> None:
    """Apply a fault to the folder of the current run."""
    run = Path("runs/run/latest").resolve()
    if fault == "vanish":
        run.rename("vanished")
    elif fault == "vanish-all":
        Path("runs").resolve().rename(Path("runs").resolve().with_name("vanished"))
    elif fault == "read-only":
        make_read_only(run)


def make_read_only(folder: Path) -> None:
    """Make a folder read-only for processes without CAP_DAC_OVERRIDE."""
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def be_nobody() -> None:
    """Drop CAP_DAC_OVERRIDE in this process, so that root respects the modes of files."""
    import ctypes

    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the third version of the call, of this process
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the same of rights 32 and up
    numbers = {"x86_64": (125, 126), "aarch64": (90, 91)}[os.uname().machine]  # capget, capset
    assert libc.syscall(numbers[0], header, rights) == 0, ctypes.get_errno()
    rights[0] &= ~(1 << 1)
    assert libc.syscall(numbers[1], header, rights) == 0, ctypes.get_errno()


def struck() -> tuple[int, int] | None:
    """The step at which the run below the working directory was struck, and how many forward passes began after."""
    lines = Path("struck").read_text().splitlines() if Path("struck").exists() else []
    return (int(lines[0].split()[1]), lines.count("forward")) if lines else None


class Net(LightningModule):
    """Module that draws random numbers in each step, logs texts and images, and can be disturbed.

    Args:
        width: Width of the layer.
    """

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        strike("model-init")
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5)) for _ in range(2))
        self.head = nn.Linear(width, 1)
        _module[:] = [self]

    def configure_model(self) -> None:
        strike("configure-model")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        trial = self.trainer.fast_dev_run or any(type(one).__name__ == "DummyLogger" for one in self.trainer.loggers)
        strike("trial" if trial else "forward")
        if os.path.exists("struck"):
            with open("struck", "a") as file:
                file.write("forward\n")
        loss = (self(batch + torch.randn(())) - torch.rand(())).square().mean()
        strike("trial-loss" if trial else "loss")
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        strike("sanity-step" if self.trainer.sanity_checking else "validation-step")
        self.log("val/loss", self(batch).square().mean())

    def configure_optimizers(self) -> Any:
        strike("configure-optimizers")
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def generate_text(self, prompts: list[str], **how: Any) -> list[str]:
        strike("sample-text")
        return [f"{prompt} {self.head.bias.item()}" for prompt in prompts]

    def sample_images(self, num: int, seed: int) -> Tensor:
        strike("sample-image")
        return torch.zeros(num, 1, 4, 4, dtype=torch.uint8)


class Rows(Dataset[Tensor]):
    """Dataset of 18 rows, some of which can fail.

    Args:
        fault: Fault of the worker that reads row 7: ``killed``, ``raises`` or ``hangs``.
    """

    def __init__(self, fault: str = "") -> None:
        self.x = torch.randn(18, 4, generator=torch.Generator().manual_seed(1))
        self.fault = fault

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        strike("fetch")
        if index == 7 and self.fault:
            befall(self.fault)
        return self.x[index]


def befall(fault: str) -> None:
    """Apply a fault to a worker. If the file ``mended`` exists, do nothing."""
    if os.path.exists("mended"):
        return
    if fault == "raises":
        raise ValueError("row 7 cannot be read")
    if fault == "raises-ours":
        raise ConfigurationError("rows.csv: row 7 cannot be read")
    if fault == "misses":
        open("rows/7.txt").close()
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
    if fault == "exits":
        os._exit(1)
    if fault == "hangs":
        signal.pause()


class Data(LightningDataModule):
    """Data module with rows in batches.

    Args:
        batch_size: Rows per batch.
        num_workers: Number of loader workers.
        fault: Argument of :class:`Rows`.
        timeout: Seconds to wait for a worker.
    """

    def __init__(self, batch_size: int = 3, num_workers: int = 0, fault: str = "", timeout: float = 0) -> None:
        super().__init__()
        strike("data-init")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.fault = fault
        self.timeout = timeout

    def prepare_data(self) -> None:
        strike("prepare-data")

    def setup(self, stage: str) -> None:
        strike("data-setup")

    def _loader(self, fault: str = "", **more: Any) -> DataLoader[Tensor]:
        workers: dict[str, Any] = {"num_workers": self.num_workers, "timeout": self.timeout}
        workers["multiprocessing_context"] = "fork" if self.num_workers else None  # as a program of its own would
        return DataLoader(Rows(fault), self.batch_size, **workers, **more)

    def train_dataloader(self) -> DataLoader[Tensor]:
        strike("train-loader")
        return self._loader(self.fault, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return self._loader()


HOOKS = {
    "setup": "callback-setup",
    "on_fit_start": "fit-start",
    "on_sanity_check_start": "sanity-start",
    "on_sanity_check_end": "sanity-end",
    "on_train_start": "train-start",
    "on_train_epoch_start": "epoch-start",
    "on_train_batch_start": "batch-start",
    "on_before_backward": "before-backward",
    "on_after_backward": "after-backward",
    "on_before_optimizer_step": "optimizer-step",
    "on_before_zero_grad": "zero-grad",
    "on_train_batch_end": "batch-end",
    "on_validation_start": "validation-start",
    "on_validation_end": "validation-end",
    "on_save_checkpoint": "save",
    "on_train_epoch_end": "epoch-end",
    "on_train_end": "train-end",
    "on_fit_end": "fit-end",
    "teardown": "teardown",
}


class Strikes(Callback):
    """Callback that disturbs the process in hooks."""

    traits = frozenset({Trait.LEAVES_TRACES})


def _hook(place: str) -> Any:
    def hook(self: Callback, trainer: Any, *arguments: Any, **more: Any) -> None:
        if not (trainer.sanity_checking and place.startswith("validation")):
            strike(place)

    return hook


for _name, _place in HOOKS.items():
    setattr(Strikes, _name, _hook(_place))

CONFIG: dict[str, Any] = {
    "model": {"class_path": f"{__name__}.Net"},
    "data": {"class_path": f"{__name__}.Data"},
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "val_check_interval": 3,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "."}},
        "callbacks": [
            {"class_path": f"{__name__}.Strikes"},
            {"class_path": "ExactResume"},
            {"class_path": "SampleText", "init_args": {"prompts": ["a"], "max_new_tokens": 1}},
            {"class_path": "SampleImages", "init_args": {"columns": 1, "rows": 1}},
            {
                "class_path": "ModelCheckpoint",
                "init_args": {"every_n_train_steps": 2, "save_top_k": -1, "filename": "kept-{step}"},
            },
        ],
    },
}


def write_config() -> None:
    Path("run.yaml").write_text(yaml.safe_dump(CONFIG))


def program(*words: str) -> None:
    """``python -m lit_efficient WORDS``, where all is imported already; it can be struck while files are written."""
    begin()
    if os.environ.get("TRUST_NOBODY"):
        be_nobody()
    sys.argv = ["lit_efficient", *words]
    try:
        runpy.run_module("lit_efficient", run_name="__main__", alter_sys=True)
    finally:
        strike("end")


def begin() -> None:
    """Have a group of processes, and be struck while files are written."""
    os.setsid()
    for name in ("fsync", "replace"):
        setattr(os, name, _watched(getattr(os, name), name))


def _watched(function: Any, name: str) -> Any:
    def call(*arguments: Any, **more: Any) -> Any:
        saves = ".ckpt" in (os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else str(arguments[-1]))
        if saves:
            strike(f"before-{name}")
        result = function(*arguments, **more)
        if saves:
            strike(f"after-{name}")
        return result

    return call


def fit_words(*more: str) -> list[str]:
    return ["fit", "--allow-import", "benchmarks", "-c", "run.yaml", *more]


def trained(path: Path) -> dict[str, Any]:
    """Return the trained parts of a checkpoint: weights, optimizer and scheduler states, counters."""
    content = load_verified(path)
    return {key: content[key] for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")}


def rows(folder: Path) -> list[tuple[str, ...]]:
    """Return the losses in a run's table, in order, without times."""
    import csv

    found = []
    with contextlib.suppress(FileNotFoundError), open(folder / "metrics.csv") as file:
        for row in csv.DictReader(file):
            found += [(name, row["step"], row[name]) for name in ("loss", "val/loss") if row.get(name)]
    return sorted(found)
