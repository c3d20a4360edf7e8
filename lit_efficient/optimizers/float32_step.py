"""Float32 steps for bfloat16 parameters, with any optimizer, so that small updates are not lost in rounding.

    q = p + c in float32;  step q;  p = bfloat16(q);  c = q - p, rounded stochastically      compensated (Kahan)
    q = p in float32;      step q;  p = q, rounded stochastically                            otherwise

bfloat16 has 8 bits of precision: rounding to nearest discards updates below 1/512 of a weight. Moments have the same
problem (a second moment with decay 0.999 never decays), so moments that are stored in bfloat16 are always rounded
stochastically. The random draws depend on the seed, the step and the position of the parameter in the optimizer, and
not on the device.

Source: Gupta et al. (2015), https://arxiv.org/abs/1502.02551; Zamirai et al. (2020), https://arxiv.org/abs/2010.06192
"""

import functools
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError, NoEffectError
from lit_efficient.internals.torch_dispatch import has_values, is_traceable_wrapper_subclass
from lit_efficient.mechanisms.order.resumable_sampler import mix_seed
from lit_efficient.optimizers.host_states import Streamed, streamed
from lit_efficient.optimizers.in_backward import InBackward
from lit_efficient.optimizers.independence import check_independent
from lit_efficient.optimizers.stepping import (
    change_class,
    check_unchanged,
    loss_of,
    pieces,
    step_some,
    unhooked,
    with_gradient,
    with_step,
)
from lit_efficient.surgery import local

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

COMPENSATION = "compensation"  # key of c in the state of a parameter
_PIECE = 2**24  # bytes of parameters that are stepped at a time, in float32, with their gradients and states
_ROUNDED = 2**22  # elements that are rounded at a time: a draw takes more memory than the elements


def round_stochastically(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round ``x`` to bfloat16, randomly up or down, so that the mean over draws is ``x``.

    Args:
        x: float32 of any shape. Values that are not finite stay unchanged.
        generator: Random generator on the device of ``x``. ``None`` takes the device's global generator.
    """
    flat = x.contiguous().view(-1)
    rounded = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    places = list(zip(flat.split(_ROUNDED), rounded.view(-1).split(_ROUNDED), strict=True))
    if not has_values(flat):  # in a plan: the other pieces are not larger, so the first one has the peak of all
        places = places[:1]
    for piece, place in places:
        drawn = torch.randint(0, 1 << 16, piece.shape, dtype=torch.int32, device=x.device, generator=generator)
        near = drawn.add_(piece.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
        place.copy_(torch.where(piece.isfinite(), near, piece))
    return rounded


@dataclass
class Rounding:
    """Settings and counters of the rounding of one optimizer."""

    compensated: bool  # store the rounding error of each parameter, and add it back in the next step
    seed: int = 0  # of the random draws
    step: int = 0  # number of the next step; it must be set again when a run resumes
    who: str = "step_in_float32"  # name at the beginning of error messages
    places: dict[Tensor, int] = field(default_factory=dict)  # positions of the parameters in the optimizer

    def generator(self, p: Tensor) -> torch.Generator:
        """Return the random generator of a parameter in this step."""
        place = self.places.setdefault(p, len(self.places))
        return torch.Generator(local(p).device).manual_seed(mix_seed(self.seed, self.step, place))


class Float32Step(Optimizer):
    """Base that marks an optimizer which steps bfloat16 parameters in float32."""

    keeps_small_updates = True  # read by the warning about optimizers that lose updates of 16-bit weights
    rounding: Rounding


class DrawsByStep:
    """Mix-in of techniques that step in float32: the random draws depend on the global step, so they resume exactly."""

    def on_before_optimizer_step(self, trainer: "Trainer", pl_module: "LightningModule", optimizer: Optimizer) -> None:
        if isinstance(optimizer, Float32Step):
            optimizer.rounding.step = trainer.global_step

    on_before_zero_grad = on_before_optimizer_step  # before the backward pass, in which some optimizers step already


def step_in_float32(
    optimizer: Optimizer,
    *,
    compensated: bool,
    seed: int = 0,
    later: Set[Tensor] = frozenset(),
    who: str = "step_in_float32",
) -> int:
    """Change the class of ``optimizer``, in place, to one that steps bfloat16 parameters in float32.

    Other parameters step as before. Groups, schedulers and hooks stay.

    Args:
        optimizer: Optimizer whose step treats each parameter independently.
        compensated: Keep a bfloat16 compensation of each parameter in the state, instead of rounding stochastically.
        seed: Seed of the random draws.
        later: Frozen parameters that will train later. They count as trained.
        who: Name at the beginning of error messages.

    Returns:
        Number of elements of the bfloat16 parameters that train.

    Raises:
        ConfigurationError: For LBFGS and for paged states.
        NoEffectError: If no parameter that trains is bfloat16.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(f"{who}: LBFGS keeps one state for all parameters; use another optimizer")
    if getattr(optimizer, "is_paged", False):
        raise ConfigurationError(f"{who}: paged states cannot be replaced by float32 copies: use paged=False")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [p for p in parameters if p.requires_grad or p in later]
    count = sum(p.numel() for p in trained if p.dtype is torch.bfloat16)
    if not count:
        found = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trained}))
        raise NoEffectError(
            f"{who}: no parameter that {type(optimizer).__name__} trains is bfloat16 (there is {found or 'none'}), so "
            f"no update is lost: leave {who} out, or use precision: bf16-true"
        )
    kind: Any = type(optimizer)
    if not issubclass(kind, Streamed | InBackward):  # these have been tried
        check_independent(optimizer, who, wide=True)
    if issubclass(kind, Streamed):
        # The float32 step goes inside, so that only the piece on the device exists in float32.
        inner = kind.__mro__[1]
        changed: Any = _float32(inner)
        change_class(optimizer, streamed(changed))
    else:
        change_class(optimizer, _float32(kind))
    places = {p: place for place, p in enumerate(parameters)}
    optimizer.rounding = Rounding(compensated, seed, who=who, places=places)  # type: ignore[attr-defined]
    optimizer.register_step_post_hook(_count)
    return count


