"""The configs for language models: all parse, the small ones run, the real one has the size that it should."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_efficient import LoRA
from lit_efficient.__main__ import main
from lit_efficient.data.text.chat_tokenizer import load_chat_tokenizer, train_chat_tokenizer
from lit_efficient.data.text.chat_tokens import ChatTokens
from lit_efficient.mechanisms.adapters.low_rank import LowRank, add_low_rank
from lit_efficient.mechanisms.adapters.targets import find_targets
from lit_efficient.models.libraries import causal_lm
from tests.configs.following import fit_and_follow, made, small
from tests.support_cli import Parts

FOLDER = Path(__file__).parents[2] / "configs" / "llm"
CONFIGS = [path for path in sorted(FOLDER.glob("*.yaml")) if not path.read_text("utf-8").startswith("# Overlay")]
REAL = FOLDER / "llama_3_1_8b_qlora.yaml"
LLAMA = Path(__file__).parent / "llama_3_1_8b.json"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_parses_and_says_how_to_run_it(path: Path) -> None:
    written, parts, _ = made(path)
    assert type(parts.datamodule).__name__ == written["data"]["class_path"]
    assert path.name in (FOLDER / "README.md").read_text("utf-8")


TUNED = ("full_finetune", "lora", "dora", "qlora", "dpo")  # dpo starts from full_finetune's best


@pytest.mark.turns(4, family="shipped configs")
@pytest.mark.parametrize(
    "tuned",
    [("lora",), pytest.param(TUNED, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])],
    ids=["lora", "all"],
)
def test_configs_run_as_their_headers_say_and_so_does_what_they_print(
    tuned: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With few rows and steps: pretrain, export, what starts from that base; after each the lines it ends with."""
    from transformers import AutoModelForCausalLM

    texts, asked = ({"rows": {"max_rows": rows}, "val_fraction": 0.2, "val_batch_size": 2} for rows in (12, 40))
    fit_and_follow(capsys, small(FOLDER / "pretrain.yaml", data={**texts, "batch_size": 2}))
    checkpoint = "runs/llm/pretrain/latest/best.ckpt"
    assert main(["export", checkpoint, "--format", "merged", "--output", "runs/llm/base"]) == 0
    state = torch.load(checkpoint, weights_only=True)
    base = AutoModelForCausalLM.from_pretrained("runs/llm/base")
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, state["state_dict"][f"network.{name}"]), name
    theirs = load_chat_tokenizer("runs/llm/base")
    assert len(theirs) == base.config.vocab_size
    assert theirs.chat_template == state["language_modeling"]["tokenizer"]["files"]["chat_template.jinja"]

    for name in tuned:
        fit_and_follow(capsys, small(FOLDER / f"{name}.yaml", data=asked))
    last = torch.load(f"runs/llm/{'qlora' if 'qlora' in tuned else 'lora'}/latest/best.ckpt", weights_only=True)
    moved = {key: tensor.abs().max() > 0 for key, tensor in last["state_dict"].items() if key.endswith("lora_B")}
    assert len(moved) == 4 * 7
    assert all(moved.values())
    assert not [key for key in last["state_dict"] if key.endswith("proj.weight")]  # the base stays in its folder
    run = (tmp_path / "runs" / "llm" / tuned[1 if len(tuned) > 1 else 0] / "latest").resolve()
    assert (run / "config_1.yaml").is_file()  # both fits of it lie there
    if tuned != TUNED:
        return
    fit_and_follow(capsys, small(FOLDER / "distillation.yaml", data={**texts, "batch_size": 2}))
    fit_and_follow(capsys, small(FOLDER / "grpo.yaml", data={"batch_size": 2, "val_batch_size": 2}))
    fit_and_follow(capsys, small(FOLDER / "on_policy_distillation.yaml", data={**asked, "max_length": 256}))
    few = {"samples": 2, "max_new_tokens": 4}
    answers = {"prompts": "prompts.jsonl", "rollout": few, "least_reward": None, "keep_truncated": True}
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} + {n}?"}) + "\n" for n in range(40)))
    fit_and_follow(capsys, small(FOLDER / "best_of_n.yaml", data={"answers": answers, "val_fraction": 0.2}))
    asked_and_told = [{"prompt": f"{n} + {n}?", "completion": str(2 * n)} for n in range(40)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked_and_told))
    ours = {"train": "rows.jsonl", "tokenizer": "runs/llm/base", "max_length": 64, "num_workers": 0}
    named = {"model": {"name_or_path": "runs/llm/base", "dtype": "float32"}}
    fit_and_follow(capsys, small(REAL, model=named, data=ours))
    fit_and_follow(capsys, small(FOLDER / "recipe.yaml", model=named, data=ours))
    # test_task_configs.py, and tests/tasks/test_image_text_models.py
    elsewhere = {"kto", "classification", "embedding", "image_text"}
    assert {path.stem for path in CONFIGS} - elsewhere == {path.stem for path in Path().glob("*.yaml")}


