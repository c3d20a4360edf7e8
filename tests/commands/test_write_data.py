"""``write-data``: the same file however often it was interrupted, readable as training data."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from lit_efficient import CausalLMConfig, ConfigurationError, GPTConfig, LanguageModeling
from lit_efficient.__main__ import main
from lit_efficient.commands.write_data import write_rows
from lit_efficient.data.text.chat_formats import recognise
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer
from lit_efficient.models.libraries.causal_lm import build
from tests.models.libraries.test_causal_lm import SMALL
from tests.processes import run_ranks, start_ranks

PROMPTS = ["def f", "class Reader:", "import os", "x = 1", "", "for i in range"]
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher that ends its text at one of ten tokens, its prompts, and one as a checkpoint."""
    folder = tmp_path_factory.mktemp("write_data")
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    raw = Tokenizer(BPE(letters, []))
    raw.pre_tokenizer, raw.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=None)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    torch.manual_seed(0)
    fields = {**SMALL, "vocab_size": 256, "eos_token_id": list(range(0, 256, 10))}
    build(CausalLMConfig(config_fields={"model_type": "llama", **fields})).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    (folder / "turns.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n" + json.dumps({"prompt": "Who?"}) + "\n")
    (folder / "lines.txt").write_text("def f\n\n  \nimport os\n")
    ours = LanguageModeling(GPTConfig(vocab_size=256, dim=16, depth=1, num_heads=2, max_length=64))
    ours.tokenizer_state = pack_tokenizer(tokenizer)
    ours.configure_model()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(ours)
    trainer.save_checkpoint(folder / "ours.ckpt")
    return folder


