"""The catalogue says what the files say."""

import ast
import csv
import inspect
import json
import re
from importlib import import_module

import pytest
from torch.optim import Optimizer

from lit_efficient import PUBLIC
from lit_efficient.__main__ import main
from lit_efficient.catalog import PACKAGE, PURPOSES, SLOTS, Card, arguments_of, pairs, purpose_of, read_cards
from lit_efficient.commands.card import card_text
from lit_efficient.commands.techniques import listed, markdown, matrix, table
from lit_efficient.declaration import Declaration
from tests import generated

SOURCE = '''"""Drop blocks: train a shorter network.

    y = x + f(x)    with probability 1 - p

Saves: half of the ``blocks``' compute
    on average
Costs: nothing
Source: Huang et al. (2016), https://arxiv.org/abs/1603.09382
"""

class Helper:
    pass

class Drop(Technique):
    """Drop.

    Args:
        rate: Probability in [0, 1).
            Second line.

    Raises:
        ValueError: never.
    """

    phase = Phase.ARCHITECTURE
    conflicts: ClassVar[dict[str, str]] = {"Plain": "both change the forward; keep one"}

    def __init__(self, rate: float = 0.5, *, rule: str = "linear") -> None:
        pass
'''


@pytest.fixture
def cards(tmp_path):
    for folder in ("callbacks", "optimizers", "data", "models"):
        (tmp_path / folder).mkdir()
    (tmp_path / "callbacks/drop.py").write_text(SOURCE)
    (tmp_path / "callbacks/plain.py").write_text('"""Plain."""\nclass Plain(Callback):\n    pass\n')
    (tmp_path / "optimizers/warm.py").write_text('"""Warm up."""\nclass Warm(LRScheduler):\n    pass\n')
    (tmp_path / "data/rows.py").write_text('"""Rows."""\nclass Rows:\n    pass\n')
    (tmp_path / "models/net.py").write_text('"""Net."""\nclass Net:\n    pass\n')
    public = {
        "Drop": "callbacks.drop",
        "Plain": "callbacks.plain",
        "Warm": "optimizers.warm",
        "Rows": "data.rows",
        "Net": "models.net",
        "Later": "callbacks.later",
    }
    return read_cards(public, tmp_path)


def test_a_card_holds_what_the_file_says(cards):
    assert cards[0] == Card(
        name="Drop",
        slot="trainer.callbacks",
        module="lit_efficient.callbacks.drop",
        summary="Drop blocks: train a shorter network.",
        facts={
            "saves": "half of the `blocks`' compute on average",
            "costs": "nothing",
            "source": "Huang et al. (2016), https://arxiv.org/abs/1603.09382",
            "phase": "ARCHITECTURE",
        },
        signature="rate: float=0.5, *, rule: str='linear'",
        arguments="rate: Probability in [0, 1).\n    Second line.",
        conflicts={"Plain": "both change the forward; keep one"},
    )


def test_a_folder_is_a_slot(cards):
    slots = {card.name: (card.slot, card.is_technique) for card in cards}
    assert slots == {
        "Drop": ("trainer.callbacks", True),
        "Plain": ("trainer.callbacks", False),
        "Warm": ("lr_scheduler", True),
        "Rows": ("data", False),
    }


def test_conflicts_hold_in_both_directions_and_are_listed_once():
    a = Card("A", "trainer.callbacks", "m", "s", conflicts={"B": "why"})
    b = Card("B", "trainer.callbacks", "m", "s", conflicts={"A": "why not"})
    c = Card("C", "trainer.callbacks", "m", "s")
    assert sorted(pairs([a, b, c])) == [("A", "B")]
    d, e = (Card(name, "optimizer", "m", "s") for name in "DE")
    assert _table([d, e])["D"] == {"D": "itself", "E": "the slot holds one"}
    rows = _table([a, b, c])
    assert rows["A"] == {"A": "itself", "B": "conflicts: why", "C": "together"}
    assert rows["B"] == {"A": "conflicts: why", "B": "itself", "C": "together"}
    shown = matrix([a, b, c], 80).splitlines()
    assert shown[:4] == ["A", "  not with B: why", "B", "  nor with A: see these"]
    assert "Without conflicts: C." in shown


def _table(cards):
    return {row.pop(""): row for row in csv.DictReader(table(cards).splitlines())}


@pytest.mark.parametrize("label", ["saves", "costs", "source"])
def test_the_docstring_of_a_technique_states_what_it_saves_and_costs_and_its_source(label):
    techniques = [card for card in read_cards() if card.is_technique and card.slot == "trainer.callbacks"]
    missing = [card.name for card in techniques if not card.facts.get(label)]
    assert not missing, f"add a line that begins with {label.title()}: to the module docstring of {', '.join(missing)}"


def test_the_list_has_each_technique_once_below_what_it_is_for():
    ours = read_cards()
    aimless = [c.name for c in ours if c.is_technique and c.slot not in ("model", "data") and not purpose_of(c)]
    assert not aimless, f"say in `helps` which of {[*PURPOSES]} they serve"
    lines = listed(ours, 1000).splitlines()
    titles = [line for line in lines if line in PURPOSES.values()]
    assert titles == list(PURPOSES.values())
    place = {}
    for line in lines:
        if line in titles:
            title = line
        elif line.startswith("  ") and line.split()[0] in {card.name for card in ours}:
            assert line.split()[0] not in place
            place[line.split()[0]] = title
    techniques = {c.name: c for c in ours if c.is_technique and c.slot not in ("model", "data")}
    assert place == {name: PURPOSES[purpose_of(card)] for name, card in techniques.items()}
    below = "\n".join(lines[-9:])
    assert all(card.name in below for card in ours if card.name not in place)


