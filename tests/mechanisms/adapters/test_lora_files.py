"""Training goes on from LoRA files of other programs, and starts with exactly their effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_efficient import ConfigurationError, LoRA
from lit_efficient.application import apply
from lit_efficient.application.ledger import ledger
from lit_efficient.models.libraries.backbones import call_backbone
from lit_efficient.models.libraries.original_names import original_layers
from lit_efficient.models.libraries.tiny_pipelines import TINY_PIPELINES
from lit_efficient.models.networks.condition import Condition
from tests import tiny_pipelines
from tests.support import QUIET

Factors = dict[str, tuple[Tensor, Tensor, float]]  # A, B and alpha of each layer, by its name in diffusers
UNETS = ("sd15", "sdxl")


class Trains(pl.LightningModule):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return sum(p.square().mean() for p in self.parameters() if p.requires_grad)  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


def pipeline_of(family: str) -> Any:
    torch.manual_seed(0)
    return TINY_PIPELINES[family]()


def denoiser(pipeline: Any) -> Any:
    return pipeline.components.get("unet") or pipeline.components.get("transformer")


@torch.no_grad()
def predicted(network: Any) -> Tensor:
    """The network's prediction for fixed inputs, called as its pipeline calls it."""
    generator = torch.Generator().manual_seed(1)
    width = network.config.get("cross_attention_dim") or network.config.joint_attention_dim
    pooled = {"UNet2DConditionModel": 6}.get(type(network).__name__) or network.config.pooled_projection_dim
    x, text, sizes = (torch.randn(shape, generator=generator) for shape in ((2, 4, 8, 8), (2, 5, width), (2, 6)))
    condition = Condition(text=text, pooled=torch.randn(2, pooled, generator=generator), sizes=sizes.abs() * 64)
    if network.config.get("addition_embed_type", "none") is None:
        condition = Condition(text=text)
    network.given_guidance = 3.5
    return call_backbone(network.eval(), x, torch.tensor([0.3, 0.8]), condition)


def drawn(network: Any, wanted: Any, alphas: tuple[float, ...] = (0.5, 1.0, 2.0), magnitudes: bool = False) -> Factors:
    """Random factors for some layers, each with its own rank and alpha."""
    generator = torch.Generator().manual_seed(2)
    found = {}
    for number, (name, part) in enumerate(network.named_modules()):
        if isinstance(part, nn.Linear | nn.Conv2d) and wanted(name):
            rank = 2 + number % 3
            kernel = part.weight.shape[2:]
            a = torch.randn((rank, *part.weight.shape[1:]), generator=generator) * 0.3
            b = torch.randn((len(part.weight), rank, *[1] * len(kernel)), generator=generator) * 0.3
            found[name] = a, b, 3 * alphas[number % len(alphas)]
    return found


@torch.no_grad()
def merged(network: Any, factors: Factors) -> Any:
    """The network with W + alpha / rank B A in each layer."""
    for name, (a, b, alpha) in factors.items():
        weight = network.get_submodule(name).weight
        weight += (alpha / len(a) * b.flatten(1) @ a.flatten(1)).view_as(weight)
    return network


def is_inner(name: str) -> bool:
    """Attention, feed-forward and convolutions: what programs usually adapt."""
    return "blocks" in name or "mid_block" in name


def as_diffusers(factors: Factors, place: str) -> dict[str, Tensor]:
    """As diffusers writes: alpha is the rank, so that the scale is in B."""
    found = {}
    for name, (a, b, alpha) in factors.items():
        found |= {f"{place}.{name}.lora_A.weight": a, f"{place}.{name}.lora_B.weight": b * alpha / len(a)}
    return found


def as_kohya(factors: Factors, names: dict[str, str], prefix: str = "lora_unet_") -> dict[str, Tensor]:
    found = {}
    for name, (a, b, alpha) in factors.items():
        key = prefix + names.get(name, name).replace(".", "_")
        found |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b, f"{key}.alpha": torch.tensor(alpha)}
    return found


