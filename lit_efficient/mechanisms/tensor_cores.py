"""What a GPU's tensor cores want: a 16-bit format that they have, and sizes of matrices that fill their tiles.

    precision   bf16-mixed from compute capability 8.0 on, 16-mixed on older GPUs, 32-true elsewhere
    sizes       multiples of 16 bytes before 8.0 (8 numbers of 16 bits), of 128 bytes from 8.0 on (64 of them)

Source: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/, section "Tensor Core
Requirements".
"""

import math
from collections import Counter

import torch
from torch import Tensor, nn

from lit_efficient.errors import check_choice
from lit_efficient.internals.torch_trees import tree_leaves

BFLOAT16 = (8, 0)  # first compute capability with bfloat16 and TF32
_SHARE = 0.05  # of weights or rows, below which sizes are not worth a change
_FIRST = (7, 0)  # first compute capability with tensor cores
# First compute capability whose tensor cores multiply a format. float32 is multiplied as TF32.
_LEAST = {
    torch.float16: _FIRST,
    torch.int8: (7, 2),
    torch.bfloat16: BFLOAT16,
    torch.float32: BFLOAT16,
    torch.float64: BFLOAT16,
}


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a device of CUDA or ROCm; ``None`` for another device."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device)


def capability_here() -> tuple[int, int] | None:
    """Return the smallest compute capability among the GPUs of this machine; ``None`` without one of CUDA or ROCm."""
    found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    return min(found, default=None)


def auto_precision(accelerator: str = "auto") -> str:
    """Return the trainer's precision that suits the devices of this machine.

    bfloat16 has the range of float32 and needs no loss scaling. Most CPUs emulate it, so a CPU stays at float32.

    Args:
        accelerator: The trainer's accelerator. For a CUDA GPU that is not here, as in a plan, bfloat16 is assumed.

    Example:
        >>> auto_precision("cpu")
        '32-true'
    """
    if accelerator not in ("auto", "gpu", "cuda"):
        return "32-true"
    capability = capability_here()
    if capability is None:
        absent = accelerator != "auto" and not torch.backends.mps.is_available()
        return "bf16-mixed" if absent else "32-true"
    if capability >= BFLOAT16:
        return "bf16-mixed"
    return "16-mixed"


def multiple_for(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Return the number whose multiples are the sizes of matrices that tensor cores multiply fastest.

    Args:
        dtype: Format of the products: float16, bfloat16, int8, float64, or float32 (TF32).
        capability: Compute capability of the GPU.

    Returns:
        1 if the GPU has no tensor cores for the format, so that sizes do not matter.

    Example:
        >>> multiple_for(torch.bfloat16, (9, 0)), multiple_for(torch.float16, (7, 0))
        (64, 8)
    """
    check_choice("multiple_for", "dtype", dtype, _LEAST)
    if capability < _LEAST[dtype]:
        return 1
    bytes_of_a_row = 128 if capability >= BFLOAT16 else 16
    return bytes_of_a_row // dtype.itemsize


def padded(size: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``size``.

    Example:
        >>> padded(50257, 64)
        50304
    """
    return -(-size // multiple) * multiple


def rows_of(batch: object) -> int:
    """Return the number of rows of a batch in matrix products: tokens, or samples that are vectors; 0 if unknown."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    tokens = next((t for t in tensors if t.ndim == 2 and not t.is_floating_point()), None)
    if tokens is not None:
        return tokens.numel()
    if tensors and tensors[0].ndim <= 2:
        return len(tensors[0])
    return 0


def slow_sizes(module: nn.Module, rows: int, precision: str, capability: tuple[int, int]) -> list[str]:
    """Return sentences on sizes of a network, and of its batch, that tensor cores multiply slowly.

    A size of the network counts if its layers have a twentieth of all weights of linear layers, and the rows of a batch
    if their tiles have as many empty rows. Small sizes, such as ranks of adapters, are multiples of 16 bytes at least.

    Args:
        module: The network.
        rows: Number of rows of a batch, as :func:`rows_of` returns it; 0 if unknown.
        precision: The trainer's precision.
        capability: Compute capability of the GPU.
    """
    dtype = torch.float32
    if precision.startswith("bf16"):
        dtype = torch.bfloat16
    elif precision.startswith("16"):
        dtype = torch.float16
    elif torch.get_float32_matmul_precision() == "highest":
        return []  # float32 is not multiplied by tensor cores
    multiple = multiple_for(dtype, capability)
    found: Counter[int] = Counter()  # weights of the layers with a size
    names: dict[int, str] = {}
    total = 0
    for name, part in module.named_modules():
        if hasattr(part, "num_embeddings"):  # a table, whose rows are looked up
            continue
        weight = getattr(part, "weight", None)
        # A padded layer has more rows than it says. Codes of a quantised layer have another shape.
        if isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point():
            sizes = [*weight.shape]
        else:
            sizes = [getattr(part, "in_features", 0), getattr(part, "out_features", 0)]
        total += math.prod(sizes)
        for size in {*sizes}:
            if size % multiple:
                found[size] += math.prod(sizes)
                names.setdefault(size, name)
    advice = f"no multiple of {multiple}, which tensor cores multiply fastest in {str(dtype).removeprefix('torch.')}"
    lines = []
    for size, weights in found.items():
        if weights >= _SHARE * total:
            lines.append(f"A size of {names[size]} is {size:,}, {advice}: use {padded(size, multiple):,}")
    if 0 < rows < padded(rows, multiple) * (1 - _SHARE):
        lines.append(
            f"A batch has {rows:,} rows (samples or tokens), {advice}: {padded(rows, multiple):,} take the same time"
        )
    return lines
