"""A mixture of Gaussians, of which the best prediction at every time is known: an oracle for samplers."""

import math

import torch

from lit_efficient.losses import diffusion

SHARES = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
CENTRES = torch.tensor([[-1.1, -0.4], [1.3, -0.3], [0.6, 1.5]], dtype=torch.float64)
WIDTHS = torch.tensor([[0.3, 0.2], [0.2, 0.35], [0.4, 0.15]], dtype=torch.float64)  # all points stay with their centre
MEAN = SHARES @ CENTRES
COVARIANCE = (SHARES @ WIDTHS**2).diag() + ((CENTRES - MEAN).T * SHARES) @ (CENTRES - MEAN)


def _normal(count):
    """Standard normal points that lie evenly, [count, 2]."""
    even = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(count, dtype=torch.float64)
    return math.sqrt(2) * torch.erfinv((2 * even - 1).clamp(-1 + 1e-6, 1 - 1e-6))


NOISE = _normal(1024)


def best_predictor(process, prediction):
    """The mean of ``prediction`` given noisy data [B, 2] at times [B], all of one time."""

    def predict(x, t):
        x, t = x.double(), t.double()
        alpha, sigma = process.alpha_sigma(t[:1])
        variance = (alpha * WIDTHS) ** 2 + sigma**2
        away = x[:, None] - alpha * CENTRES  # [B, 3, 2]
        belongs = (SHARES.log() - 0.5 * (away**2 / variance + variance.log()).sum(-1)).softmax(1)[..., None]
        x0 = (belongs * (CENTRES + alpha * WIDTHS**2 / variance * away)).sum(1)
        eps = (belongs * (sigma / variance * away)).sum(1)
        return diffusion.target(x0, eps, t, process, prediction)

    return predict


def moments(x):
    """Mean [2], covariance [2, 2], and which share of points [3] lies at which centre."""
    x = x.double()
    shares = torch.cdist(x, CENTRES).argmin(1).bincount(minlength=3) / len(x)
    return x.mean(0), x.T.cov(correction=0), shares


def errors(x):
    """How far the mean, the covariance (as a part of it) and the shares are from the mixture's."""
    mean, covariance, shares = moments(x)
    relative = (covariance - COVARIANCE).norm() / COVARIANCE.norm()
    return (mean - MEAN).norm().item(), relative.item(), (shares - SHARES).abs().max().item()


def check_counts(samples):
    """Samples by the number of steps: never garbage, and the better the more steps there are."""
    for steps, x in samples.items():
        assert x.isfinite().all(), steps
        assert errors(x)[0] < 0.1, (steps, errors(x))
        assert moments(x)[1].trace() < 1.6 * COVARIANCE.trace(), steps
    limits = {10: (0.03, 0.45, 0.03), 20: (0.02, 0.13, 0.02), 50: (0.01, 0.06, 0.01)}
    for steps, limit in limits.items():
        if steps in samples:
            found = errors(samples[steps])
            assert all(error < most for error, most in zip(found, limit, strict=True)), (steps, found)
