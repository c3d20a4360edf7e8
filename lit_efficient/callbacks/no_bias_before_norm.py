"""No bias before a norm that takes it away again: batch norm, instance norm.

    norm(W x + b) = norm(W x),    as the mean that the norm subtracts holds b

Saves: the bias of each such layer: its gradient, a sum over the batch that is zero but for rounding, and its states
Costs: nothing; outputs are equal, in evaluation, too
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


def cancels(layer: Any, norm: Any) -> bool:
    """Whether a norm right behind a layer subtracts the layer's bias, exactly.

    A layer norm does not: it subtracts the mean over the features, and a bias differs from feature to feature.

    Args:
        layer: A convolution, or a linear layer, whose output must be [N, features] then.
        norm: What gets its output and nothing else.
    """
    if isinstance(layer, nn.Linear):
        return isinstance(norm, nn.BatchNorm1d | nn.SyncBatchNorm) and norm.num_features == layer.out_features
    groups = isinstance(norm, nn.GroupNorm) and norm.num_groups == norm.num_channels  # instance norm by another name
    return isinstance(layer, _CONVOLUTIONS) and (groups or isinstance(norm, (*_BATCH, *_INSTANCE)))


_PAIRS = "_lit_efficient_no_bias_pairs"  # of the module around both: names of layers and of their norms


class _BehindLinear:
    """Mix-in of a batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            raise ConfigurationError(
                f"NoBiasBeforeNorm: a batch norm behind a linear layer got {list(x.shape)}, whose second dimension it "
                "takes for the features: it does not take the bias away; leave NoBiasBeforeNorm out"
            )
        return super().forward(x)  # type: ignore[misc]


def _without_biases(module: Any, state: Any, prefix: str, *_: Any) -> None:
    """Before weights are loaded, of a network with biases, too: what they add goes into the running mean."""
    for layer, norm in vars(module)[_PAIRS]:
        bias, mean = (f"{prefix}{name}" for name in (f"{layer}.bias", f"{norm}.running_mean"))
        if bias in state:
            if mean in state:
                state[mean] = state[mean] - state[bias]
            state[bias] = torch.zeros_like(state[bias])


class NoBiasBeforeNorm(Technique):
    """Make the biases zeros that a norm right behind their layer takes away: no parameters any more, but buffers.

    Which norm gets what layer's output, and nothing else does, is read from the network's code. Names stay: weights
    that were trained with biases are read, and exports have zeros in their place.

    Raises:
        ConfigurationError: Where no bias is followed by such a norm, and in the first step where a batch norm behind a
            linear layer gets more than two dimensions.
    """

    phase = Phase.ARCHITECTURE
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "a little: no gradients of biases that cancel")}

    @torch.no_grad()
    def transform(self, module: nn.Module) -> Report:
        pairs = list(_pairs(module))
        if not pairs:
            raise ConfigurationError(
                f"NoBiasBeforeNorm: in the code of {type(module).__name__} no bias of a convolution or linear "
                "layer goes into a batch norm or instance norm alone"
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
                mix_in(norm, _BehindLinear)
            above, inside = _around(module, name, norm_name)
            if _PAIRS not in vars(above):
                vars(above)[_PAIRS] = []
                above.register_load_state_dict_pre_hook(_without_biases)
            vars(above)[_PAIRS].append(inside)
        names = tuple(name for name, _ in pairs)
        return Report(f"{len(names)} biases, {saved:,} numbers, are zeros for good", modules=names, parameters=saved)


def _pairs(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of layers with a bias that cancels, and of the norms."""
    fed: dict[str, set[str]] = {}
    for above, module in root.named_modules():
        if not has_parts(module) or isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        prefix = f"{above}." if above else ""
        for name, norms in fed_alone(module).items():
            # The output that a part gives back is used outside, which the code around it shows.
            fed.setdefault(f"{prefix}{name}", set()).update(f"{prefix}{norm}" if norm else "" for norm in norms)
    owners = Counter(id(parameter) for _, parameter in root.named_parameters(remove_duplicate=False))
    for name, norms in fed.items():
        layer: Any = root.get_submodule(name)
        bias = getattr(layer, "bias", None)
        if not isinstance(bias, nn.Parameter) or owners[id(bias)] > 1 or len(norms) != 1 or "" in norms:
            continue
        (norm,) = norms
        if cancels(layer, root.get_submodule(norm)):
            yield name, norm


def _around(root: nn.Module, one: str, other: str) -> tuple[Any, tuple[str, str]]:
    """The module around both of two, and their names in it."""
    first, second = one.split("."), other.split(".")
    same = next(i for i, (a, b) in enumerate(zip(first, second)) if a != b)
    return root.get_submodule(".".join(first[:same])), (".".join(first[same:]), ".".join(second[same:]))
