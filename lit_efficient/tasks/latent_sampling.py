"""Sampling of latents with a conditional network: classifier-free guidance and samplers."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from lit_efficient.losses.consistency import consistency_sample
from lit_efficient.losses.diffusers_sampling import sample_with_diffusers
from lit_efficient.losses.diffusion import Prediction
from lit_efficient.losses.diffusion_sampling import Sampler, ddim_sample, guide, sampling_times, with_patch_norms
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.losses.timesteps import shift_at
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.probes.modes import path_dropped
from lit_efficient.surgery import moved


def guided(
    network: nn.Module,
    condition: Condition,
    null: Callable[[], Condition],
    scale: float,
    sampler: Sampler,
    norm_side: int = 0,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a network with classifier-free guidance: noisy latents [B, ...] and times [B] to a prediction.

    Args:
        network: Network of latents, times and conditions.
        condition: Conditions of the samples.
        null: Returns the empty condition of one sample. It is only called for a scale other than 1.
        scale: Guidance scale. See `guide`.
        sampler: Settings of the guidance.
        norm_side: Side of patches whose norm guidance keeps, see `with_patch_norms`. 0 for none.
    """
    if scale == 1.0:
        return lambda x, t: network(x, t, condition)
    empty = null()

    def predict(x: Tensor, t: Tensor) -> Tensor:
        if sampler.path_drop:
            conditional = network(x, t, condition)
            with path_dropped(network):
                unconditional = network(x, t, empty.repeated(len(x)))
        else:
            both = condition.followed_by(empty.repeated(len(x)))
            conditional, unconditional = network(x.repeat(2, 1, 1, 1), t.repeat(2), both).chunk(2)
        found = guide(conditional, unconditional, scale, sampler.guidance_rescale)
        if norm_side and scale > 1.0:
            return with_patch_norms(found, conditional, norm_side)
        return found

    return predict


def draw_noise(
    shape: tuple[int, ...], generator: torch.Generator | Sequence[torch.Generator] | None, device: torch.device
) -> Tensor:
    """Draw standard normal noise, float32.

    Args:
        shape: Shape of the noise.
        generator: Random generator, or one for each sample, so that a sample does not depend on the others. ``None``
            takes torch's global generator of the CPU. A CPU generator works for every device.
        device: Device of the result.
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
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Tensor:
    """Integrate noise [B, c, h, w] to latents, float32, with the builtin sampler, lcm or one of diffusers.

    ``generator`` is for samplers that draw noise in each step.
    """
    if sampler.name == "lcm":
        renoise = partial(draw_noise, tuple(noise.shape), generator, noise.device)
        return consistency_sample(predict, noise, steps, process, prediction, renoise)
    if sampler.name != "builtin":
        return sample_with_diffusers(predict, noise, steps, process, prediction, sampler, generator)
    times = sampling_times(steps, prediction, process, shift_at(sampler.shift, noise[0, 0].numel()))
    return ddim_sample(predict, noise, times, process, prediction)
