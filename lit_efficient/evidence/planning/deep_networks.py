"""Steps of a deep network, from those of two shallower ones: bytes and operations grow by as much with each block.

    v(n) = v(b) + (n - b) (v(b) - v(a)) / (b - a),    by kind, at the highest point of each phase of the step

The peak is the highest of the phases at n blocks, which may be another one than at b.
"""

from collections.abc import Mapping
from dataclasses import replace

from lit_efficient.evidence.memory_kinds import KINDS, Moment, StepMemory
from lit_efficient.evidence.planning.traced_step import Traced

FEW, MORE = 4, 8  # blocks that are traced
MANY = 24  # blocks, from which on not all are


def deepened(few: Traced, more: Traced, blocks: int) -> Traced:
    """What a step of ``blocks`` blocks takes, from one of ``FEW`` and one of ``MORE``."""
    factor = (blocks - MORE) / (MORE - FEW)

    def line(a: float, b: float) -> int:
        return max(0, round(b + factor * (b - a)))

    def kinds(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
        found = {kind: line(a.get(kind, 0), b.get(kind, 0)) for kind in KINDS}
        return {kind: size for kind, size in found.items() if size}

    a, b = few.memory, more.memory
    tops_a, tops_b = (_tops(memory) for memory in (a, b))
    tops = [Moment(name, kinds(tops_a[name], tops_b[name])) for name in tops_b if name in tops_a]
    top = max(tops, key=lambda moment: moment.bytes)
    memory = StepMemory(top.bytes, top.kinds, kinds(a.resident, b.resident), line(a.host, b.host), tuple(tops))
    note = (
        f"{MORE} and {FEW} of the {blocks} blocks, which are alike, were traced, and what each adds is counted as "
        f"often as it is there; what is said of techniques is of {MORE}."
    )
    return replace(
        more,
        memory=memory,
        flops=line(few.flops, more.flops),
        parameters=line(few.parameters, more.parameters),
        trainable=line(few.trainable, more.trainable),
        notes=[*more.notes, note],
    )


def _tops(memory: StepMemory) -> dict[str, Mapping[str, int]]:
    """The highest point of each phase, by kind."""
    found: dict[str, Moment] = {}
    for moment in memory.timeline:
        if moment.name not in found or moment.bytes > found[moment.name].bytes:
            found[moment.name] = moment
    return {name: moment.kinds for name, moment in found.items()}
