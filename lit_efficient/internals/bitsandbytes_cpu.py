"""Workarounds for bitsandbytes on some processors. Checked with 0.50.

- With AVX512-BF16, its 4-bit layers repack their weights in evaluation mode (``support_avx512bf16_for_cpu``).
- With AVX512, its kernel uses wrong scales if the length of a row is not a multiple of the block size. Weights are
  wrong by up to half of the largest weight, without an error.
"""

import functools
import warnings
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.import_noise import silence_imports
from lit_efficient.internals.torch_dispatch import no_dispatch_modes

silence_imports()  # all code that imports bitsandbytes for its layers imports this module first


def keep_unpacked(network: nn.Module) -> None:
    """Prevent 4-bit layers from repacking their weights in evaluation mode, and fix rows of any length.

    Packed layers lose the gradient of their input, and raise an error for sizes that are not multiples of 32.
    """
    layers: Iterable[object] = network.modules()
    for layer in layers:
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
            read_any_rows()


def dequantized(codes: Tensor, state: Any) -> Tensor:
    """Return the floats that 4-bit codes stand for, with rows of any length.

    Args:
        codes: The packed codes.
        state: bitsandbytes' ``QuantState``.
    """
    from bitsandbytes.functional import dequantize_4bit

    read_any_rows()
    return dequantize_4bit(codes, state)


@functools.cache
def read_any_rows() -> None:
    """Replace the CPU kernel that dequantises 4-bit weights, in this process, if it reads short rows wrongly.

    The replacement passes all rows to the original kernel as one row, which it reads correctly. The forward and the
    backward pass of 4-bit layers call it.
    """
    import bitsandbytes  # noqa: F401  # registers the operator

    operator = torch.ops.bitsandbytes.dequantize_4bit.default
    with no_dispatch_modes(), torch.device("cpu"):  # real tensors, even while a step is traced with fake ones
        codes = torch.zeros(64, dtype=torch.uint8)
        scales = torch.tensor([1.0, 2.0], dtype=torch.float32)  # two blocks of 64, in rows of 16
        by_row = operator(codes, scales, 64, "nf4", [8, 16], torch.float32)
        as_one = operator(codes, scales, 64, "nf4", [1, 128], torch.float32)
        if torch.equal(by_row.flatten(), as_one.flatten()):
            return
    theirs = torch.library.get_kernel("bitsandbytes::dequantize_4bit", "CPU")

    def as_one_row(
        keys: Any, codes: Tensor, scales: Tensor, block: int, kind: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        one_row = [1, prod(shape)] if shape[-1] % 2 == 0 else shape  # the original handles rows of odd length correctly
        read: Tensor = theirs.call_boxed(keys, codes, scales, block, kind, one_row, dtype)
        return read.reshape(shape)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        _kernels().impl("dequantize_4bit", as_one_row, "CPU", with_keyset=True, allow_override=True)


@functools.cache
def _kernels() -> torch.library.Library:
    """Return a library that is never freed, because freeing it would unregister its kernels."""
    return torch.library.Library("bitsandbytes", "IMPL")
