"""Steps of bfloat16 parameters in float32, of any optimizer, stored so that what bfloat16 cannot hold is not lost.

    q = p + c in float32;  step q;  p = bfloat16(q);  c = q - p, rounded by chance      compensated (Kahan)
    q = p in float32;      step q;  p = q, rounded by chance                            otherwise

bfloat16 has 8 bits: of steps below 1/512 of a weight, rounding to nearest leaves nothing. Moments have the same fate (a
second moment at 0.999 never decays), so those that are stored in bfloat16 are rounded by chance in both forms. The
draws follow from the seed, the number of the step and the place of the parameter, wherever it lives.

Source: Gupta et al. (2015), https://arxiv.org/abs/1502.02551; Zamirai et al. (2020), https://arxiv.org/abs/2010.06192
"""

import functools
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_dispatch import is_traceable_wrapper_subclass
from lit_efficient.optimizers.host_states import Streamed, check_unchanged, streamed
from lit_efficient.optimizers.stepping import change_class, loss_of, pieces, unhooked, with_gradient, with_step
from lit_efficient.surgery import local

COMPENSATION = "compensation"  # the key of c in a parameter's state
_PIECE = 2**24  # bytes of parameters that are stepped at a time, in float32 beside their gradients and states


def round_stochastically(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """``x`` in bfloat16, each value as one of its two neighbours there, by chance: the mean over draws is ``x``.

    Args:
        x: float32 of any shape. What is not finite stays as it is.
        generator: Of the draws, on the device of ``x``; ``None``: the device's global one.
    """
    bits = x.contiguous().view(torch.int32)
    drawn = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = drawn.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


@dataclass
class Rounding:
    """How an optimizer stores what it has computed in float32."""

    compensated: bool  # keep what rounding took off each parameter, and give it back in the next step
    seed: int = 0  # of the draws
    step: int = 0  # number of the next step: who resumes a run sets it, the optimizer counts on
    who: str = "step_in_float32"  # name for errors
    places: dict[Tensor, int] = field(default_factory=dict)  # of the parameters in the optimizer

    def place(self, p: Tensor) -> int:
        """The number of a parameter, which its draws follow."""
        return self.places.setdefault(p, len(self.places))


class Float32Step(Optimizer):
    """What marks an optimizer that steps bfloat16 parameters in float32."""

    keeps_small_updates = True  # which a warning asks of whatever steps 16-bit weights
    rounding: Rounding


class DrawsByStep:
    """Put in front of a technique that steps in float32: draws follow from the run's step, after a resume, too."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if isinstance(optimizer, Float32Step):
            optimizer.rounding.step = trainer.global_step

    on_before_zero_grad = on_before_optimizer_step  # before the backward pass, where some step already


def step_in_float32(
    optimizer: Optimizer,
    *,
    compensated: bool,
    seed: int = 0,
    later: Set[Tensor] = frozenset(),
    who: str = "step_in_float32",
) -> int:
    """Change ``optimizer``'s class, in place, to one that steps bfloat16 parameters in float32; others step as before.

    Its step must treat each parameter on its own; groups, schedulers and hooks stay. ``compensated`` keeps a bfloat16
    compensation of each parameter in the state, instead of rounding it by chance; what trains ``later`` counts, too.

    Returns:
        How many elements of the parameters that train are bfloat16.

    Raises:
        ConfigurationError: For LBFGS, for paged states, and if no parameter that trains is bfloat16.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(f"{who}: LBFGS keeps one state for all parameters, which has no pieces")
    if getattr(optimizer, "is_paged", False):
        raise ConfigurationError(f"{who}: paged states belong to the parameters themselves: use paged=False")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [p for p in parameters if p.requires_grad or p in later]
    count = sum(p.numel() for p in trained if p.dtype is torch.bfloat16)
    if not count:
        found = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained}))
        raise ConfigurationError(
            f"{who}: no parameter that {type(optimizer).__name__} trains is bfloat16 (there is {found or 'none'}), so "
            f"no update is lost: leave {who} out, or use precision: bf16-true"
        )
    kind: Any = type(optimizer)
    outer = issubclass(kind, Streamed)  # its states come and go a piece at a time: the piece is stepped in float32
    kind = _float32(kind.__mro__[1]) if outer else _float32(kind)
    change_class(optimizer, streamed(kind) if outer else kind)
    rounding = Rounding(compensated, seed, who=who)
    for p in parameters:
        rounding.place(p)
    optimizer.rounding = rounding  # type: ignore[attr-defined]  # of `Float32Step`
    optimizer.register_step_post_hook(_count)
    return count


