"""A plan for one of several devices: what a strategy of data parallelism keeps there, by ideal shares.

    DDP     all of it, and the buckets in which gradients travel, as large as the gradients
    FSDP    (weights + adapters + gradients + states + averages) / N, and what is gathered: twice the weights of the
            largest unit, once its gradients

A unit is a block, or all that lies outside of blocks. Each device has a batch of its own, as large as the config's.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.lightning_strategies import Traits
from lit_efficient.mechanisms.blocks.finding import find_blocks

if TYPE_CHECKING:
    from lit_efficient.evidence.plan import Plan

MOST = 4096  # devices
_SHARDED = ("weights", "adapters", "gradients", "states", "averages")


def per_device(plan: "Plan", devices: int, traits: Traits, unit: tuple[int, int] = (0, 0)) -> "Plan":
    """The plan of one device of several.

    Args:
        plan: That of one device alone.
        devices: How many there are, at least 1.
        traits: Of the strategy.
        unit: Bytes of the weights and of the gradients of the largest unit that is gathered.
    """
    if devices == 1:
        return plan
    moments = (plan.kinds, *(moment.kinds for moment in plan.timeline))
    buckets = max(kinds.get("gradients", 0) for kinds in moments)
    sent = 2 * unit[0] + unit[1] if traits.shards else buckets

    def shared(kinds: Mapping[str, int]) -> dict[str, int]:
        parts = {kind: devices if traits.shards and kind in _SHARDED else 1 for kind in kinds}
        share = {kind: -(-size // parts[kind]) for kind, size in kinds.items()}
        return share | {"communication": share.get("communication", 0) + sent}

    timeline = tuple(replace(moment, kinds=shared(moment.kinds)) for moment in plan.timeline)
    top = max((shared(plan.kinds), *(moment.kinds for moment in timeline)), key=lambda kinds: sum(kinds.values()))
    return replace(
        plan,
        peak=sum(top.values()),
        kinds=top,
        resident=shared(plan.resident),
        timeline=timeline,
        notes=(*plan.notes, *_said(traits, devices)),
    )


def _said(traits: Traits, devices: int) -> list[str]:
    if not traits.shards:
        return [f"{traits.name}: each of {devices} devices has all of it, and buckets as large as the gradients"]
    return [
        f"{traits.name}: each of {devices} devices has 1/{devices} of {', '.join(_SHARDED)}, as if every tensor could "
        "be split evenly, and of the largest unit that is gathered twice the weights and once the gradients",
        "units are blocks, and the rest of the network: configure_model has to shard it so",
    ]


def least_devices(plan: "Plan", limit: int, traits: Traits, unit: tuple[int, int]) -> int | None:
    """The least number of devices on which each has room; ``None`` if there is none.

    Beyond one device more of them never need more of each, and so the interval is halved.
    """
    if plan.peak <= limit:
        return 1
    low, high = 1, MOST
    if per_device(plan, high, traits, unit).peak > limit:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if per_device(plan, middle, traits, unit).peak <= limit else (middle, high)
    return high


def largest_unit(module: Any) -> tuple[int, int]:
    """Bytes of the weights, and of the gradients, of the largest block, or of what lies outside of all blocks."""
    try:
        blocks = [block for _, block in find_blocks(module, who="plan")]
    except ConfigurationError:  # it is one unit
        blocks = []
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    rest = [parameter for parameter in module.parameters() if id(parameter) not in inside]
    units = [rest, *(list(block.parameters()) for block in blocks)]
    return max((_bytes(unit), _bytes([one for one in unit if one.requires_grad])) for unit in units)


def _bytes(unit: list[Any]) -> int:
    return sum(parameter.numel() * parameter.itemsize for parameter in unit)
