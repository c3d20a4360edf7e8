"""Steps of a deep network, extrapolated from two shallower ones: each block adds the same bytes and operations.

    v(n) = v(b) + (n - b) (v(b) - v(a)) / (b - a),    by kind, at the highest points of each phase of the step

The peak at n blocks is the highest of these points, which may be another one than at b blocks. Gradients grow in a
backward pass while activations shrink, so its highest point may be at its beginning in a shallow network and at its end
in a deep one. Three parts of it are separate phases therefore: a first quarter, the last half of a block, and the rest.
If some kind of memory would be negative at the peak nevertheless, the points are of different places in the network.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

from lit_efficient.evidence.memory_kinds import KINDS, Bytes, Moment, StepMemory
from lit_efficient.evidence.planning.traced_step import Traced

# Numbers of blocks that are traced.
FEW = 4
MORE = 8
MANY = 24  # number of blocks above which a network is extrapolated
_NEGLIGIBLE = 0.01  # share of the peak


def deepened(few: Traced, more: Traced, blocks: int) -> Traced | None:
    """Return the step of a network of ``blocks`` blocks, from those of ``FEW`` and ``MORE`` blocks.

    Returns:
        None if their highest points cannot be compared. All blocks must be traced then.
    """
    factor = (blocks - MORE) / (MORE - FEW)

    def line(a: float, b: float) -> int:
        return max(0, round(b + factor * (b - a)))

    def kinds(a: Bytes, b: Bytes) -> dict[str, int]:
        found = {kind: line(a.get(kind, 0), b.get(kind, 0)) for kind in KINDS}
        return {kind: size for kind, size in found.items() if size}

    a = few.memory
    b = more.memory
    tops_a = _tops(a, FEW)
    tops_b = _tops(b, MORE)
    # The peak of the deep network may be in another phase than that of the shallow ones.
    both = [part for part in tops_b if part in tops_a]
    tops = [Moment(part[0], kinds(tops_a[part], tops_b[part])) for part in both]
    top = max(tops, key=lambda moment: moment.bytes)
    part = both[tops.index(top)]
    unbounded = [tops_b[part].get(kind, 0) * (1 + factor) - tops_a[part].get(kind, 0) * factor for kind in KINDS]
    if min(unbounded) < -_NEGLIGIBLE * top.bytes:
        return None
    memory = StepMemory(top.bytes, top.kinds, kinds(a.resident, b.resident), line(a.host, b.host), tuple(tops))
    note = (
        f"Networks of {FEW} and {MORE} of the {blocks} equal blocks were traced, and the difference for each block was "
        "extrapolated."
    )
    return replace(
        more,
        memory=memory,
        flops=line(few.flops, more.flops),
        parameters=line(few.parameters, more.parameters),
        trainable=line(few.trainable, more.trainable),
        notes=[*more.notes, note],
        reported=f"{MORE} of the {blocks} blocks",
    )


def _tops(memory: StepMemory, blocks: int) -> Mapping[tuple[str, str], Bytes]:
    """Return the highest point of each phase, and of each part of a backward pass, by kind."""
    found: dict[tuple[str, str], Moment] = {}
    # Each phase has its own growth for each block.
    for name, run in groupby(memory.timeline, key=lambda moment: moment.name):
        moments = list(run)
        for i, moment in enumerate(moments):
            part = (name, "")
            if name == "backward" and 4 * i < len(moments):
                part = (name, "first quarter")
            elif name == "backward" and 2 * blocks * (len(moments) - i) <= len(moments):
                part = (name, "last half of a block")
            if part not in found or moment.bytes > found[part].bytes:
                found[part] = moment
    return {part: moment.kinds for part, moment in found.items()}
