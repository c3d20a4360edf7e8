"""Positions by rotation, norm of queries and keys, attention to text, other sizes than the trained one."""

import hashlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_efficient.callbacks.stochastic_depth import drop_rows
from lit_efficient.errors import ConfigurationError
from lit_efficient.models.networks.dit import DiT, DiTConfig, DiTVariant
from lit_efficient.models.networks.dit_layers import Attention, CrossAttention, grid_positions, rotary_table, rotate

SHAPE = {"channels": 2, "size": 4, "patch_size": 2, "width": 16, "depth": 2, "heads": 2, "num_classes": 3}
TEXT = DiTConfig(**SHAPE, context_width=6)
EVERYTHING = DiTConfig(**SHAPE, context_width=6, variant=DiTVariant("rope", qk_norm=True, time_embedding="diffusers"))


def randomised(config: DiTConfig) -> DiT:
    torch.manual_seed(0)
    model = DiT(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def inputs(batch: int = 3, height: int = 4, width: int = 4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 2, height, width, generator=generator)
    return x, torch.rand(batch, generator=generator), torch.arange(batch) % 3


def text(batch: int = 3, length: int = 5):
    return torch.randn(batch, length, 6, generator=torch.Generator().manual_seed(1))


def test_an_old_config_builds_the_very_network_it_built_before():
    """Names, weights and the random numbers drawn, from the version before there was anything to choose."""
    torch.manual_seed(3)
    old = {"channels": 4, "size": 8, "patch_size": 2, "width": 64, "depth": 3, "heads": 4, "mlp_ratio": 4}
    old |= {"num_classes": 10}
    state = DiT(DiTConfig(**old)).state_dict()
    digest = hashlib.sha256(repr(list(state)).encode())
    for tensor in state.values():
        digest.update(tensor.numpy().tobytes())
    assert digest.hexdigest()[:16] == "7e7dec462db99a92"


@pytest.mark.parametrize(
    "wrong",
    [
        {"context_width": -1}, {"num_classes": -1}, {"width": 12, "heads": 2, "variant": DiTVariant("rope")},
    ],
)  # fmt: skip
def test_config_names_the_argument_and_the_value(wrong):
    with pytest.raises(ConfigurationError, match=rf"DiTConfig: {next(iter(wrong))} must be .*, got "):
        DiTConfig(**wrong)


@pytest.mark.parametrize("wrong", [{"positions": "learned"}, {"qk_norm": 1}, {"time_embedding": "long"}])
def test_a_variant_names_the_argument_and_the_value(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigurationError, match=rf"DiTConfig: variant.{name} must be .*, got {value!r}"):
        DiTVariant(**wrong)


def test_turns_are_those_of_diffusers():
    from diffusers.models.embeddings import apply_rotary_emb, get_2d_rotary_pos_embed

    cos, sin = get_2d_rotary_pos_embed(8, ((0, 0), (2, 3)), (2, 3), output_type="pt")  # its first half is for columns
    swapped = [torch.cat(half.chunk(2, dim=1)[::-1], dim=1) for half in (cos, sin)]
    x = torch.randn(2, 2, 6, 8)
    torch.testing.assert_close(rotate(x, rotary_table((2, 3), 8)), apply_rotary_emb(x, tuple(swapped)))


def test_with_rope_attention_depends_on_distances_alone():
    """The logit of a query and a key is that of any other two places which lie the same way to each other."""
    q, k = torch.randn(2, 8)
    table = rotary_table((5, 6), 8)
    turned = [rotate(v.expand(1, 1, 30, 8), table)[0, 0].view(5, 6, 8) for v in (q, k)]
    logits = torch.einsum("abd,xyd->abxy", *turned)
    torch.testing.assert_close(logits[0, 1, 2, 4], logits[2, 2, 4, 5])  # two rows down, three columns on
    torch.testing.assert_close(logits[3, 4, 1, 1], logits[4, 5, 2, 2])
    assert not torch.isclose(logits[0, 0, 2, 3], logits[0, 0, 3, 2])  # rows are not columns
    torch.testing.assert_close(logits[0, 0, 0, 0], q @ k)


def test_rope_sees_a_shifted_image_as_shifted_where_nothing_crosses_the_edge():
    """Two images with the same two tokens apart from where they stand; every other token is masked out by its key."""
    attention = Attention(16, 2)
    x = torch.randn(1, 12, 16)
    near = attention(x[:, [0, 5]], rotary_table((3, 4), 8)[:, [0, 5]])
    torch.testing.assert_close(near, attention(x[:, [0, 5]], rotary_table((3, 4), 8)[:, [6, 11]]))
    assert not torch.allclose(near, attention(x[:, [0, 5]], rotary_table((3, 4), 8)[:, [0, 6]]), atol=1e-4)


def test_norm_of_queries_and_keys_against_diffusers():
    from diffusers.models.attention_processor import Attention as Reference

    ours = Attention(16, 2, qk_norm=True)
    nn.init.normal_(ours.q_norm.weight)
    nn.init.normal_(ours.k_norm.weight)
    theirs = Reference(query_dim=16, heads=2, dim_head=8, bias=True, qk_norm="rms_norm", eps=1e-6)
    for part, layer in enumerate((theirs.to_q, theirs.to_k, theirs.to_v)):
        layer.load_state_dict({name: p.chunk(3)[part] for name, p in ours.qkv.state_dict().items()})
    theirs.to_out[0].load_state_dict(ours.out.state_dict())
    theirs.norm_q.load_state_dict(ours.q_norm.state_dict())
    theirs.norm_k.load_state_dict(ours.k_norm.state_dict())
    x = torch.randn(2, 5, 16) * 3
    torch.testing.assert_close(ours(x), theirs(x))


def test_attention_to_text_against_torch():
    ours = CrossAttention(16, 2, 6)
    theirs = nn.MultiheadAttention(16, 2, kdim=6, vdim=6, batch_first=True)
    with torch.no_grad():
        theirs.q_proj_weight.copy_(ours.q.weight)
        theirs.k_proj_weight.copy_(ours.kv.weight[:16])
        theirs.v_proj_weight.copy_(ours.kv.weight[16:])
        theirs.in_proj_bias.copy_(torch.cat([ours.q.bias, ours.kv.bias]))
        theirs.out_proj.load_state_dict(ours.out.state_dict())
    x, context = torch.randn(3, 4, 16), text()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    torch.testing.assert_close(ours(x, context, mask), theirs(x, context, context, key_padding_mask=~mask)[0])
    torch.testing.assert_close(ours(x, context), theirs(x, context, context)[0])


def test_masked_tokens_do_not_matter_and_a_row_without_any_is_one_without_text():
    model = randomised(TEXT)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()
    context = text().requires_grad_()
    out = model(*inputs(), context, mask)
    out.square().sum().backward()
    assert torch.equal(context.grad.abs().sum(-1) > 0, mask)
    assert torch.isfinite(context.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    other = torch.where(mask[:, :, None], context.detach(), torch.full_like(context, 9.0))
    torch.testing.assert_close(model(*inputs(), other, mask), out)
    order = torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(model(*inputs(), context[:, order], mask[:, order]), out)  # text is a set of tokens here
    for block in model.blocks:
        nn.init.zeros_(block.cross.out.weight)
        nn.init.zeros_(block.cross.out.bias)
    without = model(*inputs(), context, mask)
    torch.testing.assert_close(without[1], out[1])
    assert not torch.allclose(without[0], out[0], atol=1e-3)


@pytest.mark.parametrize("config", [TEXT, EVERYTHING, DiTConfig(**{**SHAPE, "num_classes": 0}, context_width=6)])
def test_untrained_it_predicts_zero_and_every_parameter_gets_a_gradient_once_it_has_moved(config):
    x, t, y = inputs()
    y = y if config.num_classes else None
    assert not DiT(config)(x, t, y, text()).any()
    model = randomised(config)
    model(x, t, y, text()).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_text_steers_each_sample_by_itself():
    model = randomised(EVERYTHING)
    base = model(*inputs(), text())
    other = text()
    other[0] += 1.0
    changed = model(*inputs(), other)
    assert not torch.allclose(changed[0], base[0], atol=1e-3)
    torch.testing.assert_close(changed[1:], base[1:])


@pytest.mark.parametrize("patch_size", [1, 2, 4])
@pytest.mark.parametrize("positions", ["sincos", "rope"])
def test_other_sizes_than_the_trained_one(positions, patch_size):
    """A network built for a size and one used at it agree: weights know no size."""
    shape = {**SHAPE, "patch_size": patch_size, "variant": DiTVariant(positions)}
    used, built = (randomised(DiTConfig(**{**shape, "size": size})) for size in (4, 8))
    x, t, y = inputs(3, 8, 8)
    torch.testing.assert_close(used(x, t, y), built(x, t, y))
    wide = inputs(3, 4, 12)[0]
    out = used(wide, t, y)
    assert out.shape == wide.shape
    assert not torch.allclose(out, used(wide.transpose(2, 3), t, y).transpose(2, 3), atol=1e-3)


def test_positions_of_a_wide_grid_are_the_corner_of_a_square_one():
    wide = grid_positions((2, 5), 8).view(2, 5, 8)
    assert torch.equal(wide, grid_positions(5, 8).view(5, 5, 8)[:2])


def test_conditions_that_are_missing_or_of_no_use_are_errors():
    x, t, y = inputs()
    plain, free = DiT(DiTConfig(**SHAPE)), DiT(DiTConfig(**{**SHAPE, "num_classes": 0}))
    for call, message in (
        (lambda: plain(x, t), r"num_classes=3 needs y"),
        (lambda: plain(x, t, y, text()), r"context_width=0 has no use for context"),
        (lambda: free(x, t, y), r"num_classes=0 has no use for y"),
        (lambda: DiT(TEXT)(x, t, y), r"context_width=6 needs context"),
        (lambda: DiT(TEXT)(x, t, y, text()[..., :4]), r"context must be \[B, L, 6\], got \[3, 5, 4\]"),
        (
            lambda: DiT(TEXT)(x, t, y, text(), torch.ones(3, 5)),
            r"context_mask must be bool \[3, 5\], got \(torch.float32",
        ),
        (lambda: plain(x, t, y, None, torch.ones(3, 5).bool()), r"context_mask must be None without context"),
        (lambda: plain(x[..., :3], t, y), r"multiples of patch_size 2, got \[3, 2, 4, 3\]"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            call()


def test_rows_of_a_batch_can_be_run_alone_whatever_the_number_of_tokens():
    """The table of turns belongs to all rows, even where there are as many tokens as rows."""
    model = randomised(EVERYTHING).eval()
    block, c = model.blocks[0], torch.randn(4, 16)
    tokens, context, mask = torch.randn(4, 4, 16), text(4), torch.rand(4, 5) > 0.3
    table = rotary_table((2, 2), 8)
    rows = torch.tensor([2, 0])
    part = drop_rows(block, tokens, 0.5, c, rows=rows, context=context, context_mask=mask, rotary_emb=table)
    alone = block(tokens[rows], c[rows], context[rows], mask[rows], table)
    torch.testing.assert_close(part[rows], tokens[rows] + (alone - tokens[rows]) * 2)
    assert torch.equal(part[[1, 3]], tokens[[1, 3]])


def test_it_runs_in_bfloat16_and_turns_in_float32():
    model = randomised(EVERYTHING)
    exact = model(*inputs(), text())
    rough = model.bfloat16()(*inputs(), text())
    assert rough.dtype == torch.bfloat16
    assert F.cosine_similarity(rough.float().flatten(), exact.flatten(), dim=0) > 0.99
    far = rotary_table((1, 300), 8)[:, -1:]
    x = torch.randn(1, 1, 1, 8)
    torch.testing.assert_close(rotate(x.bfloat16(), far).float(), rotate(x, far), atol=0.03, rtol=0.02)
