"""`restore` gives a module of anybody's the weights that its run was validated with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_efficient import EMA, IA3, CheckpointAverage, LoRA, PowerEMA, QuantizeBase, restore
from lit_efficient.errors import CheckpointError, ConfigurationError
from tests.support import Toy, data, trainer

RUNS: dict[str, Any] = {
    "plain": lambda folder: [],
    "adapters": lambda folder: [LoRA(rank=2, modules_to_save=["head"])],
    "adapters alone": lambda folder: [LoRA(rank=2, save_base=False)],
    "vectors": lambda folder: [IA3(targets=["up"], feedforward=["down"])],
    "quantised": lambda folder: [QuantizeBase(), LoRA(rank=2)],
    "average": lambda folder: [EMA(decay=0.5)],
    "average of adapters": lambda folder: [LoRA(rank=2), EMA(decay=0.5)],
    "power-function averages": lambda folder: [PowerEMA(dirpath=str(folder))],
    "checkpoints": lambda folder: [CheckpointAverage(last_k=3, every_n_steps=1)],
}


def built(where: str = "init") -> Toy:
    torch.manual_seed(3)
    return Toy(where)


@pytest.fixture(scope="module", params=[*RUNS])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, float]:
    """A run's name, its checkpoints' folder and the loss of its last validation."""
    folder = tmp_path_factory.mktemp("run")
    run = trainer(RUNS[request.param](folder), max_epochs=1)
    run.fit(built(), data(), data())
    run.save_checkpoint(folder / "whole.ckpt")
    run.save_checkpoint(folder / "light.ckpt", weights_only=True)
    return request.param, folder, float(run.callback_metrics["val/loss"])


def loss_of(module: Toy) -> float:
    run = trainer([])
    run.validate(module, data(), verbose=False)
    return float(run.callback_metrics["val/loss"])


@pytest.mark.parametrize("name", ["whole.ckpt", "light.ckpt"])
@pytest.mark.parametrize("where", ["init", "configure_model"])
def test_it_is_what_was_validated(finished: tuple[str, Path, float], name: str, where: str) -> None:
    _, folder, loss = finished
    module = built(where)
    assert restore(module, folder / name) is module
    assert not module.training
    assert loss_of(module) == loss


def test_raw_weights_are_those_of_the_file(finished: tuple[str, Path, float]) -> None:
    _, folder, _ = finished
    checkpoint = torch.load(folder / "whole.ckpt", weights_only=True)
    module = restore(built(), checkpoint, weights="raw")
    held = module.state_dict()
    assert checkpoint["state_dict"]
    assert all(torch.equal(held[name], tensor) for name, tensor in checkpoint["state_dict"].items())


def test_it_says_which_it_took(finished: tuple[str, Path, float], caplog: pytest.LogCaptureFixture) -> None:
    name, folder, _ = finished
    with caplog.at_level("INFO"):
        restore(built(), folder / "whole.ckpt")
    held = {"average": "'ema'", "average of adapters": "'ema'", "checkpoints": "'average'"}.get(name, "'raw'")
    assert caplog.messages[-1] == f"restore: Toy has the weights {held} of the checkpoint"


def test_a_flipped_bit_is_found(finished: tuple[str, Path, float], tmp_path: Path) -> None:
    _, folder, _ = finished
    damaged = bytearray((folder / "whole.ckpt").read_bytes())
    checkpoint = torch.load(folder / "whole.ckpt", weights_only=True)
    tensor = max(checkpoint["state_dict"].values(), key=torch.Tensor.numel)
    damaged[damaged.index(tensor.numpy().tobytes())] ^= 1
    (tmp_path / "damaged.ckpt").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="damaged"):
        restore(built(), tmp_path / "damaged.ckpt")


def test_a_word_that_names_no_weights_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"weights must be one of auto, average, raw, got 'ema'"):
        restore(built(), "none.ckpt", weights="ema")  # type: ignore[arg-type]
