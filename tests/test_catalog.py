"""The catalogue says what the files say."""

import ast
from importlib import import_module

import pytest

from lit_efficient import PUBLIC
from lit_efficient.__main__ import main
from lit_efficient.catalog import PACKAGE, SLOTS, Card, pairs, read_cards
from lit_efficient.commands.catalog_text import card_text, markdown, matrix, table
from tests import stub

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
    assert matrix([d, e]).splitlines()[1].split()[1:] == ["D", ".", "/"]
    rows = [line.split()[1:] for line in matrix([a, b, c]).splitlines()[1:4]]
    assert rows == [["A", ".", "x", "+"], ["B", "x", ".", "+"], ["C", "+", "+", "."]]


def test_the_table_fits_the_terminal_and_is_one_line_each_without_one(cards):
    for width in (80, 120):
        assert max(map(len, table(cards, width).splitlines())) <= width
    plain = table(cards, None).splitlines()
    assert [line.split()[0] for line in plain[:3]] == ["name", "Drop", "Warm"]
    assert "half of the `blocks`' compute on average" in plain[1]
    assert "no techniques, but public too: Plain (trainer.callbacks), Rows (data)" in plain


def test_the_yaml_on_a_card_uses_the_class(cards):
    import yaml

    text = card_text(cards[0]).partition("In YAML:")[2]
    assert yaml.safe_load(text) == {"trainer": {"callbacks+": [{"class_path": "Drop"}]}}
    assert "not with Plain: both change the forward; keep one" in card_text(cards[0])


def test_markdown_has_a_row_for_each_technique(cards):
    lines = markdown(cards).splitlines()
    assert len(lines) == 2 + 2
    assert lines[2].startswith("| [`Drop`](lit_efficient/callbacks/drop.py) | `trainer.callbacks` | half of")


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
        phase = getattr(cls, "phase", None)
        assert (phase.name if phase is not None else "") == cards[name].facts["phase"]


def test_the_command_prints_cards_and_refuses_unknown_names(capsys, monkeypatch, cards):
    monkeypatch.setattr("lit_efficient.commands.catalog_text.read_cards", lambda: cards)
    assert main(["techniques", "drop"]) == 0
    assert capsys.readouterr().out.startswith("Drop   (slot trainer.callbacks)")
    assert main(["techniques", "Dorp"]) == 2
    assert "Did you mean Drop?" in capsys.readouterr().err
    assert main(["techniques", "Drop", "Plain"]) == 2
    assert main(["techniques"]) == 0


def test_type_checkers_read_the_names_that_there_are() -> None:
    assert stub.STUB.read_text("utf-8") == stub.text(), "run: python -m tests.stub"
