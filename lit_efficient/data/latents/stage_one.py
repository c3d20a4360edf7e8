"""Stage one of latent diffusion on the digits: train the autoencoder and the judge once, in a plain loop.

This code runs inside the ``prepare_data`` of another run. A nested Trainer would read the environment of the outer run
(the world size of torchrun, for example) and fail, so there is none. All random draws are made in a fork of the global
state.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.files.sums import sha256_of
from lit_efficient.models.judges.conv_features import ConvFeatures
from lit_efficient.models.networks.autoencoder import Autoencoder, AutoencoderConfig, autoencoder_loss
from lit_efficient.surgery import own_draws

KL_WEIGHT = 1e-4
_BATCH = 64
_Judge = TypeVar("_Judge", bound=ConvFeatures)


def fit_autoencoder(images: Tensor, config: AutoencoderConfig, steps: int, seed: int = 0) -> Autoencoder:
    """Train an autoencoder on images [N, C, H, W] on the CPU, in batches of 64: about 20 s for 400 steps at 32x32.

    The seed sets the initial weights and every draw.
    """
    with own_draws(seed):
        model = Autoencoder(config).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # 1.5x on a CPU
        _optimise(model, len(images), steps, lambda rows: autoencoder_loss(model, images[rows], KL_WEIGHT)[0])
    return model.eval().requires_grad_(False)


def fit_classifier(build: Callable[[], _Judge], images: Tensor, labels: Tensor, steps: int, seed: int = 0) -> _Judge:
    """Train a small classifier on the CPU, in batches of 64 images: a few seconds for 400 steps.

    ``build`` makes the classifier. It draws weights from the global generator of torch, which is seeded with ``seed``.
    """
    with own_draws(seed):
        judge = build()
        _optimise(judge, len(images), steps, lambda rows: F.cross_entropy(judge.classify(images[rows]), labels[rows]))
    return judge.eval().requires_grad_(False)


def load_classifier(build: Callable[[], _Judge], weights: Mapping[str, Tensor]) -> _Judge:
    """Return a frozen classifier with the given weights."""
    # On the meta device the classifier draws no random numbers for weights that are replaced right away.
    with torch.device("meta"):
        judge = build()
    judge.load_state_dict(weights, assign=True)
    return judge.eval().requires_grad_(False)


def hashes_of_code(*files: str | None) -> list[str]:
    """Return the SHA-256 of source files, for keys of results that must not outlive a change of the code."""
    return [sha256_of(Path(str(file))) for file in files]


def _optimise(model: nn.Module, count: int, steps: int, loss: Callable[[Tensor], Tensor]) -> None:
    """Train with AdamW: 30 steps of warm-up, then a cosine to zero. ``loss`` maps row numbers [64] to a scalar."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * 0.5 * (1.0 + math.cos(math.pi * step / steps))
    )
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            loss(torch.randint(count, (_BATCH,))).backward()
            optimizer.step()
            schedule.step()
