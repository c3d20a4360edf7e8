"""Causal attention within the documents of packed rows, without a T x T mask.

    o[t] = softmax(q[t] K[s : t + 1]^T / sqrt(d)) V[s : t + 1],    s = starts[t]: first token that t sees

The first token is that of t's document, or a later one in layers with a sliding window or with chunks. On a CPU each
document is computed by a call of its own, and windows in pieces. On a GPU FlexAttention visits the blocks of 128 x 128
tokens that contain part of a document. Their tables are built on the device, so that the host never waits for the
lengths of documents. Where FlexAttention does not run, and where only flash attention is enabled, torch's `varlen_attn`
takes the lengths of the documents, and the remaining cases are computed document by document. For both the host waits
once per step. A mask is used in compiled code on a CPU, in slices of rows, and for rows of one block.

Models of transformers that use torch's attention can be given the starts in the place of a mask (`read_starts`).

Saves: a mask of T^2 bytes a row (5 T^2 where a kernel needs floats), and the work between documents
Costs: on a GPU the compilation of FlexAttention, once
Source: Dong et al. (2024), https://arxiv.org/abs/2412.05496; varlen_attn:
https://docs.pytorch.org/docs/stable/nn.attention.varlen.html
"""

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.utils.weak import WeakTensorKeyDictionary

from lit_efficient.distributed.row_slices import attend_slices, gather_rows, own_positions
from lit_efficient.internals.hugging_face import attention_of, set_attention
from lit_efficient.internals.torch_as_cuda import kind_of
from lit_efficient.internals.torch_compiler import runs_eagerly
from lit_efficient.internals.torch_dispatch import has_values, no_dispatch_modes

_BLOCK = 128


def document_starts(position_ids: Tensor) -> Tensor:
    """Return the position in its row at which each token's document starts, ``[B, T]`` int64.

    A document starts wherever a position is not its predecessor's plus one, as in Hugging Face's packed batches.

    Args:
        position_ids: ``[B, T]``, counted from 0 in every document.

    Example:
        >>> document_starts(torch.tensor([[0, 1, 2, 0, 1, 0]]))
        tensor([[0, 0, 0, 3, 3, 5]])
    """
    begins = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1
    index = torch.arange(position_ids.shape[1], device=position_ids.device)
    return torch.where(begins, index, 0).cummax(1).values


@dataclass(frozen=True)
class _Segments:
    """Parts of rows that do not attend to each other, read from the starts on the host.

    Args:
        lengths: number of tokens of each segment, for each row.
        windows: first token that each token of a segment sees, counted within the segment, ``[length]`` on the CPU;
            None where that is the segment's first token.
        bounds: first token of each segment of all rows one after the other, and the end, int32 on the device.
        longest: number of tokens of the longest segment.
        window: most tokens that a token sees, if all tokens with so many tokens before them see as many.
    """

    lengths: list[list[int]]
    windows: list[Tensor | None]
    bounds: Tensor
    longest: int
    window: int | None


_segments: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # starts to their _Segments: one wait for all layers
_ROWS = 1024  # queries of a window in one call


def segments_of(starts: Tensor) -> _Segments:
    """Return the parts of rows with starts ``[B, T]`` or ``[B, 1, 1, T]`` that do not attend to each other."""
    found: _Segments | None = _segments.get(starts)
    if found is not None:
        return found
    own = starts.flatten(1).cpu()
    index = torch.arange(own.shape[1])
    begins = own == index
    firsts = begins.flatten().nonzero()[:, 0]
    bounds = torch.cat((firsts, firsts.new_tensor([own.numel()])))
    lengths = [row.nonzero()[:, 0].diff(append=torch.tensor([len(row)])).tolist() for row in begins]
    sizes = [length for row in lengths for length in row]
    within = own - torch.where(begins, index, 0).cummax(1).values  # starts counted from the segment's first token
    windows = [part if bool(part[-1]) else None for part in within.flatten().split(sizes)]
    most = int((index - own).max()) + 1
    place = index - (own - within)
    uniform = torch.equal(within, (place - most + 1).clamp(min=0))
    found = _Segments(lengths, windows, bounds.int().to(starts.device), max(sizes), most if uniform else None)
    _segments[starts] = found
    return found


