import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_efficient.data.text.arguments import LanguageRows, LanguageStream
from lit_efficient.data.text.rows import table_rows
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.order.stream_loader import StreamLoader
from tests.data.resumed import whole_and_resumed
from tests.data.test_language_data import answers, chat, language_data, ready, write_rows


def streamed(tmp_path: Path, **changes):
    options: dict[str, Any] = {"enabled": True, "epoch_batches": 4, "buffer": 10}
    options |= {name: changes.pop(name) for name in options if name in changes}
    settings = {"val": str(write_rows(tmp_path / "val.jsonl", 6, 900)), "stream": LanguageStream(**options)}
    return ready(language_data(tmp_path, **(settings | {"batch_size": 1} | changes)))


def test_a_stream_learns_every_row_once_before_it_begins_anew(tmp_path: Path) -> None:
    data = streamed(tmp_path, epoch_batches=200)
    expected = [" ".join([f"w{i}"] * (1 + i % 7)) for i in range(60)]
    found = answers(data, data.train_dataloader())
    assert sorted(found[:60]) == sorted(expected)
    assert found[:60] != expected  # shuffled
    assert sorted(found[60:120]) == sorted(expected)
    assert found[60:120] != found[:60]
    fill = [(batch["labels"] != -100).sum().item() for batch in data.train_dataloader()]
    assert sum(fill) / len(fill) > 15  # packed: a single document has about ten learned tokens


def test_workers_share_a_stream(tmp_path: Path) -> None:
    data = streamed(tmp_path, num_workers=2, epoch_batches=20)
    first = answers(data, data.train_dataloader())[:20]
    assert len(set(first)) == 20


def test_a_stream_goes_on_where_it_stood_with_two_workers(tmp_path: Path) -> None:
    data = streamed(tmp_path, num_workers=2, epoch_batches=3)
    loader = data.train_dataloader()
    assert isinstance(loader, StreamLoader)
    assert len(loader) == 3
    whole, states = [], []
    for _ in range(3):  # epochs
        for batch in loader:
            whole.append(batch)
            states.append(loader.state_dict())
    assert not torch.equal(whole[0]["input_ids"], whole[3]["input_ids"])  # an epoch does not begin it anew
    resumed = data.train_dataloader()
    resumed.load_state_dict(states[3])
    rest = [batch for _ in range(2) for batch in resumed][: len(whole) - 4]
    assert len(rest) == 5
    for found, expected in zip(rest, whole[4:]):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    other = streamed(tmp_path, num_workers=1).train_dataloader()
    with pytest.raises(ConfigurationError, match="the same num_workers: 2 in the checkpoint, 1 now"):
        other.load_state_dict(states[3])


@pytest.mark.parametrize("streaming", [True, False])
def test_a_run_resumed_in_the_middle_of_an_epoch_sees_the_rest(tmp_path: Path, streaming: bool) -> None:
    whole, _ = whole_and_resumed(
        tmp_path, lambda: streamed(tmp_path, epoch_batches=4, enabled=streaming, num_workers=2 * streaming)
    )
    assert len({str(tokens) for tokens in whole.seen}) > 6


def test_malformed_rows_stop_a_stream(tmp_path: Path) -> None:
    lines = [json.dumps(chat(i)) if i % 4 else "{" for i in range(200)]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    data = streamed(tmp_path, train=str(tmp_path / "bad.jsonl"), epoch_batches=100)
    with pytest.raises(ConfigurationError, match=r"malformed \(25\.\d+%\):\n  bad.jsonl:1: no JSON"):
        list(data.train_dataloader())


def test_a_short_stream_is_checked_and_says_what_it_lost(tmp_path: Path) -> None:
    lines = [json.dumps(chat(i)) if i % 2 else "{" for i in range(40)]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigurationError, match=r"20 of 40 rows for train are malformed"):
        list(streamed(tmp_path, train=str(tmp_path / "bad.jsonl"), epoch_batches=100).train_dataloader())
    tolerant = streamed(
        tmp_path, train=str(tmp_path / "bad.jsonl"), epoch_batches=100, rows=LanguageRows(max_malformed=0.6)
    )
    with pytest.warns(UserWarning, match=r"20 of 40 rows for train are malformed \(50.00%\)"):
        list(tolerant.train_dataloader())


def test_a_stream_can_be_sent_to_workers_that_are_spawned(tmp_path: Path) -> None:
    """Spawned workers have no process group: the main process sends them their place."""
    loader = streamed(tmp_path).train_dataloader()
    assert next(iter(loader))["input_ids"].ndim == 2
    sent = pickle.loads(pickle.dumps(loader.loader.dataset))
    assert sent.place == (0, 1)
    sent.place = (1, 2)
    kept = loader.loader.dataset
    kept.place = (0, 2)
    ours, theirs = ({row[0][0].tobytes() for row, _ in zip(stream, range(8))} for stream in (kept, sent))
    assert not ours & theirs


def test_a_stream_needs_a_tokenizer_and_rows_to_validate_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"stream\.enabled needs a tokenizer and val"):
        language_data(tmp_path, stream=LanguageStream(enabled=True))


class EveryWorkerReadsAll(torch.utils.data.IterableDataset):
    def __init__(self, found) -> None:
        self.found = found

    def __iter__(self):
        return (row["n"] for _, row in table_rows(self.found, "s"))


def test_a_hugging_face_stream_is_not_divided_twice() -> None:
    import datasets

    found = datasets.Dataset.from_list([{"n": i} for i in range(6)]).to_iterable_dataset(num_shards=2)
    assert [place for place, _ in table_rows(found, "s")][:2] == ["s, row 1", "s, row 2"]
    loader = torch.utils.data.DataLoader(EveryWorkerReadsAll(found), None, num_workers=2)
    assert sorted(loader) == sorted([*range(6), *range(6)])
