import json
import re
import sys
from pathlib import Path

import pytest
import torch

from lit_efficient.__main__ import main
from lit_efficient.commands.preview import figures, kinds_of, paint, rendered
from lit_efficient.errors import ConfigurationError
from tests.data.test_language_data import write_rows
from tests.data.text.chat_kit import CHATML, UNENDED, tokenizer

IGNORE = -100
PACKED = {
    "input_ids": torch.tensor([[1, 5, 6, 2, 1, 7, 2, 0, 0], [1, 5, 6, 7, 2, 1, 6, 7, 2]]),
    "labels": torch.tensor([[-100, -100, 6, 2, -100, 7, 2, -100, -100], [-100, -100, -100, 7, 2, -100, -100, 7, -100]]),
    "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 0, 1, 2, 3]]),
}


def test_tokens_of_a_packed_batch_are_told_apart() -> None:
    kinds = kinds_of(PACKED)
    assert kinds.trained.int().tolist() == [[0, 0, 1, 1, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0, 0, 1, 0]]
    assert kinds.padded.int().tolist() == [[0] * 7 + [1, 1], [0] * 9]
    assert kinds.starts.int().tolist() == [[1, 0, 0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1, 0, 0, 0]]
    numbers = figures(PACKED, kinds, stop_ids=[2])
    assert numbers == {
        **{"tokens": 18, "trained": 7, "masked": 9, "padded": 2, "documents": 4},
        **{"fill": 1 - 2 / 18, "stretches": 4, "ends": 3},
    }


def test_tokens_of_a_padded_batch_and_of_shifted_labels() -> None:
    padded = {name: PACKED[name] for name in ("input_ids", "labels")}
    padded["attention_mask"] = torch.tensor([[1] * 7 + [0, 0], [1] * 9])
    assert kinds_of(padded).padded.sum() == 2
    shifted = {"input_ids": torch.tensor([[4, 5, 6]]), "labels": torch.tensor([[5, IGNORE, 7]])}
    assert kinds_of(shifted).trained.tolist() == [[False, True, False]]
    with pytest.raises(ConfigurationError, match="neither the tokens nor the next tokens"):
        kinds_of({"input_ids": torch.tensor([[4, 5, 6]]), "labels": torch.tensor([[9, 9, 9]])})


def test_a_text_cannot_send_commands_to_the_terminal() -> None:
    made = tokenizer()
    ids = torch.tensor([made.encode("a\x1b[31mb\n\x07c")])
    lines = list(rendered({"input_ids": ids}, kinds_of({"input_ids": ids, "labels": ids}), made, False, 100))
    assert lines[1] == "«a\\x1b[31mb\n\\x07c»"
    assert paint("x\ny", "trained", True) == "\033[1;32mx\033[0m\n\033[1;32my\033[0m"


def test_a_control_token_and_a_text_that_spells_it_have_different_ids() -> None:
    made = tokenizer()
    text = "<|im_start|>user"
    for split, expected in ((False, f"ids      [{made.convert_tokens_to_ids('<|im_start|>')}] "), (True, "ids      ")):
        ids = torch.tensor([made(text, split_special_tokens=split)["input_ids"]])
        lines = list(rendered({"input_ids": ids}, kinds_of({"input_ids": ids, "labels": ids}), made, False, 100))
        assert lines[1] == f"«{text}»"
        assert lines[2].startswith(expected)
        assert lines[2].endswith(f"({ids.numel()} ids, {int(not split)} control tokens in [])")


