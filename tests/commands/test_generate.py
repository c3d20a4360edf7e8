"""``generate``: the text is that of the trained module, with its adapters and its average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from transformers import LlamaForCausalLM

from lit_efficient import EMA, CausalLMConfig, CorpusFiles, LanguageModeling, LoRA, PythonCorpus
from lit_efficient.__main__ import main
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.files.runs import new_folder, point_latest, write_record
from lit_efficient.tasks.loading import load_language_model
from tests.models.libraries.test_causal_lm import SMALL


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small Llama with random weights in a folder, an adapter trained beside it, and an average of that."""
    folder = tmp_path_factory.mktemp("generate")
    source = folder / "source"
    source.mkdir()
    for index in range(12):
        (source / f"file{index}.py").write_text(f"def function_{index}(self):\n    return self.value + {index}\n" * 9)
    from lit_efficient.models.libraries.causal_lm import build

    torch.manual_seed(0)
    base = CausalLMConfig(config_fields={"model_type": "llama", **SMALL, "vocab_size": 300})
    build(base).save_pretrained(folder / "base")
    model = LanguageModeling(CausalLMConfig(str(folder / "base")), learning_rate=0.1, warmup_steps=1)
    ema = EMA(decay=0.6, warmup=None)
    trainer = Trainer(
        max_steps=6,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        enable_checkpointing=False,
        callbacks=[LoRA(rank=4), ema],
    )
    cache = str(folder / "cache")
    data = PythonCorpus(
        vocab_size=300, sequence_length=16, batch_size=4, files=CorpusFiles([str(source)]), cache_dir=cache
    )
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(folder / "full.ckpt")
    trainer.save_checkpoint(folder / "alone.ckpt", weights_only=True)
    options: dict[str, Any] = {"max_new_tokens": 12, "seed": 2}
    raw = model.generate_text("def f", **options)[0]
    with ema.averaged(model):
        average = model.generate_text("def f", **options)[0]
    assert raw != average
    return {"folder": folder, "raw": raw, "average": average}


