"""LoRA starts from what peft has saved, goes on with it, and refuses what it would compute differently."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import diffusers
import lightning.pytorch as pl
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lit_efficient import ConfigurationError, LoRA
from lit_efficient.application import apply
from lit_efficient.application.ledger import ledger
from lit_efficient.errors import CheckpointError
from lit_efficient.files.sums import write_sums
from lit_efficient.mechanisms.adapters.diffusers_lora import to_kohya
from lit_efficient.mechanisms.adapters.peft_folder import placement
from lit_efficient.mechanisms.adapters.peft_format import to_peft
from tests.mechanisms.adapters.test_architectures import IDS, MODELS

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated",
    "ignore:Model has `tie_word_embeddings=True`",
    "ignore:Setting `save_embedding_layers` to `True`",
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}),
    "one_layer": ("llama", {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1], "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 4},
            "alpha_pattern": {r"[01]\.self_attn\.q_proj": 7, "q_proj": 1},
        },
    ),
    "conv1d": ("gpt2", {"target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True, "bias": "lora_only"}),
    "embedding": ("gemma", {"target_modules": ["embed_tokens", "v_proj"], "lora_dropout": 0.1}),
}


def model_of(case: str) -> Any:
    torch.manual_seed(0)
    return MODELS[CASES[case][0]][0]().eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def saved(case: str, folder: Path, **arguments: Any) -> torch.Tensor:
    """Write an adapter of peft with random values; return what it computes."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model_of(case), LoraConfig(r=3, lora_alpha=5, **CASES[case][1], **arguments))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=0.1, std=0.2)
    adapted.save_pretrained(folder)
    return logits(adapted)


@pytest.mark.turns(3)
@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_peft_does_and_goes_back(case: str, tmp_path: Path) -> None:
    expected = saved(case, tmp_path)
    module = nn.ModuleDict({"own_name": model_of(case)})
    lora = LoRA(start_from=str(tmp_path))
    apply(module, [lora])
    assert (lora.rank, lora.alpha, lora.variant) == (
        3, 5, {"one_layer": "rslora", "conv1d": "dora"}.get(case, "lora")
    )  # fmt: skip
    torch.testing.assert_close(logits(module["own_name"]), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, logits(model_of(case)), atol=1e-2)
    tensors, _ = to_peft(module.state_dict(), placement(module), lora.arguments())
    theirs = load_file(tmp_path / "adapter_model.safetensors")
    theirs.pop("base_model.model.model.embed_tokens.base_layer.weight", None)  # frozen
    torch.testing.assert_close(tensors, theirs)


def test_a_checkpoint_of_it_needs_no_folder(tmp_path: Path) -> None:
    saved("lora", tmp_path)
    module = nn.ModuleDict({"network": model_of("lora")})
    apply(module, [LoRA(start_from=str(tmp_path))])
    again = nn.ModuleDict({"network": model_of("lora")})
    (tmp_path / "adapter_config.json").unlink()
    apply(again, [LoRA(**ledger(module)[0].record["arguments"])])
    again.load_state_dict(module.state_dict())
    assert torch.equal(logits(again["network"]), logits(module["network"]))