@pytest.mark.parametrize("columns", ["60", ""])
@pytest.mark.parametrize("words", [[], ["--matrix"], ["--for", "speed"], ["--for", "oom"], ["LoRA"], ["LanguageData"]])
def test_it_fits_the_terminal(words, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    width = int(columns or 80)  # no terminal
    assert main(["techniques", *words]) == 0
    text = capsys.readouterr().out
    code = text[text.find("In YAML") : text.find("\n\n", text.find("In Python"))] if "In YAML" in text else ""
    lines = text.replace(code, "").splitlines()  # code is not cut
    assert width - 15 < max(map(len, lines)) <= width


def test_programs_read_all_of_it(capsys):
    assert main(["techniques", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    cards = {card.name: card for card in read_cards()}
    assert entries.keys() == cards.keys()
    for name, entry in entries.items():
        assert [entry[key] for key in ("slot", "saves", "costs", "source")] == [
            "" if cards[name].is_block else cards[name].slot,
            *(cards[name].facts[label] for label in ("saves", "costs", "source")),
        ]
        cls = getattr(import_module(entry["module"]), name)
        if "__init__" in vars(cls) and not hasattr(cls, "__dataclass_fields__"):
            assert [one["name"] for one in entry["arguments"]] == [
                one for one in inspect.signature(cls.__init__).parameters if one != "self"
            ]
            assert all(one["help"] for one in entry["arguments"]), name
    assert entries["LoRA"]["config"] == "lora"
    assert "IA3" in entries["LoRA"]["conflicts"]
    assert "LoRA" in entries["IA3"]["conflicts"]
    assert "Compile(modules='network')" in entries["StochasticDepth"]["conflicts"]
    assert "StochasticDepth, if Compile(modules='network')" in entries["Compile"]["conflicts"]
    assert main(["techniques", "lora", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [entries["LoRA"]]


def test_arguments_are_those_of_the_signature(cards):
    assert arguments_of(cards[0]) == [
        {"name": "rate", "type": "float", "default": "0.5", "help": "Probability in [0, 1). Second line."},
        {"name": "rule", "type": "str", "default": "'linear'", "help": ""},
    ]


def test_a_card_names_what_is_related_and_what_was_measured(cards, tmp_path, monkeypatch):
    named = Card("Other", "trainer.callbacks", "lit_efficient.callbacks.other", "Goes well with Drop.")
    assert "related  Other" in card_text(cards[0], [*cards, named])
    assert "measured" not in card_text(cards[0])
    (tmp_path / "measured.json").write_text('{"Drop": "3 of 4 GB"}')
    monkeypatch.setattr("lit_efficient.commands.card.PACKAGE", tmp_path)
    assert "measured 3 of 4 GB" in card_text(cards[0])


def test_the_yaml_on_a_card_uses_the_class(cards):
    import yaml

    text = card_text(cards[0]).partition("In YAML:")[2].partition("\n\n")[0]
    assert yaml.safe_load(text) == {"trainer": {"callbacks+": [{"class_path": "Drop"}]}}
    assert "not with Plain: both change the forward; keep one" in card_text(cards[0])


def test_markdown_lists_each_technique_once_under_its_goal(cards):
    (line,) = (line for line in markdown(cards).splitlines() if "`Drop`" in line)
    assert line.startswith("- [`Drop`](lit_efficient/callbacks/drop.py): ")
    lines = markdown(read_cards()).splitlines()
    goals = [line for line in lines if line.startswith("## ")]
    assert goals[:3] == ["## Less memory", "## More speed", "## Better quality"]
    shown = [re.match(r"- \[`(\w+)`\]", line)[1] for line in lines if line.startswith("- ")]
    assert sorted(shown) == sorted(card.name for card in read_cards() if card.is_technique)
    memory = lines[: lines.index("## More speed")]
    assert any("`LoRA`" in line for line in memory)
    assert max(map(len, lines)) < 220  # a line of a telephone's list, not of a table


def test_every_class_in_a_slot_has_a_card_that_agrees_with_the_class():
    cards = {card.name: card for card in read_cards()}
    for name, module in PUBLIC.items():
        path = PACKAGE / (module.replace(".", "/") + ".py")
        if module.split(".")[0] not in SLOTS or not path.is_file():
            continue
        if not any(isinstance(n, ast.ClassDef) and n.name == name for n in ast.parse(path.read_text()).body):
            continue
        cls = getattr(import_module(f"lit_efficient.{module}"), name)
        assert dict(getattr(cls, "conflicts", {})) == cards[name].conflicts
        if issubclass(cls, Declaration | Optimizer):
            assert getattr(cls, "traits", frozenset()) == cards[name].traits, f"{name} must list all its traits itself"
        phase = getattr(cls, "phase", None)
        assert (phase.name if phase is not None else "") == cards[name].facts["phase"]


def test_the_command_prints_cards_and_refuses_unknown_names(capsys, monkeypatch, cards):
    monkeypatch.setattr("lit_efficient.commands.techniques.read_cards", lambda: cards)
    assert main(["techniques", "drop"]) == 0
    assert capsys.readouterr().out.startswith("Drop   (slot trainer.callbacks)")
    assert main(["techniques", "Dorp"]) == 2
    assert "did you mean 'Drop'?" in capsys.readouterr().err
    assert main(["techniques", "Drop", "Plain"]) == 2
    assert main(["techniques"]) == 0


def test_what_is_written_from_the_sources_is_what_they_say_now() -> None:
    stale = [path.name for path, text in generated.written().items() if path.read_text("utf-8") != text]
    assert not stale, "run: python -m tests.generated"
