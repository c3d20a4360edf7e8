"""Choices by place are those of scores that depend on the place alone; masked places are not chosen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lit_efficient.models.probes.choices import ChoicesByPlace, without_dropout

PLACES = torch.arange(6.0).mul(2.4).sin()


@pytest.mark.parametrize("scores", [torch.zeros(2, 6), torch.randn(2, 6, generator=torch.Generator().manual_seed(0))])
def test_scores_decide_nothing_but_masks_do(scores: torch.Tensor) -> None:
    allowed = torch.tensor([True, True, False, True, True, False])
    masked = scores.masked_fill(~allowed, float("-inf")).requires_grad_()
    expected = PLACES.masked_fill(~allowed, float("-inf"))
    with ChoicesByPlace():
        values, indices = masked.topk(2)
        order = masked.argsort(descending=True)
        best = masked.max(1)
        largest = masked.argmax(1)
        numbers = torch.tensor([3, 1, 2]).argsort()
    assert torch.equal(indices, expected.topk(2).indices.expand(2, 2))
    assert torch.equal(values, masked.gather(1, indices))
    assert torch.equal(order[:, :4], expected.argsort(descending=True)[:4].expand(2, 4))
    assert torch.equal(best.indices, indices[:, 0])
    assert torch.equal(best.values, values[:, 0])
    assert torch.equal(largest, indices[:, 0])
    assert numbers.tolist() == [1, 2, 0]  # whole numbers are no scores
    values.sum().backward()
    assert masked.grad is not None
    assert torch.equal(masked.grad, torch.zeros(2, 6).scatter(1, indices, 1.0))


def test_dropout_keeps_everything() -> None:
    x = torch.randn(1, 2, 5, 8)
    layer = torch.nn.Dropout(0.5)
    plain = F.scaled_dot_product_attention(x, x, x)
    with without_dropout():
        assert torch.equal(layer(x), x)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x, None, 0.5), plain)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), plain)


def test_dropout_keeps_everything_when_a_block_runs_again_in_the_backward_pass() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    with without_dropout():
        y = checkpoint(layer, x, use_reentrant=False)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(gradient, layer[0].weight.sum(0).expand(4, 8))
