"""What bitsandbytes does on some processors only. Checked with 0.50.

On those with AVX512-BF16 its 4-bit layers repack their weights in evaluation (``support_avx512bf16_for_cpu``). On those
with AVX512 its kernel takes the wrong scales wherever a row is no multiple of a block: weights are off by up to half of
the largest one, in silence.
"""

import functools
import warnings
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.torch_dispatch import no_dispatch_modes


def keep_unpacked(network: nn.Module) -> None:
    """Keep 4-bit layers from repacking their weights in evaluation, and let them read rows of any length.

    Packed, they lose the gradient of their input, and refuse sizes that are no multiples of 32.
    """
    layers: Iterable[Any] = network.modules()
    for layer in layers:
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
            read_any_rows()


@functools.cache
def read_any_rows() -> None:
    """Where bitsandbytes misreads rows that are no multiple of a block, give it all rows as one, which it reads right.

    The operator's kernel for CPUs is put in another one's place, for this process: both the forward and the backward
    pass of its layers call it.
    """
    import bitsandbytes  # noqa: F401  # registers the operator

    operator = torch.ops.bitsandbytes.dequantize_4bit.default
    with no_dispatch_modes(), torch.device("cpu"):  # with values, also where a step is traced without
        codes = torch.zeros(64, dtype=torch.uint8)
        scales = torch.tensor([1.0, 2.0], dtype=torch.float32)  # two blocks of 64, in rows of 16
        by_row, at_once = (
            operator(codes, scales, 64, "nf4", shape, torch.float32).flatten() for shape in ([8, 16], [1, 128])
        )
        if torch.equal(by_row, at_once):
            return
    theirs = torch.library.get_kernel("bitsandbytes::dequantize_4bit", "CPU")

    def as_one_row(
        keys: Any, codes: Tensor, scales: Tensor, block: int, kind: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        at_once = [1, prod(shape)] if shape[-1] % 2 == 0 else shape  # odd rows take another way there, which is right
        read: Tensor = theirs.call_boxed(keys, codes, scales, block, kind, at_once, dtype)
        return read.reshape(shape)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        _kernels().impl("dequantize_4bit", as_one_row, "CPU", with_keyset=True, allow_override=True)


@functools.cache
def _kernels() -> torch.library.Library:
    """Kept for good: what it has registered goes with it."""
    return torch.library.Library("bitsandbytes", "IMPL")