def config(tmp_path: Path, template: str = CHATML, **changes) -> str:
    tokenizer(template).save_pretrained(str(tmp_path / "tok"))
    write_rows(tmp_path / "data.jsonl")
    arguments = {"train": str(tmp_path / "data.jsonl"), "tokenizer": str(tmp_path / "tok"), "max_length": 64}
    arguments |= {"batch_size": 2, "cache_dir": str(tmp_path / "cache"), **changes}
    tree = {
        "trainer": {"default_root_dir": str(tmp_path / "run"), "callbacks": [{"class_path": "ThroughputBar"}]},
        "model": {"class_path": "LanguageModeling"},
        "data": {"class_path": "LanguageData", "init_args": arguments},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    return str(tmp_path / "config.yaml")


def test_a_config_is_previewed_without_model_trainer_or_run(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lit_efficient.tasks.language_modeling import LanguageModeling

    def refuse(*args, **kwargs):
        raise AssertionError("the model was built")

    path = config(tmp_path)
    monkeypatch.setattr(LanguageModeling, "configure_model", refuse)
    assert main(["preview", "--config", path, "--rows", "1", "--data.batch_size", "1"]) == 0
    text = capsys.readouterr().out
    assert "\033" not in text  # not a terminal
    learned = re.findall("«(.*?)»", text.partition("legend")[0], re.DOTALL)
    assert learned
    assert all(re.fullmatch(r"(w\d+ ?)+<\|im_end\|>", piece) for piece in learned)
    assert text.count("--- document") == len(learned) - 1
    assert "user\nSay" in text
    start = tokenizer().convert_tokens_to_ids("<|im_start|>")
    assert text.count(f"ids      [{start}] ") == len(learned)
    assert re.search(r"batch    1 x 64 tokens: \d+ trained \(\d+\.\d%\), \d+ masked .*, \d+ padded", text)
    assert f"{len(learned)} of {len(learned)} runs of trained tokens end with a stop token" in text
    assert "packed into rows that are " in text
    assert "nothing truncated" in text
    assert "the end-of-turn token <|im_end|> is trained in every turn" in text
    assert not (tmp_path / "run").exists()


def test_colours_on_a_terminal_unless_they_are_not_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["preview", "-c", path]) == 0
    text = capsys.readouterr().out
    assert "\033[1;32mw" in text  # trained
    assert "\033[2m<|im_start|>user" in text  # masked
    assert "\033[1;36m--- document 2" in text
    assert "«" not in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["preview", "-c", path]) == 0
    assert "\033" not in capsys.readouterr().out


def test_an_end_that_is_not_learned_and_rows_that_are_cut_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = config(tmp_path, UNENDED, chat={"untrained_end": "warn"}, pack=False, max_length=32)
    with pytest.warns(UserWarning, match="may never stop"):
        assert main(["preview", "-c", path, "--split", "val"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"end-of-turn token <\|im_end\|> is trained in 0 of \d+ turns: the model may never stop", text)
    assert main(["preview", "-c", config(tmp_path, UNENDED)]) == 2
    assert "a model trained on it would never stop" in capsys.readouterr().err
    assert main(["preview", "-c", config(tmp_path, max_length=32)]) == 0
    assert re.search(r"\d+ rows truncated \(\d+\.\d%\), \d+ tokens lost", capsys.readouterr().out)


def test_windows_whose_labels_are_already_shifted_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As the first task of the README has them: every token but a window's first is predicted by the one before."""
    (tmp_path / "text.py").write_text("".join(f"value_{i} = {i * i}\n" for i in range(400)))
    files = {"paths": [str(tmp_path / "text.py")]}
    arguments = {"vocab_size": 300, "sequence_length": 16, "batch_size": 2, "cache_dir": str(tmp_path / "cache")}
    tree = {
        "model": {"class_path": "LanguageModeling"},
        "data": {"class_path": "PythonCorpus", "init_args": {**arguments, "files": files}},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(tree))
    assert main(["preview", "-c", str(tmp_path / "config.yaml")]) == 0
    text = capsys.readouterr().out
    assert "batch    2 x 16 tokens: 30 trained (93.8%), 2 masked (6.2%), 0 padded (0.0%)" in text
    same = torch.tensor([[5, 5, 5]])  # shifted labels that look as if they were not
    assert kinds_of({"input_ids": same, "shift_labels": same}).trained.tolist() == [[False, True, True]]


def test_mistakes_are_sentences(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["preview", "-c", config(tmp_path, max_length=1)]) == 2
    assert "max_length must be a whole number of at least 2, got 1" in capsys.readouterr().err
    assert main(["preview", "-c", str(tmp_path / "none.yaml")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["preview", "-c", config(tmp_path), "--data.max_lenght", "3"]) == 2
    assert "max_lenght" in capsys.readouterr().err
