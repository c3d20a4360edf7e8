"""Mixture of experts around a feed-forward module: its code runs once on all tokens, sorted by the chosen expert.

    p = softmax(W x)            in float32, [E]
    y = sum_e g_e FFN_e(x),     g = p over the k experts with the largest p (+ b), divided by their sum

Each linear layer of the module holds the weights of all experts, [E, out, in], under the name of its own weight, and
multiplies each group of rows by the matrix of one expert (a grouped product). No token is dropped, whatever the choice.

Sources: Shazeer et al. (2017), https://arxiv.org/abs/1701.06538; without dropping: Gale et al. (2022),
https://arxiv.org/abs/2211.15841; balance: Fedus et al. (2021), https://arxiv.org/abs/2101.03961; z: Zoph et al. (2022),
https://arxiv.org/abs/2202.08906; b: Wang et al. (2024), https://arxiv.org/abs/2408.15664.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.internals.torch_modules import Loads, StaysFloat32
from lit_efficient.models.networks.token_rows import row_of
from lit_efficient.surgery import home_of, mix_in

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


def route_tokens(logits: Tensor, top_k: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts for each token, with weights that sum to 1.

    For ``top_k=1`` the weight has the value 1 and the gradient of ``log p``: p divided by itself would have none.

    Args:
        logits: Output of the router, [N, E].
        top_k: Experts per token, 1 to E.
        bias: Added to the probabilities for the choice only, [E].

    Returns:
        Weights [N, k] and experts [N, k], int64.
    """
    probabilities = logits.softmax(-1)
    scores = probabilities
    if bias is not None:
        scores = probabilities + bias
    chosen = scores.topk(top_k, dim=-1).indices
    picked = probabilities.gather(-1, chosen)
    total = picked.detach() if top_k == 1 else picked.sum(-1, keepdim=True)
    return picked / total.clamp_min(torch.finfo(total.dtype).tiny), chosen


def load_balance_loss(logits: Tensor, chosen: Tensor, real: Tensor | None = None) -> Tensor:
    """Return ``E sum_e f_e P_e``: f is the share of the choices, P the mean probability. 1 where both are even, at most
    E.

    Args:
        logits: Output of the router, [N, E].
        chosen: Experts of each token, [N, k].
        real: True for tokens that are not padding, [N] bool; ``None``: all.

    Source: Fedus et al. (2021), https://arxiv.org/abs/2101.03961, equation 4; all choices of a token count equally.
    """
    experts = logits.shape[-1]
    loads = _choice_counts(chosen, experts, real).to(logits.dtype)
    return experts * (loads / loads.sum().clamp_min(1) * _mean(logits.softmax(-1), real)).sum()


