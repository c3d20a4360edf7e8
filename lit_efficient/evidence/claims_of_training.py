"""Claims on what a training step does: accumulation, what trains, whether a run can be repeated."""

import math
from typing import Any

from torch import Tensor

from lit_efficient.evidence.claims import Claim, Subject, Verdict, difference
from lit_efficient.internals.torch_trees import tree_leaves


class Deterministic(Claim):
    """Two fits that are built and run alike are equal, bit by bit."""

    name, sentence = "determinism", "the same seed gives the same batches, losses and weights"

    def check(self, subject: Subject) -> Verdict:
        """Build and run it twice."""
        one, other = subject.train(3), subject.train(3)
        batches = [difference(_named(a), _named(b)) for a, b in zip(one.batches, other.batches)]
        off = {f"batch {i}: {name}": by for i, batch in enumerate(batches) for name, by in batch.items()}
        for i, (a, b) in enumerate(zip(one.losses, other.losses)):
            off[f"loss {i}"] = 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) / max(abs(a), 1e-30)
        weights = {"start": difference(one.start, other.start), "end": difference(one.end, other.end)}
        off |= {f"{when}: {name}": by for when, found in weights.items() for name, by in found.items()}
        where = next((name for name, by in off.items() if by), "")
        why = "two fits of 3 steps, each built anew: batches, losses and weights"
        return self.measured(max(off.values(), default=0.0), 0.0, "largest relative difference", why, where=where)


def _named(batch: Any) -> dict[str, Any]:
    return {str(i): leaf for i, leaf in enumerate(tree_leaves(batch)) if isinstance(leaf, Tensor)}


OF_TRAINING: tuple[Claim, ...] = (Deterministic(),)
