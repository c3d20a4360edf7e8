"""Tensor parallelism: n processes share the layers of a network's plan, and compute on the same batch.

    colwise:  y_i = x W_i^T            W in n parts by rows; process i has the i-th part of y
    rowwise:  y = sum_i x_i W_i^T      W in n parts by columns; the sum is over all processes

Saves: (n - 1)/n of the memory of these layers, of their gradients and states, and of activations between two of them.
Costs: a block sums its activations over the processes four times per step: after attention and MLP, and backward.
Source: Shoeybi et al. (2019), https://arxiv.org/abs/1909.08053; torch.distributed.tensor.parallel

A network declares its plan as ``tp_plan``, in the terms of Hugging Face: ``{"blocks.*.mlp.up": "colwise", ...}``.
"""

from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import Optimizer

from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.distributed.seeds import seed_all
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, checks_types, refusal
from lit_efficient.internals.torch_modules import tensor_tables
from lit_efficient.surgery import local

if TYPE_CHECKING:
    from lightning.pytorch.plugins import Precision

_HEADS = ("num_attention_heads", "num_key_value_heads", "num_heads", "kv_heads")
# The inputs and outputs of these styles are whole, so that such a layer may stay whole itself.
_WHOLE = ("embedding_rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input")


def _style(name: str) -> ParallelStyle:
    if name == "replicated_with_grad_allreduce":  # a norm of heads: each process computes gradients of its own heads
        return SequenceParallel(sequence_dim=0, use_local_output=True)
    if name.startswith("colwise"):
        return ColwiseParallel(output_layouts=None if name == "colwise" else Replicate())
    return RowwiseParallel(input_layouts=None if name == "rowwise" else Replicate())


_KNOWN = ("colwise", "rowwise", "replicated_with_grad_allreduce", *_WHOLE)


@checks_types
@dataclass(frozen=True)
class Parallel:
    """Forms of parallelism of `ShardedStrategy` besides sharding. Each number must divide the number of all processes.

    Args:
        tensor: Number of processes that share each layer of the network's own plan (``tp_plan``: GPT, DiT, many models
            of Hugging Face) and compute on the same batch.
        context: Number of processes that share each row of tokens and hold a slice of it (context parallelism, for rows
            too long for one process): GPT, and Hugging Face's models with plain causal attention.
        experts: Whether each process holds whole experts of a network of Hugging Face, and tokens are sent to them
            (expert parallelism), instead of gathering the weights of all experts.
    """

    tensor: int = 1
    context: int = 1
    experts: bool = False

    def __post_init__(self) -> None:
        for name, value in (("tensor", self.tensor), ("context", self.context)):
            check_number("ShardedStrategy", f"parallel.{name}", value, least=1, whole=True)
        if self.tensor > 1 < self.context:
            raise refusal("ShardedStrategy", "parallel.context", "1 with parallel.tensor above 1", self.context)
        if self.experts and self.tensor * self.context > 1:
            raise refusal("ShardedStrategy", "parallel.experts", "false with parallel.tensor or context above 1", True)


def plan_of(root: nn.Module, processes: int) -> dict[str, str]:
    """Return the layers of ``root`` that ``processes`` share, by dotted name, with their styles.

    Raises:
        ConfigurationError: Without a plan, with a plan of other styles, and for sizes that cannot be divided.
        ConflictError: For a layer that a technique has changed.
    """
    found: dict[str, str] = {}
    inside: tuple[str, ...] = ()
    for name, network in root.named_modules():
        plan = getattr(network, "tp_plan", None)
        if not isinstance(plan, dict) or not plan or name.startswith(inside or ("\0",)):
            continue
        prefix = f"{name}." if name else ""
        inside += (prefix,)
        _check_heads(network, processes)
        names = [one for one, _ in (*network.named_modules(), *network.named_parameters())]
        for pattern, style in plan.items():
            for one in (one for one in names if _matches(one, pattern)):
                if style == "replicate":
                    continue
                if style not in _KNOWN:
                    raise ConfigurationError(
                        f"ShardedStrategy: {type(network).__name__} plans {style!r} for {one!r}, which is not "
                        "supported: set parallel.tensor to 1, which shards any network"
                    )
                if _divides(network.get_submodule(one), style, processes, prefix + one):
                    found[prefix + one] = style
    if not found:
        raise ConfigurationError(
            f"ShardedStrategy: {type(root).__name__} has no network with a plan (tp_plan) for parallel.tensor="
            f"{processes}: set it to 1, which shards any network"
        )
    for places in _shared(root):  # a tied weight must be divided by rows in all its layers, or in none
        if not all(found.get(place) in (*_WHOLE[:3], None) for place in places):
            raise ConfigurationError(f"ShardedStrategy: {places[0]!r} shares its weight: set parallel.tensor to 1")
        if not all(place in found for place in places):
            for place in places:
                found.pop(place, None)
    return found


