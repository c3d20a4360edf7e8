"""Folding of statistics, timesteps and labels into the weights of diffusers' models, whose pipelines lack the
arguments.

    statistics   decode(std z + mean):  W <- W diag(std), b <- b + W mean of the 1x1 convolution before the decoder
                 (encode(x) - mean) / std in the one after the encoder, and log-variance - 2 log std
    timesteps    f(k + d) = R f(k):  W <- W R of the layer after the sines and cosines f of the timestep k
    labels       row "no label" of a table  ->  row 1000, where DiTPipeline looks for it

All three are exact, and cost nothing at inference.
Source: the pipelines of diffusers, which multiply latents by one number and count timesteps from 0.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.surgery import own_draws


def fold_statistics(vae: Any, mean: Tensor, std: Tensor) -> Any:
    """Return a copy of a diffusers autoencoder that encodes to normalised latents and decodes normalised latents.

    A pipeline of diffusers can use the copy with a network that was trained on normalised latents.

    Args:
        vae: An ``AutoencoderKL``, or another autoencoder if ``mean`` is 0 and ``std`` the same for all channels.
        mean: Mean of the latents, [c].
        std: Standard deviation of the latents, [c].

    Returns:
        The copy. With mean 0 and one std for all channels its weights are unchanged and ``scaling_factor`` is 1 / std.
        Otherwise the statistics are in the weights of ``quant_conv`` and ``post_quant_conv``, which are added if they
        are missing, and ``scaling_factor`` is 1.

    Raises:
        ConfigurationError: If the mean is not 0 or the stds differ, and the autoencoder is no ``AutoencoderKL``.
    """
    import diffusers

    kind: Any = diffusers.AutoencoderKL
    fields = {"latents_mean": None, "latents_std": None, "shift_factor": 0.0}
    if not mean.any() and bool((std == std[0]).all()):
        result = copy.deepcopy(vae)
        known = {name: value for name, value in fields.items() if name in vae.config}
        result.register_to_config(**known, scaling_factor=1.0 / std[0].item())
        return result.eval()
    if not isinstance(vae, kind):
        raise ConfigurationError(
            f"export: the latents of {type(vae).__name__} have a mean and a scale for each channel, which its layout "
            "cannot represent (AutoencoderKL can): train on the statistics that its configuration declares"
        )
    result = _like(vae, **fields, scaling_factor=1.0, use_quant_conv=True, use_post_quant_conv=True)
    state = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    for name, size in (("quant_conv", 2 * len(mean)), ("post_quant_conv", len(mean))):
        weight = state.get(f"{name}.weight", torch.eye(size)[:, :, None, None])
        bias = state.get(f"{name}.bias", torch.zeros(size))
        folded = _before if name == "post_quant_conv" else _behind
        new = folded(weight.double(), bias.double(), mean.double(), std.double())
        state[f"{name}.weight"], state[f"{name}.bias"] = (tensor.to(vae.dtype) for tensor in new)
    result.load_state_dict(state, assign=True)
    return result.eval()


def _like(model: Any, **changed: object) -> Any:
    """Return another model with some fields changed. ``from_config`` would replace fields that were left at their
    defaults.
    """
    fields = {name: value for name, value in model.config.items() if not name.startswith("_")}
    with own_draws():
        return type(model)(**{**fields, **changed})


def _before(weight: Tensor, bias: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Return a convolution that takes normalised latents in the place of latents."""
    return weight * std[None, :, None, None], bias + weight[:, :, 0, 0] @ mean


def _behind(weight: Tensor, bias: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Return a convolution that computes mean and log-variance of normalised latents in the place of those of
    latents.
    """
    scale = torch.cat([1.0 / std, torch.ones_like(std)])
    shift = torch.cat([-mean / std, -2.0 * std.log()])
    return weight * scale[:, None, None, None], bias * scale + shift


def fold_timesteps(model: nn.Module, later: float) -> tuple[str, ...]:
    """Change a model of diffusers in place so that it treats timestep k as ``k + later``; return the names of the
    changed weights.

    Raises:
        ConfigurationError: If it has no sinusoidal embedding of the timestep.
    """
    found: list[nn.Parameter] = []
    for part in model.modules():
        sinusoids: Any = getattr(part, "time_proj", None)
        embedding: Any = getattr(part, "timestep_embedder", None) or getattr(part, "time_embedding", None)
        if not hasattr(sinusoids, "flip_sin_to_cos") or not hasattr(embedding, "linear_1"):
            continue
        order = 1 if sinusoids.flip_sin_to_cos else -1  # cosines before sines, or after them
        cos, sin = sinusoids(torch.tensor([float(later)])).double()[0].chunk(2)[::order]
        weight = embedding.linear_1.weight
        found.append(weight)
        of_cos, of_sin = weight.detach().double().chunk(2, dim=1)[::order]
        rotated = (of_cos * cos + of_sin * sin, of_sin * cos - of_cos * sin)
        with torch.no_grad():
            weight.copy_(torch.cat(rotated[::order], dim=1))
    if not found:
        raise ConfigurationError(
            f"export: {type(model).__name__} has no sinusoidal embedding of the time to shift by a timestep"
        )
    return tuple(name for name, parameter in model.named_parameters() if any(parameter is one for one in found))


def fold_labels(model: Any, null_class: int) -> Any:
    """Return a copy of a ``DiTTransformer2DModel`` with 1000 rows of labels, zero where there were none, and then "no
    label".

    Raises:
        ConfigurationError: If there are more classes than that.
    """
    classes = model.config.num_embeds_ada_norm
    if classes > null_class:
        raise ConfigurationError(
            f"export: DiTPipeline takes class {null_class} for no label, and the network has {classes} classes"
        )
    result = _like(model, num_embeds_ada_norm=null_class)
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("class_embedder.embedding_table.weight"):
            state[name] = torch.cat([F.pad(tensor[:-1], (0, 0, 0, null_class - classes)), tensor[-1:]])
        else:
            state[name] = tensor.clone()
    result.load_state_dict(state, assign=True)
    return result.eval()
