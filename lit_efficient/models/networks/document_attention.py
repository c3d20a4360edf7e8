"""Causal attention within the documents of packed rows, without a T x T mask.

    o[t] = softmax(q[t] K[s : t + 1]^T / sqrt(d)) V[s : t + 1],    s = starts[t]: where the document of t starts

On a CPU each document is computed by a call of its own. On a GPU FlexAttention visits the blocks of 128 x 128 tokens
that contain part of a document. Their tables are built on the device, so that the host never waits for the lengths of
documents. Torch's kernels with a mask are used in compiled code on a CPU, for rows of one block, and where
FlexAttention does not work.

Models of transformers that use torch's attention can be given the starts in the place of a mask (`read_starts`).

Saves: a mask of T^2 bytes a row (5 T^2 where a kernel needs floats), and the work between documents
Costs: on a GPU the compilation of the kernel, once
Source: Dong et al. (2024), https://arxiv.org/abs/2412.05496
"""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lit_efficient.distributed.row_slices import attend_slices, gather_rows, own_positions
from lit_efficient.internals.hugging_face import set_attention
from lit_efficient.internals.torch_as_cuda import kind_of
from lit_efficient.internals.torch_compiler import runs_eagerly

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


def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, dropout: float = 0.0, scale: float | None = None
) -> Tensor:
    """Attend from each token to the tokens before it in its document.

    Args:
        query: ``[B, heads, T, head_dim]``.
        key: ``[B, kv_heads, T, head_dim]``; ``kv_heads`` divides ``heads``.
        value: as ``key``.
        starts: `document_starts` of whole rows, ``[B, T]``; longer than the queries where those are slices of rows
            (`own_slices`).
        dropout: dropout rate of the attention weights.
        scale: factor of the products of queries and keys; None is ``1 / sqrt(head_dim)``.

    Returns:
        ``[B, heads, T, head_dim]``.
    """
    kind = kind_of(query.device)
    length = starts.shape[1]
    places = None
    how: dict[str, Any] = {"scale": scale, "dropout_p": dropout}
    compiling = torch.compiler.is_compiling()
    if query.shape[2] != length:
        if kind == "cpu" and not dropout and not compiling:
            return attend_slices(query, key, value, starts, scale)
        places = own_positions(length, starts.device)
        key, value = gather_rows(key, value)
    if kind == "cpu" and places is None and type(starts) is Tensor and not compiling:
        return _one_by_one(query, key, value, starts, **how)
    takes = kind == "cuda" and length > _BLOCK and not dropout and query.dtype == key.dtype == value.dtype
    # `plan` runs stand-ins for CUDA tensors. This call keeps as many bytes for the backward pass as FlexAttention.
    if takes and kind != query.device.type and places is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped, **how)
    if takes and (compiling or _flex_works(query.dtype, query.shape[-1])):
        flex: Any = flex_attention if compiling else _flex()
        return _in_blocks(query, key, value, starts, flex, scale, places)
    index = torch.arange(length, device=starts.device)
    mask = (index >= starts[:, :, None]).tril()[:, None]
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
    begins = starts == torch.arange(starts.shape[1])
    sizes = [row.nonzero()[:, 0].diff(append=torch.tensor([len(row)])).tolist() for row in begins]
    # split and cat are each other's gradients. The gradient of a slice would be as large as the whole tensor.
    parts = []
    for heads in (query, key, value):
        documents: list[Tensor] = []
        for row, lengths in zip(heads.unbind(), sizes, strict=True):
            documents += row[None].split(lengths, 2)
        parts.append(documents)
    grouped = query.shape[1] != key.shape[1]
    mixed = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, **how).transpose(1, 2)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(mixed, 1).view(*starts.shape, query.shape[1], -1).transpose(1, 2)


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
    """Return whether FlexAttention works, forward and backward. It fails without Triton or a compiler, and for some
    sizes.
    """
    try:
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            starts = torch.zeros(1, 2 * _BLOCK, dtype=torch.int64, device="cuda")
            starts[:, 100:] = 100
            x = torch.linspace(-2, 2, 2 * _BLOCK * head_dim, device="cuda").sin().to(dtype)
            x = x.view(1, 1, -1, head_dim).requires_grad_()
            out = _in_blocks(x, x, x, starts, _flex())
            out.float().square().sum().backward()
            expected = F.scaled_dot_product_attention(x[:, :, 100:], x[:, :, 100:], x[:, :, 100:], is_causal=True)
            assert x.grad is not None
            close = bool((out[:, :, 100:] - expected).abs().max() < 0.05 and x.grad.isfinite().all())
        reason = ""
        if not close:
            reason = "its results differ from torch's attention"
    except Exception as error:  # the parts of the compiler raise unrelated classes
        first_line = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line}"
    if reason:
        warnings.warn(
            f"packed rows use a mask of T x T, because FlexAttention does not run here ({reason})", stacklevel=2
        )
    return not reason


# Arguments with which a layer asks for more than causal attention within documents.
_UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias", "cache", "head_mask")


@functools.cache
def read_starts() -> None:
    """Let transformers' attention by torch accept `document_starts` ``[B, 1, 1, T]`` int64 in the place of a mask.

    Calls with any other mask are unchanged. A call with starts raises ValueError if the layer needs more than causal
    attention within documents.
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
        mixed = attend_documents(query, key, value, attention_mask[:, 0, 0], dropout, scaling)
        return mixed.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sdpa", sdpa)


def causal_throughout(network: Any, length: int) -> bool:
    """Return whether the last of ``length`` tokens sees all others in every kind of layer of a transformers model."""
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import create_masks_for_generate

    index = torch.arange(length)
    name = "lit_efficient_last_row"
    AttentionMaskInterface.register(
        name, lambda *_, mask_function, **__: mask_function(index[:1] * 0, index[:1] * 0, index[-1:], index)
    )
    config = copy.deepcopy(network.config)
    set_attention(config, name)
    make = getattr(network, "create_masks_for_generate", create_masks_for_generate)
    try:
        found = make(config, torch.empty(1, length, 0), None, None, position_ids=index[None])
    except TypeError:  # transformers up to 5.19 builds no masks for layers with chunked attention
        return False
    masks = list(found.values()) if isinstance(found, dict) else [found]
    return all(isinstance(mask, Tensor) and bool(mask.all()) for mask in masks)
