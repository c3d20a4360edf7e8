"""Bad arguments are named with their range and the value that was given."""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

import lit_efficient
from lit_efficient.__main__ import SUBCOMMANDS
from lit_efficient.catalog import PACKAGE
from lit_efficient.commands import completion
from lit_efficient.errors import (
    CheckpointError,
    ConfigurationError,
    ConflictError,
    DivergedError,
    LitEfficientError,
    check_choice,
    check_installed,
    check_list,
    check_number,
    checks_types,
    install_line,
    listed,
    parse_bytes,
)
from lit_efficient.mechanisms.blocks.freezing import depth_groups
from lit_efficient.models.libraries.causal_lm import CausalLMConfig


@pytest.mark.parametrize(
    ("value", "limits", "words"),
    [
        (0, {"least": 1, "whole": True}, "a whole number of at least 1, got 0"),
        (1.5, {"least": 1, "whole": True}, "a whole number of at least 1, got 1.5"),
        (True, {"least": 0}, "at least 0, got True"),
        ("1", {"above": 0}, "above 0, got '1'"),
        (1.0, {"least": 0, "below": 1}, "at least 0 and below 1, got 1.0"),
        (1.1, {"above": 0, "most": 1, "null": True}, "above 0 and at most 1 or null, got 1.1"),
        (math.nan, {}, "a number, got nan"),
        (math.inf, {"above": 0}, "above 0, got inf"),
        (None, {"above": 0}, "above 0, got None"),
        (torch.tensor(-0.5), {"least": 0}, "at least 0, got tensor(-0.5000)"),
        (torch.tensor(True), {"least": 0}, "at least 0, got tensor(True)"),
        (torch.ones(2), {"least": 0}, "at least 0, got tensor([1., 1.])"),
        (np.float32(2), {"most": 1}, "at most 1, got np.float32(2.0)"),
    ],
)
def test_a_number_outside_its_range_is_named(value: Any, limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_number("Owner", "name", value, **limits)
    assert str(caught.value) == f"Owner: name must be {words}"


def test_the_ends_of_a_range_belong_to_it_or_not() -> None:
    check_number("Owner", "name", 1, least=1, most=1, whole=True)
    check_number("Owner", "name", None, above=0, null=True)
    check_number("Owner", "name", 0.5, above=0, below=1)
    check_number("Owner", "name", 10**400, least=1, whole=True)
    for number in (torch.tensor(1.0), np.float32(1), np.array(1)):
        check_number("Owner", "name", number, least=1, most=1)


@pytest.mark.parametrize("number", [torch.tensor(1), np.int64(1), np.array(1), 1.0])
def test_a_whole_number_is_pythons_own(number: Any) -> None:
    """What is counted with is kept in checkpoints, which hold Python's numbers and tensors only."""
    with pytest.raises(ConfigurationError, match="Owner: name must be a whole number of at least 1, got "):
        check_number("Owner", "name", number, least=1, whole=True)


def test_a_large_bound_is_said_in_full() -> None:
    with pytest.raises(ConfigurationError, match=r"below 1234567, got 1234567"):
        check_number("Owner", "name", 1234567, below=1234567)


def test_a_choice_is_one_of_its_kind() -> None:
    check_choice("Owner", "bits", 8, (8, 4, "fp8"))
    check_choice("Owner", "mode", None, ("a", "b"), null=True)
    for value in (True, "8", 8.0, None, ["a"]):
        with pytest.raises(ConfigurationError, match=r"Owner: bits must be one of 8, 4, fp8, got "):
            check_choice("Owner", "bits", value, (8, 4, "fp8"))


def test_a_list_may_be_missing_only_where_that_is_said() -> None:
    check_list("Owner", "names", None, "a list", null=True)
    for value, null in ((None, False), (2, True), ([], True), ("a", True)):
        with pytest.raises(ConfigurationError, match="Owner: names must be a list, got "):
            check_list("Owner", "names", value, "a list", null=null)


@checks_types
class Typed:
    """Class whose arguments have the kinds of annotations that YAML can fill."""

    def __init__(
        self,
        sizes: dict[str, int] | None = None,
        pair: tuple[int, float] | None = None,
        names: list[str] | None = None,
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"sizes": {"a": 1, "b": 2}}, {"sizes": {"a": 1, "b": "2"}}),
        ({"pair": [1, 2.5]}, {"pair": [1, 2.5, 3]}),
        ({"pair": [1, 2]}, {"pair": [1, "2"]}),
        ({"names": ["a"]}, {"names": [1]}),
        ({"names": []}, {"names": ["a", 1]}),
    ],
)
def test_the_values_in_lists_and_mappings_have_the_types_of_the_annotation(right: Any, wrong: Any) -> None:
    Typed(**right)
    with pytest.raises(ConfigurationError, match=f"Typed: {next(iter(wrong))} must be "):
        Typed(**wrong)


