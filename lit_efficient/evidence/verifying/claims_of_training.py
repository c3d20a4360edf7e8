"""Claims about training steps: a run can be repeated, and accumulation is equal to a large batch."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.evidence.verifying.claims import (
    Batch,
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
from lit_efficient.internals.torch_modules import BatchNorm, Dropout
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.mechanisms.trials.steps import Trials, leaves_traces
from lit_efficient.traits import Trait


class Runs(Claim):
    """The fit runs. If it does not, nothing else can be checked."""

    name = "runs"
    sentence = "the first steps run, and their losses are finite"
    unit = "losses that are not finite"

    def check(self, subject: Subject) -> Verdict:
        try:
            losses = subject.plain.losses
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return self.measured(math.inf, 0, "the first steps", text)
        bad = [f"batch {i}" for i, loss in enumerate(losses) if not math.isfinite(loss)]
        return self.measured(len(bad), 0, f"{len(losses)} batches of training", "".join(bad[:1]))


class Deterministic(Claim):
    """Two fits that are built and run in the same way are bit-equal."""

    name = "determinism"
    sentence = "the same seed gives the same batches, losses and weights"

    def check(self, subject: Subject) -> Verdict:
        one = subject.plain
        other = subject.train(5, slim=True)
        off = {f"start: {name}": by for name, by in difference(one.start, other.start).items()}
        for i, (a, b) in enumerate(zip(one.batches, other.batches)):
            off |= {f"batch {i}: {name}": by for name, by in difference(_named(a), _named(b)).items()}
        for i, (x, y) in enumerate(zip(one.losses, other.losses)):
            off[f"loss {i}"] = 0.0
            if x != y and not (math.isnan(x) and math.isnan(y)):
                off[f"loss {i}"] = abs(x - y) / max(abs(x), 1e-30)
        off |= {f"end: {name}": by for name, by in difference(one.end, other.end).items()}
        why = f"two fits of {len(one.losses)} batches that were built separately: batches, losses and weights"
        return self.compared(off, 0.0, why)


def _named(batch: Batch) -> dict[str, Tensor]:
    return {str(i): leaf for i, leaf in enumerate(tree_leaves(batch)) if isinstance(leaf, Tensor)}


class Accumulated(Claim):
    """The gradient that a trainer accumulates is the gradient of the same rows as one batch."""

    name = "accumulation"
    sentence = "accumulated micro-batches give the gradient of their union as one batch"
    unit = "largest relative difference of gradients"

    def check(self, subject: Subject) -> Verdict:
        """Cut a batch into parts, let the trainer's own loop accumulate them, and compare at the optimizer step."""
        left_out: dict[str, str] = {}

        def traces(callback: Callback) -> bool:
            reason = getattr(callback, "reasons", {}).get(Trait.NEEDS_WHOLE_BATCH, "")
            if reason:
                left_out[type(callback).__name__] = reason
            return bool(reason) or leaves_traces(callback)

        # Recomputation would draw other random numbers than the replayed ones.
        with without_recomputation():
            found = subject.within(self._compared, traces=traces)
        without = tuple(f"{name}, which was left out: {reason}" for name, reason in left_out.items())
        return replace(found, uncovered=(*found.uncovered, *without))

    def _compared(self, trainer: Trainer, module: LightningModule) -> Verdict:
        asked = trainer.accumulate_grad_batches
        if not module.automatic_optimization:
            return self.idle("the module optimizes manually, and accumulates itself if at all")
        # Four parts are enough, whatever the config accumulates.
        parts, whole = _window(trainer, max(2, min(asked, 4)))
        if not parts:
            return self.idle("the batches can neither be cut into equal parts nor be joined")
        # Statistics and dropout of a batch differ from those of its parts on purpose.
        for part in module.modules():
            if isinstance(part, BatchNorm | Dropout):
                part.eval()
        with torch.no_grad():
            loss_of(module, arrived(trainer, whole))  # the first step may initialise caches
        # Each row must have the same noise in the batch and in its part.
        draws = Draws()
        with draws:
            loss = loss_of(module, arrived(trainer, whole))
        right = gradients(module, loss)
        try:
            found = _accumulated(trainer, module, parts, draws)
        except Unlike as error:
            return self.idle(f"random numbers depend on the size of the batch: {error}")
        if not found:
            return self.idle("no gradient is left at the optimizer step: it may run in the backward pass")
        off = difference({name: gradient for name, gradient in right.items() if name in found}, found)
        tolerance = tolerance_of(trainer, module)
        why = f"gradients of a window of {len(parts)} micro-batches, and of their rows as one batch by autograd"
        counts = [_counted(module, part) for part in parts]
        worst = max(off.values())
        if worst > tolerance and len(set(counts)) > 1:
            why += (
                f"; the micro-batches have {' and '.join(map(str, counts))} tokens that contribute to the loss, and "
                "the mean of their means is not the mean over all tokens: add TokenWeightedAccumulation"
            )
        if worst > tolerance and asked == 1:
            return self.idle(f"nothing is accumulated here; if it were, {why}: they differ by {worst:.2g}")
        uncovered = ("BatchNorm and Dropout were in evaluation mode, and nothing was recomputed",)
        return self.compared(off, tolerance, why, uncovered, lambda: order_of(module, arrived(trainer, whole)))


