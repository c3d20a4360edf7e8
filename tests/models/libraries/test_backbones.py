"""Each network called by us equals the same network called by hand with the arguments of its own pipeline."""

from dataclasses import replace

import pytest
import torch

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.models.libraries.backbones import as_spec, build_backbone, call_backbone, self_contained, shape_of
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.networks.dit import DiTConfig

UNET = {
    "_class_name": "UNet2DModel",
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "num_class_embeds": 11,
}
CONDITIONED = {
    **{key: value for key, value in UNET.items() if key != "num_class_embeds"},
    "_class_name": "UNet2DConditionModel",
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
SDXL = {
    **CONDITIONED,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 6 * 4 + 12,
}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4}
DIT = {"_class_name": "DiTTransformer2DModel", **HEADS, "sample_size": 8, "out_channels": 8} | {
    "num_embeds_ada_norm": 10,
    "norm_num_groups": 4,
}
PIXART = {"_class_name": "PixArtTransformer2DModel", **HEADS, "sample_size": 8, "cross_attention_dim": 16} | {
    "caption_channels": 16,
    "norm_num_groups": 4,
}
SANA = {
    "_class_name": "SanaTransformer2DModel",
    **HEADS,
    "out_channels": 4,
    "sample_size": 8,
    "caption_channels": 16,
} | {
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
}
SD3 = {"_class_name": "SD3Transformer2DModel", **HEADS, "out_channels": 4, "sample_size": 8} | {
    "joint_attention_dim": 16,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 12,
    "pos_embed_max_size": 8,
}
FLUX = {
    "_class_name": "FluxTransformer2DModel",
    **HEADS,
    "num_layers": 1,
    "num_single_layers": 1,
    "in_channels": 16,
} | {
    "joint_attention_dim": 16,
    "pooled_projection_dim": 12,
    "axes_dims_rope": [2, 2, 4],
}
MASK = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
SIZES = torch.tensor([[64.0, 32.0, 0.0, 0.0, 64.0, 32.0]]).expand(2, 6)


def spec(fields, **changed):
    return DiffusersModelConfig(config_fields={**fields, **changed})


def built(fields, **changed):
    torch.manual_seed(0)
    network = build_backbone(spec(fields, **changed))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)  # what starts at zero would hide everything
    return network


def inputs(**kept):
    draws = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draws)  # noqa: E731
    parts = {"labels": torch.tensor([3, 10]), "text": normal(2, 5, 16), "mask": MASK, "pooled": normal(2, 12)}
    size = kept.pop("size", (8, 4))
    condition = Condition(**{name: parts[name] for name in parts if kept.get(name)})
    return normal(2, 4, *size), torch.tensor([0.25, 0.5]), condition


def by_hand(network, **arguments):
    return network(**arguments, return_dict=False)[0]


def test_unet_with_and_without_labels():
    network = built(UNET)
    x, t, condition = inputs(labels=True)
    ours = call_backbone(network, x, t, condition)
    assert torch.equal(
        ours, by_hand(network, sample=x, timestep=torch.tensor([250.0, 500.0]), class_labels=condition.labels)
    )
    other = call_backbone(network, x, t, Condition(labels=torch.tensor([4, 10])))
    assert not torch.equal(ours[0], other[0])
    assert torch.equal(ours[1], other[1])
    network = built(UNET, num_class_embeds=None)
    assert torch.equal(
        call_backbone(network, x, t, Condition()), by_hand(network, sample=x, timestep=torch.tensor([250.0, 500.0]))
    )
    assert shape_of(spec(UNET)).num_classes == 10
    assert shape_of(spec(UNET, num_class_embeds=None)).conditions == set()


def test_conditional_unet_with_text_and_its_mask():
    network = built(CONDITIONED, num_class_embeds=11)
    x, t, condition = inputs(labels=True, text=True, mask=True)
    ours = call_backbone(network, x, t, condition)
    wanted = by_hand(
        network,
        sample=x,
        timestep=1000 * t,
        encoder_hidden_states=condition.text,
        encoder_attention_mask=MASK,
        class_labels=condition.labels,
    )
    assert torch.equal(ours, wanted)
    changed = condition.text.masked_fill(~MASK[..., None], 9.0)
    masked = call_backbone(network, x, t, Condition(condition.labels, changed, MASK))
    torch.testing.assert_close(masked, ours)


