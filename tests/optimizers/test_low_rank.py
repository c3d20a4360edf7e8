"""GaLore and APOLLO as optimizers: the papers' loops, bytes, full rank, parameters one by one, resume, refusals."""

from __future__ import annotations

import copy
import io
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_efficient import ConfigurationError, FusedAdamW, Lion, MuonAdamW, step_in_float32, to_low_rank
from lit_efficient.errors import DivergedError
from lit_efficient.optimizers.low_rank_adamw import LowRankAdamW, RandomDirections, StrongestDirections
from tests.state_bytes import measure_state_bytes
from tests.support import assert_equal

SHAPES = [(24, 8), (8, 24), (16, 16), (40, 12), (3, 10, 20)]
LR, BETAS, EPS, DECAY = 0.02, (0.8, 0.95), 1e-8, 0.1


def to_galore(
    optimizer: Any, ps: Any, rank: int, every: int = 200, scale: float = 0.25, *, exact: bool = False, bits: int = 32
) -> Any:
    return to_low_rank(optimizer, ps, StrongestDirections(rank, every, scale, exact), bits)


def to_apollo(
    optimizer: Any,
    ps: Any,
    rank: int,
    every: int = 200,
    scale: float = 1.0,
    *,
    tensorwise: bool = False,
    bits: int = 32,
) -> Any:
    return to_low_rank(optimizer, ps, RandomDirections(rank, every, scale, tensorwise), bits)


def gradients(shapes: list[tuple[int, ...]], steps: int, seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(steps)]


def parameters(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in [*shapes, (7,)]]


