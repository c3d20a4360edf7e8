"""Measurements of a run: amount of data in a batch, gradients, bytes of tensors, peak memory."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lit_efficient.distributed.row_slices import ROW_AMOUNT
from lit_efficient.internals.torch_dispatch import is_traceable_wrapper_subclass, storage_id
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.mechanisms.moving import tensors_in


@dataclass
class Amount:
    """Amount of data in batches. Values on a device stay tensors, so that counting does not wait for the device."""

    positions: float = 0  # tokens or samples, including padding
    real: float | Tensor = 0  # tokens or samples, without padding
    squares: float = 0  # sum of the squared lengths of the rows, including padding; 0 for samples
    pairs: float | Tensor = 0  # sum of the squared lengths of the documents, without padding
    within: float | Tensor = 0  # sum of the squared lengths of the documents, including documents of padding

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    def __truediv__(self, processes: int) -> "Amount":
        return Amount(*(getattr(self, part.name) / processes for part in fields(self)))


def count_batch(batch: Any) -> tuple[int, str]:
    """Return the number of tokens if a batch has ``input_ids``, else of samples, and the unit."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return batch["input_ids"].numel(), "tokens"
    return samples_of(batch), "samples"


def measure(batch: Any) -> tuple[Amount, str]:
    """Return the amount of data in a batch and its unit, without waiting for a device.

    Padding is masked by ``attention_mask``. In packed rows the last document is padding if all its ``labels`` are
    ignored. A document begins where ``position_ids`` are 0. A batch that was cut into slices of rows for several
    processes brings its amount with it.
    """
    if isinstance(batch, Mapping):
        amount_of_slice = batch.get(ROW_AMOUNT)
        if isinstance(amount_of_slice, Amount):
            return amount_of_slice, "tokens"
    count, unit = count_batch(batch)
    if unit != "tokens" or batch["input_ids"].ndim != 2:
        return Amount(count, count), unit
    ids = batch["input_ids"]
    squares = count * ids.shape[1]
    per_token: dict[str, Tensor] = {}
    for name in ("attention_mask", "position_ids", "labels"):
        value = batch.get(name)
        if isinstance(value, Tensor) and value.shape == ids.shape:
            per_token[name] = value
    if "attention_mask" in per_token:
        lengths = per_token["attention_mask"].sum(1, dtype=torch.int64)
        pairs = (lengths * lengths).sum()
        return Amount(count, lengths.sum(), squares, pairs, pairs), unit
    if "position_ids" not in per_token or not count:
        return Amount(count, count, squares, squares, squares), unit
    pairs = 2 * per_token["position_ids"] + 1  # sums to n * n over a document of n tokens
    if "labels" not in per_token:
        return Amount(count, count, squares, pairs.sum(), pairs.sum()), unit
    places = torch.arange(ids.shape[1], device=ids.device)
    last_document = ((per_token["position_ids"] == 0) * places).amax(1)  # begin of each row's last document
    last_label = ((per_token["labels"] != IGNORE) * places).amax(1)
    real = (places < last_document[:, None]) | (last_label >= last_document)[:, None]
    return Amount(count, real.sum(), squares, (pairs * real).sum(), pairs.sum()), unit


def count_real(batch: object) -> tuple[float | Tensor, str]:
    """Return the amount of data in a batch without padding, and its unit; see :func:`measure`."""
    amount, unit = measure(batch)
    return amount.real, unit


def held_bytes(tensors: Iterable[object]) -> int:
    """Return the bytes of tensors on this process's devices, each storage once.

    For wrapper subclasses and shards the bytes of the inner tensors count.
    """
    sizes: dict[int, int] = {}
    stack = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    while stack:
        tensor = stack.pop()
        if is_traceable_wrapper_subclass(tensor):
            inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            stack += [part for part in inner if isinstance(part, Tensor)]  # a shard's mesh is not a tensor
        elif tensor.is_sparse:
            stack += [tensor.coalesce().indices(), tensor.coalesce().values()]
        elif tensor.layout is not torch.strided:
            continue  # the parts of other sparse layouts are not counted
        else:
            storage = tensor.untyped_storage()
            sizes[storage_id(storage)] = storage.nbytes()
    return sum(sizes.values())


def samples_of(batch: object) -> int:
    """Return the number of rows of a batch: the first dimension of its first tensor, or 0 without a tensor.

    Single numbers count as a row only if there is nothing else.
    """
    tensors = list(tensors_in(batch))
    rows = [tensor.shape[0] for tensor in tensors if tensor.ndim]
    return rows[0] if rows else min(len(tensors), 1)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: of tensors on an accelerator, of this process on a CPU, or None if unknown."""
    if device.type != "cpu":
        present = torch.accelerator.current_accelerator()
        if present is None or present.type != device.type:
            return None
        try:
            return int(torch.accelerator.max_memory_allocated(device))
        except (AttributeError, NotImplementedError, RuntimeError):
            return None
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def short_number(value: float) -> str:
    """Return a number with three digits and a unit: 950, 1.23k, 45.6M."""
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}P"
