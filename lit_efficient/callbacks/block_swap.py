"""Block swapping: blocks live in CPU memory, and come to the device one ahead of their use.

    forward of block l  |  copy in l + 1;    backward of block l  |  copy in l - 1;    the one that is done is dropped
    trained blocks:  gradient -> CPU as soon as it is complete;    the optimizer steps in CPU memory

Saves: the frozen weights of all blocks on the device but those of two; with ``trained`` also what trains in them, its
    gradients and the optimizer's states
Costs: the swapped bytes over the bus once forward and once backward; as much CPU memory, rounded up to powers of two;
    with ``trained`` gradients over the bus, too, and an optimizer's step that the CPU computes
Source: kohya's blocks_to_swap, https://github.com/kohya-ss/musubi-tuner; https://arxiv.org/abs/2104.07857

What is frozen never changes, so that nothing is copied back; what trains changes in CPU memory alone. Quantised blocks
(``QuantizeBase``, bitsandbytes' with their constants) are a quarter of the bytes. Names, checkpoints and gradients are
as without it, bit by bit.
"""

from collections.abc import MutableMapping
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report, held
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_modules import Loads, Stays
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.swapping import Swap, swapped_names, swapped_tensors
from lit_efficient.mechanisms.trials.memory import format_bytes
from lit_efficient.surgery import mix_in, unmixed
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_AT_ONCE = 2  # blocks on the device


