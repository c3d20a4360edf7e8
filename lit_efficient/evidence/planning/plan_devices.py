"""Plan for one of several devices: its share of the memory under a strategy of data parallelism, if splits are ideal.

    DDP     all of it, and gradient buckets as large as the gradients. If gradients are views of the buckets, they
            count once, and during communication one and a half times the size of a bucket more.
    FSDP    (weights + adapters + gradients + states + averages) / N, and in forward and backward passes the gathered
            weights outside of all units, and the weights and gradients of the largest unit

A unit is a block, and if the strategy shards by itself also an embedding or a head. Each device has a batch of the
configured size. `benchmarks/plan_ranks.py` compares these rules with measurements. Offloaded shards are in host memory,
and the device holds what is gathered.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import yaml
from torch import nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.memory_kinds import Moment
from lit_efficient.internals.lightning_strategies import Traits, traits_named
from lit_efficient.mechanisms.blocks.block_map import find_blocks

if TYPE_CHECKING:
    from lit_efficient.evidence.planning.plan import Plan

MOST = 4096  # devices
_BUCKET = 25 * 2**20  # bytes of gradients that are sent together
# Sharded kinds of memory by the stage of ZeRO.
_SHARDED = {1: ("states",), 2: ("gradients", "states"), 3: ("weights", "adapters", "gradients", "states", "averages")}


# Strategies for several devices, the one that costs the least time first.
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"class_path": "lit_efficient.ReplicatedStrategy"},
    {"class_path": "lit_efficient.ZeroStrategy", "init_args": {"stage": 1}},
    {"class_path": "lit_efficient.ZeroStrategy", "init_args": {"stage": 2}},
    {"class_path": "lit_efficient.ShardedStrategy"},
    {"class_path": "lit_efficient.ZeroStrategy", "init_args": {"stage": 3}},
    {"class_path": "lit_efficient.ShardedStrategy", "init_args": {"offload": True}},
    {"class_path": "lit_efficient.ZeroStrategy", "init_args": {"stage": 3, "states_on": "cpu", "weights_on": "cpu"}},
)


@dataclass(frozen=True)
class Choice:
    """A strategy for several devices.

    Args:
        strategy: The strategy as in a config.
        plan: Plan of each device.
        yaml: Config to lay over that of the fit.
    """

    strategy: Mapping[str, Any]
    plan: "Plan"
    yaml: str

    @property
    def name(self) -> str:
        """The class and its arguments on one line."""
        arguments = ", ".join(f"{name}={value}" for name, value in self.strategy.get("init_args", {}).items())
        return f"{self.strategy['class_path'].rpartition('.')[2]}({arguments})"

    @property
    def installed(self) -> bool:
        """False if the strategy needs DeepSpeed, which is not installed."""
        return "Zero" not in self.strategy["class_path"] or find_spec("deepspeed") is not None


def choices(plan: "Plan", devices: int, module: nn.Module, precision: str = "") -> list[Choice]:
    """Return all of :data:`STRATEGIES` with their plans.

    Args:
        plan: Plan of a single device.
        devices: Number of devices, at least 2.
        module: The network.
        precision: The trainer's precision.
    """
    found = []
    for strategy in STRATEGIES:
        traits = traits_named(strategy)
        gathered = 0
        if traits.shards:
            gathered = gathered_bytes(module, traits, precision)
        arguments = strategy.get("init_args", {})
        offloads = bool(arguments.get("offload") or arguments.get("weights_on"))
        shared = per_device(plan, devices, traits, gathered, offloads)
        text = yaml.safe_dump({"trainer": {"devices": devices, "strategy": dict(strategy)}}, sort_keys=False)
        found.append(Choice(strategy, shared, text))
    return found


def per_device(plan: "Plan", devices: int, traits: Traits, gathered: int = 0, offloads: bool = False) -> "Plan":
    """Return the plan of one of several devices.

    Args:
        plan: Plan of a single device.
        devices: Number of devices.
        traits: Traits of the strategy.
        gathered: Result of :func:`gathered_bytes`.
        offloads: Keep the shards in host memory.
    """
    if devices == 1:
        return plan
    buckets = max(moment.kinds.get("gradients", 0) for moment in (Moment("", plan.kinds), *plan.timeline))
    sharded: tuple[str, ...] = ()
    if traits.shards:
        sharded = _SHARDED.get(traits.stage, ())

    def shared(moment: Moment) -> Moment:
        found = {}
        for kind, size in moment.kinds.items():
            found[kind] = size
            if kind in sharded:
                found[kind] = 0 if offloads else -(-size // devices)
        sent = 0
        # Communication buffers exist only while gradients or weights travel.
        if traits.shards:
            if traits.stage == 3 and moment.name in ("forward", "backward"):
                sent = gathered
        elif traits.views:
            found["gradients"] = buckets
            # One bucket is sent while the next one is filled.
            travels = min(buckets, _BUCKET)
            if moment.name == "backward" and moment.kinds.get("gradients", 0) >= travels:
                sent = 3 * travels // 2
        else:
            sent = buckets
        return Moment(moment.name, found | {"communication": found.get("communication", 0) + sent})

    timeline = tuple(shared(moment) for moment in plan.timeline)
    host = plan.host
    if offloads:
        host += max(sum(moment.kinds.get(kind, 0) for kind in sharded) for moment in plan.timeline) // devices
    top = max(timeline or [shared(Moment("forward", plan.kinds))], key=lambda moment: moment.bytes)
    return replace(
        plan,
        peak=top.bytes,
        kinds=top.kinds,
        resident=shared(Moment("between steps", plan.resident)).kinds,
        host=host,
        timeline=timeline,
        notes=(*plan.notes, *_notes(traits, devices)),
    )


def _notes(traits: Traits, devices: int) -> list[str]:
    if not traits.shards:
        how = "buckets as large as the gradients"
        if traits.views:
            how = "gradients that are views of buckets"
        return [f"{traits.name}: each of {devices} devices has all of it, and {how}."]
    notes = [
        f"{traits.name}: each of {devices} devices has 1/{devices} of {', '.join(_SHARDED.get(traits.stage, ()))}, as "
        "if every tensor could be split evenly, and the weights and gradients of the largest unit that is gathered."
    ]
    if not traits.shards_itself:
        notes.append("Units are the blocks, and the rest of the network: configure_model must shard them in this way.")
    return notes


def least_devices(plan: "Plan", limit: int, traits: Traits, gathered: int) -> int | None:
    """Return the smallest number of devices on which the plan fits; ``None`` if there is none up to :data:`MOST`."""
    if plan.peak <= limit:
        return 1
    low = 1
    high = MOST
    if per_device(plan, high, traits, gathered).peak > limit:
        return None
    # From two devices on, more of them never need more memory each.
    while high - low > 1:
        middle = (low + high) // 2
        if per_device(plan, middle, traits, gathered).peak <= limit:
            high = middle
        else:
            low = middle
    return high


def gathered_bytes(module: nn.Module, traits: Traits, precision: str = "") -> int:
    """Return the most bytes of a network that a process gathers at a time.

    Args:
        module: The network.
        traits: Traits of the strategy.
        precision: The trainer's precision. A strategy that shards by itself gathers in bfloat16 under ``bf16-mixed``.
    """
    units: list[nn.Module] = []
    with contextlib.suppress(ConfigurationError):  # without blocks, the network is one unit
        units = [block for _, block in find_blocks(module, who="plan", every=True)]
    if traits.shards_itself:
        from lit_efficient.distributed.units import ends_of, owns_its_parameters

        units += ends_of(module, units)[0]
        units = [unit for unit in units if owns_its_parameters(unit, module)]
    # Parameters outside of all units stay gathered during the whole step.
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    rest, rest_gradients = _bytes(parameter for parameter in module.parameters() if id(parameter) not in inside)
    found = rest + max([rest_gradients, *(sum(_bytes(unit.parameters())) for unit in units)])
    if traits.shards_itself and precision == "bf16-mixed":
        return found // 2
    return found


def _bytes(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """Return the bytes of parameters, and of their gradients."""
    weights = 0
    gradients = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.itemsize
        weights += size
        if parameter.requires_grad:
            gradients += size
    return weights, gradients
