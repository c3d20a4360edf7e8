"""What moved is where the table says, and a checkpoint with an old key still means the same."""

from dataclasses import fields, is_dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import nn

import lit_efficient
from lit_efficient import LoRA
from lit_efficient.application import apply, compare_techniques, replay
from lit_efficient.files.moved import MOVED_KEYS, MOVED_PATHS, moved_key, takes_moved_keys, translate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("old", "new"), MOVED_PATHS.items())
def test_a_moved_file_is_where_the_table_says(old: str, new: str) -> None:
    if old.endswith(".yaml"):
        assert not (ROOT / old).exists()
        assert (ROOT / new).exists()
        return
    import_module(new)
    with pytest.raises(ModuleNotFoundError):
        import_module(old)


@pytest.mark.parametrize(
    ("name", "old", "new"), [(name, *pair) for name, keys in MOVED_KEYS.items() for pair in keys.items()]
)
def test_a_moved_key_is_where_the_table_says(name: str, old: str, new: str) -> None:
    arguments = signature(getattr(lit_efficient, name)).parameters
    assert old not in arguments
    group, _, field = new.partition(".")
    assert group in arguments
    if field:
        block = type(arguments[group].default)
        assert is_dataclass(block)
        assert field in {one.name for one in fields(block)}


def test_a_key_inside_a_block_that_moved_is_told_too() -> None:
    assert moved_key(lit_efficient.LanguageData, "columns.text") == ": it is now 'rows.columns.text'"
    assert moved_key(lit_efficient.PreferenceData, "chat_template") == ": it is now 'chat.template'"
    assert moved_key(lit_efficient.LanguageData, "rows.columns") == ""
    assert moved_key(None, "columns.text") == ""


def test_checkpoints_arguments_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOVED_KEYS, "Thing", {"width": "shape.width", "height": "shape.height", "speed": "rate"})
    assert translate("Thing", {"speed": 1, "width": 2, "name": "a", "height": 3}) == {
        "rate": 1,
        "shape": {"width": 2, "height": 3},
        "name": "a",
    }
    assert translate("Other", {"speed": 1}) == {"speed": 1}


def test_a_checkpoint_with_an_old_key_of_a_technique_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, fresh = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    lora = LoRA(rank=2)
    apply(trained, [lora])
    record = lora.record()
    old = {**record, "arguments": {**record["arguments"]}}
    old["arguments"]["width"] = old["arguments"].pop("rank")
    monkeypatch.setitem(MOVED_KEYS, "LoRA", {"width": "rank"})
    replay(fresh, {"lit_efficient": {"transforms": [old]}, "state_dict": trained.state_dict()})
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh(torch.ones(1, 4)), trained(torch.ones(1, 4)))
    compare_techniques([old], [record], fitting=True)


def test_a_constructor_takes_the_keys_of_the_release_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        @takes_moved_keys
        def __init__(self, name: str, *, rate: int, shape: dict[str, int] | None = None) -> None:
            self.given = name, rate, shape

    Thing.__init__.__wrapped__.__qualname__ = "Thing.__init__"  # as it is of a class at the top of a module
    monkeypatch.setitem(MOVED_KEYS, "Thing", {"width": "shape.width", "speed": "rate"})
    assert Thing("a", speed=1, width=2).given == ("a", 1, {"width": 2})
    assert Thing("a", rate=1).given == ("a", 1, None)