def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attend from each token to the tokens before it, beginning with the token that ``starts`` names.

    Args:
        query: ``[B, heads, T, head_dim]``.
        key: ``[B, kv_heads, T, head_dim]``; ``kv_heads`` divides ``heads``.
        value: as ``key``.
        starts: `document_starts` of whole rows, ``[B, T]`` or ``[B, 1, 1, T]``; longer than the queries where those are
            slices of rows (`own_slices`). Starts of windows are later. They never decrease along a row.
        dropout: dropout rate of the attention weights.
        scale: factor of the products of queries and keys; None is ``1 / sqrt(head_dim)``.

    Returns:
        ``[B, heads, T, head_dim]``.
    """
    kind = kind_of(query.device)
    rows = starts.flatten(1)
    length = rows.shape[1]
    places = None
    how: dict[str, Any] = {"scale": scale, "dropout_p": dropout}
    compiling = torch.compiler.is_compiling()
    if query.shape[2] != length:
        if kind == "cpu" and not dropout and not compiling:
            return attend_slices(query, key, value, rows, scale)
        places = own_positions(length, starts.device)
        key, value = gather_rows(key, value)
    eager = places is None and not compiling
    if eager and not has_values(starts):  # `plan`: this call keeps as many bytes for the backward pass
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped, **how)
    if eager and kind == "cpu":
        return _one_by_one(query, key, value, starts, **how)
    if kind == "cuda" and length > _BLOCK:
        plain = not dropout and query.dtype == key.dtype == value.dtype
        if plain and eager and _flash_alone() and _varlen_works(query, value, starts):
            return _by_lengths(query, key, value, starts, scale)
        if plain and (compiling or _flex_works(query.dtype, query.shape[-1])):
            flex: Any = flex_attention if compiling else _flex()
            return _in_blocks(query, key, value, rows, flex, scale, places)
        if plain and eager and _varlen_works(query, value, starts):
            return _by_lengths(query, key, value, starts, scale)
        if eager:
            return _one_by_one(query, key, value, starts, **how)
    index = torch.arange(length, device=starts.device)
    mask = (index >= rows[:, :, None]).tril()[:, None]
    if places is not None:
        mask = mask[:, :, places]
    # CUDA's kernel for masks needs one key head per query head. Otherwise torch stores all scores.
    key, value = repeated_heads(query, key, value)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **how)


def repeated_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values ``[B, kv_heads, T, head_dim]`` with one head for each head of the queries."""
    groups = query.shape[1] // key.shape[1]
    key, value = (heads.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for heads in (key, value))
    return key, value


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, **how: Any) -> Tensor:
    segments = segments_of(starts)
    # split and cat are each other's gradients. The gradient of a slice would be as large as the whole tensor.
    parts = []
    for heads in (query, key, value):
        documents: list[Tensor] = []
        for row, lengths in zip(heads.unbind(), segments.lengths, strict=True):
            documents += row[None].split(lengths, 2)
        parts.append(documents)
    grouped = query.shape[1] != key.shape[1]
    mixed = []
    for q, k, v, window in zip(*parts, segments.windows, strict=True):
        if window is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, **how)
        else:
            out = _in_pieces(q, k, v, window, **how)
        mixed.append(out.transpose(1, 2))
    shape = (len(query), query.shape[2], query.shape[1], value.shape[-1])
    return torch.cat(mixed, 1).view(shape).transpose(1, 2)


def _in_pieces(query: Tensor, key: Tensor, value: Tensor, window: Tensor, **how: Any) -> Tensor:
    """Attend within one document of which tokens do not see all earlier ones, a piece of the queries at a time."""
    key, value = repeated_heads(query, key, value)
    parts = []
    begin = 0
    for queries, firsts in zip(query.split(_ROWS, 2), window.split(_ROWS), strict=True):
        end = begin + len(firsts)
        seen = slice(int(firsts[0]), end)  # starts never decrease
        keys = torch.arange(seen.start, end)
        mask = (keys >= firsts[:, None]) & (keys <= torch.arange(begin, end)[:, None])
        mask = mask.to(query.device)
        parts.append(F.scaled_dot_product_attention(queries, key[:, :, seen], value[:, :, seen], attn_mask=mask, **how))
        begin = end
    return torch.cat(parts, 2)


def _by_lengths(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float | None = None) -> Tensor:
    segments = segments_of(starts)
    q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value))  # (B * T, heads, head_dim)
    assert segments.window is not None
    # A window of -1 is causal attention. A window of n also sees n tokens before its own.
    window = -1 if segments.window == segments.longest else segments.window - 1
    grouped = query.shape[1] != key.shape[1]
    bounds, longest = segments.bounds, segments.longest
    found = varlen_attn(
        q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(window, 0), enable_gqa=grouped
    )
    assert isinstance(found, Tensor)
    return found.unflatten(0, (len(query), -1)).transpose(1, 2)


