"""Conversion of our diffusion transformer to diffusers' ``DiTTransformer2DModel``, which computes the same function.

The layouts differ in four ways:

- The features of a position are (column, row), each (sin, cos), in diffusers and (row, column), each (cos, sin), here.
  The features of all tokens are put into diffusers' order. Layers between the first and the last do not depend on it.
- A patch is (height, width, channel) in diffusers and (channel, height, width) here.
- Queries, keys and values are three layers in diffusers.
- Every block of diffusers' network holds a copy of the embedding of time and class. Its table of labels is padded with
  zeros up to row 1000, which ``DiTPipeline`` uses for "no label".

Our time t is its timestep 1000 t, which may be fractional.

Costs: depth - 1 further copies of the embeddings, 1001 width + 256 width + width^2 parameters each.
Source: the layout of diffusers' ``DiTTransformer2DModel`` and ``DiTPipeline``.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.networks.dit import DiT, DiTConfig
from lit_efficient.surgery import own_draws

if TYPE_CHECKING:
    from diffusers import DiTTransformer2DModel

NULL_CLASS = 1000  # the label that DiTPipeline guides away from
_MLP_RATIO = 4


def to_diffusers(dit: DiT) -> "DiTTransformer2DModel":
    """Return a model of diffusers that computes the same as ``dit``, in evaluation mode (in training mode it drops
    labels).

    Args:
        dit: Network without adapters: merge them first.

    Raises:
        ConfigurationError: If the layout cannot represent the network; the message names the argument.
    """
    return convert(dit.state_dict(), dit.config)


def convert(state: Mapping[str, Tensor], config: DiTConfig) -> "DiTTransformer2DModel":
    """Return the model of :func:`to_diffusers` for the state of a network and its sizes."""
    fields = diffusers_fields(config)
    with torch.device("meta"):
        wanted = DiT(config).state_dict()
    if wanted.keys() != state.keys():
        odd = sorted(wanted.keys() ^ state.keys())[0]
        raise ConfigurationError(
            f"to_diffusers: the weights are not those of a plain DiT: {odd!r} is missing or unexpected. Merge adapters "
            "and quantised weights first."
        )
    from diffusers import DiTTransformer2DModel

    with own_draws():  # the constructor draws weights, which are replaced
        model: Any = DiTTransformer2DModel(**fields)
    # Without copies all blocks would share one embedding, which could be neither saved nor trained as several.
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in converted_state(state, config).items()}
    model.load_state_dict(copies, assign=True)
    return cast("DiTTransformer2DModel", model.eval())


def diffusers_fields(config: DiTConfig) -> dict[str, Any]:
    """Return arguments of ``DiTTransformer2DModel`` for a network of these sizes.

    Raises:
        ConfigurationError: If it cannot represent such a network.
    """
    obstacles = {
        "variant.positions": (
            config.variant.positions != "sincos",
            "it adds sine-cosine positions to the tokens and has no rotary positions",
        ),
        "variant.qk_norm": (config.variant.qk_norm, "its attention normalises neither queries nor keys"),
        "variant.class_token": (config.variant.class_token.features > 0, "its samplers generate latents only"),
        "variant.interval": (config.variant.interval, "its samplers do not tell it the length of a step"),
        "context_width": (
            config.context_width > 0,
            "it has no attention to text. PixArtTransformer2DModel has, but shares one modulation among all blocks, "
            "and this network has one for each",
        ),
        "variant.time_embedding": (
            config.variant.time_embedding != "diffusers",
            "it embeds the time with 256 fixed frequencies: train with variant.time_embedding='diffusers'",
        ),
        "mlp_ratio": (config.mlp_ratio > _MLP_RATIO, f"its MLP has {_MLP_RATIO} times the width"),
        "num_classes": (config.num_classes > NULL_CLASS, f"DiTPipeline takes class {NULL_CLASS} for no label"),
    }
    for name, (is_obstacle, reason) in obstacles.items():
        if is_obstacle:
            raise ConfigurationError(
                f"to_diffusers: DiTTransformer2DModel cannot hold {name}={attrgetter(name)(config)!r}: {reason}."
            )
    return {
        "num_attention_heads": config.heads,
        "attention_head_dim": config.width // config.heads,
        "in_channels": config.channels,
        "out_channels": config.channels,  # the model has this default, but DiTPipeline reads the field
        "num_layers": config.depth,
        "sample_size": config.size,
        "patch_size": config.patch_size,
        "num_embeds_ada_norm": NULL_CLASS,
        "norm_eps": 1e-6,
    }


def converted_state(state: Mapping[str, Tensor], config: DiTConfig) -> dict[str, Tensor]:
    """Return the weights of a ``DiT`` under the names, and in the order, of ``DiTTransformer2DModel``."""
    stream = torch.arange(config.width).view(4, -1).flip(0).flatten()  # reverses (row, column) and (cos, sin)

    def rows(name: str, groups: int = 1) -> dict[str, Tensor]:
        """Return a layer whose output consists of ``groups`` vectors with the features of a token."""
        return {
            kind: state[f"{name}.{kind}"].unflatten(0, (groups, -1))[:, stream].flatten(0, 1)
            for kind in ("weight", "bias")
        }

    def columns(name: str) -> dict[str, Tensor]:
        """Return a layer whose input is a token."""
        return {"weight": state[f"{name}.weight"][:, stream], "bias": state[f"{name}.bias"]}

    layers = {"pos_embed.proj": rows("patch_in"), "proj_out_1": rows("modulation", 2)}
    patch = (config.channels, config.patch_size, config.patch_size)
    layers["proj_out_2"] = {
        kind: tensor.unflatten(0, patch).movedim(0, 2).flatten(0, 2) for kind, tensor in columns("patch_out").items()
    }
    embeddings = {
        "timestep_embedder.linear_1": {kind: state[f"time.0.{kind}"] for kind in ("weight", "bias")},
        "timestep_embedder.linear_2": {kind: state[f"time.2.{kind}"] for kind in ("weight", "bias")},
        "class_embedder.embedding_table": {"weight": _labels(state, config)},
    }
    for number in range(config.depth):
        ours = f"blocks.{number}"
        theirs = f"transformer_blocks.{number}"
        layers |= {f"{theirs}.norm1.emb.{name}": layer for name, layer in embeddings.items()}
        layers[f"{theirs}.norm1.linear"] = rows(f"{ours}.modulation", 6)
        qkv = columns(f"{ours}.attention.qkv")
        for part, name in enumerate(("to_q", "to_k", "to_v")):
            layers[f"{theirs}.attn1.{name}"] = {kind: tensor.chunk(3)[part] for kind, tensor in qkv.items()}
        layers[f"{theirs}.attn1.to_out.0"] = rows(f"{ours}.attention.out")
        hidden = columns(f"{ours}.mlp.0")
        out = rows(f"{ours}.mlp.2")
        missing = (_MLP_RATIO - config.mlp_ratio) * config.width  # GELU(0) = 0: padded features change nothing
        layers[f"{theirs}.ff.net.0.proj"] = {
            "weight": F.pad(hidden["weight"], (0, 0, 0, missing)),
            "bias": F.pad(hidden["bias"], (0, missing)),
        }
        layers[f"{theirs}.ff.net.2"] = {"weight": F.pad(out["weight"], (0, missing)), "bias": out["bias"]}
    return {f"{name}.{kind}": tensor for name, layer in layers.items() for kind, tensor in layer.items()}


def _labels(state: Mapping[str, Tensor], config: DiTConfig) -> Tensor:
    """Return the table of labels: one row per label up to 999, and "no label". Without classes all rows are zero."""
    table = state["patch_out.weight"].new_zeros(NULL_CLASS + 1, config.width)
    if config.num_classes:
        table[: config.num_classes] = state["label.weight"][:-1]
        table[NULL_CLASS] = state["label.weight"][-1]
    return table
