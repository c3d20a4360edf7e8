"""Channels last: a pixel's channels side by side in memory, as the fast convolution kernels want them.

    x [B, C, H, W]:  strides (C H W, H W, W, 1)  ->  (C H W, 1, W C, C);    values, shapes and names stay

Saves: the transposition before and after each convolution on tensor cores and in oneDNN
Costs: nothing to keep; a layer without such kernels copies, so measure
Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html

A convolution whose weight is laid out like that returns its output so, and what follows it keeps that. Only what a
``reshape`` or an attention layer makes of it begins again.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_layers import Convolution
from lit_efficient.surgery import count
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def lay_out(tensor: Tensor, dimensions: Iterable[int] = (4, 5)) -> None:
    """Put the channels of a tensor last in memory, in place: who holds it sees the same values.

    Args:
        tensor: [B, C, H, W] or [B, C, D, H, W]; of any other kind it stays as it is.
        dimensions: Of which kinds there are convolutions: 4, 5 or both.
    """
    form = _FORMATS.get(tensor.ndim)
    if form is None or tensor.ndim not in dimensions or type(tensor.data) is not Tensor:
        return
    if tensor.layout is torch.strided and not tensor.is_contiguous(memory_format=form):
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.data = tensor.data.contiguous(memory_format=form)


class ChannelsLast(CheckpointHooks, Technique):
    """Put the channels last in the memory of all weights, buffers and batches of images (or of volumes).

    Of a network with ``Conv2d`` all tensors of four dimensions are laid out, with ``Conv3d`` all of five. Batches of
    any structure are, right before a step of training or evaluation.

    Raises:
        ConfigurationError: Without such a convolution.
        ConflictError: For a strategy that shards weights: FSDP2 takes contiguous ones alone, the others flatten them.
    """

    phase = Phase.LAYOUT
    traits = frozenset({Trait.REFUSES_EARLY, Trait.TRAINING_ONLY})
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (3, "no transpositions around convolutions")}

    def __init__(self) -> None:
        super().__init__()
        self._kinds: set[int] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Look at the network again: it may be another one, or not be there yet."""
        super().setup(trainer, pl_module, stage)
        self._kinds = None

    def check(self, trainer: Any, module: Any) -> None:
        """Refuse sharding, which would undo it or fail."""
        traits = traits_of(trainer.strategy)
        if traits.shards:
            raise ConflictError(
                f"ChannelsLast cannot be combined with {traits.name}: torch shards weights only that lie in "
                "memory in the order of their dimensions; use strategy='ddp', or leave ChannelsLast out"
            )

    def transform(self, module: nn.Module) -> Report:
        found = {name: part for name, part in module.named_modules() if _dimensions([part])}
        if not found:
            raise ConfigurationError(
                f"ChannelsLast: {type(module).__name__} has no Conv2d, Conv3d or kin, for which alone it matters; its "
                f"layers are: {', '.join(sorted({type(part).__name__ for part in module.modules()}))}"
            )
        laid_out = _lay_out_weights(module)
        return Report(
            f"{len(found)} convolutions: {len(laid_out)} weights and buffers, and each batch, have their channels last",
            modules=tuple(found),
            parameters=count(tensor for tensor in laid_out if isinstance(tensor, nn.Parameter)),
        )

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        super().on_fit_start(trainer, pl_module)
        _lay_out_weights(pl_module)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Lay out restored optimizer states, which may come from a run without it, like their parameters."""
        for optimizer in trainer.optimizers:
            if any(base.__module__.startswith("bitsandbytes") for base in type(optimizer).__mro__):
                continue  # its kernels go through memory from front to back, and it makes weights contiguous first
            for parameter, state in optimizer.state.items():
                for value in state.values() if parameter.ndim in _FORMATS else ():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        lay_out(value, _dimensions(pl_module.modules()))

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        if self._kinds is None:
            self._kinds = _dimensions(pl_module.modules())
        apply_to_collection(batch, Tensor, lay_out, dimensions=self._kinds)

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        _lay_out_weights(pl_module)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    on_test_batch_start = on_validation_batch_start
    on_predict_batch_start = on_validation_batch_start

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Save weights as they would be without it: other programs read them in the order of their dimensions."""
        checkpoint["state_dict"] = {
            name: value.contiguous() if isinstance(value, Tensor) and value.ndim in _FORMATS else value
            for name, value in checkpoint["state_dict"].items()
        }


def _dimensions(modules: Iterable[nn.Module]) -> set[int]:
    """Of how many dimensions, 4 or 5, the convolutions' weights are."""
    return {part.weight.ndim for part in modules if isinstance(part, Convolution)} & _FORMATS.keys()


def _lay_out_weights(module: nn.Module) -> list[Tensor]:
    dimensions = _dimensions(module.modules())
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor.ndim in dimensions]
    for tensor in tensors:
        lay_out(tensor, dimensions)
    return tensors
