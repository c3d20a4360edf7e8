"""Distances between sets of generated and of real images, in the features of any network.

    Fréchet   d^2 = |m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2))         means and covariances
    kernel    E k(x, x') + E k(y, y') - 2 E k(x, y),   k = (x.y / D + 1)^3   unbiased, so valid for few samples, too

These are FID and KID only if the features are those of one particular Inception network, and are named differently
here. Values are comparable only between runs with the same network.

Source: Heusel et al. (2017), https://arxiv.org/abs/1706.08500; Binkowski et al. (2018),
https://arxiv.org/abs/1801.01401.
"""

import math
import warnings

import torch
from torch import Tensor, nn

from lit_efficient.surgery import own_draws

_KERNEL_SEED = 0


@torch.no_grad()
def distances_of_features(real: Tensor, generated: Tensor) -> dict[str, float]:
    """Return distances of generated images to real ones, by torchmetrics, without changing the global random state.

    Both are computed in float64: a kernel distance is a small difference of large means.

    Args:
        real: Features of real images, [N, D], N >= 2.
        generated: Features of generated images, [M, D], M >= 2.

    Returns:
        ``frechet_distance`` and ``kernel_distance``, lower is better. The latter is unbiased, and may be negative. Both
        are NaN if a feature is not finite.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.kid import KernelInceptionDistance

    if not (real.isfinite().all() and generated.isfinite().all()):
        return {"frechet_distance": math.nan, "kernel_distance": math.nan}
    features = _Precomputed(real.shape[1])
    # Every process holds all samples, so that metrics are not synchronised. torchmetrics draws subsets from the global
    # generator. One subset as large as the smaller set makes the estimate independent of that draw.
    size = min(len(real), len(generated))
    frechet = FrechetInceptionDistance(feature=features, sync_on_compute=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*will save all extracted features")
        kernel = KernelInceptionDistance(feature=features, subsets=1, subset_size=size, sync_on_compute=False)
    for metric in (frechet, kernel):
        metric.update(real.double(), real=True)
        metric.update(generated.double(), real=False)
    with own_draws(_KERNEL_SEED):
        kernel_distance = kernel.compute()[0]
    return {"frechet_distance": float(frechet.compute()), "kernel_distance": float(kernel_distance)}


class _Precomputed(nn.Identity):
    """Feature network that returns features unchanged."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
