"""What bitsandbytes does on some processors only: ``Linear4bit.support_avx512bf16_for_cpu``. Checked with 0.50."""

from collections.abc import Iterable
from typing import Any

from torch import nn


def keep_unpacked(network: nn.Module) -> None:
    """Keep 4-bit layers from repacking their weights in evaluation, as they do on processors with AVX512-BF16.

    Packed, they lose the gradient of their input, and refuse sizes that are no multiples of 32.
    """
    layers: Iterable[Any] = network.modules()
    for layer in layers:
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
