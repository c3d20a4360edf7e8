"""``generate --chat`` without a prompt: what is remembered, what is shown when, and how it ends."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
from itertools import count
from typing import Any

import pytest
import torch

from lit_efficient import CausalLMConfig, LanguageModeling, LoRA
from lit_efficient.application import apply
from lit_efficient.commands.chat import Conversation
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer
from lit_efficient.errors import ConfigurationError
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.tasks.text_generation import as_chat, continuations, length_of
from tests.processes import start
from tests.tasks.test_text_generation import writer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
MIDST = "#in the midst of it#"
HOW = Sampling(1.0, 1.0, 30)


def _model(template: str | None = TEMPLATE) -> LanguageModeling:
    network, tokenizer = writer()
    tokenizer.chat_template = template
    model = LanguageModeling(CausalLMConfig(config_fields=network.config.to_dict()))
    model.tokenizer_state, model.network = pack_tokenizer(tokenizer), network
    return model


@pytest.fixture(scope="module")
def model() -> LanguageModeling:
    return _model()


class _Pieces(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def _held(
    model: Any, typed: str, monkeypatch: pytest.MonkeyPatch, most: int = 12, **options: Any
) -> tuple[Any, _Pieces]:
    given: dict[str, Any] = {"sampling": HOW, "max_new_tokens": most, "endings": [], "seed": 5} | options
    conversation, out = Conversation(model, **given), _Pieces()
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    monkeypatch.setattr(sys, "stdout", out)
    assert conversation.hold() == 0
    monkeypatch.undo()
    return conversation, out


def _answer(model: Any, turns: list[str], seed: int, most: int = 12, **more: Any) -> str:
    said = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    ways: dict[str, Any] = {"max_new_tokens": most, "sampling": HOW, "stop": set(), "device": torch.device("cpu")}
    chat = [as_chat(model.tokenizer, said)]
    return continuations(model.network, model.tokenizer, chat, seeds=[seed], special=False, **ways, **more)[0][0]


def test_each_answer_knows_what_was_said_until_it_is_reset(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, out = _held(model, "the cat\n\n  a dog \n/reset\na dog\n/quit\nnot this\n", monkeypatch)
    first = _answer(model, ["the cat"], 5)
    second = _answer(model, ["the cat", first, "a dog"], 6)
    assert out.getvalue() == f"{first}\n{second}\n{_answer(model, ['a dog'], 7)}\n"
    assert len([piece for piece in out.pieces if piece.strip()]) > 15  # shown while it is written


def test_another_adapter_answers_from_now_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _model()
    apply(model, [LoRA(rank=2)])
    for name, p in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    _, out = _held(model, "the cat\n/reset\n/adapter base\nthe cat\n/adapter nobody\n", monkeypatch)
    answers = [_answer(model, ["the cat"], 5), _answer(model, ["the cat"], 6, adapters=[None])]
    assert out.getvalue() == "".join(f"{answer}\n" for answer in answers)
    assert answers[1] != _answer(model, ["the cat"], 6)
    assert "(/adapter needs one of default, base)" in capsys.readouterr().err


def test_what_begins_an_ending_is_not_shown(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ((seed, _answer(model, ["on"], seed, most=30)) for seed in range(99))
    # Bytes that are no letters, which the next token may complete
    seed, whole = next((seed, text) for seed, text in answers if "\ufffd" in text[:-1])
    ending = whole[20:24]
    _, out = _held(model, "on\n", monkeypatch, most=30, endings=[ending], seed=seed)
    assert out.getvalue() == whole[: whole.index(ending)] + "\n"
    _, out = _held(model, "on", monkeypatch, most=30, seed=seed)
    assert out.getvalue() == whole + "\n"


def test_the_oldest_turns_are_dropped_with_a_line_that_says_so(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model.network.config, "max_position_embeddings", 60)
    conversation, _ = _held(model, "the cat\na dog\nthe mat\n" + "on " * 80 + "\n", monkeypatch)
    said = capsys.readouterr().err
    assert said.count("turns are dropped: the limit is 48 tokens") >= 1
    assert "(the message has" in said
    assert [turn["content"] for turn in conversation.turns][-2] == "the mat"
    assert len(conversation.turns) < 6
    assert conversation.turns[0]["role"] == "user"
    assert length_of(model.tokenizer, as_chat(model.tokenizer, conversation.turns[:-1])) <= 48


def test_a_model_without_a_template_holds_no_conversation() -> None:
    with pytest.raises(ConfigurationError, match="generate: --chat needs a tokenizer with a chat template"):
        Conversation(_model(None), HOW, None, [], 0)


def _in_terminal(name: str) -> None:
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    model, calls = _model(), count()
    model.network.register_forward_hook(lambda *_: print(MIDST) if next(calls) % 100 == 20 else None)
    sys.exit(Conversation(model, HOW, 1500, [], 0).hold())


def test_ctrl_c_stops_an_answer_and_twice_the_program() -> None:
    ours, theirs = pty.openpty()
    process = start(_in_terminal, os.ttyname(theirs))

    def until(text: str) -> str:
        found = ""
        while text not in found:
            assert select.select([ours], [], [], 120)[0], found  # a child that has failed says no more
            found += os.read(ours, 4096).decode(errors="replace")
        return found

    assert "/reset clears" in until("> ")
    os.write(ours, b"the cat\n")
    until(MIDST)  # of an answer of 1500 tokens
    os.write(ours, b"\x03")
    until("(stopped; press Ctrl-C again to end)")
    os.write(ours, b"a dog\n")
    until(MIDST)
    os.write(ours, b"\x03")
    until("(stopped; press Ctrl-C again to end)")
    for _ in range(20):  # Python loses one that comes while a finaliser runs
        os.write(ours, b"\x03")
        process.join(5)
        if process.exitcode is not None:
            break
    assert process.exitcode == 130
    os.close(ours)
    os.close(theirs)
