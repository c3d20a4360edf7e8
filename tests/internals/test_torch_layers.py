import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.internals.leaning import leans_on


@leans_on("torch", "torch.nn.modules.batchnorm._BatchNorm", "torch_layers")
def test_batch_norms_of_all_dimensions_are_one_kind_and_instance_norms_are_not():
    from lit_efficient.internals.torch_layers import BatchNorm

    assert all(issubclass(kind, BatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert not issubclass(nn.InstanceNorm2d, BatchNorm)


@leans_on("torch", "torch.nn.modules.batchnorm._NormBase", "torch_layers")
def test_all_norms_that_keep_statistics_are_one_kind():
    from lit_efficient.internals.torch_layers import NormWithStatistics

    assert all(issubclass(kind, NormWithStatistics) for kind in (nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm1d))
    assert not issubclass(nn.GroupNorm, NormWithStatistics)


@leans_on("torch", "torch.nn.modules.conv._ConvNd", "torch_layers")
def test_all_convolutions_are_one_kind():
    from lit_efficient.internals.torch_layers import Convolution

    assert all(issubclass(kind, Convolution) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d))


@leans_on("torch", "torch.nn.modules.dropout._DropoutNd", "torch_layers")
def test_all_dropouts_are_one_kind():
    from lit_efficient.internals.torch_layers import Dropout

    assert all(issubclass(kind, Dropout) for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout))


@leans_on("torch", "torch.nn.utils.parametrizations._SpectralNorm", "torch_layers")
def test_a_spectral_norm_is_found_among_the_modules_with_its_vectors():
    from lit_efficient.internals.torch_layers import SpectralNorm

    (norm,) = [m for m in spectral_norm(nn.Linear(3, 2)).modules() if isinstance(m, SpectralNorm)]
    assert [len(buffer) for buffer in norm.buffers(recurse=False)] == [2, 3]


@pytest.mark.parametrize("padding", [2, "same", (1, 2)])
@leans_on("torch", "Conv2d._reversed_padding_repeated_twice", "torch_layers")
def test_the_padding_is_that_of_the_layer(padding):
    from lit_efficient.internals.torch_layers import padded

    torch.manual_seed(0)
    layer, x = nn.Conv2d(2, 2, 4, padding=padding, padding_mode="reflect"), torch.randn(1, 2, 7, 7)
    assert torch.equal(F.conv2d(padded(layer, x), layer.weight, layer.bias), layer(x))
