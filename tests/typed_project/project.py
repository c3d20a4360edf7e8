"""Code as users write it, which type checkers accept in their strictest mode; nothing of it is run."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lit_efficient import (
    EMA,
    ActivationCheckpointing,
    ConfigurationError,
    GradientHooks,
    LoRA,
    LossHooks,
    OptimizerHooks,
    Phase,
    Report,
    Technique,
    apply,
    compare,
    merge_adapters,
    plan,
    restore,
    tune,
    verify,
)
from lit_efficient.evidence.fits import LiveFit


class Regression(LightningModule):
    """A task."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        sample_loss = self.network(batch[0]).square().mean(-1)
        return {"loss": sample_loss.mean(), "sample_loss": sample_loss}

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Halved(GradientHooks, Technique):
    """A technique for gradients."""

    phase = Phase.GRADIENT

    def __init__(self, factor: float = 0.5) -> None:
        super().__init__()
        self.factor = factor

    def describe(self, module: nn.Module) -> Report:
        return Report(f"gradients are multiplied by {self.factor:g}")

    def change_gradients(self, gradients: dict[Tensor, Tensor], optimizer: Optimizer, module: nn.Module) -> None:
        for gradient in gradients.values():
            gradient.mul_(self.factor)


class Frozen(OptimizerHooks, Technique):
    """A technique that freezes parameters."""

    phase = Phase.FREEZE

    def trains(self, module: nn.Module) -> Iterable[nn.Parameter]:
        return [parameter for name, parameter in module.named_parameters() if not name.endswith("bias")]

    def prepare_parameters(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.endswith("bias"))

    def describe(self, module: nn.Module) -> Report:
        return Report("biases are frozen")


class Weighted(LossHooks, Technique):
    """A technique for the loss."""

    phase = Phase.LOSS

    def sample_weights(self, output: Mapping[str, object], module: nn.Module) -> Tensor:
        losses = output["sample_loss"]
        assert isinstance(losses, Tensor)
        return torch.ones_like(losses)

    def describe(self, module: nn.Module) -> Report:
        return Report("all samples weigh the same")


def loader() -> "DataLoader[tuple[Tensor, ...]]":
    return DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=8)


def train() -> Path:
    trainer = Trainer(max_steps=10, callbacks=[EMA(decay=0.999), Halved(), Frozen(), ActivationCheckpointing()])
    trainer.fit(Regression(), loader())
    trainer.save_checkpoint("best.ckpt")
    return Path("best.ckpt")


def use(checkpoint: Path) -> nn.Module:
    module = restore(Regression(), checkpoint)
    merge_adapters(module)
    return module


def adapt() -> Regression:
    module = Regression()
    applied = apply(module, [LoRA(rank=4, targets=[r"network\.0"])])
    for name, report in applied.items():
        print(name, report.summary)
    return module


def measure() -> None:
    module = Regression()
    trainer = Trainer(max_steps=10, callbacks=[EMA()])
    source = LiveFit(trainer, module, loader())
    try:
        print(plan(source).kinds)
    except ConfigurationError as error:
        print(error)
    compared = compare(trainer, module, loader(), with_={"LoRA": lambda: [LoRA(rank=4)]}, minutes=1)
    for variant in compared.variants:
        print(variant.name, variant.final_loss)
    print(verify(trainer, module, loader(), only=["accumulation"]))
    print(tune(source, "24GiB", minutes=1).lines())
