"""LowBitOptimizer: the bytes that it says, embeddings in 32 bits, a loss curve like AdamW's, no leak between two."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_efficient import ConfigurationError, LowBitOptimizer


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(128, 64), nn.Flatten(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 128))


def rewritten(module: nn.Module, technique: LowBitOptimizer, kind: type = torch.optim.AdamW, **arguments: object):
    optimizer = kind(module.parameters(), **{"lr": 2e-3, "weight_decay": 0.0, **arguments})
    return optimizer, technique.rewrite_optimizer(optimizer, module)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 128, (64, 4), generator=generator)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(module(tokens), tokens.sum(-1) % 128)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def moments_bytes(state: dict) -> int:
    return sum(
        t.numel() * t.element_size() for key, t in state.items() if key in ("state1", "state2", "absmax1", "absmax2")
    )


def test_state_bytes_are_what_the_report_promises() -> None:
    module = network()
    optimizer, report = rewritten(module, LowBitOptimizer())
    train(module, optimizer, 1)
    real = sum(moments_bytes(state) for state in optimizer.state.values())
    full = sum(8 * p.numel() for p in module.parameters())
    assert report.bytes_saved == full - real > 0
    large = optimizer.state[module[2].weight]
    assert moments_bytes(large) / module[2].weight.numel() == pytest.approx(2 + 2 * 4 / 256)


def test_embeddings_and_small_tensors_keep_32_bit_states() -> None:
    module = network()
    optimizer, report = rewritten(module, LowBitOptimizer())
    train(module, optimizer, 1)
    dtypes = {name: optimizer.state[p]["state1"].dtype for name, p in module.named_parameters()}
    assert dtypes == {
        "0.weight": torch.float32,
        "2.weight": torch.uint8,
        "2.bias": torch.float32,
        "4.weight": torch.uint8,
        "4.bias": torch.float32,
    }
    assert report.parameters == 256 * 256 + 256 * 128
    other, _ = rewritten(module, LowBitOptimizer(keep_32bit=()))
    train(module, other, 1)
    assert other.state[module[0].weight]["state1"].dtype == torch.uint8


@pytest.mark.parametrize(("kind", "decay"), [(torch.optim.AdamW, 0.1), (torch.optim.Adam, 0.0)])
def test_tensors_that_keep_32_bits_step_like_torch(kind: type, decay: float) -> None:
    ours, theirs = network(), network()
    optimizer, _ = rewritten(ours, LowBitOptimizer(keep_32bit=("Embedding",)), kind=kind, weight_decay=decay)
    reference = kind(theirs.parameters(), lr=2e-3, weight_decay=decay)
    gradients = [torch.randn_like(p) for p in ours.parameters()]
    for _ in range(3):
        for module, stepper in ((ours, optimizer), (theirs, reference)):
            for p, gradient in zip(module.parameters(), gradients):
                p.grad = gradient.clone()
            stepper.step()
    torch.testing.assert_close(ours[0].weight, theirs[0].weight, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours[2].bias, theirs[2].bias, rtol=1e-5, atol=1e-7)
    assert not torch.equal(ours[2].weight, theirs[2].weight)


def test_the_loss_curve_follows_the_32_bit_one() -> None:
    ours, theirs = network(), network()
    low = train(ours, rewritten(ours, LowBitOptimizer())[0], 60)
    full = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=2e-3, weight_decay=0.0), 60)
    assert full[-1] < 0.2 * full[0]
    assert low[-1] < 0.25 * low[0]
    assert max(abs(a - b) for a, b in zip(low, full)) < 0.1 * full[0]


def test_one_optimizer_leaves_no_trace_in_the_next() -> None:
    module = network()
    first, _ = rewritten(module, LowBitOptimizer(keep_32bit=("Embedding",)))
    train(module, first, 1)
    second, _ = rewritten(module, LowBitOptimizer(keep_32bit=(), min_size=0))
    train(module, second, 1)
    assert all(state["state1"].dtype == torch.uint8 for state in second.state.values())


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (torch.optim.Adadelta, {}, "Adadelta has no 8-bit twin; allowed: Adam, AdamW"),
        (torch.optim.AdamW, {"amsgrad": True}, r"AdamW\(amsgrad=True\) has no 8-bit twin"),
        (torch.optim.AdamW, {"maximize": True}, r"AdamW\(maximize=True\) has no 8-bit twin"),
        (torch.optim.Adam, {"weight_decay": 0.1}, r"Adam\(weight_decay=0.1\) adds the decay to the gradient"),
    ],
)
def test_what_has_no_twin_is_refused_by_name(kind: type, arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"LowBitOptimizer: {message}"):
        rewritten(network(), LowBitOptimizer(), kind=kind, **arguments)


def test_a_rewrite_that_saves_nothing_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="the largest has 16 elements and min_size is 4096"):
        rewritten(nn.Linear(4, 4), LowBitOptimizer())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"bits": 4}, "bits must be 8, got 4"), ({"min_size": -1}, "min_size must be at least 0, got -1")],
)
def test_arguments_are_checked_when_it_is_built(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"LowBitOptimizer: {message}"):
        LowBitOptimizer(**arguments)
