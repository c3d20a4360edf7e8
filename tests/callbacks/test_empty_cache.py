"""EmptyCache: every n optimizer steps, not batches; the CPU refuses; what it gave back is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_efficient import ConfigurationError, EmptyCache
from tests.cuda.fake_cuda import fake_cuda
from tests.support import Toy, data, trainer


def emptied(monkeypatch: pytest.MonkeyPatch, gives: int = 3 * 2**20, **arguments: Any) -> list[int]:
    """The optimizer steps after which the cache was emptied; of each two questions the second one is after it."""
    steps: list[int] = []
    with fake_cuda():
        run = trainer([EmptyCache(2)], accelerator="gpu", max_epochs=2, **arguments)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: steps.append(run.global_step))
        reserved = iter([2**30, 2**30 - gives] * 100)
        monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda *_: next(reserved))
        run.fit(Toy(), data(32), data())
    return steps


def test_it_counts_optimizer_steps_and_says_what_it_gave(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert emptied(monkeypatch) == [2, 4, 6, 8, 10, 12, 14, 16]
        assert emptied(monkeypatch, gives=0, accumulate_grad_batches=4) == [2, 4]
    assert "EmptyCache: emptied 8 times, 3.0 MiB at most" in caplog.text
    assert "EmptyCache: emptied 2 times, 0 B at most: it returned no memory, and takes time" in caplog.text


def test_the_cpu_and_bad_arguments_are_refused() -> None:
    module = Toy("configure_model")
    with pytest.raises(
        ConfigurationError, match="device is 'cpu', whose allocator keeps no cache: leave EmptyCache out"
    ):
        trainer([EmptyCache()]).fit(module, data(), data())
    assert module.net is None
    with pytest.raises(
        ConfigurationError, match="EmptyCache: every_n_steps must be a whole number of at least 1, got 0"
    ):
        EmptyCache(every_n_steps=0)


@pytest.mark.gpu
def test_on_a_gpu_memory_is_given_back() -> None:
    torch.empty(2**26, device="cuda")
    before = torch.cuda.memory_reserved()
    trainer([EmptyCache(1)], accelerator="gpu").fit(Toy(), data(), data())
    assert torch.cuda.memory_reserved() <= before - 2**26
