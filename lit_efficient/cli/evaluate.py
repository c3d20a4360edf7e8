"""Validate several checkpoints of one run with the run's own config: module, data and techniques as they were."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from lit_efficient.cli.fits import FitParts

# One process on one device, and nothing that would write into the folder of the run.
_ALONE = ("--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.strategy=auto", "--trainer.logger=false")


class Validator:
    """What validates checkpoints of one run.

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
        """Everything that a validation of this checkpoint logs, by name; the same random numbers each time."""
        seed_everything(self._parts.seed, verbose=False)
        trainer: Any = self._parts.trainer
        with contextlib.redirect_stdout(io.StringIO()):  # samples of callbacks: the caller prints a table
            trainer.validate(
                self._parts.model, datamodule=self._parts.datamodule, ckpt_path=str(checkpoint), verbose=False
            )
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
