"""Discriminative learning rates: one group of an optimizer becomes several, in proportion, under any scheduler.

    rate of part k = rate of the group / decay^k

The optimizer stays the same object, and so do its schedulers: what they remember of each group (base rates, bounds,
factors, momenta) is split along with it. ``eta_min`` of the cosine schedules is one number for all groups.

Source: Howard and Ruder (2018), https://arxiv.org/abs/1801.06146, section 3.2
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_optimizers import LAST_RATES

_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # in a group; schedulers put all but the first there
_RATES_BY_GROUP = ("base_lrs", LAST_RATES, "min_lrs", "max_lrs")  # in a scheduler
_OTHERS_BY_GROUP = ("lr_lambdas", "base_momentums", "max_momentums")


def discriminative_rates(rate: float, groups: int, decay: float = 2.6) -> list[float]:
    """Learning rates of ``groups`` groups from head to stem: ``rate / decay**k``."""
    return [rate / decay**k for k in range(groups)]


def split_groups(
    optimizer: Optimizer,
    schedulers: Iterable[Any],
    part_of: Callable[[Tensor], int],
    decay: float | Sequence[float] = 2.6,
    *,
    who: str = "split_groups",
) -> None:
    """Split each group of ``optimizer`` by part, and divide the rates of part k by ``decay**k``, schedulers included.

    A group all of which is in part 0 stays as it is. Of other groups, each part keeps every option; a group's name gets
    the part's number behind it.

    Args:
        optimizer: An optimizer that has not stepped yet; it is changed in place.
        schedulers: All that point at it; nested ones are found.
        part_of: Number of a parameter's part, from 0.
        decay: Quotient of the rates of one part and the next, above 0; or factors of the rates, one a part.
        who: Name of the technique that asks, for the error.

    Raises:
        ConfigurationError: For an optimizer that treats all parameters as one (LBFGS), a scheduler that is not one of
            torch's or built on its base class, or one whose ``eta_min`` is above the rate of a part.
    """
    parts = [_parts(group["params"], part_of) for group in optimizer.param_groups]
    if all(list(one) == [0] for one in parts):
        return
    if type(optimizer).__name__ == "LBFGS":
        raise ConfigurationError(f"{who}: LBFGS keeps one state for all parameters, which has no groups: use another")
    if any(group["lr"] is None for group in optimizer.param_groups):
        raise ConfigurationError(f"{who}: {type(optimizer).__name__} sets its rates by itself: give it a learning rate")
    affected = [s for s in nested_schedulers(schedulers) if getattr(s, "optimizer", None) is optimizer]
    for scheduler in affected:
        if not isinstance(scheduler, LRScheduler):
            raise ConfigurationError(
                f"{who}: {type(scheduler).__name__} is no torch.optim.lr_scheduler.LRScheduler: what it keeps of each "
                "parameter group is unknown, so groups cannot be split under it; use one of torch's"
            )
    sources = [(i, k) for i, one in enumerate(parts) for k in one]  # of each new group: its old one, and its part
    optimizer.param_groups[:] = [_part(optimizer.param_groups[i], parts[i], k, decay) for i, k in sources]
    for scheduler in affected:
        _split_scheduler(scheduler, len(parts), sources, decay)
        floor = getattr(scheduler, "eta_min", 0.0)
        lowest = min(map(float, getattr(scheduler, "base_lrs", [floor])))
        if floor > lowest:
            raise ConfigurationError(
                f"{who}: {type(scheduler).__name__}(eta_min={floor:g}) is above the rate {lowest:g} of the deepest "
                "group, which would rise towards it: use a smaller eta_min"
                + (f" or a decay below {decay:g}" if isinstance(decay, int | float) else "")
            )


def nested_schedulers(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Each scheduler once, and those that it holds (``SequentialLR``, ``ChainedScheduler``, warm-up wrappers)."""
    seen: set[int] = set()
    stack = list(schedulers)
    while stack:
        scheduler = stack.pop()
        if id(scheduler) in seen:
            continue
        seen.add(id(scheduler))
        yield scheduler
        for value in vars(scheduler).values():
            inner = value if isinstance(value, list | tuple) else (value,)
            stack.extend(item for item in inner if isinstance(item, LRScheduler))


def _parts(parameters: list[Tensor], part_of: Callable[[Tensor], int]) -> dict[int, list[int]]:
    """Positions of the parameters of each part, head first."""
    parts: dict[int, list[int]] = {}
    for i, parameter in enumerate(parameters):
        parts.setdefault(part_of(parameter), []).append(i)
    return dict(sorted(parts.items()))


def _part(group: dict[str, Any], parts: dict[int, list[int]], k: int, decay: float | Sequence[float]) -> dict[str, Any]:
    part = {key: _lower(value, k, decay) if key in _RATES else value for key, value in group.items()}
    for key in ("params", "param_names"):
        if key in group:
            part[key] = [group[key][i] for i in parts[k]]
    if "name" in group and len(parts) > 1:  # LearningRateMonitor asks for different names
        part["name"] = f"{group['name']}/{k}"
    return part


def _split_scheduler(
    scheduler: Any, groups: int, sources: list[tuple[int, int]], decay: float | Sequence[float]
) -> None:
    for name in (*_RATES_BY_GROUP, *_OTHERS_BY_GROUP):
        old = vars(scheduler).get(name)
        if isinstance(old, list | tuple) and len(old) == groups:
            lowered = name in _RATES_BY_GROUP
            setattr(scheduler, name, [_lower(old[i], k, decay) if lowered else old[i] for i, k in sources])


def _lower(rate: Any, k: int, decay: float | Sequence[float]) -> Any:
    """The rate of part k; a tensor is always a new one: schedulers fill it in place."""
    return rate / decay**k if isinstance(decay, int | float) else rate * decay[k]
