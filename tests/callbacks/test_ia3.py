"""IA3: adapted layers of each family, equality with peft, peft's format, merging into all kinds of bases, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lit_efficient import IA3, ConfigurationError, QuantizeBase, merge_adapters
from lit_efficient.application import apply
from lit_efficient.application.ledger import reports_of
from lit_efficient.mechanisms.adapters.merge import dequantize_layers
from lit_efficient.mechanisms.adapters.peft_vectors import ia3_patterns, ia3_placement
from tests.mechanisms.adapters.decoders import FAMILIES, Language, decoder, logits
from tests.support import QUIET, WIDTH, Toy, data, trainer
from tests.support_cli import export


def _scaled(family: str) -> Any:
    """Return a model of the family whose factors are not one."""
    root = nn.ModuleDict({"model": decoder(family)})
    apply(root, [IA3()])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in root.named_parameters():
            if name.endswith(".ia3"):
                p.uniform_(0.5, 2.0, generator=generator)
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_keys_values_and_feed_forward_in_each_family_and_merges(family: str) -> None:
    plain = decoder(family)
    apply(root := nn.ModuleDict({"model": decoder(family)}), [IA3()])
    report = reports_of(root)["IA3"]
    wanted = {"attn.c_attn", "mlp.c_proj"} if family == "GPT2" else {"k_proj", "v_proj", "down_proj"}
    assert {name for name, _ in plain.named_modules() if name.endswith(tuple(wanted))} == {
        name.removeprefix("model.") for name in report.modules
    }
    assert report.parameters == 2 * (32 + 64 if family == "GPT2" else 8 + 8 + 24)  # queries are left alone
    assert {name.rpartition(".")[2] for name, p in root.named_parameters() if p.requires_grad} == {"ia3"}
    assert torch.equal(logits(root["model"]), logits(plain))
    y = logits(_scaled(family)["model"])
    assert not torch.allclose(y, logits(plain), atol=1e-4)
    merged = merge_adapters(_scaled(family))["model"]
    torch.testing.assert_close(logits(merged), y, rtol=1e-5, atol=1e-5)
    assert merged.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
@pytest.mark.parametrize("family", FAMILIES)
def test_computes_what_peft_computes_with_the_same_factors(family: str) -> None:
    from peft import IA3Config, get_peft_model

    root = _scaled(family)
    names = [name.removeprefix("model.") for name in reports_of(root)["IA3"].modules]
    down = [name for name in names if root["model"].get_submodule(name).ia3_side == "input"]
    config = IA3Config(target_modules=names, feedforward_modules=down, fan_in_fan_out=family == "GPT2")
    theirs = get_peft_model(decoder(family), config)
    with torch.no_grad():
        for name in names:
            ours: Any = root["model"].get_submodule(name)
            factors = theirs.base_model.model.get_submodule(name).ia3_l["default"]
            factors.view(-1)[ours.ia3_first :] = ours.ia3
    torch.testing.assert_close(logits(root["model"]), logits(theirs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_a_quantised_gpt2_leaves_its_queries_alone(format: str) -> None:
    root = nn.ModuleDict({"model": decoder("GPT2")})
    reports = apply(root, [QuantizeBase(format, group_size=8), IA3()])
    assert reports["IA3"].parameters == 2 * (32 + 64)
    attention: Any = root["model"].transformer.h[0].attn.c_attn
    assert attention.ia3.shape == (32,)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    before = attention(x)
    with torch.no_grad():
        attention.ia3.fill_(2.0)
    assert torch.equal(attention(x)[:, :16], before[:, :16])  # queries
    assert torch.equal(attention(x)[:, 16:], 2 * before[:, 16:])
    placed = ia3_placement(root)["layers"]["transformer.h.0.attn.c_attn"]
    assert (placed["kind"], placed["first"]) == ("conv1d", 16)
    y = logits(root["model"])
    dequantize_layers(merge_adapters(root))
    torch.testing.assert_close(logits(root["model"]), y, rtol=1e-5, atol=1e-5)
    assert root["model"].state_dict().keys() == decoder("GPT2").state_dict().keys()


def test_a_quantised_base_is_dequantised_when_it_is_merged() -> None:
    module, x = Toy(), torch.randn(3, 16)
    apply(module, [QuantizeBase(), IA3(targets=["up"], feedforward=["down"])])
    with torch.no_grad():
        module.net.blocks[0].up.ia3.uniform_(0.5, 2.0)
        module.net.blocks[0].down.ia3.uniform_(0.5, 2.0)
    y = module.net(x)
    merge_adapters(module)
    torch.testing.assert_close(module.net(x), y, rtol=1e-5, atol=1e-5)
    assert module.state_dict().keys() == Toy().state_dict().keys()


def test_what_it_cannot_place_is_refused_with_what_could_match() -> None:
    with pytest.raises(ConfigurationError, match=r"'auto' does not support .*Linear layers: net.stem, net.blocks.0.up"):
        apply(Toy(), [IA3()])
    with pytest.raises(ConfigurationError, match="both be 'auto' or both be patterns"):
        IA3(targets=["up"])
    with pytest.raises(ConfigurationError, match="matched by targets and by feedforward"):
        apply(Toy(), [IA3(targets=["up"], feedforward=["up"])])
    with pytest.raises(ConfigurationError, match="IA3: targets: the pattern 'k' matches none"):
        apply(Toy(), [IA3(targets=["k"], feedforward=["down"])])


@pytest.mark.turns(3)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_factors_and_transformers_the_merged_model(family: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    module = Language(decoder(family))
    run = L.Trainer(callbacks=[IA3()], **QUIET, max_epochs=1)
    run.fit(module)
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    y = logits(module.network)
    assert export([str(tmp_path / "a.ckpt"), "--format", "peft", "--output", str(tmp_path / "peft"), "--no-check"]) == 0
    theirs = PeftModel.from_pretrained(decoder(family), tmp_path / "peft")
    torch.testing.assert_close(logits(theirs), y, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(logits(decoder(family)), y, atol=1e-3)
    decoder(family).save_pretrained(tmp_path / "base")
    arguments = ["--format", "merged", "--output", str(tmp_path / "merged"), "--base", str(tmp_path / "base")]
    assert export([str(tmp_path / "a.ckpt"), *arguments, "--no-check"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("save_base", [False, True])
def test_factors_beside_a_quantised_base_fold_into_what_it_was_rounded_to(save_base: bool, tmp_path: Path) -> None:
    torch.save(Toy().state_dict(), tmp_path / "base.pt")
    run = trainer([QuantizeBase("nf4"), IA3(targets=["up"], feedforward=["down"], save_base=save_base)])
    run.fit(module := Toy(), data(), data())
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    arguments = [str(tmp_path / "a.ckpt"), "--output", str(tmp_path / "out"), "--no-check"]
    assert export(arguments if save_base else [*arguments, "--base", str(tmp_path / "base.pt")]) == 0
    (merged := Toy()).load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(merged.net(x), module.eval().net(x), rtol=1e-5, atol=1e-5)


def test_a_merge_without_the_base_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer([IA3(targets=["up"], feedforward=["down"])])
    run.fit(Toy(), data(), data())
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert export([str(tmp_path / "a.ckpt"), "--output", str(tmp_path / "out")]) == 2
    assert "'net.blocks.0.up.weight', which IA3 scales, is not in the checkpoint" in capsys.readouterr().err


def test_patterns_for_peft_find_exactly_the_scaled_layers() -> None:
    def patterns(outputs: list[str], inputs: list[str], others: list[str]) -> Any:
        return ia3_patterns([*outputs, *inputs], inputs, [*outputs, *inputs, *others])

    assert patterns(["h.0.k", "h.1.k"], ["h.0.down", "h.1.down"], ["h.0.up"]) == (["k", "down"], ["down"])
    assert patterns(["h.0.a.c"], ["h.0.m.p"], ["h.0.a.p"]) == (["a.c", "m.p"], ["m.p"])  # p alone is too short
    assert patterns(["a.h.0.k"], [], ["b.h.0.k"]) == (r"a\.h\.0\.k", "(?!)")
