"""Sampled images at each validation: a grid as a PNG file, also in loggers that show images.

The module needs ``sample_images(num, seed) -> [N, C, H, W]``, uint8 or float in [-1, 1], which draws from its own
generator. The seed is the same each time, so that the same samples can be seen to improve. These methods are optional:

- ``check_sample_images()`` runs before the first step, and raises an error if the module cannot sample.
- ``image_captions(num)`` returns names of the samples, which are written on the grid.
- ``before_training()``, a context in which the network is that before training, and ``check_before_training()``, which
  raises an error if there is none. ``before: true`` needs both.

Costs: the sampling of ``rows * columns`` images at every n-th validation; with ``before`` once more, with a second
network in memory
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_efficient.errors import ChecksTypes, ConfigurationError, check_number, diagnostic, refusal
from lit_efficient.files.pictures import draw_grid, write_picture
from lit_efficient.files.runs import samples_file
from lit_efficient.internals.lightning_trainer import AskedEarly
from lit_efficient.models.probes.modes import evaluating
from lit_efficient.traits import Trait


class SampleImages(ChecksTypes, AskedEarly, Callback):
    """Sample images at validations, write them to ``samples/step_XXXXXXX.png`` in the run's folder, and log them.

    Args:
        every_n_validations: Number of validations of the fit per grid, at least 1. The sanity check does not count.
        columns: Images per row, at least 1. With the number of classes, each class has its own column.
        rows: Number of rows, at least 1.
        zoom: Pixels of the file per pixel of an image, along each side, at least 1.
        seed: Seed of the samples.
        folder: Folder that contains ``samples``. ``None``: the folder of the run, or outside of the command line that
            of the logger.
        before: Draw each sample beside that of the network before training, with the same seed and prompt: a pretrained
            network without adapters.

    Raises:
        ConfigurationError: For an argument out of range, or if the module has no ``sample_images`` (with ``before`` no
            ``before_training``).
    """

    traits = frozenset({Trait.ACTS_AT_VALIDATION, Trait.LEAVES_TRACES})

    def __init__(
        self,
        every_n_validations: int = 1,
        columns: int = 10,
        rows: int = 6,
        zoom: int = 2,
        seed: int = 0,
        folder: str | None = None,
        before: bool = False,
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
        self.before = before
        self._validations = 0
        self._before: Tensor | None = None  # samples of the network before training

    def refuse(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise an error if the module cannot sample images."""
        if not callable(getattr(pl_module, "sample_images", None)):
            raise ConfigurationError(
                f"SampleImages: {type(pl_module).__name__} has no method sample_images(num, seed) -> [N, C, H, W]. "
                "Add one, or leave SampleImages out"
            )
        if self.before and not callable(getattr(pl_module, "before_training", None)):
            allowed = f"false for {type(pl_module).__name__}, which has no method before_training()"
            raise refusal("SampleImages", "before", allowed, True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the module's own check now, because a failure at the first validation would be late."""
        names = ["check_sample_images"]
        if self.before:
            names.append("check_before_training")
        for name in names:
            check = getattr(pl_module, name, None)
            if callable(check):
                check()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._validations += 1
        if self._validations % self.every_n_validations:
            return
        images = None
        # Several processes wait for each other while they sample: one that went on alone would let them wait forever.
        safely = diagnostic("SampleImages", "sampled images") if trainer.world_size == 1 else nullcontext()
        with safely, evaluating(pl_module), torch.no_grad():
            images = self._sampled(pl_module)
        log_dir = trainer.log_dir  # a collective, so all processes must call it
        if trainer.is_global_zero and images is not None:
            with diagnostic("SampleImages", "sampled images"):
                self._draw(trainer, pl_module, images, log_dir)

    def _sampled(self, module: Any) -> Any:
        """Return the samples. With ``before``, each comes after that of the network before training."""
        count = self.rows * self.columns
        if not self.before:
            return module.sample_images(count, self.seed)
        if self._before is None:
            with module.before_training():
                self._before = module.sample_images(count, self.seed)
        return torch.stack([self._before, module.sample_images(count, self.seed)], dim=1).flatten(0, 1)

    def _draw(self, trainer: Trainer, pl_module: LightningModule, images: Any, log_dir: str | None) -> None:
        """Write the images as one picture, and log it."""
        captions = getattr(pl_module, "image_captions", None)
        count = len(images)
        columns = self.columns
        if self.before:
            count //= 2
            columns *= 2
        names: Sequence[str] = ()
        if callable(captions):
            names = captions(count)
        if names and len(names) != count:
            name = f"{type(pl_module).__name__}.image_captions({count})"
            raise refusal("SampleImages", name, f"{count} names, or an empty sequence", list(names))
        if self.before:
            names = [f"{when}{name}" for name in names or [""] * count for when in ("before: ", "")]
        picture = draw_grid(images, columns, self.zoom, captions=names)
        path = samples_file(trainer.global_step, ".png", trainer.default_root_dir, log_dir, self.folder)
        write_picture(picture, path)
        _log(trainer, picture, path)

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validations = state_dict["validations"]


def _log(trainer: Trainer, picture: object, path: Path) -> None:
    import numpy as np
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            # Without a step: the counter of W&B only moves forward, and may already be past this step.
            logger.log_image("samples", [str(path)], caption=[f"step {trainer.global_step}"])
        elif isinstance(logger, TensorBoardLogger):
            pixels = np.atleast_3d(np.asarray(picture))
            logger.experiment.add_image("samples", pixels, trainer.global_step, dataformats="HWC")
