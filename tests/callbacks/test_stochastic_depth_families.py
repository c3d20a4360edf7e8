"""StochasticDepth in the models of other packages: which blocks it finds, and that a dropped one passes its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import GPT, ConfigurationError, DiT, DiTConfig, DiTVariant, GPTConfig, StochasticDepth
from lit_efficient.application import apply
from tests.timm_models import import_timm

IDS = torch.arange(12).view(3, 4) % 7
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


@dataclass(frozen=True)
class Family:
    """A small model, a call of it, the blocks to be found, and which outputs of a block continue which arguments."""

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module], Any]
    blocks: list[str]
    read_elsewhere: str = "-"  # a part of a block that the model itself uses, too
    streams: tuple[str, ...] = ("",)  # names of the arguments, in the order of the output; "" is the first one


def _transformers(name: str, config: str, **arguments: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**arguments))

    return make


def _diffusers(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**arguments)

    return make


def _timm(kind: str, **arguments: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        timm = import_timm()
        if kind == "vit":
            return timm.models.vision_transformer.VisionTransformer(**arguments)
        if kind == "swin":
            return timm.models.swin_transformer.SwinTransformer(**arguments)
        if kind == "convnext":
            return timm.models.convnext.ConvNeXt(**arguments)
        return timm.models.resnet.ResNet(timm.models.resnet.BasicBlock, **arguments)

    return make


def _latents(*_: Any, **further: Any) -> dict[str, Any]:
    return {"hidden_states": torch.ones(3, 4, 8, 8), "timestep": torch.tensor([1, 2, 3]), **further}


PATCHES = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "patch_size": 4}
IMAGES = torch.linspace(-1, 1, 3 * 3 * 16 * 16).view(3, 3, 16, 16)
MIDDLE = ("resnets.0", "resnets.1", "attentions.0")  # as they are defined; in the middle of two sizes of a picture
TEXT = torch.linspace(-1, 1, 3 * 4 * 16).view(3, 4, 16)

FAMILIES: dict[str, Family] = {
    "GPT": Family(
        lambda: GPT(GPTConfig(vocab_size=8, dim=16, depth=2, num_heads=2, max_length=8)),
        lambda net: net(IDS),
        ["blocks.0", "blocks.1"],
    ),
    "DiT": Family(
        lambda: DiT(DiTConfig(size=4, width=16, depth=2, heads=2)),
        lambda net: net(torch.ones(3, 4, 4, 4), torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0, 1, 2])),
        ["blocks.0", "blocks.1"],
    ),
    "DiT with text": Family(  # its table of turns, of as many places as there are rows, belongs to every row
        lambda: DiT(
            DiTConfig(size=4, width=16, depth=2, heads=2, context_width=16, variant=DiTVariant("rope", qk_norm=True))
        ),
        lambda net: net(
            torch.ones(4, 4, 4, 4),
            torch.linspace(0.1, 0.9, 4),
            torch.arange(4),
            torch.ones(4, 3, 16),
            torch.tensor([[True, True, False]]).expand(4, -1),
        ),
        ["blocks.0", "blocks.1"],
    ),
    "Llama": Family(  # with its cache of keys and values, which is on by default
        _transformers("LlamaForCausalLM", "LlamaConfig", vocab_size=8, num_key_value_heads=2, **SMALL),
        lambda net: net(input_ids=IDS, use_cache=True).logits,
        ["model.layers.0", "model.layers.1"],
    ),
    "GPT-2": Family(
        _transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=8, n_embd=16, n_layer=2, n_head=2, n_positions=8),
        lambda net: net(input_ids=IDS, use_cache=True, attention_mask=torch.ones_like(IDS)).logits,
        ["transformer.h.0", "transformer.h.1"],
    ),
    "BERT": Family(
        _transformers("BertModel", "BertConfig", vocab_size=8, **SMALL),
        lambda net: net(input_ids=IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state,
        ["encoder.layer.0", "encoder.layer.1"],
    ),
    "ViT": Family(
        _transformers("ViTModel", "ViTConfig", image_size=16, patch_size=8, **SMALL),
        lambda net: net(pixel_values=IMAGES).last_hidden_state,
        ["layers.0", "layers.1"],
    ),
    "DiTTransformer2DModel": Family(
        _diffusers("DiTTransformer2DModel", in_channels=4, num_embeds_ada_norm=10, **PATCHES),
        lambda net: net(**_latents(class_labels=torch.tensor([1, 2, 3]))).sample,
        ["transformer_blocks.0", "transformer_blocks.1"],
        read_elsewhere="norm1.emb",
    ),
    "PixArtTransformer2DModel": Family(
        _diffusers(
            "PixArtTransformer2DModel",
            in_channels=4,
            cross_attention_dim=16,
            caption_channels=16,
            use_additional_conditions=False,
            **PATCHES,
        ),
        lambda net: (
            net(
                **_latents(encoder_hidden_states=TEXT, added_cond_kwargs={"resolution": None, "aspect_ratio": None})
            ).sample
        ),
        ["transformer_blocks.0", "transformer_blocks.1"],
    ),
    "SD3Transformer2DModel": Family(  # two streams, by keyword, returned in the other order; as many tokens in each
        _diffusers(
            "SD3Transformer2DModel",
            in_channels=4,
            out_channels=4,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pooled_projection_dim=16,
            pos_embed_max_size=8,
            **PATCHES,
        ),
        lambda net: net(**_latents(encoder_hidden_states=TEXT, pooled_projections=TEXT[:, 0])).sample,
        ["transformer_blocks.0", "transformer_blocks.1"],
        streams=("encoder_hidden_states", "hidden_states"),
    ),
    "timm ViT": Family(
        _timm("vit", img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=3),
        lambda net: net(IMAGES),
        ["blocks.0", "blocks.1"],
    ),
    "timm Swin": Family(
        _timm("swin", img_size=16, patch_size=2, window_size=2, embed_dim=8, depths=(2, 4), num_heads=(1, 2)),
        lambda net: net(IMAGES),
        [f"layers.{stage}.blocks.{i}" for stage, depth in ((0, 2), (1, 4)) for i in range(depth)],
    ),
    "timm ConvNeXt": Family(
        _timm("convnext", depths=(2, 1, 1, 2), dims=(8, 8, 16, 16), num_classes=3),
        lambda net: net(IMAGES.repeat(1, 1, 2, 2)),
        [f"stages.{stage}.blocks.{i}" for stage, depth in enumerate((2, 1, 1, 2)) for i in range(depth)],
    ),
    "Swin": Family(
        _transformers(
            "SwinModel",
            "SwinConfig",
            image_size=16,
            patch_size=2,
            window_size=2,
            embed_dim=8,
            depths=[2, 2],
            num_heads=[1, 2],
        ),
        lambda net: net(pixel_values=IMAGES).last_hidden_state,
        [f"encoder.layers.{stage}.blocks.{i}" for stage in range(2) for i in range(2)],
        streams=("", ""),  # the second one is None
    ),
    "AutoencoderKL": Family(
        _diffusers(
            "AutoencoderKL",
            block_out_channels=(8, 16),
            down_block_types=["DownEncoderBlock2D"] * 2,
            up_block_types=["UpDecoderBlock2D"] * 2,
            norm_num_groups=4,
        ),
        lambda net: net(IMAGES).sample,
        [
            "encoder.down_blocks.0.resnets.0",
            *(f"{side}.mid_block.{part}" for side in ("encoder", "decoder") for part in MIDDLE),
            *("decoder.up_blocks.0.resnets.0", "decoder.up_blocks.0.resnets.1", "decoder.up_blocks.1.resnets.1"),
        ],
    ),
    "timm ResNet": Family(
        _timm("resnet", layers=(2, 2, 2, 2), channels=(64, 16, 16, 16), num_classes=3),
        lambda net: net(IMAGES),
        ["layer1.0", "layer1.1", "layer2.1", "layer3.1", "layer4.1"],
    ),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[name].make()


def calls_of(net: nn.Module, names: list[str]) -> dict[str, tuple[tuple, dict, Any]]:
    """What each block is called with, and what it returns, from now on."""
    seen: dict[str, tuple[tuple, dict, Any]] = {}
    for name in names:
        net.get_submodule(name).register_forward_hook(
            lambda _, args, kwargs, output, name=name: seen.__setitem__(name, (args, kwargs, output)), with_kwargs=True
        )
    return seen


@pytest.mark.turns(8)
@pytest.mark.parametrize("name", FAMILIES)
def test_finds_the_blocks_and_a_dropped_one_passes_its_input(name: str) -> None:
    family, net = FAMILIES[name], built(name)
    with torch.no_grad():
        expected = family.call(net.eval())
    report = apply(net, [StochasticDepth(0.5, mode="uniform")])["StochasticDepth"]
    assert list(report.modules) == family.blocks
    with torch.no_grad():
        assert torch.equal(family.call(net), expected)  # in eval it is the identity
    for block in family.blocks:
        net.get_submodule(block)._drop_now = True
    buffers = {key: value.clone() for key, value in net.named_buffers() if key.startswith(tuple(family.blocks))}
    seen = calls_of(net, family.blocks)
    output = family.call(net.train())
    for args, kwargs, returned in seen.values():
        elements = (returned,) if isinstance(returned, torch.Tensor) else returned
        for stream, element in zip(family.streams, elements, strict=True):
            given = kwargs[stream] if stream else args[0] if args else kwargs["hidden_states"]
            assert element is None or torch.equal(element, given)
    assert seen.keys() == set(family.blocks)
    output.float().sum().backward()
    for block in family.blocks:
        parameters = net.get_submodule(block).named_parameters()
        moved = [name for name, p in parameters if p.grad is not None and p.grad.any()]
        assert not [name for name in moved if not name.startswith(family.read_elsewhere)]
    for key, value in buffers.items():
        assert torch.equal(dict(net.named_buffers())[key], value), key


@pytest.mark.turns(8)
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_skip_pass_and_the_others_are_trained(name: str) -> None:
    family, net = FAMILIES[name], built(name)
    apply(net, [StochasticDepth(0.3, mode="uniform", skip="sample")])
    last = family.blocks[-1]
    seen = calls_of(net, [last])
    output = family.call(net.train())
    args, kwargs, returned = seen[last]
    stream = family.streams[-1]
    after = returned if isinstance(returned, torch.Tensor) else [item for item in returned if item is not None][-1]
    before = kwargs[stream] if stream else args[0] if args else kwargs["hidden_states"]
    changed = sum(not torch.equal(*rows) for rows in zip(before, after))
    assert changed <= 2  # of three rows two run; a block that begins as the identity changes none
    output.float().square().sum().backward()
    assert all(p.grad is not None for p in net.get_submodule(last).parameters() if p.requires_grad)


def test_blocks_that_change_the_shape_are_left_out_with_the_reason() -> None:
    net = built("timm ResNet")
    report = apply(net, [StochasticDepth(0.5)])["StochasticDepth"]
    assert "5 of 8 blocks" in report.summary
    assert "left out: layer2.0, layer3.0, layer4.0 (it changes its input before the addition" in report.summary
    with pytest.raises(ConfigurationError, match=r"cannot be skipped: layer2\.0 \(it changes its input before"):
        apply(built("timm ResNet"), [StochasticDepth(0.5, blocks=[r"layer2\.\d"])])


def test_a_cache_that_holds_something_is_not_thrown_away() -> None:
    net = built("Llama").eval()
    with torch.no_grad():
        cache = net(input_ids=IDS, use_cache=True).past_key_values
    apply(net, [StochasticDepth(0.5, skip="sample")])
    with pytest.raises(ConfigurationError, match="has a cache of keys and values that is not empty"):
        net.train()(input_ids=IDS, past_key_values=cache)


# timm gives block k of L the rate p k / (L - 1), in EfficientNets p k / L, and ours is p (k + 1) / L. Of blocks whose
# shortcut is no identity timm drops the branch alone; such a block cannot be skipped.
DROP_PATHS = {
    "swin_tiny_patch4_window7_224": (12, 11, []),
    "convnext_atto": (12, 11, []),
    "vit_tiny_patch16_224": (12, 11, []),
    "efficientnet_b0": (16, 16, [f"blocks.{i}.0" for i in range(1, 7)]),
    "resnet18": (8, 7, ["layer2.0", "layer3.0", "layer4.0"]),
    "regnety_002": (13, 12, ["s2.b1", "s3.b1", "s4.b1"]),
}


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", DROP_PATHS)
def test_blocks_and_their_depths_are_those_of_timms_drop_path(name: str) -> None:
    blocks, span, branches = DROP_PATHS[name]
    net = import_timm().create_model(name, drop_path_rate=0.3)
    report = apply(net, [StochasticDepth(0.3)])["StochasticDepth"]
    ours = {block: round(net.get_submodule(block)._drop_rate / 0.3 * blocks) - 1 for block in report.modules}
    theirs: dict[str, int] = {}
    for part, module in net.named_modules():
        if type(module).__name__ == "DropPath" and module.drop_prob:
            block = next(b for b in (*ours, *branches) if part.startswith(f"{b}."))
            theirs[block] = round(module.drop_prob / 0.3 * span)
    first = [block for block, depth in ours.items() if depth == 0]  # timm never drops it
    assert {block: depth for block, depth in theirs.items() if block not in branches} == {
        block: depth for block, depth in ours.items() if block not in first
    }
    assert set(branches) <= set(theirs)
    assert report.details["rates"] == " ".join(f"{0.3 * (depth + 1) / blocks:.3g}" for depth in ours.values())


SHAPE = "(it changes the shape)"
LEFT_OUT = {
    "crossvit_9_240": (12, f"{', '.join(f'blocks.{i}.fusion.{j}' for i in range(3) for j in range(2))} {SHAPE}"),
    "fastvit_t8": (14, "left out: stem.0, stages.1.downsample.proj.0"),
    "dla34": (8, f"left out: level2.tree1, level3.tree1.tree1, level4.tree1.tree1, level5.tree1 {SHAPE}"),
    "efficientformerv2_s0": (14, "left out: stem.conv1, stem.conv2 (it changes its input"),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_changes_the_shape_is_seen_without_a_batch(name: str) -> None:
    count, expected = LEFT_OUT[name]
    with torch.device("meta"):  # shapes are all that counts
        net = import_timm().create_model(name).train()
    report = apply(net, [StochasticDepth(1e-9)])["StochasticDepth"]
    assert len(report.modules) == count
    assert expected in report.summary
    shapes = {}
    for block in report.modules:
        net.get_submodule(block).register_forward_hook(
            lambda part, args, y, block=block: shapes.update({block: (args[0].shape, y.shape)})
        )
    net(torch.empty(2, 3, net.default_cfg["input_size"][-1], net.default_cfg["input_size"][-1], device="meta"))
    assert shapes
    assert all(before == after for before, after in shapes.values())


def test_blocks_that_return_one_token_of_many_are_refused_at_once() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :1] + self.layer(x[:, :1])

    net = nn.Sequential(First(), First(), First()).train()
    with pytest.raises(ConfigurationError, match=r"cannot be skipped: 0, 1, 2 \(it changes the shape\)"):
        apply(net, [StochasticDepth(rate=1e-9)])
