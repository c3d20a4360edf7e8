"""A whole training run to be interrupted by real signals, in a process of its own (see ``tests.processes``)."""

import os
import signal
from pathlib import Path

import lightning.pytorch as pl
import torch

from lit_efficient.callbacks.exact_resume import ExactResume
from lit_efficient.callbacks.signal_checkpoint import SignalCheckpoint
from lit_efficient.plugins.safe_checkpoint_io import SafeCheckpointIO
from tests.callbacks.resume_kit import Tiny, final_state


class Interrupter(pl.Callback):
    """Sends the signal in batch ``at`` and, unless it is SIGINT, once more while the checkpoint is being made."""

    def __init__(self, name, at, hook):
        self.number, self.at, self.hook = getattr(signal, name, None), at, hook

    def strike(self, trainer, *hooks):
        if self.number and self.hook in hooks and trainer.fit_loop.total_batch_idx in (self.at, -1):
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_rank == trainer.world_size - 1:
            self.strike(trainer, "train", "twice")

    def on_validation_batch_start(self, trainer, *args):
        self.strike(trainer, "sanity" if trainer.sanity_checking else "validation")

    def on_save_checkpoint(self, trainer, *args):
        self.strike(trainer, "twice", *([] if self.number == signal.SIGINT else ["train"]))


class FinalizedLogger(pl.loggers.logger.DummyLogger):
    def finalize(self, status):
        print("finalized", status, flush=True)


def train(folder, name="", at=5, hook="train", ckpt_path=None, devices=1, num_workers=0):
    """Two epochs of 8 batches, an optimizer step every 2, validation every 3."""
    torch.set_num_threads(1)
    pl.seed_everything(3 if ckpt_path is None else 4, verbose=False)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=2,
        accumulate_grad_batches=2,
        val_check_interval=3,
        num_sanity_val_steps=2 if hook == "sanity" else 0,
        default_root_dir=folder,
        callbacks=[SignalCheckpoint(), Interrupter(name, at, hook), ExactResume()],
        plugins=[SafeCheckpointIO()],
        logger=FinalizedLogger(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        context = "fork" if num_workers else None  # what a program of its own would use, unlike the tests' server
        trainer.fit(Tiny(num_workers=num_workers, multiprocessing_context=context), ckpt_path=ckpt_path)
    finally:
        after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
        print("handlers restored", before == after, flush=True)
    torch.save(final_state(trainer)[:3], Path(folder) / f"final{trainer.global_rank}.pt")