def adamw(ps: list[nn.Parameter], kind: Any = torch.optim.AdamW) -> Any:
    return kind(ps, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def steps(ps: list[nn.Parameter], optimizer: torch.optim.Optimizer, given: list[list[Tensor]]) -> None:
    for of_step in given:
        for p, gradient in zip(ps, of_step, strict=False):
            p.grad = gradient.to(p.dtype)
        ps[-1].grad = torch.full_like(ps[-1], 0.5)
        optimizer.step()


# The papers' algorithms


def galore(w: Tensor, given: list[Tensor], rank: int, update_every: int, scale: float) -> Tensor:
    """GaLore as its Algorithms 1 and 2 say, one matrix, with AdamW's decay; the loop of the paper, in float64."""
    w, m, v, basis = w.double(), 0.0, 0.0, None
    for t, g in enumerate(given):
        if t % update_every == 0:
            left, _, right = torch.linalg.svd(g, full_matrices=False)  # as it is: a direction's sign is the library's
            basis = (left[:, :rank] if g.shape[0] < g.shape[1] else right[:rank].T).double()
        low = basis.T @ g.double() if g.shape[0] < g.shape[1] else g.double() @ basis
        m, v = BETAS[0] * m + (1 - BETAS[0]) * low, BETAS[1] * v + (1 - BETAS[1]) * low * low
        n = m / (1 - BETAS[0] ** (t + 1)) / ((v / (1 - BETAS[1] ** (t + 1))).sqrt() + EPS)
        n = basis @ n if g.shape[0] < g.shape[1] else n @ basis.T
        w = w - LR * (scale * n + DECAY * w)
    return w


@pytest.mark.parametrize("update_every", [1, 3, 7, 200])
def test_galore_is_the_paper_s_loop_for_tall_wide_square_and_stacked_matrices(update_every: int) -> None:
    ps, given = parameters(), gradients(SHAPES, 20)
    start = [p.detach().clone() for p in ps]
    done = to_galore(optimizer := adamw(ps), ps[:-1], 4, update_every, 0.25, exact=True)
    assert len(done.projected) == 5
    steps(ps, optimizer, given)
    for i, p in enumerate(ps[:-2]):
        expected = galore(start[i], [of_step[i] for of_step in given], 4, update_every, 0.25)
        torch.testing.assert_close(p.detach(), expected.float(), atol=1e-5, rtol=1e-5)
    for e in range(3):  # of a stack each matrix by itself
        expected = galore(start[4][e], [of_step[4][e] for of_step in given], 4, update_every, 0.25)
        torch.testing.assert_close(ps[4][e].detach(), expected.float(), atol=1e-5, rtol=1e-5)


def apollo(w: Tensor, given: list[Tensor], bases: list[Tensor], scale: float, tensorwise: bool) -> Tensor:
    """APOLLO as its Algorithm 1 says, with the limit of growth, for bases P^T that are given."""
    w, m, v, before = w.double(), 0.0, 0.0, 0.0
    turned = w.shape[0] >= w.shape[1]
    for t in range(len(given)):
        g = given[t].double().T if turned else given[t].double()  # rows are the shorter side
        r = bases[t].double().T @ g
        m, v = BETAS[0] * m + (1 - BETAS[0]) * r, BETAS[1] * v + (1 - BETAS[1]) * r * r
        n = m / (1 - BETAS[0] ** (t + 1)) / ((v / (1 - BETAS[1] ** (t + 1))).sqrt() + EPS)
        s = n.norm() / r.norm() if tensorwise else n.norm(dim=0) / r.norm(dim=0)
        update = g * s
        if before and update.norm() > 1.01 * before:
            update = update / update.norm() * 1.01 * before
        before = update.norm()
        w = w - LR * (scale * (update.T if turned else update) + DECAY * w)
    return w


@pytest.mark.parametrize(("rank", "tensorwise"), [(4, False), (1, True)])
def test_apollo_is_the_paper_s_loop(rank: int, tensorwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import lit_efficient.optimizers.low_rank_adamw as module

    drawn: dict[tuple[int, ...], list[Tensor]] = {}

    def kept(gradient: Tensor, *args: Any) -> Tensor:
        drawn.setdefault(tuple(gradient.shape), []).append(real(gradient, *args))
        return drawn[tuple(gradient.shape)][-1]

    real = module.random_directions
    monkeypatch.setattr(module, "random_directions", kept)
    shapes = SHAPES[:4]
    ps, given = parameters(shapes), gradients(shapes, 12)
    start = [p.detach().clone() for p in ps]
    to_apollo(optimizer := adamw(ps), ps[:-1], rank, 5, 2.0, tensorwise=tensorwise)
    steps(ps, optimizer, given)
    for i, p in enumerate(ps[:-1]):
        bases = drawn[tuple(p.shape)]
        same = [torch.equal(a, b) for a, b in pairwise(bases)]
        assert same == [(t + 1) % 5 != 0 for t in range(11)]  # drawn anew every five steps
        expected = apollo(start[i], [of_step[i] for of_step in given], bases, 2.0, tensorwise)
        torch.testing.assert_close(p.detach(), expected.float(), atol=1e-5, rtol=1e-4)


# What it is for


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("turn", [to_galore, to_apollo])
def test_state_bytes_are_those_of_the_formula(turn: Any, bits: int, dtype: torch.dtype) -> None:
    shapes = [(512, 96), (96, 512), (2, 96, 300), (64, 64)]
    ps, rank, size = parameters(shapes, dtype), 16, dtype.itemsize
    done = turn(optimizer := adamw(ps), ps[:-1], rank, bits=bits)
    steps(ps, optimizer, gradients(shapes, 1))
    expected = 2 * 7 * size  # the vector's two moments
    for m, n, count in ((96, 512, 2), (96, 300, 2), (64, 64, 1)):  # shorter, longer side
        low = bits == 8 and count * rank * n >= 4096 and not (n == 512 and rank * n < 4096)
        moments = 2 * rank * n * size if not low else 2 * (rank * n + 4 * math.ceil(rank * n / 256))
        basis = rank * m * size if turn is to_galore else 0
        expected += count * (moments + basis)
    assert done.state_bytes == measure_state_bytes(optimizer) - (0 if turn is to_galore else 2 * 4) == expected
    assert done.full_bytes == 2 * size * sum(p.numel() for p in ps)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdamW])
