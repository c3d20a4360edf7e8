"""Claims on what training steps compute: whether a run can be repeated, and whether accumulation is the large batch."""

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor

from lit_efficient.evidence.verifying.claims import (
    Claim,
    Subject,
    Verdict,
    difference,
    drawn_batches,
    gradients,
    loss_of,
    order_of,
    seen_gradients,
    tolerance_of,
)
from lit_efficient.evidence.verifying.same_draws import Draws, Unlike
from lit_efficient.internals.lightning_trainer import arrived
from lit_efficient.internals.torch_checkpoint import without_recomputation
from lit_efficient.internals.torch_layers import BatchNorm, Dropout
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.mechanisms.trials.steps import Trials, leaves_traces
from lit_efficient.traits import Trait


class Runs(Claim):
    """The fit itself, whose failure leaves nothing to be checked."""

    name, sentence = "runs", "the first steps can be done, and their losses are finite"

    def check(self, subject: Subject) -> Verdict:
        try:
            losses = subject.plain.losses
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return self.measured(float("inf"), 0, "losses that are not finite", "the first steps", said)
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        where = f"batch {bad[0]}" if bad else ""
        return self.measured(len(bad), 0, "losses that are not finite", f"{len(losses)} batches of training", where)


class Deterministic(Claim):
    """Two fits that are built and run alike are equal, bit by bit."""

    name, sentence = "determinism", "the same seed gives the same batches, losses and weights"

    def check(self, subject: Subject) -> Verdict:
        one, other = subject.plain, subject.train(5, slim=True)
        off = {f"start: {name}": by for name, by in difference(one.start, other.start).items()}
        for i, (a, b) in enumerate(zip(one.batches, other.batches)):
            off |= {f"batch {i}: {name}": by for name, by in difference(_named(a), _named(b)).items()}
        for i, (x, y) in enumerate(zip(one.losses, other.losses)):
            off[f"loss {i}"] = 0.0 if x == y or (math.isnan(x) and math.isnan(y)) else abs(x - y) / max(abs(x), 1e-30)
        off |= {f"end: {name}": by for name, by in difference(one.end, other.end).items()}
        why = f"two fits of {len(one.losses)} batches, each built anew: batches, losses and weights"
        return self.compared(off, 0.0, "largest relative difference", why)


def _named(batch: Any) -> dict[str, Tensor]:
    return {str(i): leaf for i, leaf in enumerate(tree_leaves(batch)) if isinstance(leaf, Tensor)}


class Accumulated(Claim):
    """What the trainer accumulates over a window, against autograd's gradient of the same rows as one batch."""

    name, sentence = "accumulation", "accumulated micro-batches give the gradient of their union as one batch"

    def check(self, subject: Subject) -> Verdict:
        """Cut a batch up, let the trainer's own loop accumulate the parts, and compare at the optimizer's step."""
        left: dict[str, str] = {}

        def traces(callback: Any) -> bool:
            why = getattr(callback, "reasons", {}).get(Trait.NEEDS_WHOLE_BATCH, "")
            if why:
                left[type(callback).__name__] = why
            return bool(why) or leaves_traces(callback)

        with without_recomputation():  # which would draw anew what the parts are given
            found = subject.within(self._compared, traces=traces)
        without = tuple(f"{name}, which was left out: {why}" for name, why in left.items())
        return replace(found, uncovered=(*found.uncovered, *without))

    def _compared(self, trainer: Any, module: Any) -> Verdict:
        asked = trainer.accumulate_grad_batches
        if not module.automatic_optimization:
            return self.idle("the module optimizes manually, and accumulates by itself if at all")
        parts, whole = _window(trainer, max(2, min(asked, 4)))
        if not parts:
            return self.idle("the batches can neither be cut into equal parts nor be joined")
        for part in module.modules():
            if isinstance(part, BatchNorm | Dropout):
                part.eval()
        with torch.no_grad():
            loss_of(module, arrived(trainer, whole))  # a network may probe itself the first time
        draws = Draws()
        with draws:
            loss = loss_of(module, arrived(trainer, whole))
        right = gradients(module, loss)
        try:
            found = _accumulated(trainer, module, parts, draws)
        except Unlike as error:
            return self.idle(f"what is drawn at random depends on the size of the batch: {error}")
        if not found:
            return self.idle("no gradient is left when the optimizer steps: it may step in the backward pass")
        off = difference({name: g for name, g in right.items() if name in found}, found)
        tolerance = tolerance_of(trainer, module)
        why = f"gradients of a window of {len(parts)} micro-batches, and of their rows as one batch by autograd"
        counts = [_counted(module, part) for part in parts]
        if max(off.values()) > tolerance and len(set(counts)) > 1:
            why += (
                f"; the micro-batches have {' and '.join(map(str, counts))} tokens that count, and the mean of their "
                "means is another number than the mean over all: add TokenWeightedAccumulation"
            )
        if max(off.values()) > tolerance and asked == 1:
            return self.idle(f"nothing is accumulated here; if it were, {why}: they differ by {max(off.values()):.2g}")
        covered = ("BatchNorm and Dropout were in evaluation mode, and nothing was recomputed",)

        def order() -> list[str]:
            return order_of(module, arrived(trainer, whole))

        return self.compared(off, tolerance, "largest relative difference of gradients", why, covered, order)


