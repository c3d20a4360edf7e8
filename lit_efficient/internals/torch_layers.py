"""Base classes of torch's layers, of which torch only exports the concrete classes. Checked with torch 2.13."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormWithStatistics
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNorm

__all__ = ["BatchNorm", "Convolution", "Dropout", "NormWithStatistics", "SpectralNorm", "padded"]


def padded(convolution: Any, x: Tensor) -> Tensor:
    """Pad an input as a convolution does in modes other than zeros: ``_reversed_padding_repeated_twice``."""
    return F.pad(x, convolution._reversed_padding_repeated_twice, mode=convolution.padding_mode)
