"""Discriminative learning rates: parameter groups are split into parts with proportional rates, under any scheduler.

    rate of part k = rate of the group / decay^k

The optimizer and its schedulers stay the same objects. The values that schedulers keep for each group (base rates,
bounds, factors, momenta) are split too. ``eta_min`` of the cosine schedules is one number for all groups.

Source: Howard and Ruder (2018), https://arxiv.org/abs/1801.06146, section 3.2
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.contents import contents
from lit_efficient.internals.torch_optimizers import LAST_RATES
from lit_efficient.surgery import inner_optimizer, match_modules

_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")  # keys of a group; schedulers add all but the first
_RATES_BY_GROUP = ("base_lrs", LAST_RATES, "min_lrs", "max_lrs")  # attributes of a scheduler
_OTHERS_BY_GROUP = ("lr_lambdas", "base_momentums", "max_momentums")


def discriminative_rates(rate: float, groups: int, decay: float = 2.6) -> list[float]:
    """Return the learning rates of ``groups`` groups from head to stem: ``rate / decay**k``."""
    return [rate / decay**k for k in range(groups)]


def split_groups(
    optimizer: Optimizer,
    schedulers: Iterable[object],
    part_of: Callable[[Tensor], int],
    decay: float | Sequence[float] = 2.6,
    *,
    who: str = "split_groups",
) -> None:
    """Split each group of ``optimizer`` by part, and divide the rates of part k by ``decay**k``, also in schedulers.

    A group whose parameters are all in part 0 does not change. Each part keeps the options of its group. The number of
    the part is appended to the name of the group.

    Args:
        optimizer: Optimizer before its first step. It is changed in place.
        schedulers: All schedulers of the optimizer. Nested ones are found.
        part_of: Function of a parameter to the number of its part, from 0.
        decay: Ratio of the rates of consecutive parts, above 0, or one factor for each part.
        who: Name of the technique at the beginning of error messages.

    Raises:
        ConfigurationError: For an optimizer that treats all parameters as one (LBFGS) or keeps tensors of its
            groups outside of ``state``, a scheduler that is not derived from torch's base class, or one whose
            ``eta_min`` is above the rate of a part.
    """
    parts = [_parts(group["params"], part_of) for group in optimizer.param_groups]
    if all(list(one) == [0] for one in parts):
        return
    if type(optimizer).__name__ == "LBFGS":
        raise ConfigurationError(f"{who}: LBFGS keeps one state for all parameters and has no groups: use another")
    name, inner = inner_optimizer(optimizer)
    if inner is not None and inner.param_groups is not optimizer.param_groups:
        raise ConfigurationError(
            f"{who}: {type(optimizer).__name__} contains another optimizer ({name}: {type(inner).__name__}) with "
            f"groups of its own, which would not be split: let both share the list, or leave {who} out"
        )
    if any(group["lr"] is None for group in optimizer.param_groups):
        raise ConfigurationError(f"{who}: {type(optimizer).__name__} sets its learning rates itself: pass lr")
    affected = [s for s in nested_schedulers(schedulers) if getattr(s, "optimizer", None) is optimizer]
    for scheduler in affected:
        if not isinstance(scheduler, LRScheduler):
            raise ConfigurationError(
                f"{who}: {type(scheduler).__name__} is no torch.optim.lr_scheduler.LRScheduler, so the values that it "
                "keeps for each parameter group cannot be split; use a scheduler of torch"
            )
    kept = _tensors_of_groups(optimizer)
    if kept is not None:
        raise ConfigurationError(
            f"{who}: {type(optimizer).__name__} keeps tensors of its groups in {kept!r}, which would not be split: "
            f"keep them in optimizer.state, or leave {who} out"
        )
    sources = [(i, k) for i, one in enumerate(parts) for k in one]  # old group and part of each new group
    optimizer.param_groups[:] = [_part(optimizer.param_groups[i], parts[i], k, decay) for i, k in sources]
    for scheduler in affected:
        _split_scheduler(scheduler, len(parts), sources, decay)
        floor = getattr(scheduler, "eta_min", 0.0)
        lowest = min(map(float, getattr(scheduler, "base_lrs", [floor])))
        if floor > lowest:
            way_out = "use a smaller eta_min"
            if isinstance(decay, int | float):
                way_out += f" or a decay below {decay:g}"
            raise ConfigurationError(
                f"{who}: {type(scheduler).__name__}(eta_min={floor:g}) is above the rate {lowest:g} of the deepest "
                f"group, whose rate would rise: {way_out}"
            )


def multiply_rates(
    optimizer: Optimizer, schedulers: Iterable[object], module: nn.Module, rates: Mapping[str, float], *, who: str
) -> None:
    """Multiply the learning rates of parts of a module by factors, as :func:`split_groups` does.

    Args:
        optimizer: Optimizer before its first step. It is changed in place.
        schedulers: All schedulers of the optimizer.
        module: The module.
        rates: Factors by regular expressions for the ends of modules' dotted names. Of several that match, the last one
            counts.
        who: Name of the technique and its argument at the beginning of error messages.

    Raises:
        ConfigurationError: If a pattern matches no module, and as for :func:`split_groups`.
    """
    part_of: dict[int, int] = {}
    for number, pattern in enumerate(rates, start=1):
        for _, found in match_modules(module, [pattern], who=who):
            part_of |= dict.fromkeys(map(id, found.parameters()), number)
    split_groups(optimizer, schedulers, lambda p: part_of.get(id(p), 0), [1.0, *rates.values()], who=who)


def _tensors_of_groups(optimizer: Optimizer) -> str | None:
    """Return the name of a list outside of ``state`` with tensors of each group or parameter, or ``None``."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for group in optimizer.param_groups:
        for name, value in group.items():
            if _holds_others(contents(value), own):
                return name
    for name, value in vars(optimizer).items():
        held = contents(value)
        if name != "param_groups" and len(held) == len(optimizer.param_groups) and _holds_others(held, own):
            return name
    return None


