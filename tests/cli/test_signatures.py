"""Arguments of constructors, read from source files: what a user's class takes is never refused."""

import sys
from pathlib import Path

import pytest

from lit_efficient.cli.arguments import read_command
from lit_efficient.cli.names import check_classes
from lit_efficient.cli.signatures import signature
from lit_efficient.cli.tree import Table, plain_data

CLASSES = """
import typing
from dataclasses import dataclass
from elsewhere import change

class Base:
    def __init__(self, width=1): ...
class Mixin:
    def __init__(self, mixed=1, **kwargs): super().__init__(**kwargs)
class Cooperative(Mixin, Base): ...
class Plain(Base): ...
class Deep(Base):
    def __init__(self, deep=1, **kwargs): super().__init__(**kwargs)
class Diamond(Plain, Deep): ...
class Overloaded:
    @typing.overload
    def __init__(self, a: int): ...
    def __init__(self, a=1, b=2): ...
@change
class Changed:
    def __init__(self): ...
class Conditional:
    if typing.TYPE_CHECKING or True:
        def __init__(self, a=1): ...
@dataclass
class Group:
    a: int = 1
    name: str = "x"
class NoDataclass(Group): ...
@dataclass
class Last(NoDataclass):
    b: int = 1
@dataclass
class OwnConstructor:
    a: int = 1
    def __init__(self, z=1): ...
class Model:
    def __init__(self, group: Group | None = None, described: "in words" = None): ...
"""


@pytest.fixture
def classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "theirs_of_signatures.py").write_text(CLASSES)
    monkeypatch.syspath_prepend(tmp_path)
    assert "theirs_of_signatures" not in sys.modules
    return "theirs_of_signatures"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Cooperative", ["mixed", "width"]),
        ("Diamond", ["deep", "width"]),
        ("Overloaded", ["a", "b"]),
        ("Changed", ["anything"]),
        ("Conditional", ["a"]),
        ("Last", ["a", "name", "b"]),
        ("OwnConstructor", ["z"]),
    ],
)
def test_what_a_class_takes_is_accepted(classes: str, name: str, arguments: list[str]) -> None:
    known = signature(f"{classes}.{name}")
    assert known is not None
    assert known.is_open or {*arguments} == known.arguments.keys()


def test_values_are_read_by_the_annotations(classes: str) -> None:
    words = ["--model.group.name", "007", "--model.group.a", "7", "--model.described.a", "1"]
    tree = read_command(["fit", f"--model={classes}.Model", *words]).tree
    model = tree["model"]
    assert isinstance(model, Table)
    assert plain_data(model)["init_args"] == {"group": {"name": "007", "a": 7}, "described": {"a": 1}}  # type: ignore[index]
    check_classes(tree, knows_others=True)
