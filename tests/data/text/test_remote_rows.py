"""Sources at addresses, read from a local server and from ``file://``, whole or in shards."""

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_efficient.data.text.arguments import LanguageStream
from lit_efficient.data.text.rows import open_sources
from lit_efficient.errors import ConfigurationError
from tests.data.test_language_data import answers, chat, language_data, ready, write_rows

datasets = pytest.importorskip("datasets")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Serve the folder ``tmp_path/served``."""
    (tmp_path / "served").mkdir()
    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_on_a_server_are_the_rows_of_one_file(tmp_path: Path, address: str, workers: int) -> None:
    rows = [chat(i, 1 + i % 7) for i in range(30)]
    served = tmp_path / "served"
    (served / "0.jsonl").write_text("\n".join(map(json.dumps, rows[:10])))
    datasets.Dataset.from_list(rows[10:20]).to_parquet(str(served / "1.parquet"))
    (served / "2.jsonl").write_text("\n".join(map(json.dumps, rows[20:])))
    shards = [f"{address}/{name}" for name in ("0.jsonl", "1.parquet", "2.jsonl")]
    other = write_rows(tmp_path / "other.jsonl", 30, 500)
    train = [{"path": shards, "weight": 1, "name": "remote"}, {"path": other.as_uri(), "weight": 1}]
    data = ready(
        language_data(
            tmp_path,
            train=train,
            val=str(write_rows(tmp_path / "val.jsonl", 6, 900)),
            stream=LanguageStream(enabled=True, epoch_batches=60, buffer=30),
            num_workers=workers,
            batch_size=1,
            pack=False,
        )
    )
    found = answers(data, data.train_dataloader())
    remote = [text for text in found if int(text.split()[0][1:]) < 500]
    assert sorted(remote) == sorted(" ".join([f"w{i}"] * (1 + i % 7)) for i in range(30))


def test_other_formats_and_files_by_patterns(tmp_path: Path, address: str) -> None:
    served = tmp_path / "served"
    (served / "a.tsv").write_text("prompt\tcompletion\nx\ty\n")
    (source,) = open_sources(f"{address}/a.tsv", streaming=True)
    assert [row for _, row in source.rows()] == [{"prompt": "x", "completion": "y"}]
    for number in range(2):
        write_rows(tmp_path / f"shard {number}.jsonl", 2, 10 * number)
    by_pattern = open_sources((tmp_path / "shard").as_uri() + "*.jsonl")
    assert [source.name for source in by_pattern] == ["shard 0.jsonl", "shard 1.jsonl"]
    (alone,) = open_sources((tmp_path / "shard 1.jsonl").as_uri())
    assert alone.digest == by_pattern[1].digest


def test_what_is_not_at_an_address_is_a_sentence(tmp_path: Path, address: str) -> None:
    for name in ("a.zip", "a.txt"):
        with pytest.raises(ConfigurationError, match=r"unsupported suffix. At an address"):
            open_sources(f"{address}/{name}")
    with pytest.raises(ConfigurationError, match=r"no file matches"):
        open_sources(str(tmp_path / "*.jsonl"))
    with pytest.raises(ConfigurationError, match=r"none\.jsonl"):
        list(open_sources(f"{address}/none.jsonl", streaming=True)[0].rows())
    (tmp_path / "served" / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ConfigurationError, match=r"bad\.jsonl cannot be read to its end"):
        list(open_sources(f"{address}/bad.jsonl", streaming=True)[0].rows())
