"""The toy task on the command line: a run, and what must be refused."""

from pathlib import Path

from lit_efficient.__main__ import main
from tests.support_cli import ToyData

OVERLAYS = Path(__file__).parent.parent.parent / "configs"
ALLOW = ["--allow-import", "tests"]
STEPS = 8  # 8 rows, 2 a batch, 2 epochs

BASE = {
    "model": {"class_path": "tests.support_cli.ToyModel"},
    "data": {"class_path": "tests.support_cli.ToyData"},
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "callbacks": [{"class_path": "tests.support_cli.Recorder", "init_args": {"tag": "base"}}],
    },
}


def fit(*arguments: str) -> int:
    """Run ``fit`` on the toy task; return the exit code."""
    return main(["fit", *ALLOW, "-c", "base.yaml", *arguments])


def refused(capsys, *arguments: str, command: str = "fit", allow: tuple[str, ...] = tuple(ALLOW)) -> str:
    """Run what must be refused; return what it says."""
    capsys.readouterr()
    before = sorted(Path.cwd().rglob("*"))
    assert main([command, *allow, "-c", "base.yaml", *arguments]) == 2
    text = capsys.readouterr().err
    said = text[text.index("error: ") :]
    assert len(said.splitlines()) <= 10
    assert "Traceback" not in text
    assert "usage" not in text
    assert ToyData.touched == 0
    assert sorted(Path.cwd().rglob("*")) == before
    return said
