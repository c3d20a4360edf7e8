import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lit_efficient.internals.torch_modules import (
    BatchNorm,
    Convolution,
    Dropout,
    Loads,
    NormWithStatistics,
    SpectralNorm,
    Stays,
    StaysFloat32,
    forward_hooks,
    held_beside,
    hook_owners,
    padded,
    saved_names,
)
from tests.internals.leaning import leans_on


class Doubling(Loads, nn.Linear):
    def before_load(self, state_dict, prefix):
        state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]


class Scaled(StaysFloat32, nn.Linear):
    float32 = ("weight",)


@leans_on("torch", "nn.Module._load_from_state_dict", "torch_modules")
def test_what_a_module_reads_can_be_changed_on_the_way():
    network = nn.Sequential(nn.Linear(1, 1), Doubling(1, 1))
    given = {name: torch.ones_like(tensor) for name, tensor in network.state_dict().items()}
    network.load_state_dict(given)
    assert [p.item() for p in network.parameters()] == [1.0, 1.0, 2.0, 1.0]
    assert given["1.weight"].item() == 1.0  # the caller's own dict stays as it was


@leans_on("torch", "nn.Module._apply", "torch_modules")
def test_a_parameter_is_moved_and_not_cast_to_less():
    network = nn.Sequential(Scaled(1, 1))
    before = network[0].weight.detach().clone()
    network.to(torch.bfloat16)
    assert network[0].bias.dtype is torch.bfloat16
    assert torch.equal(network[0].weight, before)
    network.to(torch.float64)
    assert network[0].weight.dtype is torch.float64
    assert network.to("meta")[0].weight.device.type == "meta"


class Rooted(Stays, nn.Sequential):
    def staying(self):
        return [self[0].weight]


@leans_on("torch", "nn.Module._apply", "torch_modules")
def test_a_parameter_is_cast_and_not_moved():
    network = nn.Sequential(Rooted(nn.Linear(1, 1)))
    layer = network[0][0]
    weight = layer.weight
    network.to(torch.bfloat16).to("meta")
    assert layer.weight is weight
    assert weight.device.type == "cpu"
    assert weight.dtype is layer.bias.dtype is torch.bfloat16
    assert layer.bias.device.type == "meta"


@leans_on("torch", "nn.Module._forward_hooks and _forward_pre_hooks", "torch_modules")
def test_hooks_of_forwards_are_counted():
    network = nn.Sequential(nn.Linear(1, 1))
    network.register_forward_hook(print)
    kept = network[0].register_forward_pre_hook(print)
    assert forward_hooks(network) == 2
    kept.remove()
    assert forward_hooks(network) == 1


@leans_on("torch", "nn.Module._forward_hooks and _forward_pre_hooks", "torch_modules")
def test_whose_hooks_they_are_is_found():
    class Counts:
        def count(self, *_):
            pass

    network, counts = nn.Sequential(nn.Linear(1, 1)), Counts()
    network[0].register_forward_hook(counts.count)
    network.register_forward_pre_hook(lambda *_: None)
    assert hook_owners(network) == [counts]


@leans_on("torch", "nn.Module._parameters and _modules", "torch_modules")
def test_what_lies_beside_parameters_and_parts_is_found():
    network = nn.Sequential(nn.BatchNorm1d(2))
    network[0].seen = seen = [1]
    held = held_beside(network[0])
    assert any(value is seen for value in held)
    tables = [value for module in (network, network[0]) for value in held_beside(module) if isinstance(value, dict)]
    assert not any(isinstance(value, nn.Module | nn.Parameter) for table in tables for value in table.values())


@leans_on("torch", "nn.Module._apply", "torch_modules")
def test_what_is_on_meta_gets_memory_and_the_rest_stays():
    from lit_efficient.internals.torch_modules import give_memory

    network = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2))
    kept = network[1].weight
    give_memory(network, "cpu")
    assert {tensor.device.type for tensor in network.state_dict().values()} == {"cpu"}
    assert network[1].weight is kept


@leans_on("torch", "nn.Module._parameters", "torch_modules")
@leans_on("torch", "nn.Module._buffers", "torch_modules")
def test_what_is_put_into_the_tables_is_what_a_module_has():
    from lit_efficient.internals.torch_modules import tensor_tables

    layer = nn.BatchNorm1d(2)
    for table in tensor_tables(layer):
        for name, tensor in table.items():
            table[name] = nn.Parameter(tensor + 1) if isinstance(tensor, nn.Parameter) else tensor + 1
    assert layer.weight.tolist() == [2, 2]
    assert layer.running_mean.tolist() == [1, 1]


@leans_on("torch", "nn.Module._non_persistent_buffers_set", "torch_modules")
def test_a_module_names_what_it_saves():
    module = nn.BatchNorm1d(2)
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    module.register_buffer("missing", None)
    assert saved_names(module) == [*module.state_dict()]


@leans_on("torch", "torch.nn.modules.batchnorm._BatchNorm", "torch_modules")
def test_batch_norms_of_all_dimensions_are_one_kind_and_instance_norms_are_not():
    assert all(issubclass(kind, BatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert not issubclass(nn.InstanceNorm2d, BatchNorm)


@leans_on("torch", "torch.nn.modules.batchnorm._NormBase", "torch_modules")
def test_all_norms_that_keep_statistics_are_one_kind():
    assert all(issubclass(kind, NormWithStatistics) for kind in (nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm1d))
    assert not issubclass(nn.GroupNorm, NormWithStatistics)


@leans_on("torch", "torch.nn.modules.conv._ConvNd", "torch_modules")
def test_all_convolutions_are_one_kind():
    assert all(issubclass(kind, Convolution) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d))


@leans_on("torch", "torch.nn.modules.dropout._DropoutNd", "torch_modules")
def test_all_dropouts_are_one_kind():
    assert all(issubclass(kind, Dropout) for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


@leans_on("torch", "torch.nn.utils.parametrizations._SpectralNorm", "torch_modules")
def test_a_spectral_norm_is_found_among_the_modules_with_its_vectors():
    (norm,) = [m for m in spectral_norm(nn.Linear(3, 2)).modules() if isinstance(m, SpectralNorm)]
    assert [len(buffer) for buffer in norm.buffers(recurse=False)] == [2, 3]


@pytest.mark.parametrize("padding", [2, "same", (1, 2)])
@leans_on("torch", "Conv2d._reversed_padding_repeated_twice", "torch_modules")
def test_the_padding_is_that_of_the_layer(padding):
    torch.manual_seed(0)
    layer, x = nn.Conv2d(2, 2, 4, padding=padding, padding_mode="reflect"), torch.randn(1, 2, 7, 7)
    assert torch.equal(F.conv2d(padded(layer, x), layer.weight, layer.bias), layer(x))