def _window(trainer: Trainer, parts: int) -> tuple[list[Batch], Batch]:
    """Return equal parts of a batch, and their rows as one batch.

    The parts are slices of the first batch, or if it has too few rows several batches, which are joined. The list is
    empty if neither is possible.
    """
    (batch,) = drawn_batches(trainer, 1)
    rows = max((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), default=0)
    size = rows // parts

    def rows_of(chosen: slice) -> Batch:
        return _map(batch, lambda x: x[chosen] if len(x) == rows else x)

    if size:
        return [rows_of(slice(i * size, (i + 1) * size)) for i in range(parts)], rows_of(slice(size * parts))
    batches = drawn_batches(trainer, parts)
    leaves = [[leaf for leaf in tree_leaves(one) if isinstance(leaf, Tensor)] for one in batches]
    shapes = [[tensor.shape for tensor in one] for one in leaves]
    alike = all(shape == shapes[0] for shape in shapes)
    if not rows or not alike or any(not tensor.ndim or len(tensor) != rows for tensor in leaves[0]):
        return [], None
    joined = iter([torch.cat(tensors) for tensors in zip(*leaves)])
    return batches, _map(batches[0], lambda x: next(joined) if isinstance(x, Tensor) else x)


def _map(batch: Batch, function: Callable[[Any], Any]) -> Batch:
    """Apply a function to all parts of a batch that have rows: tensors, and lists of texts."""
    if isinstance(batch, Tensor) and batch.ndim:
        return function(batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: _map(value, function) for key, value in batch.items()})  # type: ignore[call-arg]
    if not isinstance(batch, list | tuple):
        return batch
    if batch and all(isinstance(one, str) for one in batch):
        return function(batch)
    items = [_map(one, function) for one in batch]
    if hasattr(batch, "_fields"):
        return type(batch)(*items)  # a named tuple
    return type(batch)(items)


def _accumulated(trainer: Trainer, module: LightningModule, parts: list[Batch], draws: Draws) -> dict[str, Tensor]:
    """Return the gradients at the optimizer step after the trainer's own loop has accumulated all parts."""
    found: dict[str, Tensor] = {}
    step = module.training_step
    numbers = iter(range(len(parts)))

    @functools.wraps(step)
    def same_draws(*args: object, **kwargs: object) -> Any:
        seed_everything(0, verbose=False)
        with Draws(draws.values, next(numbers), len(parts)) as mode:
            output = step(*args, **kwargs)
        if mode.used < len(draws.values):
            raise Unlike("a part draws less often than the whole batch")
        return output

    def capture(trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        for name, gradient in seen_gradients(module, optimizer).items():
            found[name] = gradient.detach().clone()

    trials = Trials(trainer)
    module.training_step = same_draws  # type: ignore[method-assign]
    with trials.trial(accumulate=len(parts), alone=False):
        trainer.callbacks = [*trainer.callbacks, LambdaCallback(on_before_optimizer_step=capture)]  # type: ignore[attr-defined]
        for part in parts:
            trials.train(functools.partial(_same, part))
    return found


def _same(part: Batch) -> Batch:
    return part


def _counted(module: LightningModule, batch: Batch) -> int:
    """Return the number of tokens that contribute to the loss; 0 if it is unknown."""
    num_tokens = getattr(module, "num_tokens", None)
    if callable(num_tokens):
        return int(num_tokens(batch))
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        return int((batch["labels"] != IGNORE).sum())
    return 0


RUNS = Runs()
OF_TRAINING: tuple[Claim, ...] = (Deterministic(), Accumulated())
