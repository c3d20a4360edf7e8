"""The optimizers for YAML: numbers of the reference implementations, groups, clipping, exact resume."""

from __future__ import annotations

import copy
import functools
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
from lit_efficient.internals.torch_optimizers import orthogonalised
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.optimizers.muon_adamw import POLAR_EXPRESS, polar_express
from lit_efficient.optimizers.spectra import outlier_ratio
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


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("grouped", [False, True])
def test_names_of_parameters_are_taken_as_by_torch_and_change_nothing(kind: Any, grouped: bool) -> None:
    nets = [network(), network()]
    named = list(nets[0].named_parameters())
    plain: list[Any] = list(nets[1].parameters())
    given: list[Any] = [named, plain]
    if grouped:
        given = [[{"params": part[:2], "lr": 0.02}, {"params": part[2:]}] for part in given]
    optimizers = [kind(one, lr=0.01, decay_norm_and_bias=False) for one in given]
    for net, optimizer in zip(nets, map(ready, optimizers)):
        steps(net, optimizer, 3)
    assert_equal(weights(nets[0]), weights(nets[1]))
    names = {id(p): name for name, p in named}
    assert len(optimizers[0].param_groups) == len(optimizers[1].param_groups)
    for group in optimizers[0].param_groups:
        assert group["param_names"] == [names[id(p)] for p in group["params"]]


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


@pytest.mark.parametrize(
    "kind", [*ALL, functools.partial(MuonAdamW, normuon=0.95, cautious_decay=True, polar_express=True)]
)
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


@pytest.mark.parametrize("arguments", [{}, {"beta2_decay": -0.3, "d": 2.0}])
def test_adafactor_steps_like_torch_and_stores_rows_and_columns(arguments: dict[str, float]) -> None:
    ours, theirs = network(), network()
    steps(ours, optimizer := GroupedAdafactor(ours.parameters(), **arguments), 3)
    steps(theirs, torch.optim.Adafactor(theirs.parameters(), **arguments), 3)
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


def row(group: Any) -> dict[str, Any]:
    """The settings of a group but its tensors."""
    return {key: value for key, value in group.items() if key != "params"}


def by_the_paper(w: torch.Tensor, given: list[torch.Tensor], lr: float, normuon: float | None, cautious: bool) -> Any:
    """Muon with Nesterov momentum and its size matched to AdamW's, NorMuon and cautious decay as their papers say."""
    decay, beta, momentum, squares = 0.1, 0.95, torch.zeros_like(w), torch.zeros(len(w))
    for g in given:
        momentum = beta * momentum + (1 - beta) * g
        o = orthogonalised((1 - beta) * g + beta * momentum, (3.4445, -4.775, 2.0315), 5, 1e-7).float()
        u = 0.2 * math.sqrt(max(w.shape)) * o
        if normuon is not None:
            squares = normuon * squares + (1 - normuon) * (o * o).mean(dim=1)
            scaled = o / (squares.sqrt()[:, None] + 1e-10)
            u = 0.2 * math.sqrt(w.numel()) / scaled.norm() * scaled
        mask = (u * w >= 0) if cautious else torch.ones_like(w)
        w = w - lr * (u + decay * mask * w)
    return w


@pytest.mark.parametrize(("normuon", "cautious"), [(None, False), (0.95, False), (None, True), (0.9, True)])
@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24), (3, 20, 24)])
def test_normuon_and_cautious_decay_are_the_papers(shape: Any, normuon: float | None, cautious: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(shape, generator=generator))
    start, given = p.detach().clone(), [torch.randn(shape, generator=generator) for _ in range(6)]
    group = [{"params": [p], "muon": True}]
    optimizer = MuonAdamW(group, lr=0.02, weight_decay=0.1, normuon=normuon, cautious_decay=cautious)
    for gradient in given:
        p.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(p.grad, gradient)
    stacks = (start[None], [g[None] for g in given], p[None]) if p.ndim == 2 else (start, given, p)
    for i, matrix in enumerate(stacks[2]):
        expected = by_the_paper(stacks[0][i], [g[i] for g in stacks[1]], 0.02, normuon, cautious)
        torch.testing.assert_close(matrix.detach(), expected, atol=2e-3, rtol=1e-3)  # the iteration is in bfloat16
    if normuon is not None:
        rows = optimizer.state[p]["mean_square"]
        assert rows.shape == (*shape[:-1], 1)


