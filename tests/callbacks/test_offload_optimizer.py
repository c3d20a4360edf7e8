"""OffloadOptimizer: no state stays on the device, steps equal torch's, hooks run once, and a CPU is refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.overrides import TorchFunctionMode

import lit_efficient
from lit_efficient import (
    ConfigurationError,
    ConflictError,
    ExactResume,
    MuonAdamW,
    NonFiniteGuard,
    OffloadOptimizer,
    RunMetrics,
    TokenWeightedAccumulation,
)
from lit_efficient.application.gradients import gradients_of
from lit_efficient.mechanisms.blocks.side_copies import SideCopies
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from lit_efficient.optimizers import host_states
from lit_efficient.optimizers.host_states import Streamed, stream_states
from tests.support import Toy, assert_equal, data, trainer, weights

OPTIMIZERS: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adafactor, {}),
    (MuonAdamW, {}),
    (MuonAdamW, {"dion": 0.5}),
]


def network(device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 32)).to(device)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        module(torch.randn(8, 64, generator=generator).to(device)).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def both(kind: type, arguments: dict[str, Any], device: str = "cpu") -> list[tuple[nn.Module, Any, Any]]:
    results = []
    for streamed in (False, True):
        module = network(device)
        half = list(module[0].parameters())
        rest = [p for part in (module[1], module[2]) for p in part.parameters()]
        optimizer = kind([{"params": half}, {"params": rest, "lr": 5e-3}], **{"lr": 1e-2, **arguments})
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 1e-2, total_steps=9, cycle_momentum=kind != torch.optim.Adafactor
        )
        if streamed:
            stream_states(optimizer, piece_bytes=1)
        results.append((module, optimizer, scheduler))
    return results


@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS, ids=lambda x: getattr(x, "__name__", ""))
def test_steps_in_pieces_equal_whole_ones_bit_for_bit(kind: type, arguments: dict[str, Any]) -> None:
    (plain, reference, schedule), (ours, optimizer, our_schedule) = both(kind, arguments)
    hooks: list[int] = []
    optimizer.register_step_post_hook(lambda *_: hooks.append(len(optimizer.param_groups)))
    train(plain, reference, schedule)
    train(ours, optimizer, our_schedule)
    assert_equal(weights(plain), weights(ours))
    assert_equal(reference.state_dict(), optimizer.state_dict())
    assert hooks == [len(reference.param_groups)] * 3  # once a step, with the user's groups
    assert type(optimizer).__name__ == kind.__name__
    assert isinstance(optimizer, kind)
    again = kind(ours.parameters(), **arguments)  # the class itself is as it was
    assert type(again) is kind
    assert not isinstance(again, Streamed)


def test_the_cpu_has_nothing_to_save_and_says_so_before_anything_is_built() -> None:
    module = Toy("configure_model")
    with pytest.raises(ConfigurationError, match=r"device is 'cpu'.*already in CPU memory.*LowBitOptimizer"):
        trainer([OffloadOptimizer()]).fit(module, data(), data())
    assert module.net is None


def test_what_cannot_be_streamed_is_refused() -> None:
    module = network()
    with pytest.raises(ConfigurationError, match="LBFGS keeps one state for all parameters"):
        OffloadOptimizer().rewrite_optimizer(torch.optim.LBFGS(module.parameters()), module)
    with pytest.raises(ConfigurationError, match="piece_mb must be a whole number of at least 1, got 0"):
        OffloadOptimizer(piece_mb=0)


def test_memory_is_taken_once_and_is_what_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = SideCopies.host
    monkeypatch.setattr(SideCopies, "host", lambda self, size: taken.append(size) or take(self, size))
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    stream_states(optimizer, piece_bytes=1)
    train(module, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    store = optimizer.host_states
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    where = [moment.data_ptr() for moment in moments]
    assert sum(taken) == store.held
    assert all(moment.untyped_storage().nbytes() == moment.nbytes for moment in moments)
    assert store.state_bytes == sum(moment.nbytes for moment in moments)
    assert store.state_bytes == 8 * sum(p.numel() for p in module.parameters())
    assert store.held < 1.1 * store.state_bytes
    assert len({*where}) == len(where)
    taken.clear()
    train(module, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    assert not taken
    assert [value.data_ptr() for s in optimizer.state.values() for key, value in s.items() if key != "step"] == where


def test_a_checkpoint_has_the_bytes_of_the_states_whatever_their_types(tmp_path: Path) -> None:
    module = network()
    module[0].bfloat16()
    optimizer = torch.optim.AdamW(module.parameters())
    stream_states(optimizer, piece_bytes=2**20)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    saved, path = optimizer.state_dict(), tmp_path / "optimizer.pt"
    torch.save(saved, path)
    assert_equal(torch.load(path), saved)
    assert path.stat().st_size < optimizer.host_states.held  # chunks have room to spare, which no file is to have


def test_a_step_that_writes_to_its_group_is_refused() -> None:
    class Counted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    module = network()
    optimizer = Counted(module.parameters(), lr=0.1)
    stream_states(optimizer, piece_bytes=1)
    module(torch.ones(2, 64)).sum().backward()
    with pytest.raises(ConfigurationError, match="the step of Counted writes 'count' to its parameter groups"):
        optimizer.step()


def test_the_next_piece_comes_and_the_last_one_goes_while_one_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    done: list[str] = []
    names = {id(p): str(number) for number, p in enumerate(module.parameters())}

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            done.append("step " + "".join(names.get(id(p), "") for group in self.param_groups for p in group["params"]))
            return torch.optim.SGD.step.__wrapped__(self)

    for word in ("fetch", "put_back"):
        method = getattr(host_states.HostStates, word)

        def noted(self: Any, piece: Any, word: str = word, method: Any = method) -> Any:
            done.append(f"{word} " + "".join(names[id(p)] for p in piece))
            return method(self, piece)

        monkeypatch.setattr(host_states.HostStates, word, noted)
    optimizer = Noted(list(module.parameters())[:3], lr=0.1, momentum=0.9)
    stream_states(optimizer, piece_bytes=1)
    done.clear()  # of the trial
    module(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert done == [
        *("fetch 0", "fetch 1", "step 0", "put_back 0", "fetch 2", "step 1", "put_back 1", "step 2", "put_back 2"),
    ]


def test_steps_and_copies_wait_for_each_other_and_the_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Stream:
        device = torch.device("cpu")

        def wait_stream(self, other: Any) -> None:
            done.append("copies wait")

        def record_event(self) -> str:
            return "fetched"

        def wait_event(self, event: str) -> None:
            assert event == "fetched"
            done.append("step waits")

        def synchronize(self) -> None:
            done.append("cpu waits")

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            done.append("step")
            return torch.optim.SGD.step.__wrapped__(self)

    pins: list[bool] = []
    monkeypatch.setattr(
        SideCopies, "host", lambda self, n: pins.append(self.stream is not None) or torch.empty(n, dtype=torch.uint8)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(SideCopies, "beside", lambda self: nullcontext())
    p = nn.Parameter(torch.ones(4))
    optimizer = Noted([p], lr=0.1, momentum=0.9)
    stream_states(optimizer, piece_bytes=1)
    optimizer.host_states.copies.stream = Stream()
    p.grad = torch.ones(4)
    optimizer.step()
    assert set(pins) == {True}
    done.clear()
    optimizer.step()
    assert done == ["copies wait", "step waits", "step", "copies wait", "cpu waits"]


def test_a_gradient_is_copied_when_it_is_complete_and_the_cpu_reads_it_when_it_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    class Stream:
        device = torch.device("cpu")

        def wait_stream(self, other: Any) -> None:
            done.append("copies wait")

        def synchronize(self) -> None:
            done.append("cpu waits")

    monkeypatch.setattr(SideCopies, "host", lambda self, size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(SideCopies, "beside", lambda self: nullcontext())
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: done.append("gradient is kept until then")
    )
    p = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], lr=0.1)
    stream_states(optimizer, piece_bytes=2**20, gradients=True)
    optimizer.host_states.copies.stream = Stream()
    with optimizer.host_states.gradients.leaving():
        (p * p).sum().backward()
    assert done == ["copies wait", "gradient is kept until then", "cpu waits"]
    done.clear()
    assert torch.equal(gradients_of(optimizer)[p], torch.full((4,), 2.0))
    assert done == ["cpu waits"]


@pytest.mark.parametrize("pin", [True, False])
def test_memory_is_pinned_where_a_device_copies(pin: bool) -> None:
    asked, copies = [], SideCopies(torch.device("cpu"))
    copies.stream = object() if pin else None

    class Asked(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            asked.append(kwargs.pop("pin_memory", False))  # without a GPU there is nothing to pin for
            return function(*args, **kwargs)

    with Asked():
        assert copies.host(16).nbytes == 16
    assert any(asked) is pin


def test_restored_states_go_where_the_others_were() -> None:
    (_, _, _), (ours, optimizer, schedule) = both(torch.optim.AdamW, {})
    train(ours, optimizer, schedule)
    before = optimizer.host_states.held
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    train(ours, optimizer, schedule)
    assert optimizer.host_states.held == before
    assert all(
        value is optimizer.host_states._hosts[p, key]
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if key != "step"
    )


@pytest.mark.gpu
def test_gradients_come_and_go_on_a_gpu() -> None:
    results = []
    for away in (False, True):
        module = network("cuda")
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        if away:
            stream_states(optimizer, piece_bytes=2**10, gradients=True)
        for _ in range(3):
            optimizer.zero_grad()
            for number in range(2):
                with optimizer.host_states.gradients.leaving() if away else nullcontext():
                    module(torch.full((8, 64), 1.0 + number, device="cuda")).square().mean().backward()
            assert not away or all(p.grad is None for p in module.parameters())
            optimizer.step()
        results.append(weights(module))
    assert_equal(*results)
    assert all(gradient.is_pinned() for gradient in gradients_of(optimizer).values())


@pytest.mark.gpu
def test_no_state_stays_on_the_device() -> None:
    (plain, reference, schedule), (ours, optimizer, our_schedule) = both(torch.optim.AdamW, {}, "cuda")
    train(plain, reference, schedule)
    train(ours, optimizer, our_schedule)
    assert_equal(weights(plain), weights(ours))
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert {moment.device.type for moment in moments} == {"cpu"}
    assert all(moment.is_pinned() for moment in moments)
    requests = torch.cuda.host_memory_stats()["num_host_alloc"]
    train(ours, optimizer, our_schedule)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == requests
    train(plain, reference, schedule)
    assert_equal(weights(plain), weights(ours))


# Gradients -----------------------------------------------------------------------------------------------------------


class Anywhere(OffloadOptimizer):
    """Technique that runs on the CPU, where gradients leave ``p.grad`` for other memory as on a GPU."""

    def check(self, trainer: Any, module: Any) -> None:
        """Accept any trainer."""


class Looks(L.Callback):
    """Count the bytes of gradients that are still in ``p.grad``, and record their sum after clipping."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.left.append(sum(p.grad.nbytes for p in pl_module.parameters() if p.grad is not None))


