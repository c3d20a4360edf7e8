"""Tests of the teacher's cache: found by content, complete after a crash, refused when altered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_efficient import ConfigurationError
from lit_efficient.data.text import teacher_cache
from lit_efficient.data.text.teacher_cache import Batch, TopKCache, cache_key, row_keys, write_top_k
from lit_efficient.losses.next_token import IGNORE, targets_of
from lit_efficient.mechanisms import progress
from tests.support import SlowClock


def row(seed: int, length: int, padded: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 90, (length,), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:2] = IGNORE
    filling = (0, padded - length)
    return {
        "input_ids": torch.nn.functional.pad(ids, filling),
        "labels": torch.nn.functional.pad(labels, filling, value=IGNORE),
        "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), filling),
    }


def batch(*seeds: int, padded: int = 9) -> dict[str, torch.Tensor]:
    return torch.utils.data.default_collate([row(seed, 4 + seed % 5, padded) for seed in seeds])


def teach(of: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return answers that identify the token that they belong to."""
    asked = of["input_ids"][targets_of(of) != IGNORE]
    return torch.stack((asked, asked + 100), dim=1), torch.stack((-asked, -asked - 1, -asked - 2), dim=1) / 10


BATCHES = [batch(0, 1), batch(2, 3), batch(4, 5), batch(6)]


def test_rows_are_found_in_any_order_batch_and_filling(tmp_path: Path) -> None:
    write_top_k(tmp_path / "a", BATCHES, teach)
    cache = TopKCache(tmp_path / "a")
    assert len(cache) == 7
    for wanted in (batch(5, 0, 6), batch(3, padded=20), batch(2, 2)):
        ids, log_probs = cache.find(wanted)
        expected = teach(wanted)
        assert torch.equal(ids.long(), expected[0])
        assert torch.equal(log_probs, expected[1])


def test_another_token_position_or_label_is_another_row(tmp_path: Path) -> None:
    write_top_k(tmp_path / "a", BATCHES, teach)
    cache = TopKCache(tmp_path / "a")
    other = batch(0, 1)
    other["input_ids"][1, 0] += 1
    with pytest.raises(ConfigurationError, match="does not hold row 1 of this batch"):
        cache.find(other)
    unlearned = batch(0, 1)
    unlearned["labels"][0, 3] = IGNORE
    positions = batch(0, 1) | {"position_ids": torch.arange(9).repeat(2, 1)}
    moved = {**positions, "position_ids": positions["position_ids"] + 1}
    keys = [row_keys(one)[0] for one in (batch(0, 1), other, unlearned, positions, moved)]
    assert len(set(keys)) == 4
    assert keys[0] == keys[1]


def test_an_interrupted_teacher_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(teacher_cache, "SHARD_BATCHES", 1)
    monkeypatch.setattr(progress, "time", SlowClock())
    asked: list[int] = []

    def tired(of: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(len(asked))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return teach(of)

    with pytest.raises(KeyboardInterrupt):
        write_top_k(tmp_path / "a", BATCHES, tired)
    with pytest.raises(ConfigurationError, match="manifest"):
        TopKCache(tmp_path / "a")
    assert capsys.readouterr().err == ""  # it took 20 s, and had no number of rows
    write_top_k(tmp_path / "a", BATCHES, tired, rows=7)
    assert len(asked) == 5
    # Two of the six rows were answered in this run, in 30 s.
    assert capsys.readouterr().err == "running the teacher: 6 of 7 rows, about 15 s left\n"
    write_top_k(tmp_path / "a", BATCHES, tired)
    assert len(asked) == 5
    write_top_k(tmp_path / "b", BATCHES, teach)
    files = [sorted(folder.glob("*.*s*")) for folder in (tmp_path / "a", tmp_path / "b")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    assert len(files[0]) == 5


def test_a_shard_that_was_damaged_before_the_teacher_goes_on_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_cache, "SHARD_BATCHES", 1)
    write_top_k(tmp_path / "a", BATCHES, teach)
    first, _, third, _ = sorted((tmp_path / "a").glob("shard-*"))
    wanted = {path: path.read_bytes() for path in (first, third)}
    first.write_bytes(wanted[first][:-1] + bytes([wanted[first][-1] ^ 1]))
    third.write_bytes(wanted[third][:-4])
    (tmp_path / "a" / "manifest.json").unlink()  # as an interruption leaves it
    write_top_k(tmp_path / "a", BATCHES, teach)
    assert {path: path.read_bytes() for path in (first, third)} == wanted
    TopKCache(tmp_path / "a")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    write_top_k(tmp_path / "a", BATCHES, teach)
    (shard,) = (tmp_path / "a").glob("shard-*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"missing or corrupt\. Delete the folder"):
        TopKCache(tmp_path / "a")
    shard.unlink()
    with pytest.raises(ConfigurationError, match="missing or corrupt"):
        TopKCache(tmp_path / "a", thorough=False)


def test_the_name_depends_on_teacher_settings_and_rows() -> None:
    names = {
        cache_key("t", {"k": 2}, BATCHES),
        cache_key("u", {"k": 2}, BATCHES),
        cache_key("t", {"k": 3}, BATCHES),
        cache_key("t", {"k": 2}, BATCHES[:3]),
    }
    assert len(names) == 4
    assert cache_key("t", {"k": 2}, [batch(0, 1), batch(2, 3), batch(4, 5), batch(6)]) in names
