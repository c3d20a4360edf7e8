import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.networks.dit import DiT, DiTConfig, DiTVariant, grid_positions, sinusoids
from lit_efficient.models.networks.dit_layers import rotary_table

TINY = DiTConfig(channels=2, size=4, patch_size=2, width=16, depth=2, heads=2, num_classes=3)


def randomised(config: DiTConfig = TINY) -> DiT:
    torch.manual_seed(0)
    model = DiT(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def inputs(batch: int = 3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 2, 4, 4, generator=generator), torch.rand(batch, generator=generator), torch.arange(batch)


@pytest.mark.parametrize(
    "wrong", [{"patch_size": 3}, {"heads": 3}, {"width": 6, "heads": 2}, {"depth": 0}, {"depth": 10**15}, {"size": "8"}]
)
def test_config_names_the_argument_and_the_value(wrong):
    with pytest.raises(ConfigurationError, match=r"DiTConfig: (patch_size|width|depth|size) must .* got"):
        DiTConfig(**wrong)


def test_untrained_network_predicts_zero_and_its_blocks_are_the_identity():
    model = DiT(TINY)
    assert not model(*inputs()).any()
    tokens = torch.randn(3, 4, 16)
    assert torch.equal(model.blocks[0](tokens, torch.randn(3, 16)), tokens)


def test_every_parameter_gets_a_gradient_once_it_has_moved():
    model = randomised()
    model(*inputs()).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_time_and_class_steer_the_prediction_per_sample():
    model = randomised().eval()
    x, t, y = inputs()
    base = model(x, t, y)
    assert base.shape == x.shape
    other_time = model(x, torch.tensor([0.9, t[1], t[2]]), y)
    other_class = model(x, t, torch.tensor([model.null_class, 1, 2]))
    for changed in (other_time, other_class):
        assert not torch.allclose(changed[0], base[0], atol=1e-3)
        torch.testing.assert_close(changed[1:], base[1:])


def test_patches_go_back_to_where_they_came_from():
    """With an output layer that undoes the input layer, no blocks and no positions, the network is the identity."""
    model = DiT(DiTConfig(channels=2, size=4, patch_size=2, width=8, depth=1, heads=1, num_classes=3))
    model.positions.zero_()
    model.norm = nn.Identity()
    with torch.no_grad():
        weight = torch.linalg.qr(torch.randn(8, 8))[0]  # orthogonal: 8 = 2 channels x 2 x 2 pixels
        model.patch_in.weight.copy_(weight.view(8, 2, 2, 2))
        model.patch_in.bias.zero_()
        model.patch_out.weight.copy_(weight.T)
    x, t, y = inputs()
    torch.testing.assert_close(model(x, t, y), x)


def test_positions_are_distinct_and_separate_rows_from_columns():
    grid = grid_positions(3, 8)
    assert len(torch.unique(grid, dim=0)) == 9
    by_place = grid.view(3, 3, 8)
    assert torch.equal(by_place[1, 0, :4], by_place[1, 2, :4])  # one row shares its first half
    assert torch.equal(by_place[0, 2, 4:], by_place[2, 2, 4:])  # one column its second
    torch.testing.assert_close(sinusoids(torch.tensor([0.0]), 4), torch.tensor([[1.0, 1.0, 0.0, 0.0]]))


def test_the_state_dict_holds_parameters_only_and_a_deep_copy_is_independent():
    model = randomised()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.patch_out.weight)
    nn.init.zeros_(twin.patch_out.bias)
    assert not twin(*inputs()).any()
    assert model(*inputs()).any()


def test_it_runs_in_bfloat16():
    assert DiT(TINY).bfloat16()(*inputs()).dtype == torch.bfloat16


@pytest.mark.parametrize("positions", ["sincos", "rope"])
def test_a_time_for_each_token_modulates_that_token_alone(positions):
    """Token by token: norms, shifts, scales and gates with the condition of the token; attention sees all tokens."""
    model = randomised(replace(TINY, variant=DiTVariant(positions=positions))).eval()
    x, t, y = inputs()
    torch.testing.assert_close(model(x, t[:, None].expand(-1, 4), y), model(x, t, y))
    times = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    tokens = model.patch_in(x).flatten(2).transpose(1, 2)
    rotary = None
    if positions == "rope":
        rotary = rotary_table((2, 2), 8)
    else:
        tokens = tokens + model.positions
    c = torch.stack([model.time(model._embed_time(times[:, i])) + model.label(y) for i in range(4)], 1)

    def each(norm, tokens, parts):
        shift, scale = parts
        return torch.stack([norm(tokens[:, i]) * (1 + scale[i]) + shift[i] for i in range(4)], 1)

    for block in model.blocks:
        parts = [block.modulation(F.silu(c[:, i])).chunk(6, dim=-1) for i in range(4)]
        shift1, scale1, gate1, shift2, scale2, gate2 = zip(*parts)
        mixed = block.attention(each(block.norm1, tokens, (shift1, scale1)), rotary)
        tokens = tokens + torch.stack([gate1[i] * mixed[:, i] for i in range(4)], 1)
        mapped = block.mlp(each(block.norm2, tokens, (shift2, scale2)))
        tokens = tokens + torch.stack([gate2[i] * mapped[:, i] for i in range(4)], 1)
    last = zip(*(model.modulation(F.silu(c[:, i])).chunk(2, dim=-1) for i in range(4)))
    expected = model.patch_out(each(model.norm, tokens, tuple(last)))
    expected = F.fold(expected.transpose(1, 2), (4, 4), 2, stride=2)
    torch.testing.assert_close(model(x, times, y), expected)
