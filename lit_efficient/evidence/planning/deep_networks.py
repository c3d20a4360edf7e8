"""Steps of a deep network, from those of two shallower ones: bytes and operations grow by as much with each block.

    v(n) = v(b) + (n - b) (v(b) - v(a)) / (b - a),    by kind, at the highest points of each phase of the step

The peak is the highest of these points at n blocks, which may be another one than at b. The end of a backward pass,
below the last half of a block, is a phase of its own: gradients arrive where activations leave.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

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
    tops_a, tops_b = _tops(a, FEW), _tops(b, MORE)
    tops = [Moment(part[0], kinds(tops_a[part], tops_b[part])) for part in tops_b if part in tops_a]
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


def _tops(memory: StepMemory, blocks: int) -> dict[tuple[str, bool], Mapping[str, int]]:
    """The highest point of each phase, and of the last half of a block of backward passes, by kind."""
    found: dict[tuple[str, bool], Moment] = {}
    for name, run in groupby(memory.timeline, key=lambda moment: moment.name):
        moments = [*run]
        for i, moment in enumerate(moments):
            part = (name, name == "backward" and 2 * blocks * (len(moments) - i) <= len(moments))
            if part not in found or moment.bytes > found[part].bytes:
                found[part] = moment
    return {part: moment.kinds for part, moment in found.items()}