def originals(network: Any) -> dict[str, str]:
    return {layer.parts[0]: layer.name for layer in original_layers(network)}


def started(network: Any, file: Path, **arguments: Any) -> tuple[Trains, LoRA]:
    module = Trains(network)
    technique = LoRA(start_from=str(file), **arguments)
    apply(module, [technique])
    return module, technique


def check_loaded(family: str, file: Path, factors: Factors, reads: bool = True) -> None:
    """Training starts from the merged network's prediction, as the pipeline's is if it can read all of the file."""
    base = predicted(denoiser(pipeline_of(family)))
    expected = predicted(merged(denoiser(pipeline_of(family)), factors))
    module, technique = started(denoiser(pipeline_of(family)), file)
    torch.testing.assert_close(predicted(module.network), expected, rtol=1e-5, atol=1e-5)
    assert (base - expected).abs().max() > 1e-2
    assert len(technique.targets) == len(factors)
    assert sum(p.requires_grad for p in module.parameters()) == 2 * len(factors)
    if reads:
        theirs = pipeline_of(family)
        theirs.load_lora_weights(file)
        assert sum(bool(getattr(part, "lora_A", None)) for part in denoiser(theirs).modules()) == len(factors)
        torch.testing.assert_close(predicted(denoiser(theirs)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", TINY_PIPELINES)
def test_a_file_of_diffusers_with_ranks_of_its_own_for_each_layer(family: str, tmp_path: Path) -> None:
    pipeline = pipeline_of(family)
    network = denoiser(pipeline)
    factors = drawn(network, is_inner)
    place = "unet" if family in UNETS else "transformer"
    save_file(as_diffusers(factors, place), tmp_path / "a.safetensors")
    check_loaded(family, tmp_path / "a.safetensors", factors)


@pytest.mark.parametrize("family", TINY_PIPELINES)
def test_a_file_with_pefts_configuration(family: str, tmp_path: Path) -> None:
    pipeline = pipeline_of(family)
    network = denoiser(pipeline)
    patterns = {"rank_pattern": {"to_q": 5}, "alpha_pattern": {"to_k": 1.5}, "use_rslora": True}
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=["to_q", "to_k", "to_out.0"], init_lora_weights=False, **patterns
    )
    network.add_adapter(config)
    expected = predicted(network)
    kind = "unet" if family in UNETS else "transformer"
    factors = peft.get_peft_model_state_dict(network)
    pipeline.save_lora_weights(
        tmp_path, **{f"{kind}_lora_layers": factors, f"{kind}_lora_adapter_metadata": config.to_dict()}
    )
    module, technique = started(denoiser(pipeline_of(family)), tmp_path)
    torch.testing.assert_close(predicted(module.network), expected, rtol=1e-5, atol=1e-5)
    assert technique.rank == 5


# diffusers forgets the alphas of a file that has several, and finds no upsampler without an attention before it.
@pytest.mark.parametrize("family", UNETS)
def test_a_file_of_kohya_by_the_names_of_diffusers(family: str, tmp_path: Path) -> None:
    network = denoiser(pipeline_of(family))
    for alphas, reads in (((0.5, 1.0, 2.0), False), ((2.0,), True)):
        factors = drawn(network, is_inner, alphas)
        save_file(as_kohya(factors, {}), tmp_path / "kohya.safetensors")
        check_loaded(family, tmp_path / "kohya.safetensors", factors, reads)


@pytest.mark.parametrize("family", UNETS)
def test_a_file_of_kohya_by_the_names_of_the_authors(family: str, tmp_path: Path) -> None:
    network = denoiser(pipeline_of(family))
    factors = drawn(network, lambda name: is_inner(name) and "upsamplers" not in name, (2.0,))
    save_file(as_kohya(factors, originals(network)), tmp_path / "kohya.safetensors")
    check_loaded(family, tmp_path / "kohya.safetensors", factors, reads=family == "sdxl")
    factors = drawn(network, lambda name: True)
    save_file(as_kohya(factors, originals(network)), tmp_path / "kohya.safetensors")
    check_loaded(family, tmp_path / "kohya.safetensors", factors, reads=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_file_of_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    factors = {
        name: (a.to(dtype), b.to(dtype), alpha) for name, (a, b, alpha) in drawn(unet(), is_inner, (2.0,)).items()
    }
    save_file(as_kohya(factors, {}), tmp_path / "kohya.safetensors")
    exact = {name: (a.float(), b.float(), alpha) for name, (a, b, alpha) in factors.items()}
    check_loaded("sdxl", tmp_path / "kohya.safetensors", exact)


def unet() -> Any:
    return denoiser(pipeline_of("sdxl"))


def stacked(network: Any, factors: Factors, joined: bool) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Factors of the authors' layers: of one A for all stacked layers, or of blocks as kohya splits q, k and v."""
    found = {}
    for layer in original_layers(network):
        parts = [factors[part] for part in layer.parts]
        if joined or len(parts) == 1:
            a, _, alpha = parts[0]
            b = torch.cat([one[1] for one in parts])
        else:
            a = torch.cat([one[0] for one in parts])
            b = torch.block_diag(*[one[1] * one[2] / len(one[0]) for one in parts])
            alpha = float(len(a))
        if layer.swapped:
            b = torch.cat(b.chunk(2)[::-1])
        found[layer.name] = a, b, alpha
    return found


@pytest.mark.parametrize("family", ["sd3", "flux"])
@pytest.mark.parametrize("layout", ["kohya", "ComfyUI", "Black Forest Labs", "blocks"])
def test_a_file_by_the_authors_names_of_a_transformer(family: str, layout: str, tmp_path: Path) -> None:
    network = denoiser(pipeline_of(family))
    factors = drawn(network, lambda name: True, (2.0,))
    joined = layout != "blocks"
    if joined:
        for layer in original_layers(network):  # one A and one rank for all layers that are stacked
            a, _, alpha = factors[layer.parts[0]]
            for part in layer.parts[1:]:
                rows = len(network.get_submodule(part).weight)
                b = torch.randn(rows, len(a), generator=torch.Generator().manual_seed(rows)) * 0.3
                factors[part] = a, b, alpha
    tensors = {}
    for name, (a, b, alpha) in stacked(network, factors, joined).items():
        if layout in ("kohya", "blocks"):
            tensors |= as_kohya({name: (a, b, alpha)}, {})
        else:
            prefix = "diffusion_model." if layout == "ComfyUI" else ""
            tensors |= {f"{prefix}{name}.lora_A.weight": a, f"{prefix}{name}.lora_B.weight": b * alpha / len(a)}
    save_file(tensors, tmp_path / "a.safetensors")
    assert len(tensors) < 3 * len(factors)
    check_loaded(family, tmp_path / "a.safetensors", factors, reads=False)


def test_a_second_run_of_one_module_goes_on(tmp_path: Path) -> None:
    factors = drawn(denoiser(pipeline_of("sd15")), is_inner, (2.0,))
    save_file(as_diffusers(factors, "unet"), tmp_path / "a.safetensors")
    module = Trains(denoiser(pipeline_of("sd15")).train())
    data = torch.utils.data.DataLoader(torch.zeros(2, 1))  # type: ignore[arg-type]
    seen = []
    for _ in range(2):
        run = pl.Trainer(callbacks=[LoRA(start_from=str(tmp_path / "a.safetensors"))], **QUIET, max_steps=2)
        run.fit(module, data)
        seen.append({name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad})
    assert seen[0].keys() == seen[1].keys()
    assert all(seen[1][name].norm() < tensor.norm() for name, tensor in seen[0].items())
    with pytest.raises(ConfigurationError, match=r"applied to this module by an earlier run with other arguments"):
        pl.Trainer(callbacks=[LoRA(rank=2)], **QUIET, max_steps=1).fit(module, data)


def test_a_file_of_xlabs(tmp_path: Path) -> None:
    flux = denoiser(pipeline_of("flux"))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    factors: Factors = {}
    for kind, numbers in (("double", len(flux.transformer_blocks)), ("single", len(flux.single_transformer_blocks))):
        for number in range(numbers):
            block = f"transformer_blocks.{number}"
            named = {
                f"{one}_lora{i}": layers for i, names in enumerate(XLABS, start=1) for one, layers in names.items()
            }
            if kind == "single":
                block = f"single_{block}"
                named = {"qkv_lora": XLABS[0]["qkv"], "proj_lora": ["proj_out"]}
            for name, layers in named.items():
                first = flux.get_submodule(f"{block}.{layers[0]}")
                a = torch.randn(3, first.in_features, generator=generator) * 0.3
                bs = [torch.randn(first.out_features, 3, generator=generator) * 0.3 for _ in layers]
                key = f"{kind}_blocks.{number}.processor.{name}"
                tensors |= {f"{key}.down.weight": a, f"{key}.up.weight": torch.cat(bs)}
                factors |= {f"{block}.{layer}": (a, b, 3.0) for layer, b in zip(layers, bs)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "xlabs.safetensors")
    check_loaded("flux", tmp_path / "xlabs.safetensors", factors)


XLABS = (
    {"qkv": ["attn.to_q", "attn.to_k", "attn.to_v"], "proj": ["attn.to_out.0"]},
    {"qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"], "proj": ["attn.to_add_out"]},
)


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", ["pixart", "sana", "qwen_image", "z_image"])
def test_a_file_of_diffusers_for_further_families(family: str, tmp_path: Path) -> None:
    """As the pipeline itself saves it, with the number of layers that it loads again."""
    torch.manual_seed(0)
    pipeline = tiny_pipelines.FAMILIES[family]()
    pipeline.save_pretrained(tmp_path / "base")

    def network() -> Any:
        return type(pipeline.transformer).from_pretrained(tmp_path / "base" / "transformer").eval()

    # The convolutions of Sana that have a group for each channel take no LoRA.
    factors = drawn(network(), lambda name: (is_inner(name) or "layers" in name) and "conv_depth" not in name)
    save_file(as_diffusers(factors, "transformer"), tmp_path / "a.safetensors")
    expected = further_prediction(merged(network(), factors))
    assert (further_prediction(network()) - expected).abs().max() > 1e-2
    module, technique = started(network(), tmp_path / "a.safetensors")
    torch.testing.assert_close(further_prediction(module.network), expected, rtol=1e-5, atol=1e-5)
    assert len(technique.targets) == len(factors)
    if hasattr(pipeline, "load_lora_weights"):  # PixArt's has none
        pipeline.load_lora_weights(tmp_path / "a.safetensors")
        loaded = [part for part in pipeline.transformer.modules() if getattr(part, "lora_A", None)]
        assert len(loaded) == len(factors)
        theirs = further_prediction(pipeline.transformer)
        torch.testing.assert_close(theirs, expected, rtol=1e-5, atol=1e-5)
    else:
        assert family == "pixart"


@torch.no_grad()
def further_prediction(network: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    config = network.config
    width = next(config[name] for name in ("caption_channels", "joint_attention_dim", "cap_feat_dim") if name in config)
    x, text = (torch.randn(shape, generator=generator) for shape in ((2, 4, 8, 8), (2, 5, width)))
    condition = Condition(text=text, mask=torch.ones(2, 5, dtype=torch.bool), sizes=torch.full((2, 6), 64.0))
    return call_backbone(network.eval(), x, torch.tensor([0.3, 0.8]), condition)


def test_the_third_factor_of_a_convolution(tmp_path: Path) -> None:
    """LyCORIS's LoCon with its Tucker decomposition."""
    generator = torch.Generator().manual_seed(0)
    weight = unet().down_blocks[0].resnets[0].conv1.weight
    down, mid, up = (
        torch.randn(shape, generator=generator)
        for shape in ((3, weight.shape[1], 1, 1), (3, 3, 3, 3), (len(weight), 3, 1, 1))
    )
    key = "lora_unet_down_blocks_0_resnets_0_conv1"
    tensors = {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up, f"{key}.lora_mid.weight": mid}
    save_file(tensors, tmp_path / "a.safetensors")
    theirs = unet()
    delta = torch.einsum("op,pqhw,qi->oihw", up.flatten(1), mid, down.flatten(1))  # lycoris.functional.rebuild_tucker
    theirs.down_blocks[0].resnets[0].conv1.weight.data += delta
    module, _ = started(unet(), tmp_path / "a.safetensors")
    torch.testing.assert_close(predicted(module.network), predicted(theirs), rtol=1e-5, atol=1e-5)


def test_dora_of_kohya(tmp_path: Path) -> None:
    network = unet()
    factors = drawn(network, is_inner)
    tensors = as_kohya(factors, originals(network))
    plain = merged(unet(), factors)
    generator = torch.Generator().manual_seed(3)
    for name in factors:
        weight = plain.get_submodule(name).weight
        magnitude = torch.rand(len(weight), generator=generator) + 0.5
        norm = weight.detach().flatten(1).norm(dim=1)
        weight.data *= (magnitude / norm).view(-1, *[1] * (weight.ndim - 1))
        key = "lora_unet_" + originals(network)[name].replace(".", "_")
        tensors[f"{key}.dora_scale"] = magnitude.view(-1, *[1] * (weight.ndim - 1))
    save_file(tensors, tmp_path / "a.safetensors")
    module, technique = started(unet(), tmp_path / "a.safetensors")
    assert technique.variant == "dora"
    torch.testing.assert_close(predicted(module.network), predicted(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["earlier diffusers", "adapter name", "attention processors"])
def test_earlier_names_of_diffusers(kind: str, tmp_path: Path) -> None:
    factors = drawn(unet(), lambda name: ".attn" in name, (2.0,))
    tensors = as_diffusers(factors, "unet")
    old, new = {
        "earlier diffusers": (("lora_A", "lora.down"), ("lora_B", "lora.up")),
        "adapter name": (("lora_A", "lora_A.default"), ("lora_B", "lora_B.default")),
        "attention processors": ((".lora_A", "_lora.down"), (".lora_B", "_lora.up")),
    }[kind]
    renamed = {}
    for name, tensor in tensors.items():
        written = name.replace(*old).replace(*new)
        if kind == "attention processors":
            written = written.replace(".to_out.0", ".to_out").replace("attn1.", "attn1.processor.")
        renamed[written] = tensor
    save_file(renamed, tmp_path / "a.safetensors")
    check_loaded("sdxl", tmp_path / "a.safetensors", factors, reads=kind != "adapter name")


def test_a_file_of_another_family_is_refused(tmp_path: Path) -> None:
    for family, other, message in (
        ("flux", "sdxl", r"does not fit UNet2DConditionModel: (\d+) of its \1 .* It looks like a LoRA of Flux"),
        ("sd3", "flux", r"does not fit FluxTransformer2DModel: .* It looks like a LoRA of SD3"),
        ("sd15", "sdxl", r"has 16 inputs and \d+ outputs there, and 48 .* such as Stable Diffusion 1.5"),
        ("sdxl", "sd3", r"It looks like a LoRA of Stable Diffusion or SDXL"),
    ):
        network = denoiser(pipeline_of(family))
        layers = {name for layer in original_layers(network) for name in layer.parts[:1]} | {""}
        factors = drawn(network, lambda name, layers=layers: name in layers and is_inner(name))
        save_file(as_kohya(factors, originals(network)), tmp_path / "a.safetensors")
        with pytest.raises(ConfigurationError, match=message):
            started(denoiser(pipeline_of(other)), tmp_path / "a.safetensors")


def test_what_a_file_has_beyond_a_lora_is_refused(tmp_path: Path) -> None:
    tensors = as_diffusers(drawn(unet(), lambda name: name.endswith("to_q")), "unet")
    name = next(iter(tensors)).removesuffix(".lora_A.weight")
    for more, message in (
        ({f"{name}.diff_b": torch.zeros(2)}, r"has 1 tensors that are unknown here: .*diff_b"),
        ({"text_encoder.layers.0.q.lora_A.weight": torch.zeros(2, 4)}, "lacks factors of text_encoder layers.0.q"),
        ({f"{name}.lora_magnitude_vector": torch.ones(8)}, r"DoRA's magnitudes in 1 of \d+ layers"),
        ({"unet.mid.lokr_w1": torch.ones(2, 2)}, "adapters of several methods"),
    ):
        save_file(tensors | more, tmp_path / "a.safetensors")
        with pytest.raises(ConfigurationError, match=message):
            LoRA(start_from=str(tmp_path / "a.safetensors"))
    save_file({}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigurationError, match=r"a.safetensors has no tensors: its training or its copy did not"):
        LoRA(start_from=str(tmp_path / "a.safetensors"))
    text = {f"lora_te1_q.lora_{one}.weight": torch.zeros(2, 2) for one in ("up", "down")}
    save_file(tensors | text, tmp_path / "a.safetensors")
    with pytest.raises(ConfigurationError, match=r"1 layers of text_encoder, which this run does not .*fuse_lora\(\)"):
        started(unet(), tmp_path / "a.safetensors")


class TrainsText(Trains):
    def __init__(self, pipeline: Any) -> None:
        super().__init__(denoiser(pipeline))
        self.text_encoder = pipeline.text_encoder
        self.text_encoder_2 = pipeline.text_encoder_2


def test_text_encoders_that_train(tmp_path: Path) -> None:
    theirs = pipeline_of("sdxl")
    inside = (theirs.unet, theirs.text_encoder, theirs.text_encoder_2)
    factors = [drawn(one, lambda name: "attn" in name or "mlp" in name, (2.0,)) for one in inside]
    tensors: dict[str, Tensor] = {}
    for number, one in enumerate(factors):
        whole = {name: f"text_model.{name.removeprefix('text_model.')}" for name in one} if number else {}
        tensors |= as_kohya(one, whole, ("lora_unet_", "lora_te1_", "lora_te2_")[number])
    save_file(tensors, tmp_path / "a.safetensors")
    module = TrainsText(pipeline_of("sdxl"))
    apply(module, [LoRA(start_from=str(tmp_path / "a.safetensors"))])
    loaded = pipeline_of("sdxl")
    loaded.load_lora_weights(tmp_path / "a.safetensors")
    ids = torch.tensor([[5, 9, 80, 1, 0, 0]])
    for ours, other, by_hand, one in zip(
        (module.text_encoder, module.text_encoder_2),
        (loaded.text_encoder, loaded.text_encoder_2),
        inside[1:],
        factors[1:],
    ):
        base = by_hand(ids).last_hidden_state
        expected = merged(by_hand, one)(ids).last_hidden_state
        torch.testing.assert_close(ours(ids).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other(ids).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(base, expected, atol=1e-3)


def test_a_checkpoint_of_it_needs_no_file(tmp_path: Path) -> None:
    factors = drawn(unet(), lambda name: name.endswith(("to_q", "conv1")), (2.0,))
    save_file(as_kohya(factors, originals(unet())), tmp_path / "a.safetensors")
    module, _ = started(unet(), tmp_path / "a.safetensors")
    again = Trains(unet())
    apply(again, [LoRA(**ledger(module)[0].record["arguments"])])
    again.load_state_dict(module.state_dict())
    assert torch.equal(predicted(again.network), predicted(module.network))
