"""DevicePrefetcher reads ahead without a trace: same batches, draws and checkpoints; on a GPU that is not there."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lit_efficient import DevicePrefetcher, ExactResume
from lit_efficient.callbacks import device_prefetcher
from lit_efficient.mechanisms.host_waits import HostWaits
from lit_efficient.mechanisms.moving import move, tensors_in
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.cuda.fake_cuda import fake_cuda, on_cuda
from tests.cuda.meta_device import META, Waits, standing_in
from tests.support import Toy, assert_equal, trainer, weights


def says_where_it_has_nothing_to_do(run: Run) -> None:
    assert run.reports["DevicePrefetcher"].summary == "no effect on a cpu, where batches are not copied"


ROW = Row(DevicePrefetcher, says_where_it_has_nothing_to_do, neutral=DevicePrefetcher, changes=False)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Before there seems to be a GPU: its import asks torch's build."""
    import_module("bitsandbytes")


class Numbers(Dataset[Any]):
    """Rows that know how many of them were read; with ``draws`` a part of each is random."""

    def __init__(self, draws: bool = False) -> None:
        self.rows, self.draws, self.read = torch.randn(12, 16, generator=torch.Generator().manual_seed(3)), draws, 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return [self.rows[index] + (torch.rand(16) if self.draws else 0.0)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for row in torch.randn(7, 16, generator=torch.Generator().manual_seed(3)):
            yield [row]


class Drawing(Toy):
    """Notes each batch, and draws in its step and after its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Tensor] = []
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert on_cuda(batch[0])
        self.batches.append(batch[0].detach().cpu().clone())
        return super().training_step([nn.functional.dropout(batch[0], 0.2)], batch_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.rand((), device="cpu").item()]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.drawn.append(torch.rand((), device="cpu").item())


class Reads(Callback):
    """How many rows had been read at the end of each backward pass, and of each step."""

    def __init__(self, rows: Numbers) -> None:
        self.rows, self.in_step = rows, []  # type: ignore[var-annotated]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.in_step.append(self.rows.read)


def fit(*callbacks: Any, data: Any = None, seeded: bool = True, val: Any = None, **options: Any) -> tuple[Any, Any]:
    path = options.pop("ckpt_path", None)
    options = {"limit_val_batches": 1.0 if val else 0} | options
    torch.manual_seed(0)
    module = Drawing()
    loader = data if isinstance(data, DataLoader) else DataLoader(data or Numbers(), 2, shuffle=True)
    torch.use_deterministic_algorithms(True)
    try:
        with fake_cuda():
            run = trainer([*([ExactResume(seed=5)] if seeded else []), *callbacks], accelerator="gpu", **options)
            run.fit(
                module, loader, val or DataLoader(Numbers(), 2), ckpt_path=path, weights_only=True if path else None
            )
    finally:
        torch.use_deterministic_algorithms(False)
    return run, module


def equal(one: Any, other: Any) -> None:
    assert_equal(one.batches, other.batches)
    assert one.drawn == other.drawn
    assert_equal(weights(one), weights(other))


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("draws", [True, False])
def test_batches_draws_and_weights_are_those_without_it(seeded: bool, draws: bool) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": -1, "accumulate_grad_batches": 2, "seeded": seeded}
    _, plain = fit(data=Numbers(draws), **options)
    _, ours = fit(DevicePrefetcher(), data=Numbers(draws), **options)
    assert len(plain.batches) == 12
    equal(ours, plain)


def test_the_next_batch_is_read_within_the_step_unless_that_draws() -> None:
    for draws, seeded, expected in (
        (False, True, [4, 6, 8, 10, 12, 12]),
        (False, False, [2, 6, 8, 10, 12, 12]),  # the second one shows that nothing is drawn
        (True, True, [4, 6, 8, 10, 12, 12]),  # each batch has seeds of its own
        (True, False, [2, 4, 6, 8, 10, 12]),
    ):
        reads = Reads(rows := Numbers(draws))
        technique = DevicePrefetcher()
        fit(technique, reads, data=rows, max_epochs=1, max_steps=-1, seeded=seeded)
        assert reads.in_step == expected
    assert any("random numbers" in said for said in technique._said)
    reads = Reads(rows := Numbers())
    fit(DevicePrefetcher(ahead=False), reads, data=rows, max_epochs=1, max_steps=-1)
    assert reads.in_step == [2, 4, 6, 8, 10, 12]


class Saves(Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("stop", [2, 6])
def test_what_was_only_read_does_not_count_when_resumed(tmp_path: Path, stop: int) -> None:
    path = tmp_path / "stop.ckpt"
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": -1}
    run, whole = fit(DevicePrefetcher(), Saves(path, stop), data=Numbers(True), **options)
    state = torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]
    assert state["combined_loader"] == [{"epoch": 0, "round": 0, "batches": stop}]
    for callbacks in ([DevicePrefetcher()], []):
        _, rest = fit(*callbacks, data=Numbers(True), ckpt_path=path, **options)
        assert_equal(rest.batches, whole.batches[stop:])
        assert rest.drawn == whole.drawn[stop:]
        assert_equal(weights(rest), weights(whole))
    run, _ = fit(DevicePrefetcher(), max_steps=2)
    run.save_checkpoint(path)  # what was read ahead when the run ended was never used
    state = torch.load(path, weights_only=True)["loops"]["fit_loop"]["state_dict"]
    assert state["combined_loader"] == [{"epoch": 0, "round": 0, "batches": 2}]


@pytest.mark.parametrize(
    "options",
    [
        {"data": DataLoader(Stream(), 2)},  # of no length: Lightning reads one ahead of that, too
        {"limit_train_batches": 3},
        {"val_check_interval": 2, "limit_val_batches": 2},
    ],
    ids=["stream", "limit", "validation"],
)
def test_any_end_of_an_epoch(options: dict[str, Any]) -> None:
    val = DataLoader(Numbers(), 2)
    settings: dict[str, Any] = {"max_epochs": 2, "max_steps": -1, "seeded": False, "val": val, **options}
    (plain_run, plain), (run, ours) = fit(**settings), fit(DevicePrefetcher(), **settings)
    equal(ours, plain)
    assert run.callback_metrics.keys() == plain_run.callback_metrics.keys()
    assert all(torch.equal(run.callback_metrics[key], value) for key, value in plain_run.callback_metrics.items())


class Hooked(Drawing):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert not on_cuda(batch[0])
        return batch


def test_an_error_of_the_next_batch_leaves_this_step_whole() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise ValueError("row 7 is broken")
            return super().__getitem__(index)

    steps = []
    for callbacks in ([], [DevicePrefetcher()]):
        count = Steps()
        with pytest.raises(ValueError, match="row 7 is broken"):
            fit(*callbacks, count, data=Broken())
        steps.append(count.done)
    assert steps[0] == steps[1]


class Steps(Callback):
    done = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.done = trainer.global_step


class Positioned(LightningDataModule):
    """Counts what is read, in its own state."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Numbers()

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 2)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(), 2)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.rows.read}


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
def test_a_data_module_with_a_state_is_not_read_ahead_of() -> None:
    reads, technique = Reads((data := Positioned()).rows), DevicePrefetcher()
    with fake_cuda():
        trainer([technique, reads], accelerator="gpu", limit_val_batches=0).fit(Drawing(), datamodule=data)
    assert reads.in_step == [2, 4, 6, 8, 10, 12]
    assert any("data module has a state" in said for said in technique._said)


