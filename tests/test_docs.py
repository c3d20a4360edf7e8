"""What the documents say holds: links, commands, options, names of others, sums."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import Trainer

import lit_efficient
from lit_efficient.__main__ import COMMANDS, SUBCOMMANDS, main
from lit_efficient.catalog import read_cards
from lit_efficient.cli import LitEfficientCLI
from lit_efficient.data.prompt_data import read_prompts
from lit_efficient.data.text.chat_formats import KEYS, MalformedRow
from lit_efficient.data.text.pair_formats import PAIR_KEYS
from lit_efficient.data.text.plain_texts import TEXT_KEYS, LabelIds, TextReader
from lit_efficient.data.text.reading import JudgedReader, PairReader, Reader
from lit_efficient.data.text.rows import open_sources
from lit_efficient.files import configs
from tests import notebooks
from tests.documents import (
    DOCUMENTS,
    GIVEN,
    PAGES,
    ROOT,
    SCRIPT,
    all_commands,
    built,
    commands,
    of_header,
    page,
    rows_of,
)

BUILD = built()
SITE = dict(BUILD["assembled"]())
ALL = all_commands()
OF_RUNS = ("fit", "validate", "test", "predict", "preview", "cache-latents")  # parse a config: half a second each
# A config of one's own stands for one that the command is for: one of these.
CONFIGS = ("language_model", "latent_diffusion", "diffusion/photos_all", "llm/full_finetune")


class Parsed(BaseException):
    """A command line was understood; nothing of it runs."""


@pytest.fixture
def parses_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every command ends where its options are known."""
    monkeypatch.chdir(tmp_path)
    parse_known = argparse.ArgumentParser.parse_known_args

    def ends(parser: Any, arguments: Any = None, namespace: Any = None) -> Any:
        known, rest = parse_known(parser, arguments, namespace)
        if rest:
            parser.error(f"unknown: {rest}")
        raise Parsed(known)

    def ends_or_goes_on(parser: Any, arguments: Any = None, namespace: Any = None) -> Any:
        known, rest = parse_known(parser, arguments, namespace)
        if rest and main(["fit", *rest]):  # of preview and its like: the others are options of fit
            parser.error(f"unknown: {rest}")
        raise Parsed(known)

    def ends_here(cli: Any) -> None:
        raise Parsed(cli.config)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", ends)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", ends_or_goes_on)
    monkeypatch.setattr(LitEfficientCLI, "before_instantiate_classes", ends_here)


def understood(words: tuple[str, ...], config: str) -> bool:
    given = [config if word == "CONFIG" else GIVEN.get(word, word) for word in words]
    try:
        return main(given) == 0  # of --help and --print_config
    except Parsed:
        return True
    except SystemExit as end:
        return not end.code


def check(words: tuple[str, ...]) -> None:
    assert any(understood(words, config) for config in (CONFIGS if "CONFIG" in words else CONFIGS[:1]))


@pytest.mark.parametrize("words", [w for w in ALL if len(w) > 1 and w[0] not in OF_RUNS], ids=" ".join)
@pytest.mark.usefixtures("parses_alone")
def test_a_command_exists_with_its_options(words: tuple[str, ...]) -> None:
    check(words)


@pytest.mark.turns(6)
@pytest.mark.parametrize("words", [w for w in ALL if len(w) > 1 and w[0] in OF_RUNS], ids=" ".join)
@pytest.mark.usefixtures("parses_alone")
def test_a_command_of_a_config_exists_with_its_options(words: tuple[str, ...]) -> None:
    check(words)


@pytest.mark.usefixtures("parses_alone")
def test_an_option_that_does_not_exist_is_found() -> None:
    assert not understood(("average", "a.ckpt", "--output", "b.ckpt", "--bogus", "1"), "")
    assert not understood(("fit", "-c", "lora", "--trainer.max_stepz", "1"), "")
    assert not understood(("preview", "-c", "no_such_config"), "")
    assert not understood(("no_such_command", "-c", "lora"), "")


def test_configs_and_trainer_options_of_all_commands_exist() -> None:
    """What the commands that rest at this commit would say first, and those of the configs' own headers."""
    trainer = set(inspect.signature(Trainer).parameters)
    headers = [words for path in configs.known().values() for words in of_header(path.read_text("utf-8"))]
    assert len(headers) > 100
    for words in [*ALL, *headers]:
        assert not words or words[0].startswith("-") or words[0] in SUBCOMMANDS or words[0] in GIVEN
        for before, word in pairwise(words):
            if before == "-c":
                known = GIVEN.get(word, word) in configs.known() or Path(word).is_file()
                assert known or word == "RUN/config.yaml", words
        for name in re.findall(r"--trainer\.([a-z_]+)", " ".join(words)):
            assert name in trainer, words