@pytest.mark.parametrize("turn", [to_galore, to_apollo])
def test_at_full_rank_tall_and_wide_matrices_are_stepped_by_adamw_bit_by_bit(turn: Any, kind: Any) -> None:
    """Its state is AdamW's, too: a rotation into a basis of the whole space would cost one more matrix."""
    shapes = [(24, 8), (8, 24), (8, 8), (24, 12)]
    ours, theirs, given = parameters(shapes), parameters(shapes), gradients(shapes, 5)
    done = turn(optimizer := adamw(ours, kind), ours[:-1], 8)
    assert [p.shape for p in done.projected] == [(24, 12)]
    steps(ours, optimizer, given)
    steps(theirs, adamw(theirs, kind), given)
    whole = [0, 1, 2, 4]
    assert_equal([ours[i].detach() for i in whole], [theirs[i].detach() for i in whole])
    assert not torch.equal(ours[3], theirs[3])


@pytest.mark.parametrize("exact", [True, False])
def test_galore_learns_what_lies_in_few_directions_as_adam_does(exact: bool) -> None:
    """The solution of this least-squares problem has rank two, and GaLore of rank two reaches it.

    The distance oscillates: over 16 seeds it is at most 0.02 after 500 steps, and up to 0.08 after 200.
    """
    generator = torch.Generator().manual_seed(0)
    solution = torch.randn(30, 2, generator=generator) @ torch.randn(2, 20, generator=generator)
    p = nn.Parameter(torch.zeros(30, 20))
    optimizer = torch.optim.AdamW([p], lr=0.1, weight_decay=0.0)
    to_galore(optimizer, [p], 2, 20, 1.0, exact=exact)
    for _ in range(500):
        p.grad = p.detach() - solution
        optimizer.step()
    assert (p - solution).norm() < 0.05 * solution.norm()


