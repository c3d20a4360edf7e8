"""Causal attention within the documents of packed rows, without a T x T mask.

    o[t] = softmax(q[t] K[s : t + 1]^T / sqrt(d)) V[s : t + 1],    s = starts[t]: where the document of t begins

On a CPU each document is a call of its own. On a GPU FlexAttention goes through the blocks of 128 x 128 that a document
has a part in, from tables that are made on the device: the host never reads how long documents are. In compiled code on
a CPU, for rows of one block, and where FlexAttention fails its trial, torch's kernels get a mask.

Models of transformers that take torch's attention can be given the starts in the place of a mask (`read_starts`).

Saves: a mask of T^2 bytes a row (5 T^2 where a kernel wants floats), and the work between documents
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
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lit_efficient.distributed.row_slices import attend_slices, of_whole_rows, own_places
from lit_efficient.internals.hugging_face import set_attention
from lit_efficient.internals.torch_as_cuda import kind_of
from lit_efficient.internals.torch_compiler import runs_eagerly

_BLOCK = 128


def document_starts(position_ids: Tensor) -> Tensor:
    """Where the document of each token begins in its row, ``[B, T]`` int64.

    A document begins wherever a position is not its predecessor's plus one, as in Hugging Face's packed batches.

    Args:
        position_ids: ``[B, T]``, from 0 in every document.

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
    """Attention of each token to those before it in its document: ``[B, heads, T, head_dim]``.

    Args:
        query: ``[B, heads, T, head_dim]``.
        key: ``[B, kv_heads, T, head_dim]``; ``kv_heads`` divides ``heads``.
        value: as ``key``.
        starts: of `document_starts`, ``[B, T]``; longer than the rest where that is of slices (`own_slices`).
        dropout: rate at which weights of the attention are dropped.
        scale: of the products of queries and keys; None is ``1 / sqrt(head_dim)``.
    """
    kind, length, places = kind_of(query.device), starts.shape[1], None
    how: dict[str, Any] = {"scale": scale, "dropout_p": dropout}
    compiling = torch.compiler.is_compiling()
    if query.shape[2] != length:
        if kind == "cpu" and not dropout and not compiling:
            return attend_slices(query, key, value, starts, scale)
        places = own_places(length, starts.device)
        key, value = of_whole_rows(key, value)
    if kind == "cpu" and places is None and type(starts) is Tensor and not compiling:
        return _one_by_one(query, key, value, starts, **how)
    takes = kind == "cuda" and length > _BLOCK and not dropout and query.dtype == key.dtype == value.dtype
    if takes and kind != query.device.type and places is None:  # a plan's tensors: this keeps what FlexAttention keeps
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped, **how)
    if takes and (compiling or _flex_works(query.dtype, query.shape[-1])):
        return _in_blocks(query, key, value, starts, flex_attention if compiling else _flex(), scale, places)
    index = torch.arange(length, device=starts.device)
    mask = (index >= starts[:, :, None]).tril()[:, None]
    mask = mask if places is None else mask[:, :, places]
    # CUDA's kernel for masks wants a key head for each query head; torch would else form all scores in memory.
    groups = query.shape[1] // key.shape[1]
    key, value = (heads.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for heads in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **how)


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, **how: Any) -> Tensor:
    begins = starts == torch.arange(starts.shape[1])
    sizes = [row.nonzero()[:, 0].diff(append=torch.tensor([len(row)])).tolist() for row in begins]
    # By split and cat, each of which is the other's gradient: that of a slice is as large as the whole.
    parts = [
        [part for row, own in zip(heads.unbind(), sizes, strict=True) for part in row[None].split(own, 2)]
        for heads in (query, key, value)
    ]
    grouped = query.shape[1] != key.shape[1]
    mixed = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, **how).transpose(1, 2)
        for q, k, v in zip(*parts, strict=True)
    ]
    return torch.cat(mixed, 1).view(*starts.shape, query.shape[1], -1).transpose(1, 2)


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, flex: Any, scale: Any = None, places: Any = None
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    out: Tensor = flex(query, key, value, block_mask=visible_blocks(starts, places), enable_gqa=grouped, scale=scale)
    return out


def visible_blocks(starts: Tensor, places: Tensor | None = None) -> BlockMask:
    """FlexAttention's table of the blocks of keys that a block of queries meets: those from its first start.

    Args:
        starts: of `document_starts`, ``[B, T]``.
        places: which tokens of the rows the queries are, ascending; None: all.
    """
    own = starts if places is None else starts[:, places]
    length, whole = own.shape[1], starts.shape[1]
    blocks = torch.arange(-(-whole // _BLOCK), dtype=torch.int32, device=starts.device)
    first = (own[:, ::_BLOCK] // _BLOCK).int()[:, None]  # starts never fall within a row
    last = blocks
    if places is not None:  # where each block of queries ends
        last = (torch.cat((places[_BLOCK - 1 :: _BLOCK], places[-1:]))[: first.shape[-1]] // _BLOCK).int()
    indices = torch.minimum(first[..., None] + blocks, last[:, None])

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query if places is None else places[query]
        return (key <= place) & (key >= own[batch, query])

    return BlockMask.from_kv_blocks(
        last + 1 - first, indices, BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(length, whole)
    )


@functools.cache
def _flex() -> Callable[..., Any]:
    """Compiled, as it would else form all scores in memory."""
    return torch.compile(flex_attention)


def _flex_works(dtype: torch.dtype, head_dim: int) -> bool:
    return not runs_eagerly() and _flex_tried(dtype, head_dim)


@functools.cache
def _flex_tried(dtype: torch.dtype, head_dim: int) -> bool:
    """Tried once, forward and backward: without Triton or a compiler, and for some sizes, it fails."""
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
        reason = "" if close else "it gives other numbers than torch's attention"
    except Exception as error:  # each part of the compiler fails in its own way
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    if reason:
        warnings.warn(f"packed rows take a mask of T x T: FlexAttention does not run here ({reason})", stacklevel=2)
    return not reason


_UNKNOWN = ("sliding_window", "softcap", "s_aux", "position_bias", "cache", "head_mask")


@functools.cache
def read_starts() -> None:
    """Have transformers' attention by torch take `document_starts` ``[B, 1, 1, T]`` int64 where it takes a mask.

    For any other mask it is what it was. It raises where the layer wants more than attention within documents.
    """
    from transformers import AttentionInterface

    plain: Any = AttentionInterface()["sdpa"]

    def sdpa(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is None or attention_mask.dtype != torch.int64:
            how = {**kwargs, "dropout": dropout, "scaling": scaling, "is_causal": is_causal}
            out: tuple[Tensor, None] = plain(module, query, key, value, attention_mask, **how)
            return out
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        further = [name for name in _UNKNOWN if kwargs.get(name) is not None]
        if further or not causal or query.shape[2] != key.shape[2] or attention_mask.shape[1:3] != (1, 1):
            raise ValueError(f"starts of documents stand for no mask here: {further or 'not plainly causal'}")
        mixed = attend_documents(query, key, value, attention_mask[:, 0, 0], dropout, scaling)
        return mixed.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sdpa", sdpa)


def causal_throughout(network: Any, length: int) -> bool:
    """Whether the masks of a model of transformers let the last of ``length`` tokens see all, in each kind of layer."""
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
    except TypeError:  # up to 5.19 it makes none for layers that see chunks
        return False
    masks = list(found.values()) if isinstance(found, dict) else [found]
    return all(isinstance(mask, Tensor) and bool(mask.all()) for mask in masks)
