"""Adafactor: the second moment of a matrix is stored as one row and one column, and there is no first moment.

    v_ij ~ r_i c_j / sum(r);    state of an m x n matrix: m + n values

Saves: nearly all of AdamW's 8 bytes a parameter
Costs: some quality at equal steps; needs another learning rate, about 1e-2, which is multiplied by each tensor's RMS
Source: Shazeer and Stern (2018), https://arxiv.org/abs/1804.04235; implementation: torch.optim.Adafactor
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from lit_efficient.errors import ChecksTypes
from lit_efficient.optimizers.groups import parameter_groups
from lit_efficient.optimizers.stepping import loss_of, unhooked, with_gradient
from lit_efficient.surgery import is_sharded
from lit_efficient.traits import Trait


class GroupedAdafactor(ChecksTypes, torch.optim.Adafactor):
    """Adafactor of torch that can exclude norms and biases from weight decay, and supports sharded parameters.

    Args:
        params: Parameters or groups.
        lr: Learning rate. It is multiplied by max(eps2, RMS of the tensor).
        beta2_decay: Exponent of the decay of the second moment, at most 0.
        d: Clipping threshold of the RMS of an update, at least 1.
        weight_decay: Decoupled weight decay.
        decay_norm_and_bias: Apply weight decay to tensors with fewer than two dimensions too.
    """

    traits = frozenset({Trait.NO_LOW_RANK_FORM, Trait.NO_SCHEDULE_FREE_FORM})
    helps: ClassVar[dict[str, tuple[int, str]]] = {"memory": (0, "nearly all of the optimizer's states")}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        d: float = 1.0,
        weight_decay: float = 0.0,
        decay_norm_and_bias: bool = True,
    ) -> None:
        groups = parameter_groups(params, weight_decay, decay_norm_and_bias)
        super().__init__(groups, lr=lr, beta2_decay=beta2_decay, d=d, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        stepped = [(p, group) for group in self.param_groups for p in with_gradient(group)]
        if not any(is_sharded(p) for p, _ in stepped):
            unhooked(torch.optim.Adafactor)(self)
            return loss
        for p, group in stepped:
            step_shard(p, self.state[p], group)
        return loss


def step_shard(p: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Step one sharded parameter like torch's Adafactor, with operations that DTensors support.

    The column statistic, which sums over all shards, is replicated on all processes.

    Args:
        p: The parameter, a DTensor. It is changed in place.
        state: State of the parameter, which is changed in place. It is empty before the first step.
        group: Parameter group of the parameter.
    """
    gradient = -p.grad if group["maximize"] else p.grad
    eps1, eps2 = group["eps"]
    if eps1 is None:
        eps1 = torch.finfo(p.dtype).eps
    squares = gradient.square()
    means = {"variance": squares}
    if p.ndim > 1:
        means = {"row_var": squares.mean(-1, keepdim=True), "col_var": _mean(squares, -2)}
    state.setdefault("step", torch.tensor(0.0))
    state["step"] += 1
    step = float(state["step"])
    for name, mean in means.items():
        if name not in state:
            state[name] = torch.zeros_like(mean)
        state[name].lerp_(mean, step ** group["beta2_decay"])
    scale = max(eps2, _rms(p)) * min(float(group["lr"]), step**-0.5)
    if group["weight_decay"]:
        p.mul_(1 - float(group["lr"]) * group["weight_decay"])
    if p.ndim > 1:
        row = state["row_var"]
        estimate = row * state["col_var"] / _mean(row, -2).clamp(min=eps1)
    else:
        estimate = state["variance"]
    update = estimate.clamp(min=eps1 * eps1).rsqrt() * gradient
    p.sub_(update, alpha=scale / max(1.0, _rms(update) / group["d"]))


def _mean(values: Any, dim: int) -> Any:
    """Return the mean along ``dim``, as a DTensor that is replicated where ``values`` is sharded along ``dim``.

    It is computed from the sum, because shards may differ in length.
    """
    from torch.distributed.tensor import Replicate  # slow to import

    total = values.sum(dim, keepdim=True) / values.shape[dim]
    if not is_sharded(total):
        return total
    whole = [kind if kind.is_shard() else Replicate() for kind in total.placements]
    return total.redistribute(placements=whole)


def _rms(values: Any) -> float:
    total = values.square().sum()
    if is_sharded(total):
        total = total.full_tensor()
    return float(total / values.numel()) ** 0.5
