"""Constructor arguments: at most ten, and values of wrong types are refused with the argument's name and the value.

What belongs together is a dataclass, which is a block in YAML.
"""

import ast
import inspect
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

import lit_efficient
from lit_efficient.catalog import read_cards
from lit_efficient.errors import ConfigurationError
from tests.contract.table import CASES

MOST = 10
# Data modules: their sources, sizes and loaders stay at the top of a config, where each of them is since the
# first release; only the rest is in groups. LoRA: ten say what an adapter is, flat as in peft's own configuration, and
# in each config and checkpoint that there is; `start_from` and `beside` name two different kinds of adapters that are
# there already, so that a block for them would take one name away and rename two for every user. MuonAdamW: each is a
# key of `param_groups`, which users give groups of their own, schedules write and checkpoints hold, as of all of
# torch's optimizers; a block would be one name in the constructor, and others in the groups.
EXEMPT = {"ChatDataModule", "EncodedData", "ImageData", "LanguageData", "PhotoCrops", "PreferenceData", "PythonCorpus"}
EXEMPT |= {"EmbeddingData", "LabelledTextData", "Preference", "Recipe", "UnpairedPreferenceData"}
EXEMPT |= {"LoRA", "MuonAdamW"}
EXEMPT |= {"Card", "Measured", "Plan", "Trace", "VariantResult"}  # records, which nobody writes by hand


def arguments(node: ast.ClassDef) -> list[str]:
    """The names that the constructor of a class takes, as its own lines say."""
    inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    if inits:
        given = inits[0].args
        return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)][1:]
    names = {ast.unparse(one).split("(")[0] for one in (*node.decorator_list, *node.bases)}
    if not names & {"dataclass", "NamedTuple"}:
        return []
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    given = [one for one in fields if not re.search(r"ClassVar|init=False", ast.unparse(one))]
    return [ast.unparse(one.target) for one in given]


def longer(source: str) -> set[str]:
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return {node.name for node in classes if len(arguments(node)) > MOST}


def test_no_class_takes_more_than_ten_arguments_but_these() -> None:
    package = Path(lit_efficient.__file__).parent
    found = [longer(path.read_text("utf-8")) for path in package.rglob("*.py")]
    assert set().union(*found) == EXEMPT


def test_what_is_counted() -> None:
    names = [f"a{i}" for i in range(MOST + 1)]
    fields = "".join(f"    {name}: int = 0\n" for name in names)
    assert longer(f"class A:\n    def __init__(self, {', '.join(names)}): ...") == {"A"}
    assert longer(f"class A:\n    def __init__(self, *, {', '.join(names[1:])}): ...") == set()
    assert longer(f"@dataclass(frozen=True)\nclass B:\n{fields}") == longer(f"class B(NamedTuple):\n{fields}") == {"B"}
    assert longer(f"class C:\n{fields}") == set()
    kept = "    b: int = field(default=0, init=False)\n"
    assert longer(f"@dataclass\nclass D:\n{kept * (MOST + 1)}") == set()


def has_type(value: object, hint: Any) -> bool:
    """Return whether a value of YAML has the type of an annotation."""
    origin = typing.get_origin(hint) or hint
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, one) for one in inner)
    if origin is typing.Literal:
        return value in inner and not isinstance(value, bool)
    if origin is float:
        return type(value) in (int, float)
    if hint is None or not isinstance(origin, type) or origin is Any:
        return origin is Any or value is None
    if isinstance(value, dict) and issubclass(origin, Mapping):
        return all(has_type(one, inner[1]) for one in value.values())
    if isinstance(value, list) and issubclass(origin, Iterable) and inner and not issubclass(origin, Mapping):
        return all(has_type(one, inner[0]) for one in value)
    return type(value) is origin


WRONG = ("words", 5, 2.5, True, None, [None], {"a": 1})
NAMES = sorted(card.name for card in read_cards() if card.slot == "trainer.callbacks" and not card.is_block)


@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_a_wrong_type_is_refused_with_its_argument(name: str) -> None:
    kind = getattr(lit_efficient, name)
    parameters = inspect.signature(kind).parameters.values()
    usual: dict[str, Any] = {}
    if name in CASES:
        technique = CASES[name].make()
        usual = {p.name: getattr(technique, p.name) for p in parameters}
    hints = typing.get_type_hints(kind.__init__)
    for argument, hint in hints.items():
        for value in WRONG:
            if argument == "return" or has_type(value, hint):
                continue
            with pytest.raises(ConfigurationError) as refused:
                kind(**{**usual, argument: value})
            inner = [*value] if isinstance(value, list | dict) else []
            said = str(refused.value)
            given = said.partition(" got ")[2] or said
            assert argument in said, said
            assert argument in given or any(repr(one) in given for one in (value, *inner)), said
