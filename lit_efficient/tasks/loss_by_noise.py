"""Validation loss of a diffusion model, split by noise level.

    lowest   log SNR below -3      almost pure noise: composition
    low      -3 to 0
    high     0 to 3
    highest  3 and above           almost pure data: texture

The mean over all noise levels is dominated by the levels that are hardest for the prediction target.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lit_efficient.surgery import moved

EDGES = (-3.0, 0.0, 3.0)
NAMES = ("snr_lowest", "snr_low", "snr_high", "snr_highest")


class LossByNoise:
    """Sums of losses and numbers of samples for each range of log SNR, over the batches of one evaluation."""

    def __init__(self) -> None:
        self._totals = torch.zeros(2, len(NAMES), dtype=torch.float32)

    def reset(self) -> None:
        """Forget all samples."""
        self._totals = torch.zeros(2, len(NAMES), dtype=torch.float32)

    def add(self, sample_loss: Tensor, log_snr: Tensor) -> None:
        """Add the losses [B] of samples with log SNRs [B]."""
        bucket = torch.bucketize(log_snr, moved(torch.tensor(EDGES), log_snr.device), right=True)
        totals = torch.zeros(2, len(NAMES), dtype=torch.float32, device=log_snr.device)
        totals[0].index_add_(0, bucket, sample_loss.detach().float())
        totals[1].index_add_(0, bucket, torch.ones_like(log_snr, dtype=torch.float32))
        self._totals = moved(self._totals, totals.device) + totals

    def averages(self, summed: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Return the mean loss of each range that has samples, by the name of the range.

        Every process must call this method.

        Args:
            summed: Function that sums a tensor over all processes.
        """
        sums, counts = summed(self._totals)
        return {name: sums[i] / counts[i] for i, name in enumerate(NAMES) if counts[i] > 0}
