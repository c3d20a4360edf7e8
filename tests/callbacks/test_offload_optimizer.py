"""OffloadOptimizer: no state stays on the device, steps equal torch's, hooks run once, the CPU refuses."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lit_efficient import ConfigurationError, MuonAdamW, OffloadOptimizer
from lit_efficient.optimizers import host_states
from lit_efficient.optimizers.host_states import Streamed, stream_states
from tests.support import Toy, assert_equal, data, trainer, weights

OPTIMIZERS: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adafactor, {}),
    (MuonAdamW, {}),
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
    with pytest.raises(ConfigurationError, match=r"device is 'cpu'.*nothing to save.*LowBitOptimizer"):
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
    take = host_states.pinned
    monkeypatch.setattr(host_states, "pinned", lambda size, pin: taken.append(size) or take(size, pin))
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
    with pytest.raises(ConfigurationError, match="the step of Counted writes 'count' to its groups"):
        optimizer.step()


def test_the_next_piece_comes_and_the_last_one_goes_while_one_is_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    module = network()
    done: list[str] = []
    names = {id(p): str(number) for number, p in enumerate(module.parameters())}

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            done.append("step " + "".join(names[id(p)] for group in self.param_groups for p in group["params"]))
            return torch.optim.SGD.step.__wrapped__(self)

    for word in ("fetch", "put_back"):
        method = getattr(host_states.HostStates, word)

        def noted(self: Any, piece: Any, word: str = word, method: Any = method) -> Any:
            done.append(f"{word} " + "".join(names[id(p)] for p in piece))
            return method(self, piece)

        monkeypatch.setattr(host_states.HostStates, word, noted)
    optimizer = Noted(list(module.parameters())[:3], lr=0.1, momentum=0.9)
    stream_states(optimizer, piece_bytes=1)
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
    take = host_states.pinned
    monkeypatch.setattr(host_states, "pinned", lambda size, pin: pins.append(pin) or take(size, False))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(host_states.HostStates, "beside", lambda self: nullcontext())
    p = nn.Parameter(torch.ones(4))
    optimizer = Noted([p], lr=0.1, momentum=0.9)
    stream_states(optimizer, piece_bytes=1)
    optimizer.host_states.stream = Stream()
    p.grad = torch.ones(4)
    optimizer.step()
    assert set(pins) == {True}
    done.clear()
    optimizer.step()
    assert done == ["copies wait", "step waits", "step", "copies wait", "cpu waits"]


@pytest.mark.parametrize("pin", [True, False])
def test_memory_is_pinned_where_a_device_copies(pin: bool) -> None:
    asked = []

    class Asked(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            asked.append(kwargs.pop("pin_memory", False))  # without a GPU there is nothing to pin for
            return function(*args, **kwargs)

    with Asked():
        assert host_states.pinned(16, pin).nbytes == 16
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
