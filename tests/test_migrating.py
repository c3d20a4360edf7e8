"""The tables of docs/migrating.md: names of others and of ours exist, and the command line says the same."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, callbacks, cli, loggers, plugins

import lit_efficient
from lit_efficient import PUBLIC
from lit_efficient.__main__ import SUBCOMMANDS
from lit_efficient.catalog import PACKAGE
from lit_efficient.files import configs
from tests.documents import PAGES, ROOT, page, rows_of

SECTIONS = {part.partition("\n")[0]: part for part in page("migrating.md").split("\n## ")[1:]}
TABLES = {name: rows_of(part) for name, part in SECTIONS.items()}
ROWS = [(name, *row[:2]) for name, rows in TABLES.items() for row in rows]
ELSEWHERE = json.loads((PACKAGE / "names_elsewhere.json").read_text("utf-8"))
# What a row means that names no class: what the section begins with.
LANGUAGE = ("LanguageModeling", "LanguageData", "Preference", "UnpairedPreference", "RewardModeling")
IMAGES = ("LatentDiffusion", "LatentData", "ImageData", "ImageSet")
TASKS = ("PolicyOptimization", "OnPolicyDistillation", "Distillation")
OF_DEEPSPEED = {"offload_optimizer", "offload_param", "zero_optimization"}


def peers() -> dict[str, set[str]]:
    """Names by the beginning of their heading in the file of names, up to the first space or comma."""
    found: dict[str, set[str]] = {}
    for part in (ROOT / "tests/peer_options.txt").read_text("utf-8").split("\n# ")[1:]:
        head, _, names = part.partition("\n")
        found.setdefault("often" if "at the top of" in head else re.split(r"[ ,]", head)[0], set()).update(
            names.split()
        )
    return found


PEERS = peers()


def left(cell: str) -> set[str]:
    """The names with which the code of a first cell begins."""
    return set(re.findall(r"`(?:--)?(\w+)", cell))


def options(cell: str) -> set[str]:
    """The options in a first cell that are named without a value."""
    return set(re.findall(r"`(?:--)?(\w+)`", cell))


def test_names_of_others_exist() -> None:
    from transformers import TrainingArguments
    from transformers.training_args import OptimizerNames

    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    known = {
        "Hugging Face's Trainer": fields | OF_DEEPSPEED | {"warmup_ratio"},
        "TRL": PEERS["TRL"] | {"GOLDConfig", "margin"},
        "torchtune": PEERS["torchtune"] | {"model", "qlora_llama3_1_8b", "CEWithChunkedOutputLoss", "lora_llama3_1_8b"},
        "Composer": PEERS["Composer"],
        "axolotl": PEERS["axolotl"] | PEERS["often"] | {"adamw_bnb_8bit", "paged_adamw_8bit"},
        "diffusers' scripts": PEERS["diffusers"],
        "kohya's scripts": PEERS["kohya-ss/sd-scripts"],
    }
    assert known.keys() == TABLES.keys() - {"Plain Lightning"}
    for section, names in known.items():
        found = set().union(*(left(row[0]) for row in TABLES[section]))
        configs_of_trl = {name for name in found if name.endswith("Config")} if section == "TRL" else set()
        assert found - names - configs_of_trl == set(), section
    optimizers = {each.value for each in OptimizerNames}
    named = set(re.findall(r'optim="(\w+)"', SECTIONS["Hugging Face's Trainer"]))
    assert named
    assert named <= optimizers
    homes = (callbacks, cli, plugins)
    for name in set().union(*(left(row[0]) for row in TABLES["Plain Lightning"])) - {"torch", "load_from_checkpoint"}:
        assert any(hasattr(home, name) for home in homes) or name == "TorchCheckpointIO", name


def test_names_of_trl_are_those_of_the_installed_one() -> None:
    trl = pytest.importorskip("trl")
    for name in ("SFTConfig", "DPOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig"):
        assert {field.name for field in dataclasses.fields(getattr(trl, name))} >= left_of_config(name)


def left_of_config(name: str) -> set[str]:
    """The fields that the table of TRL names for a config."""
    cells = [row[0] for row in TABLES["TRL"] if f"`{name}`" in row[0]]
    return {field for cell in cells for field in left(cell) if not field.endswith("Config")}


def test_no_name_without_a_counterpart_is_that_of_a_technique() -> None:
    without = [cell for _, cell, ours in ROWS if ours.startswith("none")]
    assert len(without) >= 15
    ours = {name.lower() for name in PUBLIC}
    assert [name for cell in without for name in re.findall(r"`(\w+)`", cell) if name.lower() in ours] == []


def test_what_is_said_not_to_be_offered_is_not() -> None:
    """The words that name it, and those of the option, are in no public docstring."""
    texts = "\n".join(inspect.getdoc(getattr(lit_efficient, name)) or "" for name in PUBLIC)
    said = {name: here for name, here in ELSEWHERE.items() if " is not offered" in here}
    assert len(said) > 25
    for name, here in said.items():
        what = here.removeprefix("none, because ").partition(" is not offered")[0].removeprefix("loading ")
        if re.search(r"[A-Z]{2}|[a-z][A-Z]", what):  # a name, as LISA or LoftQ
            assert what.removesuffix(" weights") not in texts.replace("GPTQ weights", ""), name


@pytest.mark.parametrize("section", TABLES)
def test_the_command_line_says_the_same_as_the_tables(section: str) -> None:
    """The first class, key or refusal of what an option is answered with is in its row, too."""
    checked = 0
    for cell, ours in ((cell, ours) for name, cell, ours in ROWS if name == section):
        for name in options(cell):
            here = ELSEWHERE.get(name)
            if here is None or section in ("Plain Lightning", "Composer"):
                continue
            checked += 1
            if here.startswith("none"):
                told = set(re.findall(r"`[\w-]+`", here)) & set(re.findall(r"`[\w-]+`", ours))  # a command
                assert ours.startswith("none") or told, name
                continue
            first = re.split(r"[ ,:]+", here)[0]
            words = [*first.split(".")[1:], first.rpartition(".")[2], *re.findall(r"(?:, as|with|or) ([\w.]+)", here)]
            spoken = [word for word in words if re.search(rf"\b{re.escape(word.rpartition('.')[2])}\b", ours)]
            assert spoken, f"{name}: {here} | {ours}"
    assert checked or section in ("Plain Lightning", "Composer")


def test_usual_options_of_others_are_answered() -> None:
    """The keys that many examples of axolotl have, and each option in a table, unless it is an argument here, too."""
    own = {*inspect.signature(Trainer).parameters, "optimizer", "lr_scheduler"}
    assert PEERS["often"] - ELSEWHERE.keys() - own == set()
    trl = set().union(*(fields_of_trl(name) for name in ("SFT", "DPO", "Reward", "KTO", "GRPO", "RLOO", "GKD")))
    assert len(trl) > 100
    assert trl - ELSEWHERE.keys() == {"beta", "label_smoothing"}  # of Preference
    for section in ("axolotl", "TRL", "diffusers' scripts", "kohya's scripts"):
        found = set().union(*(left(row[0]) for row in TABLES[section]))
        unknown = {name for name in found - ELSEWHERE.keys() - own if not name.endswith("Config")}
        assert unknown <= {"beta", "label_smoothing", "dtype", "margin", "repeats", "resolution", "rank"}, section


def fields_of_trl(name: str) -> set[str]:
    text = (ROOT / "tests/peer_options.txt").read_text("utf-8")
    return set(text.partition(f", {name}Config,")[2].partition("\n")[2].partition("\n\n")[0].split())


@cache
def arguments_and_values(name: str) -> tuple[frozenset[str], str]:
    """Arguments of a class and of the dataclasses in them, and the text that tells their values."""
    kind = next(getattr(home, name) for home in (lit_efficient, callbacks, loggers, torch.optim) if hasattr(home, name))
    known: set[str] = set()
    texts: list[str] = []
    seen: set[Any] = set()

    def add(one: Any) -> None:
        if one in seen:
            return
        seen.add(one)
        known.update(inspect.signature(one).parameters)
        texts.append(inspect.getdoc(one) or "")
        with suppress(NameError):  # of a type that only a type checker imports
            for annotation in typing.get_type_hints(one if dataclasses.is_dataclass(one) else one.__init__).values():
                visit(annotation)

    def visit(annotation: Any) -> None:
        if dataclasses.is_dataclass(annotation):
            add(annotation)
        if typing.get_origin(annotation) is typing.Literal:
            texts.append(" ".join(map(str, typing.get_args(annotation))))
        for one in typing.get_args(annotation):
            if isinstance(one, type | types.UnionType | types.GenericAlias) or typing.get_origin(one):
                visit(one)

    if isinstance(kind, type):
        add(kind)
    return frozenset(known), "\n".join(texts)


def is_known(word: str, classes: tuple[str, ...]) -> bool:
    """True if a word of our column is an option, a class, a config, a command, or a value of one of the classes."""
    own = {"seed_everything", "ckpt_path", "optimizer", "lr_scheduler", "data", "last", "auto"}
    if word in own or word in SUBCOMMANDS or word in configs.known() or re.fullmatch(r"-?\d+(\.\d+)?|true|false", word):
        return True
    head, dot, rest = word.partition(".")
    if dot and head == "trainer":
        first, _, last = rest.partition(".")
        fine = first in inspect.signature(Trainer).parameters
        return fine and (not last or last in inspect.signature(loggers.WandbLogger).parameters)
    if dot:
        one_side = tuple(
            name for name in (*LANGUAGE, *IMAGES, *TASKS) if name.endswith(("Data", "Set")) == (head == "data")
        )
        classes = one_side if head in ("data", "model") else classes
        words = rest.split(".") if head in ("data", "model") else word.split(".")
        return any(set(words) <= arguments_and_values(name)[0] for name in classes)
    if word[:1].isupper():
        return any(hasattr(home, word) for home in (lit_efficient, callbacks, loggers, torch.optim))
    return any(word in known or re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)
               for known, text in map(arguments_and_values, classes))  # fmt: skip


@pytest.mark.parametrize("section", TABLES)
def test_our_column_names_what_there_is(section: str) -> None:
    beside = IMAGES if "scripts" in section else LANGUAGE
    unknown = []
    for name, _, ours in ROWS:
        if name != section or ours.startswith(("none", "not needed")):
            continue
        spans = re.findall(r"`([^`]+)`", ours)
        classes = tuple(span for span in spans if span[:1].isupper() and is_known(span, ()))
        if re.search(r"\bset\b|\bsets\b", ours):
            classes += ("ImageSet",)
        if "chat" in ours or "rows" in ours:
            classes += ("LanguageData", "PreferenceData")
        if "trainer.logger" in ours:
            classes += ("WandbLogger",)
        for span in spans:
            for word in re.split(r"[:,\s{}]+", span.removeprefix("-c ").removeprefix("lit_efficient.")):
                if word and not is_known(word, classes or beside) and not known_outside(word, ours):
                    unknown.append((word, ours))
    assert unknown == []


def known_outside(word: str, ours: str) -> bool:
    """True for what is not an argument: precisions, names of strategies, and modules of this package."""
    if word in ("bf16-mixed", "16-mixed", "bf16-true", "ddp_find_unused_parameters_true"):
        return "trainer.precision" in ours or "trainer.strategy" in ours or "KahanSummation" in ours
    if word == "entity":  # WandbLogger gives it to wandb.init
        return "loggers/wandb" in ours
    if word in ("subfolder", "unet", "vae"):
        return "name_or_path" in ours
    return word in PUBLIC or word in ("Trainer.fit", "cli.LitEfficientCLI")


def test_a_wrong_word_in_our_column_is_found() -> None:
    assert is_known("rank", ("LoRA",))
    assert is_known("nf4", LANGUAGE)
    assert is_known("model.model.name_or_path", ())
    assert is_known("rollout.samples", ("PolicyOptimization",))
    for word, classes in (
        ("ranc", ("LoRA",)),
        ("nf5", LANGUAGE),
        ("model.model.no", ()),
        ("trainer.max_stepz", ()),
        ("LoRa", ()),
    ):
        assert not is_known(word, classes), word


def test_fields_of_peft_have_the_names_that_are_told() -> None:
    from peft import LoraConfig

    text = " ".join(SECTIONS["Hugging Face's Trainer"].split())
    theirs, ours = re.search(r"corresponds to \[`LoRA`\]\(\S+\): (.*?) are (.*?), and `rank_pattern`", text).groups()
    names = re.findall(r"`(\w+)`", theirs)
    told = re.findall(r"`([^`]+)`", ours)
    assert len(names) == len(told) >= 7
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert {*names, "trainable_token_indices", "rank_pattern", "alpha_pattern"} <= fields
    words = ["patterns", *(word for span in told for word in span.split(": "))]
    assert [word for word in words if not is_known(word, ("LoRA",))] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_arguments_that_a_page_gives_to_a_class_exist(path: Path) -> None:
    """Each "`x`, `y` of `Class`" and "`Class` with `x`"."""
    text = " ".join(re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE).split())
    several = r"((?:`[a-z_]+`(?:, | and | or |, and )?)+)"
    pairs = [(name, words) for words, name in re.findall(several + r" of \[?`([A-Z]\w+)`", text)]
    pairs += re.findall(r"`([A-Z]\w+)`(?:\]\(\S+\))? with " + several, text)
    for name, words in pairs:
        if name in PUBLIC or hasattr(callbacks, name):
            for word in re.findall(r"`([a-z_]+)`", words):
                assert is_known(word, (name,)) or word in dir(getattr(lit_efficient, name, None)), (name, word)
