"""A plan for one of several devices: what a strategy of data parallelism keeps there, by ideal shares.

    DDP     all of it, and the buckets in which gradients travel, as large as the gradients; where gradients are views
            of them once, and while they travel once and a half again what travels together
    FSDP    (weights + adapters + gradients + states + averages) / N, and in forward and backward passes what is
            gathered: the rest's weights, and of the largest unit weights and gradients

A unit is a block, where the strategy shards by itself an embedding or a head, too; the rest lies outside of all. Each
device has a batch of its own, as large as the config's. `benchmarks/plan_ranks.py` measures all this.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.memory_kinds import Moment
from lit_efficient.internals.lightning_strategies import Traits
from lit_efficient.mechanisms.blocks.block_map import find_blocks

if TYPE_CHECKING:
    from lit_efficient.evidence.planning.plan import Plan

MOST = 4096  # devices
_BUCKET = 25 * 2**20  # bytes of gradients that travel together
# By stage, what is sharded.
_SHARDED = {1: ("states",), 2: ("gradients", "states"), 3: ("weights", "adapters", "gradients", "states", "averages")}


def per_device(plan: "Plan", devices: int, traits: Traits, gathered: int = 0) -> "Plan":
    """The plan of one device of several, from that of one device alone and the bytes of :func:`gathered_bytes`."""
    if devices == 1:
        return plan
    buckets = max(kinds.get("gradients", 0) for kinds in (plan.kinds, *(moment.kinds for moment in plan.timeline)))

    sharded = _SHARDED.get(traits.stage, ()) if traits.shards else ()

    def shared(moment: Moment) -> Moment:
        computes = moment.name in ("forward", "backward")
        found = {kind: -(-size // (devices if kind in sharded else 1)) for kind, size in moment.kinds.items()}
        if traits.shards:
            sent = gathered if computes and traits.stage == 3 else 0
        elif traits.views:
            found["gradients"] = buckets
            travels = min(buckets, _BUCKET)
            sent = 3 * travels // 2 if moment.name == "backward" and moment.kinds.get("gradients", 0) >= travels else 0
        else:
            sent = buckets
        return Moment(moment.name, found | {"communication": found.get("communication", 0) + sent})

    timeline = tuple(map(shared, plan.timeline))
    top = max(timeline or [shared(Moment("forward", plan.kinds))], key=lambda moment: moment.bytes).kinds
    return replace(
        plan,
        peak=sum(top.values()),
        kinds=top,
        resident=shared(Moment("between steps", plan.resident)).kinds,
        timeline=timeline,
        notes=(*plan.notes, *_said(traits, devices)),
    )


def _said(traits: Traits, devices: int) -> list[str]:
    if not traits.shards:
        how = "gradients that are views of buckets" if traits.views else "buckets as large as the gradients"
        return [f"{traits.name}: each of {devices} devices has all of it, and {how}"]
    shared = ", ".join(_SHARDED.get(traits.stage, ()))
    said = (
        f"{traits.name}: each of {devices} devices has 1/{devices} of {shared}, as if every tensor could "
        "be split evenly, and of the largest unit that is gathered the weights and gradients"
    )
    unsure = "units are blocks, and the rest of the network: configure_model has to shard it so"
    return [said] if traits.shards_itself else [said, unsure]


def least_devices(plan: "Plan", limit: int, traits: Traits, gathered: int) -> int | None:
    """The least number of devices on which each has room; ``None`` if there is none.

    Beyond one device more of them never need more of each, and so the interval is halved.
    """
    if plan.peak <= limit:
        return 1
    low, high = 1, MOST
    if per_device(plan, high, traits, gathered).peak > limit:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if per_device(plan, middle, traits, gathered).peak <= limit else (middle, high)
    return high


def gathered_bytes(module: Any, traits: Traits, precision: str = "") -> int:
    """Bytes of what a process gathers of a network at a time, in a precision as a trainer takes it."""
    try:
        units = [block for _, block in find_blocks(module, who="plan", every=True)]
    except ConfigurationError:  # it is one unit
        units = []
    if traits.shards_itself:
        from lit_efficient.strategies.sharded_strategy import ends_of, owns_its_parameters

        units = [unit for unit in (*units, *ends_of(module, units)[0]) if owns_its_parameters(unit, module)]
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    rest, rest_gradients = _bytes([parameter for parameter in module.parameters() if id(parameter) not in inside])
    found = rest + max([rest_gradients, *(sum(_bytes([*unit.parameters()])) for unit in units)])
    return found // 2 if traits.shards_itself and precision == "bf16-mixed" else found


def _bytes(unit: list[Any]) -> tuple[int, int]:
    """Of its weights, and of their gradients."""
    sizes = [(parameter.numel() * parameter.itemsize, parameter.requires_grad) for parameter in unit]
    return sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)
