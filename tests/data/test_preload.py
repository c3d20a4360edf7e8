"""Tests of `preload: true`: equal batches from memory, one read of each item, and an error if the items do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from lit_efficient import ConfigurationError, EncodedData, ImageData, ImageView
from lit_efficient.mechanisms import preloaded
from lit_efficient.mechanisms.preloaded import Preloaded
from tests.data.images.image_kit import write
from tests.support import assert_equal

ROWS = 20


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    rng = np.random.default_rng(0)
    rows: dict[str, Any] = {
        "latents": rng.normal(size=(ROWS, 4, 8, 8)).astype(np.float32),
        "labels": rng.integers(0, 3, ROWS),
    }
    save_file(rows, folder / "rows.safetensors")
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write(folder, [f"{kind}/{number}.png" for kind in "ab" for number in range(6)])
    return folder


def made(kind: str, request: pytest.FixtureRequest, **more: Any) -> Any:
    folder = str(request.getfixturevalue(kind))
    if kind == "latents":
        data: Any = EncodedData(folder, statistics="none", held_out=4, batch_size=4, **more)
    else:
        view = ImageView(resolution=8, horizontal_flip=True, variants=2)
        data = ImageData(train=folder, view=view, val_fraction=0.2, batch_size=4, **more)
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("kind", ["latents", "images"])
def test_batches_are_those_that_are_read_and_each_item_is_read_once(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, kept = made(kind, request), made(kind, request, preload=True)
    reads: list[Any] = []
    read = type(kept.items).__getitem__
    loaders = [(plain.train_dataloader(), kept.train_dataloader()), (plain.val_dataloader(), kept.val_dataloader())]

    def noted(self: Any, key: Any) -> Any:
        reads.append(key)
        return read(self, key)

    monkeypatch.setattr(type(kept.items), "__getitem__", noted)
    for expected, found in loaders:
        for epoch in range(2):
            for loader in (expected, found):
                loader.sampler.set_epoch(epoch)
            ours = list(found)
            assert reads == []
            assert_equal(ours, list(expected))
            assert reads
            reads.clear()
    kept.train_dataloader()  # again, as a second fit does
    assert reads == []


def test_what_does_not_fit_is_refused_with_both_numbers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = made("latents", request, preload=True)
    item = 4 * 8 * 8 * 4
    monkeypatch.setattr(preloaded, "available_cpu_memory", lambda: 16 * item)
    with pytest.raises(ConfigurationError) as caught:
        data.train_dataloader()
    assert "EncodedData: preload: true needs 16." in str(caught.value)
    assert "KiB for 16 items, but may take only 80% of the 16.0 KiB that are free" in str(caught.value)
    monkeypatch.setattr(preloaded, "available_cpu_memory", lambda: 40 * item)
    data.train_dataloader()
    two = Preloaded(data.dataset, "EncodedData", processes=2)
    with pytest.raises(ConfigurationError, match="in each of 2 processes"):
        two.add([(i, 0) for i in data.train_index])
    monkeypatch.setattr(preloaded, "available_cpu_memory", lambda: None)  # nobody knows
    two.add([(i, 0) for i in data.train_index])
    assert len(two.items) == 16


def test_items_are_not_changed_by_who_gets_them() -> None:
    kept = Preloaded({0: {"x": torch.ones(1)}, 1: 7}, "Own")
    kept.add([0, 1])
    kept[0]["y"] = 1
    assert kept[0].keys() == {"x"}
    assert (kept[1], len(kept)) == (7, 2)