@pytest.mark.parametrize("name", ["lora", "full_finetune"])
def test_without_the_base_the_command_that_makes_it_is_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "-c", str(FOLDER / f"{name}.yaml"), "--trainer.logger=false"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "there is no folder runs/llm/base" in said
    assert "python -m lit_efficient export CKPT --format merged --output runs/llm/base" in said
    assert "Traceback" not in said


def test_the_real_size_is_built_on_the_meta_device_with_the_adapters_of_its_config(tmp_path: Path) -> None:
    """Every shape of Llama 3.1 8B and of its adapters, without a byte of weights."""
    from transformers import BitsAndBytesConfig
    from transformers.integrations import replace_with_bnb_linear

    (tmp_path / "config.json").write_text(LLAMA.read_text("utf-8"))
    parts: Any = Parts(args=["fit", "-c", str(REAL), "--model.init_args.model.name_or_path", str(tmp_path)])
    spec = parts.model.model
    lora = next(callback for callback in parts.trainer.callbacks if isinstance(callback, LoRA))
    assert (spec.quantize, lora.rank, lora.targets) == ("nf4", 128, "all-linear")
    with torch.device("meta"):
        network: Any = causal_lm.build(dataclasses.replace(spec, random_weights=True, quantize=None))
        assert {p.device.type for p in network.parameters()} == {"meta"}
        assert sum(p.numel() for p in network.parameters()) == 8_030_261_248
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        network = replace_with_bnb_linear(network, modules_to_not_convert=["lm_head"], quantization_config=how)
        found = find_targets(network, lora.targets, who="LoRA")
        assert {type(layer).__name__ for _, layer in found} == {"Linear4bit"}
        for name, layer in found:
            add_low_rank(layer, name, rank=lora.rank, alpha=lora.alpha, variant=lora.variant)
    added = [p for name, p in network.named_parameters() if name.rpartition(".")[2].startswith("lora_")]
    hidden, inner, key_value, layers = 4096, 14336, 8 * 128, 32
    ins_and_outs = 2 * (hidden + hidden) + 2 * (hidden + key_value) + 3 * (hidden + inner)
    assert sum(p.numel() for p in added) == layers * lora.rank * ins_and_outs == 335_544_320
    assert {p.dtype for p in added} == {torch.float32}
    assert sum(isinstance(part, LowRank) for part in network.modules()) == 7 * layers


def test_the_real_template_trains_the_answer_and_its_end() -> None:
    """The base's own end of text ends a turn: its weights know that token, and not those of the chat models."""
    written = yaml.safe_load(REAL.read_text("utf-8"))["data"]["init_args"]
    tokenizer = train_chat_tokenizer(["### User\nhello\n### Assistant\nyes\n"], 300)
    tokenizer.chat_template = written["chat"]["template"]
    encoder = ChatTokens(tokenizer, "assistant", "refuse")
    assert encoder.check_end_of_turn() is None
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == f"### User\n2+2?\n### Assistant\n4{tokenizer.eos_token}\n"
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "### User\n2+2?\n### Assistant\n"
