"""Variants of Muon's update: the papers' formulas in float64, exact resume, and what has no effect is refused."""

from __future__ import annotations

import io
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_efficient import ConfigurationError, MuonAdamW, muon_groups
from lit_efficient.optimizers.in_backward import step_in_backward
from lit_efficient.optimizers.orthogonal_updates import balance, dion, inverse_root, normalise, pair_updates
from tests.support import assert_equal, weights

SHAPES = [(12, 20), (20, 12), (16, 16)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def polar(matrix: Tensor) -> Tensor:
    """The orthogonal factor, by singular values."""
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_columns_are_balanced_before_and_after_as_the_papers_say(shape: tuple[int, int]) -> None:
    m = drawn(*shape)
    rows, columns = m.square().sum(1).sqrt(), m.square().sum(0).sqrt()
    torch.testing.assert_close(balance(m, "row"), torch.diag(1 / rows) @ m)
    torch.testing.assert_close(balance(m, "column"), m @ torch.diag(1 / columns))
    torch.testing.assert_close(balance(m, "both"), torch.diag(1 / rows) @ m @ torch.diag(1 / columns))
    for way, dim in (("row", 1), ("column", 0), ("row_column", 0), ("column_row", 1)):
        done = normalise(m, way)  # type: ignore[arg-type]
        norms = done.norm(dim=dim)
        torch.testing.assert_close(norms, norms[:1].expand_as(norms))  # the last one holds exactly
        torch.testing.assert_close(done.norm(), m.norm())
    first = m / rows[:, None]
    second = first / first.norm(dim=0)
    torch.testing.assert_close(normalise(m, "row_column"), second * m.norm() / second.norm())


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ({"muon_eq": "row"}, lambda m: polar(balance(m, "row"))),
        ({"muon_eq": "both"}, lambda m: polar(balance(m, "both"))),
        ({"muon_plus": "column_row"}, lambda m: normalise(polar(m), "column_row")),
        ({"muon_eq": "row", "muon_plus": "row"}, lambda m: normalise(polar(balance(m, "row")), "row")),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_muon_steps_by_balanced_updates(shape: Any, variant: Any, expected: Any) -> None:
    p, gradient = nn.Parameter(torch.zeros(shape, dtype=torch.float64)), drawn(*shape)
    arguments = {"weight_decay": 0.0, "ns_steps": 12, "polar_express": True}  # float64: the polar factor to 1e-12
    p.grad = gradient
    MuonAdamW([{"params": [p], "muon": True}], lr=1.0, **arguments, **variant).step()
    torch.testing.assert_close(p.detach(), -0.2 * math.sqrt(max(shape)) * expected(gradient))


def test_each_head_is_stepped_like_a_matrix_of_its_own() -> None:
    whole = nn.Parameter(drawn(24, 10).float())
    heads = [nn.Parameter(part.clone()) for part in whole.detach().split(8)]
    one = MuonAdamW([("attention.q.weight", whole)], lr=0.1, heads={"q.weight": 8})
    several = MuonAdamW([{"params": heads, "muon": True}], lr=0.1)
    for seed in range(3):
        whole.grad = drawn(24, 10, seed=seed).float()
        for head, gradient in zip(heads, whole.grad.split(8)):
            head.grad = gradient
        one.step()
        several.step()
    assert torch.equal(whole.detach(), torch.cat([head.detach() for head in heads]))


def by_the_paper(x: Tensor, gradients: list[Tensor], q: Tensor, factor: float) -> Tensor:
    """Dion's algorithm with a learning rate and a weight decay of 0.1 and a momentum of 0.95.

    The reference implementation keeps q while the buffer is zero.
    """
    momentum = torch.zeros_like(x)
    for gradient in gradients:
        buffer = momentum + gradient
        if not buffer.any():
            x = 0.99 * x
            continue
        p = torch.linalg.qr(buffer @ q).Q
        r = buffer.T @ p
        momentum = buffer - 0.05 * p @ r.T
        q = r / (r.norm(dim=0) + 1e-8)
        x = x - 0.1 * (factor * p @ q.T + 0.1 * x)
    return x


@pytest.mark.parametrize("match", [False, True])
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (2, 16, 18)])
def test_dion_is_the_paper_s(shape: Any, match: bool) -> None:
    rows, columns = shape[-2:]
    rank = math.ceil(min(rows, columns) / 4)
    p = nn.Parameter(drawn(*shape))
    start, basis = p.detach().clone(), drawn(*shape[:-2], columns, rank, seed=9)
    optimizer = MuonAdamW([{"params": [p], "muon": True}], lr=0.1, dion=0.25, match_rms_adamw=match)
    optimizer.state[p] = {"momentum_buffer": torch.zeros_like(p), "basis": basis.clone()}
    gradients = [drawn(*shape, seed=seed) for seed in range(1, 6)]
    gradients[0] *= 0.0  # as below a layer that begins at zero
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
    factor = 0.2 * math.sqrt(rows * columns / rank) if match else math.sqrt(rows / columns)
    for i in range(shape[0] if p.ndim == 3 else 1):
        own = [tensor.view(-1, *tensor.shape[-2:])[i] for tensor in (start, *gradients, basis, p.detach())]
        torch.testing.assert_close(own[-1], by_the_paper(own[0], own[1:-2], own[-2], factor))


