"""The same few of the scoreboard's cases of ourselves each time, nightly others; the board says what was counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trust
from benchmarks.trust_rows import OURS, Piece, pieces
from tests.turns import commit

PIECES = pieces()
# Each trains several times in processes of its own, or packs for seconds; the commonest signal and the commonest kills
# are tried each time.
DEAR = {"signals", "signals-ranks", "full-disks", "folders-gone", "loader-workers", "two-runs", "property-packing"}


def marks(piece: Piece, seed: int) -> list[Any]:
    if seed:
        return [pytest.mark.nightly]
    return [pytest.mark.turns(4, family="trials of seconds")] if piece.name in DEAR else []


CASES = [
    pytest.param(piece, case, id=f"{piece.name}-{case}", marks=marks(piece, seed))
    for seed in (0, 1 + commit())
    for piece in PIECES
    if piece.subject == OURS and piece.in_ci
    for case in trust.sample(piece, min(1.0, piece.in_ci / len(piece.cases())), seed)
]


@pytest.mark.parametrize(("piece", "case"), CASES)
def test_it_holds(piece: Piece, case: str, tmp_path: Path) -> None:
    assert trust.attempt(piece, case, tmp_path) == ""


def test_each_piece_has_a_row_and_cases_of_their_own_names() -> None:
    for piece in PIECES:
        assert piece.row in trust.ROWS, piece.name
        assert len({*piece.cases()}) == len(piece.cases()) > 0, piece.name


def test_the_page_says_what_was_counted() -> None:
    rows: list[dict[str, Any]] = json.loads(trust.TALLIES.read_text()) if trust.TALLIES.exists() else []
    assert {row["piece"] for row in rows} <= {piece.name for piece in PIECES}
    assert (trust.TABLE.read_text() if rows else "") == (trust.page(rows) if rows else "")


def test_what_went_wrong_is_said_and_tried_again_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[str] = []
    fails = {"b"}

    def trial(case: str, folder: Path) -> str:
        assert folder == Path.cwd()
        assert not list(folder.iterdir())
        tried.append(case)
        return "it fell" if case in fails else ""

    monkeypatch.setattr(trust, "FOLDER", tmp_path)
    monkeypatch.setattr(trust, "TALLIES", tmp_path / "trust.json")
    piece = Piece(1, "falls", "Is dropped.", lambda: ("a", "b", "c"), trial)
    assert trust.run([piece], 1.0, float("inf"), again=False) == 1
    assert trust.run([piece], 1.0, float("inf"), again=False) == 0  # all have been tried
    assert tried == ["a", "b", "c"]
    (row,) = trust.tallies([piece])
    assert (row["tried"], row["held"], row["wrong"]) == (3, 2, ["b: it fell"])
    assert "| 3 | **2** |" in trust.page([row])
    assert "b: it fell" in trust.page([row])
    fails.clear()
    assert trust.run([piece], 1.0, float("inf"), again=True) == 0
    assert tried[3:] == ["b"]
    assert trust.tallies([piece])[0]["held"] == 3
    assert "falls: b: it fell" in capsys.readouterr().out


def test_what_ran_is_kept_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    names = ["LoRA 1", "LoRA 2", "EMA 1: a", "EMA 1: b"]

    def trial(case: str, _: Path) -> str:
        tried.append(case)
        return "it fell" if case == "EMA 1: b" else ""

    def run(more: bool = True) -> list[str]:
        """Which cases are tried by one who has the repository alone."""
        piece = Piece(1, "falls", "Is dropped.", lambda: names, trial)
        monkeypatch.setattr(trust, "FOLDER", tmp_path / f"runs-{len([*tmp_path.iterdir()])}")
        trust.FOLDER.mkdir()
        tried.clear()
        trust.run([piece], 1.0 if more else 0.5, float("inf"), again=False)
        trust.TALLIES.write_text(json.dumps(trust.tallies([piece])))
        return tried.copy()

    monkeypatch.setattr(trust, "TALLIES", tmp_path / "trust.json")
    first = run(more=False)
    assert len(first) == 2
    assert sorted(first + run()) == sorted(names)
    assert run() == []
    (row,) = json.loads(trust.TALLIES.read_text())
    assert (row["tried"], row["held"], row["wrong"]) == (4, 3, ["EMA 1: b: it fell"])
    assert [text.split()[1] for text in row["results"].values()] == ["2+", "1+1-"]
    names.insert(0, "DoRA 1")  # of another technique
    names.append("LoRA 3")
    assert run() == ["DoRA 1", "LoRA 1", "LoRA 2", "LoRA 3"]  # a number among three names no more