def parallelize(root: nn.Module, mesh: DeviceMesh) -> int:
    """Divide the layers of the plan of ``root`` among the processes of ``mesh``, in place; return their number.

    Raises:
        ConfigurationError, ConflictError: As in :func:`plan_of`.
    """
    plan = plan_of(root, mesh.size())
    shared = _shared(root)
    for name, style in plan.items():
        parallelize_module(root.get_submodule(name), mesh, _style(style))
    for first, *others in shared:
        for other in others:
            root.get_submodule(other).weight = root.get_submodule(first).weight
    return len(plan)


def same_draws(mesh: DeviceMesh) -> None:
    """Set one seed in the processes of ``mesh``, which compute on the same batch and must draw the same numbers."""
    seed = torch.randint(2**62, (1,)).to(mesh.device_type)
    distributed.broadcast(seed, group=mesh.get_group(), group_src=0)
    seed_all(int(seed))


def clip_by_norm(self: "Precision", optimizer: Optimizer, clip_val: float) -> None:
    """Clip gradients in the place of a precision's ``clip_grad_by_norm``, which does not support shards of several
    meshes.
    """
    gradients = [p.grad for p in self.main_params(optimizer) if p.grad is not None]
    norm = gradient_norm(gradients)
    if norm is not None:
        scale = (clip_val / (norm + 1e-6)).clamp(max=1.0)  # torch adds 1e-6, too
        for gradient in map(local, gradients):
            gradient.mul_(scale.to(gradient))


def _matches(name: str, pattern: str) -> bool:
    parts = name.split(".")
    wanted = pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check_heads(network: nn.Module, processes: int) -> None:
    for name in _HEADS:
        heads = getattr(getattr(network, "config", None), name, None)
        if isinstance(heads, int) and heads % processes:
            raise ConfigurationError(
                f"ShardedStrategy: {type(network).__name__} has {name}={heads}, which parallel.tensor={processes} does "
                "not divide"
            )


def _divides(layer: nn.Module, style: str, processes: int, name: str) -> bool:
    """Return whether a layer is divided. A layer that may stay whole is not, if it is no plain layer or its size does
    not fit.
    """
    if style == "replicated_with_grad_allreduce":
        return True
    plain = type(layer) is (nn.Embedding if style == "embedding_rowwise" else nn.Linear)
    by = "in_features" if style.startswith("rowwise") else "out_features"
    if isinstance(layer, nn.Embedding):
        size = layer.num_embeddings
    else:
        size = getattr(layer, by, 0)
    if plain and size % processes == 0:
        return True
    if style in _WHOLE:
        return False
    if not plain:
        raise ConflictError(
            f"ShardedStrategy: {name!r} is a {type(layer).__name__}, and tensor parallelism divides plain linear "
            "layers: set parallel.tensor to 1, or leave out what has changed it"
        )
    raise ConfigurationError(
        f"ShardedStrategy: {name!r} has {by}={size}, which is not divisible by {processes} processes"
    )


def _shared(root: nn.Module) -> list[list[str]]:
    """Return groups of names of layers that share their weight."""
    places: defaultdict[int, list[str]] = defaultdict(list)
    for name, part in root.named_modules():
        weight = tensor_tables(part)[0].get("weight")
        if isinstance(weight, nn.Parameter):
            places[id(weight)].append(name)
    return [names for names in places.values() if len(names) > 1]
