"""AdamW with moments in a small subspace of the gradients: GaLore and APOLLO.

    low = projected gradient;    step = Adam(low);    p <- p - lr * weight_decay * p - lr * scale * update
    GaLore: update = step, projected back;    APOLLO: update = gradient * |step| / |low|, by channel

Each parameter is stepped independently of the others. Q-GaLore stores the basis of the subspace in 4 bits, and chooses
it less often for matrices whose strongest direction stays.

Source: Zhao et al. (2024), https://arxiv.org/abs/2403.03507; Zhu et al. (2024), https://arxiv.org/abs/2412.05270;
    Q-GaLore: Zhang et al. (2024), https://arxiv.org/abs/2407.08296
"""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import DivergedError
from lit_efficient.mechanisms.adapters.int4 import dequantize_groups, quantize_groups
from lit_efficient.optimizers.stepping import adamw, loss_of, with_gradient
from lit_efficient.optimizers.subspaces import (
    gradient_scales,
    into_subspace,
    is_wide,
    out_of_subspace,
    random_directions,
    strongest_directions,
)

_GROUP = 256  # elements of a 4-bit basis with a scale and a zero point of their own
_WATCHED = 5  # latest choices of a subspace whose similarities are averaged
_GROWTH = 1.01  # largest growth of the norm of an update from step to step, the limiter of Fira and APOLLO


