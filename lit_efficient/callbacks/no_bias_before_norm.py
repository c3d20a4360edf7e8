"""No bias before norm: remove biases that have no effect because a batch norm or instance norm subtracts them.

    norm(W x + b) = norm(W x),    because the mean that the norm subtracts contains b

Saves: the biases' gradients, which are sums over the batch that are zero except for rounding, and optimizer states
Costs: nothing; outputs are the same, also in evaluation
Source: Ioffe and Szegedy (2015), https://arxiv.org/abs/1502.03167, section 3.2
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_fx import fed_alone, has_parts
from lit_efficient.surgery import mix_in
from lit_efficient.technique import Technique

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def cancels(layer: nn.Module, norm: nn.Module) -> bool:
    """Return whether a norm directly after a layer subtracts the layer's bias exactly.

    A layer norm does not, because it subtracts the mean over features, whose biases differ.

    Args:
        layer: A convolution, or a linear layer, whose output must be [N, features] then.
        norm: Norm whose only input is the layer's output.
    """
    if isinstance(layer, nn.Linear):
        return isinstance(norm, nn.BatchNorm1d | nn.SyncBatchNorm) and norm.num_features == layer.out_features
    # A group norm with one channel in each group is an instance norm.
    groups = isinstance(norm, nn.GroupNorm) and norm.num_groups == norm.num_channels
    return isinstance(layer, _CONVOLUTIONS) and (groups or isinstance(norm, (*_BATCH, *_INSTANCE)))


# Attribute of the smallest module that contains a layer and its norm: the names of such layers and norms.
_PAIRS = "_lit_efficient_no_bias_pairs"


class _AfterLinear:
    """Mix-in of a batch norm after a linear layer that accepts only [N, features]."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            raise ConfigurationError(
                f"NoBiasBeforeNorm: a batch norm after a linear layer got an input of the shape {list(x.shape)}, but "
                "only with [N, features] does it subtract the layer's bias. Leave out NoBiasBeforeNorm"
            )
        return super().forward(x)  # type: ignore[misc]


def _move_biases(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Before weights are loaded, subtract their biases from the running means and set them to zero."""
    for layer, norm in vars(module)[_PAIRS]:
        bias = f"{prefix}{layer}.bias"
        mean = f"{prefix}{norm}.running_mean"
        if bias in state:
            if mean in state:
                state[mean] = state[mean] - state[bias]
            state[bias] = torch.zeros_like(state[bias])


class NoBiasBeforeNorm(Technique):
    """Set biases to zero that the next norm subtracts, and turn them from parameters into buffers.

    The network's code is traced to find layers whose output goes only into such a norm. Names stay the same: weights
    that were trained with biases can be loaded, and exports contain zeros.

    Raises:
        ConfigurationError: If no bias is followed by such a norm. In the first step, if a batch norm after a linear
            layer gets an input with more than two dimensions.
    """

    phase = Phase.ARCHITECTURE
    conflicts: ClassVar[dict[str, str]] = {
        "ModelPruning": "it collects the biases before they become buffers: prune after training, or leave one out"
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "a little: no gradients of biases without effect")}

    @torch.no_grad()
    def transform(self, module: nn.Module) -> Report:
        pairs = list(_pairs(module))
        if not pairs:
            raise ConfigurationError(
                f"NoBiasBeforeNorm: {type(module).__name__} has no convolution or linear layer with a bias whose "
                "output goes only into a batch norm or instance norm. Leave out NoBiasBeforeNorm"
            )
        saved = 0
        for name, norm_name in pairs:
            layer: Any = module.get_submodule(name)
            norm: Any = module.get_submodule(norm_name)
            bias = layer.bias.detach()
            if getattr(norm, "running_mean", None) is not None:
                norm.running_mean.sub_(bias.to(norm.running_mean))
            del layer.bias
            layer.register_buffer("bias", torch.zeros_like(bias))
            saved += bias.numel()
            if isinstance(layer, nn.Linear):
                mix_in(norm, _AfterLinear)
            parent, inside = _common_parent(module, name, norm_name)
            if _PAIRS not in vars(parent):
                vars(parent)[_PAIRS] = []
                parent.register_load_state_dict_pre_hook(_move_biases)
            vars(parent)[_PAIRS].append(inside)
        names = tuple(name for name, _ in pairs)
        return Report(f"{len(names)} biases, {saved:,} numbers, are fixed at zero", modules=names, parameters=saved)


def _pairs(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of layers with a bias that has no effect, and of their norms."""
    fed: dict[str, set[str]] = {}  # name of a layer -> names of the modules that get its output
    for parent, module in root.named_modules():
        if not has_parts(module) or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        prefix = f"{parent}." if parent else ""
        for name, norms in fed_alone(module).items():
            # An empty name means that the module returns the output. The code of its parent shows where that is used.
            fed.setdefault(f"{prefix}{name}", set()).update(f"{prefix}{norm}" if norm else "" for norm in norms)
    owners = Counter(id(parameter) for _, parameter in root.named_parameters(remove_duplicate=False))
    for name, norms in fed.items():
        layer = root.get_submodule(name)
        bias = getattr(layer, "bias", None)
        if not isinstance(bias, nn.Parameter) or owners[id(bias)] > 1 or len(norms) != 1 or "" in norms:
            continue
        (norm,) = norms
        if cancels(layer, root.get_submodule(norm)):
            yield name, norm


def _common_parent(root: nn.Module, one: str, other: str) -> tuple[nn.Module, tuple[str, str]]:
    """Return the smallest module that contains two others, and their names in it."""
    first = one.split(".")
    second = other.split(".")
    same = next(i for i, (a, b) in enumerate(zip(first, second)) if a != b)
    return root.get_submodule(".".join(first[:same])), (".".join(first[same:]), ".".join(second[same:]))
