"""Layers that mix tokens are no feed-forward layers, however small or zero the weights that mix them at first."""

import pytest
import torch
from torch import Tensor, nn

from lit_efficient.mechanisms.blocks.feed_forward import _kept_by_token, why_no_feed_forward


class Pooled(nn.Module):
    """A feed-forward layer that adds a map of the mean token."""

    def __init__(self, std: float, gate: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 1)
        nn.init.constant_(self.gate.bias, gate)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.pool = nn.Linear(8, 8)
        nn.init.normal_(self.pool.weight, std=std)
        nn.init.zeros_(self.pool.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        if x.ndim == 2:
            return y
        return y + torch.sigmoid(self.gate(x)) * self.pool(x.mean(1, keepdim=True))


@pytest.mark.parametrize(("std", "gate"), [(0.0, 0.0), (1e-9, 0.0), (1.0, 0.0), (1.0, -200.0)])
def test_a_layer_that_mixes_tokens_is_found_from_any_initial_weights(std: float, gate: float) -> None:
    torch.manual_seed(0)
    layer = Pooled(std, gate)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert why_no_feed_forward(layer) == "it mixes tokens, or changes their shape"
    assert _kept_by_token(layer) == 0
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    alone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    assert why_no_feed_forward(alone) is None
    assert _kept_by_token(alone) > 0
