"""Asynchronous checkpoints: a thread writes a copy of the training state while training goes on.

    main thread:  copy into host memory (the bytes of the file) -> next step
    one thread:   temporary file -> fsync -> rename -> remove what the new checkpoint replaces, in this order

Saves: the time in which a file is written and flushed, in each save but the last one
Costs: host memory for one more checkpoint, and a wait if a save comes before the previous one is written
Source: torch.distributed.checkpoint.async_save, https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
"""

from functools import partial
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_efficient.errors import CheckpointError, ChecksTypes, ConfigurationError
from lit_efficient.files.background import Jobs
from lit_efficient.internals.lightning_trainer import TrainerOnly


class AsyncCheckpoint(Callback, ChecksTypes, TrainerOnly):
    """Write checkpoints in the background during a fit.

    The files are equal to those of a fit without it, byte for byte. A killed process leaves the previous checkpoint,
    and the new one whole or absent. A save waits until the previous one is written, ``fit`` ends when all are written,
    and an error of the thread is raised by the next save or by the end of ``fit``. Saves outside of ``fit`` are
    synchronous.

    Raises:
        ConfigurationError: If the trainer has no `SafeCheckpointIO`, if its strategy writes checkpoints itself, and for
            ``ModelCheckpoint(save_last="link")``.
    """

    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "training goes on while a checkpoint is written")}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        strategy: Any = trainer.strategy
        if not hasattr(strategy.checkpoint_io, "begin_background"):
            raise ConfigurationError(
                f"AsyncCheckpoint: {type(strategy.checkpoint_io).__name__} cannot write in the background: add "
                "SafeCheckpointIO() to the trainer's plugins"
            )
        by_plugin = type(strategy).save_checkpoint is Strategy.save_checkpoint
        if not getattr(strategy, "saves_in_background", by_plugin):
            raise ConfigurationError(
                f"AsyncCheckpoint: {type(strategy).__name__} writes its checkpoints itself, and while training waits: "
                "leave AsyncCheckpoint out, or use ShardedStrategy"
            )

        for callback in trainer.checkpoint_callbacks:
            if getattr(callback, "save_last", None) == "link":
                raise ConfigurationError(
                    "AsyncCheckpoint: ModelCheckpoint(save_last='link') makes a link to a file that is not written "
                    "yet: set save_last=True, which makes one file with two names"
                )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        checkpoint_io: Any = trainer.strategy.checkpoint_io
        checkpoint_io.begin_background()
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):  # asks which names are free
                callback.file_exists = partial(_exists, callback, checkpoint_io.jobs)  # type: ignore[method-assign]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for callback in trainer.checkpoint_callbacks:
            vars(callback).pop("file_exists", None)
        checkpoint_io: Any = trainer.strategy.checkpoint_io
        checkpoint_io.teardown()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self.teardown(trainer, pl_module, "fit")
        except CheckpointError as error:  # the exception that ends the fit is the one to raise
            rank_zero_warn(f"AsyncCheckpoint: {error}")


def _exists(callback: ModelCheckpoint, jobs: Jobs, path: str, trainer: Trainer) -> bool:
    """Return whether a checkpoint exists or will exist when the jobs are done. Process 0 decides."""
    planned = jobs.will_exist(path)
    if planned is None:
        return type(callback).file_exists(callback, path, trainer)
    return trainer.strategy.reduce_boolean_decision(planned and trainer.is_global_zero, all=False)
