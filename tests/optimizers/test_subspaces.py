"""Subspaces of gradients: the strongest directions, exactly and randomised, random ones, and the way in and out."""

from __future__ import annotations

import pytest
import torch

from lit_efficient.optimizers.subspaces import (
    gradient_scales,
    into_subspace,
    is_wide,
    out_of_subspace,
    random_directions,
    strongest_directions,
)

SHAPES = [(40, 24), (24, 40), (32, 32), (3, 40, 24), (3, 24, 40)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decaying(shape: tuple[int, ...], rate: float = 0.7) -> torch.Tensor:
    """A gradient whose singular values fall like a real one's."""
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=generator()), full_matrices=False)
    return left * rate ** torch.arange(left.shape[-1]) @ right


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("exact", [True, False])
def test_strongest_directions_are_the_first_singular_vectors_in_order(shape: tuple[int, ...], exact: bool) -> None:
    gradient = decaying(shape)
    basis = strongest_directions(gradient, 6, None if exact else generator(1))
    left, values, right = torch.linalg.svd(gradient, full_matrices=False)
    expected = (left if is_wide(gradient) else right.mT)[..., :6]
    assert basis.shape == (*shape[:-2], min(shape[-2:]), 6)
    torch.testing.assert_close((basis * expected).sum(-2).abs(), torch.ones(*shape[:-2], 6), atol=1e-4, rtol=0)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(6).expand(*shape[:-2], 6, 6), atol=1e-5, rtol=0)
    low = into_subspace(gradient, basis)
    assert low.shape == (*shape[:-2], *((6, shape[-1]) if is_wide(gradient) else (shape[-2], 6)))
    lost = torch.linalg.norm(gradient - out_of_subspace(low, basis, is_wide(gradient)), dim=(-2, -1))
    torch.testing.assert_close(lost, values[..., 6:].norm(dim=-1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("exact", [True, False])
def test_a_gradient_of_lower_rank_and_the_full_rank_have_a_basis_too(exact: bool) -> None:
    thin = torch.randn(20, 2, generator=generator()) @ torch.randn(2, 30, generator=generator(1))
    for gradient, rank in ((thin, 5), (decaying((20, 30)), 20)):
        basis = strongest_directions(gradient, rank, None if exact else generator(1))
        torch.testing.assert_close(basis.mT @ basis, torch.eye(rank), atol=1e-5, rtol=0)
        if rank == 5:
            back = out_of_subspace(into_subspace(gradient, basis), basis, True)
            torch.testing.assert_close(back, gradient, atol=1e-4, rtol=1e-4)


def test_half_precision_is_decomposed_in_single() -> None:
    gradient = decaying((24, 40)).bfloat16()
    basis = strongest_directions(gradient, 4, generator(1))
    assert basis.dtype == torch.bfloat16
    exact = strongest_directions(gradient.float(), 4)
    assert ((basis.float() * exact).sum(0).abs() > 0.99).all()


def test_random_directions_keep_norms_in_expectation() -> None:
    gradient = torch.randn(64, 500, generator=generator())
    basis = random_directions(gradient, 32, generator(1))
    assert basis.shape == (64, 32)
    ratio = into_subspace(gradient, basis).norm() / gradient.norm()
    assert abs(ratio - 1) < 0.1
    assert not torch.equal(basis, random_directions(gradient, 32, generator(2)))


@pytest.mark.parametrize("shape", [(4, 30), (30, 4)])
def test_scales_are_ratios_of_norms_by_channel_of_the_longer_side_or_of_all(shape: tuple[int, int]) -> None:
    low, step = (torch.randn(shape, generator=generator(seed)) for seed in (0, 1))
    wide = shape[0] < shape[1]
    scales = gradient_scales(low, step, wide)
    for i in range(30):
        channel = (slice(None), i) if wide else (i, slice(None))
        torch.testing.assert_close(scales.flatten()[i], step[channel].norm() / low[channel].norm())
    assert scales.shape == ((1, 30) if wide else (30, 1))
    torch.testing.assert_close(
        gradient_scales(low, step, wide, tensorwise=True), (step.norm() / low.norm())[None, None]
    )
    assert gradient_scales(torch.zeros(shape), step, wide).isfinite().all()