def test_dion_keeps_what_its_rank_leaves_out() -> None:
    """A gradient of two directions is followed by an update of one, which leaves the other one in the momentum."""
    u, v = torch.linalg.qr(drawn(8, 2)).Q, torch.linalg.qr(drawn(6, 2, seed=1)).Q
    gradient = u @ torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64)) @ v.T
    momentum, basis = torch.zeros(8, 6, dtype=torch.float64), v[:, :1].clone()
    torch.testing.assert_close(dion(momentum, gradient, basis, 0.5), u[:, :1] @ v[:, :1].T)
    torch.testing.assert_close(momentum, u @ torch.diag(torch.tensor([1.5, 1.0], dtype=torch.float64)) @ v.T)


def test_a_product_of_factors_moves_like_a_matrix_in_their_directions() -> None:
    """The first-order change of B A is the mean of the orthogonal factors in the row and column space of B A."""
    a, b, gradient = drawn(4, 9), drawn(11, 4, seed=1), drawn(11, 9, seed=2)
    update_a, update_b = pair_updates(a, b, b.T @ gradient, gradient @ a.T, polar)
    columns, rows = torch.linalg.qr(b).Q, torch.linalg.qr(a.T).Q
    expected = polar(gradient @ rows) @ rows.T + columns @ polar(columns.T @ gradient)
    torch.testing.assert_close(update_b @ a + b @ update_a, expected / 2, atol=2e-5, rtol=0)
    factor = 7.0  # the same product by other factors
    other_a, other_b = pair_updates(a * factor, b / factor, b.T @ gradient / factor, gradient @ a.T * factor, polar)
    torch.testing.assert_close(other_b @ (a * factor) + (b / factor) @ other_a, update_b @ a + b @ update_a)
    assert not inverse_root(torch.zeros(3, 3)).any()