def _count(optimizer: Any, *_: Any) -> None:
    optimizer.rounding.step += 1


@functools.cache
def _float32(base: type[Optimizer]) -> type[Optimizer]:
    """``base`` with a step in float32; the class keeps its name."""
    inner = unhooked(base)  # hooks run once, not for each piece

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        loss = loss_of(closure)
        groups = self.param_groups
        # What it says of some parameters, in sets and by parameter, it says of what stands for them.
        named = {k: v for k, v in vars(self).items() if isinstance(v, Set | dict) and k not in ("state", "defaults")}
        stands: dict[Tensor, Tensor] = {}
        try:
            for group in groups:
                parameters = with_gradient(group)
                others = [p for p in parameters if p.dtype is not torch.bfloat16]
                if others:
                    self.param_groups = [group | {"params": others}]
                    inner(self)
                    check_unchanged(self, group, self.rounding.who)
                for piece in pieces([p for p in parameters if p.dtype is torch.bfloat16], _PIECE):
                    stands = {p: _widened(self, p) for p in piece}
                    for name, value in named.items():
                        said = [(p, stand) for p, stand in stands.items() if p in value]
                        one: Any = {s: value[p] for p, s in said} if isinstance(value, dict) else {s for _, s in said}
                        setattr(self, name, value | one)
                    self.param_groups = [group | {"params": list(stands.values())}]
                    inner(self)
                    check_unchanged(self, group, self.rounding.who)
                    for p, stand in stands.items():
                        _narrow(self, p, stand)
        finally:
            self.param_groups = groups
            for stand in stands.values():  # after an error
                self.state.pop(stand, None)
            for name, value in named.items():
                setattr(self, name, value)
        return loss

    return with_step(base, Float32Step, step)


def _widened(optimizer: Any, p: Tensor) -> Tensor:
    """What stands for a parameter in a step: it, its gradient and its states, in float32."""
    stand = p.detach().float()
    assert p.grad is not None  # `with_gradient` has looked
    stand.grad = p.grad.float()
    state = optimizer.state.get(p)
    if state:
        if COMPENSATION in state:
            local(stand).add_(local(state[COMPENSATION]))
        stored = {key: value for key, value in state.items() if key != COMPENSATION}
        if stored:
            own = _of_own_type(optimizer)
            optimizer.state[stand] = {k: v.float() if _is_low(k, v, own) else v for k, v in stored.items()}
    return stand


def _narrow(optimizer: Any, p: Tensor, stand: Tensor) -> None:
    """Store what a step has made of ``stand`` as the parameter's, in place where there is a place."""
    rounding = optimizer.rounding
    generator = torch.Generator(local(p).device)
    generator.manual_seed(mix_seed(rounding.seed, rounding.step, rounding.place(p)))
    state, own = optimizer.state[p], _of_own_type(optimizer)
    stepped = optimizer.state.pop(stand, {})
    for key in sorted(stepped):
        value = stepped[key]
        if not _is_float32(key, value, own):
            state[key] = value
        elif is_traceable_wrapper_subclass(local(value)):
            state[key] = value.to(p.dtype)  # its own codes, which only look like another type
        else:
            if key not in state or state[key].shape != value.shape or state[key].dtype != p.dtype:
                state[key] = torch.empty_like(value, dtype=p.dtype)
            local(state[key]).copy_(round_stochastically(local(value), generator))
    weight, exact = local(p), local(stand)
    if not rounding.compensated:
        weight.copy_(round_stochastically(exact, generator))
        return
    if COMPENSATION not in state:
        state[COMPENSATION] = torch.zeros_like(p, requires_grad=False)
    weight.copy_(exact)
    local(state[COMPENSATION]).copy_(round_stochastically(exact.sub_(weight), generator))


def _of_own_type(optimizer: Any) -> Set[str]:
    """Keys of states that loading leaves in the type that they have; all others get the parameter's."""
    return {"step", *getattr(optimizer, "non_castable_tensor_keys", ())}


def _is_low(key: str, value: Any, own: Set[str]) -> bool:
    return key not in own and isinstance(value, Tensor) and value.dtype is torch.bfloat16


def _is_float32(key: str, value: Any, own: Set[str]) -> bool:
    return key not in own and isinstance(value, Tensor) and value.dtype is torch.float32
