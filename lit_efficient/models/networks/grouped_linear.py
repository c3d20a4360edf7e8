"""Linear layers of several experts: one grouped product multiplies each row by the matrix of its expert.

    y[i] = W[e(i)] x[i] + b[e(i)],    rows sorted by their expert e(i); x [M, in], W [E, out, in]

A mixture of experts sorts the rows and sets the groups on the layers (see
:mod:`lit_efficient.models.networks.expert_layers`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.internals.torch_modules import Loads
from lit_efficient.surgery import in_autocast_dtype

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Groups:
    """Groups of rows that are sorted by expert."""

    experts: Tensor  # the expert of each row, [M], ascending
    ends: Tensor  # where the rows of each expert end, [E] int32


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups, transposed: bool = False) -> Tensor:
    """Multiply each row by the matrix of its expert.

    Torch's grouped product is used where it supports the format and the sizes. Otherwise slices are multiplied one by
    one, which on a GPU waits for their sizes.

    Args:
        x: Rows in the order of ``groups``, [M, in].
        weight: [E, out, in], or ``transposed`` [E, in, out].
        bias: [E, out] or None.
        groups: Experts of the rows.
        transposed: Layout of the weight.

    Returns:
        [M, out].
    """
    x = in_autocast_dtype(x)
    weight = in_autocast_dtype(weight)
    if bias is not None:
        bias = in_autocast_dtype(bias)
    matrices = weight if transposed else weight.mT  # [E, in, out]
    if _is_groupable(x, matrices):
        y = _Contiguous.apply(F.grouped_mm(x, matrices, offs=groups.ends))
    else:
        y = _by_slices(x, matrices, groups.ends)
    if bias is not None:
        y = y + bias[groups.experts]
    return y


@torch.compiler.disable
def _by_slices(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([part @ matrix for part, matrix in zip(x.split(sizes), matrices, strict=True)])


def _is_groupable(x: Tensor, matrices: Tensor) -> bool:
    """Return whether torch's grouped kernels support the tensors.

    They need rows of a multiple of 16 bytes, on a GPU Ampere or newer, and in compiled code bfloat16.
    """
    if torch.compiler.is_compiling() and x.dtype != torch.bfloat16:
        return False
    aligned = all(size * x.element_size() % 16 == 0 for size in matrices.shape[1:])
    new = x.device.type == "cpu" or (x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0))
    return aligned and new and x.dtype in _GROUPED and x.dtype == matrices.dtype and len(x) > 0


class _Contiguous(torch.autograd.Function):
    """Identity whose gradient is contiguous, as the grouped product needs it. It may be one number expanded to all
    places.
    """

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.contiguous()


class GroupedLayer(Loads):
    """Base of layers that hold the weights of all experts, in any storage format."""

    groups: Groups | None = None  # groups of the rows; set while the mixture around this layer runs
    expert_shape: tuple[int, int, int]  # shape of the weight: experts, outputs and inputs, or inputs and outputs
    is_transposed: bool
    bias: nn.Parameter | None

    def grouped_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply rows of the sorted tokens [M, in] by the matrices of their experts [E, out, in]."""
        return grouped_linear(x, weight, None, self.known_groups())

    def known_groups(self) -> Groups:
        """Return the groups of the rows; raise RuntimeError outside of the module around the layer."""
        if self.groups is None:
            raise RuntimeError("a layer of experts can be called only by the feed-forward module around it")
        return self.groups

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Convert weights of a checkpoint before they are loaded.

        A single layer is copied to every expert. Experts that are concatenated along the rows are split.
        """
        experts, *matrix = self.expert_shape
        given, bias = state_dict.get(f"{prefix}weight"), state_dict.get(f"{prefix}bias")
        if given is not None and given.is_floating_point() and given.ndim == 2:
            if list(given.shape) == matrix:  # one layer
                state_dict[f"{prefix}weight"] = given.expand(experts, *matrix)
            else:
                stacked = given.unflatten(0, (experts, -1))
                if self.is_transposed:
                    stacked = stacked.mT
                state_dict[f"{prefix}weight"] = stacked.contiguous()
        if bias is not None and bias.ndim == 1:
            state_dict[f"{prefix}bias"] = bias.expand(experts, *bias.shape)

    def extra_repr(self) -> str:
        """Return the sizes for ``repr``."""
        return f"experts, outputs, inputs={self.expert_shape}, transposed={self.is_transposed}"


class ExpertLinear(GroupedLayer, nn.Module):
    """Linear layers of all experts: weight [E, out, in], or ``transposed`` [E, in, out], and bias [E, out]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = transposed
        self.weight = weight
        self.register_parameter("bias", bias)
        self.expert_shape = tuple(weight.shape)  # type: ignore[assignment]
        self.in_features, self.out_features = weight.shape[1:] if transposed else weight.shape[:0:-1]

    @classmethod
    def copies_of(cls, layer: Any, experts: int) -> "ExpertLinear":
        """Return experts that start as copies of an ``nn.Linear``, or of GPT-2's ``Conv1D``."""
        weight = _repeated(layer.weight, experts)
        bias = None
        if layer.bias is not None:
            bias = _repeated(layer.bias, experts)
        return cls(weight, bias, not isinstance(layer, nn.Linear)).train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows of the sorted tokens, [M, in], to [M, out]."""
        return grouped_linear(x, self.weight, self.bias, self.known_groups(), self.is_transposed)


def _repeated(tensor: Tensor, times: int) -> nn.Parameter:
    copies = tensor.detach().expand(times, *tensor.shape).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copies, tensor.requires_grad)