@pytest.mark.parametrize(
    ("file", "weights", "kind"), [("full", "auto", "average"), ("full", "raw", "raw"), ("alone", "auto", "average")]
)
def test_it_writes_what_the_module_wrote(
    run: dict[str, Any], file: str, weights: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--ckpt", str(run["folder"] / f"{file}.ckpt"), "--prompt", "def f", "--max_new_tokens", "12"]
    assert main(["generate", *arguments, "--seed", "2", "--weights", weights, "--device", "cpu"]) == 0
    assert capsys.readouterr().out == run[kind] + "\n"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # by peft
def test_each_prompt_has_its_adapter_as_in_a_mixed_batch_of_peft(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    folder = run["folder"]

    def base() -> Any:
        return LlamaForCausalLM.from_pretrained(folder / "base")

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(base(), config).save_pretrained(tmp_path / "code")
    export_checkpoint(folder / "full.ckpt", tmp_path / "own", "peft", weights="raw", check=False)
    theirs = peft.PeftModel.from_pretrained(base(), tmp_path / "own", adapter_name="own").eval()
    theirs.load_adapter(tmp_path / "code", "code")
    ours, _ = load_language_model(str(folder / "full.ckpt"), "raw")
    ids = torch.tensor([ours.tokenizer.encode("def f").ids] * 3)
    names = ["own", "code", "__base__"]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = theirs.generate(input_ids=ids, attention_mask=torch.ones_like(ids), adapter_names=names, **options)
    wanted = [ours.tokenizer.decode(row[ids.shape[1] :].tolist()) for row in wanted]
    assert len({*wanted}) == 3
    chosen = ["--adapter", "default", "--adapter", f"code={tmp_path / 'code'}", "--adapter", "base"]
    words = ["generate", "--ckpt", str(folder / "full.ckpt"), "--weights", "raw", "--device", "cpu"]
    words += ["--temperature", "0", "--max_new_tokens", "8", *["--prompt", "def f"] * 3]
    capsys.readouterr()
    assert main([*words, *chosen]) == 0
    assert capsys.readouterr().out == "".join(f"def f{text}\n" for text in wanted)
    assert main([*words, "--adapter", "base"]) == 0
    assert capsys.readouterr().out == f"def f{wanted[2]}\n" * 3
    for wrong, message in (
        (["--adapter", "code"], "--adapter must be one of default, base, or NAME=FOLDER, got 'code'"),
        (["--adapter", "base", "--adapter", "default"], "--adapter must be given once, or for each of 3 prompts"),
        (["--adapter", f"default={tmp_path / 'code'}"], "must be another one than default, got 'default'"),
    ):
        assert main([*words, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_checkpoints_hold_the_adapter_alone_and_the_global_generator_stays(run: dict[str, Any]) -> None:
    base = sum(file.stat().st_size for file in (run["folder"] / "base").glob("*.safetensors"))
    assert (run["folder"] / "alone.ckpt").stat().st_size < base
    model, held = load_language_model(str(run["folder"] / "full.ckpt"))
    state = torch.get_rng_state()
    model.generate_text("a", max_new_tokens=2)
    assert torch.equal(state, torch.get_rng_state())
    assert held == "ema"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ckpt", "nowhere.ckpt"], "there is no file nowhere.ckpt"),
        (["--weights", "raw", "--ckpt", "alone.ckpt"], "holds only the weights 'ema'"),
        (["--chat"], "needs a tokenizer with a chat template"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top_k", "-1"], "top_k must be a whole number of at least 0, got -1"),
        (["--min_p", "2"], "min_p must be at least 0 and at most 1, got 2.0"),
        (["--repetition-penalty", "0"], "repetition_penalty must be above 0, got 0.0"),
        (["--stop", ""], "--stop must be a text that is not empty, got ''"),
        (["--batch_size", "0"], "batch_size must be a whole number of at least 1, got 0"),
        (["--prompts", "messages.jsonl"], "messages.jsonl:1 has messages: add --chat"),
        (["--max_new_tokens", "0"], "max_new_tokens must be at least 1 and below"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    run: dict[str, Any], more: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(run["folder"])
    Path("messages.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    assert main(["generate", "--ckpt", "full.ckpt", "--prompt", "x", "--device", "cpu", *more]) == 2
    captured = capsys.readouterr().err
    assert message in captured
    assert "Traceback" not in captured


def test_a_file_of_prompts_is_continued_with_every_filter_by_the_last_checkpoint_of_the_newest_run(
    run: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("def f\n\nreturn self.value\n")
    newest = new_folder(tmp_path / "runs")
    write_record(newest, {})
    point_latest(newest)
    for name in ("last", "step_9"):
        (newest / f"{name}.ckpt").symlink_to(run["folder"] / "full.ckpt")
    given = ["--ckpt", str(tmp_path / "runs"), "--prompts", str(tmp_path / "prompts.txt"), "--device", "cpu"]
    more = [
        "--top-k",
        "40",
        "--min-p",
        "0.01",
        "--repetition-penalty",
        "1.3",
        "--stop",
        "zz",
        "--stop",
        "e",
        "--batch-size",
    ]
    options: dict[str, Any] = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.3, "stop": ["zz", "e"]}
    model, _ = load_language_model(str(run["folder"] / "full.ckpt"))
    expected = model.generate_text(["def f", "return self.value"], max_new_tokens=12, **options)
    assert all("e" not in text[len("return self.value") :] for text in expected[1:])
    for size in ("1", "2"):
        assert main(["generate", *given, *more, size, "--max_new_tokens", "12"]) == 0
        captured = capsys.readouterr()
        assert captured.out == "".join(f"{text}\n" for text in expected)
        assert f"{newest / 'last.ckpt'}: ema weights" in captured.err
    plain = model.generate_text(["def f", "return self.value"], max_new_tokens=12)
    assert plain != expected


def test_without_a_prompt_it_asks_for_one(run: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--ckpt", str(run["folder"] / "full.ckpt")]) == 2
    assert "one of the arguments --prompt --prompts --chat is required" in capsys.readouterr().err
