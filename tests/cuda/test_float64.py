"""A device without float64, as Apple's GPUs: what is summed in it elsewhere is summed in float32 there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from torch import Tensor

from lit_efficient.data.latents.latent_format import Moments
from lit_efficient.losses.mse_adapter import weigh_mse_loss
from lit_efficient.models.libraries.latent_codec import ChannelStatistics
from tests.cuda.fake_cuda import fake_cuda


def test_sums_and_noise_levels() -> None:
    x = torch.randn(16, 3, 4, 4) * 0.01 + 5
    scheduler = DDPMScheduler(1000)
    steps = torch.arange(16) * 50

    def measured(x: Tensor, steps: Tensor) -> list[Tensor]:
        statistics = ChannelStatistics(3)
        for part in x.split(5):
            statistics.update(part)
        moments = Moments.of(x, x / 10)
        with weigh_mse_loss(scheduler, lambda log_snr: log_snr.sigmoid(), who="test"):
            loss = F.mse_loss(x, scheduler.add_noise(x, x / 7, steps))
        return [statistics.mean, statistics.std, torch.tensor(moments.total), torch.tensor(moments.squares), loss.cpu()]

    here = measured(x, steps)
    with fake_cuda(float64=False):
        there = measured(x.cuda(), steps.cuda())
        with pytest.raises(TypeError, match="float64"):
            x.cuda().double()
    for ours, expected in zip(there, here, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=0, check_dtype=False)
