"""Context parallelism: rows of tokens are split along their length among n processes.

    row:         2n pieces of equal length, after padding; process i has pieces i and 2n - 1 - i
    attention:   o_i = Attention(q_i, K, V),    K, V = all processes' keys and values, in the order of the row

In causal attention the end of a row needs more work than its beginning. With one piece of each half, all processes have
the same number of pairs of queries and keys.

Saves: (n - 1)/n of the memory of activations
Costs: a block gathers keys and values from all processes, and sums their gradients over them
Source: Grattafiori et al. (2024), The Llama 3 Herd of Models, 3.3.2, https://arxiv.org/abs/2407.21783
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_attention import attention_part, gradients_of_part, joined
from lit_efficient.losses.next_token import IGNORE, targets_of
from lit_efficient.surgery import in_autocast_dtype

ROW_POSITIONS = "row_positions"  # key in a batch of slices: positions of the whole rows, [B, T]
ROW_AMOUNT = "row_amount"  # key in a batch of slices: amount of work in this process's share of the whole rows
_sharing: list[distributed.ProcessGroup] = []  # the process group that shares rows, or nothing


def share_rows(group: distributed.ProcessGroup | None) -> None:
    """Set the process group whose members hold the slices of a row, in their order; ``None``: every process has whole
    rows.
    """
    _sharing[:] = [] if group is None else [group]


def own_positions(length: int, device: torch.device) -> Tensor:
    """Return the positions of this process's tokens in a row of ``length``, ascending."""
    count = distributed.get_world_size(_sharing[0])
    rank = distributed.get_rank(_sharing[0])
    pieces = torch.arange(length, device=device).view(2 * count, -1)
    return torch.cat((pieces[rank], pieces[-1 - rank]))


def own_slices(batch: Any) -> dict[str, Any]:
    """Return this process's slices of the rows of a batch.

    All tensors ``[B, T, ...]`` are sliced alike. Labels are shifted before. Positions are 0 for padding of an
    ``attention_mask``, so that no token attends to it. ``num_bytes`` counts in the first process only.

    Args:
        batch: ``input_ids`` with ``labels`` or ``shift_labels``, and optionally ``position_ids``, ``attention_mask``.

    Raises:
        ConfigurationError: For another batch.
    """
    ids = None
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or {"labels", "shift_labels"}.isdisjoint(batch):
        if isinstance(batch, Mapping):
            held = ", ".join(map(str, batch))
        else:
            held = f"a {type(batch).__name__}"
        raise ConfigurationError(
            f"ShardedStrategy: parallel.context needs batches with input_ids and labels [B, T], got {held}"
        )
    length = ids.shape[1]
    rest = {key: value for key, value in batch.items() if key not in ("labels", "attention_mask")}
    mask = batch.get("attention_mask", torch.ones_like(ids)).bool()
    positions = batch.get("position_ids", mask.cumsum(1) - 1)
    rest |= {"shift_labels": targets_of(batch), "position_ids": torch.where(mask, positions, 0)}
    rest[ROW_POSITIONS] = rest["position_ids"]
    if "num_bytes" in rest and distributed.get_rank(_sharing[0]):
        rest["num_bytes"] = torch.zeros_like(rest["num_bytes"])
    missing = -length % (2 * distributed.get_world_size(_sharing[0]))
    places = own_positions(length + missing, ids.device)
    for key, value in rest.items():
        if isinstance(value, Tensor) and value.shape[:2] == ids.shape:
            ends = [0, 0] * (value.ndim - 2) + [0, missing]
            longer = F.pad(value, ends, value=IGNORE if key == "shift_labels" else 0)
            if key != ROW_POSITIONS:
                longer = longer[:, places]
            rest[key] = longer
    return rest