# One by one, and again


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("turn", [to_galore, to_apollo])
def test_parameters_stepped_one_by_one_are_those_stepped_together(turn: Any, bits: int) -> None:
    """As gradients come in the backward pass, and in another order in each step."""
    shapes = [(300, 24), (24, 300), (80, 80)]
    together, alone, given = parameters(shapes), parameters(shapes), gradients(shapes, 4)
    for ps in (together, alone):
        turn(optimizer := adamw(ps), ps[:-1], 16, 2, bits=bits)
        groups = optimizer.param_groups
        for t, of_step in enumerate(given):
            if ps is together:
                steps(ps, optimizer, [of_step])
                continue
            ps[-1].grad = None
            for i in ((0, 1, 2), (2, 0, 1))[t % 2]:
                ps[i].grad = of_step[i]
                optimizer.param_groups = [{**groups[0], "params": [ps[i]]}] if t else groups
                optimizer.step()
                ps[i].grad = None
            optimizer.param_groups = groups
    assert_equal([p.detach() for p in together[:-1]], [p.detach() for p in alone[:-1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("turn", [to_galore, to_apollo])
def test_it_resumes_in_the_middle_of_a_period_from_a_safe_load(turn: Any, bits: int, dtype: torch.dtype) -> None:
    shapes = [(300, 24), (24, 300), (2, 40, 60)]
    given = gradients(shapes, 7)
    whole, half, again = (parameters(shapes, dtype) for _ in range(3))
    turn(optimizer := adamw(whole), whole[:-1], 16, 3, bits=bits)
    steps(whole, optimizer, given)
    turn(optimizer := adamw(half), half[:-1], 16, 3, bits=bits)
    steps(half, optimizer, given[:4])
    torch.save([[p.detach() for p in half], optimizer.state_dict()], file := io.BytesIO())
    file.seek(0)
    kept, state = torch.load(file, weights_only=True)
    for p, tensor in zip(again, kept, strict=True):
        p.data.copy_(tensor)
    turn(resumed := adamw(again), again[:-1], 16, 3, bits=bits)
    resumed.load_state_dict(state)
    assert_equal(resumed.state_dict(), state)
    copied, twin = copy.deepcopy([again, resumed])
    for ps, one in ((again, resumed), (copied, twin)):
        steps(ps, one, given[4:])
        assert_equal([p.detach() for p in ps], [p.detach() for p in whole])


@pytest.mark.parametrize("turn", [to_galore, to_apollo])
def test_the_run_s_own_draws_are_those_without_it_and_ranks_with_other_ones_agree(turn: Any) -> None:
    ranks = [parameters(), parameters()]
    for rank, ps in enumerate(ranks):
        torch.manual_seed(rank)
        turn(optimizer := adamw(ps), ps[:-1], 4, 1)
        steps(ps, optimizer, gradients(SHAPES, 2))
        drawn = torch.rand(3)
        torch.manual_seed(rank)
        assert torch.equal(drawn, torch.rand(3))
    assert_equal(*([p.detach() for p in ps] for ps in ranks))


def test_what_is_thawed_by_hand_later_is_projected_then() -> None:
    ps = parameters([(24, 8), (8, 24)])
    ps[1].requires_grad_(False)
    done = to_galore(optimizer := adamw(ps), ps[:-1], 4)
    assert done.state_bytes == 4 * (2 * 4 * 24 + 4 * 8 + 2 * 7)
    ps[1].requires_grad_(True)
    steps(ps, optimizer, gradients([(24, 8), (8, 24)], 1))
    assert optimizer.state[ps[1]]["exp_avg"].shape == (4, 24)


@pytest.mark.parametrize("shape", [(24, 8), (12, 30), (3, 10, 20)])
def test_q_galore_steps_as_galore_with_the_rounded_basis(shape: tuple[int, ...]) -> None:
    """Codes of 4 bits between the least and the largest value of each 256 elements, in which zeros fill up the last."""
    ps, given = parameters([shape]), gradients([shape], 3)
    p, start = ps[0], ps[0].detach().double()
    to_low_rank(optimizer := adamw(ps), [p], StrongestDirections(4, 200, 0.25, True, 4))
    steps(ps, optimizer, given)
    for i in range(len(p) if p.ndim == 3 else 1):
        stack = [t[0].double().view(-1, *shape[-2:]) for t in given]
        wide = shape[-2] < shape[-1]
        left, _, right = torch.linalg.svd(given[0][0], full_matrices=False)
        basis = (left if wide else right.mT)[..., :4].double()
        values = torch.cat([basis.flatten(), torch.zeros(-basis.numel() % 256)])
        assert len(values) == 256
        step = (values.max() - values.min()) / 15
        rounded = (((values - values.min()) / step).round() * step + values.min())[: basis.numel()]
        q = rounded.view(-1, *basis.shape[-2:])[i]
        w, m, v = start.view(-1, *shape[-2:])[i], 0.0, 0.0
        for t, full in enumerate(stack, 1):
            low = q.T @ full[i] if wide else full[i] @ q
            m, v = BETAS[0] * m + (1 - BETAS[0]) * low, BETAS[1] * v + (1 - BETAS[1]) * low**2
            step_low = m / (1 - BETAS[0] ** t) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
            w = w * (1 - LR * DECAY) - LR * 0.25 * (q @ step_low if wide else step_low @ q.T)
        torch.testing.assert_close(p.detach().double().view(-1, *shape[-2:])[i], w, rtol=1e-4, atol=1e-5)
    assert optimizer.state[p]["projector"].nbytes == 128


def test_q_galore_asks_less_often_where_the_strongest_direction_stays_and_resumes_there() -> None:
    """One matrix always has the same gradient, the other one a new one in each step."""
    fixed = gradients([(12, 30)], 1)[0][0]
    given = [[fixed, of_step[0]] for of_step in gradients([(12, 30)], 30)]
    subspace = StrongestDirections(4, 2, 0.25, False, 4, 0.9)

    def begun() -> tuple[Any, Any]:
        ps = parameters([(12, 30), (12, 30)])
        to_low_rank(optimizer := adamw(ps), ps[:2], subspace)
        return ps, optimizer

    ps, optimizer = begun()
    steps(ps, optimizer, given)
    assert optimizer.state[ps[0]]["every"] == 16  # 4 from step 10 on, 8 from step 12 on, 16 from step 16 on
    assert "every" not in optimizer.state[ps[1]]
    assert min(optimizer.state[ps[0]]["similarities"]) > 0.9
    half, optimizer = begun()
    steps(half, optimizer, given[:13])
    saved = copy.deepcopy(optimizer.state_dict())
    again, resumed = begun()
    for p, q in zip(again, half, strict=True):
        p.data.copy_(q)
    resumed.load_state_dict(saved)
    assert resumed.state[again[0]]["projector"].dtype == torch.uint8
    steps(again, resumed, given[13:])
    assert all(map(torch.equal, ps, again))


def test_a_gradient_of_zeros_fixes_no_directions_and_one_that_is_not_finite_is_refused() -> None:
    """Before a layer that starts at zero, as in a DiT, the first gradients are zero."""
    (p, _), given = parameters([(12, 30)]), gradients([(12, 30)], 3)
    to_galore(optimizer := adamw([p]), [p], 4, 200, exact=True)
    start = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), start * (1 - LR * DECAY))
    p.grad = given[0][0]
    optimizer.step()
    basis = optimizer.state[p]["projector"]
    torch.testing.assert_close(basis, torch.linalg.svd(given[0][0], full_matrices=False)[0][:, :4])
    assert float(optimizer.state[p]["step"]) == 2
    (p, _) = parameters([(12, 30)])
    to_galore(optimizer := adamw([p]), [p], 4)
    p.grad = torch.full_like(p, math.nan)
    before = p.detach().clone()
    with pytest.raises(DivergedError, match=r"shape \[12, 30\] is not finite"):
        optimizer.step()
    assert torch.equal(p, before)


def test_an_apollo_update_grows_by_one_percent_at_most_and_starts_anew_after_none() -> None:
    p = nn.Parameter(torch.zeros(8, 30))
    to_apollo(optimizer := torch.optim.AdamW([p], lr=1.0, weight_decay=0.0), [p], 4)
    moved = []
    for size in (1.0, -1.0, -1.0, 0.0, -1.0):
        p.grad = torch.full_like(p, size)
        before = p.detach().clone()
        optimizer.step()
        moved.append(float((p.detach() - before).norm()))
    assert moved[1] < 0.1 * moved[0]  # the moments cancel out, and the next step would be eight times this one
    assert moved[2] == pytest.approx(1.01 * moved[1], rel=1e-4)
    assert moved[3] == 0
    assert moved[4] > 2 * moved[2]


def test_filters_of_a_convolution_are_rows_and_keep_their_layout() -> None:
    p = nn.Parameter(torch.randn(12, 4, 3, 3).to(memory_format=torch.channels_last))
    flat = nn.Parameter(p.detach().flatten(1))
    for q in (p, flat):
        to_galore(optimizer := adamw([q]), [q], 4, exact=True)
        for gradient in gradients([(12, 4, 3, 3)], 3):
            q.grad = gradient[0].view(q.shape)
            optimizer.step()
    assert p.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(p.detach().flatten(1), flat.detach())


def test_the_optimizer_that_is_turned_stays_where_schedulers_point() -> None:
    ps = parameters()
    groups = [{"params": ps[:2], "name": "a"}, {"params": ps[2:], "lr": 0.5, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=10)
    to_galore(optimizer, ps[:-1], 4)
    assert type(optimizer) is LowRankAdamW
    assert [group.get("name") for group in optimizer.param_groups] == ["a", None]
    rates = []
    for of_step in gradients(SHAPES, 4):
        steps(ps, optimizer, [of_step])
        schedule.step()
        rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]))
    assert len(set(rates)) == 4


