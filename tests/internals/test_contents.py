"""What containers and objects store is read without their own methods, and walkers of a user's objects do so."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import pytest
import torch

from lit_efficient import ExactResume, LRFinder, MaxBatchSize
from lit_efficient.application import find_optimizers
from lit_efficient.evidence.fits import _described
from lit_efficient.internals.contents import attributes, contents, length, restorer
from lit_efficient.mechanisms.blocks.swapping import _tensors_in
from lit_efficient.mechanisms.metering import samples_of
from lit_efficient.mechanisms.moving import move, take_rows, tensors_in
from lit_efficient.mechanisms.order.carried import attributes_of
from lit_efficient.mechanisms.rewind import Rewind, own_generators
from lit_efficient.optimizers.rates import nested_schedulers
from tests.support import Toy, data, trainer


def _refuse(*_: Any) -> Any:
    raise NotImplementedError


HOSTILE = ("__len__", "__iter__", "__getitem__", "__eq__", "__bool__", "__copy__", "keys", "values", "items", "clear")


def hostile(kind: type, content: Any) -> Any:
    """Return a container of a class that raises in each of its methods, as some libraries' lazy containers do."""
    made = type(f"Hostile{kind.__name__}", (kind,), {})(content)
    for name in HOSTILE:
        setattr(type(made), name, _refuse)
    type(made).__hash__ = object.__hash__  # type: ignore[method-assign, assignment]
    return made


KINDS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque, dict, OrderedDict)}


@pytest.mark.parametrize("name", KINDS)
def test_what_a_subclass_stores_is_read_and_put_back(name: str) -> None:
    kind = KINDS[name]
    content = {"a": 1, "b": 2} if issubclass(kind, dict) else [3, 4]
    value = hostile(kind, content)
    assert sorted(map(str, contents(value))) == (["1", "2", "a", "b"] if issubclass(kind, dict) else ["3", "4"])
    assert length(value) == 2
    assert len(contents(value, 1)) == 1
    if kind in (tuple, frozenset):
        return
    put_back = restorer(value)
    if issubclass(kind, dict):
        kind.update(value, {"c": 3})
    else:
        (kind.add if kind is set else kind.append)(value, 5)
    before = contents(value)
    put_back()
    assert len(before) > len(contents(value))
    assert sorted(map(str, contents(value))) == (["1", "2", "a", "b"] if issubclass(kind, dict) else ["3", "4"])


def test_an_ordered_dictionary_keeps_its_order() -> None:
    value = OrderedDict(a=1, b=2, c=3)
    put_back = restorer(value)
    value.move_to_end("a")
    put_back()
    assert [*value] == ["a", "b", "c"]


class Proxy:
    """Object whose attributes cannot be asked for, as a client of a service that is not connected."""

    def __init__(self, content: Any) -> None:
        object.__setattr__(self, "content", content)

    __getattr__ = __getattribute__ = __setattr__ = __len__ = __iter__ = __eq__ = _refuse  # type: ignore[assignment]


class Private:
    """Object with a private slot and one that was never set."""

    __slots__ = ("__count", "unset")

    def __init__(self) -> None:
        self.__count = [1]

    def add(self) -> int:
        self.__count = [*self.__count, 1]
        return len(self.__count)


def test_objects_that_answer_no_question_are_walked() -> None:
    assert contents(object()) == []
    assert attributes(object()) == {}
    generator, tensor = torch.Generator(), torch.zeros(2)
    proxy = Proxy(hostile(list, [tensor, generator]))
    assert own_generators(proxy) == [generator]
    assert [*_tensors_in(proxy)] == [tensor]
    private = Private()
    record = Rewind([proxy, private])
    tensor += 1
    generator.manual_seed(5)
    assert private.add() == 2
    record.restore()
    assert not tensor.any()
    assert generator.initial_seed() != 5
    assert private.add() == 2


@pytest.mark.parametrize("kind", [list, tuple])
def test_diagnostics_read_hostile_attributes(kind: type) -> None:
    network = type("Network", (torch.nn.Module,), {"__module__": __name__})()
    network.kept = hostile(kind, [1])
    assert attributes_of(network)["kept"] == [1]
    assert "1" in _described(network.kept)


class Holds(Toy):
    """A module with containers and objects that no method of theirs can be called on."""

    def __init__(self) -> None:
        super().__init__()
        for name, kind in KINDS.items():
            setattr(self, f"kept_{name}", hostile(kind, {"a": 1} if issubclass(kind, dict) else [1]))
        self.proxy = [Proxy([1])]


@pytest.mark.parametrize(
    "technique",
    [
        lambda: LRFinder(min_lr=1e-3, max_lr=1e-1, num_steps=12),
        lambda: MaxBatchSize(memory_limit="1GiB", include_validation=False),
        ExactResume,
    ],
)
def test_a_run_does_not_stumble_over_them(technique: Any) -> None:
    run = trainer([technique()])
    run.fit(module := Holds(), data(), data())
    assert run.global_step
    assert contents(module.kept_tuple) == [1]


class Counted(tuple):
    """Tuple whose length is unknown, as that of a stream's batch."""

    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


class Unbound:
    """Object that refuses attributes that it does not have, with an error of its own."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} before the proxy is bound")


def test_walkers_of_batches_ask_neither_lengths_nor_attributes() -> None:
    rows = torch.arange(6.0).view(3, 2)
    proxy = Unbound()
    batch = Counted([proxy, {"x": rows}, Counted(["a", "b", "c"])])
    assert samples_of(batch) == 3
    assert [one is rows for one in tensors_in(batch)] == [True]
    moved = move(batch, torch.device("meta"))
    assert type(moved) is Counted
    first, second, _ = tuple.__iter__(moved)
    assert first is proxy
    assert second["x"].device.type == "meta"
    _, part, names = tuple.__iter__(take_rows(batch, torch.tensor([0, 2]), 3))
    assert part["x"].tolist() == [[0.0, 1.0], [4.0, 5.0]]
    assert tuple.__eq__(names, ("a", "c"))


def test_walkers_of_optimizers_and_schedulers_ask_no_lengths() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    inner = torch.optim.lr_scheduler.ConstantLR(optimizer)
    outer = torch.optim.lr_scheduler.SequentialLR(optimizer, [inner], [])
    outer._schedulers = hostile(list, [inner])
    outer.proxy = Unbound()
    assert [one is other for one, other in zip([*nested_schedulers([outer])], [outer, inner], strict=True)]
    assert find_optimizers(Counted([optimizer, Counted([optimizer])])) == [optimizer]
