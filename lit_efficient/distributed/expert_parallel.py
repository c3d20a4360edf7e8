"""Expert parallelism: each of N processes holds 1/N of the experts, and tokens travel to the experts instead.

    process i holds experts i E/N to (i + 1) E/N - 1, whole, with their gradients and optimizer states
    all-to-all: each token goes to the processes of its experts, and their outputs come back
    gradients:  sums over the tokens of all processes, divided by N, as those of other weights are means over processes

Saves: gathering the weights of all experts in each forward and backward pass of sharded training
Costs: two exchanges of the tokens of a layer, forward and backward; all wait for the process with the most tokens
Source: Lepikhin et al. (2020), https://arxiv.org/abs/2006.16668; the exchange is ``AllToAllEP`` of transformers
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lit_efficient.errors import ConfigurationError, ConflictError
from lit_efficient.internals.hugging_face import expert_modules, token_exchange
from lit_efficient.internals.torch_modules import tensor_tables
from lit_efficient.surgery import mix_in


class DividedExperts:
    """Mix-in of stacked experts of transformers whose parameters are DTensors, split by expert."""

    experts_mesh: DeviceMesh
    experts_alone: DeviceMesh  # of this process alone: no other process computes on the same batch

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the experts' output for each of this process's tokens, [N, D]."""
        own = SimpleNamespace(forward=super().forward, num_experts=self.num_experts)  # type: ignore[misc, attr-defined]
        exchange = token_exchange()(own, self.experts_mesh, self.experts_alone)
        with own_experts(self, hidden_states.dtype, self.experts_mesh.size()):  # type: ignore[arg-type]
            output: Tensor = exchange(hidden_states, top_k_index, top_k_weights)
        return output.to(hidden_states.dtype)


@contextmanager
def own_experts(module: nn.Module, dtype: torch.dtype, processes: int) -> Iterator[None]:
    """Context in which the parameters of a module are this process's shards, in the given format.

    Their gradients are divided by the number of processes.
    """
    table = tensor_tables(module)[0]
    whole = dict(table)
    shards: dict[str, Any] = {}
    for name, parameter in whole.items():
        shard: Any = parameter.to_local()
        if shard.requires_grad:
            shard.register_hook(lambda gradient: gradient / processes)
        shards[name] = shard.to(dtype)
    table.update(shards)
    try:
        yield
    finally:
        table.update(whole)


def check_experts(root: nn.Module, processes: int) -> list[tuple[str, nn.Module]]:
    """Return the modules of experts that ``processes`` can divide.

    Raises:
        ConfigurationError: If there are none, and for a number of experts that cannot be divided.
        ConflictError: For experts that a technique has changed to another form.
    """
    found = expert_modules(root)
    if not found:
        raise ConfigurationError(
            f"ShardedStrategy: parallel.experts divides stacked experts of transformers, and {type(root).__name__} has "
            "none: set it to false"
        )
    for name, part in found:
        for key, parameter in part.named_parameters():
            if "." in key or not parameter.is_floating_point():
                raise ConflictError(
                    f"ShardedStrategy: '{name}.{key}' is no float weight of stacked experts, and parallel.experts "
                    "divides only these: set it to false, or leave out what has changed the experts"
                )
            if len(parameter) % processes:
                raise ConfigurationError(
                    f"ShardedStrategy: {name!r} has {len(parameter)} experts, which {processes} processes cannot "
                    "divide: set parallel.experts to false"
                )
    return found


def divide_experts(root: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Divide the experts in ``root`` among the processes of a mesh, in place. Return their parameters.

    Raises:
        ConfigurationError, ConflictError: As in :func:`check_experts`.
    """
    alone = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("experts", "alone"))["alone"]
    divided: set[nn.Parameter] = set()
    for _, part in check_experts(root, mesh.size()):
        table = tensor_tables(part)[0]
        count = 0
        for name, parameter in [*table.items()]:
            assert parameter is not None
            count = len(parameter) // mesh.size()
            shard: Any = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            table[name] = nn.Parameter(shard, parameter.requires_grad)
        divided.update(part.parameters())
        mix_in(part, DividedExperts, num_experts=count, experts_mesh=mesh, experts_alone=alone)
    return divided
