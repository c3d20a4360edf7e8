"""EarlyStopping of the shipped configs: interrupted anywhere and resumed, a run stops where it would have stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lit_efficient import ExactResume
from lit_efficient.files import configs
from tests.support import Toy, assert_equal, data, trainer, weights

LOSSES = [3.0, 2.0, 2.5, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2, 2.3]  # of each half epoch; best at the fourth


class Scripted(Toy):
    """Its validation loss is a function of the step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", torch.tensor(LOSSES[self.trainer.global_step // 2 - 1]))


def early_stopping(name: str) -> EarlyStopping:
    tree = yaml.safe_load(Path(configs.find(name)).read_text())["trainer"]
    (entry,) = [one for one in tree.get("callbacks", []) + tree.get("callbacks+", []) if "Early" in one["class_path"]]
    return EarlyStopping(**entry["init_args"])


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("name", ["early_stopping", "llm/llama_3_1_8b_qlora"])
def test_a_resumed_run_stops_where_it_would_have_stopped(name: str, tmp_path: Path) -> None:
    def fit(ckpt_path: Path | None = None) -> tuple[Any, EarlyStopping]:
        stops = early_stopping(name)
        saves = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, monitor="val/loss", enable_version_counter=False)
        arguments = {"max_epochs": 6, "val_check_interval": 0.5, "enable_checkpointing": True}
        run = trainer([stops, saves, ExactResume(0)], **arguments)
        run.fit(Scripted(), data(), data(), ckpt_path=ckpt_path)
        return run, stops

    run, stops = fit()
    best = LOSSES.index(min(LOSSES)) + 1
    assert run.global_step == 2 * (best + stops.patience)
    saved = sorted(tmp_path.glob("step=*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    for path in saved[1:-1:2]:
        resumed, again = fit(path)
        assert resumed.global_step == run.global_step
        assert again.state_dict() == stops.state_dict()
        assert_equal(weights(run.lightning_module), weights(resumed.lightning_module))
