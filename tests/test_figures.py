"""Each measured figure is a record of benchmarks/records/figures.json, and the documents state the recorded value."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks.figures import (
    RECORDS,
    ROOT,
    SOURCE,
    differences,
    generated,
    here,
    markdown_files,
    restated,
    table,
    unrecorded,
)
from lit_efficient.catalog import read_cards
from lit_efficient.files import configs

CARDS = read_cards()


def test_the_text_says_what_the_records_say() -> None:
    assert [str(path) for path, _ in differences()] == [], "run: python -m benchmarks.figures --write"


def test_no_figure_stands_in_markdown_without_a_record() -> None:
    # Each row of negative_results.md names its own setting and command.
    checked = [path for path in markdown_files() if path.name != "negative_results.md"]
    found = {path.name: unrecorded(path.read_text("utf-8")) for path in checked}
    assert {name: figures for name, figures in found.items() if figures} == {}


def test_such_a_figure_is_found() -> None:
    marked = "```\n7 MB\n```\n<!-- figure: dora -->3 %<!-- /figure --><!-- given -->2 s<!-- /given -->"
    text = f"A step takes 1.2 ms, `5 s` aside.\n{marked} GPUs of 24 GB: 40 % less."
    assert unrecorded(text) == ["1.2 ms", "40 %"]


def test_a_time_on_a_card_has_a_record() -> None:
    stated = " ".join(name for record in RECORDS.values() for name in record.get("stands_in", ()))
    timed = [card for card in CARDS if re.search(r"\d ?(m?s|CPU-seconds?)\b", card.facts["costs"])]
    assert {card.name for card in timed} >= {"ExactResume", "OffloadOptimizer"}
    assert [card.name for card in timed if card.module.replace(".", "/") not in stated] == []


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_says_where_its_figures_come_from(record: dict[str, Any]) -> None:
    assert set(record) >= {"command", "unit", "figures", "date", "threads"}
    assert record["figures"]
    environment = SOURCE["environments"][record["environment"]]
    assert environment["versions"]
    assert environment["machine"]
    if script := re.match(r"python (\S+\.py)", record["command"]):
        assert (ROOT / script[1]).is_file()
    if config := re.search(r"-c (\S+)", record["command"]):
        assert config[1] in configs.known()
    if "technique" in record:
        assert record["technique"] in {card.name for card in CARDS}
    markers = "".join(path.read_text("utf-8") for path in markdown_files())
    places = [f"<!-- figures: {record.get('table')} -->", f"<!-- figure: {record['id']} -->"]
    assert "stands_in" in record or any(place in markers for place in places), "no text states it"


def test_another_figure_is_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "configs" / "llm" / "lora.yaml"
    (sentence,) = RECORDS["llm/lora"]["stands_in"].values()
    text = path.read_text("utf-8")
    slower = {**RECORDS["llm/lora"], "figures": {**RECORDS["llm/lora"]["figures"], "cpu_seconds": 1234, "loss": 4.2}}
    changed = restated(slower, sentence, text)
    now = RECORDS["llm/lora"]["figures"]["cpu_seconds"]
    assert changed == text.replace(f"{now} CPU-seconds", "1234 CPU-seconds").replace("loss 4.37,", "loss 4.20,")
    assert restated(slower, sentence, text.replace("CPU-seconds", "hours")) is None
    monkeypatch.setitem(RECORDS, "llm/lora", slower)
    page = ROOT / "docs" / "llm.md"
    memory = RECORDS["llm/lora"]["figures"]["memory"]
    assert f"| 1234 | {memory} MB | loss 5.02 → 4.20," in generated(page, page.read_text("utf-8"))
    assert {path.name for path, _ in differences()} >= {"lora.yaml", "llm.md", "README.md"}


def test_links_of_a_table_start_at_its_file() -> None:
    assert "[lora.yaml](configs/llm/lora.yaml)" in table("llm", ROOT)
    assert "[lora.yaml](lora.yaml)" in table("llm", ROOT / "configs" / "llm")
    assert "[lora.yaml](../configs/llm/lora.yaml)" in table("llm", ROOT / "docs")


def test_a_new_record_can_name_its_machine() -> None:
    now = here()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", now["date"])
    assert now["versions"]["torch"]
    assert re.match(r"\d+ CPUs, .+", now["machine"])
