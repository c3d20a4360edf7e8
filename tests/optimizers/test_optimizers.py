"""The optimizers for YAML: numbers of the reference implementations, groups, clipping, exact resume."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import (
    Autoencoding,
    ConfigurationError,
    FusedAdamW,
    GroupedAdafactor,
    LanguageModeling,
    LatentDiffusion,
    Lion,
    MuonAdamW,
    ScheduleFreeAdamW,
    muon_groups,
    parameter_groups,
)
from tests.support import Toy, assert_equal, data, trainer, weights

ALL: list[Any] = [FusedAdamW, GroupedAdafactor, Lion, MuonAdamW, ScheduleFreeAdamW]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(200, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in module.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def ready(optimizer: Any) -> Any:
    if isinstance(optimizer, ScheduleFreeAdamW):
        optimizer.train()
    return optimizer


# Groups


def test_groups_split_by_dimensions_and_keep_their_options() -> None:
    module = network()
    module[3].bias.requires_grad = False
    groups = parameter_groups(module, 0.1)
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(3, 0.1), (3, 0.0)]
    assert [len(group["params"]) for group in parameter_groups(module, 0.1, decay_norm_and_bias=True)] == [6]
    own = [{"params": module[1].parameters(), "lr": 1.0, "weight_decay": 0.5}, {"params": module[2].weight}]
    split = parameter_groups(own, 0.1)
    assert [(len(g["params"]), g["weight_decay"], g.get("lr")) for g in split] == [
        (1, 0.5, 1.0),
        (1, 0.0, 1.0),
        (1, 0.0, None),
    ]


@pytest.mark.parametrize("kind", ALL)
def test_norms_and_biases_decay_unless_told_otherwise(kind: Any) -> None:
    for decay_norm_and_bias in (True, False):
        module = network()
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(1.0)
        arguments = {"lr": 0.1, "weight_decay": 0.5, "decay_norm_and_bias": decay_norm_and_bias}
        optimizer = ready(kind(module.parameters(), **arguments))
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        moved = {p.ndim for p in module.parameters() if not torch.equal(p, torch.ones_like(p))}
        assert moved == ({1, 2} if decay_norm_and_bias else {2})


@pytest.mark.parametrize("kind", ALL)
def test_each_resumes_bit_exactly_from_a_safe_load(kind: Any) -> None:
    whole, half, resumed = network(), network(), network()
    steps(whole, optimizer := ready(kind(whole.parameters(), lr=1e-2)), 2)
    steps(whole, optimizer, 2, seed=1)
    steps(half, optimizer := ready(kind(half.parameters(), lr=1e-2)), 2)
    file = io.BytesIO()
    torch.save({"weights": half.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    resumed.load_state_dict(checkpoint["weights"])
    again = kind(resumed.parameters(), lr=1e-2)
    again.load_state_dict(checkpoint["optimizer"])
    steps(resumed, ready(again), 2, seed=1)
    assert_equal(weights(whole), weights(resumed))


# AdamW


def test_fused_adamw_is_fused_and_lets_lightning_clip() -> None:
    class Fused(Toy):
        fused: Any = None

        def configure_optimizers(self) -> Any:
            return self.fused(self.net.parameters())

    run = {"precision": "bf16-mixed", "gradient_clip_val": 0.1}
    module = Fused()
    module.fused = lambda parameters: torch.optim.AdamW(parameters, fused=True)
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        trainer(**run).fit(module, data(), data())
    module = Fused()
    module.fused = FusedAdamW
    before = weights(module)
    trained = trainer(**run)
    trained.fit(module, data(), data())
    assert trained.optimizers[0].param_groups[0]["fused"] is True
    assert not torch.equal(before["net.head.weight"], module.net.head.weight)


@pytest.mark.parametrize("task", [LanguageModeling, LatentDiffusion, Autoencoding])
def test_tasks_step_with_the_fused_kernel(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = task.__new__(task)
    nn.Module.__init__(module)
    module.net, module.learning_rate, module.weight_decay, module.warmup_steps = nn.Linear(4, 4), 1e-3, 0.1, 0
    monkeypatch.setattr(task, "trainer", SimpleNamespace(estimated_stepping_batches=10))
    optimizer = module.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, FusedAdamW)
    assert all(group["fused"] for group in optimizer.param_groups)


def test_fused_adamw_steps_like_adamw() -> None:
    ours, theirs = network(), network()
    steps(ours, FusedAdamW(ours.parameters(), lr=1e-2), 3)
    steps(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), 3)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)


def test_adafactor_steps_like_torch_and_stores_rows_and_columns() -> None:
    ours, theirs = network(), network()
    steps(ours, optimizer := GroupedAdafactor(ours.parameters()), 3)
    steps(theirs, torch.optim.Adafactor(theirs.parameters()), 3)
    assert_equal(weights(ours), weights(theirs))
    state = optimizer.state[ours[0].weight]
    assert sum(t.numel() for t in state.values() if t.numel() > 1) == 200 + 8


# Lion


def test_lion_is_the_paper_s_algorithm() -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = Lion([p], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    weight, moment = [1.0, -2.0], [0.0, 0.0]
    for gradient in ([0.3, -0.2], [-0.001, 0.5]):
        p.grad = torch.tensor(gradient)
        optimizer.step()
        for i, g in enumerate(gradient):
            u = 0.9 * moment[i] + 0.1 * g
            weight[i] -= 0.1 * ((u > 0) - (u < 0) + 0.5 * weight[i])
            moment[i] = 0.99 * moment[i] + 0.01 * g
    torch.testing.assert_close(p.detach(), torch.tensor(weight))
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.tensor(moment))


# Muon


def test_muon_steps_matrices_like_torch_s_muon_and_the_rest_like_adamw() -> None:
    ours, theirs = network(), network()
    arguments = {"lr": 1e-2, "weight_decay": 0.1}
    steps(ours, optimizer := MuonAdamW(ours.parameters(), betas=(0.9, 0.95), **arguments), 3)
    matrices = [theirs[1].weight, theirs[3].weight]
    rest = [theirs[0].weight, theirs[1].bias, *theirs[2].parameters(), theirs[3].bias]
    muon = torch.optim.Muon(matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw", **arguments)
    adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), **arguments)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p in theirs.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        muon.step()
        adamw.step()
    assert_equal(weights(ours), weights(theirs))
    assert set(optimizer.state[ours[1].weight]) == {"momentum_buffer"}  # 4 bytes a parameter
    assert set(optimizer.state[ours[0].weight]) == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }  # a table, 25 times longer than wide


def test_muon_groups_leave_embeddings_ties_and_named_ones_to_adamw() -> None:
    module = network()
    module.tied = nn.Linear(8, 200, bias=False)
    module.tied.weight = module[0].weight
    muon, adamw = muon_groups(module, adamw=("3.weight",))
    assert [id(p) for p in muon["params"]] == [id(module[1].weight)]
    assert muon["muon"]
    assert not adamw["muon"]
    assert len(adamw["params"]) == 6
    optimizer = MuonAdamW([muon, adamw], max_aspect_ratio=1.0, decay_norm_and_bias=False)
    assert [(group["muon"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (True, 0.1),
        (False, 0.1),
        (False, 0.0),
    ]
    with pytest.raises(ConfigurationError, match=r"no parameter ends in 'lm_head'; there are 0.weight, 1.weight"):
        muon_groups(module, adamw=("lm_head",))
    with pytest.raises(ConfigurationError, match=r"matrices and stacks of them, got a tensor of the shape \[16\]"):
        MuonAdamW([{"params": [module[1].bias], "muon": True}])


# Schedule-free


def test_schedule_free_is_the_paper_s_algorithm_with_x_y_and_z_apart() -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = ScheduleFreeAdamW([p], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, warmup_steps=2)
    optimizer.train()
    x = z = p.detach().double()
    v = torch.zeros(2, dtype=torch.float64)
    total = 0.0
    generator = torch.Generator().manual_seed(0)
    for t in range(1, 6):
        y = 0.1 * z + 0.9 * x
        torch.testing.assert_close(p.detach(), y.float())
        g = torch.randn(2, generator=generator)
        p.grad = g.clone()
        optimizer.step()
        lr = 0.1 * min(1, t / 2)
        v = 0.99 * v + 0.01 * g.double() ** 2
        z = z - lr * (g / ((v / (1 - 0.99**t)).sqrt() + 1e-8) + 0.1 * y)
        total += lr**2
        x = (1 - lr**2 / total) * x + lr**2 / total * z
    kept = p.detach().clone()
    optimizer.eval()
    torch.testing.assert_close(p.detach(), x.float())
    optimizer.eval()  # twice is once
    optimizer.train()
    assert torch.equal(p, kept)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Lion([p], lr=-1), "Lion: lr must be at least 0, got -1"),
        (lambda p: Lion([p], betas=(0.9, 1.0)), "Lion: betas must be at least 0 and below 1"),
        (lambda p: MuonAdamW([p], ns_steps=0), "MuonAdamW: ns_steps must be a whole number of at least 1, got 0"),
        (lambda p: MuonAdamW([p], momentum=1.0), "MuonAdamW: momentum must be at least 0 and below 1, got 1.0"),
        (lambda p: MuonAdamW([p], weight_decay=-1), "MuonAdamW: weight_decay must be at least 0, got -1"),
        (
            lambda p: ScheduleFreeAdamW([p], betas=(0.0, 0.9)),
            r"betas\[0\] must be above 0 and below 1, got 0.0",
        ),
        (lambda p: ScheduleFreeAdamW([p], warmup_steps=-1), "warmup_steps must be a whole number of at least 0"),
    ],
)
def test_arguments_are_checked(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(nn.Parameter(torch.ones(2, 2)))


def test_schedule_free_steps_many_tensors_as_the_formula_steps_each() -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((7, 3), (5,), (2, 2, 2))]
    parameters.append(nn.Parameter(torch.randn(3).double()))
    beta1, beta2, rate, decay = 0.9, 0.99, 0.05, 0.1
    optimizer = ScheduleFreeAdamW(parameters, lr=rate, betas=(beta1, beta2), weight_decay=decay)
    optimizer.train()
    y = [p.detach().clone() for p in parameters]
    z, v = [t.clone() for t in y], [torch.zeros_like(t) for t in y]
    for step in range(1, 4):
        for p in parameters:
            p.grad = torch.randn_like(p)
        for i, p in enumerate(parameters):
            v[i] = v[i].mul(beta2).addcmul(p.grad, p.grad, value=1 - beta2)
            update = p.grad / v[i].sqrt().div(math.sqrt(1 - beta2**step)).add(1e-8)
            update = update.add(y[i], alpha=decay)
            y[i] = y[i].lerp(z[i], 1 / step).add(update, alpha=rate * (beta1 * (1 - 1 / step) - 1))
            z[i] = z[i].sub(update, alpha=rate)
        optimizer.step()
        assert all(torch.equal(p.detach(), t) for p, t in zip(parameters, y))
    assert all(torch.equal(optimizer.state[p]["z"], t) for p, t in zip(parameters, z))