def test_every_command_is_in_the_documents() -> None:
    assert {words[0] for words in ALL if words} >= {"fit", "validate", "test", "predict", *COMMANDS}
    text = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert [name for name in COMMANDS if f"lit_efficient {name}" not in text] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_and_heading_that_it_links_to_exists(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    missing = []
    for link in links:
        name, _, heading = link.partition("#")
        there = path.parent / name if name else path
        if not there.exists() or (heading and heading not in headings(there)):
            missing.append(link)
    assert missing == []


def headings(path: Path) -> set[str]:
    """The anchors that a viewer of Markdown and the site alike make of headings."""
    lines = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_a_link_to_no_file_of_the_repository_stops_the_build() -> None:
    with pytest.raises(SystemExit, match=r"nothing\.md"):
        BUILD["page_of"]("docs/nothing.md", {})


def test_links_lead_from_page_to_page_in_the_site() -> None:
    known = {"README.md": "overview.md", "lit_efficient/callbacks/ema.py": "techniques/EMA.md"}

    def linked(page: str, source: str, text: str) -> str:
        return BUILD["relinked"](page, source, text, lambda path: BUILD["page_of"](path, known))

    assert linked("symptoms.md", "docs/symptoms.md", "[a](../README.md#in-yaml)") == "[a](overview.md#in-yaml)"
    assert linked("llm.md", "docs/llm.md", "[a](../configs/llm/lora.yaml)") == "[a](configs/llm.md#config-llm-lora)"
    assert linked("techniques/LoRA.md", "", "[a](lit_efficient/callbacks/ema.py)") == "[a](EMA.md)"
    assert (
        linked("overview.md", "README.md", "![a](docs/digits.png) [b](https://a.b)")
        == "![a](digits.png) [b](https://a.b)"
    )
    assert linked("a.md", "docs/a.md", "```\n[a](nothing)\n```") == "```\n[a](nothing)\n```"


# The parts of a technique's page. Those in brackets need something that not every technique has.
PARTS = "When to use it, When not, [In Python], In YAML, Measured, Arguments, How it works, What it excludes, [Related]"


def test_a_technique_has_a_page_made_of_its_card() -> None:
    pages = {name: text for name, text in SITE.items() if name.startswith("techniques/")}
    assert pages.keys() == {f"techniques/{card.name}.md" for card in read_cards() if card.is_technique}
    for name, shown in pages.items():
        parts = re.findall(r"^## (.*)$", shown, re.MULTILINE)
        expected = [part for part in PARTS.split(", ") if not part.startswith("[") or part.strip("[]") in parts]
        assert parts == [part.strip("[]") for part in expected], name
    shown = SITE["techniques/LoRA.md"]
    assert shown.startswith("# LoRA\n\nLoRA: train a low-rank change of frozen weights")
    assert "- For less memory: frozen weights need no gradients" in shown
    assert "- It costs two thin matrix products" in shown
    assert "automodule:: lit_efficient.callbacks.lora" in shown
    assert "- [IA3](IA3.md): each freezes all parameters except its own" in shown
    assert "beside peft's: " in shown  # a result of another benchmark
    assert "| Memory at its peak | 0." in shown
    assert "- class_path: LoRA" in shown
    assert "from lit_efficient import LoRA" in shown


def test_every_example_is_on_their_page() -> None:
    scripts = sorted((ROOT / "examples").glob("*.py"))
    assert [path.name for path in scripts if f"[{path.name}](files/examples/" not in SITE["examples.md"]] == []


def test_every_notebook_has_a_page_with_its_outputs() -> None:
    pictures = BUILD["pages"].notebook_pictures()
    shown = set()
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        assert f"[{path.stem}](notebooks/{path.stem}.md)" in SITE["examples.md"]
        page = SITE[f"notebooks/{path.stem}.md"]
        assert page.startswith("# ")
        kept = notebooks.kept(notebooks.read(path))
        assert [one.text for one in kept if one.text.strip("\n") not in page] == []
        linked = re.findall(r"!\[[^]]*\]\((.*)\)", page)
        assert [pictures[name] for name in linked] == [one.picture for one in kept if one.picture]
        shown |= {*linked}
    assert shown == pictures.keys()
    assert len(shown) >= 6


def test_every_public_name_is_in_the_reference() -> None:
    shown = set(re.findall(r"auto(?:class|function):: lit_efficient\.(\w+)$", "\n".join(SITE.values()), re.MULTILINE))
    assert shown == set(lit_efficient.PUBLIC)


def test_every_page_of_the_folder_is_in_the_menu() -> None:
    menu = SITE["index.md"].partition("```{toctree}")[2]
    assert [path.name for path in PAGES if path.name != "index.md" and path.name not in menu.split()] == []


def test_each_symptom_names_the_command_that_finds_its_cause() -> None:
    parts = (ROOT / "docs" / "symptoms.md").read_text("utf-8").split("\n### ")[1:]
    assert len(parts) >= 20
    assert [part.partition("\n")[0] for part in parts if not list(commands(part))] == []


def test_nothing_is_installed_from_an_index_before_a_release() -> None:
    """There is no such package on an index: a checkout is installed, with its extras."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert "(unreleased)" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    texts = [*DOCUMENTS, *configs.known().values(), *(ROOT / "benchmarks").rglob("*.sh"), ROOT / "CHANGELOG.md"]
    texts += [*(ROOT / "benchmarks").rglob("*.yaml"), *(ROOT / "examples").iterdir(), ROOT / "SECURITY.md"]
    said = 0
    for path in filter(Path.is_file, texts):
        text = path.read_text("utf-8", errors="replace")
        assert not re.search(r"(pip|uv)3? (install|add)[^\n&|]*lit[-_]efficient", text), path
        for names in re.findall(r"-e '\.\[([\w,]+)\]'", text):
            assert set(names.split(",")) <= set(extras), path
            said += 1
    assert said >= 7
    listed = [name for row in rows_of(page("installing.md")) for name in re.findall(r"`(\w+)`", row[0])]
    assert listed == list(dict.fromkeys(listed))
    assert {*listed} == {*extras}


def test_configs_that_are_said_to_resume_exactly_do() -> None:
    read = {name: yaml.safe_load(path.read_text("utf-8")) for name, path in configs.known().items()}
    whole = {name: one for name, one in read.items() if {"model", "data", "trainer"} <= {*one}}
    whole = {
        name: one for name, one in whole.items() if isinstance(one["model"], dict) and "class_path" in one["model"]
    }
    assert len(whole) > 20
    assert [name for name, one in whole.items() if "ExactResume" not in str(one["trainer"].get("callbacks"))] == []


def test_the_sizes_that_fit_are_what_the_bytes_give() -> None:
    rows = [row for row in rows_of(page("gpus.md")) if len(row) == 6 and row[2].endswith(" B")]
    assert len(rows) == 6
    for row in rows:
        for memory, shown in zip((8, 16, 24, 80), row[2:]):
            assert float(shown.removesuffix(" B")) == pytest.approx(0.8 * memory / float(row[1]), rel=0.07), row


def test_the_script_for_pretrained_weights_says_what_should_come_out() -> None:
    text = SCRIPT.read_text("utf-8")
    for config in sorted(SCRIPT.with_suffix("").glob("*.yaml")):
        assert config.name in text
        assert yaml.safe_load(config.read_text("utf-8"))["model"]
    for step in re.findall(r"^(\w+)\(\) \{$", text, re.MULTILINE):
        assert step == "run" or "What should come out" in text.partition(f"\n{step}() {{")[0].rpartition("\n}\n")[2]


def test_assistants_are_given_a_short_list_of_commands() -> None:
    text = (ROOT / "AGENTS.md").read_text("utf-8")
    assert len(text.splitlines()) < 60
    assert {("techniques", "--json"), ("configs", "--json")} <= set(commands(text))


# Data module (empty: that of the row above), format and row.
ROWS = re.findall(
    r"^\| (?:`(\w+)`)? ?\| (?:`[\w/]+`)? ?\| (?:`(\w+)`)? ?\| `(\{.*?\})`",
    (ROOT / "docs" / "data.md").read_text("utf-8"),
    re.MULTILINE,
)


def test_the_rows_on_the_page_of_data_formats_have_these_formats(tmp_path: Path) -> None:
    readers: dict[str, Any] = {
        "LanguageData": Reader,
        "PreferenceData": PairReader,
        "UnpairedPreferenceData": JudgedReader,
        "LabelledTextData": lambda sources: TextReader(sources, kind, LabelIds()),
        "EmbeddingData": lambda sources: TextReader(sources, kind, LabelIds()),
    }
    data = ""
    read: set[str] = set()
    for name, kind, row in ROWS:
        data = name or data
        file = tmp_path / f"{len(read)}.jsonl"
        file.write_text(row, encoding="utf-8")
        if data == "PromptData":
            assert read_prompts(str(file)) == [json.loads(row)]
            continue
        reader = readers[data](open_sources(str(file)))
        assert f"format {kind}, by the keys" in reader.formats[0]
        ((_, found),) = reader
        assert not isinstance(found, MalformedRow), (row, found)
        read.add(f"{data} {kind}")
    assert read == {
        *(f"LanguageData {kind}" for kind in KEYS),
        *(f"PreferenceData {kind}" for kind in PAIR_KEYS),
        *(f"LabelledTextData {kind}" for kind in TEXT_KEYS if kind != "embedding"),
        "UnpairedPreferenceData completion",
        "EmbeddingData embedding",
    }
