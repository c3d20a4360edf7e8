"""Put into the weights of diffusers' models what its pipelines have no argument for.

    statistics   decode(std z + mean):  W <- W diag(std), b <- b + W mean of the 1x1 convolution before the decoder
                 (encode(x) - mean) / std in the one behind the encoder, and log-variance - 2 log std
    timesteps    f(k + d) = R f(k):  W <- W R of the layer behind the sines and cosines f of the timestep k
    labels       row "no label" of a table  ->  row 1000, where DiTPipeline looks for it

All three are exact: what is folded into a linear layer next to it costs nothing and changes nothing.
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
    """An autoencoder of diffusers whose pipelines get normalised latents right.

    Args:
        vae: An ``AutoencoderKL``, or another one if ``mean`` is 0 and ``std`` the same for all channels.
        mean: Of the latents, [c].
        std: Of the latents, [c].

    Returns:
        A copy. With mean 0 and one std the weights are what they were, and ``scaling_factor`` says the std; otherwise
        ``scaling_factor`` is 1 and the weights do.

    Raises:
        ConfigurationError: For another autoencoder that has no such convolution.
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
            "cannot say (AutoencoderKL can): train on the statistics that its configuration declares"
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


def _like(model: Any, **changed: Any) -> Any:
    """Another model with some fields changed; ``from_config`` would take defaults for those that had been defaults."""
    fields = {name: value for name, value in model.config.items() if not name.startswith("_")}
    with own_draws():
        return type(model)(**{**fields, **changed})


def _before(weight: Tensor, bias: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """A convolution that is given normalised latents instead of latents."""
    return weight * std[None, :, None, None], bias + weight[:, :, 0, 0] @ mean


def _behind(weight: Tensor, bias: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """A convolution that gives mean and log-variance of normalised latents instead of those of latents."""
    scale = torch.cat([1.0 / std, torch.ones_like(std)])
    shift = torch.cat([-mean / std, -2.0 * std.log()])
    return weight * scale[:, None, None, None], bias * scale + shift


def fold_timesteps(model: nn.Module, later: float) -> tuple[str, ...]:
    """Change a model of diffusers in place so that it takes timestep k for ``k + later``; the weights' names.

    Raises:
        ConfigurationError: If it has no sinusoidal embedding of the timestep.
    """
    found: list[nn.Parameter] = []
    for part in model.modules():
        sinusoids: Any = getattr(part, "time_proj", None)
        embedding: Any = getattr(part, "timestep_embedder", None) or getattr(part, "time_embedding", None)
        if not hasattr(sinusoids, "flip_sin_to_cos") or not hasattr(embedding, "linear_1"):
            continue
        turn = sinusoids(torch.tensor([float(later)])).double()[0].chunk(2)
        cos, sin = turn if sinusoids.flip_sin_to_cos else turn[::-1]
        weight = embedding.linear_1.weight
        found.append(weight)
        halves = weight.detach().double().chunk(2, dim=1)
        of_cos, of_sin = halves if sinusoids.flip_sin_to_cos else halves[::-1]
        turned = (of_cos * cos + of_sin * sin, of_sin * cos - of_cos * sin)
        with torch.no_grad():
            weight.copy_(torch.cat(turned if sinusoids.flip_sin_to_cos else turned[::-1], dim=1))
    if not found:
        raise ConfigurationError(
            f"export: {type(model).__name__} embeds the time in a way that cannot be shifted by a timestep"
        )
    return tuple(name for name, parameter in model.named_parameters() if any(parameter is one for one in found))


def fold_labels(model: Any, null_class: int) -> Any:
    """A ``DiTTransformer2DModel`` whose table of labels has 1000 rows, zeros where there were none, then "no label".

    Raises:
        ConfigurationError: If there are more classes than that.
    """
    classes = model.config.num_embeds_ada_norm
    if classes > null_class:
        raise ConfigurationError(
            f"export: DiTPipeline takes class {null_class} for no label, and the network has {classes} classes"
        )
    result = _like(model, num_embeds_ada_norm=null_class)
    state = {
        name: torch.cat([F.pad(tensor[:-1], (0, 0, 0, null_class - classes)), tensor[-1:]])
        if name.endswith("class_embedder.embedding_table.weight")
        else tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    result.load_state_dict(state, assign=True)
    return result.eval()
