"""Callbacks of a run of the command line cost few calls of Python in a step, whatever the load of the machine."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import ClassVar

import yaml
from lightning.pytorch import Callback, Trainer

from lit_efficient.cli import command_line
from tests.cli.toy_runs import fit
from tests.support_cli import ToyData, ToyModel

BOUND = 250  # 180 were counted, and 1,560 without `skip_empty_hooks`
PARTS = {
    "trainer": {
        "max_epochs": 1,
        "gradient_clip_val": 1.0,
        "limit_val_batches": 0,
        "logger": "CSVLogger",
        "enable_checkpointing": True,
        "enable_progress_bar": True,
        "callbacks": [
            *({"class_path": name} for name in ("FastMatmul", "ExactResume", "ModelCheckpoint")),
            {"class_path": "ThroughputBar", "init_args": {"lines": 1}},
            {"class_path": "tests.cli.test_step_cost.StepCalls"},
        ],
    },
    "data": {"class_path": "tests.support_cli.ToyData", "init_args": {"rows": 24}},
}


class StepCalls(Callback):
    """Counts the calls of Python functions in four steps."""

    calls: ClassVar[int] = 0

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step == 4:
            StepCalls.calls = 0
            sys.setprofile(self._note)
        elif trainer.global_step == 8:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        StepCalls.calls += event == "call"


def calls_in_a_step(run: Callable[[], object]) -> float:
    try:
        run()
    finally:
        sys.setprofile(None)
    return StepCalls.calls / 4


def bare() -> None:
    """Fit with a Trainer that has no other callback."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0}
    quiet |= {"enable_model_summary": False, "max_epochs": 1}
    made = Trainer(accelerator="cpu", gradient_clip_val=1.0, callbacks=[StepCalls()], **quiet)
    made.fit(ToyModel(), datamodule=ToyData(rows=24))


def with_all_parts() -> None:
    """Fit with all parts that a run of the command line has on a CPU."""
    Path("parts.yaml").write_text(yaml.safe_dump(PARTS))
    assert fit("-c", "parts.yaml") == 0


def test_callbacks_cost_few_calls(monkeypatch):
    least = calls_in_a_step(bare)
    assert calls_in_a_step(with_all_parts) - least <= BOUND
    monkeypatch.setattr(command_line, "skip_empty_hooks", lambda trainer: None)
    assert calls_in_a_step(with_all_parts) - least > 4 * BOUND