def _flash_alone() -> bool:
    """Return whether flash attention is the only enabled kernel of torch, as with `AttentionBackend`."""
    cuda = torch.backends.cuda
    others = cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled() or cuda.math_sdp_enabled()
    return cuda.flash_sdp_enabled() and not others


def _varlen_works(query: Tensor, value: Tensor, starts: Tensor) -> bool:
    if not torch.backends.cuda.flash_sdp_enabled() or query.shape[-1] != value.shape[-1]:
        return False
    return _varlen_tried(query.dtype, query.shape[-1]) and segments_of(starts).window is not None


def _in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    flex: Callable[..., Any],
    scale: float | None = None,
    places: Tensor | None = None,
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    return flex(query, key, value, block_mask=visible_blocks(starts, places), enable_gqa=grouped, scale=scale)


def visible_blocks(starts: Tensor, places: Tensor | None = None) -> BlockMask:
    """Return FlexAttention's table of the blocks of keys that each block of queries attends to.

    Args:
        starts: `document_starts`, ``[B, T]``.
        places: positions of the queries in their rows, ascending; None: all.
    """
    own = starts if places is None else starts[:, places]
    length = own.shape[1]
    whole = starts.shape[1]
    blocks = torch.arange(-(-whole // _BLOCK), dtype=torch.int32, device=starts.device)
    first = (own[:, ::_BLOCK] // _BLOCK).int()[:, None]  # starts never decrease along a row
    last = blocks
    if places is not None:  # the block of keys that holds the last query of each block of queries
        last = (torch.cat((places[_BLOCK - 1 :: _BLOCK], places[-1:]))[: first.shape[-1]] // _BLOCK).int()
    indices = torch.minimum(first[..., None] + blocks, last[:, None])

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query if places is None else places[query]
        return (key <= place) & (key >= own[batch, query])

    return BlockMask.from_kv_blocks(
        last + 1 - first, indices, BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(length, whole)
    )


@functools.cache
def _flex() -> Callable[..., object]:
    """Return FlexAttention, compiled: without compilation it stores all scores."""
    return torch.compile(flex_attention)


def _flex_works(dtype: torch.dtype, head_dim: int) -> bool:
    return not runs_eagerly() and _flex_tried(dtype, head_dim)


@functools.cache
def _flex_tried(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether FlexAttention works. It fails without Triton or a compiler, and for some sizes."""

    def attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
        return _in_blocks(query, key, value, starts, _flex())

    return _tried("FlexAttention", attend, dtype, head_dim)


@functools.cache
def _varlen_tried(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether `varlen_attn` works. It needs 16 bits, and has other arguments in versions before torch 2.12."""
    return _tried("torch's varlen_attn", _by_lengths, dtype, head_dim)


def _tried(name: str, attend: Callable[..., Tensor], dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether a kernel works on CUDA, forward and backward, for documents and for windows."""
    close = True
    try:
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            length = 2 * _BLOCK
            x = torch.linspace(-2, 2, length * head_dim, device="cuda").sin().to(dtype)
            x = x.view(1, 1, -1, head_dim).requires_grad_()
            index = torch.arange(length, device="cuda")
            starts = torch.where(index < 100, 0, 100)[None]
            for first in (starts, torch.maximum(starts, index - 39)):
                out = attend(x, x, x, first)
                mask = (index >= first[0, :, None]).tril()
                expected = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
                pairs = [(out, expected)]
                pairs += zip(*(torch.autograd.grad(y.float().square().sum(), x) for y in (out, expected)), strict=True)
                close &= all(bool((one - other).abs().max() < 0.05 * other.abs().max()) for one, other in pairs)
        reason = ""
        if not close:
            reason = "its results differ from torch's attention"
    except Exception as error:  # the parts of the compiler raise unrelated classes
        first_line = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line}"
    if reason:
        warnings.warn(f"packed rows do not use {name}, which does not run here ({reason})", stacklevel=3)
    return not reason


# Arguments with which a layer asks for more than the tokens that the starts name.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "cache", "head_mask")


@functools.cache
def read_starts() -> None:
    """Let transformers' attention by torch accept starts ``[B, 1, 1, T]`` int64 in the place of a mask.

    Calls with any other mask are unchanged. As for a mask, the starts contain the layer's window. A call with starts
    raises ValueError if the layer needs more than causal attention.
    """
    from transformers import AttentionInterface

    plain = AttentionInterface()["sdpa"]

    def sdpa(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        if attention_mask is None or attention_mask.dtype != torch.int64:
            how = {**kwargs, "dropout": dropout, "scaling": scaling, "is_causal": is_causal}
            return plain(module, query, key, value, attention_mask, **how)
        causal = is_causal
        if causal is None:
            causal = getattr(module, "is_causal", True)
        further = [name for name in _UNKNOWN if kwargs.get(name) is not None]
        if further or not causal or query.shape[2] != key.shape[2] or attention_mask.shape[1:3] != (1, 1):
            raise ValueError(
                f"starts of documents cannot replace the mask of this layer: {further or 'not plainly causal'}"
            )
        mixed = attend_documents(query, key, value, attention_mask, dropout, scaling)
        return mixed.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sdpa", sdpa)


_LONGEST = 1 << 20  # tokens for which layers are examined
_SQUARE = 256  # tokens of which every pair is examined
Earlier = Tensor | dict[str, Tensor | None]


@dataclass(frozen=True)
class Reach:
    """Number of earlier tokens that each token of a document sees, for each kind of layer of a transformers model.

    Args:
        earlier: ``[longest]`` int64 by the token's position, or such a tensor for each kind of layer; None for kinds
            without attention.
        whole: whether each token sees all earlier ones in all layers.
        longest: number of tokens for which the layers were examined.
    """

    earlier: Earlier
    whole: bool
    longest: int

    def starts(self, position_ids: Tensor) -> Any:
        """Return the starts ``[B, 1, 1, T]`` of packed rows, for each kind of layer if there are several."""
        documents = document_starts(position_ids)
        index = torch.arange(position_ids.shape[1], device=position_ids.device)

        def of_kind(earlier: Tensor) -> Tensor:
            table = earlier.to(position_ids.device)
            seen = table[position_ids.clamp(max=len(table) - 1)]
            return torch.maximum(documents, index - seen)[:, None, None]

        if isinstance(self.earlier, Tensor):
            return of_kind(self.earlier)
        return {kind: None if earlier is None else of_kind(earlier) for kind, earlier in self.earlier.items()}


_reaches: WeakKeyDictionary[nn.Module, Reach | None] = WeakKeyDictionary()


def reach_of(network: Any, longest: int) -> Reach | None:
    """Return the `Reach` of the layers of a transformers model, or None if starts cannot replace its masks.

    Starts can do so if the model uses torch's attention, and if each token sees itself and the tokens directly before
    it, as in causal attention, sliding windows and chunks.
    """
    length = min(longest, _LONGEST)
    found = _reaches.get(network)
    if network not in _reaches or (found is not None and found.longest < length):
        found = _reaches[network] = _reach(network, length)
    return found


def _reach(network: Any, length: int) -> Reach | None:
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import create_masks_for_generate

    name = "lit_efficient_earlier"
    if attention_of(network.config) != "sdpa":
        return None
    AttentionMaskInterface.register(name, _earlier)
    config = copy.deepcopy(network.config)
    set_attention(config, name)
    make = getattr(network, "create_masks_for_generate", create_masks_for_generate)
    try:
        with no_dispatch_modes(), torch.device("cpu"):  # with values, in a plan, too
            found = make(config, torch.empty(1, length, 0), None, None, position_ids=torch.arange(length)[None])
    except (TypeError, ValueError):  # transformers up to 5.19 builds no masks for layers with chunked attention
        return None
    kinds = found
    if not isinstance(found, dict):
        kinds = {"": found}
    for earlier in kinds.values():
        if earlier is not None and (not isinstance(earlier, Tensor) or earlier.shape != (length,)):
            return None
    tables = [earlier for earlier in kinds.values() if earlier is not None]
    if not tables or kinds.get("", tables[0]) is None:
        return None
    with no_dispatch_modes(), torch.device("cpu"):
        return Reach(found, all(torch.equal(table, torch.arange(length)) for table in tables), length)


def _earlier(*_: object, mask_function: Callable[..., Tensor], q_length: int, **__: object) -> Tensor:
    """Return the number of earlier tokens that each token of one document sees, in the place of a mask.

    Raises:
        ValueError: If a token does not see itself and the tokens directly before it.
    """
    index = torch.arange(q_length)
    zero = index[:1] * 0
    low = torch.zeros_like(index)
    high = index.clone()
    while bool((low < high).any()):  # bisection for the first token that is seen
        middle = (low + high) // 2
        sees = mask_function(zero, zero, index, middle)
        low = torch.where(sees, low, torch.minimum(middle + 1, high))
        high = torch.where(sees, middle, high)
    further = torch.arange(16) * (q_length - 1) // 15
    for row in (*index[:_SQUARE], *further):
        seen = mask_function(zero, zero, row, index)
        if not torch.equal(seen.expand_as(index), (index >= low[row]) & (index <= row)):
            raise ValueError("a token does not see itself and the tokens directly before it")
    return index - low