class _Swapped(Loads, Stays, nn.Module):
    """Mix-in of a block. It acts around the call, so that what is compiled, recomputed or hooked lies within."""

    _swap: Swap
    _swap_number: int
    _swap_names: tuple[str, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the frame is then run as it is
            raise ConfigurationError("BlockSwap: a block is compiled as a part of something larger")
        device = next((x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
        if device is None:
            raise ConfigurationError("BlockSwap: a block was called without tensors, which say where it is to run")
        self._swap.add(self._swap_number, self, self._swap_names)
        self._swap.enter(self._swap_number, device)
        output = super().__call__(*args, **kwargs)
        self._swap.watch(self._swap_number, device, (args, kwargs), output)
        if not torch.is_grad_enabled():
            self._swap.ran(self._swap_number)
        return output

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._swap.come_to_rest()  # what is on the device is filled anew, whoever holds it
        return super().state_dict(*args, **kwargs)

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        self._swap.come_to_rest(stale=True)

    def staying(self) -> list[Tensor]:
        self._swap.come_to_rest(stale=True)
        tensors = swapped_tensors(self, self._swap_names, self._swap.trained)
        return [*tensors, *(tensor.grad for tensor in tensors if tensor.grad is not None)]


class BlockSwap(Technique):
    """Keep the weights of repeated blocks in CPU memory; at most two blocks' are on the device at any moment.

    What trains stays on the device: adapters, norms that learn, with their gradients and states. Blocks of which
    nothing is frozen are refused. Weights that begin to train in the run stay on the device from then on. Weights that
    several modules share stay there, too.

    With ``trained`` what trains in the blocks is in CPU memory as well, and so are its gradients and the states of the
    optimizer, which steps there. It is as slow as the CPU: for adapters and other small parts leave it out.

    Args:
        keep: How many of the first blocks stay on the device, at least 0: as many as fit.
        blocks: ``auto`` finds repeated blocks, in a UNet the residual and attention blocks of each level; otherwise
            regular expressions for dotted names.
        trained: Whether weights that train are swapped, too.

    Raises:
        ConfigurationError: For a device whose memory is the CPU's, for an argument out of range, without such blocks,
            where nothing in them is frozen or trained is set, and for gradients of gradients of what trains.
        ConflictError: For a strategy of several processes, which wants all weights on their devices; with trained for a
            gradient scaler (16-mixed).
    """

    phase = Phase.RECOMPUTE
    traits = frozenset({Trait.TRAINING_ONLY})
    conflicts: ClassVar[dict[str, str]] = {
        "Compile(modules='network')": "blocks inside of what is compiled as a whole are not seen: use modules='blocks'",
        "Compile(mode='reduce-overhead')": "CUDA graphs want weights that stay where they are: leave mode out",
        "Compile(mode='max-autotune')": "CUDA graphs want weights that stay: use max-autotune-no-cudagraphs",
        "SpikeGuard(action='rewind')": "it puts back weights where they are not: use action='skip'",
    }
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (10, "weights of the blocks that are frozen, or of all, for transfers in each step")
    }

    def __init__(self, keep: int = 0, blocks: str | list[str] = "auto", trained: bool = False) -> None:
        super().__init__()
        check_number("BlockSwap", "keep", keep, least=0, whole=True)
        self.keep = keep
        self.blocks = blocks
        self.trained = trained

    def check(self, trainer: Any, module: Any) -> None:
        device, traits = trainer.strategy.root_device.type, traits_of(trainer.strategy)
        if traits.shards or traits.replicates:
            raise ConflictError(
                f"BlockSwap: {traits.name} wants all weights on the devices when it starts: use one device, or shard "
                "with FSDP2, whose CPUOffloadPolicy keeps what it shards in CPU memory"
            )
        if self.trained and getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ConflictError(
                "BlockSwap: with trained=True gradients are in CPU memory, and a gradient scaler (16-mixed) looks for "
                "them on the device: use bf16-true or bf16-mixed, or leave trained out"
            )
        if device in ("cpu", "mps"):
            raise ConfigurationError(
                f"BlockSwap: this trainer's device is {device!r}, whose memory is the CPU's: there is nothing to save. "
                "Use accelerator='gpu', or QuantizeBase, which saves memory on any device"
            )

    def transform(self, module: nn.Module) -> Report:
        found = find_blocks(module, self.blocks, who=type(self).__name__, declared=False)
        if len(found) <= _AT_ONCE:
            raise ConfigurationError(
                f"BlockSwap: {type(module).__name__} has {len(found)} blocks, and {_AT_ONCE} are on the device at a "
                "time: there is nothing to save; name smaller parts in blocks, or leave it out"
            )
        if len(found) - self.keep <= _AT_ONCE:
            allowed = f"below {len(found) - _AT_ONCE}, since {_AT_ONCE} of the {len(found)} blocks are there anyway"
            raise refusal("BlockSwap", "keep", allowed, self.keep)
        later = set() if self.trained else {id(module.get_parameter(name)) for name in held(module)}
        swap, sizes, swapped = Swap(self.trained), [], []
        for number, (name, block) in enumerate(found[self.keep :]):
            inside = {id(part) for part in block.modules()}
            outside = (part for part in module.modules() if id(part) not in inside)
            elsewhere = later.union(id(p) for part in outside for p in part.parameters(recurse=False))
            names = tuple(swapped_names(block, elsewhere, self.trained))
            if not names:
                continue
            swapped.append((name, block))
            tensors = swapped_tensors(block, names, self.trained)
            sizes.append(sum(tensor.nbytes for tensor in tensors))
            for tensor in tensors:
                tensor.data = tensor.data.to("cpu")
            mix_in(block, _Swapped, _swap=swap, _swap_number=number, _swap_names=names)
            swap.add(number, block, names)
        if not swapped:
            raise ConfigurationError(
                f"BlockSwap: nothing is frozen in the {len(found)} blocks of {type(module).__name__}, and what trains "
                "stays on the device: put LoRA beside it, freeze weights in __init__, setup or configure_model, or use "
                "trained=True"
            )
        saved = sum(sizes) - sum(sorted(sizes)[-2:])
        which = "" if self.trained else "frozen "
        kinds = ", ".join(sorted({unmixed(block).__name__ for _, block in swapped}))
        return Report(
            f"{len(swapped)} of {len(found)} blocks ({kinds}) have {format_bytes(sum(sizes))} of {which}weights in "
            f"CPU memory, {format_bytes(sum(sizes) - saved)} of them at a time on the device",
            modules=tuple(name for name, _ in swapped),
            bytes_saved=saved,
        )

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Warn where casts of the weights are kept, which nobody swaps; states that Lightning has moved come back."""
        blocks = _swapped(pl_module)
        wide = [p for b in blocks for p in b.parameters() if p.dtype == torch.float32 and p.ndim > 1]
        frozen = any(not p.requires_grad for p in wide) and not any(getattr(b, "_recomputes", False) for b in blocks)
        trains = self.trained and any(p.requires_grad for p in wide)  # such casts are kept by autocast itself
        if "mixed" in str(trainer.precision) and (frozen or trains):
            kind, way = ("", "") if trains else ("frozen ", ", or ActivationCheckpointing beside it")
            rank_zero_warn(
                f"BlockSwap: under precision={trainer.precision!r} each layer keeps a copy of its {kind}float32 weight"
                f" in 16 bits for the backward pass, on the device: use bf16-true{way}"
            )
        for block in blocks if self.trained else ():
            block._swap.come_to_rest()
        for optimizer in trainer.optimizers if self.trained else ():
            for p, state in optimizer.state.items():
                if p.device.type == "cpu" and isinstance(state, MutableMapping):
                    state.update({key: value.to("cpu") for key, value in state.items() if isinstance(value, Tensor)})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for block in _swapped(pl_module) if self.trained else ():  # of a step without a backward pass
            block._swap.come_to_rest()

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        for block in _swapped(pl_module):
            block._swap.come_to_rest()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)


def _swapped(root: nn.Module) -> list[_Swapped]:
    return [part for part in root.modules() if isinstance(part, _Swapped)]
