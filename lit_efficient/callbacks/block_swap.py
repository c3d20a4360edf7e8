"""Block swapping: blocks are kept in CPU memory, and each is copied to the device one block ahead of its use.

    forward of block l  |  copy in l + 1;    backward of block l  |  copy in l - 1;    the finished block is dropped
    trained blocks:  gradient -> CPU as soon as it is complete;    the optimizer steps in CPU memory

Saves: the frozen weights of all blocks on the device, except those of two; with ``trained`` also the trained weights of
    the blocks, their gradients and the optimizer's states
Costs: two transfers of the swapped bytes per step; as much CPU memory, rounded up to powers of two; with ``trained``
    also transfers of the gradients, and an optimizer step on the CPU
Source: kohya's blocks_to_swap, https://github.com/kohya-ss/musubi-tuner; https://arxiv.org/abs/2104.07857

Frozen weights never change, so they are not copied back; trained weights are changed in CPU memory. Quantised blocks
(``QuantizeBase``, bitsandbytes with its constants) need a quarter of the transfers. Names, checkpoints and gradients
are the same as without swapping, bit by bit.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report, format_bytes, held
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_as_cuda import kind_of
from lit_efficient.internals.torch_modules import Loads, Stays
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.side_copies import check_separate_memory
from lit_efficient.mechanisms.blocks.swapping import Swap, swapped_names, swapped_tensors
from lit_efficient.surgery import class_names, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_ON_DEVICE = 2  # number of blocks on the device at a time


class _Swapped(Loads, Stays, nn.Module):
    """Mix-in of a block. It acts around ``__call__``, so that compiled code, recomputation and hooks are inside."""

    _swap: Swap
    _swap_number: int
    _swap_names: tuple[str, ...]

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            # The error ends the trace, and the compiler runs this frame in Python instead.
            raise ConfigurationError(
                "BlockSwap: a block is compiled as part of a larger graph; use Compile(modules='blocks')"
            )
        device = next((x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
        if device is None:
            raise ConfigurationError(
                "BlockSwap: a block was called without tensors, so that its device is unknown; leave it out of blocks"
            )
        self._swap.add(self._swap_number, self, self._swap_names)
        self._swap.enter(self._swap_number, device)
        output = super().__call__(*args, **kwargs)
        self._swap.watch(self._swap_number, device, (args, kwargs), output)
        if not torch.is_grad_enabled():
            self._swap.ran(self._swap_number)
        return output

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._swap.come_to_rest()  # copies on the device are overwritten, also if a state dict refers to them
        return super().state_dict(*args, **kwargs)

    def before_load(self, state_dict: dict[str, object], prefix: str) -> None:
        self._swap.come_to_rest(stale=True)

    def staying(self) -> list[Tensor]:
        self._swap.come_to_rest(stale=True)
        tensors = swapped_tensors(self, self._swap_names, self._swap.trained)
        return [*tensors, *(tensor.grad for tensor in tensors if tensor.grad is not None)]


class BlockSwap(Technique):
    """Keep the weights of repeated blocks in CPU memory; at most two blocks are on the device at a time.

    Trained parameters stay on the device: adapters and norms, with their gradients and states. Blocks without frozen
    parameters raise an error. Weights that begin to train during the run stay on the device from then on, and so do
    weights that several modules share.

    With ``trained`` the trained parameters of the blocks are in CPU memory, too, with their gradients and the states of
    the optimizer, which steps on the CPU. This is slow: do not use it for adapters and other small parts.

    Args:
        keep: Number of the first blocks that stay on the device, at least 0. Choose as many as fit.
        blocks: ``auto`` finds the repeated blocks, in a UNet the residual and attention blocks of each level. Otherwise
            regular expressions for dotted names.
        trained: Also swap weights that train.

    Raises:
        ConfigurationError: For a device that uses CPU memory, an argument out of range, if there are no such blocks, if
            they have neither frozen weights nor ``trained`` is set, and for second derivatives of trained weights.
        ConflictError: For a strategy with several processes, which needs all weights on its devices; with ``trained``
            for a gradient scaler (16-mixed).
    """

    phase = Phase.RECOMPUTE
    traits = frozenset({Trait.TRAINING_ONLY})
    conflicts = {
        "Compile(modules='network')": "blocks inside a compiled network cannot be swapped: use modules='blocks'",
        "Compile(mode='reduce-overhead')": "CUDA graphs need weights at fixed addresses: leave mode out",
        "Compile(mode='max-autotune')": "CUDA graphs need weights at fixed addresses: use max-autotune-no-cudagraphs",
        "SpikeGuard(action='rewind')": "it restores weights on the device, where they are not: use action='skip'",
    }
    computes = "same"
    helps = {"memory": (10, "weights of frozen blocks, or of all blocks, for transfers in each step")}

    def __init__(self, keep: int = 0, blocks: str | list[str] = "auto", trained: bool = False) -> None:
        super().__init__()
        check_number("BlockSwap", "keep", keep, least=0, whole=True)
        self.keep = keep
        self.blocks = blocks
        self.trained = trained

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        traits = traits_of(trainer.strategy)
        if traits.shards or traits.replicates:
            raise ConflictError(
                f"BlockSwap: {traits.name} needs all weights on the devices when it starts: use one device, or shard "
                "with FSDP2, whose CPUOffloadPolicy keeps shards in CPU memory"
            )
        if self.trained and getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ConflictError(
                "BlockSwap: with trained=True gradients are in CPU memory, but a gradient scaler (16-mixed) reads them "
                "on the device: use bf16-true or bf16-mixed, or leave trained out"
            )
        device = trainer.strategy.root_device
        if kind_of(device) == device.type:  # not a plan for a GPU
            check_separate_memory(device, "BlockSwap", "QuantizeBase")
        elif self.trained:
            raise ConfigurationError(
                "BlockSwap: trained=True cannot be planned without a GPU, because the plan would have to follow the "
                "gradients and states that leave the device. Plan on a machine with a GPU"
            )

    def transform(self, module: nn.Module) -> Report:
        found = find_blocks(module, self.blocks, who="BlockSwap", declared=False)
        if len(found) <= _ON_DEVICE:
            raise ConfigurationError(
                f"BlockSwap: {type(module).__name__} has {len(found)} blocks, and {_ON_DEVICE} are on the device at a "
                "time, so that nothing can be saved: name smaller parts in blocks, or leave BlockSwap out"
            )
        if len(found) - self.keep <= _ON_DEVICE:
            allowed = f"below {len(found) - _ON_DEVICE}, because {_ON_DEVICE} of {len(found)} blocks are always there"
            raise refusal("BlockSwap", "keep", allowed, self.keep)
        swap = Swap(self.trained)
        sizes = []
        swapped = []
        for number, (name, block) in enumerate(found[self.keep :]):
            size = self._move_to_cpu(module, block, swap, number)
            if size:
                swapped.append((name, block))
                sizes.append(size)
        if not swapped:
            raise ConfigurationError(
                f"BlockSwap: nothing is frozen in the {len(found)} blocks of {type(module).__name__}, and trained "
                "weights stay on the device: add LoRA, freeze weights in __init__, setup or configure_model, or use "
                "trained=True"
            )
        on_device = sum(sorted(sizes)[-_ON_DEVICE:])
        frozen = "" if self.trained else "frozen "
        return Report(
            f"{len(swapped)} of {len(found)} blocks ({class_names(block for _, block in swapped)}) have "
            f"{format_bytes(sum(sizes))} of {frozen}weights in CPU memory, {format_bytes(on_device)} of them at a time "
            "on the device",
            modules=tuple(name for name, _ in swapped),
            bytes_saved=sum(sizes) - on_device,
        )

    def _move_to_cpu(self, module: nn.Module, block: nn.Module, swap: Swap, number: int) -> int:
        """Move the weights that only this block uses to CPU memory. Return their size in bytes, 0 if there are none."""
        inside = set(block.modules())
        elsewhere: set[int] = set()
        for part in module.modules():
            if part not in inside:
                elsewhere.update(id(p) for p in part.parameters(recurse=False))
        if not self.trained:  # parameters that are frozen only for now will train on the device
            elsewhere.update(id(module.get_parameter(name)) for name in held(module))
        names = tuple(swapped_names(block, elsewhere, self.trained))
        if not names:
            return 0
        tensors = swapped_tensors(block, names, self.trained)
        size = sum(tensor.nbytes for tensor in tensors)
        for tensor in tensors:
            tensor.data = tensor.data.to("cpu")
        mix_in(block, _Swapped, _swap=swap, _swap_number=number, _swap_names=names)
        swap.add(number, block, names)
        return size

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if autocast keeps copies of the weights, and move restored optimizer states to CPU memory."""
        blocks = _swapped(pl_module)
        if "mixed" in str(trainer.precision):
            self._warn_of_copies(trainer, blocks)
        if not self.trained:
            return
        self._come_to_rest(pl_module)
        # Lightning moves states to the device of the module, not to that of their parameters.
        for optimizer in trainer.optimizers:
            for p, state in optimizer.state.items():
                if p.device.type == "cpu" and isinstance(state, MutableMapping):
                    state.update({key: value.to("cpu") for key, value in state.items() if isinstance(value, Tensor)})

    def _warn_of_copies(self, trainer: Trainer, blocks: list[_Swapped]) -> None:
        """Warn if the backward pass needs casts of float32 weights, which stay on the device."""
        wide = [p for block in blocks for p in block.parameters() if p.dtype == torch.float32 and p.ndim > 1]
        recomputed = any(getattr(block, "_recomputes", False) for block in blocks)
        kind = None
        remedy = "use bf16-true"
        if self.trained and any(p.requires_grad for p in wide):
            kind = ""  # autocast caches these casts, also in recomputed blocks
        elif not recomputed and any(not p.requires_grad for p in wide):
            kind = "frozen "
            remedy += ", or add ActivationCheckpointing"
        if kind is not None:
            rank_zero_warn(
                f"BlockSwap: under precision={trainer.precision!r} each layer keeps a copy of its {kind}float32 weight"
                f" in 16 bits for the backward pass, on the device: {remedy}"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self.trained:  # a step without a backward pass leaves blocks on the device
            self._come_to_rest(pl_module)

    def _come_to_rest(self, module: nn.Module) -> None:
        for block in _swapped(module):
            block._swap.come_to_rest()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._come_to_rest(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)


def _swapped(root: nn.Module) -> list[_Swapped]:
    return [part for part in root.modules() if isinstance(part, _Swapped)]
