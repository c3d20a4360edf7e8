"""Claims on how a step is computed: recomputed, compiled, and in which mode its layers are."""

import contextlib
from typing import Any

import torch
from torch import nn

from lit_efficient.evidence.verifying.claims import Claim, Subject, Verdict, difference
from lit_efficient.evidence.verifying.layer_calls import Bench, BenchClaim, aligned
from lit_efficient.evidence.verifying.recorded_calls import floats
from lit_efficient.internals.torch_checkpoint import without_recomputation
from lit_efficient.internals.torch_compiler import counts, draws_as_uncompiled, is_compiled, wraps_compiled
from lit_efficient.internals.torch_layers import BatchNorm

_EXACT, _COARSE = 1e-4, 0.05
_MANUAL = "manual optimization: the training step returns no loss"
_UNIT = "largest relative difference of the loss and gradients"


class Recomputed(BenchClaim):
    """Recomputation changes neither the loss nor a gradient."""

    name, sentence = "recomputed", "what is computed again in the backward pass is what was computed, dropout included"

    def tried(self, bench: Bench) -> Verdict:
        own = bench.gradients()
        with without_recomputation() as kept:
            plain = bench.gradients()
        if not plain:
            return self.idle(_MANUAL)
        if not kept:
            return self.idle("nothing is computed again in the backward pass")
        why = f"a step whose {len(kept)} checkpoints are as they are, and one in which they keep their activations"
        tolerance = bench.tolerance(_EXACT, _COARSE)
        return self.compared(difference(plain, own), tolerance, _UNIT, why, order=bench.order)


class Compiled(Claim):
    """Compilation changes neither the loss nor a gradient by more than rounding."""

    name, sentence = "compiled", "compiled code computes what it computes uncompiled"

    def check(self, subject: Subject) -> Verdict:
        return subject.within(lambda trainer, module: self._try(Bench(trainer, module), subject.full))

    def _try(self, bench: Bench, full: bool) -> Verdict:
        compiled = [part for part in bench.module.modules() if is_compiled(part) or wraps_compiled(part)]
        uncovered: tuple[str, ...] = ()
        if not compiled and full:
            compiled = [part for part in bench.module.children() if any(True for _ in part.parameters())]
            for part in compiled:
                part.compile()
            uncovered = ("the config compiles nothing: the module's children were, as wholes",)
        plain = bench.gradients()
        torch.compiler.reset()  # so that what an earlier fit compiled is compiled, and counted, anew
        before = counts()
        if not plain:
            return self.idle(_MANUAL)
        with draws_as_uncompiled() if compiled else contextlib.nullcontext():
            own = bench.gradients(compiled=True)
        if counts()[0] == before[0]:
            what = (
                "torch makes no graph of what is to be compiled" if compiled else "nothing is compiled; --full does it"
            )
            return self.idle(what)
        why = f"a compiled step ({counts()[0] - before[0]} graphs) and the same one uncompiled"
        tolerance = bench.tolerance(_EXACT, _COARSE)
        return self.compared(difference(plain, own), tolerance, _UNIT, why, uncovered, bench.order)


class InTrainingMode(Claim):
    """No layer that trains is in evaluation mode where that changes the loss."""

    name, sentence = "modes", "what trains is in training mode: dropout acts, batch norms have statistics"

    def check(self, subject: Subject) -> Verdict:
        later = subject.plain.resting
        return subject.within(lambda trainer, module: self._try(Bench(trainer, module), later))

    def _try(self, bench: Bench, later: set[str]) -> Verdict:
        calls, _ = bench.step(bench.batch)
        called = {call.name: call.part for call in calls if _trains(bench.module, call.name, call.part)}
        resting = {name: part for name, part in called.items() if not part.training}
        fallen = {name: part for name, part in called.items() if part.training and name in later}
        if not resting and not fallen:
            why = f"of {len(called)} layers that train and that a step calls none is in evaluation mode"
            return self.measured(0.0, 0.0, "layers", why, where="")
        bench.awake, bench.still = [*resting.values()], [*fallen.values()]
        now, _ = bench.step(bench.batch)
        bench.awake = bench.still = []
        changed = resting.keys() | fallen.keys()
        moved = [a for a, b in aligned(calls, now) if a.name in changed and _differ(a.output, b.output)]
        when = "" if resting else " after a few steps"
        why = f"{len(changed)} layers that train are in evaluation mode{when}; in training mode {len(moved)} give "
        why += "other numbers"
        return self.measured(float(len(moved)), 0.0, "layers", why, where=moved[0].described if moved else "")


def _trains(module: nn.Module, name: str, part: nn.Module) -> bool:
    """Whether a layer, or what one without parameters is a part of, trains in full; a batch norm that has statistics
    of earlier data may be kept as it is.
    """
    if isinstance(part, BatchNorm) and not part.training and part.running_mean is not None and part.running_mean.any():
        return False
    owner = part if any(True for _ in part.parameters()) else module.get_submodule(name.rpartition(".")[0])
    trains = [parameter.requires_grad for parameter in owner.parameters()]
    return bool(trains) and all(trains)


def _differ(one: Any, other: Any) -> bool:
    return not all(map(torch.equal, floats(one), floats(other)))


OF_EXECUTION: tuple[Claim, ...] = (Recomputed(), Compiled(), InTrainingMode())
