"""Batches as other people write them: dataclasses, dictionaries with attributes, graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from lit_efficient import BatchRamp
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.metering import samples_of
from lit_efficient.mechanisms.order.piecewise_loader import pieces_of
from tests.contract.table import CASES, make_all, network_of
from tests.support import WIDTH, Net, Toy, assert_equal, data, trainer, weights


@dataclasses.dataclass
class Record:
    rate: float
    x: torch.Tensor


class Pair(NamedTuple):
    name: str
    x: torch.Tensor


class Attributes(dict[str, Any]):
    """A dictionary whose items are attributes: any other attribute is a KeyError."""

    __getattr__ = dict.__getitem__


class Graph:
    """A graph, as in PyTorch Geometric: tensors in attributes."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: torch.device, non_blocking: bool = False) -> Graph:
        return Graph(self.x.to(device))


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "Record": lambda x: Record(0.5, x),
    "Pair": lambda x: Pair("a", x),
    "Attributes": lambda x: Attributes(scale=torch.tensor(2.0), x=x),
    "Graph": Graph,
}
# These need the rows of a batch.
READ_ROWS = {"GradientNoiseScale", "SelectiveBackprop"}
# These read the first item of a tuple here.
READ_TUPLES = {"HiddenAlignment", "LatentAlignment", "ResolutionRamp", "SequenceLengthRamp"} | {
    "TokenWeightedAccumulation"
}


class Reads(Toy):
    """The toy, with the rows of any of these batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch["x"] if isinstance(batch, dict) else batch.x], batch_idx)

    def log(self, *arguments: Any, **options: Any) -> None:
        super().log(*arguments, **{"batch_size": 4, **options})


def _loader(kind: str) -> Any:
    numbers = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader([*numbers], 4, collate_fn=lambda rows: KINDS[kind](torch.stack(rows)))


def _fit(callbacks: list[Any], kind: str, network: Any, **arguments: Any) -> Any:
    torch.manual_seed(0)
    module = Reads(network=network)
    run = trainer(callbacks, **arguments)
    run.fit(module, _loader(kind), data())
    return run, module


@pytest.mark.turns(16, always=["GradientNoiseScale", "SelectiveBackprop"])
@pytest.mark.parametrize("name", sorted(set(CASES) - READ_TUPLES))
def test_every_kind_of_batch_trains_as_the_others_or_is_refused(name: str, tmp_path: Path) -> None:
    arguments = {**CASES[name].trainer, "default_root_dir": tmp_path}
    trained = {}
    for kind in KINDS:
        if kind == "Graph" and name in READ_ROWS:
            with pytest.raises(ConfigurationError, match="a Graph"):
                _fit(make_all(name), kind, network_of(name), **arguments)
        else:
            trained[kind] = weights(_fit(make_all(name), kind, network_of(name), **arguments)[1])
    for found in trained.values():
        assert_equal(found, trained["Record"])


@pytest.mark.parametrize("kind", ["Record", "Pair", "Attributes"])
def test_the_batches_that_a_ramp_splits_hold_all_rows(kind: str) -> None:
    seen: list[torch.Tensor] = []

    class Sees(Reads):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch["x"] if isinstance(batch, dict) else batch.x)
            return super().training_step(batch, batch_idx)

    run = trainer([BatchRamp([4])], max_epochs=1)
    run.fit(Sees(), _loader(kind), data())
    assert [len(rows) for rows in seen] == [2, 2, 2, 2, 4, 4]
    assert torch.equal(torch.cat(seen), torch.cat([batch.x for batch in _loader("Record")]))


def test_a_ramp_refuses_batches_that_it_cannot_split() -> None:
    with pytest.raises(ConfigurationError, match="a batch of the type Graph cannot be split"):
        _fit([BatchRamp([4])], "Graph", Net)
    with pytest.raises(ConfigurationError, match="the batch holds a Graph"):
        pieces_of([Graph(torch.zeros(4, 2)), torch.zeros(4)], 2)


def test_the_number_of_rows_is_that_of_the_first_tensor_with_rows() -> None:
    x = torch.zeros(3, 2)
    for batch in (x, [x], {"t": torch.tensor(1.0), "x": x}, Record(0.5, x), Pair("a", x), Attributes(x=x)):
        assert samples_of(batch) == 3
    assert samples_of(torch.tensor(1.0)) == 1
    assert samples_of(["text"]) == 0
