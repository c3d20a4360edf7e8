"""Tables of the samples that a policy is trained on, with their rewards.

    every N steps: prompt, completion, reward and its parts, advantage, length, end -> W&B, and a text in the run folder

Costs: at most ``samples`` rows of at most 4,000 characters for each text
"""

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from lit_efficient.errors import ChecksTypes, ConfigurationError, check_number, diagnostic
from lit_efficient.files.atomic_file import replacing
from lit_efficient.files.runs import samples_file
from lit_efficient.internals.lightning_trainer import AskedEarly
from lit_efficient.traits import Trait

_LONGEST = 4000  # characters of a prompt or completion


class SampleTable(ChecksTypes, AskedEarly, Callback):
    """Write a table of samples with their rewards every few steps.

    It goes to each W&B logger of the trainer, as ``train/samples``, and to ``samples/rewards_step_XXXXXXX.txt`` in the
    run's folder. With several processes, the samples are those of the first one. The module needs an attribute
    ``sample_table``, as `PolicyOptimization` has it: a list with a mapping from columns to values for each sample.

    Args:
        every_n_steps: Number of optimizer steps between two tables.
        samples: Largest number of samples in a table.
        folder: Folder that contains ``samples``. ``None``: the folder of the run, or outside of the command line that
            of the logger.

    Raises:
        ConfigurationError: For an argument out of range, or if the module has no ``sample_table``.
    """

    traits = frozenset({Trait.LEAVES_TRACES})

    def __init__(self, every_n_steps: int = 50, samples: int = 16, folder: str | None = None) -> None:
        check_number("SampleTable", "every_n_steps", every_n_steps, least=1, whole=True)
        check_number("SampleTable", "samples", samples, least=1, whole=True)
        self.every_n_steps = every_n_steps
        self.samples = samples
        self.folder = folder
        self._step = -1  # of the last batch

    def refuse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise an error if the module has no table of samples."""
        if not hasattr(pl_module, "sample_table"):
            raise ConfigurationError(
                f"SampleTable: {type(pl_module).__name__} has no sample_table: use PolicyOptimization, or leave "
                "SampleTable out"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step  # a resumed run has written the table of this step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        step = trainer.global_step
        is_new = step != self._step
        self._step = step
        if not is_new or step == 0 or step % self.every_n_steps:
            return
        log_dir = trainer.log_dir  # a broadcast, so all processes must read it
        rows: Any = pl_module.sample_table
        if not trainer.is_global_zero or not rows:
            return
        with diagnostic("SampleTable", "samples"):
            rows = [{name: _shown(value) for name, value in row.items()} for row in rows[: self.samples]]
            path = samples_file(step, ".txt", trainer.default_root_dir, log_dir, self.folder)
            with replacing(path.with_name(f"rewards_{path.name}")) as file:
                file.write("\n".join(map(_text, rows)).encode(errors="replace"))
            columns = ["step", *rows[0]]
            for logger in trainer.loggers:
                if isinstance(logger, WandbLogger):
                    logger.log_table("train/samples", columns, [[step, *row.values()] for row in rows], step=step)


def _shown(value: object) -> Any:
    """Return a value for a table: the middle of a long text is left out, and NaN is no value."""
    if isinstance(value, str) and len(value) > _LONGEST:
        half = _LONGEST // 2
        return f"{value[:half]} ... ({len(value) - 2 * half:,} characters are left out) ... {value[-half:]}"
    return None if isinstance(value, float) and math.isnan(value) else value


def _text(row: Mapping[str, Any]) -> str:
    """Return a sample as text: a line of its numbers, the prompt and the completion."""
    facts = []
    for name, value in row.items():
        if name not in ("prompt", "completion"):
            facts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return f"── {', '.join(facts)}\n{row['prompt']}\n──▶\n{row['completion']}\n"
