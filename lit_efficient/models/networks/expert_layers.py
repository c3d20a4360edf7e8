"""Mixture of experts around a feed-forward module: its code runs once on all tokens, sorted by the chosen expert.

    p = softmax(W x)            in float32, [E]
    y = sum_e g_e FFN_e(x),     g = p over the k experts with the largest p (+ b), divided by their sum

Each linear layer of the module holds the weights of all experts, [E, out, in], under the name of its own weight, and
multiplies each group of rows by the matrix of one expert (a grouped product). No token is dropped, whatever the choice.

Sources: Shazeer et al. (2017), https://arxiv.org/abs/1701.06538; without dropping: Gale et al. (2022),
https://arxiv.org/abs/2211.15841; balance: Fedus et al. (2021), https://arxiv.org/abs/2101.03961; z: Zoph et al. (2022),
https://arxiv.org/abs/2202.08906; b: Wang et al. (2024), https://arxiv.org/abs/2408.15664.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.internals.torch_modules import Loads, StaysFloat32
from lit_efficient.models.networks.grouped_linear import ExpertLinear, GroupedLayer, Groups
from lit_efficient.models.networks.token_rows import row_of
from lit_efficient.surgery import home_of, mix_in


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
    loads = choice_counts(chosen, experts, real).to(logits.dtype)
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

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
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
            now = choice_counts(chosen, len(self.router_bias), real)
            if self.router_load is not None:
                now = self.router_load.to(now.device) + now
            self.router_load = now

    def _with_shared(self, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Add the shared experts, each with the weight of all chosen experts together."""
        shared = torch.arange(self.router_shared, device=chosen.device) + len(self.router_weight)
        chosen = torch.cat((chosen, shared.expand(len(chosen), -1)), 1)
        return torch.cat((weights, weights.new_ones(len(weights), len(shared))), 1) / (1 + len(shared)), chosen


def add_mixture(
    module: nn.Module, experts: int, top_k: int, shared: int = 0, *, balanced: bool = False, generator: torch.Generator
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


def choice_counts(chosen: Tensor, experts: int, real: Tensor | None = None) -> Tensor:
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
