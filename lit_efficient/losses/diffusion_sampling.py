"""Sampling of diffusion models: the deterministic DDIM sampler and classifier-free guidance.

    x_s = alpha(s) x0 + sigma(s) eps,   with (x0, eps) from the prediction at t > s        (DDIM, eta = 0)
    guided = without + w (with - without)                                                  (w = 1: no guidance)
    rescaled = guided (r std(with) / std(guided) + 1 - r)                                  (r = 0: no rescaling)

One formula serves all processes: a DDIM step is exactly an Euler step of the flow's equation for flow, and an Euler
step in the noise level for edm. Samplers of diffusers: :mod:`lit_efficient.losses.diffusers_sampling`.

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
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import check_choice, check_number, checks_types, refusal
from lit_efficient.losses.diffusion import Prediction, alpha_sigma, to_x0_eps
from lit_efficient.losses.noise_process import AFTER_ZERO, DiffusionProcess, Schedule, as_process
from lit_efficient.losses.timesteps import ResolutionShift, read_shift, shift_times

SamplerName = Literal["builtin", "ddim", "euler", "heun", "dpmsolver++", "lcm"]

# With `eps` the data is (x - sigma eps) / alpha. At alpha = 0 this is 0 / 0, and close to it the error of the network
# is multiplied by hundreds. At time 0.98 alpha is 0.02 to 0.03, so pure noise still looks like the training data.
_FIRST_EPS_TIME = 0.98


@checks_types
@dataclass(frozen=True)
class Sampler:
    """Settings of the sampler.

    Args:
        name: builtin (DDIM for any process, which is Euler for flow and edm), lcm for distilled networks of up to 50
            steps, or a scheduler of diffusers: ddim, euler, heun, dpmsolver++, or any class by its name, such as
            UniPCMultistepScheduler. A class gets betas, prediction type and shift of the training, and runs as in
            diffusers' pipelines.
        guidance_rescale: Share of the guided prediction that is rescaled to the standard deviation of the conditional
            one, in [0, 1]. The paper uses 0.7. Strong guidance without rescaling over-saturates.
        shift: Above 0. Values above 1 place more steps at high noise, as large latents need. A `ResolutionShift`
            depends on the size of the latents. null takes that of the network's pipeline, or 1. Samplers of diffusers
            support it for flow only.
        path_drop: Compute the unconditional prediction without the deep path of the network, so that guidance costs
            little. The network must be trained with ``TokenRouting(mode="sprint", path_drop=...)``.
        empty_prompt: Condition of the prediction without a prompt, and of hidden captions in training: ``encoded``, the
            embedding of the empty caption, or ``zeros``, as in SDXL. null takes that of the network's pipeline, or
            encoded.
        options: Arguments of a scheduler that is named by its class, such as use_karras_sigmas or timestep_spacing.
            Those that are not given come from the network's pipeline, if it has one. thresholding and clip_sample are
            for networks of pixels in [-1, 1].
    """

    name: str = "builtin"
    guidance_rescale: float = 0.0
    shift: float | ResolutionShift | None = None
    path_drop: bool = False
    empty_prompt: Literal["encoded", "zeros"] | None = None
    options: dict[str, bool | int | float | str] | None = None

    def __post_init__(self) -> None:
        if not self.names_class:
            check_choice("Sampler", "name", self.name, get_args(SamplerName))
            if self.options:
                allowed = "null unless name is a scheduler class of diffusers, such as UniPCMultistepScheduler"
                raise refusal("Sampler", "options", allowed, self.options)
        check_number("Sampler", "guidance_rescale", self.guidance_rescale, least=0, most=1)
        object.__setattr__(self, "shift", read_shift("Sampler", self.shift))
        check_choice("Sampler", "empty_prompt", self.empty_prompt, ("encoded", "zeros"), null=True)

    @property
    def names_class(self) -> bool:
        """True if ``name`` is that of a class of diffusers."""
        return self.name.endswith("Scheduler")


def guide(conditional: Tensor, unconditional: Tensor, scale: float, rescale: float = 0.0) -> Tensor:
    """Apply classifier-free guidance to two predictions and return the guided one, [B, ...].

    Args:
        conditional: Prediction with the condition, [B, ...].
        unconditional: Prediction without the condition, [B, ...].
        scale: Guidance scale: 1 returns the conditional prediction, 0 the unconditional one.
        rescale: Share of each guided prediction that is rescaled to the conditional one's standard deviation.
    """
    guided = torch.lerp(unconditional, conditional, scale)
    if rescale == 0.0:
        return guided
    dims = tuple(range(1, guided.dim()))
    ratio = conditional.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True)
    return guided * (rescale * ratio + (1.0 - rescale))


def with_patch_norms(guided: Tensor, conditional: Tensor, side: int) -> Tensor:
    """Scale each patch of a guided prediction to the norm of the conditional one, as Qwen-Image's pipeline does.

    Args:
        guided: Guided prediction, [B, c, h, w].
        conditional: Prediction with the condition, [B, c, h, w].
        side: Height and width of a patch.
    """

    def norms(x: Tensor) -> Tensor:
        return F.avg_pool2d(x.square().sum(dim=1, keepdim=True), side).sqrt()  # [B, 1, h / side, w / side]

    ratio = norms(conditional) / norms(guided)
    return guided * ratio.repeat_interleave(side, dim=2).repeat_interleave(side, dim=3)


def sampling_times(
    steps: int, prediction: Prediction, process: Schedule | DiffusionProcess = "flow", shift: float = 1.0
) -> Tensor:
    """Return the times of a sampler from noise to data, [steps + 1] float32 on the CPU.

    They are evenly spaced before the shift. The first is the last training time ("trailing" spacing), so that a process
    that ends in pure noise is sampled from pure noise. For ``eps`` it is slightly earlier on such a process.

    Args:
        steps: Number of steps, at least 1.
        prediction: Target that the network predicts.
        process: The process.
        shift: Values above 1 place more steps at high noise.
    """
    process = as_process(process)
    if process.schedule == "edm":
        return torch.cat([shift_times(_even(1.0, AFTER_ZERO, steps), shift), torch.zeros(1, dtype=torch.float32)])
    first = 1.0
    if prediction == "eps" and process.ends_in_noise:
        first = _FIRST_EPS_TIME
    return shift_times(_even(first, 0.0, steps + 1), shift).clamp(max=first)


def _even(first: float, last: float, count: int) -> Tensor:
    return torch.linspace(first, last, count, dtype=torch.float32)  # independent of torch's default dtype


def ddim_sample(
    predict: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    times: Tensor,
    process: Schedule | DiffusionProcess,
    prediction: Prediction,
) -> Tensor:
    """Integrate from noise to data and return the data, [B, ...].

    Args:
        predict: Network: noisy data [B, ...] and times [B] to a prediction [B, ...].
        noise: Standard normal noise, [B, ...].
        times: Decreasing times in [0, 1], [steps + 1]. See ``sampling_times``.
        process: Process that the network was trained on.
        prediction: Target that the network predicts.
    """
    process = as_process(process)
    x = noise * process.prior_scale
    for now, then in pairwise(times):
        t = now.to(x.device).expand(x.shape[0])
        x0, eps = to_x0_eps(predict(x, t).to(x.dtype), x, t, process, prediction)
        alpha, sigma = alpha_sigma(then, process)
        x = alpha.item() * x0 + sigma.item() * eps
    return x