def test_sdxls_unet_with_pooled_text_and_sizes():
    network = built(SDXL)
    x, t, condition = inputs(text=True, pooled=True)
    added = {"text_embeds": condition.pooled, "time_ids": SIZES}
    wanted = by_hand(
        network, sample=x, timestep=1000 * t, encoder_hidden_states=condition.text, added_cond_kwargs=added
    )
    assert torch.equal(call_backbone(network, x, t, condition), wanted)
    told = replace(
        condition, sizes=torch.tensor([[100.0, 90.0, 4.0, 0.0, 64.0, 32.0], [64.0, 32.0, 0.0, 0.0, 64.0, 32.0]])
    )
    ours = call_backbone(network, x, t, told)
    added["time_ids"] = told.sizes
    assert torch.equal(
        ours, by_hand(network, sample=x, timestep=1000 * t, encoder_hidden_states=told.text, added_cond_kwargs=added)
    )
    assert not torch.allclose(ours[0], wanted[0])
    torch.testing.assert_close(ours[1], wanted[1])
    assert shape_of(spec(SDXL)).pooled_width == 12


def test_dit_without_the_draws_of_its_blocks():
    network = built(DIT).train()
    x, t, condition = inputs(labels=True, size=(8, 8))
    first = call_backbone(network, x, t, condition)
    assert torch.equal(first, call_backbone(network, x, t, condition))
    wanted = by_hand(network.eval(), hidden_states=x, timestep=1000 * t, class_labels=condition.labels)
    assert torch.equal(first, wanted[:, :4])
    assert wanted.shape[1] == 8
    assert shape_of(spec(DIT)).learned_variance


@pytest.mark.parametrize("sizes", [False, True])
def test_pixart(sizes):
    wide = {"attention_head_dim": 12, "cross_attention_dim": 24} if sizes else {}  # thirds of it are for the sizes
    network = built(PIXART, use_additional_conditions=sizes, **wide)
    x, t, condition = inputs(text=True, mask=True)
    added = {"resolution": None, "aspect_ratio": None}
    if sizes:
        added = {"resolution": SIZES[:, :2], "aspect_ratio": torch.full((2, 1), 2.0)}
    wanted = by_hand(
        network,
        hidden_states=x,
        timestep=1000 * t,
        encoder_hidden_states=condition.text,
        encoder_attention_mask=MASK,
        added_cond_kwargs=added,
    )
    assert torch.equal(call_backbone(network, x, t, condition), wanted[:, :4])


@pytest.mark.parametrize("distilled", [False, True])
def test_sana(distilled):
    network = built(SANA, timestep_scale=0.5, guidance_embeds=distilled)
    x, t, condition = inputs(text=True, mask=True)
    wanted = by_hand(
        network,
        hidden_states=x,
        timestep=500 * t,
        encoder_hidden_states=condition.text,
        encoder_attention_mask=MASK,
        **({"guidance": torch.full((2,), 3.5 * network.config.guidance_embeds_scale)} if distilled else {}),
    )
    assert torch.equal(call_backbone(network, x, t, condition), wanted)


def test_sd3():
    network = built(SD3)
    x, t, condition = inputs(text=True, pooled=True)
    wanted = by_hand(
        network,
        hidden_states=x,
        timestep=1000 * t,
        encoder_hidden_states=condition.text,
        pooled_projections=condition.pooled,
    )
    assert torch.equal(call_backbone(network, x, t, condition), wanted)
    assert not shape_of(spec(SD3)).masks_text


@pytest.mark.parametrize("told", [None, 3.5, 1.0])
def test_flux_with_its_pipelines_packing_and_the_guidance_that_a_distilled_one_is_told(told):
    from diffusers import FluxPipeline

    fields = {**FLUX, "guidance_embeds": told is not None}
    described = DiffusersModelConfig(config_fields=fields, **({"guidance": 1.0} if told == 1.0 else {}))
    torch.manual_seed(0)
    network = build_backbone(as_spec(self_contained(described)))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x, t, condition = inputs(text=True, pooled=True)
    arguments = {
        "hidden_states": FluxPipeline._pack_latents(x, 2, 4, 8, 4),
        "timestep": t,
        "encoder_hidden_states": condition.text,
        "pooled_projections": condition.pooled,
        "img_ids": FluxPipeline._prepare_latent_image_ids(2, 4, 2, "cpu", torch.float32),
        "txt_ids": torch.zeros(5, 3),
    }
    guidance = None if told is None else torch.full((2,), told)
    wanted = by_hand(network, **arguments, guidance=guidance)
    ours = call_backbone(network, x, t, condition)
    assert torch.equal(ours, FluxPipeline._unpack_latents(wanted, 64, 32, 8))
    assert shape_of(described).channels == 4
    if told is not None:
        assert not torch.equal(wanted, by_hand(network, **arguments, guidance=guidance + 2))


