"""A run in a process of its own, which a test interrupts: ``python -m tests.callbacks.interrupted_run FOLDER KEY=VALUE...``.

It prints ``step N`` after each training batch, and with ``signal=NAME at=N`` it sends itself that signal in step N.
"""

import os
import signal
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch

from lit_efficient.callbacks.exact_resume import ExactResume
from lit_efficient.callbacks.signal_checkpoint import SignalCheckpoint
from lit_efficient.plugins.checkpoint_io import SafeCheckpointIO
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


def main(folder, signal="", at="5", hook="train", ckpt_path="", devices="1", val_check_interval="3", slow="0", workers="0"):
    torch.set_num_threads(1)
    Path(folder).mkdir(parents=True, exist_ok=True)
    pl.seed_everything(int(ckpt_path == "") + 3, verbose=False)

    class Step(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            print("step", trainer.global_step, flush=True)
            time.sleep(float(slow))

    several = int(devices) > 1
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy="ddp" if several else "auto",
        max_epochs=2,
        accumulate_grad_batches=2,
        val_check_interval=int(val_check_interval),
        num_sanity_val_steps=2 if hook == "sanity" else 0,
        default_root_dir=folder,
        callbacks=[SignalCheckpoint(), Step(), Interrupter(signal, int(at), hook), ExactResume()],
        plugins=[SafeCheckpointIO()],
        logger=FinalizedLogger(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Tiny(num_workers=int(workers)), ckpt_path=ckpt_path or None)
    if trainer.is_global_zero:
        torch.save(final_state(trainer)[:2], Path(folder) / "final.pt")


if __name__ == "__main__":
    main(sys.argv[1], **dict(argument.split("=", 1) for argument in sys.argv[2:]))