def write(home: Path, output: Path, *more: str, prompts: str = "prompts.jsonl") -> int:
    teacher = [] if "--ckpt" in more else ["--model", str(home / "teacher")]
    options = ["--max_new_tokens", "16", "--device", "cpu", "--output", str(output)]
    return main(["write-data", *teacher, "--prompts", str(home / prompts), *options, *more])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_an_interrupted_run_goes_on_to_the_same_file(home: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    assert write(home, tmp_path / "whole.jsonl", "--keep_cut") == 0
    assert torch.equal(state, torch.get_rng_state())
    whole = (tmp_path / "whole.jsonl").read_bytes()
    assert [row["prompt"] for row in rows(tmp_path / "whole.jsonl")] == PROMPTS
    lines = whole.splitlines(keepends=True)
    for left in (b"", lines[0], b"".join(lines[:4]) + lines[4][:7]):  # killed early, between two lines, within one
        (tmp_path / "whole.jsonl").write_bytes(left)
        assert write(home, tmp_path / "whole.jsonl", "--keep_cut") == 0
        assert (tmp_path / "whole.jsonl").read_bytes() == whole
    assert write(home, tmp_path / "seed.jsonl", "--keep_cut", "--seed", "1") == 0
    ours, other = rows(tmp_path / "whole.jsonl"), rows(tmp_path / "seed.jsonl")
    assert sum(a["completion"] != b["completion"] for a, b in zip(ours, other)) >= 5


def in_ranks(home: Path, output: Path) -> None:
    assert write(home, output, "--keep_cut", prompts="many.jsonl") == 0


@pytest.mark.turns(6, family="slow")
def test_two_processes_write_the_file_of_one_and_go_on_with_it(home: Path, tmp_path: Path) -> None:
    many = [json.dumps({"prompt": f"{prompt} {number}"}) + "\n" for number in range(3) for prompt in PROMPTS]
    (home / "many.jsonl").write_text("".join(many))
    in_ranks(home, tmp_path / "one.jsonl")
    whole, both = (tmp_path / "one.jsonl").read_bytes(), tmp_path / "both.jsonl"
    said = run_ranks(in_ranks, tmp_path, home, both)
    assert both.read_bytes() == whole
    assert said.count("18 rows added") == 1
    both.write_bytes(b"".join(whole.splitlines(keepends=True)[:4])[:-3])  # killed within the fourth line
    assert "15 rows added from prompt 3" in run_ranks(in_ranks, tmp_path, home, both)
    assert both.read_bytes() == whole


@pytest.mark.parametrize("start", [1, 8, 13])
def test_each_prompt_is_answered_in_the_batch_of_an_undisturbed_run(start: int, tmp_path: Path) -> None:
    """What is answered together decides how a row is rounded, and in bfloat16 which token is drawn."""

    def answer(first: int, few: Any) -> list[tuple[dict[str, Any], bool]]:
        return [({"first": first, "beside": len(few)}, number % 3 > 0) for number in range(first, first + len(few))]

    prompts = [str(number) for number in range(19)]
    assert write_rows(tmp_path / "whole", prompts, 0, answer, False) == (12, 7)
    whole = (tmp_path / "whole").read_text().splitlines(keepends=True)
    before = [line for line in whole if json.loads(line)["index"] < start]
    (tmp_path / "on").write_text("".join(before))
    assert write_rows(tmp_path / "on", prompts, start, answer, False)[0] == 12 - len(before)
    assert (tmp_path / "on").read_text().splitlines(keepends=True) == whole


def dies_in_the_middle(home: Path, output: Path) -> None:
    if os.environ["RANK"] == "1":
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        LanguageModeling.continuations = lambda *_, **__: kill()  # type: ignore[method-assign]
    sys.exit(write(home, output, "--ckpt", str(home / "ours.ckpt"), prompts="many.jsonl"))


@pytest.mark.turns(6, family="slow")
def test_where_a_process_is_killed_the_other_ends_with_a_sentence(home: Path, tmp_path: Path) -> None:
    (home / "many.jsonl").write_text("".join(json.dumps({"prompt": f"x {number}"}) + "\n" for number in range(18)))
    ranks, logs = start_ranks(dies_in_the_middle, tmp_path, home, tmp_path / "out.jsonl")
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [2, -signal.SIGKILL]
    said = logs[0].read_text()
    assert "process 1 has failed (its connection ended without a message, as that of a killed process)" in said
    assert "Traceback" not in said


def test_answers_that_were_cut_are_left_out(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write(home, tmp_path / "all.jsonl", "--keep_cut") == 0
    assert write(home, tmp_path / "some.jsonl") == 0
    every, some = rows(tmp_path / "all.jsonl"), rows(tmp_path / "some.jsonl")
    assert 0 < len(some) < len(every)
    assert [row for row in every if row["index"] in {row["index"] for row in some}] == some
    assert f"{len(some)} rows added from prompt 0 on; {len(every) - len(some)} answers reached max_new_tokens" in (
        capsys.readouterr().err
    )
    left_out = [row for row in every if row not in some]
    assert all(len(row["completion"].encode()) >= 16 for row in left_out)


def test_conversations_are_answered_in_the_chat_template(home: Path, tmp_path: Path) -> None:
    more = ("--keep_cut", "--format", "messages", "--temperature", "0")
    assert write(home, tmp_path / "a.jsonl", *more, prompts="turns.jsonl") == 0
    found = rows(tmp_path / "a.jsonl")
    assert [turn["role"] for turn in found[0]["messages"]] == ["system", "user", "assistant"]
    assert found[1]["messages"][0] == {"role": "user", "content": "Who?"}
    assert recognise(found, "a")[0] == "messages"
    rendered = "system: Be brief.\nuser: Why?\nassistant: "
    (tmp_path / "rendered.jsonl").write_text(json.dumps({"prompt": rendered}) + "\n")
    assert write(home, tmp_path / "b.jsonl", *more[:1], *more[3:], prompts=str(tmp_path / "rendered.jsonl")) == 0
    plain = rows(tmp_path / "b.jsonl")
    assert recognise(plain, "b")[0] == "completion"
    assert plain[0]["completion"] == found[0]["messages"][-1]["content"]


def test_a_checkpoint_of_ours_writes_too(home: Path, tmp_path: Path) -> None:
    more = ("--ckpt", str(home / "ours.ckpt"), "--keep_cut")
    assert write(home, tmp_path / "a.jsonl", *more, prompts="lines.txt") == 0
    assert [row["prompt"] for row in rows(tmp_path / "a.jsonl")] == ["def f", "import os"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--temperature", "0.5"], "was started with temperature 0.8, and now it is 0.5. Delete both files"),
        (["--prompts", "lines.txt"], "has the answer to another prompt 1"),
        (["--prompts", "turns.jsonl"], "turns.jsonl:1 has messages: add --format messages"),
        (["--prompts", "bad.jsonl"], 'bad.jsonl:2 must have a text in "prompt"'),
        (["--prompts", "empty.txt"], "empty.txt holds no prompts"),
        (["--output", "foreign.jsonl"], "exists and was not written by this command"),
        (["--top_p", "2"], "top_p must be above 0 and at most 1, got 2.0"),
        (["--output", "new.jsonl", "--max_new_tokens", "0"], "max_new_tokens must be at least 1 and below"),
        (["--output", "new2.jsonl", "--model", "nowhere"], "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    home: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if not Path("a.jsonl").exists():
        assert write(home, Path("a.jsonl"), "--keep_cut") == 0
        Path("bad.jsonl").write_text('{"prompt": "x"}\n{"text": "y"}\n')
        Path("empty.txt").write_text("\n")
        Path("foreign.jsonl").write_text("{}\n")
    assert write(home, Path("a.jsonl"), "--keep_cut", *more) == 2
    captured = capsys.readouterr().err
    assert message in captured
    assert "Traceback" not in captured


def test_a_line_break_inside_a_text_begins_no_prompt(tmp_path: Path) -> None:
    from lit_efficient.commands.write_data import read_prompts

    rows = [{"prompt": "a\u2028b"}, {"prompt": "c\x85d"}]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    assert read_prompts(tmp_path / "p.jsonl", "completion") == ["a\u2028b", "c\x85d"]
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="is not UTF-8"):
        read_prompts(tmp_path / "p.txt", "completion")