@dataclass(frozen=True)
class Subspace:
    """Base of the two methods: the choice of the subspace, and the update that follows from Adam's step in it."""

    rank: int
    update_every: int
    scale: float

    def update_of(
        self, gradient: Tensor, number: int, taken: int, state: dict[str, object], adam: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        """Return the update of a matrix before learning rate and scale, or ``None`` for no update.

        Args:
            gradient: [..., m, n].
            number: Number of the matrix, which its random draws depend on.
            taken: Steps before this one.
            state: State of the matrix.
            adam: Function of a gradient to Adam's step, which also updates the moments.
        """
        raise NotImplementedError

    def basis_bytes(self, count: int, short: int, element_size: int) -> int:
        """Return the bytes of the stored bases of ``count`` matrices with this shorter side."""
        raise NotImplementedError


@dataclass(frozen=True)
class StrongestDirections(Subspace):
    """GaLore: Adam steps in the subspace of the strongest directions of the gradient, and the step is projected back.

    Args:
        rank: Dimensions of the subspace. AdamW steps matrices whose shorter side is not larger.
        update_every: Number of steps after which the subspace is chosen again.
        scale: Factor on the update.
        exact: Decompose gradients exactly instead of with a randomised method.
        basis_bits: 4 stores the basis with 4 bits an element, 32 in the dtype of the gradient.
        similarity: Double the number of steps between choices for a matrix if the absolute cosine between its strongest
            directions of successive choices is at least this on average over the last five.
    """

    exact: bool = False
    basis_bits: int = 32
    similarity: float | None = None

    def update_of(
        self, gradient: Tensor, number: int, taken: int, state: dict[str, Any], adam: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        if "projector" not in state or taken % state.get("every", self.update_every) == 0:
            # A gradient of zeros, as below a layer that is initialised to zero, has no directions: wait for another.
            largest = float(torch.linalg.vector_norm(gradient, math.inf))
            if not math.isfinite(largest):
                raise DivergedError(
                    f"the gradient of a matrix of the shape {list(gradient.shape)} is not finite and has no "
                    "strongest directions; NonFiniteGuard stops or skips such a step before any weight has moved"
                )
            if largest > 0:
                draws = None if self.exact else _generator(gradient, number, taken)
                chosen = strongest_directions(gradient, self.rank, draws)
                if self.similarity is not None and "projector" in state:
                    self._watch(state, self._stored(state, gradient), chosen)
                self._store(state, chosen)
        if "projector" not in state:
            return None
        basis = self._stored(state, gradient)
        return out_of_subspace(adam(into_subspace(gradient, basis)), basis, is_wide(gradient))

    def basis_bytes(self, count: int, short: int, element_size: int) -> int:
        elements = count * short * self.rank
        if self.basis_bits == 4:
            return -(-elements // _GROUP) * (_GROUP // 2 + 8)  # codes, and a scale and a zero point in float32
        return elements * element_size

    def _store(self, state: dict[str, Any], basis: Tensor) -> None:
        if self.basis_bits == 4:
            groups = F.pad(basis.flatten(), (0, -basis.numel() % _GROUP)).view(-1, _GROUP)
            basis, state["projector_scale"], state["projector_zero"] = quantize_groups(groups.float(), _GROUP)
        state["projector"] = basis

    def _stored(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        """Return the stored basis [..., min(m, n), rank]."""
        if "projector_scale" not in state:
            return state["projector"]
        shape = (*gradient.shape[:-2], min(gradient.shape[-2:]), self.rank)
        groups = dequantize_groups(state["projector"], state["projector_scale"], state["projector_zero"])
        return groups.flatten()[: math.prod(shape)].view(shape).to(gradient.dtype)

    def _watch(self, state: dict[str, Any], before: Tensor, after: Tensor) -> None:
        """Double the period of a matrix if its strongest direction has changed little."""
        cosine = F.cosine_similarity(before[..., 0], after[..., 0], dim=-1).abs().mean()
        state["similarities"] = [*state.get("similarities", []), float(cosine)][-_WATCHED:]
        if len(state["similarities"]) == _WATCHED and sum(state["similarities"]) >= _WATCHED * (self.similarity or 0):
            state["every"] = 2 * state.get("every", self.update_every)


@dataclass(frozen=True)
class RandomDirections(Subspace):
    """APOLLO: each channel of the gradient is scaled by the ratio that Adam has in a random subspace.

    Args:
        rank: Dimensions of the subspace. AdamW steps matrices whose shorter side is not larger.
        update_every: Number of steps after which the subspace is drawn again.
        scale: Factor on the update.
        tensorwise: Use one ratio for a whole matrix instead of one for each channel.
    """

    tensorwise: bool = False

    def update_of(
        self, gradient: Tensor, number: int, taken: int, state: dict[str, Any], adam: Callable[[Tensor], Tensor]
    ) -> Tensor | None:
        draws = _generator(gradient, number, taken // self.update_every)
        low = into_subspace(gradient, random_directions(gradient, self.rank, draws))
        update = gradient * gradient_scales(low, adam(low), is_wide(gradient), self.tensorwise)
        kind = torch.promote_types(update.dtype, torch.float32)
        norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True, dtype=kind)
        before = state.get("norm", torch.zeros_like(norm))
        state["norm"] = torch.where(before > 0, torch.minimum(norm, _GROWTH * before), norm)
        return update.mul_(torch.where(norm > 0, state["norm"] / norm, 1.0))

    def basis_bytes(self, count: int, short: int, element_size: int) -> int:
        return 0  # the basis is drawn again in each step from the same seed


class LowRankAdamW(Optimizer):
    """AdamW that projects the gradients of some matrices into a subspace.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Term that is added to the denominator.
        weight_decay: Decoupled weight decay.
        matrices: Parameters that are projected: matrices, stacks of experts, or filters of convolutions.
        subspace: The subspace.
        low_bit: Parameters whose moments have 8 bits.
        fused: Step all other parameters with torch's fused kernel.
    """

    non_castable_tensor_keys: ClassVar[Set[str]] = {
        "step",
        "norm",
        "projector_scale",
        "projector_zero",
        "absmax1",
        "absmax2",
    }  # always float32

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        matrices: Sequence[Tensor],
        subspace: Subspace,
        low_bit: Set[Tensor] = frozenset(),
        fused: bool = False,
    ) -> None:
        self.numbers = {p: number for number, p in enumerate(matrices)}
        self.subspace = subspace
        self.low_bit = low_bit
        self.fused = fused
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            parameters = with_gradient(group)
            others = [p for p in parameters if p not in self.numbers and p not in self.low_bit]
            adamw(self, group, others, fused=self.fused)
            for p in parameters:
                if p in self.numbers or p in self.low_bit:
                    self._step_alone(group, p)
        return loss

    def _step_alone(self, group: dict[str, Any], p: Any) -> None:
        state, lr = self.state[p], float(group["lr"])
        taken = int(state.setdefault("step", torch.tensor(0.0, dtype=torch.float32)))
        state["step"] += 1

        def adam(gradient: Tensor) -> Tensor:
            return self._adam_step(group, state, gradient.contiguous(), p in self.low_bit)

        scale = 1.0
        if p in self.numbers:
            update = self.subspace.update_of(as_matrices(p.grad), self.numbers[p], taken, state, adam)
            scale = self.subspace.scale
        else:
            update = adam(p.grad)
        p.mul_(1 - lr * group["weight_decay"])
        if update is not None:
            p.add_(update.view(p.shape), alpha=-lr * scale)

    def _adam_step(self, group: dict[str, Any], state: dict[str, Any], gradient: Tensor, low_bit: bool) -> Tensor:
        """Return Adam's step for a gradient, at a learning rate of 1."""
        beta1, beta2 = group["betas"]
        steps = int(state["step"])
        if low_bit:
            from lit_efficient.optimizers.low_bit_bitsandbytes import adam_8bit

            return adam_8bit(gradient, state, (beta1, beta2), group["eps"], steps)
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(gradient)
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = state["exp_avg_sq"].sqrt().div_(math.sqrt(1 - beta2**steps)).add_(group["eps"])
        return state["exp_avg"].div(root).div_(1 - beta1**steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state and keep the dtypes in it. torch would cast all states to the dtypes of the parameters."""
        super().load_state_dict(state_dict)
        ids = (i for group in state_dict["param_groups"] for i in group["params"])
        parameters = (p for group in self.param_groups for p in group["params"])
        for i, p in zip(ids, parameters, strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                if not isinstance(value, Tensor):
                    continue
                here = p.device
                if key == "step" and (not self.fused or p in self.numbers):
                    here = value.device  # only the fused kernel needs its step counter on the device
                if value.dtype != self.state[p][key].dtype or here != self.state[p][key].device:
                    self.state[p][key] = value.to(here, copy=True)

    def __getstate__(self) -> dict[str, object]:
        # torch only includes groups and states in copies.
        return super().__getstate__() | {name: vars(self)[name] for name in ("numbers", "subspace", "low_bit", "fused")}


def _generator(like: Tensor, *parts: int) -> torch.Generator:
    """Return a generator that is independent of other random draws, and equal in all processes and after a resume."""
    return torch.Generator(like.device).manual_seed(mix_seed(*parts))


def as_matrices(p: Tensor) -> Tensor:
    """Flatten the filters of a 2D or 3D convolution to one row an output. Return matrices and stacks unchanged."""
    return p if p.ndim < 4 else p.flatten(1)
