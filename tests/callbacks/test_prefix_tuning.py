"""PrefixTuning: trained parameters, contents of checkpoints, the initial prefix, and exchange with peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lit_efficient import ConfigurationError, PrefixTuning
from lit_efficient.application import apply
from lit_efficient.application.ledger import reports_of
from lit_efficient.application.recorded import replay
from tests.mechanisms.adapters.decoders import FAMILIES, IDS, WINDOWED, Language, decoder, logits
from tests.support import QUIET, AttentionNet, Toy, assert_equal, weights
from tests.support_cli import export

TOKENS = [5, 9, 30]


def fit(module: Any, technique: PrefixTuning, epochs: int = 2, **arguments: Any) -> Any:
    torch.manual_seed(0)
    run = L.Trainer(callbacks=[technique], **QUIET, max_epochs=epochs)
    run.fit(module, **arguments)
    return run


@pytest.mark.parametrize("projection", [None, 5])
def test_the_prefix_alone_trains_and_checkpoints_hold_it_alone(projection: int | None, tmp_path: Path) -> None:
    before = weights(decoder("Llama"))
    run = fit(module := Language(decoder("Llama")), PrefixTuning(init_tokens=TOKENS, projection=projection))
    after = weights(module.network)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    direct = 2 * 2 * 2 * 3 * 4  # keys and values, layers, heads, tokens, width of a head
    through = 3 * 16 + 5 * 16 + 5 + 32 * 5 + 32  # input, two matrices and their biases
    report = reports_of(module)["PrefixTuning"]
    assert report.parameters == (through if projection else direct)
    assert report.details["adapter_bytes"] == 4 * report.parameters
    total = report.parameters + sum(tensor.numel() for tensor in before.values())
    assert report.details["trainable_share"] == pytest.approx(report.parameters / total)
    assert report.details["cache_bytes"] == 4 * direct
    assert report.bytes_saved == 4 * (total - report.parameters)
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    names = {"keys", "values", *(("embedding", "up", "up_bias", "out", "out_bias") if projection else ())}
    start = "network.model.prefix_tuning.prefix_"
    assert checkpoint["state_dict"].keys() == {start + name for name in names}
    moved = apply_only(PrefixTuning(init_tokens=TOKENS, projection=projection))
    changed = {k.removeprefix(start) for k, t in checkpoint["state_dict"].items() if not torch.equal(t, moved[k])}
    assert changed == (names - {"keys", "values"} if projection else names)
    again = Language(decoder("Llama"))
    replay(again, checkpoint)
    again.load_state_dict(checkpoint["state_dict"])
    assert_equal(weights(module), weights(again))


def apply_only(technique: PrefixTuning) -> dict[str, torch.Tensor]:
    apply(module := Language(decoder("Llama")), [technique])
    return weights(module)


def test_resumes_bit_exactly_in_a_transformers_model(tmp_path: Path) -> None:
    technique = PrefixTuning(init_tokens=TOKENS, projection=5)
    whole = fit(one := Language(decoder("Gemma2")), technique)
    half = fit(Language(decoder("Gemma2")), technique, epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    resumed = fit(two := Language(decoder("Gemma2")), technique, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.global_step == whole.global_step == 4
    assert_equal(weights(one), weights(two))
    assert_equal(whole.optimizers[0].state_dict(), resumed.optimizers[0].state_dict())


@pytest.mark.parametrize("projection", [None, 5])
def test_a_base_checkpoint_starts_the_prefix_anew_beside_its_weights(projection: int | None) -> None:
    other = Language(decoder("Llama"))
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    technique = PrefixTuning(init_tokens=TOKENS, projection=projection)
    apply(module := Language(decoder("Llama")), [technique])
    module.load_state_dict(other.state_dict())
    apply(other, [technique])
    assert_equal(weights(other), weights(module))


def test_tokens_are_repeated_or_cut_to_the_length_and_text_becomes_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "be": 5, "brief": 9}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    technique = PrefixTuning(5, init_text="be brief", tokenizer=str(tmp_path))
    assert technique.arguments() == PrefixTuning(5, init_tokens=[5, 9]).arguments()  # no path in a checkpoint
    longer = apply_only(technique)
    assert_equal(longer, apply_only(PrefixTuning(init_tokens=[5, 9, 5, 9, 5])))
    assert_equal(apply_only(PrefixTuning(2, init_tokens=[5, 9, 7])), apply_only(PrefixTuning(init_tokens=[5, 9])))
    with pytest.raises(ConfigurationError, match=r"tokenizer must be a tokenizer.json or a folder that has one"):
        PrefixTuning(init_text="be brief", tokenizer=str(tmp_path / "missing"))


def test_a_random_start_is_a_choice_and_depends_on_the_seed_alone() -> None:
    with pytest.raises(ConfigurationError, match="which usually trains worse, set init='random'"):
        PrefixTuning(4)
    torch.manual_seed(1)
    one = apply_only(PrefixTuning(4, init="random"))
    torch.manual_seed(2)
    assert_equal(one, apply_only(PrefixTuning(4, init="random")))
    key = "network.model.prefix_tuning.prefix_keys"
    tokens = apply_only(PrefixTuning(init_tokens=[9, 12, 19, 25]))
    assert 0.5 < one[key].std() / tokens[key].std() < 2
    assert not torch.equal(one[key], apply_only(PrefixTuning(4, init="random", seed=1))[key])


def test_a_new_head_trains_with_it() -> None:
    technique = PrefixTuning(init_tokens=TOKENS, modules_to_save=["lm_head"])
    apply(module := Language(decoder("Llama")), [technique])
    trained = {name.rpartition(".")[0] for name, p in module.named_parameters() if p.requires_grad}
    assert trained == {"network.lm_head", "network.model.prefix_tuning"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init": "zeros"}, "init must be one of tokens, random, got 'zeros'"),
        (
            {"num_virtual_tokens": 0, "init": "random"},
            "num_virtual_tokens must be a whole number .* 1 or null, got 0",
        ),
        ({"init_tokens": [1], "projection": 0}, "projection must be a whole number of at least 1 or null, got 0"),
        ({"init": "random"}, "init='random' needs num_virtual_tokens"),
        ({"init_tokens": [1], "init_text": "a", "tokenizer": "b"}, "got init_tokens and init_text"),
        ({"init_text": "a"}, "init_text and tokenizer .* go together"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PrefixTuning(**arguments)


def test_an_optimizer_that_was_built_too_early_is_refused() -> None:
    class Early(Language):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.network.lm_head.parameters(), lr=0.1)

    with pytest.raises(ConfigurationError, match=r"holds 2 of the 2 parameters .*prefix_keys, .*prefix_values"):
        fit(Early(decoder("Llama")), PrefixTuning(init_tokens=TOKENS))


@pytest.mark.turns(3)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_loads_the_prefix_and_computes_the_same(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    module = Language(decoder(family))
    run = fit(module, PrefixTuning(init_tokens=TOKENS, projection=4 if family == "Qwen3" else None), epochs=1)
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert export([str(tmp_path / "a.ckpt"), "--format", "peft", "--output", str(tmp_path / "out"), "--no-check"]) == 0
    theirs = PeftModel.from_pretrained(decoder(family), tmp_path / "out")
    y = logits(module.network)
    torch.testing.assert_close(logits(theirs), y, rtol=1e-5, atol=1e-5)
    mask = torch.ones_like(IDS)
    mask[1, slice(5, None) if family in WINDOWED else slice(3)] = 0  # what the windowed refuse, peft counts
    with torch.no_grad():
        ours, their = (model(input_ids=IDS, attention_mask=mask).logits for model in (module.network, theirs))
    torch.testing.assert_close(their[mask == 1], ours[mask == 1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(decoder(family)), y, atol=1e-4)


def test_an_export_with_its_base_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder("Llama").save_pretrained(tmp_path / "base")
    run = fit(Language(decoder("Llama")), PrefixTuning(init_tokens=TOKENS), epochs=1)
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    arguments = ["--format", "peft", "--output", str(tmp_path / "out"), "--base", str(tmp_path / "base")]
    assert export([str(tmp_path / "a.ckpt"), *arguments]) == 0
    assert "outputs of peft differ by" in capsys.readouterr().err
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == arguments[-1]


def test_what_no_format_can_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = Toy(network=AttentionNet)
    apply(ours, [PrefixTuning(init_tokens=[1])])
    cases: list[tuple[nn.Module, list[str], str]] = [
        (ours, ["peft"], "peft cannot represent a prefix of lit_efficient.GPT"),
        (Language(decoder("Llama")), ["merged", "--base", "x"], "a prefix cannot be merged into weights"),
    ]
    apply(cases[1][0], [PrefixTuning(init_tokens=[1])])
    for module, arguments, message in cases:
        run = L.Trainer(**QUIET)
        run.strategy.connect(module)
        run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
        assert export([str(tmp_path / "a.ckpt"), "--output", str(tmp_path / "out"), "--format", *arguments]) == 2
        assert message in capsys.readouterr().err
