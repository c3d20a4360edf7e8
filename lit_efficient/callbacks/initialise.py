"""Initialise: draw the weights of a network again by a chosen scheme, with residual branches that start small.

    W ~ N(0, std^2), or by fan-in, fan-out or both, or orthogonal;    W <- W / sqrt(N) for the last layer of each of the
    N residual branches

Saves: training steps, and runs that diverge, if the network's initial variances grow with its depth
Costs: nothing
Source: GPT-2, https://cdn.openai.com/better-language-models/language_models.pdf; He et al. (2015),
    https://arxiv.org/abs/1502.01852; Saxe et al. (2014), https://arxiv.org/abs/1312.6120; Goyal et al. (2017),
    https://arxiv.org/abs/1706.02677 (residuals at zero)
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_choice, check_number, listed
from lit_efficient.internals.torch_dispatch import has_values
from lit_efficient.internals.torch_fx import adds_to_input, adds_to_several, all_residual_ends
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.models.probes.signs_of_training import sign_of_training
from lit_efficient.surgery import count, inputs_first, match_modules
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

SCHEMES = ("normal", "truncated_normal", "fan_in", "fan_out", "xavier", "orthogonal")
RESIDUALS = ("scaled", "zero", "same")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def draw_weight(weight: Tensor, scheme: str, scale: float, generator: torch.Generator) -> Tensor:
    """Return a new random weight of the shape of ``weight``, in float32 on the CPU.

    Args:
        weight: Weight whose shape is used, [outputs, inputs, ...].
        scheme: ``normal`` has the standard deviation ``scale``. ``truncated_normal`` is the same distribution cut off
            at two standard deviations, so that 0.88 ``scale`` remains. ``fan_in`` has ``scale / sqrt(inputs)``,
            ``fan_out`` has ``scale / sqrt(outputs)``, and ``xavier`` has ``scale * sqrt(2 / (inputs + outputs))``.
            ``orthogonal`` has orthonormal rows or columns, multiplied by ``scale``.
        scale: Scale of the scheme.
        generator: CPU generator of the random numbers.
    """
    fresh = torch.empty(weight.shape, dtype=torch.float32, device="cpu")
    if scheme == "normal":
        return nn.init.normal_(fresh, 0, scale, generator=generator)
    if scheme == "truncated_normal":
        return nn.init.trunc_normal_(fresh, 0, scale, -2 * scale, 2 * scale, generator=generator)
    if scheme == "orthogonal":
        return nn.init.orthogonal_(fresh, scale, generator=generator)
    if scheme == "xavier":
        return nn.init.xavier_normal_(fresh, scale, generator=generator)
    mode: Literal["fan_in", "fan_out"] = "fan_out"
    if scheme == "fan_in":
        mode = "fan_in"
    return nn.init.kaiming_normal_(fresh, mode=mode, nonlinearity="linear", generator=generator).mul_(scale)


class Initialise(Technique):
    """Initialise the weights of linear layers, convolutions and embeddings, right after the network is built.

    The last layers of residual branches are found by tracing the code of the blocks. If a norm comes between such a
    layer and the residual sum, the weight of the norm is scaled instead of the layer's. Weights that are entirely zero
    (as in adaLN-zero), weights that are computed from other parameters (as by ``spectral_norm``), norms and all other
    parameters keep their values. With ``residual="zero"``, a branch that
    already has a gate of zeros keeps its weights, because gate and layer could not learn if both were zero. A
    checkpoint that is loaded later overwrites the initial weights.

    Args:
        weights: Scheme for linear layers and convolutions: ``normal``, ``truncated_normal``, ``fan_in``, ``fan_out``,
            ``xavier`` or ``orthogonal``.
        scale: Standard deviation for ``normal`` and ``truncated_normal`` (before it is truncated), 0.02 by default.
            For the other schemes a factor, 1 by default (1.414 for ReLU).
        embeddings: Standard deviation of embeddings, at least 0. ``None`` keeps their values.
        residual: Change of the N layers that end residual branches: ``scaled`` divides their weights by sqrt(N),
            ``zero`` sets them to zero so that blocks start as the identity, and ``same`` changes nothing.
        biases: If true, the biases of the initialised layers become zero.
        layers: ``auto`` for all linear layers, convolutions and embeddings that train. Otherwise regular expressions
            for the ends of dotted names.
        pretrained: Allow weights to be overwritten that have been trained or loaded from files.
        seed: Seed of the weights, which are the same on every device.

    Raises:
        ConfigurationError: For an argument out of range, if no layer can be initialised, if the weights are already
            trained, and with ``scaled`` or ``zero`` if there is no residual branch or if not all residual branches can
            be found, as in blocks with one stream for images and one for text.
    """

    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.TRAINING_ONLY})
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "good initial weights for training from scratch")}

    def __init__(
        self,
        weights: str = "normal",
        scale: float | None = None,
        embeddings: float | None = 0.02,
        residual: str = "scaled",
        biases: bool = True,
        layers: str | list[str] = "auto",
        pretrained: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_choice("Initialise", "weights", weights, SCHEMES)
        check_number("Initialise", "scale", scale, above=0, null=True)
        check_number("Initialise", "embeddings", embeddings, least=0, null=True)
        check_choice("Initialise", "residual", residual, RESIDUALS)
        self.weights = weights
        self.scale = scale
        self.embeddings = embeddings
        self.residual = residual
        self.biases = biases
        self.layers = layers
        self.pretrained = pretrained
        self.seed = seed

    @torch.no_grad()
    def transform(self, module: nn.Module) -> Report:
        if not self.pretrained:
            sign = sign_of_training(module)
            if sign:
                raise ConfigurationError(
                    f"Initialise: {sign}, and its weights would be lost. Leave out Initialise, or set pretrained=True"
                )
        chosen = self._chosen(module)
        ends: list[tuple[Any, Any, bool]] = []
        if self.residual != "same":
            ends = _branch_ends(module)
            reason = _unknown_branches(module)
            if reason:
                raise ConfigurationError(
                    f"Initialise: {reason}, so that the number N of residual branches is unknown. Set residual='same'"
                )
            if not ends:
                raise ConfigurationError(
                    f"Initialise: the code of {type(module).__name__} shows no residual branches. Set residual='same'"
                )
        drawn: dict[int, nn.Parameter] = {}
        kept = []
        for i, (name, layer) in enumerate(chosen):
            for parameter in _matrices(layer):
                if id(parameter) in drawn:  # a tied parameter, which an earlier layer has drawn
                    continue
                if parameter.is_meta:
                    raise ConfigurationError(
                        f"Initialise: {name} has no values yet, because it is on the meta device. Materialise it first"
                    )
                if has_values(parameter) and not parameter.any():
                    kept.append(name)
                    continue
                drawn[id(parameter)] = parameter
                if has_values(parameter):  # a plan of memory runs on tensors without values
                    self._draw(layer, parameter, mix_seed(self.seed, i, len(drawn)))
            if self.biases and not isinstance(layer, nn.Embedding) and name not in kept:
                for bias in (getattr(layer, "bias", None), getattr(layer, "in_proj_bias", None)):
                    if bias is not None:
                        bias.zero_()
        for layer, norm, closed in ends:
            if any(id(p) in drawn for p in _matrices(layer)) and not (closed and self.residual == "zero"):
                self._scale_branch(layer, norm, len(ends))
        summary = f"{len(chosen) - len(kept)} layers drawn ({self.weights})"
        if ends:
            summary += f", {len(ends)} residual branches {self.residual}"
        if kept:
            summary += f"; zero as before: {listed(kept)}"
        return Report(
            summary,
            modules=tuple(name for name, _ in chosen if name not in kept),
            parameters=count(drawn.values()),
            details={"residual_branches": len(ends)},
        )

    def _chosen(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        if self.layers != "auto":
            return match_modules(module, self.layers, who="Initialise: layers", where=_is_drawn)
        found = [(name, part) for name, part in module.named_modules() if _is_drawn(part)]
        found = [(name, part) for name, part in found if any(p.requires_grad for p in _matrices(part))]
        found.sort(key=lambda item: not isinstance(item[1], nn.Embedding))  # a tied head is drawn as an embedding
        if self.embeddings is None:
            tables: set[int] = set()
            for _, part in found:
                if isinstance(part, nn.Embedding):
                    tables |= {id(p) for p in _matrices(part)}
            found = [(name, part) for name, part in found if not any(id(p) in tables for p in _matrices(part))]
        if not found:
            raise ConfigurationError(
                f"Initialise: {type(module).__name__} has no layers of the kinds that are initialised: linear layers, "
                "convolutions and embeddings that train"
            )
        return found

    def _draw(self, layer: nn.Module, parameter: nn.Parameter, seed: int) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)
        if isinstance(layer, nn.Embedding):
            assert self.embeddings is not None
            fresh = draw_weight(parameter, "normal", self.embeddings, generator)
            if layer.padding_idx is not None:
                fresh[layer.padding_idx] = 0
            parameter.copy_(fresh)
            return
        scale = self.scale
        if scale is None:
            scale = 0.02 if self.weights in ("normal", "truncated_normal") else 1.0
        if parameter is getattr(layer, "in_proj_weight", None):  # the matrices of queries, keys and values in one
            fresh = torch.cat([draw_weight(one, self.weights, scale, generator) for one in parameter.chunk(3)])
        elif inputs_first(layer):
            fresh = draw_weight(parameter.transpose(0, 1), self.weights, scale, generator).transpose(0, 1)
        else:
            fresh = draw_weight(parameter, self.weights, scale, generator)
        parameter.copy_(fresh)

    def _scale_branch(self, layer: Any, norm: Any, number: int) -> None:
        """Scale the output of one of ``number`` residual branches, by its norm if it ends with one."""
        factor = 0.0 if self.residual == "zero" else number**-0.5
        if norm is not None:
            offset = _offset(norm)
            gain = norm.weight + offset
            norm.weight.copy_(gain * factor - offset)
            layer = norm
        else:
            for parameter in _matrices(layer):
                parameter.mul_(factor)
        if self.residual == "zero" and getattr(layer, "bias", None) is not None:
            layer.bias.zero_()


def _branch_ends(root: nn.Module) -> list[tuple[object, object, bool]]:
    """Return the layers that end residual branches, each once.

    Returns:
        For each: the layer, the norm after it or ``None``, and whether a gate keeps the branch at zero.
    """
    found: dict[int, tuple[object, object, bool]] = {}
    for part, name, norm, closed in all_residual_ends(root):
        layer = part.get_submodule(name)
        if _is_layer(layer):
            following = part.get_submodule(norm) if norm else None
            found.setdefault(id(layer), (layer, following, closed))
    return list(found.values())


def _unknown_branches(root: nn.Module) -> str | None:
    """Return the reason why `_branch_ends` may miss residual branches, or ``None`` if it finds all."""
    try:
        blocks = find_blocks(root, who="Initialise", every=True)
    except ConfigurationError:  # the network has no repeated blocks
        return None
    for name, block in blocks:
        if adds_to_several(block):
            return f"block {name!r} adds to more than its first argument"
        if adds_to_input(block) is None and not any(all_residual_ends(block)):
            return f"the code of block {name!r} cannot be read without a batch"
    return None


def _matrices(layer: nn.Module) -> list[nn.Parameter]:
    """Return the layer's parameters that are weights; `nn.MultiheadAttention` has them under names of its own."""
    found = [getattr(layer, name, None) for name in ("weight", "in_proj_weight")]
    found += [getattr(layer, f"{name}_proj_weight", None) for name in "qkv"]
    return [p for p in found if isinstance(p, nn.Parameter)]


def _is_layer(layer: nn.Module) -> bool:
    return isinstance(layer, (nn.Linear, nn.Embedding, nn.MultiheadAttention, *_CONVOLUTIONS)) or inputs_first(layer)


def _is_drawn(layer: nn.Module) -> bool:
    """Return whether weights of a layer are drawn: not those that spectral_norm or weight_norm computes."""
    weights = _matrices(layer) if _is_layer(layer) else []
    return bool(weights) and all(p.is_floating_point() for p in weights)


def _offset(norm: Any) -> float:
    """Return the number that a norm adds to its weight: 1 in Gemma's norms, whose weights start at zero, else 0."""
    if type(norm).__module__.startswith("torch.nn") or not has_values(norm.weight):
        return 0.0
    # With a weight of zeros, the output is zero unless the norm adds 1 to its weight.
    before = norm.weight.clone()
    norm.weight.zero_()
    x = torch.linspace(1, 2, len(before), dtype=before.dtype, device=before.device)[None]
    offset = 1.0 if norm(x).any() else 0.0
    norm.weight.copy_(before)
    return offset