def test_a_hook_of_the_transfer_sees_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    technique = DevicePrefetcher()
    monkeypatch.setitem(globals(), "Drawing", Hooked)
    _, module = fit(technique, max_steps=3)
    assert len(module.batches) == 3
    assert any("changes the transfer" in said for said in technique._said)


Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Item:
    x: Tensor
    name: str = "a"


def test_any_nesting_is_moved_and_keeps_its_kind() -> None:
    from transformers import BatchEncoding

    one = torch.ones(2)
    default: Any = defaultdict(list, x=one)
    batch = [
        {"x": one, "n": None}, OrderedDict(x=one), default, UserDict(x=one), MappingProxyType({"x": one}),
        Pair(one, 3), (one, [one]), Item(one), BatchEncoding({"x": one}), "text", 7,
    ]  # fmt: skip
    moved = move(batch, META)
    assert [type(item) for item in moved] == [type(item) for item in batch]
    assert len(list(tensors_in(moved))) == 10
    assert {tensor.device for tensor in tensors_in(moved)} == {META}
    assert {tensor.device.type for tensor in tensors_in(batch[:8])} == {"cpu"}  # BatchEncoding.to moves itself
    assert moved[2].default_factory is list
    assert (moved[0]["n"], moved[5].right, moved[7].name, moved[9:]) == (None, 3, "a", ["text", 7])
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert move(packed, META).batch_sizes.device.type == "cpu"  # where torch wants them


def test_waits_are_named_by_file_and_line() -> None:
    there, here = torch.ones(3, device=META), torch.ones(3)
    with standing_in(Waits()), HostWaits() as waits:
        there.sum().item()  # 0
        here.to(META)  # 1
        there.cpu()  # 2
        bool((there > 0).any())  # 3
        here.to(META, non_blocking=True)
        here.sum().item()
        there.float().to(META)
        there.copy_(here)  # 7
        there.copy_(here, non_blocking=True)
    line = test_waits_are_named_by_file_and_line.__code__.co_firstlineno + 3
    kinds = {0: "reads a value", 1: "copies from the host without non_blocking", 2: "copies to the host"}
    kinds |= {3: "reads a value", 7: "copies from the host without non_blocking"}
    assert dict(waits.places) == {f"{__file__}:{line + i}: {kind}": 1 for i, kind in kinds.items()}


def test_the_second_step_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        HostWaits, "_describe_wait", staticmethod(lambda name, *_: "reads a value" if "scalar" in name else "")
    )

    class Reading(Drawing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch[0].sum().item()
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(device_prefetcher, "counts", lambda: (0, 0, 0))  # of what other tests have compiled
    monkeypatch.setitem(globals(), "Drawing", Reading)
    with pytest.warns(
        UserWarning, match=r"(?s)waits for the device, which then idles, in:\n  .*\.py:\d+: reads a value$"
    ):
        fit(DevicePrefetcher(), max_steps=4)
