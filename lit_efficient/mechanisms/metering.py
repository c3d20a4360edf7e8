"""What a run is measured by: how much a batch holds, the gradients' norm, the peak of memory."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.distributed.row_slices import ROW_AMOUNT
from lit_efficient.internals.torch_dispatch import is_traceable_wrapper_subclass, storage_id
from lit_efficient.losses.next_token import IGNORE


@dataclass
class Amount:
    """What batches hold; of values that lie on a device sums are made there, and nobody waits for them."""

    positions: float = 0  # tokens or samples, padding included
    real: float | Tensor = 0  # those that are no padding
    squares: float = 0  # sum of the squared lengths of the rows, padding included; 0 of samples
    pairs: float | Tensor = 0  # sum of the squared lengths of the documents, padding left out
    within: float | Tensor = 0  # the same, with documents that are padding

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    def __truediv__(self, processes: int) -> "Amount":
        return Amount(*(getattr(self, part.name) / processes for part in fields(self)))


def count_batch(batch: Any) -> tuple[int, str]:
    """How much a batch holds: tokens if it has ``input_ids``, else samples (the first tensor's first dimension)."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return batch["input_ids"].numel(), "tokens"
    return samples_of(batch), "samples"


def measure(batch: Any) -> tuple[Amount, str]:
    """As :func:`count_batch`, with and without padding, and with the lengths of documents; nothing is waited for.

    Padding is what an ``attention_mask`` names, or in packed rows a last document none of whose ``labels`` count. A
    document begins where ``position_ids`` are 0. Slices of rows say what is this process's share of the whole.
    """
    if isinstance(batch, Mapping) and isinstance(known := batch.get(ROW_AMOUNT), Amount):
        return known, "tokens"
    count, unit = count_batch(batch)
    if unit != "tokens" or batch["input_ids"].ndim != 2:
        return Amount(count, count), unit
    ids = batch["input_ids"]
    squares = count * ids.shape[1]
    same = {name: batch.get(name) for name in ("attention_mask", "position_ids", "labels")}
    same = {name: t for name, t in same.items() if isinstance(t, Tensor) and t.shape == ids.shape}
    if "attention_mask" in same:
        lengths = same["attention_mask"].sum(1, dtype=torch.int64)
        pairs = (lengths * lengths).sum()
        return Amount(count, lengths.sum(), squares, pairs, pairs), unit
    if "position_ids" not in same or not count:
        return Amount(count, count, squares, squares, squares), unit
    pairs = 2 * same["position_ids"] + 1  # of a document of n tokens n * n in all
    if "labels" not in same:
        return Amount(count, count, squares, pairs.sum(), pairs.sum()), unit
    places = torch.arange(ids.shape[1], device=ids.device)
    begins, learns = ((known * places).amax(1) for known in (same["position_ids"] == 0, same["labels"] != IGNORE))
    real = (places < begins[:, None]) | (learns >= begins)[:, None]
    return Amount(count, real.sum(), squares, (pairs * real).sum(), pairs.sum()), unit


def count_real(batch: Any) -> tuple[float | Tensor, str]:
    """How much a batch holds without padding: then a tensor, not waited for; see :func:`measure`."""
    amount, unit = measure(batch)
    return amount.real, unit


def held_bytes(tensors: Iterable[Any]) -> int:
    """Bytes that tensors take on this process's devices, each storage once; of wrappers and shards what is inside."""
    sizes: dict[int, int] = {}
    stack = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    while stack:
        tensor = stack.pop()
        if is_traceable_wrapper_subclass(tensor):
            inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            stack += [part for part in inner if isinstance(part, Tensor)]  # of a shard also its mesh, which is none
        elif tensor.layout is not torch.strided:  # sparse: its parts
            stack += [tensor.coalesce().indices(), tensor.coalesce().values()] if tensor.is_sparse else []
        else:
            storage = tensor.untyped_storage()
            sizes[storage_id(storage)] = storage.nbytes()
    return sum(sizes.values())


def samples_of(batch: Any) -> int:
    """How many rows a batch has: the first dimension of its first tensor."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return next((count for count in map(samples_of, batch) if count), 0)
    return 0


def gradients_of(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """The gradient of each parameter that has one, in CPU memory where its optimizer has brought it there."""
    gradients = getattr(getattr(optimizer, "host_states", None), "gradients", None)
    away = {} if gradients is None else gradients.arrived()
    own = {p: away.get(p, p).grad for group in optimizer.param_groups for p in group["params"]}
    return {p: gradient for p, gradient in own.items() if gradient is not None}


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that tensors took on an accelerator, or this process on a CPU; ``None`` where nobody counts."""
    if device.type != "cpu":
        here = torch.accelerator.current_accelerator()
        try:
            return int(torch.accelerator.max_memory_allocated(device)) if here and here.type == device.type else None
        except (AttributeError, NotImplementedError, RuntimeError):
            return None
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def short_number(value: float) -> str:
    """Three digits and a unit: 950, 1.23k, 45.6M."""
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T"
