"""Floating-point operations (FLOPs) of a training step, counted on a real step, and peak FLOPs of devices.

    model    = forward + backward, each product once;  attention over pairs of tokens of one document
    hardware = model + recomputation for the backward pass + padding + attention between documents

The counts use torch's formulas, in which a multiplication and an addition are two operations. A frozen weight has no
gradient product in the backward pass, so adapters are counted as they are computed. Causal attention counts as full
attention, which is the convention. With slices of rows the CPU skips whole pieces of the attention, which are not
counted. Each process counts its own part of sharded layers.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, mm_flop, sdpa_flop_count

from lit_efficient.internals.torch_dispatch import (
    ASKS_DEVICE,
    TorchDispatchMode,
    fakes_are_made,
    operator_of,
    recomputes,
    saving_hooks,
)
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.metering import Amount

# Peak dense rates from the data sheets of NVIDIA and AMD, in 1e12 operations per second: 16 bits, TF32, float32.
# The first entry all of whose words occur in the device's name is used.
_PEAKS: dict[str, tuple[float, float, float]] = {
    "B200": (2250, 1125, 75), "H200 NVL": (836, 418, 60), "H200": (989, 495, 67), "GH200": (989, 495, 67),
    "H100 NVL": (836, 418, 60), "H100 PCIe": (756, 378, 51), "H100": (989, 495, 67), "A100": (312, 156, 19.5),
    "A30": (165, 82, 10.3), "A10G": (70, 35, 35), "A10": (125, 62.5, 31.2), "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5), "L4": (121, 60, 30.3), "RTX A6000": (155, 77.4, 38.7), "RTX 5090": (210, 105, 105),
    "RTX 4090": (165, 82.6, 82.6), "RTX 3090": (71, 35.6, 35.6), "V100": (125, 15.7, 15.7), "T4": (65, 8.1, 8.1),
    "MI300X": (1307, 654, 163),
}  # fmt: skip
_MULTIPLIES = re.compile(r"mm(_|$|\d)|matmul|linear|attention|attn|conv|rnn|lstm|gru|einsum")


@dataclass
class Flops:
    """Operations per position (token or sample) and per pair of positions.

    Fields that end in ``_again`` count operations that are recomputed for the backward pass.
    """

    position: float = 0.0  # per position
    row: float = 0.0  # attention over whole rows, per pair of positions in a row
    document: float = 0.0  # attention within documents, per pair of positions in a document
    position_again: float = 0.0
    row_again: float = 0.0
    document_again: float = 0.0

    def model(self, amount: Amount) -> float:
        """Return the operations that the model needs for the tokens that are not padding."""
        return self.position * float(amount.real) + (self.row + self.document) * float(amount.pairs)

    def hardware(self, amount: Amount) -> float:
        """Return the operations that the device executes."""
        positions = (self.position + self.position_again) * amount.positions
        rows = (self.row + self.row_again) * amount.squares
        documents = (self.document + self.document_again) * float(amount.within)
        return positions + rows + documents


class FlopMeter(TorchDispatchMode):
    """Dispatch mode that counts the operations of forward and backward passes.

    Args:
        length: Number of tokens in a row of the batch. 0 for a batch of samples, whose attention is not counted apart.
        sliced: Set for rows that are cut into slices for several processes: queries then are those of a slice.

    Example:
        >>> w = torch.ones(4, 8, requires_grad=True)
        >>> with FlopMeter() as meter:
        ...     (torch.ones(2, 4) @ w).sum().backward()
        >>> meter.sums  # 2 * 2 * 4 * 8 forward and as many for the weight
        Counter({'position': 256})
    """

    supports_higher_order_operators = True

    def __init__(self, length: int = 0, sliced: bool = False) -> None:
        super().__init__()
        self.length = length
        self.sliced = sliced
        self.sums: Counter[str] = Counter()
        self.by_type: Counter[torch.dtype] = Counter()
        self.unknown: set[str] = set()  # operators without a formula that may multiply matrices
        self.active = False
        self._outer: Any = None
        self._fakes = False  # True while the step itself runs on fake tensors

    def __enter__(self) -> "FlopMeter":
        self.active = True
        self._outer = saving_hooks()
        self._fakes = fakes_are_made()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.active = False

    def per(self, amount: Amount) -> Flops:
        """Return the counted operations per position and pair of the batch whose amount of data is given."""
        sums = Counter(self.sums)
        if sums["document"]:  # the attention of a document that fills its row was counted as a row's
            sums["document"] += sums.pop("row", 0)
            sums["document_again"] += sums.pop("row_again", 0)
        rates = {}
        for name, size in (("position", amount.positions), ("row", amount.squares), ("document", amount.within)):
            divisor = max(float(size), 1.0)
            rates[name] = sums[name] / divisor
            rates[f"{name}_again"] = sums[f"{name}_again"] / divisor
        return Flops(**rates)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Any,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is ASKS_DEVICE:
            return func(*args)
        kwargs = kwargs or {}
        names = {kind.__name__ for kind in types}
        if "DTensor" in names:
            return NotImplemented  # the operator is dispatched again for the local shards, which are counted
        result = func(*args, **kwargs)
        # DTensors call operators with fake tensors to plan their sharding, which is not part of the step.
        if self._fakes or "FakeTensor" not in names:
            self._count(*operator_of(func), result, args, kwargs)
        return result

    def _count(
        self, key: object, name: str, result: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        short = name.rpartition("::")[2]
        try:
            flops = _flops(key, short, result, args, kwargs)
        except Exception:  # a missing figure must not end a run
            flops = None
        if flops is None:
            if _MULTIPLIES.search(short):
                self.unknown.add(name)
            return
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.by_type[tensors[0].dtype] += flops
        kind, again = self._kind(short, tensors)
        if short.endswith("_backward") and kind != "position":
            scores = flops // 5  # a fused backward pass recomputes the attention scores
            self.sums[f"{kind}_again"] += scores
            flops -= scores
        self.sums[f"{kind}_again" if again else kind] += flops

    def _kind(self, name: str, tensors: list[Tensor]) -> tuple[str, bool]:
        """Return the field of :class:`Flops` to which an operator belongs, and whether the operator is recomputed."""
        again = recomputes(self._outer)
        if not self.length:
            return "position", again
        if "attention" in name or "attn" in name:
            query, key = tensors[name.endswith("_backward") :][:2]
            if query.ndim < 4:
                return "document", again
            if not self.sliced and query.shape[-2] != key.shape[-2]:
                return "position", again  # cross-attention
            whole_row = key.shape[-2] == self.length
            return "row" if whole_row else "document", again
        matrices = [x for x in tensors if x.ndim == 3][-2:]
        if name in ("bmm", "baddbmm") and len(matrices) == 2:
            # Attention that is written as matrix products: two of the three sizes are the length of a row.
            sizes = (*matrices[0].shape[1:], matrices[1].shape[-1])
            if sizes.count(self.length) > 1:
                return "row", again
        return "position", again


def _flops(key: object, name: str, result: object, args: Any, kwargs: Any) -> int | None:
    """Return the number of operations of one call, or ``None`` if no formula is known."""
    key = getattr(torch.ops.aten, name.removesuffix("_"), key)  # the in-place variant has the same formula
    if key in flop_registry:
        return int(flop_registry[key](*args, **kwargs, out_val=result))
    if name.startswith("_scaled_dot_product") and "math" not in name:  # torch has no formula for the CPU's kernels
        if name.endswith("_backward"):
            _, query, keys, values = args[:4]  # the first argument is the gradient of the output
            return sdpa_flop_count(query.shape, keys.shape, values.shape) * 5 // 2
        query, keys, values = args[:3]
        return sdpa_flop_count(query.shape, keys.shape, values.shape)
    if name.endswith("int_mm"):
        return int(mm_flop(args[0].shape, args[1].shape))
    if name.endswith("grouped_mm"):
        # Products of experts: the groups split the rows, the columns or, for gradients, the dimension of the sum.
        left, right = args[:2]
        groups = len(left) if left.ndim == right.ndim == 3 else 1
        return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]
    if name in ("gemm_4bit", "gemv_4bit"):
        return 2 * args[0].numel() * args[2][0]  # bitsandbytes' product of an input and codes of a weight [out, in]
    # Wrapper subclasses and nested tensors reach this mode as whole linear layers.
    if name == "linear":
        return 2 * args[0].numel() * args[1].shape[0]
    if name == "linear_backward":
        return 4 * args[0].numel() * args[2].shape[0]
    return None


def peak_flops_of(device: torch.device, by_type: Counter[torch.dtype]) -> float | None:
    """Return the peak operations per second of a device for a mixture of dtypes, or ``None`` if unknown.

    Args:
        device: The device.
        by_type: Number of operations by the dtype of their inputs.
    """
    if device.type != "cuda" or not by_type:
        return None
    return mixed_peak(torch.cuda.get_device_name(device), by_type)


def mixed_peak(name: str, by_type: Counter[torch.dtype]) -> float | None:
    """Return the result of :func:`peak_flops_of` for a device's name.

    Parts of a device (MIG) and slower variants of a model are unknown.
    """
    words = set(re.split(r"[\s/-]+", name))
    peaks = next((peaks for key, peaks in _PEAKS.items() if set(key.split()) <= words), None)
    if peaks is None or words & {"MIG", "Laptop", "D", "Ti", "SUPER", "Max"}:
        return None
    half, tf32, single = peaks
    float32 = tf32
    if torch.get_float32_matmul_precision() == "highest":
        float32 = single
    rate_by_bytes = {1: 2 * half, 2: half, 4: float32}
    seconds = 0.0
    for dtype, count in by_type.items():
        seconds += count / rate_by_bytes.get(dtype.itemsize, single / 2)
    return by_type.total() / seconds * 1e12
