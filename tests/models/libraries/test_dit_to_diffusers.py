from dataclasses import replace

import pytest
import torch
from torch import nn

from lit_efficient import LoRA, merge_adapters
from lit_efficient.application import apply
from lit_efficient.errors import ConfigurationError
from lit_efficient.models.libraries.dit_to_diffusers import NULL_CLASS, to_diffusers
from lit_efficient.models.networks.dit import DiT, DiTConfig, DiTVariant

CONFIG = DiTConfig(
    channels=3,
    size=6,
    patch_size=2,
    width=24,
    depth=2,
    heads=3,
    num_classes=5,
    variant=DiTVariant(time_embedding="diffusers"),
)


def randomised(config: DiTConfig) -> DiT:
    torch.manual_seed(0)
    model = DiT(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@torch.no_grad()
def check(ours: DiT, labels: list[int], times: list[float]) -> None:
    theirs = to_diffusers(ours)
    for time in times:
        x = torch.randn(len(labels), ours.config.channels, ours.config.size, ours.config.size)
        t = torch.full((len(labels),), time)
        y = torch.tensor(labels)
        expected = ours(x, t, y if ours.config.num_classes else None)
        y = torch.where(y == ours.null_class, NULL_CLASS, y)
        found = theirs(x, timestep=t * 1000, class_labels=y).sample
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
        assert expected.std() > 0.1  # a network of zeros would agree with anything


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(CONFIG, patch_size=1, mlp_ratio=2, size=4),
        replace(CONFIG, patch_size=3, mlp_ratio=1, channels=1, heads=6, depth=1),
        replace(CONFIG, num_classes=0),
    ],
)
def test_the_same_predictions_at_whole_and_fractional_timesteps_for_every_label(config):
    labels = list(range(config.num_classes + 1))  # the last one is "no label"
    check(randomised(config), labels, [0.0, 0.001, 0.25, 0.3331, 0.51237, 0.999, 1.0])


def test_thousand_classes_leave_their_table_as_it_is():
    ours = randomised(replace(CONFIG, num_classes=1000, depth=1))
    table = to_diffusers(ours).transformer_blocks[0].norm1.emb.class_embedder.embedding_table
    assert torch.equal(table.weight, ours.label.weight)


def test_merged_adapters_are_converted_and_others_refused():
    ours = randomised(CONFIG)
    before = to_diffusers(ours).state_dict()
    apply(ours, [LoRA(rank=2)])
    for name, parameter in ours.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    with pytest.raises(ConfigurationError, match=r"'blocks.0.attention.out.lora_A' is missing or unexpected. Merge"):
        to_diffusers(ours)
    merge_adapters(ours)
    check(ours, [0, 3, 5], [0.2, 0.7])
    assert not torch.equal(to_diffusers(ours).state_dict()["proj_out_2.weight"], before["proj_out_2.weight"])


def test_the_same_gradients():
    """The function is the same beyond the points that were looked at: its derivative by the input agrees."""
    ours = randomised(CONFIG)
    x, t, y = torch.randn(2, 3, 6, 6, requires_grad=True), torch.tensor([0.2, 0.8]), torch.tensor([1, 2])
    expected = torch.autograd.grad(ours(x, t, y).square().sum(), x)[0]
    found = torch.autograd.grad(to_diffusers(ours)(x, timestep=t * 1000, class_labels=y).sample.square().sum(), x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_it_is_saved_and_loaded_again(tmp_path):
    from diffusers import DiTTransformer2DModel

    theirs = to_diffusers(randomised(CONFIG))
    theirs.save_pretrained(tmp_path)
    x, t, y = torch.randn(1, 3, 6, 6), torch.tensor([500]), torch.tensor([1])
    loaded = DiTTransformer2DModel.from_pretrained(tmp_path)
    assert torch.equal(loaded(x, timestep=t, class_labels=y).sample, theirs(x, timestep=t, class_labels=y).sample)


def test_precision_and_random_numbers_are_left_alone():
    ours = randomised(CONFIG).to(torch.bfloat16)
    state = torch.get_rng_state()
    theirs = to_diffusers(ours)
    assert torch.equal(torch.get_rng_state(), state)
    assert {p.dtype for p in theirs.parameters()} == {torch.bfloat16}
    assert not theirs.training


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"variant": DiTVariant("rope"), "heads": 2}, "variant.positions='rope': .*no rotary positions"),
        ({"variant": DiTVariant(qk_norm=True)}, "variant.qk_norm=True: .*normalises neither"),
        ({"context_width": 8}, "context_width=8: .*PixArtTransformer2DModel has, but shares one modulation"),
        (
            {"variant": DiTVariant()},
            "variant.time_embedding='compact': .*train with variant.time_embedding='diffusers'",
        ),
        ({"mlp_ratio": 5}, "mlp_ratio=5: .*4 times the width"),
        ({"num_classes": 1001}, "num_classes=1001: .*class 1000 for no label"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused_by_name(changed, reason):
    with pytest.raises(ConfigurationError, match=f"cannot hold {reason}"):
        to_diffusers(DiT(replace(CONFIG, **changed)))
