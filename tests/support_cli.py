"""A module and a data module that are small, slow at nothing, and say when they were touched."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient.__main__ import main
from lit_efficient.cli import LitEfficientCLI


def export(argv: Sequence[str]) -> int:
    return main(["export", *argv])


class Parts(LitEfficientCLI):
    """Everything that a config names, built and not run."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


class ToyModel(LightningModule):
    """Linear regression with a hidden layer.

    Args:
        hidden: Width of the hidden layer.
        scale: Factor on the loss.
        frozen: Whether the first layer does not train.
        late: Whether the layers are made in ``configure_model``.
        noise: Size of what is drawn in each step.
    """

    last: ClassVar["ToyModel | None"] = None

    def __init__(
        self, hidden: int = 4, scale: float = 1.0, frozen: bool = False, late: bool = False, noise: float = 0.0
    ) -> None:
        super().__init__()
        self.noise = noise
        if hidden < 1:
            raise ValueError(f"ToyModel: hidden must be at least 1, got {hidden}")
        self.save_hyperparameters()
        self.scale = scale
        self.frozen = frozen
        self.net: nn.Module | None = None
        if not late:
            self._build(hidden)
        self.hidden = hidden
        ToyModel.last = self

    def _build(self, hidden: int) -> None:
        self.net = nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, 1))
        self.net[0].requires_grad_(not self.frozen)

    def configure_model(self) -> None:
        if self.net is None:
            self._build(self.hidden)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None
        loss = self.scale * self.net(batch[0] + self.noise * torch.rand(())).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert self.net is not None
        self.log("val/loss", self.scale * self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.25)


class OtherModel(ToyModel):
    """A model with none of ToyModel's tensors."""

    def _build(self, hidden: int) -> None:
        super()._build(hidden)
        self.other, self.net = self.net, None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.other(batch[0]).square().mean()


class ToyData(LightningDataModule):
    """Eight rows of noise.

    Args:
        rows: Number of rows.
        batch_size: Rows a batch.
    """

    touched: ClassVar[int] = 0

    def __init__(self, rows: int = 8, batch_size: int = 2) -> None:
        super().__init__()
        self.rows = rows
        self.batch_size = batch_size

    def prepare_data(self) -> None:
        ToyData.touched += 1

    def _loader(self) -> DataLoader:
        rows = torch.randn(self.rows, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(rows), batch_size=self.batch_size)

    def train_dataloader(self) -> DataLoader:
        return self._loader()

    def val_dataloader(self) -> DataLoader:
        return self._loader()


class Recorder(Callback):
    """Keep what the run looked like for the test to see.

    Args:
        tag: Any text.
        hook: A function to call; a config must not be able to name just any.
        api_key: A secret.
    """

    last: ClassVar["Recorder | None"] = None

    def __init__(self, tag: str = "", hook: Callable[[], None] | None = None, api_key: str | None = None) -> None:
        self.tag = tag
        self.hook, self.api_key = hook, api_key
        self.rates: list[float] = []
        Recorder.last = self

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_fit_end(self, trainer, module) -> None:
        self.trainer = trainer


class WeightsOfRank(Callback):
    """Write each process's weights when the fit ends."""

    def on_fit_end(self, trainer, module) -> None:
        torch.save({"world": trainer.world_size, **module.state_dict()}, f"rank{trainer.global_rank}.pt")


class OwnIO(TorchCheckpointIO):
    """A reader and writer of checkpoints of the user's."""


class SignalCheckpoint(Callback):
    """A class of the user's that has the name of one of ours."""