def gather_rows(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values ``[B, heads, T, head_dim]`` of whole rows, from those of this process's slices."""
    return _Gathered.apply(torch.stack((key, value)))


def attend_slices(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float | None) -> Tensor:
    """Compute `attend_documents` for slices on a CPU, without storing the keys of whole rows or a mask."""
    query = in_autocast_dtype(query)
    key = in_autocast_dtype(key)
    value = in_autocast_dtype(value)
    return _Slices.apply(query, torch.stack((key, value)), starts, scale)


def _gather(own: Tensor) -> Tensor:
    """Return the slices of all processes, in the order of the row."""
    count = distributed.get_world_size(_sharing[0])
    parts = own.new_empty(count, *own.shape)
    distributed.all_gather_into_tensor(parts.flatten(0, 1), own.contiguous(), _sharing[0])
    early, late = parts.chunk(2, dim=-2)  # (n, 2, B, heads, T / 2n, head_dim)
    return torch.cat((*early.unbind(), *late.flip(0).unbind()), dim=-2)


def _scatter(wanted: Tensor) -> Tensor:
    """Return the sum over all processes of the gradients of this process's slices."""
    count = distributed.get_world_size(_sharing[0])
    pieces = wanted.chunk(2 * count, dim=-2)
    parts = torch.stack([torch.cat((pieces[i], pieces[-1 - i]), dim=-2) for i in range(count)])
    own = torch.empty_like(parts[0])
    distributed.reduce_scatter_tensor(own, parts.flatten(0, 1), group=_sharing[0])
    return own


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, own: Tensor) -> tuple[Tensor, Tensor]:
        key, value = _gather(own)
        return key, value

    @staticmethod
    def backward(ctx: object, *wanted: Tensor) -> Tensor:
        return _scatter(torch.stack(wanted))


class _Slices(torch.autograd.Function):
    """Attention that gathers keys and values again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, own: Tensor, starts: Tensor, scale: float | None) -> Tensor:
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        whole = _gather(own)
        for row, queries, parts in _calls(starts):
            q = query[row, None, :, queries]
            found = [attention_part(q, *_written_out(whole, row, keys, q), causal, scale) for keys, causal in parts]
            out[row, :, queries], lse[row, :, queries] = (one[0] for one in joined(found))
        ctx.save_for_backward(query, own, starts, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *wanted: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query, own, starts, out, lse = ctx.saved_tensors
        whole = _gather(own)
        of_query = torch.zeros_like(query)
        of_whole = torch.zeros_like(whole)
        for row, queries, parts in _calls(starts):
            q, o, w = (heads[row, None, :, queries] for heads in (query, out, wanted[0]))
            for keys, causal in parts:
                seen = _written_out(whole, row, keys, q)
                joint = [o, lse[row, None, :, queries]]
                ours, *theirs = gradients_of_part(w, q, *seen, joint, causal, ctx.scale)
                of_query[row, :, queries] += ours[0]
                for total, one in zip(of_whole, theirs):
                    total[row, :, keys] += one[0].unflatten(0, (total.shape[1], -1)).sum(1)
        return of_query, _scatter(of_whole), None, None


def _written_out(whole: Tensor, row: int, keys: slice, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values ``[1, heads, T, head_dim]`` of one row, repeated for every query head."""
    groups = query.shape[1] // whole.shape[2]
    key, value = whole[:, row, None, :, keys].repeat_interleave(groups, 2)
    return key, value


def _calls(starts: Tensor) -> Iterator[tuple[int, slice, list[tuple[slice, bool]]]]:
    """Yield, for each row, this process's pieces of its documents, and the keys of each: earlier keys, and its own."""
    places = own_positions(starts.shape[1], starts.device)
    for row, own in enumerate(starts[:, places]):
        cuts = ((own.diff() != 0) | (places.diff() != 1)).nonzero()[:, 0] + 1
        bounds = [0, *cuts.tolist(), len(own)]
        for begin, end in pairwise(bounds):
            first, last = int(places[begin]), int(places[end - 1]) + 1
            before = slice(int(own[begin]), first)
            parts = [(slice(first, last), True)]
            if before.start < before.stop:
                parts.insert(0, (before, False))
            yield row, slice(begin, end), parts


def mean_over_rows(losses: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of `token_losses` of slices ``[B, T / n]`` over all labelled tokens of whole rows."""
    sums = torch.stack((losses.detach().sum().double(), (labels != IGNORE).sum().double()))
    distributed.all_reduce(sums, group=_sharing[0])
    return (sums[0] / sums[1].clamp(min=1)).float()
