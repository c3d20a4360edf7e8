"""Packed rows without a T x T mask: the numbers and gradients of the masked ones, and no tensor of T x T anywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from lit_efficient.callbacks.attention_backend import switch_kernels
from lit_efficient.internals.torch_dispatch import TorchDispatchMode
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from lit_efficient.models.networks import document_attention
from lit_efficient.models.networks.document_attention import (
    attend_documents,
    document_starts,
    visible_blocks,
)
from lit_efficient.models.networks.gpt import GPT, GPTConfig

LENGTHS = ((150, 1, 89, 60), (300,), (1, 1, 298), (127, 1, 128, 44))
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
STARTS = document_starts(POSITIONS)


class Squares(TorchDispatchMode):
    """Notes what an operator returns that has an entry for each pair of a row's tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.found = length, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, Tensor) and item.shape[-2:] == (self.length, self.length):
                self.found.append(str(func))
        return result


def masked(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
    """The oracle: torch's attention under the whole mask, each key head written out for its queries."""
    index = torch.arange(starts.shape[1])
    mask = (index[None, :, None] >= index) & (starts[:, :, None] <= index)
    key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], 1) for heads in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])


def heads(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(4, count, 300, 8, dtype=dtype, generator=generator).requires_grad_()


INDEX = torch.arange(300)
WINDOWED = torch.maximum(STARTS, INDEX - 32)
# Windows of 33 tokens, chunks of 50 tokens, and windows of two lengths in one row.
SEEN = {
    "documents": STARTS,
    "windows": WINDOWED,
    "chunks": torch.maximum(STARTS, INDEX - INDEX % 50),
    "two windows": torch.maximum(STARTS, torch.where(INDEX < 150, INDEX - 20, INDEX - 60).cummax(0).values),
}


def agree(attend: Callable[..., Tensor], starts: Tensor, kv_heads: int) -> None:
    """Numbers and gradients are those of the mask."""
    inputs = heads(4), heads(kv_heads), heads(kv_heads)
    weigh = torch.linspace(-1, 1, 300 * 8, dtype=torch.float64).view(300, 8)
    both = [attend(*inputs, starts), masked(*inputs, starts.flatten(1))]
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((out * weigh).sum(), inputs) for out in both]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seen", SEEN)
def test_numbers_and_gradients_are_those_of_the_mask(seen: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_attention, "_ROWS", 64)  # several pieces of the longest document
    agree(attend_documents, SEEN[seen], kv_heads)
    agree(attend_documents, SEEN[seen][:, None, None], kv_heads)


def by_documentation(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, same: Tensor, longest: int, also: int, **options: Any
) -> Tensor:
    """What torch's documentation says of `varlen_attn`, whose kernels need a GPU: ``[tokens, heads, head_dim]``."""
    left, right = options.pop("window_size")
    assert right == 0
    assert torch.equal(bounds, same)
    assert bounds.dtype == torch.int32
    assert longest == also == int(bounds.diff().max())
    parts = []
    for begin, end in itertools.pairwise(bounds.tolist()):
        q, k, v = (part[begin:end].transpose(0, 1)[None] for part in (query, key, value))
        index = torch.arange(end - begin)
        starts = torch.zeros_like(index) if left < 0 else (index - left).clamp(min=0)
        parts.append(masked(q, k, v, starts[None])[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seen", SEEN)
def test_a_gpu_without_flex_attention_takes_the_lengths_of_documents(
    seen: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mask either: torch's kernel for lengths, or a call for each document where it takes no such windows."""
    calls: list[int] = []
    monkeypatch.setattr(document_attention, "kind_of", lambda device: "cuda")
    monkeypatch.setattr(document_attention, "_flex_works", lambda *given: False)
    monkeypatch.setattr(document_attention, "_varlen_tried", lambda *given: True)

    def counted(*given: Any, **options: Any) -> Tensor:
        calls.append(1)
        return by_documentation(*given, **options)

    monkeypatch.setattr(document_attention, "varlen_attn", counted)
    agree(attend_documents, SEEN[seen], kv_heads)
    assert bool(calls) == (seen != "two windows")
    with Squares(300) as squares:  # with dropout no kernel for lengths
        query, key, value = (heads(4)[[0, 3]] for _ in range(3))  # without the document that fills its row
        attend_documents(query, key, value, STARTS[[0, 3]], dropout=0.5)
    assert squares.found == []


def test_flash_alone_takes_the_lengths_in_the_place_of_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As AttentionBackend(backend="flash") asks for; FlexAttention is not called."""
    monkeypatch.setattr(document_attention, "kind_of", lambda device: "cuda")
    monkeypatch.setattr(document_attention, "_flex_works", lambda *given: pytest.fail("flex"))
    monkeypatch.setattr(document_attention, "_varlen_tried", lambda *given: True)
    monkeypatch.setattr(document_attention, "varlen_attn", by_documentation)
    inputs = heads(4), heads(2), heads(2)
    before = switch_kernels({"flash": True, "efficient": False, "cudnn": False, "math": False})
    try:
        with torch.no_grad():
            monkeypatch.setattr(F, "scaled_dot_product_attention", _by_hand)
            found = attend_documents(*inputs, STARTS)
    finally:
        switch_kernels(before)
    torch.testing.assert_close(found, masked(*inputs, STARTS))


def _by_hand(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Tensor:
    """Torch's attention, whose kernels the test switches off."""
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1) @ value


def test_lengths_are_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    starts = STARTS.clone()
    cpu = Tensor.cpu

    def counted(self: Tensor) -> Tensor:
        found.append(1)
        return cpu(self)

    monkeypatch.setattr(Tensor, "cpu", counted)
    for _ in range(3):
        attend_documents(heads(4), heads(4), heads(4), starts)
    assert found == [1]


def test_the_blocks_for_a_gpu_are_those_that_flex_attention_finds_itself() -> None:
    """Its own way goes over T x T entries; 300 tokens are two blocks of 128 and a part of one."""
    for starts in (WINDOWED, STARTS):
        blocks = visible_blocks(starts)
        found = create_block_mask(blocks.mask_mod, 4, None, 300, 300, device="cpu")
        assert torch.equal(blocks.to_dense(), found.to_dense())
    index = torch.arange(300)
    seen = blocks.mask_mod(torch.tensor(3), torch.tensor(0), index[:, None], index[None])
    assert torch.equal(seen, (STARTS[3][:, None] <= index) & (index <= index[:, None]))


def test_compiled_blocks_run_without_a_break() -> None:
    inputs = heads(4, torch.float32), heads(2, torch.float32), heads(2, torch.float32)
    compiled = torch.compile(attend_documents, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs, STARTS), masked(*inputs, STARTS), rtol=1e-5, atol=1e-5)


def test_a_packed_step_holds_no_square_and_less_than_with_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of the GPT; the same under the mask does hold some, which the count must see."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, dim=32, depth=2, num_heads=4, num_kv_heads=2, max_length=300))
    ids = torch.arange(300).remainder(32).repeat(4, 1)

    def step(network: GPT) -> tuple[int, list[str]]:
        with AllocationMeter(network.parameters()) as meter, Squares(300) as squares:
            network(ids, position_ids=POSITIONS).square().mean().backward()
        return meter.peak, squares.found

    other = deepcopy(model)
    peak, squares = step(model)
    monkeypatch.setattr(document_attention, "_one_by_one", lambda *given, **_: masked(*given))
    most, found = step(other)
    assert not squares
    assert found
    assert most - peak > 300 * 300 * 4 * 5  # the boolean mask, and what a kernel makes of it in float32
    for one, also in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, also.grad, rtol=1e-3, atol=1e-7)
