"""From noise to data: the deterministic sampler and classifier-free guidance.

    x_s = alpha(s) x0 + sigma(s) eps,   with (x0, eps) from the prediction at t > s        (DDIM, eta = 0)
    guided = without + w (with - without)                                                  (w = 1: no guidance)
    rescaled = guided (r std(with) / std(guided) + 1 - r)                                  (r = 0: no rescaling)

For the flow schedule a DDIM step is exactly Euler's step of the flow's equation, and for edm Euler's step in the noise
level, so one formula serves all processes. diffusers' samplers: :mod:`lit_efficient.losses.diffusers_sampling`.

Costs: one network evaluation a step, two with guidance.
Source: Song et al. (2020), https://arxiv.org/abs/2010.02502; Ho and Salimans (2022), https://arxiv.org/abs/2207.12598;
rescaling: Lin et al. (2023), https://arxiv.org/abs/2305.08891; path drop: Park et al. (2025),
https://arxiv.org/abs/2510.21986.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_efficient.errors import check_choice, check_number
from lit_efficient.losses.diffusion import Prediction, alpha_sigma, to_x0_eps
from lit_efficient.losses.noise_process import AFTER_ZERO, DiffusionProcess, Schedule, as_process
from lit_efficient.losses.timesteps import shift_times

SamplerName = Literal["builtin", "ddim", "euler", "heun", "dpmsolver++"]

# With `eps` the data is (x - sigma eps) / alpha: starting at alpha = 0 is 0 / 0, and just below it the network's error
# is multiplied by hundreds. 0.98 is alpha 0.02 to 0.03, where pure noise is still what the network saw in training.
_FIRST_EPS_TIME = 0.98


@dataclass(frozen=True)
class Sampler:
    """How samples are drawn.

    Args:
        name: builtin (DDIM for any process; Euler for flow and edm), or one of diffusers' schedulers: ddim, euler, heun
            or dpmsolver++.
        guidance_rescale: Share of the guided prediction that is scaled back to the spread of the conditional one, in
            [0, 1]; 0.7 is the paper's. Strong guidance without it over-saturates.
        shift: Above 0; more than 1 spends more of the steps at high noise, as large latents need. diffusers' samplers
            take it for flow only.
        path_drop: Guide by the network without its condition and without its deep path, which costs little more than
            no guidance; for networks that were trained with ``TokenRouting(mode="sprint", path_drop=...)``.
    """

    name: SamplerName = "builtin"
    guidance_rescale: float = 0.0
    shift: float = 1.0
    path_drop: bool = False

    def __post_init__(self) -> None:
        check_choice("Sampler", "name", self.name, get_args(SamplerName))
        check_number("Sampler", "guidance_rescale", self.guidance_rescale, least=0, most=1)
        check_number("Sampler", "shift", self.shift, above=0)


def guide(conditional: Tensor, unconditional: Tensor, scale: float, rescale: float = 0.0) -> Tensor:
    """Classifier-free guidance of two predictions of one shape.

    Args:
        conditional: Prediction with the condition, [B, ...].
        unconditional: Prediction without it, [B, ...].
        scale: 1 is the conditional, 0 the unconditional.
        rescale: Share of each sample's guided prediction that gets the conditional one's standard deviation.
    """
    guided = torch.lerp(unconditional, conditional, scale)
    if rescale == 0.0:
        return guided
    dims = tuple(range(1, guided.dim()))
    ratio = conditional.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True)
    return guided * (rescale * ratio + (1.0 - rescale))


def sampling_times(
    steps: int, prediction: Prediction, process: Schedule | DiffusionProcess = "flow", shift: float = 1.0
) -> Tensor:
    """``steps + 1`` times from noise to data, evenly spaced before the shift, [steps + 1] float32 on the CPU.

    The first is the very last training time ("trailing"): a process that ends in pure noise is sampled from pure noise.
    """
    process = as_process(process)
    if process.schedule == "edm":
        return torch.cat([shift_times(_even(1.0, AFTER_ZERO, steps), shift), torch.zeros(1, dtype=torch.float32)])
    first = _FIRST_EPS_TIME if prediction == "eps" and process.ends_in_noise else 1.0
    return shift_times(_even(first, 0.0, steps + 1), shift).clamp(max=first)


def _even(first: float, last: float, count: int) -> Tensor:
    return torch.linspace(first, last, count, dtype=torch.float32)  # whatever the default is


def ddim_sample(
    predict: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    times: Tensor,
    process: Schedule | DiffusionProcess,
    prediction: Prediction,
) -> Tensor:
    """Integrate from noise to data, [B, ...].

    Args:
        predict: The network: noisy data [B, ...] and times [B] to a prediction [B, ...].
        noise: Standard normal, [B, ...].
        times: Decreasing times in [0, 1], [steps + 1]; see ``sampling_times``.
        process: The process that the network was trained on.
        prediction: What it predicts.
    """
    process = as_process(process)
    x = noise * process.prior_scale
    for now, then in pairwise(times):
        t = now.to(x.device).expand(x.shape[0])
        x0, eps = to_x0_eps(predict(x, t).to(x.dtype), x, t, process, prediction)
        alpha, sigma = alpha_sigma(then, process)
        x = alpha.item() * x0 + sigma.item() * eps
    return x
