"""A picture of samples at every validation: one PNG grid on disk, and the same in the loggers that show pictures.

Works with any LightningModule that has ``sample_images(num, seed) -> [N, C, H, W]``, uint8 or float in [-1, 1], which
draws from a generator of its own. The same seed each time: one watches the same samples improve. A module that has
``check_sample_images()`` is asked before the first step whether it can.

Costs: one sampling of ``rows * columns`` images at each validation it acts on.
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_number, refusal


def image_grid(images: Tensor, columns: int, border: int = 1) -> Tensor:
    """Images in rows: uint8 [height, width, C] on the CPU; a short last row is filled with black.

    Args:
        images: [N, C, H, W], uint8, or float in [-1, 1]; C is 1 or 3.
        columns: Images a row.
        border: Black pixels between images.
    """
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        raise refusal("image_grid", "images", "[N, 1 or 3, H, W]", tuple(images.shape))
    if images.dtype != torch.uint8:
        images = ((images.detach().float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    count, channels, height, width = images.shape
    rows = -(-count // columns)
    cells = torch.zeros(rows * columns, channels, height + border, width + border, dtype=torch.uint8)
    cells[:count, :, :height, :width] = images.cpu()
    grid = cells.view(rows, columns, channels, height + border, width + border).permute(0, 3, 1, 4, 2)
    return grid.reshape(rows * (height + border), columns * (width + border), channels)[
        : -border or None, : -border or None
    ]


def write_png(grid: Tensor, path: Path, zoom: int) -> None:
    """Write uint8 [height, width, 1 or 3], each pixel ``zoom`` pixels wide, whole or not at all."""
    from PIL import Image

    pixels = grid.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1).squeeze(-1).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    Image.fromarray(pixels).save(unfinished, format="PNG")
    unfinished.replace(path)


class SampleImages(Callback):
    """Writes ``samples/step_XXXXXX.png`` under the run's log folder at each validation, and logs it.

    Args:
        every_n_validations: Act on every n-th validation of the fit; the sanity check does not count.
        columns: Images a row. With as many as there are classes, each class is one column.
        rows: Rows of the grid.
        zoom: Screen pixels per image pixel in the file.
        seed: Seed of the samples.
    """

    leaves_traces = True

    def __init__(
        self, every_n_validations: int = 1, columns: int = 10, rows: int = 6, zoom: int = 2, seed: int = 0
    ) -> None:
        named = {"every_n_validations": every_n_validations, "columns": columns, "rows": rows, "zoom": zoom}
        for name, value in named.items():
            check_number("SampleImages", name, value, least=1, whole=True)
        self.every_n_validations = every_n_validations
        self.columns = columns
        self.rows = rows
        self.zoom = zoom
        self.seed = seed
        self._validations = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
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
        images = _sample(pl_module, self.rows * self.columns, self.seed)
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # asks all processes: not under is_global_zero
        if trainer.is_global_zero:
            grid = image_grid(images, self.columns)
            path = folder / "samples" / f"step_{trainer.global_step:06d}.png"
            write_png(grid, path, self.zoom)
            _log(trainer, grid, path)

    def state_dict(self) -> dict[str, Any]:
        """The count of validations."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self._validations = state_dict["validations"]


def _sample(module: LightningModule, count: int, seed: int) -> Tensor:
    """Samples in evaluation mode; every submodule is left in the mode it was in."""
    modes = {submodule: submodule.training for submodule in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            return module.sample_images(count, seed)  # type: ignore[operator]
    finally:
        for submodule, training in modes.items():
            submodule.training = training


def _log(trainer: Trainer, grid: Tensor, path: Path) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            # No step: W&B's own counter only moves forward, and other metrics were logged at this one already.
            logger.log_image("samples", [str(path)], caption=[f"step {trainer.global_step}"])
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image("samples", grid, trainer.global_step, dataformats="HWC")