class Adapter(nn.Module):
    """The factors of an adapter, one of them zero as initially, and an attention layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.lora_A = nn.Parameter(torch.randn(3, 12, generator=generator))
        self.lora_B = nn.Parameter(torch.zeros(10, 3))
        self.scale = nn.Parameter(torch.ones(10))
        self.q = nn.Parameter(torch.randn(16, 8, generator=generator))


def train(module: nn.Module, optimizer: Any, seeds: Any) -> None:
    for seed in seeds:
        for i, p in enumerate(module.parameters()):
            p.grad = drawn(*p.shape, seed=10 * seed + i).float()
        optimizer.step()


def test_lora_steps_pairs_by_the_formula_and_others_as_before() -> None:
    module, plain = Adapter(), Adapter()
    optimizer = MuonAdamW(module.parameters(), lr=0.1, weight_decay=0.5, lora=True, polar_express=True, ns_steps=8)
    train(module, optimizer, range(3))
    train(plain, MuonAdamW(plain.parameters(), lr=0.1, weight_decay=0.5, polar_express=True, ns_steps=8), range(3))
    assert torch.equal(module.q, plain.q)
    assert torch.equal(module.scale, plain.scale)
    a, b = (p.detach().double() for p in list(Adapter().parameters())[:2])
    momenta = [torch.zeros_like(a), torch.zeros_like(b)]
    rate, shrink = 0.1 * 0.2 * math.sqrt(12), math.sqrt(1 - 0.1 * 0.5)
    for seed in range(3):
        momenta = [0.95 * m + 0.05 * drawn(*m.shape, seed=10 * seed + i) for i, m in enumerate(momenta)]
        updates = pair_updates(a, b, momenta[0], momenta[1], polar)
        a, b = (shrink * p - rate / shrink * update for p, update in zip((a, b), updates))
    for ours, exact in ((module.lora_A, a), (module.lora_B, b)):
        assert (ours - exact).norm() < 0.02 * exact.norm()  # the iteration is in bfloat16


def test_square_matrices_that_train_whole_are_no_factors() -> None:
    """Names also decide for factors of the full rank."""
    module = nn.ModuleDict({"k": nn.Linear(8, 8, bias=False), "v": nn.Linear(8, 8, bias=False), "adapter": Adapter()})
    for given in (module.parameters(), module.named_parameters()):
        (pairs,) = [group for group in MuonAdamW(given, lora=True).param_groups if group.get("pairs")]
        assert [tuple(p.shape) for p in pairs["params"]] == [(3, 12), (10, 3)]
    full = [("x.lora_A", nn.Parameter(torch.ones(4, 4))), ("x.lora_B", nn.Parameter(torch.ones(4, 4)))]
    assert MuonAdamW(full, lora=True).param_groups[0]["pairs"]


VARIANTS: dict[str, dict[str, Any]] = {
    "balanced": {"muon_eq": "both", "muon_plus": "column_row", "normuon": 0.9},
    "heads": {"heads": {"q": 4}},
    "dion": {"dion": 0.5},
    "lora": {"lora": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_changes_the_step_and_resumes_to_the_bit(name: str) -> None:
    make = partial(MuonAdamW, lr=1e-2, **VARIANTS[name])
    whole, half, resumed, plain = Adapter(), Adapter(), Adapter(), Adapter()
    train(whole, make(whole.named_parameters()), range(4))
    train(half, optimizer := make(half.named_parameters()), range(2))
    file = io.BytesIO()
    torch.save({"weights": half.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)
    resumed.load_state_dict(checkpoint["weights"])
    again = make(resumed.named_parameters())
    again.load_state_dict(checkpoint["optimizer"])
    train(resumed, again, range(2, 4))
    assert_equal(weights(whole), weights(resumed))
    train(plain, MuonAdamW(plain.named_parameters(), lr=1e-2), range(4))
    assert not torch.equal(plain.q if name != "lora" else plain.lora_A, whole.q if name != "lora" else whole.lora_A)


def test_groups_of_a_module_have_heads() -> None:
    module = nn.ModuleDict({"q": nn.Linear(8, 12), "v": nn.Linear(8, 8)})
    groups = muon_groups(module, heads={"q.weight": 4})
    assert [(group["muon"], group.get("head_rows"), len(group["params"])) for group in groups] == [
        (True, None, 1),
        (False, None, 2),
        (True, 4, 1),
    ]
    with pytest.raises(ConfigurationError, match=r"heads must be a divisor of the rows of a matrix \[12, 8\], got 5"):
        muon_groups(module, heads={"q.weight": 5})
    with pytest.raises(ConfigurationError, match=r"heads names q\.bias, which Muon does not step"):
        muon_groups(module, heads={"q.bias": 4})
    with pytest.raises(ConfigurationError, match=r"no parameter ends in 'k\.weight'; there are q\.weight"):
        muon_groups(module, heads={"k.weight": 4})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dion": 0.0}, "dion must be above 0 and at most 1 or null, got 0.0"),
        ({"muon_eq": "rows"}, "muon_eq must be one of row, column, both"),
        ({"muon_plus": "both"}, "muon_plus must be one of row, column, row_column, column_row"),
        ({"heads": {"q": 0}}, "heads must be a whole number of at least 1, got 0"),
        ({"dion": 0.5, "polar_express": True}, "polar_express has no effect with dion"),
        ({"dion": 0.5, "heads": {"q": 4}}, "heads has no effect with dion"),
        ({"lora": True, "normuon": 0.9}, "normuon has no effect with lora"),
        ({"lora": True, "dion": 0.5}, "lora has no effect with dion"),
    ],
)
def test_bad_arguments_and_those_without_effect_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"MuonAdamW: {message}"):
        MuonAdamW(Adapter().named_parameters(), **arguments)


def test_what_matches_nothing_or_half_a_pair_is_refused_in_the_first_step() -> None:
    with pytest.raises(ConfigurationError, match="heads: no matrix of Muon ends in 'k'; parameters must have names"):
        MuonAdamW(Adapter().named_parameters(), heads={"k": 4}).step()
    with pytest.raises(ConfigurationError, match="heads: no matrix of Muon ends in 'q'; parameters must have names"):
        MuonAdamW(Adapter().parameters(), heads={"q": 4}).step()
    with pytest.raises(ConfigurationError, match="lora matches nothing: no two consecutive parameters are factors"):
        MuonAdamW(nn.Linear(4, 4).parameters(), lora=True).step()
    module = Adapter()
    with pytest.raises(ConfigurationError, match="cannot step parameters one by one: MuonAdamW: lora steps the two"):
        step_in_backward(MuonAdamW(module.parameters(), lora=True))
    optimizer = MuonAdamW(module.parameters(), lr=3.0, weight_decay=0.5, lora=True)
    with pytest.raises(ConfigurationError, match=r"weight_decay must be below 0\.333333 at this learning rate"):
        train(module, optimizer, range(1))