@pytest.mark.parametrize(
    ("make", "rank", "bits", "message"),
    [
        (adamw, 16, 32, "to_low_rank: rank must be below 16, the full rank of its largest target, got 16"),
        (adamw, 4, 8, "to_low_rank: bits must be 32, because no moments have 4,096 elements, got 8"),
        (Lion, 4, 32, "to_low_rank: Lion has no low-rank form; allowed: AdamW, FusedAdamW, Adam"),
        (torch.optim.SGD, 4, 32, "to_low_rank: SGD has no low-rank form"),
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), 4, 32, r"AdamW\(amsgrad=True\) has no low-rank form"),
        (lambda ps: torch.optim.Adam(ps, weight_decay=0.1), 4, 32, "adds decay to the gradient: use AdamW"),
    ],
)
def test_refusals(make: Any, rank: int, bits: int, message: str) -> None:
    ps = parameters()
    with pytest.raises(ConfigurationError, match=message):
        to_galore(make(ps), ps[:-1], rank, bits=bits)


@pytest.mark.parametrize(("to_low", "bits"), [(to_galore, 32), (to_galore, 8), (to_apollo, 32), (to_apollo, 8)])
def test_bfloat16_weights_that_step_in_float32_are_still_seen_in_the_subspace(to_low: Any, bits: int) -> None:
    """The steps with a compensation end where those of float32 weights do, from the same kinds of states."""
    start = gradients([(32, 512)], 1, seed=7)[0][0].mul(0.02).bfloat16()
    weights = nn.Parameter(start.clone()), nn.Parameter(start.float())
    low, full = optimizers = [torch.optim.AdamW([p], 1e-4, weight_decay=DECAY) for p in weights]
    for optimizer, p in zip(optimizers, weights, strict=True):
        to_low(optimizer, [p], 8, 5, bits=bits)
    step_in_float32(low, compensated=True)
    for (gradient,) in gradients([(32, 512)], 10):
        for optimizer, p in zip(optimizers, weights, strict=True):
            p.grad = (gradient + 1).bfloat16().to(p)
            optimizer.step()
    p, q = weights
    state = low.state[p]
    ours = p.detach().float() + state["compensation"].float()
    assert (ours - q).norm() < 0.02 * (q - start.float()).norm()
    assert {key: value.shape for key, value in state.items() if key != "compensation"} == {
        key: value.shape for key, value in full.state[q].items()
    }
    assert all(value.dtype is torch.float32 for key, value in state.items() if key in ("absmax1", "absmax2", "norm"))


