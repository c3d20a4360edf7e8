"""Fast products: what is set while a run lasts, on which device, what it says, and that all of it comes back."""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

import lightning.pytorch as L
import pytest
import torch
from lightning_utilities.core import rank_zero

import lit_efficient
from lit_efficient import ConfigurationError
from lit_efficient.callbacks.fast_matmul import swap_switches
from lit_efficient.mechanisms.trials.memory import collected
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.support import Net, Toy, data, trainer

NAMES = ("float32_matmul_precision", "fp16_reduced_reductions", "bf16_reduced_reductions", "cudnn_benchmark")


def switches() -> dict[str, Any]:
    products = torch.backends.cuda.matmul
    values = (
        torch.get_float32_matmul_precision(),
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        torch.backends.cudnn.benchmark,
    )
    return dict(zip(NAMES, values, strict=True))


@pytest.fixture(autouse=True)
def _process_is_as_before() -> Any:
    before = switches()
    yield
    assert switches() == before


class FastMatmul(lit_efficient.FastMatmul):
    """Takes the CPU for a GPU of Hopper's kind, and notes the switches of each step."""

    found: tuple[int, int] | None = (9, 0)

    def capability(self, trainer: Any) -> tuple[int, int] | None:
        return self.found

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(switches())


def fast(**arguments: Any) -> FastMatmul:
    """At settings that change no number on this machine, whose processor may have narrower products, too."""
    return FastMatmul(**{"precision": "highest", "reduced_reductions": False, **arguments})


def was_set_for_the_run_alone(run: Run) -> None:
    technique = run.technique("FastMatmul")
    wanted = dict(zip(NAMES, ("highest", False, False, not torch.are_deterministic_algorithms_enabled()), strict=True))
    assert technique.seen
    assert all(seen == wanted for seen in technique.seen)
    assert switches() == dict(zip(NAMES, ("highest", True, True, False), strict=True))


ROW = Row(fast, was_set_for_the_run_alone, fast, changes=False)


def fit(technique: Any, *others: Any, **arguments: Any) -> Any:
    run = trainer([technique, *others], **arguments)
    run.fit(Toy("init", network=Net), data(), data())
    return run


def test_all_four_are_set_and_said_and_come_back() -> None:
    technique = FastMatmul(precision="medium", reduced_reductions=False)
    module = fit(technique).lightning_module
    assert technique.seen[0] == dict(zip(NAMES, ("medium", False, False, True), strict=True))
    said = technique.describe(module).summary
    for words in ("float32_matmul_precision highest -> medium", "bf16_reduced_reductions True -> False"):
        assert words in said
    fit(technique := FastMatmul(cudnn_benchmark=False))
    assert technique.seen[0]["float32_matmul_precision"] == "high"
    assert technique.describe(module).summary == "float32_matmul_precision highest -> high"


def test_an_older_gpu_and_a_deterministic_run_leave_what_they_must() -> None:
    technique = FastMatmul()
    technique.found = (7, 5)
    module = fit(technique).lightning_module
    assert technique.seen[0] == dict(zip(NAMES, ("highest", True, True, True), strict=True))
    assert "no TF32 on a GPU of compute capability 7.5" in technique.describe(module).summary
    torch.use_deterministic_algorithms(True)
    fit(technique := fast())
    assert technique.seen[0]["cudnn_benchmark"] is False
    assert "no search by cuDNN, because the run is deterministic" in technique.describe(module).summary


def test_switches_that_torch_has_frozen_stay_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an import of torch's own tests freezes them, for the rest of the process."""
    frozen: Any = torch.backends.flags_frozen
    monkeypatch.setitem(frozen.__globals__, "__allow_nonbracketed_mutation_flag", False)
    module = fit(technique := FastMatmul(precision="high")).lightning_module
    assert technique.seen[0] == dict(zip(NAMES, ("high", True, True, False), strict=True))
    assert "cuDNN's search does not change, because torch's flags are frozen" in technique.describe(module).summary


def test_a_cpu_keeps_its_switches_and_the_report_has_one_line_of_it(caplog: pytest.LogCaptureFixture) -> None:
    technique = FastMatmul()
    technique.found = None
    with caplog.at_level(logging.INFO):
        module = fit(technique).lightning_module
    assert set(technique.seen[0].values()) == {"highest", True, False}
    assert technique.describe(module).summary.startswith("nothing is set, because a cpu has neither TF32 nor cuDNN")
    assert sum("FastMatmul" in line for line in caplog.text.splitlines()) == 1


def test_an_exception_and_a_fit_inside_a_fit_restore_what_each_found() -> None:
    class Inner(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            fit(technique, max_steps=1)
            assert switches() == outer
            if trainer.global_step:
                raise KeyError

    technique = fast(cudnn_benchmark=False)
    outer = dict(zip(NAMES, ("highest", False, False, False), strict=True))
    with pytest.raises(KeyError):
        fit(technique, Inner())
    assert technique._runs == []

    class Bomb(L.Callback):
        def setup(self, *_: Any, **__: Any) -> None:
            raise KeyError

    with pytest.raises(KeyError):  # Lightning calls on_exception of callbacks that were set up and of others
        fit(Bomb(), fast())


def test_the_pure_function_changes_what_it_is_given_and_returns_what_was() -> None:
    before = swap_switches({"cudnn_benchmark": True})
    assert before == {"cudnn_benchmark": False}
    assert switches() == dict(zip(NAMES, ("highest", True, True, True), strict=True))
    assert swap_switches(before) == {"cudnn_benchmark": True}


def test_lightning_does_not_advise_what_is_about_to_be_set(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = "You are using a CUDA device ('H200') that has Tensor Cores. To properly utilize"
    monkeypatch.setattr("lit_efficient.callbacks.fast_matmul._LIVE", WeakSet())  # of no other test
    with caplog.at_level(logging.INFO), collected():
        heeds = FastMatmul()
        rank_zero.rank_zero_info(advice)
        rank_zero.rank_zero_info("GPU available: True")
        assert "GPU available" in caplog.text
        assert "Tensor Cores" not in caplog.text
        del heeds
    with caplog.at_level(logging.INFO):
        rank_zero.rank_zero_info(advice)
    assert "Tensor Cores" in caplog.text  # to those who do not use it


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"precision": "tf32"}, "precision must be one of highest, high, medium, got 'tf32'"),
        ({"cudnn_benchmark": "no"}, "cudnn_benchmark must be true or false, got 'no'"),
        ({"reduced_reductions": 1}, "reduced_reductions must be true or false, got 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        FastMatmul(**arguments)