class Norms(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.norms += [metrics["grad_norm"]] if "grad_norm" in metrics else []


def fitted(*callbacks: Any, toy: Any = Toy, away: bool = False, **arguments: Any) -> tuple[Any, Any, Any]:
    module, looks, logger = toy("configure_model"), Looks(), Norms()
    torch.manual_seed(0)
    offload = [Anywhere(piece_mb=1, gradients=True)] if away else []
    arguments = {"max_epochs": 1, "logger": logger, "log_every_n_steps": 1, **arguments}
    run = trainer([*offload, NonFiniteGuard(), RunMetrics(), *callbacks, looks], **arguments)
    run.fit(module, data(), data())
    return run, looks, logger.norms


@pytest.mark.parametrize(
    ("callbacks", "arguments"),
    [
        (list, {}),
        (list, {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2}),
        (list, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
        (lambda: [TokenWeightedAccumulation("self.odd")], {"accumulate_grad_batches": 2}),
        (lambda: [lit_efficient.LoRA(rank=2)], {}),
    ],
    ids=["plain", "norm of accumulated ones", "value", "weighted by tokens", "LoRA"],
)
def test_gradients_in_cpu_memory_give_the_same_weights(callbacks: Any, arguments: dict[str, Any]) -> None:
    class Odd(Toy):
        def odd(self, batch: Any) -> int:
            return int((batch[0] > 0).sum())

    (plain, kept, norms), (ours, looks, our_norms) = (
        fitted(*callbacks(), toy=Odd, away=away, **arguments) for away in (False, True)
    )
    assert_equal(weights(plain.lightning_module), weights(ours.lightning_module))
    assert_equal(plain.optimizers[0].state_dict(), ours.optimizers[0].state_dict())
    assert min(kept.left) > 0
    assert {*looks.left} == {0}
    assert norms
    assert our_norms == norms


class Drops(Toy):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad = None


class Zeroes(Toy):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.zero_grad(set_to_none=False)


class ZeroesSome(Toy):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2:
            optimizer.zero_grad()


@pytest.mark.parametrize("toy", [Drops, Zeroes, ZeroesSome])
def test_a_module_that_zeroes_gradients_its_own_way_zeroes_those_in_cpu_memory(toy: Any) -> None:
    (plain, _, _), (ours, looks, _) = (fitted(toy=toy, away=away) for away in (False, True))
    assert_equal(weights(plain.lightning_module), weights(ours.lightning_module))
    assert {*looks.left} == {0}


def test_no_gradient_is_on_the_device_after_the_backward_pass_and_one_at_a_time_in_it() -> None:
    """All storages that autograd creates are counted while they live; storages in CPU memory are others."""
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    stream_states(optimizer, piece_bytes=1, gradients=True)
    gradients, meter = optimizer.host_states.gradients, AllocationMeter()
    for p in module.parameters():
        p.register_hook(meter.add)
    for _ in range(2):  # accumulated
        with gradients.leaving():
            module(torch.ones(2, 64)).square().mean().backward()
        assert meter.live == 0
    assert meter.peak <= max(sum(p.nbytes for p in part.parameters(recurse=False)) for part in module)
    assert gradients.bytes_held == sum(p.nbytes for p in module.parameters())
    assert optimizer.host_states.held < 1.3 * gradients.bytes_held
    assert {*gradients_of(optimizer)} == {*module.parameters()}
    stands = sum(stand.untyped_storage().nbytes() for stand in gradients.arrived().values())
    assert stands == 4 * len([*module.parameters()])  # a number each
    optimizer.step()
    assert all(p.grad is None for p in module.parameters())
    optimizer.zero_grad()
    assert not gradients_of(optimizer)


def test_a_window_that_is_open_is_in_the_checkpoint(tmp_path: Path) -> None:
    def run(epochs: int, path: Path | None = None, saves: bool = False) -> Any:
        class Save(L.Callback):
            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                if saves and batch_idx == 0:
                    trainer.save_checkpoint(tmp_path / "open.ckpt")

        module = Toy("configure_model")
        fit = trainer([Anywhere(gradients=True), ExactResume(0), Save()], max_epochs=1, accumulate_grad_batches=2)
        fit.fit(module, data(), data(), ckpt_path=path)
        return module

    whole = run(1, saves=True)
    assert_equal(weights(whole), weights(run(1, tmp_path / "open.ckpt")))


class Clips(Toy):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def test_who_reads_the_gradients_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"OffloadOptimizer: .* reads the gradient of 'net\..* CPU memory"):
        fitted(toy=Clips, away=True)


@pytest.mark.parametrize(
    ("arguments", "module", "reason"),
    [
        ({"strategy": "ddp"}, {}, "because DDPStrategy averages or joins them there. Use gradients=False"),
        ({}, {"optimizers": 2}, "because Toy uses manual optimization. Use gradients=False"),
    ],
)
def test_gradients_that_must_stay_are_refused(arguments: Any, module: Any, reason: str) -> None:
    with pytest.raises(ConflictError, match=reason):
        OffloadOptimizer(gradients=True).check(trainer(**arguments), Toy(**module))


def test_a_step_that_is_left_out_drops_gradients_in_cpu_memory() -> None:
    module = network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    stream_states(optimizer, piece_bytes=1, gradients=True)
    with optimizer.host_states.gradients.leaving():
        module(torch.full((2, 64), float("nan"))).sum().backward()
    before, run = weights(module), trainer()
    with pytest.warns(UserWarning, match="the step is skipped"):
        NonFiniteGuard("skip").on_before_optimizer_step(run, module, optimizer)
    optimizer.step()
    assert_equal(before, weights(module))
