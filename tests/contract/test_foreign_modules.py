"""Modules as other people write them: lazy layers, and fitted modules that are pickled, copied and saved whole."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient.errors import ConfigurationError
from tests.contract.table import CASES, make_all, network_of
from tests.support import Toy, assert_equal, data, trainer, weights

# These neither read nor change the network.
IGNORE_SHAPES = {"DataLoaderTuner", "DevicePrefetcher", "ExactResume", "FastMatmul", "GradientNoiseScale"} | {
    "OptimizerSchedule"
}


@functools.cache
def _lazy(network: type[nn.Module]) -> type[nn.Module]:
    class Lazy(network):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.Sequential(nn.LazyConv1d(2, 1), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(1))

        def forward(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
            image = nn.functional.pad(x, (0, 16 - x.shape[-1]))[:, None]
            return super().forward(x + self.lazy(image), **arguments)

    return Lazy


@pytest.mark.turns(8)
@pytest.mark.parametrize("name", sorted(CASES))
def test_lazy_layers_are_refused_before_training_or_initialised_as_plain_lightning_does(
    name: str, tmp_path: Path
) -> None:
    module = Toy(network=_lazy(network_of(name)))
    run = trainer(make_all(name), max_steps=2, default_root_dir=tmp_path, **CASES[name].trainer)
    if name in IGNORE_SHAPES:
        run.fit(module, data(), data())
        assert run.global_step == 2
        assert module.net.lazy[0].weight.shape == (2, 1, 1)
        return
    with pytest.raises(ConfigurationError, match=r"(have no shape before the first batch|ChunkedCrossEntropy)"):
        run.fit(module, data(), data())
    assert run.global_step == 0


class Failing(Toy):
    """The toy, in which an error ends the run."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise KeyError("the user's own")
        return super().training_step(batch, batch_idx)


def _twins(module: nn.Module) -> list[Any]:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return [pickle.loads(pickle.dumps(module)), copy.deepcopy(module), torch.load(file, weights_only=False)]


@pytest.mark.turns(8, always=["LoRA-fit", "EMA-fails"])
@pytest.mark.parametrize("how", ["fit", "fails", "validate"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_module_is_pickled_copied_and_saved_whole_after_a_run(name: str, how: str, tmp_path: Path) -> None:
    network = network_of(name)
    if "<locals>" in network.__qualname__:  # pickle needs a name under which to find the class
        network.__qualname__ = f"Local{id(network)}"
        setattr(sys.modules[network.__module__], network.__qualname__, network)
    module: Any = (Failing if how == "fails" else Toy)(network=network)
    run = trainer(make_all(name), max_steps=2, default_root_dir=tmp_path, **CASES[name].trainer)
    if how == "validate":
        run.validate(module, data(), verbose=False)
    elif how == "fit":
        run.fit(module, data(), data())
    else:
        with pytest.raises(KeyError, match="own"):
            run.fit(module, data(), data())
    saved: dict[str, Any] = {"state_dict": module.state_dict(), "callbacks": {}}
    module.on_save_checkpoint(saved)
    for twin in _twins(module):
        assert_equal(weights(twin), weights(module))
        again: dict[str, Any] = {"state_dict": twin.state_dict(), "callbacks": {}}
        twin.on_save_checkpoint(again)
        records = [one.get("lit_efficient", {}).get("transforms") for one in (again, saved)]
        assert records[0] == records[1]
