"""What a run is measured by: how much a batch holds, the gradients' norm, the peak of memory."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_efficient.internals.torch_foreach import foreach_norm
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.surgery import is_sharded


def count_batch(batch: Any) -> tuple[int, str]:
    """How much a batch holds: tokens if it has ``input_ids``, else samples (the first tensor's first dimension)."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return batch["input_ids"].numel(), "tokens"
    return _samples(batch), "samples"


def count_real(batch: Any) -> tuple[int | Tensor, str]:
    """As :func:`count_batch`, without padding: then a tensor, not waited for.

    Padding is what an ``attention_mask`` names, or in packed rows a last document none of whose ``labels`` count.
    """
    count, unit = count_batch(batch)
    names = ("attention_mask", "position_ids", "labels") if unit == "tokens" else ()
    same = {name: batch.get(name) for name in names}
    same = {name: t for name, t in same.items() if isinstance(t, Tensor) and t.shape == batch["input_ids"].shape}
    if "attention_mask" in same:
        return same["attention_mask"].sum(dtype=torch.int64), unit
    if len(same) == 2 and count and same["labels"].ndim == 2:
        places = torch.arange(same["labels"].shape[1], device=same["labels"].device)
        begins, learns = ((known * places).amax(1) for known in (same["position_ids"] == 0, same["labels"] != IGNORE))
        return count - ((len(places) - begins) * (learns < begins)).sum(), unit
    return count, unit


def _samples(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return next((count for count in map(_samples, batch) if count), 0)
    return 0


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor | None:
    """The 2-norm of all gradients together, as a scalar that is not waited for; ``None`` where there are none.

    Shards count as a whole, which all processes ask for together. Formats of 16 bits are summed in float32.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        kinds.setdefault((is_sharded(values), values.device, values.dtype), []).append(values)
    norms: list[Tensor] = []
    for (sharded, _, dtype), tensors in kinds.items():
        wide = torch.float32 if dtype.itemsize < 4 else None
        norm: Any = torch.linalg.vector_norm(torch.stack(list(foreach_norm(tensors, 2.0, dtype=wide))))
        norms.append(norm.full_tensor() if sharded else norm)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0]) for norm in norms])) if norms else None


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that tensors took on an accelerator, or this process on a CPU; ``None`` where nobody counts."""
    if device.type != "cpu":
        try:
            return int(torch.accelerator.max_memory_allocated(device))
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