def _holds_others(held: list[Any], own: Set[int]) -> bool:
    """Return whether a container, or one in it, holds a tensor that is no number and no parameter of the optimizer."""
    tensors = [one for one in held if isinstance(one, Tensor)]
    if any(one.ndim and id(one) not in own for one in tensors):
        return True
    return any(_holds_others(contents(one), own) for one in held)


def nested_schedulers(schedulers: Iterable[object]) -> Iterator[Any]:
    """Yield schedulers and the schedulers that they contain (``SequentialLR``, warm-up wrappers), each once."""
    seen: set[int] = set()
    stack = list(schedulers)
    while stack:
        scheduler = stack.pop()
        if id(scheduler) in seen:
            continue
        seen.add(id(scheduler))
        yield scheduler
        for value in vars(scheduler).values():
            if issubclass(type(value), LRScheduler):
                inner = [value]
            else:
                inner = contents(value)
            stack += [item for item in inner if issubclass(type(item), LRScheduler)]


def _parts(parameters: list[Tensor], part_of: Callable[[Tensor], int]) -> dict[int, list[int]]:
    """Return the positions of the parameters of each part, head first."""
    parts: dict[int, list[int]] = {}
    for i, parameter in enumerate(parameters):
        parts.setdefault(part_of(parameter), []).append(i)
    return dict(sorted(parts.items()))


def _part(
    group: dict[str, Any], parts: dict[int, list[int]], k: int, decay: float | Sequence[float]
) -> dict[str, object]:
    """Return the group of part ``k``."""
    part = {key: _lower(value, k, decay) if key in _RATES else value for key, value in group.items()}
    for key in ("params", "param_names"):
        if key in group:
            part[key] = [group[key][i] for i in parts[k]]
    if "name" in group and len(parts) > 1:  # LearningRateMonitor needs different names
        part["name"] = f"{group['name']}/{k}"
    return part


def _split_scheduler(
    scheduler: object, groups: int, sources: list[tuple[int, int]], decay: float | Sequence[float]
) -> None:
    """Split the lists of a scheduler that have one element for each of the old ``groups``."""
    for name in (*_RATES_BY_GROUP, *_OTHERS_BY_GROUP):
        old = vars(scheduler).get(name)
        if not isinstance(old, list | tuple) or len(old) != groups:
            continue
        if name in _RATES_BY_GROUP:
            setattr(scheduler, name, [_lower(old[i], k, decay) for i, k in sources])
        else:
            setattr(scheduler, name, [old[i] for i, _ in sources])


def _lower(rate: Any, k: int, decay: float | Sequence[float]) -> object:
    """Return the rate of part k. A tensor is always a new one, because schedulers change it in place."""
    if isinstance(decay, int | float):
        return rate / decay**k
    return rate * decay[k]