def test_the_smallest_memory_is_a_byte() -> None:
    assert parse_bytes(1) == 1
    with pytest.raises(ConfigurationError, match="above 0"):
        parse_bytes(0)


def by_hand(source: str) -> list[str]:
    """The texts of a file that say what something must be, in a ConfigurationError or a ConflictError."""
    if " must be " not in source:
        return []
    raised = {"ConfigurationError", "ConflictError"}
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    errors = (node for node in calls if isinstance(node.func, ast.Name) and node.func.id in raised)
    parts = (part.value for node in errors for part in ast.walk(node) if isinstance(part, ast.Constant))
    return [part for part in parts if isinstance(part, str) and " must be " in part]


def test_what_an_argument_must_be_is_said_by_the_validator() -> None:
    assert by_hand('raise ConfigurationError(f"Owner: {name} must be above 0, got {value}")')
    package = Path(lit_efficient.__file__).parent
    sources = {path.relative_to(package).as_posix(): path.read_text("utf-8") for path in package.rglob("*.py")}
    assert {path for path, source in sources.items() if by_hand(source)} == {"errors.py"}


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    QuantizeBase, LowBitOptimizer, LRFinder = (
        getattr(lit_efficient, name) for name in ("QuantizeBase", "LowBitOptimizer", "LRFinder")
    )
    for package in ("bitsandbytes", "matplotlib", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    check_installed("Owner", "torch", "numpy")
    with pytest.raises(ConfigurationError, match=r"^Owner needs transformers and bitsandbytes: pip install 'lit"):
        check_installed("Owner", "torch", "transformers", "bitsandbytes")
    for make, extra in (
        (QuantizeBase, "bitsandbytes"),
        (partial(LowBitOptimizer, backend="bitsandbytes"), "bitsandbytes"),
        (partial(LRFinder, plot="rates.png"), "plots"),
        (partial(CausalLMConfig, "some/model"), "llm"),
    ):
        with pytest.raises(ConfigurationError, match=rf"needs \w+: pip install 'lit-efficient\[{extra}\]'"):
            make()
    QuantizeBase(format="int4")
    LRFinder()


@pytest.mark.parametrize(
    ("packages", "line"),
    [
        (["wandb"], "'lit-efficient[wandb]'"),
        (["diffusers", "peft"], "'lit-efficient[diffusion]'"),
        (["bitsandbytes", "transformers"], "'lit-efficient[all]'"),
        (["timm"], "timm"),
    ],
)
def test_the_line_is_that_of_the_first_extra_with_all_of_them(packages: list[str], line: str) -> None:
    assert install_line(*packages).partition("  (")[0] == f"pip install {line}"


def test_the_first_names_are_said_and_the_others_counted() -> None:
    assert [listed("abcd"[:count]) for count in (0, 1, 3, 4)] == ["", "a", "a, b, c", "a, b, c and 1 more"]
    assert listed("abcd", 2) == "a, b and 2 more"


def test_errors_end_the_command_line_with_codes_of_their_own() -> None:
    codes = {LitEfficientError: 2, ConfigurationError: 2, ConflictError: 2, CheckpointError: 2, DivergedError: 4}
    assert {kind: kind.exit_code for kind in codes} == codes


# Advised arguments of others: the environment, the task, the optimizer, a layer of torch, the network, an adapter.
OF_OTHERS = {("Compile", "TORCH_LOGS"), ("ContrastiveFlowMatching", "prediction"), ("ScheduleFree", "weight_decay")}
OF_OTHERS |= {
    ("StochasticDepth", "batch_first"),
    ("ChunkedCrossEntropy", "labels"),
    ("AsyncCheckpoint", "save_last"),
    ("RewardModeling", "modules_to_save"),
}


def test_an_advised_argument_is_one_of_the_class_that_advises_it() -> None:
    """Texts that begin with a class, ``"Compile: ... modules=[...]"``, and searches with ``who="Compile"``."""
    tried = 0
    wrong = []
    for path in sorted((Path(lit_efficient.__file__).parent).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            owner = re.match(r"([A-Z]\w+): ", text)
            advised = re.findall(r"(?:[Nn]ame (?:\w+ )*in|[Ss]et|[Ww]ith|[Uu]se|[Gg]ive|, or|in) (\w+)=", text)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "find_blocks":
                given = {one.arg: ast.unparse(one.value).strip("rf") for one in node.keywords}
                owner = re.match(r"'([A-Z]\w+)'", given.get("who", ""))
                advised = re.findall(r"(\w+)=", given.get("example", "'blocks='"))
                called = path.read_text("utf-8")
                if "except ConfigurationError" in called.partition("find_blocks(")[2][:200]:
                    continue  # it is not shown
            kind = getattr(lit_efficient, owner[1], None) if owner else None
            if not inspect.isclass(kind):
                continue
            known = {*inspect.signature(kind).parameters, *inspect.signature(Trainer).parameters}
            for name in advised:
                tried += 1
                if name not in known and (owner[1], name) not in OF_OTHERS:
                    wrong.append(f"{path.name}: {owner[1]} has no {name}: {text}")
    assert wrong == [], "\n".join(wrong)
    assert tried > 60


def test_a_network_without_blocks_is_told_of_the_argument_that_names_its_groups() -> None:
    with pytest.raises(ConfigurationError, match=r"GradualUnfreezing: .* name them: groups=\[") as refusal:
        depth_groups(nn.Linear(2, 2), who="GradualUnfreezing")
    assert "blocks=" not in str(refusal.value)


OPTION = re.compile(r"(?<![\w-])--[A-Za-z](?:[\w.-]*\w)?(?![\w.]*[\w.{])")
COMMAND = re.compile(r"(?:lit_efficient |`(?!python))([a-z][a-z-]+)(?=[ `])([^`\n]*)")
PLACEHOLDERS = {"--EMA.help", "--NAME.help", "--data.KEY", "--model.KEY", "--trainer.KEY"}  # of `fit --help`
OF_PROGRAMS = {"--logdir", "--version", "--quiet", "--debug"}  # of tensorboard, and of all commands


def _texts() -> Iterator[tuple[str, str]]:
    """Yield the file and the text of each sentence in the package. Docstrings of modules are none."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docs = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, owners) and ast.get_docstring(n)}  # type: ignore[attr-defined]
        joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
        parts = {id(one) for node in joined for one in node.values}
        for node in joined:
            yield path.name, "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | parts:
                yield path.name, node.value


def test_each_command_and_option_in_a_message_exists() -> None:
    """An option that follows a command belongs to that command, and another one to any."""
    of = {command: {*names, *OF_PROGRAMS} for command, names in completion.options().items()}
    parts = [getattr(lit_efficient, name) for name in lit_efficient.PUBLIC]
    nested = {key for part in parts if inspect.isclass(part) and not issubclass(part, Exception) for key in _keys(part)}
    known = set().union(*of.values()) | PLACEHOLDERS
    tried = 0
    wrong = []
    for file, text in _texts():
        if " " not in text or file == "completion.py":  # scripts of shells
            continue
        of_command = {}
        for command, rest in COMMAND.findall(text):
            if command not in SUBCOMMANDS and rest.lstrip().startswith("-"):
                wrong.append(f"{file}: no command {command}: {text}")
            if command in of:
                of_command |= dict.fromkeys(OPTION.findall(rest), command)
        for command, option in re.findall(rf"\b({'|'.join(SUBCOMMANDS)}) ({OPTION.pattern})", text):
            of_command[option] = command
        for option in OPTION.findall(text):
            tried += 1
            head, dot, key = option.partition(".")
            accepted = of.get(of_command.get(option, ""), known)
            spelt = {option, option.replace("-", "_").replace("__", "--", 1)}
            if head in ("--data", "--model", "--optimizer", "--lr_scheduler") and dot:
                accepted = accepted | {option} if key.partition(".")[0] in nested else accepted
            if not spelt & accepted and not option.startswith("--trainer.callbacks"):
                wrong.append(f"{file}: {of_command.get(option, 'no command')} has no {option}: {text[:200]}")
    assert wrong == [], "\n".join(wrong)
    assert tried > 150


def _keys(part: type) -> Iterator[str]:
    with suppress(ValueError):  # of classes without a signature
        yield from inspect.signature(part).parameters
