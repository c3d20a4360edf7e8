"""Trial of an optimizer: does its step treat each parameter independently?

Techniques that step some parameters at a time need that. Torch's optimizers and most others are independent. The step
of others depends on a norm of all gradients, on a state of all parameters, or on another optimizer inside of them.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError
from lit_efficient.optimizers.stepping import step_some, unhooked
from lit_efficient.surgery import inner_optimizer

_SAMPLE = 4  # longest side of the tensors in the trial

_Step = Callable[[Any], object]  # the step of an optimizer, without hooks and closure


def check_independent(optimizer: Optimizer, who: str, wide: bool = False) -> None:
    """Check that the step of an optimizer treats each parameter independently, on small tensors.

    Args:
        optimizer: The optimizer, which does not change.
        who: Name at the beginning of error messages.
        wide: Try it in float32 where parameters are bfloat16, if it will step float32 copies of them.

    Raises:
        ConfigurationError: If stepping them together and one by one gives different results or fails, and for an
            optimizer that contains another one.
    """
    name, inner = inner_optimizer(optimizer)
    if inner is not None:
        raise ConfigurationError(
            f"{who}: {type(optimizer).__name__} contains another optimizer ({name}: {type(inner).__name__}), which "
            f"steps all parameters at a time: use {type(inner).__name__} alone, or leave {who} out"
        )
    step = unhooked(type(optimizer))
    together = _try(optimizer, step, who, wide, together=True)
    alone = _try(optimizer, step, who, wide, together=False)
    for one, other in zip(together, alone, strict=True):
        tolerance = 8 * torch.finfo(one.dtype).eps  # some optimizers round stochastically
        if not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
            raise not_independent(optimizer, who)


def not_independent(optimizer: Optimizer, who: str) -> ConfigurationError:
    """Return the error of an optimizer whose step depends on several parameters."""
    return ConfigurationError(
        f"{who}: the step of {type(optimizer).__name__} treats its parameters together (a norm or a state of all), "
        f"and {who} steps some of them at a time: use another optimizer, or leave {who} out"
    )


def _try(optimizer: Optimizer, step: _Step, who: str, wide: bool, together: bool) -> list[Tensor]:
    """Step a small copy of an optimizer twice, with gradients of very different sizes, and return its tensors."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    with torch.random.fork_rng([device.index for device in devices if device.type == "cuda"]):
        torch.manual_seed(0)
        twin = _small_copy(optimizer, wide)
        tensors = [p for group in twin.param_groups for p in group["params"]]
        try:
            for _ in range(2):
                _step_once(twin, step, together)
        except Exception as error:
            raise ConfigurationError(
                f"{who}: {type(optimizer).__name__} cannot step parameters one by one: {error}"
            ) from error
    return [p.detach() for p in tensors]


def _step_once(twin: Any, step: _Step, together: bool) -> None:
    places = [(number, p) for number, group in enumerate(twin.param_groups) for p in group["params"]]
    gradients = []
    for i, (_, p) in enumerate(places):
        gradients.append(torch.sin(torch.arange(p.numel()) + i).view(p.shape).to(p) * (10 * (1 + i) ** 3))
    if together:
        for (_, p), gradient in zip(places, gradients, strict=True):
            p.grad = gradient
        step(twin)
        return
    written: dict[int, dict[str, object]] = {}
    for (number, p), gradient in reversed([*zip(places, gradients, strict=True)]):
        p.grad = gradient
        written[number] = step_some(twin, step, twin.param_groups[number], [p])
        p.grad = None
    for number, values in written.items():
        twin.param_groups[number].update(values)


def _small_copy(optimizer: Optimizer, wide: bool) -> Any:
    """Return a copy of an optimizer with a new state and two small tensors instead of the parameters of each group."""
    twin: Any = object.__new__(type(optimizer))
    for key, value in vars(optimizer).items():
        if key != "step":  # set by a scheduler, and would call the original
            vars(twin)[key] = value.copy() if isinstance(value, dict | list | set) else value
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        steppable = [p for p in group["params"] if p.is_floating_point()]  # quantised base weights are integers
        chosen = {p: _small(p, wide) for p in steppable[:1] + steppable[1:][-1:]}
        rate = {"lr": 0.1} if "lr" in group else {}
        twin.param_groups.append({**group, "params": [*chosen.values()], **rate})
        for p, small in chosen.items():
            if optimizer.state.get(p):  # some optimizers create states before the first step
                twin.state[small] = {key: _cut(value, p, wide) for key, value in optimizer.state[p].items()}
    if callable(getattr(twin, "train", None)):  # schedule-free optimizers only step in training mode
        twin.train()
    return twin


def _small(p: Tensor, wide: bool) -> Tensor:
    dtype = torch.float32 if wide and p.dtype is torch.bfloat16 else p.dtype
    device = torch.device("cpu") if p.is_meta else p.device  # meta tensors have no values to compare
    like = torch.empty([min(side, _SAMPLE) for side in p.shape], dtype=dtype, device=device)
    return torch.nn.Parameter(like.copy_(torch.arange(like.numel()).cos().view(like.shape)))


def _cut(value: object, p: Tensor, wide: bool) -> object:
    """Return a state of a parameter for the small tensor that replaces it."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == p.shape:
        value = value[tuple(slice(_SAMPLE) for _ in p.shape)]
    if wide and value.dtype is torch.bfloat16:
        return value.float()
    return value.clone()
