"""The schema takes what the parser takes, all shipped configs and overlays, and flags what the parser refuses."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from jsonargparse import get_loader

from lit_efficient.__main__ import main
from lit_efficient.cli.parsing import PARSER_MODE  # noqa: F401 (with it the loader is set)
from lit_efficient.commands.schema import schema
from lit_efficient.files import configs
from tests.json_schema import is_valid

FREE = {"config_fields", "layers", "config", "rates", "tokens"}  # mappings of any names


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return json.loads(json.dumps(schema()))


def shipped() -> Iterator[tuple[str, Any]]:
    for name, path in configs.known().items():
        yield name, get_loader("yaml")(path.read_text("utf-8"))


def keys_of(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        if isinstance(key, str):
            yield (*path, key)
        if key not in FREE:
            yield from keys_of(value, (*path, key))


def with_change(tree: Any, path: tuple[Any, ...], key: str, value: Any) -> Any:
    changed = owner = copy.deepcopy(tree)
    for step in path[:-1]:
        owner = owner[step]
    owner.pop(path[-1])
    owner[key] = value
    return changed


def test_shipped_configs_and_overlays_are_valid(whole: dict[str, Any]) -> None:
    assert [name for name, tree in shipped() if not is_valid(tree, whole, whole)] == []


def test_each_misspelt_key_and_each_wrong_type_in_them_is_flagged(whole: dict[str, Any]) -> None:
    seen, missed = set(), []
    for name, tree in shipped():
        for path in keys_of(tree):
            place = tuple(step for step in path if isinstance(step, str))
            if place in seen:
                continue
            seen.add(place)
            key, value = path[-1], tree
            for step in path:
                value = value[step]
            typo = with_change(tree, path, f"{key[:-1]}z{key[-1]}", value)
            wrong = [with_change(tree, path, key, [[[value]]])]
            wrong += [with_change(tree, path, key, {"x": {"y": value}})] if key not in FREE else []
            missed += [(name, path) for changed in (typo, *wrong) if is_valid(changed, whole, whole)]
    assert missed == []
    assert len(seen) > 150


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("trainer: {callbacks+: EMA}", True),
        ("trainer: {callbacks-: [EMA, LoRA]}", True),
        ("trainer: {callbacks: [EMA, {class_path: lit_efficient.LoRA, init_args: {rank: 4}}]}", True),
        ("trainer: {callbacks: [mine.callbacks.Mine, {class_path: mine.Mine, init_args: {any: 1}}]}", True),
        (
            "trainer: {callbacks+: [{class_path: lightning.pytorch.callbacks.Timer, init_args: {verbose: true}}]}",
            True,
        ),
        (
            "trainer: {strategy: ddp, max_time: {hours: 2}, limit_val_batches: 1.0, devices: [0, 1], logger: false}",
            True,
        ),
        ("optimizer: {class_path: AdamW, init_args: {lr: 1.0e-3, betas: [0.9, 0.95]}}", True),
        ("lr_scheduler: {class_path: ReduceLROnPlateau, init_args: {monitor: val/loss}}", True),
        ("data: {class_path: LanguageData, init_args: {stream: {enabled: true}}}", True),
        ("fit: {trainer: {max_steps: 3}}", True),
        ("$schema: here.json", True),
        ("trainer: {callbacks+: EMMA}", False),
        ("trainer: {callbacks: [{class_path: LoRA, init_args: {ranc: 4}}]}", False),
        ("trainer: {callbacks: [{class_path: LoRA, init_args: {rank: many}}]}", False),
        ("trainer: {callbacks: [{class_path: lit_efficient.callbacks.lora.LoRA, init_args: {ranc: 4}}]}", False),
        ("trainer: {callbacks: [{class_path: LoRA, rank: 4}]}", False),
        ("trainer: {callbacks: [{init_args: {rank: 4}, class_pat: LoRA}]}", False),
        ("trainer: {callbacks: [LanguageData]}", False),
        ("trainer: {callbacks: [lit_efficient.callback.ema.EMA]}", False),
        ("trainer: {precision: bf17}", False),
        ("trainer: {max_steps: 3.5}", False),
        ("trainer: {max_step: 3}", False),
        ("trainer: 3", False),
        ("optimizer: {class_path: AdamW, init_args: {learning_rate: 1.0e-3}}", False),
        ("optimizer: EMA", False),
        ("model: {class_path: LanguageModeling, init_args: {model: {dimm: 3}}}", False),
        ("data: {class_path: LanguageData, init_args: {stream: {enable: true}}}", False),
        ("fit: {trainr: {max_steps: 3}}", False),
    ],
)
def test_it_takes_what_the_parser_takes(text: str, fits: bool, whole: dict[str, Any]) -> None:
    assert is_valid(yaml.safe_load(text), whole, whole) is fits


def test_the_command_prints_it_and_says_how_an_editor_finds_it(
    whole: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_efficient.commands.schema.schema", lambda: whole)
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == whole
    assert whole["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert main(["schema", "--help"]) == 0
    assert "# yaml-language-server: $schema=lit_efficient.schema.json" in " ".join(capsys.readouterr().out.split())
