"""Run a shipped config small, then every command that it prints at its end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_efficient.__main__ import main
from tests.support_cli import Parts

CONFIGS = Path(__file__).parents[2] / "configs"


def small(path: Path, **init_args: dict[str, Any]) -> str:
    """A copy in the working folder: two steps, one validation, short samples, nothing compiled, and other arguments."""
    written = yaml.safe_load(path.read_text("utf-8"))
    trainer = written["trainer"]
    trainer.pop("max_epochs", None)
    trainer |= {"max_steps": 2, "limit_train_batches": 4, "limit_val_batches": 1, "precision": "32-true"}
    trainer |= {"val_check_interval": 2, "check_val_every_n_epoch": None, "accumulate_grad_batches": 1}
    trainer |= {"enable_model_summary": False}
    trainer["callbacks"] = [entry for entry in trainer["callbacks"] if entry["class_path"] != "Compile"]
    sizes = {"SampleText": {"max_new_tokens": 2}, "SampleImages": {"columns": 2, "rows": 1}}
    sizes["PowerEMA"] = {"snapshot_every_n_steps": 1}
    for entry in trainer["callbacks"]:
        entry.setdefault("init_args", {}).update(sizes.get(entry["class_path"], {}))
    for key, arguments in init_args.items():
        merge(written[key].setdefault("init_args", {}), arguments)
    Path(path.name).write_text(yaml.safe_dump(written))
    return path.name


def made(path: Path) -> tuple[dict[str, Any], Any, set[str]]:
    """What a config says, whose header tells how to run it; the parts that are made of it; their callbacks' names."""
    text = path.read_text("utf-8")
    written, parts = yaml.safe_load(text), Parts(args=["fit", "-c", str(path)])
    names = {type(callback).__name__ for callback in parts.trainer.callbacks}
    assert {entry["class_path"] for entry in written["trainer"]["callbacks"]} <= names
    assert type(parts.model).__name__ == written["model"]["class_path"]
    header = text[: text.index("seed_everything")]
    assert f"python -m lit_efficient fit -c {path.parent.name}/{path.stem}" in header
    return written, parts, names


def merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def follow(printed: str, verb: str) -> Path:
    """Run the command with a verb that a fit has printed at its end, and return the path of its output."""
    lines = printed[printed.index("Next:") :].splitlines()
    (command,) = (shlex.split(line)[3:] for line in lines if line.startswith(f"  python -m lit_efficient {verb} "))
    assert main(command) == 0
    return Path(command[command.index("--output") + 1])


def fit_and_follow(capsys: pytest.CaptureFixture[str], config: str, *more: str) -> list[str]:
    """Fit, type each line below "Next:", evaluate, and resume; return the commands that were printed."""
    capsys.readouterr()
    assert main(["fit", "-c", config, *more]) == 0
    printed = capsys.readouterr().out
    lines = printed[printed.index("Next:") :].splitlines()
    commands = [shlex.split(line)[3:] for line in lines if line.startswith("  python -m lit_efficient ")]
    assert len(commands) <= 3
    run = Path(commands[-1][-1])  # report RUN
    assert run.name == "latest"
    checkpoint = run.resolve() / "last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2
    again = ["-c", str(run / "config.yaml"), "--ckpt_path", str(run / "last.ckpt")]
    evaluated = [] if "validate" in {command[0] for command in commands} else [["validate", *again]]
    for command in [*commands, *evaluated, ["fit", *again, "--trainer.max_steps", "4"]]:
        assert main(command) == 0, command
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 4
    assert (checkpoint.parent.parent / "latest").resolve() == checkpoint.parent.resolve()
    assert any((checkpoint.parent / "export_2").iterdir())
    return [command[0] for command in commands]
