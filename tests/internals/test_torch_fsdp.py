import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from lit_efficient.internals import torch_fsdp
from tests.internals.leaning import leans_on


@leans_on("torch", "_get_fsdp_state()._lazy_init", "torch_fsdp")
def test_the_outer_module_is_the_root_though_an_inner_one_is_called_first():
    """Of one process; tests.ranks.sharded has two."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        network, mesh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), DeviceMesh("cpu", [0])
        for part in (network[0], network):
            fully_shard(part, mesh=mesh)
        assert torch_fsdp.sharded_modules(network) == [network, network[0]]
        torch_fsdp.make_root(network)
        network[0](torch.ones(1, 2))
        network(torch.ones(1, 2)).sum().backward()  # torch refuses a second root
        assert network[1].weight.grad is not None
    finally:
        dist.destroy_process_group()


@leans_on("torch", "_fsdp_param_groups, fsdp_params and _unsharded_param", "torch_fsdp")
def test_a_module_that_has_not_run_is_known():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        network, mesh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), DeviceMesh("cpu", [0])
        for part in (*network, network):
            fully_shard(part, mesh=mesh)
        torch_fsdp.make_root(network)
        assert torch_fsdp.never_gathered(network) == [*network]  # the root has no weights of its own
        network[0](torch.ones(1, 2))
        assert torch_fsdp.never_gathered(network) == [network[1]]
        network[1].unshard()
        assert torch_fsdp.never_gathered(network) == []
    finally:
        dist.destroy_process_group()


@leans_on("torch", "_get_fsdp_state()._fsdp_param_groups and _to_sharded", "torch_fsdp")
def test_what_has_been_gathered_goes_in_the_midst_of_a_forward_pass_too():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        network = fully_shard(nn.Linear(2, 2), mesh=DeviceMesh("cpu", [0]))
        network.unshard()
        assert not isinstance(network.weight, DTensor)
        torch_fsdp.drop_gathered(network)
        assert isinstance(network.weight, DTensor)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@leans_on("torch", "_common_utils._is_fsdp_flattened", "torch_fsdp")
@pytest.mark.parametrize("keeps_names", [True, False])
def test_weights_in_a_flat_vector_are_marked(keeps_names: bool) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        network = nn.Linear(2, 2)
        assert not any(map(torch_fsdp.is_in_flat_vector, network.parameters()))
        flat = FullyShardedDataParallel(network, use_orig_params=keeps_names, device_id=torch.device("cpu"))
        assert all(map(torch_fsdp.is_in_flat_vector, flat.parameters()))
    finally:
        dist.destroy_process_group()
