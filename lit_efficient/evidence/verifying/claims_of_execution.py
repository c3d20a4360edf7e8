"""Claims about the execution of a step: recomputation, compilation, and the modes of layers."""

import contextlib

import torch
from torch import nn

from lit_efficient.evidence.verifying.claims import Claim, Subject, Verdict, difference
from lit_efficient.evidence.verifying.layer_calls import Bench, BenchClaim, aligned
from lit_efficient.evidence.verifying.recorded_calls import floats
from lit_efficient.internals.torch_checkpoint import without_recomputation
from lit_efficient.internals.torch_compiler import counts, draws_as_uncompiled, is_compiled, wraps_compiled
from lit_efficient.internals.torch_modules import BatchNorm

# Tolerances in float32, and below.
_EXACT = 1e-4
_COARSE = 0.05
_MANUAL = "manual optimization: the training step returns no loss"
_UNIT = "largest relative difference of the loss and gradients"


class Recomputed(BenchClaim):
    """Recomputation changes neither the loss nor a gradient."""

    name = "recomputed"
    sentence = "the backward pass recomputes the same values, including dropout"
    unit = _UNIT

    def tried(self, bench: Bench) -> Verdict:
        # The same step is repeated with the same random states.
        own = bench.gradients()
        with without_recomputation() as kept:
            plain = bench.gradients()
        if not plain:
            return self.idle(_MANUAL)
        if not kept:
            return self.idle("nothing is recomputed in the backward pass")
        why = f"a step with {len(kept)} activation checkpoints, and one that keeps their activations"
        tolerance = bench.tolerance(_EXACT, _COARSE)
        return self.compared(difference(plain, own), tolerance, why, order=bench.order)


class Compiled(Claim):
    """Claim: a compiled step gives the same loss and gradients as the step without compilation, up to rounding."""

    name = "compiled"
    sentence = "compiled code computes the same values as without compilation"
    unit = _UNIT

    def check(self, subject: Subject) -> Verdict:
        return subject.within(lambda trainer, module: self._try(Bench(trainer, module), subject.full))

    def _try(self, bench: Bench, full: bool) -> Verdict:
        compiled = [part for part in bench.module.modules() if is_compiled(part) or wraps_compiled(part)]
        uncovered: tuple[str, ...] = ()
        if not compiled and full:
            compiled = [part for part in bench.module.children() if any(True for _ in part.parameters())]
            for part in compiled:
                part.compile()
            uncovered = ("the config compiles nothing: the module's children were compiled as wholes",)
        plain = bench.gradients()
        # Code that an earlier fit compiled must be compiled and counted again.
        torch.compiler.reset()
        before, *_ = counts()
        if not plain:
            return self.idle(_MANUAL)
        with draws_as_uncompiled() if compiled else contextlib.nullcontext():
            own = bench.gradients(compiled=True)
        after, *_ = counts()
        if after == before and compiled:
            return self.idle("torch compiles no graph of the parts to be compiled")
        if after == before:
            return self.idle("nothing is compiled; --full compiles the module's children")
        why = f"a compiled step ({after - before} graphs), and the same step without compilation"
        tolerance = bench.tolerance(_EXACT, _COARSE)
        return self.compared(difference(plain, own), tolerance, why, uncovered, bench.order)


class InTrainingMode(Claim):
    """No layer that trains is in evaluation mode, if that changes its output."""

    name = "modes"
    sentence = "layers that train are in training mode: dropout is active, batch norms use the batch"
    unit = "layers"

    def check(self, subject: Subject) -> Verdict:
        later = subject.plain.resting
        return subject.within(lambda trainer, module: self._try(Bench(trainer, module), later))

    def _try(self, bench: Bench, later: set[str]) -> Verdict:
        calls, _ = bench.step(bench.batch)
        called = {call.name: call.part for call in calls if _trains(bench.module, call.name, call.part)}
        resting = {name: part for name, part in called.items() if not part.training}
        fallen = {name: part for name, part in called.items() if part.training and name in later}
        if not resting and not fallen:
            why = f"of {len(called)} layers that train and that a step calls, none is in evaluation mode"
            return self.measured(0, 0, why)
        # A layer matters only if its output is another one in the other mode.
        bench.trained = list(resting.values())
        bench.evaluated = list(fallen.values())
        now, _ = bench.step(bench.batch)
        bench.trained = []
        bench.evaluated = []
        changed = resting.keys() | fallen.keys()
        moved = [a.described for a, b in aligned(calls, now) if a.name in changed and _differ(a.output, b.output)]
        when = ""
        if not resting:
            when = " after a few steps"
        why = (
            f"{len(changed)} layers that train are in evaluation mode{when}; {len(moved)} have other outputs in "
            "training mode"
        )
        return self.measured(len(moved), 0, why, "".join(moved[:1]))


def _trains(module: nn.Module, name: str, part: nn.Module) -> bool:
    """True if all parameters of a layer train, or for a layer without parameters, all those of its parent.

    False for a batch norm in evaluation mode with statistics of earlier data, which may be frozen on purpose.
    """
    if isinstance(part, BatchNorm) and not part.training and part.running_mean is not None and part.running_mean.any():
        return False
    owner = part
    if not any(True for _ in part.parameters()):
        owner = module.get_submodule(name.rpartition(".")[0])
    trains = [parameter.requires_grad for parameter in owner.parameters()]
    return bool(trains) and all(trains)


def _differ(one: object, other: object) -> bool:
    return not all(map(torch.equal, floats(one), floats(other)))


OF_EXECUTION: tuple[Claim, ...] = (Recomputed(), Compiled(), InTrainingMode())
