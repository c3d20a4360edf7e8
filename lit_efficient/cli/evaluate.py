"""Validation of several checkpoints of one run with the run's own config: module, data and techniques as they were."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import seed_everything

from lit_efficient.cli.fits import FitParts

# One process on one device. Nothing may be written into the folder of the run.
_ALONE = ("--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.strategy=auto", "--trainer.logger=false")


class Validator:
    """Validates checkpoints of one run.

    Args:
        configs: Config files, as for ``python -m lit_efficient validate``; the one that a run saved will do.
        arguments: Further arguments of that command, as in ``["--data.batch_size", "8"]``.

    Raises:
        ConfigurationError: If the configs and arguments do not fit the classes that they name.
    """

    def __init__(self, configs: Sequence[str], arguments: Sequence[str] = ()) -> None:
        given = [part for path in configs for part in ("-c", path)]
        self._parts = FitParts([*given, *_ALONE, *arguments], None, None, "validate")

    def __call__(self, checkpoint: str | Path) -> dict[str, float]:
        """Return what a validation of a checkpoint logs, by name. Each call draws the same random numbers."""
        seed_everything(self._parts.seed, verbose=False)
        trainer = self._parts.trainer
        # The caller prints a table. Samples that callbacks print would stand in between.
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.validate(
                self._parts.model, datamodule=self._parts.datamodule, ckpt_path=str(checkpoint), verbose=False
            )
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
