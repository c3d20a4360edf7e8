"""Constructor arguments: at most ten, and values of wrong types are refused with the argument's name and the value.

What belongs together is a dataclass, which is a block in YAML.
"""

import ast
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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
# torch's optimizers; a block would be one name in the constructor, and others in the groups. LatentDiffusion:
# `override` names some of the other ten. TextEncoderConfig: its place, number format and variant are those of
# DiffusersModelConfig, under the same names. Rollout: its sampling has the names of `generate`.
# ImageSet: its crops, its captions' variants and its class images are blocks already.
EXEMPT = {"ChatDataModule", "EncodedData", "ImageData", "LanguageData", "PhotoCrops", "PreferenceData", "PythonCorpus"}
EXEMPT |= {"EmbeddingData", "LabelledTextData", "Preference", "Recipe", "UnpairedPreferenceData"}
EXEMPT |= {"DiffusionPreference", "ImageSet", "LatentData", "LatentDiffusion", "LoRA", "MuonAdamW", "Rollout"}
EXEMPT |= {"TextEncoderConfig"}
EXEMPT |= {
    "BackboneShape",
    "Card",
    "Measured",
    "Plan",
    "Trace",
    "VariantResult",
}  # records, not written by hand


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


WRONG = ("words", 5, 2.5, True, None, [None], {"a": 1}, -1, math.nan)


def classes() -> dict[str, type]:
    """Return the classes that a config names, and the dataclasses among their arguments, by name."""
    found: dict[str, type] = {}
    waiting: list[Any] = [getattr(lit_efficient, card.name) for card in read_cards()]
    while waiting:
        hint = waiting.pop()
        waiting += typing.get_args(hint)
        is_ours = isinstance(hint, type) and hint.__module__.startswith("lit_efficient.")
        if is_ours and hint.__name__ not in found:
            found[hint.__name__] = hint
            waiting += typing.get_type_hints(hint.__init__).values()
    return found


def usual(kind: type) -> dict[str, Any]:
    """Return arguments with which a class is built, as far as wrong ones are not refused first."""
    name = kind.__name__
    parameters = inspect.signature(kind).parameters
    if name in CASES:
        technique = CASES[name].make()
        return {p: getattr(technique, p) for p in parameters}
    given: dict[str, Any] = {"params": [nn.Parameter(torch.ones(2, 2))], "total_steps": 4}
    given["optimizer"] = torch.optim.SGD(given["params"], 0.1)
    return {key: value for key, value in given.items() if key in parameters}


CLASSES = classes()


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_value_of_a_wrong_type_is_refused_with_its_argument(name: str) -> None:
    if name == "ZeroStrategy":
        pytest.importorskip("deepspeed")
    kind = CLASSES[name]
    given = usual(kind)
    hints = typing.get_type_hints(kind.__init__)
    for argument in inspect.signature(kind).parameters:
        for value in WRONG:
            if has_type(value, hints[argument]):
                continue
            with pytest.raises(ConfigurationError) as refused:
                kind(**{**given, argument: value})
            inner = [*value] if isinstance(value, list | dict) else []
            said = str(refused.value)
            assert argument in said, said
            assert any(repr(one) in said for one in (value, *inner)) or isinstance(value, dict), said


@pytest.mark.filterwarnings("ignore:The state dict in .* contains no parameters")
@pytest.mark.filterwarnings("ignore:Found keys that are in the model state dict")
def test_a_task_is_built_from_the_mappings_of_its_hyper_parameters(tmp_path: Path) -> None:
    class Own(lit_efficient.LanguageModeling):
        """A task of a user with fewer arguments than hyper-parameters."""

        def __init__(self, learning_rate: float = 0.1) -> None:
            super().__init__(lit_efficient.GPTConfig(vocab_size=8, dim=8, depth=1, num_heads=1), learning_rate)

    for module in (Own(0.5), lit_efficient.LanguageModeling(Own().model, 0.5)):
        held = {"hyper_parameters": dict(module.hparams), "state_dict": {}, "pytorch-lightning_version": "2.6.6"}
        torch.save(held, tmp_path / "a.ckpt")
        loaded = type(module).load_from_checkpoint(tmp_path / "a.ckpt", strict=False)
        assert (loaded.model, loaded.learning_rate) == (module.model, 0.5)
