import math

import pytest
import torch

from lit_efficient.models.judges.sample_quality import distances_of_features
from lit_efficient.surgery import own_draws


def features(count, mean, seed):
    return mean + torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def test_both_distances_are_what_their_formulas_say():
    real, generated = features(300, 0.0, 0), features(200, 1.0, 1)
    found = distances_of_features(real, generated)
    means = [x.double().mean(0) for x in (real, generated)]
    covariances = [x.double().T.cov() for x in (real, generated)]
    root = torch.linalg.eigvals(covariances[0] @ covariances[1]).sqrt().real.sum()
    frechet = (means[0] - means[1]).square().sum() + covariances[0].trace() + covariances[1].trace() - 2 * root
    assert found["frechet_distance"] == pytest.approx(frechet.item(), rel=1e-3)
    # The expectation of the kernel distance for two normals, by Monte Carlo of many more samples
    x, y = (features(3000, mean, seed).double() for mean, seed in ((0.0, 2), (1.0, 3)))

    def kernel(a, b):
        return (a @ b.T / 4 + 1) ** 3

    within = sum((kernel(a, a).sum() - kernel(a, a).trace()) / (3000 * 2999) for a in (x, y))
    expected = (within - 2 * kernel(x, y).mean()).item()
    assert found["kernel_distance"] == pytest.approx(expected, rel=0.25)


def test_the_kernel_distance_of_equal_distributions_is_zero_and_no_draw_is_taken_from_the_global_generator():
    before = torch.get_rng_state()
    found = [distances_of_features(features(300, 0.0, 0), features(300, 0.0, 1)) for _ in range(2)]
    assert found[0] == found[1]
    assert abs(found[0]["kernel_distance"]) < 0.15
    shifted = distances_of_features(features(300, 0.0, 0), features(300, 1.0, 1))
    assert shifted["kernel_distance"] > 1.0
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("reals", "generateds", "size"), [(2, 3, 6), (300, 64, 32), (1000, 256, 64), (50, 60, 256)])
def test_both_distances_are_those_of_torchmetrics_in_float64(reals, generateds, size):
    """As features of Inception are: float32, above 0, with small differences between the sets."""
    drawn = torch.Generator().manual_seed(0)
    real = torch.rand(reals, size, generator=drawn)
    generated = torch.rand(generateds, size, generator=drawn) * 0.99
    count = min(reals, generateds)
    with own_draws(0):
        subsets = [one[torch.randperm(len(one))[:count]].double() for one in (real, generated)]

    def kernel(a, b):
        return (a @ b.T / size + 1) ** 3

    within = sum((kernel(a, a).sum() - kernel(a, a).trace()) / (count * (count - 1)) for a in subsets)
    expected = within - 2 * kernel(*subsets).mean()
    assert distances_of_features(real, generated)["kernel_distance"] == pytest.approx(expected.item(), rel=1e-8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite_have_no_distances(value, capfd):
    found = distances_of_features(features(10, 0.0, 0), torch.full((4, 4), value))
    assert all(map(math.isnan, found.values()))
    assert not capfd.readouterr().err  # no message of the linear algebra library
