"""Channels last: the channels of a pixel are adjacent in memory, as fast convolution kernels need them.

    x [B, C, H, W]:  strides (C H W, H W, W, 1)  ->  (C H W, 1, W C, C);    values, shapes and names stay

Saves: the transposition before and after each convolution on tensor cores and in oneDNN
Costs: no memory; a layer without such kernels copies its input, so measure
Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html

A convolution with a channels-last weight returns a channels-last output, and most following layers keep this format. A
``reshape`` or an attention layer may end it.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_modules import Convolution
from lit_efficient.surgery import class_names, count
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def lay_out(tensor: Tensor, dimensions: Iterable[int] = (4, 5)) -> None:
    """Put the channels of a tensor last in memory, in place. All references to the tensor see the same values.

    Args:
        tensor: [B, C, H, W] or [B, C, D, H, W]. Other tensors do not change.
        dimensions: Numbers of dimensions of the tensors to change: 4, 5 or both.
    """
    form = _FORMATS.get(tensor.ndim)
    if form is None or tensor.ndim not in dimensions or type(tensor.data) is not Tensor:
        return
    if tensor.layout is torch.strided and not tensor.is_contiguous(memory_format=form):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.data = tensor.data.contiguous(memory_format=form)


class ChannelsLast(CheckpointHooks, Technique):
    """Put the channels last in the memory of all weights, buffers and batches of images (or of volumes).

    In a network with ``Conv2d`` all tensors with four dimensions are changed, with ``Conv3d`` those with five. Batches
    of any structure are changed right before each step of training or evaluation.

    Raises:
        ConfigurationError: If the network has no such convolution.
        ConflictError: For a strategy that shards weights: FSDP2 needs contiguous weights, the others flatten them.
    """

    phase = Phase.LAYOUT
    traits = frozenset({Trait.REFUSES_EARLY, Trait.TRAINING_ONLY})
    conflicts: ClassVar[dict[str, str]] = {
        "ModelPruning": "it flattens weights, which must have the channels first for that: leave ChannelsLast out"
    }
    computes = "same"
    helps = {"speed": (3, "no transpositions around convolutions")}

    def __init__(self) -> None:
        super().__init__()
        self._kinds: set[int] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the dimensions of the network's convolutions: the network may be another one, or not exist yet."""
        super().setup(trainer, pl_module, stage)
        self._kinds = None

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        traits = traits_of(trainer.strategy)
        if traits.shards:
            raise ConflictError(
                f"ChannelsLast cannot be combined with {traits.name}: torch shards only contiguous weights; use "
                "strategy='ddp', or leave ChannelsLast out"
            )

    def transform(self, module: nn.Module) -> Report:
        found = tuple(name for name, part in module.named_modules() if _dimensions([part]))
        if not found:
            raise ConfigurationError(
                f"ChannelsLast: {type(module).__name__} has no Conv2d, Conv3d or similar layer. Its layers are: "
                f"{class_names(module.modules())}. Leave ChannelsLast out"
            )
        changed = _lay_out_weights(module)
        return Report(
            f"{len(found)} convolutions: {len(changed)} weights and buffers, and each batch, have their channels last",
            modules=found,
            parameters=count(tensor for tensor in changed if isinstance(tensor, nn.Parameter)),
        )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        _lay_out_weights(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change restored optimizer states like their parameters: they may come from a run without ChannelsLast."""
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ConflictError(
                    "ChannelsLast: LBFGS flattens weights and gradients, which must have the channels first for that: "
                    "use another optimizer, or leave ChannelsLast out"
                )
            if any(base.__module__.startswith("bitsandbytes") for base in type(optimizer).__mro__):
                continue  # its kernels read memory from front to back, and it makes weights contiguous first
            for parameter, state in optimizer.state.items():
                if parameter.ndim not in _FORMATS:
                    continue
                for value in state.values():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        lay_out(value, _dimensions(pl_module.modules()))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if self._kinds is None:
            self._kinds = _dimensions(pl_module.modules())
        apply_to_collection(batch, Tensor, lay_out, dimensions=self._kinds)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        _lay_out_weights(pl_module)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    on_test_batch_start = on_validation_batch_start
    on_predict_batch_start = on_validation_batch_start

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Save contiguous weights, because other programs read them in the order of their dimensions."""
        for name, value in checkpoint["state_dict"].items():
            if isinstance(value, Tensor) and value.ndim in _FORMATS:
                checkpoint["state_dict"][name] = value.contiguous()


def _dimensions(modules: Iterable[nn.Module]) -> set[int]:
    """Return the numbers of dimensions, 4 or 5, of the convolutions' weights."""
    return {part.weight.ndim for part in modules if isinstance(part, Convolution)} & _FORMATS.keys()


def _lay_out_weights(module: nn.Module) -> list[Tensor]:
    dimensions = _dimensions(module.modules())
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.ndim in dimensions]
    for tensor in tensors:
        lay_out(tensor, dimensions)
    return tensors
