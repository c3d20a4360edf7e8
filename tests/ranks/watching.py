"""RankWatch on two ranks, of which the second one leaves the first one waiting."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as L
import pytest
from torch.utils.data import DataLoader, IterableDataset, Subset

from lit_efficient import ConfigurationError, RankWatch, ShardedStrategy
from lit_efficient.cli import run as run_cli
from lit_efficient.distributed import ranks
from tests.support import Toy, data, trainer

SIGNALS = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}


class Leaves(L.Callback):
    """The second rank, before its third step: raises and lives on, is sent a signal, or ends its training after it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank != 1 or batch_idx != 2:
            return
        if self.how in SIGNALS:
            os.kill(os.getpid(), SIGNALS[self.how])
        if self.how == "raised":
            raise KeyError("a row that is not there")
        trainer.should_stop = True


def waited_for(how: str) -> None:
    run = trainer([Leaves(how), RankWatch(0.5, 0.5)], devices=2, strategy="ddp", max_epochs=1, limit_val_batches=0)
    loader: DataLoader = data(32)
    try:
        run.fit(Toy(), loader, data())
    except KeyError:
        print("raised", flush=True)
    if run.global_rank == 1:  # its end would be noticed by the collectives of the other one
        deadline = time.monotonic() + 60
        while not Path("ended").exists() and time.monotonic() < deadline:
            time.sleep(0.05)


class Tokenising(L.LightningDataModule):
    """The first rank prepares the data, in which one of the two is killed."""

    def __init__(self, victim: int) -> None:
        super().__init__()
        self.victim = victim

    def prepare_data(self) -> None:
        if self.victim == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not Path("killed").exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def train_dataloader(self) -> DataLoader:
        return data(32)


def prepared(victim: int) -> None:
    run = trainer([RankWatch()], devices=2, strategy="ddp", max_epochs=1, limit_val_batches=0)
    if os.environ["RANK"] == str(victim) == "1":
        run.strategy.setup_environment()
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    run.fit(Toy(), datamodule=Tokenising(victim))


class Rows(IterableDataset):
    """As many rows as nobody can ask for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter([data(64).dataset[i] for i in range(self.count)])


def uneven(sized: bool) -> None:
    """The first rank has a batch more than the second one, which validates, whose collectives are taken for others."""
    count = 24 if os.environ["RANK"] == "1" else 32
    rows: Any = Subset(data(64).dataset, range(count)) if sized else Rows(count)
    watch: list[Any] = [] if sized else [RankWatch(0.5, 0.5)]
    sharding = ShardedStrategy(timeout=timedelta(seconds=60))
    run = trainer(watch, devices=2, strategy=sharding, max_epochs=1, use_distributed_sampler=False)
    said = "the processes have 4, 3 batches of training, and would wait for each other"
    with pytest.raises(ConfigurationError, match=said) if sized else nullcontext():
        run.fit(Toy(), DataLoader(rows, 8), data())


def outlasted(window: int) -> None:
    """The first rank has a batch more than the second one, which ends well, and whose connections are closed then.

    In windows of two, the second rank's last gradients meet what Lightning sends before the first one's next batch.
    """
    rows = Rows(24 if os.environ["RANK"] == "1" else 32)
    more: dict[str, Any] = {"use_distributed_sampler": False, "limit_val_batches": 0}
    run = trainer([RankWatch(10, 3)], devices=2, strategy="ddp", accumulate_grad_batches=window, **more)
    run.fit(Toy(), DataLoader(rows, 8))


class SavesAlone(L.Callback):
    """The first rank, in the midst of the epoch."""

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.save_checkpoint("together.ckpt")
        if batch_idx == 2 and trainer.is_global_zero:
            trainer.save_checkpoint("alone.ckpt", weights_only=not self.sharded)


def saved_alone(sharded: bool) -> None:
    strategy = ShardedStrategy() if sharded else "ddp"
    run = trainer([SavesAlone(sharded), RankWatch(5, 3)], devices=2, strategy=strategy, limit_val_batches=0)
    run.fit(Toy(), data(64))


def ended_together() -> None:
    watch = RankWatch(0.5, 0.5)
    run = trainer([watch], devices=2, strategy="ddp", max_epochs=1)
    run.fit(Toy(), data(32), data())
    run.validate(Toy(), data(32), verbose=False)
    assert watch._line is None
    assert run.global_step == 4


def unreachable() -> None:
    """Process 0 is behind a wall: both go on, and say that nobody is watched."""
    watch = RankWatch()
    run = trainer([watch], devices=2, strategy="ddp", max_epochs=1)
    with (
        mock.patch("socket.create_connection", side_effect=OSError("no route")),
        mock.patch("lit_efficient.distributed.rank_line.WAIT", 1),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        run.fit(Toy(), data(32), data())
    assert run.global_step == 4
    assert run.global_rank or "(process 1: no route): no process is watched" in " ".join(
        str(one.message) for one in said
    )


def alone(taken: bool) -> None:
    """The second rank never starts, and something else may hold the first one's port."""
    if os.environ["RANK"] == "1":
        return
    ranks._PATIENCE = 0.2
    port = int(os.environ["MASTER_PORT"])
    with socket.create_server(("", port)) if taken else nullcontext():
        strategy = ["--trainer.strategy", "DDPStrategy", "--trainer.strategy.timeout", "0:00:02"]
        toys = ["--model", "tests.support_cli.ToyModel", "--data", "tests.support_cli.ToyData"]
        sys.exit(
            run_cli(
                [
                    "fit",
                    "--allow-import",
                    "tests",
                    *toys,
                    *strategy,
                    "--trainer.devices",
                    "2",
                    "--trainer.accelerator",
                    "cpu",
                ]
            )
        )
