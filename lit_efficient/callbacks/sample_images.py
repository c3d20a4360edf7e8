"""A picture of samples at every validation: one PNG grid on disk, and the same in the loggers that show pictures.

Works with any LightningModule that has ``sample_images(num, seed) -> [N, C, H, W]``, uint8 or float in [-1, 1], which
draws from a generator of its own. The same seed each time: one watches the same samples improve. A module that has
``check_sample_images()`` is asked before the first step whether it can, one that has ``image_captions(num)`` for the
names of its samples, which are written on the grid.

Costs: one sampling of ``rows * columns`` images at each validation it acts on.
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.files.pictures import draw_grid, write_picture
from lit_efficient.files.runs import samples_file
from lit_efficient.internals.lightning_trainer import AskedEarly
from lit_efficient.models.probes.modes import evaluating
from lit_efficient.traits import Trait


class SampleImages(AskedEarly, Callback):
    """Writes ``samples/step_XXXXXXX.png`` in the run's folder at each validation, and logs it.

    Args:
        every_n_validations: Act on every n-th validation of the fit; the sanity check does not count.
        columns: Images a row. With as many as there are classes, each class is one column.
        rows: Rows of the grid.
        zoom: Screen pixels per image pixel in the file.
        seed: Seed of the samples.
        folder: Where ``samples`` lies; null is the run's folder, outside of the command line that of the logger.
    """

    traits = frozenset({Trait.LEAVES_TRACES})

    def __init__(
        self,
        every_n_validations: int = 1,
        columns: int = 10,
        rows: int = 6,
        zoom: int = 2,
        seed: int = 0,
        folder: str | None = None,
    ) -> None:
        named = {"every_n_validations": every_n_validations, "columns": columns, "rows": rows, "zoom": zoom}
        for name, value in named.items():
            check_number("SampleImages", name, value, least=1, whole=True)
        self.every_n_validations = every_n_validations
        self.columns = columns
        self.rows = rows
        self.zoom = zoom
        self.seed = seed
        self.folder = folder
        self._validations = 0

    def refuse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a module that makes no images."""
        if not callable(getattr(pl_module, "sample_images", None)):
            raise ConfigurationError(
                f"SampleImages: {type(pl_module).__name__} must have a method sample_images(num, seed) -> [N, C, H, W]."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the module say what it lacks for images now, not at the first validation."""
        check = getattr(pl_module, "check_sample_images", None)
        if callable(check):
            check()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._validations += 1
        if self._validations % self.every_n_validations:
            return
        with evaluating(pl_module), torch.no_grad():
            images = pl_module.sample_images(self.rows * self.columns, self.seed)  # type: ignore[operator]
        log_dir = trainer.log_dir  # asks all processes: not under is_global_zero
        if trainer.is_global_zero:
            captions = getattr(pl_module, "image_captions", None)
            names = captions(len(images)) if callable(captions) else ()
            if names and len(names) != len(images):
                name = f"{type(pl_module).__name__}.image_captions({len(images)})"
                raise refusal("SampleImages", name, f"{len(images)} names, or none", list(names))
            picture = draw_grid(images, self.columns, self.zoom, captions=names)
            path = samples_file(trainer.global_step, ".png", trainer.default_root_dir, log_dir, self.folder)
            write_picture(picture, path)
            _log(trainer, picture, path)

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validations = state_dict["validations"]


def _log(trainer: Trainer, picture: Any, path: Path) -> None:
    import numpy as np
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            # No step: W&B's own counter only moves forward, and other metrics were logged at this one already.
            logger.log_image("samples", [str(path)], caption=[f"step {trainer.global_step}"])
        elif isinstance(logger, TensorBoardLogger):
            pixels = np.atleast_3d(np.asarray(picture))
            logger.experiment.add_image("samples", pixels, trainer.global_step, dataformats="HWC")