def router_z_loss(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Return ``mean (log sum_e exp l_e)^2`` of logits [N, E], over the ``real`` [N] tokens or all. It keeps logits
    small.

    Source: Zoph et al. (2022), https://arxiv.org/abs/2202.08906, equation 5.
    """
    return _mean(logits.logsumexp(-1).square(), real)


def router_losses(call: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
    """Return the load-balancing loss and the router z-loss of one recorded call of a router: [2].

    Args:
        call: Logits of the router, chosen experts, and mask of the tokens that are not padding or None.
    """
    logits, chosen, real = call
    return torch.stack([load_balance_loss(logits, chosen, real), router_z_loss(logits, real)])


def balanced_bias(bias: Tensor, loads: Tensor, rate: float) -> Tensor:
    """Return the bias [E] for the next step: ``rate`` higher for experts below the mean load [E], ``rate`` lower above
    it.

    Source: Wang et al. (2024), https://arxiv.org/abs/2408.15664, algorithm 1.
    """
    loads = loads.to(bias.dtype)
    return bias + rate * torch.sign(loads.mean() - loads)


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
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in (x, weight, bias))  # type: ignore
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
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
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


class ExpertMixture(Loads, StaysFloat32):
    """Mix-in of a feed-forward module that routes the tokens and runs the module's own forward on them, sorted by
    expert.
    """

    float32 = ("router_",)
    router_weight: nn.Parameter  # [E, D]
    router_bias: Tensor | None  # [E], where the load is balanced by a bias
    router_top_k: int
    router_shared: int  # number of experts that process all tokens
    router_load: Tensor | None  # [E], number of choices since the last step
    training: bool
    side_terms: list[tuple[Tensor, Tensor, Tensor | None]] | None = (
        None  # (logits, choices, real) of each call, while a step's are collected
    )
    token_rows: dict[str, object]  # padding mask of the batch, see `token_rows`

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Map [..., D] to [..., D]."""
        rows = x.reshape(-1, x.shape[-1])  # [N, D]
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(rows.to(wide), self.router_weight.to(wide))
        weights, chosen = route_tokens(logits, self.router_top_k, self.router_bias)
        if self.side_terms is not None and self.training and len(rows) and torch.is_grad_enabled():
            mask = row_of(self, "attention_mask", x.shape[:-1])
            real = None
            if mask is not None:
                real = mask.flatten() != 0
            self.side_terms.append((logits, chosen, real))
            self._count(chosen, real)
        if self.router_shared:
            weights, chosen = self._with_shared(weights, chosen)
        slots = chosen.shape[-1]
        experts, order = chosen.flatten().sort(stable=True)
        every = torch.arange(len(self.router_weight) + self.router_shared, device=x.device)
        groups = Groups(experts, torch.searchsorted(experts, every, right=True, out_int32=True))
        layers = [part for part in self.modules() if isinstance(part, GroupedLayer)]  # type: ignore[attr-defined]
        for layer in layers:
            layer.groups = groups
        try:
            y = super().forward(rows[order // slots], *args, **kwargs)  # type: ignore[misc]  # of the module
        finally:
            for layer in layers:
                layer.groups = None
        y = y[order.argsort()].unflatten(0, (-1, slots))  # [N, k, D]
        return (y * weights[..., None]).sum(1).to(y.dtype).reshape(*x.shape[:-1], y.shape[-1])

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Keep the own router if a checkpoint is that of the network without experts."""
        own = dict(self.named_modules())  # type: ignore[attr-defined]
        layers = {name: part for name, part in own.items() if isinstance(part, GroupedLayer)}
        given = [(state_dict.get(f"{prefix}{name}.weight"), part.expert_shape[1:]) for name, part in layers.items()]
        if given and all(weight is not None and weight.shape == shape for weight, shape in given):
            for name, tensor in (("router_weight", self.router_weight), ("router_bias", self.router_bias)):
                if tensor is not None:
                    state_dict.setdefault(f"{prefix}{name}", tensor.detach())

    def _count(self, chosen: Tensor, real: Tensor | None) -> None:
        if self.router_bias is not None:
            now = _choice_counts(chosen, len(self.router_bias), real)
            if self.router_load is not None:
                now = self.router_load.to(now.device) + now
            self.router_load = now

    def _with_shared(self, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Add the shared experts, each with the weight of all chosen experts together."""
        shared = torch.arange(self.router_shared, device=chosen.device) + len(self.router_weight)
        chosen = torch.cat((chosen, shared.expand(len(chosen), -1)), 1)
        return torch.cat((weights, weights.new_ones(len(weights), len(shared))), 1) / (1 + len(shared)), chosen


def add_mixture(
    module: Any, experts: int, top_k: int, shared: int = 0, *, balanced: bool = False, generator: torch.Generator
) -> None:
    """Turn a feed-forward module into a mixture of experts, in place. Each expert starts with the module's weights, so
    that the output stays the same.

    Args:
        module: Maps tokens [..., D] to [..., D], each by itself, through linear layers.
        experts: Number of experts that the router chooses from.
        top_k: Number of chosen experts per token.
        shared: Number of further experts that process all tokens. The output is the mean of their outputs and of the
            chosen experts' weighted sum.
        balanced: Whether to add a bias to the choice.
        generator: Draws the router's weights, of variance 0.1 / D.
    """
    layers = {name: part for name, part in module.named_modules() if is_linear(part)}
    for name, layer in layers.items():
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, ExpertLinear.copies_of(layer, experts + shared))
    first = next(iter(layers.values())).weight
    width = width_of(module)
    dtype = torch.promote_types(first.dtype, torch.float32)
    drawn = torch.randn(experts, width, generator=generator, device="cpu", dtype=torch.float32) * (0.1 / width) ** 0.5
    module.register_parameter("router_weight", nn.Parameter(drawn.to(home_of(first), dtype)))
    bias = None
    if balanced:
        bias = torch.zeros(experts, dtype=dtype, device=home_of(first))
    module.register_buffer("router_bias", bias)
    mix_in(module, ExpertMixture, router_top_k=top_k, router_shared=shared, router_load=None, token_rows={})


def width_of(module: nn.Module) -> int:
    """Return the number of inputs of a module's first linear layer of any kind, or 0 without one."""
    for part in module.modules():
        if hasattr(part, "in_features"):
            return int(part.in_features)  # type: ignore[arg-type]
        if is_linear(part):
            return len(part.weight)  # type: ignore[arg-type]
    return 0


def is_linear(part: nn.Module) -> bool:
    """Return whether a layer is exactly an ``nn.Linear`` or GPT-2's ``Conv1D``, and not a subclass."""
    kind = type(part)
    return kind is nn.Linear or (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def _repeated(tensor: Tensor, times: int) -> nn.Parameter:
    copies = tensor.detach().expand(times, *tensor.shape).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(copies, tensor.requires_grad)


def _choice_counts(chosen: Tensor, experts: int, real: Tensor | None = None) -> Tensor:
    """Return how often each expert was chosen, [E], without waiting for a GPU."""
    flat = chosen.flatten()
    ones = torch.ones_like(flat)
    if real is not None:
        ones = real.to(flat.dtype).repeat_interleave(chosen.shape[-1])
    return torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, ones)


def _mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean over the first dimension, restricted to tokens with ``real`` true."""
    if real is None:
        return values.mean(0)
    return torch.tensordot(real.to(values.dtype), values, 1) / real.sum().clamp_min(1)