@pytest.mark.turns(3)
@pytest.mark.parametrize("fields", [CONDITIONED, SDXL, PIXART, SANA, SD3, FLUX], ids=lambda f: f["_class_name"])
def test_gradients_reach_the_conditions_and_every_trained_output(fields):
    network = built(fields)
    needs = shape_of(spec(fields))
    x, t, condition = inputs(**dict.fromkeys(needs.conditions, True))
    leaves = condition.map(lambda part: part.clone().requires_grad_())
    call_backbone(network, x, t, leaves).square().sum().backward()
    for name in needs.conditions:
        assert getattr(leaves, name).grad.flatten(1).norm(dim=1).min() > 0


def test_our_own_with_text():
    network = build_backbone(DiTConfig(channels=4, size=8, width=16, heads=2, depth=1, context_width=16))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, t, condition = inputs(labels=True, text=True, mask=True)
    wanted = network(x, t, condition.labels, context=condition.text, context_mask=MASK)
    assert torch.equal(call_backbone(network, x, t, condition), wanted)
    assert shape_of(network.config).conditions == {"labels", "text"}


def test_networks_are_told_the_timesteps_of_their_pipelines():
    seen = []
    network = built(UNET, num_class_embeds=None)
    network.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["timestep"]), with_kwargs=True)
    x, _, _ = inputs()
    t = torch.tensor([0.001, 0.7])
    for schedule in ("linear", "flow", "edm"):
        call_backbone(network, x, t, Condition(), schedule)
    sigma = DiffusionProcess("edm").alpha_sigma(t)[1]
    assert torch.equal(seen[0], torch.tensor([0.0, 699.0]))
    torch.testing.assert_close(seen[1], torch.tensor([1.0, 700.0]))
    torch.testing.assert_close(seen[2], sigma.log() / 4)


def test_a_class_that_was_mixed_in_is_still_known():
    network = built(UNET, num_class_embeds=None)
    x, t, _ = inputs()
    plain = call_backbone(network, x, t, Condition())
    network.__class__ = type("Mixed", (type(network),), {})
    assert torch.equal(call_backbone(network, x, t, Condition()), plain)


def test_what_checkpoints_keep_names_no_file(tmp_path):
    network = built(UNET)
    network.save_pretrained(tmp_path / "unet")
    named = DiffusersModelConfig(str(tmp_path), subfolder="unet", dtype="float16")
    kept = as_spec(self_contained(named))
    assert kept.name_or_path is None
    assert kept.dtype == "float16"
    assert shape_of(kept) == shape_of(named) == shape_of(spec(UNET))
    assert as_spec(self_contained(DiTConfig())) == DiTConfig()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"_class_name": "AutoencoderKL"}, "_class_name of 'Autoenc.*' must be one of UNet2DModel, .*, got 'Autoenc"),
        ({**UNET, "class_embed_type": "timestep"}, "class_embed_type of UNet2DModel must be null"),
        ({**UNET, "num_class_embeds": 1}, "num_class_embeds of UNet2DModel must be at least 2: the number of classes"),
        ({**SDXL, "addition_embed_type": "image"}, "addition_embed_type .* must be null or text_time, got 'image'"),
        ({**CONDITIONED, "encoder_hid_dim_type": "image_proj"}, "encoder_hid_dim_type .* must be null or text_proj"),
        ({**UNET, "in_channels": None}, "do not make a UNet2DModel: .*in_channels: null"),
        ({**CONDITIONED, "cross_attention_dim": None}, "UNet2DConditionModel: .*cross_attention_dim: null"),
    ],
)
def test_what_cannot_be_a_backbone_is_refused(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        build_backbone(spec(fields))


def test_latents_that_do_not_fit_are_refused():
    shape_of(spec(UNET)).check_latents(4, 8, 12, "X")
    for fields, latents, message in (
        (UNET, (2, 8, 8), r"X: the backbone is for latents \(4, 8, 8\); the data's are \(2, 8, 8\)"),
        (UNET, (4, 8, 7), "multiples of 2 for UNet2DModel"),
        (DIT, (4, 8, 4), "takes square latents only"),
        (SD3, (4, 18, 8), "at most 16 for this SD3"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            shape_of(spec(fields)).check_latents(*latents, "X")