def _window(trainer: Any, parts: int) -> tuple[list[Any], Any]:
    """The rows of a batch in equal parts, and those rows together; of batches that are too small several, joined."""
    (batch,) = drawn_batches(trainer, 1)
    rows = max((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), default=0)
    size = rows // parts
    if size:
        cut = [_map(batch, lambda x, i=i: x[i * size : (i + 1) * size] if len(x) == rows else x) for i in range(parts)]
        return cut, _map(batch, lambda x: x[: size * parts] if len(x) == rows else x)
    batches = drawn_batches(trainer, parts)
    leaves = [[leaf for leaf in tree_leaves(one) if isinstance(leaf, Tensor)] for one in batches]
    alike = all([t.shape for t in one] == [t.shape for t in leaves[0]] for one in leaves)
    if not rows or not alike or any(not t.ndim or len(t) != rows for t in leaves[0]):
        return [], None
    joined = iter([torch.cat(tensors) for tensors in zip(*leaves)])
    return batches, _map(batches[0], lambda x: next(joined) if isinstance(x, Tensor) else x)


def _map(batch: Any, cut: Any) -> Any:
    """A batch with what has rows replaced: tensors, and lists of texts."""
    if isinstance(batch, Tensor):
        return cut(batch) if batch.ndim else batch
    if isinstance(batch, Mapping):
        return type(batch)({key: _map(value, cut) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, list | tuple) and batch and all(isinstance(one, str) for one in batch):
        return cut(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(one, cut) for one in batch))
    return type(batch)(_map(one, cut) for one in batch) if isinstance(batch, list | tuple) else batch


def _accumulated(trainer: Any, module: Any, parts: list[Any], draws: Draws) -> dict[str, Tensor]:
    """The gradients that an optimizer would step with, after the trainer's own loop has run a window."""
    found: dict[str, Tensor] = {}
    step, number = module.training_step, iter(range(len(parts)))

    @functools.wraps(step)
    def same_draws(*args: Any, **kwargs: Any) -> Any:
        seed_everything(0, verbose=False)
        with Draws(draws.values, next(number), len(parts)) as mode:
            output = step(*args, **kwargs)
        if mode.used < len(draws.values):
            raise Unlike("a part draws less often than the whole batch")
        return output

    class Capture(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            seen = seen_gradients(pl_module, optimizer)
            found.update({name: gradient.detach().clone() for name, gradient in seen.items()})

    trials = Trials(trainer)
    module.training_step = same_draws
    with trials.trial(accumulate=len(parts), alone=False):
        trainer.callbacks = [*trainer.callbacks, Capture()]
        for part in parts:
            trials.train(lambda part=part: part)  # type: ignore[misc]
    return found


def _counted(module: Any, batch: Any) -> int:
    """Tokens that count in the loss, as far as that can be known."""
    if callable(getattr(module, "num_tokens", None)):
        return int(module.num_tokens(batch))
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return int((labels != IGNORE).sum()) if isinstance(labels, Tensor) else 0


RUNS = Runs()
OF_TRAINING: tuple[Claim, ...] = (Deterministic(), Accumulated())