@pytest.mark.parametrize("kind", ["GaLore", "APOLLO", "MuonAdamW"])
def test_steps_are_counted_exactly_where_bfloat16_is_the_default_type(kind: str) -> None:
    """As it is in a training step of ``bf16-true``, where manual optimization steps: its 257 is 256."""
    p = nn.Parameter(torch.ones(4, 4 if kind != "MuonAdamW" else 400))
    optimizer = (MuonAdamW if kind == "MuonAdamW" else torch.optim.AdamW)([p], lr=1e-3)
    if kind != "MuonAdamW":
        (to_galore if kind == "GaLore" else to_apollo)(optimizer, [p], 2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        for _ in range(258):
            p.grad = torch.ones(p.shape, dtype=torch.float32)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert optimizer.state[p]["step"] == 258


@pytest.mark.parametrize("to_low", [to_galore, to_apollo])
def test_float64_weights_are_stepped(to_low: Any) -> None:
    ps = [nn.Parameter(torch.ones(4, 8, dtype=kind)) for kind in (torch.float64, torch.float32)]
    for p in ps:
        optimizer = torch.optim.AdamW([p], lr=1e-3)
        to_low(optimizer, [p], 2)
        for (gradient,) in gradients([(4, 8)], 3):
            p.grad = gradient.to(p)
            optimizer.step()
    torch.testing.assert_close(ps[0].float(), ps[1])