def test_what_is_given_too_must_be_the_same(tmp_path: Path) -> None:
    expected = saved("lora", tmp_path)
    with pytest.raises(ConfigurationError, match="LoRA: rank must be 3, as in start_from, or left out, got 4"):
        LoRA(rank=4, start_from=str(tmp_path))
    same = nn.ModuleDict({"network": model_of("lora")})
    apply(same, [LoRA(rank=3, targets=["q_proj", "down_proj"], modules_to_save=["lm_head"], start_from=str(tmp_path))])
    torch.testing.assert_close(logits(same["network"]), expected, rtol=1e-5, atol=1e-5)
    other = nn.ModuleDict({"network": model_of("lora")})
    with pytest.raises(ConfigurationError, match=r"does not fit ModuleDict: 4 tensors are missing.*'network.*v_proj"):
        apply(other, [LoRA(targets=["q_proj", "v_proj", "down_proj"], start_from=str(tmp_path))])
    with pytest.raises(ConfigurationError, match="matches none of the 11 modules"):
        apply(nn.ModuleDict({"network": model_of("conv1d")}), [LoRA(start_from=str(tmp_path))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "has peft_type IA3, not LORA"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights='pissa', which"),
        ({"alora_invocation_tokens": [3], "use_rslora": True}, "is aLoRA with rslora, which"),
        ({"layer_replication": [[0, 1]]}, "has layer_replication="),
        ({"r": 2}, r"has rank 3 instead of 2 in 'model.layers.*_proj', which"),
    ],
)
def test_what_lora_has_not_is_refused_before_anything_is_built(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved("lora", tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ConfigurationError, match=message):
        LoRA(start_from=str(tmp_path))


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    saved("lora", tmp_path)
    write_sums(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is missing, or not what was written"):
        LoRA(start_from=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read"):
        LoRA(start_from=str(tmp_path / "none"))


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
def test_convolutions_whose_padding_peft_does_not_know_are_not_exported(mode: str) -> None:
    module = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode))
    technique = LoRA(rank=2, targets=["0"])
    apply(module, [technique])
    nn.init.normal_(module[0].lora_B)
    x = torch.randn(2, 4, 5, 5)
    ours = module(x)

    unmerged = peft.get_peft_model(
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, padding_mode=mode)),
        peft.LoraConfig(r=2, lora_alpha=technique.arguments()["alpha"], target_modules=["0"]),
    )
    names = {"weight": "base_layer.weight", "bias": "base_layer.bias"}
    names |= {f"lora_{one}": f"lora_{one}.default.weight" for one in "AB"}
    state = {f"base_model.model.0.{names[key.removeprefix('0.')]}": value for key, value in module.state_dict().items()}
    unmerged.load_state_dict({key: value.view(unmerged.state_dict()[key].shape) for key, value in state.items()})
    assert torch.allclose(unmerged(x), ours, atol=1e-5) == (mode == "zeros")

    if mode == "zeros":
        to_peft(module.state_dict(), placement(module), technique.arguments())
    else:
        with pytest.raises(ConfigurationError, match="another padding_mode than zeros"):
            to_peft(module.state_dict(), placement(module), technique.arguments())


def small_unet() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=4,
        block_out_channels=(8, 8),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )


def predicted(unet: Any) -> torch.Tensor:
    torch.manual_seed(1)
    return unet.eval()(torch.randn(2, 4, 4, 4), torch.tensor([3, 700]), torch.randn(2, 5, 8)).sample


@pytest.mark.parametrize("kind", ["diffusers", "earlier diffusers", "kohya"])
def test_a_lora_of_diffusers_or_kohya_is_a_start(kind: str, tmp_path: Path) -> None:
    base = small_unet()
    theirs = copy.deepcopy(base)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["to_q", "to_v", "to_out.0"], init_lora_weights=False)
    theirs.add_adapter(config)
    factors = peft.get_peft_model_state_dict(theirs)
    metadata = None
    if kind == "diffusers":
        metadata = config.to_dict()
    if kind == "earlier diffusers":  # alpha is the rank
        for part in theirs.modules():
            if isinstance(getattr(part, "scaling", None), dict):
                part.scaling["default"] = 1.0
        factors = {
            name.replace("lora_A", "lora.down").replace("lora_B", "lora.up"): one for name, one in factors.items()
        }
    if kind == "kohya":
        part = {"name": "", "library": "diffusers", "class": type(base).__name__, "config": base.to_json_string()}
        config = {"lora_alpha": 6, "use_rslora": False, "r": 3}
        save_file(to_kohya(factors, config, part), tmp_path / "kohya.safetensors")
    else:
        diffusers.StableDiffusionPipeline.save_lora_weights(
            tmp_path, unet_lora_layers=factors, unet_lora_adapter_metadata=metadata
        )
    file = next(tmp_path.glob("*.safetensors"))
    for place in (file, tmp_path):
        module = Holds(copy.deepcopy(base))
        technique = LoRA(start_from=str(place))
        apply(module, [technique])
        assert (technique.rank, technique.alpha) == (3, 3 if kind == "earlier diffusers" else 6)
        assert torch.allclose(predicted(module.unet), predicted(theirs), atol=1e-6)
    assert not torch.allclose(predicted(base), predicted(theirs), atol=1e-3)


class Holds(pl.LightningModule):
    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = unet
