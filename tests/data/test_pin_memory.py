"""Tests of pinned memory: batches are pinned for CUDA devices only, without a warning on a CPU."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule

import lit_efficient
from lit_efficient import DigitImages
from lit_efficient.mechanisms.order.keyed_batch_sampler import pins

KINDS = [kind for name in lit_efficient.PUBLIC if inspect.isclass(kind := getattr(lit_efficient, name))]
MODULES = [kind for kind in KINDS if issubclass(kind, LightningDataModule)]


def trainer(device: str) -> Any:
    return SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))


@pytest.mark.parametrize(
    ("device", "wanted", "pinned"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_only_for_cuda(device: str, wanted: bool, pinned: bool) -> None:
    assert pins(trainer(device), wanted) is pinned
    assert not pins(None, wanted)


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_every_data_module_has_the_argument(kind: type) -> None:
    """`LatentData` has no such argument, because its source does the loading."""
    named = inspect.signature(kind).parameters
    assert ("pin_memory" in named) == ("num_workers" in named)


def test_loaders_follow_the_trainer() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("cpu", "cuda"):
            data = DigitImages(image_size=8)
            data.setup("fit")
            data.trainer = trainer(device)
            loaders: list[Any] = [data.train_dataloader(), data.val_dataloader()]
            assert [loader.pin_memory for loader in loaders] == [device == "cuda"] * 2
