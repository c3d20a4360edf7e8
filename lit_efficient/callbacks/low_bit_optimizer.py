"""8-bit optimizer states: AdamW's two moments in one byte each, quantised in blocks of 256 values.

    state bytes per parameter: 8 (two float32 moments)  ->  2 + 2 * 4 / 256 = 2.03

Saves: 6 bytes a parameter; embeddings, norms, biases and other small tensors keep 32-bit states
Costs: quantising and dequantising the states in each step; none of it in the forward or backward pass
Source: Dettmers et al. (2021), https://arxiv.org/abs/2110.02861; kernels: bitsandbytes
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError, ConflictError
from lit_efficient.surgery import become
from lit_efficient.technique import Phase, Report, Technique

_BLOCK = 256  # values that share one float32 scale in bitsandbytes' block-wise quantisation


class LowBitOptimizer(Technique):
    """Replace the AdamW or Adam that the module returns by its 8-bit twin, with groups and schedulers kept.

    Args:
        bits: Bits of one state value: 8.
        min_size: Tensors with fewer elements keep 32-bit states, at least 0.
        keep_32bit: Whose parameters keep 32-bit states: class names of modules, as in ``torch.nn``.

    Raises:
        ConfigurationError: For an argument out of range, for an optimizer that has no 8-bit twin, and if every tensor
            is too small, so that nothing would be saved.
        ConflictError: For sharded parameters (DTensors), whose 8-bit states cannot be resumed.

    Example:
        >>> Trainer(callbacks=[LowBitOptimizer(bits=8)])  # doctest: +SKIP
    """

    phase = Phase.OPTIMIZER
    alters = ("optimizer",)
    conflicts: ClassVar[dict[str, str]] = {}

    def __init__(self, bits: int = 8, min_size: int = 4096, keep_32bit: tuple[str, ...] = ("Embedding",)) -> None:
        super().__init__()
        if bits != 8:
            raise ConfigurationError(f"LowBitOptimizer: bits must be 8, got {bits!r}")
        if min_size < 0:
            raise ConfigurationError(f"LowBitOptimizer: min_size must be at least 0, got {min_size}")
        self.bits = bits
        self.min_size = min_size
        self.keep_32bit = tuple(keep_32bit)

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        """Turn ``optimizer`` into its 8-bit twin in place."""
        twin = _twin(optimizer)
        kept = {p for m in module.modules() if type(m).__name__ in self.keep_32bit for p in m.parameters(recurse=False)}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        low = [p for p in parameters if p not in kept and p.numel() >= self.min_size]
        if not low:
            largest = max((p.numel() for p in parameters), default=0)
            raise ConfigurationError(
                f"LowBitOptimizer: none of the {len(parameters)} tensors would have 8-bit states: the largest has "
                f"{largest} elements and min_size is {self.min_size}; keep_32bit is {self.keep_32bit}"
            )
        for group in optimizer.param_groups:
            group["lr"] = float(group["lr"])
        become(optimizer, twin, min_8bit_size=self.min_size)
        optimizer.keep_32bit = kept  # type: ignore[attr-defined]
        count = sum(p.numel() for p in low)
        total = sum(p.numel() for p in parameters)
        saved = sum(8 * p.numel() - state_bytes(p.numel()) for p in low)
        return Report(
            f"{type(optimizer).__name__}: {count / total:.1%} of {total:,} parameters have 8-bit states, "
            f"{saved / 2**20:.1f} MiB saved",
            parameters=count,
            bytes_saved=saved,
        )


def state_bytes(elements: int) -> int:
    """Bytes of the two 8-bit moments of a tensor, scales included."""
    return 2 * (elements + 4 * -(-elements // _BLOCK))


def _twin(optimizer: Optimizer) -> type[Optimizer]:
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, torch.optim.Adam):
        raise ConfigurationError(f"LowBitOptimizer: {kind.__name__} has no 8-bit twin; allowed: Adam, AdamW")
    for group in optimizer.param_groups:
        for flag in ("amsgrad", "maximize"):
            if group.get(flag):
                raise ConfigurationError(f"LowBitOptimizer: {kind.__name__}({flag}=True) has no 8-bit twin")
        if kind is torch.optim.Adam and group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise ConfigurationError(
                f"LowBitOptimizer: Adam(weight_decay={group['weight_decay']}) adds the decay to the gradient, and its "
                "8-bit twin does not: use AdamW, or weight_decay=0"
            )
        if any(type(p).__name__ == "DTensor" for p in group["params"]):
            raise ConflictError(
                "LowBitOptimizer: bitsandbytes cannot resume the states of sharded parameters (DTensors): "
                "use DDP, or leave the technique out"
            )
    return _twins()[kind]


@functools.cache
def _twins() -> dict[type, type[Optimizer]]:
    """Twins by class, made once for the process. bitsandbytes is imported late: it costs seconds."""
    from bitsandbytes.optim import Adam8bit, AdamW8bit

    return {
        torch.optim.AdamW: type("AdamW8bit", (_Keep32Bit, AdamW8bit), {}),
        torch.optim.Adam: type("Adam8bit", (_Keep32Bit, Adam8bit), {}),
    }


class _Keep32Bit:
    """32-bit states for chosen parameters; the overrides of bitsandbytes' global manager outlive the optimizer."""

    keep_32bit: set[nn.Parameter]
    param_groups: list[dict[str, Any]]

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        config = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        if self.param_groups[gindex]["params"][pindex] in self.keep_32bit:
            config["optim_bits"] = 32
        return config
