"""From noise to latents with a conditional network: guidance, then any sampler."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lit_efficient.losses.diffusers_sampling import sample_with_diffusers
from lit_efficient.losses.diffusion import Prediction
from lit_efficient.losses.diffusion_sampling import Sampler, ddim_sample, guide, sampling_times
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.probes.modes import path_dropped
from lit_efficient.surgery import moved


def guided(
    network: nn.Module, condition: Condition, null: Callable[[], Condition], scale: float, sampler: Sampler
) -> Callable[[Tensor, Tensor], Tensor]:
    """The network under classifier-free guidance: noisy latents [B, ...] and times [B] to a prediction.

    The network takes latents, times and conditions. ``null`` gives the condition of nothing, of one sample, and is
    asked only if there is guidance: at a scale of 1 there is one evaluation a step. See `guide`.
    """
    if scale == 1.0:
        return lambda x, t: network(x, t, condition)
    nothing = null()

    def predict(x: Tensor, t: Tensor) -> Tensor:
        if sampler.path_drop:
            with_ = network(x, t, condition)
            with path_dropped(network):
                without = network(x, t, nothing.repeated(len(x)))
        else:
            both = condition.followed_by(nothing.repeated(len(x)))
            with_, without = network(x.repeat(2, 1, 1, 1), t.repeat(2), both).chunk(2)
        return guide(with_, without, scale, sampler.guidance_rescale)

    return predict


def draw_noise(
    shape: tuple[int, ...], generator: torch.Generator | Sequence[torch.Generator] | None, device: torch.device
) -> Tensor:
    """Standard normal, float32; a CPU generator serves every device, and None is torch's global one.

    Of several generators each draws its own sample, the same whatever is drawn beside it.
    """
    if isinstance(generator, Sequence):
        return torch.cat([draw_noise((1, *shape[1:]), one, device) for one in generator])
    source = "cpu" if generator is None else generator.device
    return moved(torch.randn(shape, generator=generator, device=source, dtype=torch.float32), device)


def sample_latents(
    predict: Callable[[Tensor, Tensor], Tensor],
    noise: Tensor,
    steps: int,
    process: DiffusionProcess,
    prediction: Prediction,
    sampler: Sampler,
) -> Tensor:
    """Integrate noise [B, c, h, w] to latents, float32, by our sampler or one of diffusers'."""
    if sampler.name != "builtin":
        return sample_with_diffusers(predict, noise, steps, process, prediction, sampler)
    times = sampling_times(steps, prediction, process, sampler.shift)
    return ddim_sample(predict, noise, times, process, prediction)