def test_the_polynomials_of_polar_express_are_the_best_ones_for_singular_values_from_a_thousandth_to_one() -> None:
    """The best polynomial overshoots 1 by as much as it falls short of it."""
    x = torch.logspace(-3, 0, 10_001, dtype=torch.float64)
    for a, b, c in POLAR_EXPRESS:
        x = a * x + b * x**3 + c * x**5
        assert float(1 - x.min()) == pytest.approx(float(x.max() - 1), rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_polar_express_is_the_orthogonal_factor(shape: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(shape[0], min(shape), generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(shape[1], min(shape), generator=generator, dtype=torch.float64))
    matrix = left @ torch.diag(torch.logspace(0, -2.5, min(shape), dtype=torch.float64)) @ right.T
    for steps, most in ((5, 0.13), (6, 3e-3), (8, 1e-12), (10, 1e-12)):
        difference = polar_express(matrix, steps) - left @ right.T
        assert torch.linalg.matrix_norm(difference, 2) < most
        newton_schulz = orthogonalised(matrix, (3.4445, -4.775, 2.0315), steps, 1e-7).double() - left @ right.T
        assert torch.linalg.matrix_norm(newton_schulz, 2) > 0.2
    rounded = torch.linalg.svdvals(polar_express(matrix.float(), 8).double())
    torch.testing.assert_close(rounded, torch.ones_like(rounded), atol=0.03, rtol=0)  # bfloat16


def test_muon_steps_with_polar_express_where_it_is_set() -> None:
    p = nn.Parameter(torch.zeros(16, 24))
    gradient = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    p.grad = gradient.clone()
    MuonAdamW([{"params": [p], "muon": True}], lr=1.0, weight_decay=0.0, ns_steps=8, polar_express=True).step()
    u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
    torch.testing.assert_close(p.detach(), -0.2 * math.sqrt(24) * u @ vh, atol=0.02, rtol=0)


def test_normuon_moves_all_rows_alike_where_muon_does_not() -> None:
    moved = {}
    for normuon in (None, 0.95):
        p = nn.Parameter(torch.zeros(32, 64))
        optimizer = MuonAdamW([{"params": [p], "muon": True}], lr=1.0, weight_decay=0.0, normuon=normuon)
        generator = torch.Generator().manual_seed(0)
        scales = torch.logspace(0, -2, 32)[:, None]  # some neurons have gradients a hundred times as large
        p.grad = scales * torch.randn(32, 4, generator=generator) @ torch.randn(4, 64, generator=generator)
        optimizer.step()
        moved[normuon] = p.detach().norm(dim=1)
    assert moved[None].max() > 5 * moved[None].min()
    torch.testing.assert_close(moved[0.95], torch.full((32,), 0.2 * 8.0))  # 0.2 of each entry, as AdamW moves them


def test_cautious_decay_of_adamw_is_the_paper_s() -> None:
    p = nn.Parameter(torch.tensor([1.0, -2.0, 3.0, -4.0, 0.0]))
    optimizer = MuonAdamW([p], lr=0.1, weight_decay=0.5, betas=(0.9, 0.99), cautious_decay=True)
    w, m, v = p.detach().double(), 0.0, 0.0
    for t, gradient in enumerate(([0.3, 0.3, -0.2, -0.2, 1.0], [-9.0, 0.1, -0.1, 0.0, -1.0]), 1):
        g = torch.tensor(gradient).double()
        p.grad = g.float()
        optimizer.step()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        u = m / (1 - 0.9**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        w = w - 0.1 * (u + 0.5 * torch.where(u * w >= 0, w, 0.0))
    torch.testing.assert_close(p.detach().double(), w, atol=1e-6, rtol=1e-6)


def test_a_gradient_of_zeros_moves_nothing_with_normuon() -> None:
    p = nn.Parameter(torch.randn(8, 8))
    before, optimizer = p.detach().clone(), MuonAdamW([{"params": [p], "muon": True}], weight_decay=0.0, normuon=0.95)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, before)


def test_a_checkpoint_of_before_normuon_goes_on_as_plain_muon_and_takes_it_up_where_asked() -> None:
    whole, again = network(), network()
    steps(whole, optimizer := MuonAdamW(whole.parameters(), lr=1e-2), 2)
    state = copy.deepcopy(optimizer.state_dict())
    assert not {"normuon", "cautious_decay", "polar_express"} & state["param_groups"][0].keys()
    again.load_state_dict(whole.state_dict())
    resumed = MuonAdamW(again.parameters(), lr=1e-2)
    resumed.load_state_dict(state)
    assert [row(group) for group in resumed.param_groups] == [row(group) for group in optimizer.param_groups]
    steps(whole, optimizer, 2, seed=1)
    steps(again, resumed, 2, seed=1)
    assert_equal(weights(whole), weights(again))
    taken_up = MuonAdamW(again.parameters(), lr=1e-2, normuon=0.9, cautious_decay=True)
    taken_up.load_state_dict(state)
    assert all(group["normuon"] == 0.9 and group["cautious_decay"] for group in taken_up.param_groups)
    steps(again, taken_up, 1)
    assert "mean_square" in taken_up.state[again[1].weight]


def test_the_outlier_ratio_is_that_of_the_singular_values_and_one_for_random_entries() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(300, 100, generator=generator)
    assert outlier_ratio(matrix) == pytest.approx(1, abs=0.05)
    matrix += torch.randn(300, 1, generator=generator) @ torch.randn(1, 100, generator=generator)
    expected = torch.linalg.matrix_norm(matrix - matrix.mean(), 2) / matrix.std(correction=0) / (300**0.5 + 10)
    assert outlier_ratio(matrix) == pytest.approx(float(expected), rel=1e-3)
    assert outlier_ratio(torch.ones(8, 4)) == outlier_ratio(torch.zeros(8, 4)) == 0


def pretrained(kind: Any, count: int = 40, width: int = 32) -> nn.Module:
    """A small GPT that has learned which token follows which."""
    torch.manual_seed(0)
    module = GPT(GPTConfig(64, dim=width, depth=2, num_heads=2, max_length=16))
    optimizer = kind(muon_groups(module) if kind is MuonAdamW else module.parameters(), lr=3e-3)
    following = torch.randperm(64)
    for _ in range(count):
        tokens = torch.randint(64, (16, 1))
        for _ in range(8):
            tokens = torch.cat((tokens, following[tokens[:, -1:]]), 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("width", [32, 64])
def test_muon_warns_where_adam_has_trained_and_neither_on_fresh_weights_nor_on_its_own(width: int) -> None:
    module = pretrained(torch.optim.AdamW, width=width)
    optimizer = MuonAdamW(muon_groups(module), lr=1e-3)
    with pytest.warns(UserWarning, match=r"trained before, and not by Muon: .* 2511\.06086"):
        optimizer.step()
    optimizer.step()  # says it once
    alone = MuonAdamW(groups := muon_groups(module), lr=1e-3)  # as in the backward pass, where others come first
    last = groups[1]["params"][-1]
    alone.param_groups = [{**alone.param_groups[1], "params": [last]}]
    with pytest.warns(UserWarning, match="trained before"):
        alone.step()
    frozen = MuonAdamW(muon_groups(module), lr=1e-3)
    module.requires_grad_(False)
    frozen.step()  # says nothing of what does not train
    module.requires_grad_(True)
    state = optimizer.state_dict()
    resumed = MuonAdamW(muon_groups(module), lr=1e-3)
    resumed.load_state_dict(state)
    resumed.step()
    for other in (pretrained(torch.optim.AdamW, 0, width), pretrained(MuonAdamW, width=width)):
        for p in other.parameters():
            p.grad = torch.randn_like(p)
        MuonAdamW(muon_groups(other), lr=1e-3).step()


@pytest.mark.parametrize(("shape", "muon"), [((2, 16, 16), True), ((1, 16, 16), False), ((2, 16, 15), False)])
def test_a_stack_of_matrices_is_none_of_filters_and_has_several(shape: Any, muon: bool) -> None:
    optimizer = MuonAdamW([nn.Parameter(torch.zeros(shape))])
    assert [group["muon"] for group in optimizer.param_groups if group["params"]] == [muon]


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
        (lambda p: MuonAdamW([p], normuon=1.0), "MuonAdamW: normuon must be at least 0 and below 1 or null, got 1.0"),
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