def _count(optimizer: Any, *_: object) -> None:
    optimizer.rounding.step += 1


@functools.cache
def _float32(base: type[Optimizer]) -> type[Optimizer]:
    """Return a subclass of ``base``, with its name, that steps bfloat16 parameters as float32 copies."""
    inner = unhooked(base)  # hooks must run once a step, not once a piece

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        loss = loss_of(closure)
        who = self.rounding.who
        for group in self.param_groups:
            parameters = with_gradient(group)
            others = [p for p in parameters if p.dtype is not torch.bfloat16]
            if others:
                check_unchanged(self, step_some(self, inner, group, others), who)
            for piece in pieces([p for p in parameters if p.dtype is torch.bfloat16], _PIECE):
                wide = {p: _widened(self, p) for p in piece}
                try:
                    with _same_settings(self, wide):
                        check_unchanged(self, step_some(self, inner, group, [*wide.values()]), who)
                    for p, copy in wide.items():
                        _store(self, p, copy)
                finally:
                    for copy in wide.values():  # left over after an error
                        self.state.pop(copy, None)
        return loss

    return with_step(base, Float32Step, step)


@contextmanager
def _same_settings(optimizer: object, wide: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Apply settings of single parameters to their float32 copies.

    Optimizers keep such settings in attributes that are sets of parameters or dicts with parameters as keys.
    """
    before = {}
    for name, value in vars(optimizer).items():
        if isinstance(value, Set | dict) and name not in ("state", "defaults"):
            before[name] = value
    for name, value in before.items():
        named = [(p, copy) for p, copy in wide.items() if p in value]
        if isinstance(value, dict):
            setattr(optimizer, name, value | {copy: value[p] for p, copy in named})
        else:
            setattr(optimizer, name, value | {copy for _, copy in named})
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(optimizer, name, value)


def _widened(optimizer: Any, p: Tensor) -> Tensor:
    """Return a float32 copy of a parameter that has its gradient, and float32 copies of its states."""
    copy = p.detach().float()
    assert p.grad is not None  # `with_gradient` has looked
    copy.grad = p.grad.float()
    state = dict(optimizer.state.get(p) or {})
    if COMPENSATION in state:
        local(copy).add_(local(state.pop(COMPENSATION)))
    if state:
        optimizer.state[copy] = {
            key: value.float() if _casts(optimizer, key, value, torch.bfloat16) else value
            for key, value in state.items()
        }
    return copy


def _store(optimizer: Any, p: Tensor, copy: Tensor) -> None:
    """Round the stepped copy and its states into the parameter and its states, in place if they exist."""
    rounding: Rounding = optimizer.rounding
    generator = rounding.generator(p)
    state = optimizer.state[p]
    stepped = optimizer.state.pop(copy, {})
    copy.grad = None  # its memory is needed for the draws
    for key in sorted(stepped):
        value = stepped.pop(key)
        if not _casts(optimizer, key, value, torch.float32):
            state[key] = value
        elif is_traceable_wrapper_subclass(local(value)):
            state[key] = value.to(p.dtype)  # quantised: only the dtype that it claims changes, not its codes
        else:
            if key not in state or state[key].shape != value.shape or state[key].dtype != p.dtype:
                state[key] = torch.empty_like(value, dtype=p.dtype)
            local(state[key]).copy_(round_stochastically(local(value), generator))
    weight = local(p)
    exact = local(copy)
    if not rounding.compensated:
        weight.copy_(round_stochastically(exact, generator))
        return
    if COMPENSATION not in state:
        state[COMPENSATION] = torch.zeros_like(p, requires_grad=False)
    weight.copy_(exact)
    local(state[COMPENSATION]).copy_(round_stochastically(exact.sub_(weight), generator))


def _casts(optimizer: Optimizer, key: str, value: object, dtype: torch.dtype) -> bool:
    """Return whether a state is a tensor of a dtype that ``load_state_dict`` casts to the dtype of the parameter."""
    if key == "step" or key in getattr(optimizer, "non_castable_tensor_keys", ()):
        return False
    return isinstance(value, Tensor) and value.dtype is dtype
