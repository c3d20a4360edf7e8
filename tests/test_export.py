"""Exports load in the libraries they are for, and compute what the trained module computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from safetensors.torch import load_file

from lit_efficient import LoRA, merge_adapters
from lit_efficient.commands.export import run as export
from tests.support import QUIET, Toy, data, trainer


def _llama(tie: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=tie,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Language(L.LightningModule):
    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.network(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(IDS, 2)


IDS = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(0))


def _trained(tmp_path: Path, *, tie: bool = False, **arguments: Any) -> tuple[Path, torch.Tensor]:
    torch.manual_seed(0)
    module = Language(_llama(tie))
    run = L.Trainer(callbacks=[LoRA(rank=2, **arguments)], **QUIET, max_epochs=2)
    run.fit(module)
    run.save_checkpoint(tmp_path / "lora.ckpt", weights_only=True)
    return tmp_path / "lora.ckpt", _logits(module.network)


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


PEFT_CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"variant": "rslora"},
    "dora": {"variant": "dora"},
    "pissa": {"variant": "pissa"},
    "everything": {"targets": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
    "one_layer": {"targets": [r"layers\.1\.mlp\.up_proj"]},
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
@pytest.mark.parametrize("case", PEFT_CASES)
def test_peft_loads_the_adapter(case: str, tmp_path: Path) -> None:
    from peft import PeftModel

    path, expected = _trained(tmp_path, **PEFT_CASES[case])
    assert export([str(path), "--format", "peft", "--output", str(tmp_path / "out")]) == 0
    model = PeftModel.from_pretrained(_llama(), tmp_path / "out")
    torch.testing.assert_close(_logits(model), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(_logits(_llama()), expected, atol=1e-3)


@pytest.mark.parametrize("tie", [False, True])
def test_transformers_loads_the_merged_model(tie: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path, expected = _trained(tmp_path, tie=tie, targets=["q_proj", "down_proj", "lm_head"], variant="dora")
    _llama(tie).save_pretrained(tmp_path / "base")
    arguments = [str(path), "--format", "merged", "--output", str(tmp_path / "out"), "--base", str(tmp_path / "base")]
    assert export(arguments) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(_logits(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("save_base", [False, True])
def test_safetensors_hold_the_merged_weights_under_the_plain_names(save_base: bool, tmp_path: Path) -> None:
    torch.save(Toy().state_dict(), tmp_path / "base.pt")
    run = trainer([LoRA(rank=2, save_base=save_base)])
    run.fit(module := Toy(), data(), data())
    run.save_checkpoint(tmp_path / "lora.ckpt", weights_only=True)
    arguments = [str(tmp_path / "lora.ckpt"), "--format", "safetensors", "--output", str(tmp_path / "out")]
    assert export(arguments if save_base else [*arguments, "--base", str(tmp_path / "base.pt")]) == 0
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state.keys() == Toy().state_dict().keys()
    merge_adapters(module)
    torch.testing.assert_close(state, dict(module.state_dict()))


def test_a_plain_checkpoint_becomes_safetensors(tmp_path: Path) -> None:
    run = trainer([])
    run.fit(module := Toy(), data(), data())
    run.save_checkpoint(tmp_path / "plain.ckpt")
    assert export([str(tmp_path / "plain.ckpt"), "--output", str(tmp_path / "out")]) == 0
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors"), dict(module.state_dict()))


def test_what_cannot_be_exported_is_said_in_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trainer([LoRA(rank=2)])
    run.fit(Toy(), data(), data())
    run.save_checkpoint(tmp_path / "lora.ckpt", weights_only=True)
    trainer([]).fit(module := Toy(), data(), data())
    torch.save(module.state_dict(), tmp_path / "plain.ckpt")
    (tmp_path / "broken.ckpt").write_bytes(b"no checkpoint")
    before = sorted(tmp_path.iterdir())
    cases = [
        (["lora.ckpt"], "'net.stem.weight', which an adapter changes, is not in the checkpoint: name the base"),
        (["plain.ckpt", "--format", "peft"], "holds no adapter"),
        (["lora.ckpt", "--format", "merged"], "format merged needs base"),
        (["missing.ckpt"], "there is no file"),
        (["broken.ckpt"], "cannot be read safely"),
    ]
    for (name, *rest), message in cases:
        assert export([str(tmp_path / name), *rest, "--output", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before
