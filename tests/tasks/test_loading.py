"""A checkpoint names its task; only public tasks of this package are built from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_efficient import GPTConfig, LanguageModeling, RewardModeling
from lit_efficient.errors import CheckpointError
from lit_efficient.files.checkpoints import write
from lit_efficient.tasks.loading import load_language_model
from tests.support import assert_equal
from tests.tasks.preference_kit import loader, pairs, trainer

TOY = GPTConfig(97, dim=32, depth=1, num_heads=2, max_length=16)


class Own(LanguageModeling):
    """Somebody's task, which has an argument that ours has not."""

    def __init__(self, model: Any, flavour: str) -> None:
        super().__init__(model)
        self.save_hyperparameters({"flavour": flavour})


def trained(task: Any, path: Path) -> Any:
    runner = trainer(default_root_dir=path.parent, max_steps=2)
    runner.fit(task, loader(), loader())
    runner.save_checkpoint(path)
    return task.eval()


def test_a_reward_model_comes_back_as_one(tmp_path: Path) -> None:
    task = trained(RewardModeling(TOY, centering=0.5, learning_rate=1e-2), tmp_path / "a.ckpt")
    loaded, held = load_language_model(str(tmp_path / "a.ckpt"))
    assert type(loaded) is RewardModeling
    assert (held, loaded.centering) == ("raw", 0.5)
    ids = pairs(3)["chosen_input_ids"]
    assert torch.equal(loaded(ids), task(ids))
    assert task(ids).abs().min() > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os.system", "which this package does not have"),
        ("SafeCheckpointIO", "which this package does not have"),
        (["LanguageModeling"], "which this package does not have"),
        ("Autoencoding", "which is not a language model"),
        ("DistillationLoss", "which is not a language model"),
    ],
)
def test_a_checkpoint_chooses_no_code(name: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(path, {"state_dict": {}, "hyper_parameters": {}, "language_modeling": {"task": name}})
    with pytest.raises(CheckpointError, match=message):
        load_language_model(str(path))


def test_a_task_derived_from_ours_is_loaded_as_ours(tmp_path: Path) -> None:
    (task := Own(TOY, "mint")).configure_model()
    runner = trainer(default_root_dir=tmp_path)
    runner.strategy.connect(task)
    runner.save_checkpoint(tmp_path / "a.ckpt")
    loaded, _ = load_language_model(str(tmp_path / "a.ckpt"))
    assert type(loaded) is LanguageModeling
    assert_equal(loaded.state_dict(), task.state_dict())
