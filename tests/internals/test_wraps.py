from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import lightning.pytorch as L
import pytest
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_efficient.internals.wraps import inner_method, temporarily, unwrap_method, wrap_method


class Module(L.LightningModule):
    name = "own"

    def training_step(self, *words: str) -> str:
        return f"{self.name}{''.join(words)}"


def first(self: Any, word: str) -> str:
    return f"first({inner_method(self, 'training_step', first)(word)})"


def second(self: Any, word: str) -> str:
    return f"second({inner_method(self, 'training_step', second)(word)})"


def third(self: Any, word: str) -> str:
    return f"third({inner_method(self, 'training_step', third)(word)})"


def configure(self: Any) -> None:
    inner_method(self, "configure_model", configure)()


@pytest.mark.parametrize("instance", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations([first, second, third])))
def test_wraps_nest_and_come_off_in_any_order(order: Any, instance: bool) -> None:
    module = Module()
    if instance:
        module.training_step = earlier = lambda word: f"set{word}"  # type: ignore[method-assign]
    word = "set!" if instance else "own!"
    left = [first, second, third]
    for function in [*left, first]:  # once more changes nothing
        wrap_method(module, "training_step", function)
    for function in [*order, first]:
        expected = word
        for name in left:
            expected = f"{name.__name__}({expected})"
        assert module.training_step("!") == expected
        unwrap_method(module, "training_step", function)
        left = [name for name in left if name is not function]
    assert ("training_step" in vars(module)) is instance
    assert not instance or module.training_step is earlier


def test_copies_have_wraps_of_their_own() -> None:
    module = Module()
    wrap_method(module, "training_step", first)
    wrap_method(module, "training_step", second)
    twin = copy.deepcopy(module)
    twin.name = "twin"
    unwrap_method(twin, "training_step", first)
    assert twin.training_step("!") == "second(twin!)"
    assert module.training_step("!") == "second(first(own!))"


def test_a_pickle_keeps_its_wraps_around_its_own_module() -> None:
    module = Module()
    wrap_method(module, "training_step", first)
    wrap_method(module, "training_step", second)
    twin = pickle.loads(pickle.dumps(module))
    twin.name = "twin"
    assert twin.training_step("!") == "second(first(twin!))"
    unwrap_method(twin, "training_step", second)
    unwrap_method(twin, "training_step", first)
    assert "training_step" not in vars(twin)
    assert module.training_step("!") == "second(first(own!))"


def test_lightning_sees_a_wrapped_hook_as_overridden_and_an_unwrapped_one_not() -> None:
    module = Module()
    assert not is_overridden("configure_model", module)
    wrap_method(module, "configure_model", configure)
    assert is_overridden("configure_model", module)
    module.configure_model()
    unwrap_method(module, "configure_model", configure)
    assert not is_overridden("configure_model", module)


def test_what_is_set_for_a_while_is_as_before_afterwards_whatever_happens() -> None:
    module = Module()
    seen = []

    def fails() -> None:
        with temporarily(module, name="other", training=False), temporarily(Module, name="class"):
            seen.append((module.name, Module.name, module.training))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert seen == [("other", "class", False)]
    assert (module.name, Module.name, module.training) == ("own", "own", True)
    with temporarily(module, __class__=L.LightningModule):
        assert type(module) is L.LightningModule
    assert type(module) is Module
