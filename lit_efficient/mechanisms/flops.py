"""Floating-point operations of a step, counted once on a real one, and what a device could do of them.

    model    = forward + backward, each product once;  attention by pairs of tokens that lie in one document
    hardware = model + what is computed again for the backward pass, over padding and, of attention, between documents

Counted by torch's own formulas, a multiplication and an addition as two. A frozen weight has no product in the backward
pass, so that adapters are counted as they are computed. Causal attention counts as if it were not, as is usual; of
slices of rows a CPU leaves out whole pieces, which are not counted. Of shared layers each process counts its own part.
"""

import re
from collections import Counter
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

# Dense, of NVIDIA's and AMD's data sheets, without sparsity, in 1e12 a second: 16 bits, float32 as TF32, float32.
# The first entry all of whose words stand in the device's name counts.
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
    """Operations of one position, of one pair of positions in a row, and of one pair in a document."""

    position: float = 0.0  # of the model, for each position
    row: float = 0.0  # attention that is computed over whole rows, for each pair
    document: float = 0.0  # attention that is computed within documents, for each pair
    position_again: float = 0.0  # computed a second time, for the backward pass
    row_again: float = 0.0  # the same
    document_again: float = 0.0  # the same

    def model(self, amount: Amount) -> float:
        """What the real tokens need."""
        return self.position * float(amount.real) + (self.row + self.document) * float(amount.pairs)

    def hardware(self, amount: Amount) -> float:
        """What is computed."""
        by_position, by_row = self.position + self.position_again, self.row + self.row_again
        by_document = (self.document + self.document_again) * float(amount.within)
        return by_position * amount.positions + by_row * amount.squares + by_document


class FlopMeter(TorchDispatchMode):
    """Count the operations of forward and backward passes while active.

    Args:
        length: Tokens of the batch's rows; 0 for a batch of samples, whose attention counts with the rest.
        sliced: Whether queries are those of a slice of each row.

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
        self._fakes = False  # whether what it counts has no values

    def __enter__(self) -> "FlopMeter":
        self.active, self._outer, self._fakes = True, saving_hooks(), fakes_are_made()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.active = False

    def per(self, amount: Amount) -> Flops:
        """The counted operations, for each position and pair of the batch that they were counted on."""
        sums = Counter(self.sums)
        if sums["document"]:  # a document that fills its row looks like a row
            sums["document"] += sums.pop("row", 0)
            sums["document_again"] += sums.pop("row_again", 0)
        parts = {"position": amount.positions, "row": amount.squares, "document": amount.within}
        divisors = parts | {f"{name}_again": size for name, size in parts.items()}
        return Flops(**{name: sums[name] / max(float(size), 1.0) for name, size in divisors.items()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return func(*args)
        kwargs, names = kwargs or {}, {kind.__name__ for kind in types}
        if "DTensor" in names:
            return NotImplemented  # what it is made of comes next: this process's part
        result = func(*args, **kwargs)
        if self._fakes or "FakeTensor" not in names:  # by which shards try what they will do
            self._count(*operator_of(func), result, args, kwargs)
        return result

    def _count(self, key: Any, name: str, result: Any, args: Any, kwargs: Any) -> None:
        short = name.rpartition("::")[2]
        try:
            flops = _flops(key, short, result, args, kwargs)
        except Exception:  # a figure that is missing is no reason to end a run
            flops = None
        if flops is None:
            if _MULTIPLIES.search(short):
                self.unknown.add(name)
            return
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.by_type[tensors[0].dtype] += flops
        kind, again = self._kind(short, tensors)
        if short.endswith("_backward") and kind != "position":
            scores = flops // 5  # a fused backward pass forms them again
            self.sums[f"{kind}_again"] += scores
            flops -= scores
        self.sums[f"{kind}_again" if again else kind] += flops

    def _kind(self, name: str, tensors: list[Tensor]) -> tuple[str, bool]:
        """What an operator's cost grows with, and whether it is run a second time."""
        again = recomputes(self._outer)
        if not self.length:
            return "position", again
        if "attention" in name or "attn" in name:
            query, key = tensors[name.endswith("_backward") :][:2]
            if query.ndim < 4:
                return "document", again
            if self.sliced:
                return "row" if key.shape[-2] == self.length else "document", again
            kind = "row" if query.shape[-2] == self.length else "document"
            return (kind if query.shape[-2] == key.shape[-2] else "position"), again
        matrices = [x for x in tensors if x.ndim == 3][-2:]
        if name in ("bmm", "baddbmm") and len(matrices) == 2:
            sizes = (*matrices[0].shape[1:], matrices[1].shape[-1])
            return ("row" if sizes.count(self.length) > 1 else "position"), again
        return "position", again


def _flops(key: Any, name: str, result: Any, args: Any, kwargs: Any) -> int | None:
    """Operations of one call, ``None`` where no formula is known."""
    key = getattr(torch.ops.aten, name.removesuffix("_"), key)  # in place: the same
    if key in flop_registry:
        return int(flop_registry[key](*args, **kwargs, out_val=result))
    if name.startswith("_scaled_dot_product") and "math" not in name:  # the CPU's have no formula in torch
        backward = name.endswith("_backward")
        flops = sdpa_flop_count(*(tensor.shape for tensor in args[backward : 3 + backward]))
        return flops * 5 // 2 if backward else flops
    if name.endswith("int_mm"):
        return int(mm_flop(args[0].shape, args[1].shape))
    if name.endswith("grouped_mm"):  # experts, which split the rows, the columns or, for their gradients, the sum
        one, other = args[:2]
        groups = len(one) if one.ndim == other.ndim == 3 else 1
        return 2 * groups * one.shape[-2] * one.shape[-1] * other.shape[-1]
    if name in ("linear", "linear_backward"):  # of wrapped and nested tensors, which autograd does not take apart
        backward = name == "linear_backward"
        return (4 if backward else 2) * args[0].numel() * args[2 if backward else 1].shape[0]
    return None


def peak_flops_of(device: torch.device, by_type: Counter[torch.dtype]) -> float | None:
    """Operations a second that a device could do of a mixture of types of numbers, without sparsity; ``None``: unknown.

    Operations are counted by the type of what they take.
    """
    if device.type != "cuda" or not by_type:
        return None
    return mixed_peak(torch.cuda.get_device_name(device), by_type)


def mixed_peak(name: str, by_type: Counter[torch.dtype]) -> float | None:
    """As :func:`peak_flops_of`, by a device's name; of parts of a device, and slower relatives, nothing is known."""
    words = set(re.split(r"[\s/-]+", name))
    found = next((peaks for key, peaks in _PEAKS.items() if set(key.split()) <= words), None)
    if found is None or words & {"MIG", "Laptop", "D", "Ti", "SUPER", "Max"}:
        return None
    half, tf32, single = found
    rates = {1: 2 * half, 2: half, 4: single if torch.get_float32_matmul_precision() == "highest" else tf32}
    seconds = sum(count / rates.get(dtype.itemsize, single / 2) for dtype, count in by_type.items())
    return by_type.total() / seconds * 1e12
