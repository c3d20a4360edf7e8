"""The scripts for the shells are run by the shells; what they offer is what the commands take."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lit_efficient import PUBLIC
from lit_efficient.__main__ import COMMANDS, SUBCOMMANDS, main
from lit_efficient.commands import completion
from lit_efficient.files import configs

CALLS = {
    "bash": "",
    "zsh": "emulate -L sh; setopt kshglob noshglob braceexpand;",  # as bashcompinit does before it calls
}
TYPED = [  # what stands there, and what is offered
    (["fi"], ["fit"]),
    (["fit", "-c", "langu"], ["language_model"]),
    (["fit", "-c", "tasks", "--config", "llm/q"], ["llm/qlora"]),
    (["fit", "--config=autoe"], ["autoencoder"]),
    (["fit", "--without", "EM"], ["EMA"]),
    (["fit", "--trainer.max_s"], ["--trainer.max_steps"]),
    (["fit", "--model", "LanguageM"], ["LanguageModeling"]),
    (["write-data", "--model", "LanguageM"], []),
    (["check", "--optimizer", "Mu"], ["MuonAdamW"]),
    (["plan", "--optimizer", "Mu"], ["MuonAdamW"]),
    (["plan", "--device_"], ["--device_memory"]),
    (["techniques", "LoR"], ["LoRA"]),
    (["techniques", "--for", ""], ["memory", "oom", "quality", "safety", "speed"]),
    (["techniques", "--matr"], ["--matrix"]),
    (["copy", "llm/q"], ["llm/qlora"]),
    (["completion", "z"], ["zsh"]),
    (["help", "ex"], ["export"]),
    (["export", "--form"], ["--format"]),
    (["fit", "-c", "my"], ["my own.yaml"]),
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my own.yaml").touch()


def offered(shell: str, tmp_path: Path) -> list[list[str]]:
    """What a shell offers for each line of TYPED."""
    script = tmp_path / f"script.{shell}"
    script.write_text(getattr(completion, shell)() + "\n")
    if shell == "fish":
        lines = [" ".join(["lit-efficient", *words]) for words, _ in TYPED]
        calls = [f"complete -C '{line}'; echo ---" for line in lines]
        done = subprocess.run(
            ["fish", "-N", "-c", "\n".join([f"source {script}", *calls])], capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        parts = done.stdout.split("---\n")[:-1]
        return [[line.partition("\t")[0].rpartition("=")[2] for line in part.splitlines()] for part in parts]
    begin = "autoload -U compinit && compinit -u -D\n" if shell == "zsh" else ""
    call = f'{CALLS[shell]} COMP_WORDS=(lit-efficient "$@"); COMP_CWORD=$#; COMPREPLY=(); _lit_efficient'
    code = f'{begin}. {script}\nasked() {{ {call}; printf "%s\\n" "${{COMPREPLY[@]}}"; echo ---; }}\n'
    code += "\n".join("asked " + " ".join(f"'{word}'" for word in words) for words, _ in TYPED)
    start = {"bash": ["bash", "--norc"], "zsh": ["zsh", "-f"]}[shell]
    done = subprocess.run([*start, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    parts = done.stdout.split("---\n")[:-1]
    return [[line.rpartition("=")[2] for line in part.splitlines() if line] for part in parts]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_shell_offers_what_may_follow(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    for (words, wanted), words_offered in zip(TYPED, offered(shell, tmp_path), strict=True):
        begin = words[-1].rpartition("=")[2] if shell == "zsh" else ""  # zsh leaves out others by itself
        assert sorted(word for word in words_offered if word.startswith(begin)) == wanted, words


def test_options_are_those_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    known = completion.options()
    assert {*known, "help"} >= {*SUBCOMMANDS}
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        told = set(re.findall(r"^  (?:-\w(?: \w+)?, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE))
        assert told <= {*known[command]}, command
    assert main(["fit", "--help-all"]) == 0
    told = set(re.findall(r"^  (--[\w.]+)", capsys.readouterr().out, re.MULTILINE)) - {"--trainer", "--weights_only"}
    assert {name for name in told if not name.endswith(".help")} <= {*known["fit"]}


def test_names_are_those_that_there_are() -> None:
    known = completion.values()
    assert known["-c"] == list(configs.known())
    assert all(name in PUBLIC for option in ("--without", "--model", "--data", "--optimizer") for name in known[option])
    assert not {"Samples", "LanguageChat"} & {*known["--model"], *known["--data"]}  # blocks of arguments
