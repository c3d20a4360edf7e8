"""Streams of several sources: each stretch of the stream, of each process and worker, holds all of them."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from lit_efficient.data.text.arguments import LanguageStream
from lit_efficient.data.text.interleaving import interleave
from lit_efficient.data.text.reading import Reader
from lit_efficient.data.text.rows import open_sources
from tests.data.test_language_data import chat, language_data, ready, write_rows


def lines(path: Path, count: int) -> Path:
    text = "".join(json.dumps({"text": f"{path.name} {i}"}) + "\n" for i in range(count))
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def reader_of(*paths: Path) -> Reader:
    return Reader([source for path in paths for source in open_sources(str(path))])


def names(reader: Reader, part: int = 0, parts: int = 1) -> list[str]:
    """The files of the rows of a part, in the order of the stream."""
    return [re.split("[:,]", place)[0] for ours, (place, _) in interleave(reader, part, parts) if ours]


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("counts", [(600, 600), (900, 300), (1000, 200, 50)])
def test_every_stretch_of_every_part_holds_each_source_in_proportion(
    tmp_path: Path, counts: tuple[int, ...], parts: int
) -> None:
    reader = reader_of(*(lines(tmp_path / f"{i}.jsonl", count) for i, count in enumerate(counts)))
    together = []
    for part in range(parts):
        found = names(reader, part, parts)
        together += found
        for start in range(0, len(found) - 99, 50):
            window = Counter(found[start : start + 100])
            for i, count in enumerate(counts):
                assert window[f"{i}.jsonl"] == pytest.approx(100 * count / sum(counts), abs=2)
    assert Counter(together) == {f"{i}.jsonl": count for i, count in enumerate(counts)}


def test_compressed_tables_and_large_files_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_efficient.data.text.rows._LARGE", 1 << 20)
    (tmp_path / "c.csv").write_text("text\n" + "".join(f"line {i}\n" for i in range(30_000)))
    reader = reader_of(lines(tmp_path / "a.jsonl", 60_000), lines(tmp_path / "b.jsonl.gz", 60_000), tmp_path / "c.csv")
    assert reader.estimates == pytest.approx([60_000, 60_000, 30_000], rel=0.1)  # gzip reads ahead
    first = Counter(name for name, _ in zip(names(reader), range(1000)))
    assert dict(first) == pytest.approx({"a.jsonl": 400, "b.jsonl.gz": 400, "c.csv": 200}, abs=40)


def test_many_files_of_one_row_are_spread_among_the_rows_of_a_large_one(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(300):
        (folder / f"{i:03}.txt").write_text(f"text {i}")
    reader = reader_of(folder, lines(tmp_path / "a.jsonl", 300))
    for part in range(2):
        found = ["a" if name == "a.jsonl" else "text" for name in names(reader, part, 2)]
        shares = [found[start : start + 50].count("text") for start in range(0, 300, 50)]
        assert all(15 <= share <= 35 for share in shares), shares
    assert len(set(names(reader))) == 301


def test_workers_of_a_run_see_both_sources_and_resume_exactly(tmp_path: Path) -> None:
    """With two parts and two equal sources, taking every second row would give each worker one source."""
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(chat(1000 + i)) + "\n" for i in range(60)))
    stream = LanguageStream(enabled=True, epoch_batches=8, buffer=4)
    train = [str(write_rows(tmp_path / "data.jsonl")), str(other)]
    val = str(write_rows(tmp_path / "val.jsonl", 6, 900))
    data = ready(language_data(tmp_path, train=train, val=val, stream=stream, num_workers=2, batch_size=1))
    loader = data.train_dataloader()
    batches, states = [], []
    for batch in loader:
        batches.append(batch["input_ids"].tolist())
        states.append(loader.state_dict())
    for worker in range(2):
        text = "".join(data.chat_tokenizer.decode(row) for batch in batches[worker::2] for row in batch)
        assert {int(number) >= 1000 for number in re.findall(r"Say (\d+)", text)} == {False, True}
    resumed = data.train_dataloader()
    resumed.load_state_dict(states[4])
    assert [batch["input_ids"].tolist() for batch in resumed][:3] == batches[5:]
