import pytest
import torch
from torch import nn

from lit_efficient.models.judges.sample_quality import feature_distances


class Pixels(nn.Module):
    """Any network will do: this one's features are its inputs."""

    num_features = 4

    def forward(self, images):
        return images.flatten(1)


def images(count, mean, seed):
    return mean + torch.randn(count, 1, 2, 2, generator=torch.Generator().manual_seed(seed))


def test_both_distances_are_what_their_formulas_say():
    real, generated = images(300, 0.0, 0), images(200, 1.0, 1)
    found = feature_distances(Pixels(), real, generated)
    means = [x.flatten(1).double().mean(0) for x in (real, generated)]
    covariances = [x.flatten(1).double().T.cov() for x in (real, generated)]
    root = torch.linalg.eigvals(covariances[0] @ covariances[1]).sqrt().real.sum()
    frechet = (means[0] - means[1]).square().sum() + covariances[0].trace() + covariances[1].trace() - 2 * root
    assert found["frechet_distance"] == pytest.approx(frechet.item(), rel=1e-3)
    # The expectation of the kernel distance for two normals, by Monte Carlo of many more samples
    x, y = (images(3000, mean, seed).flatten(1).double() for mean, seed in ((0.0, 2), (1.0, 3)))

    def kernel(a, b):
        return (a @ b.T / 4 + 1) ** 3

    within = sum((kernel(a, a).sum() - kernel(a, a).trace()) / (3000 * 2999) for a in (x, y))
    expected = (within - 2 * kernel(x, y).mean()).item()
    assert found["kernel_distance"] == pytest.approx(expected, rel=0.25)


def test_the_kernel_distance_of_equal_distributions_is_zero_and_no_draw_is_taken_from_the_global_generator():
    before = torch.get_rng_state()
    found = [feature_distances(Pixels(), images(300, 0.0, 0), images(300, 0.0, 1)) for _ in range(2)]
    assert found[0] == found[1]
    assert abs(found[0]["kernel_distance"]) < 0.15
    shifted = feature_distances(Pixels(), images(300, 0.0, 0), images(300, 1.0, 1))
    assert shifted["kernel_distance"] > 1.0
    assert torch.equal(before, torch.get_rng_state())
