"""Training steps that are repeated from one state, and comparisons of the outputs of their layers by row or by token.

    one, other = (bench.step(batch)[0] for batch in (batch, changed))

A fit is tried before its first batch, and nothing of these steps is kept.
"""

import contextlib
import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.verifying.claims import Batch, Claim, Subject, Verdict, first_batch, gradients, loss_of
from lit_efficient.evidence.verifying.recorded_calls import Call, as_it_is, detached, recorded
from lit_efficient.internals.torch_trees import tree_leaves, tree_map_only
from lit_efficient.mechanisms.rewind import Rewind
from lit_efficient.models.probes.modes import whole_precision

ROWS = 4  # of a batch that are compared


class Bench:
    """A module in a fit before its first batch, whose training step is repeated from one state.

    Optimizers do nothing. Parameters that are zero at the start would hide the layers behind them, and are set to small
    numbers.

    Attributes:
        batch: The first training batch.
        coarse: True if the precision is below float32.
        evaluated: Layers that are in evaluation mode in every step.
        trained: Layers that are in training mode in every step.
    """

    def __init__(self, trainer: Any, module: LightningModule) -> None:
        self.trainer = trainer
        self.module = module
        self.batch = first_batch(trainer)
        device = trainer.strategy.root_device
        self.coarse = not whole_precision(module, device) or "16" in str(trainer.precision)
        if device.type != "cpu" and torch.get_float32_matmul_precision() != "highest":
            self.coarse = True
        with torch.no_grad():
            for one in module.parameters():
                if type(one) is nn.Parameter and one.is_floating_point() and one.itemsize > 1 and not one.any():
                    one.copy_(torch.arange(one.numel(), device=one.device).sin().mul(0.05).view_as(one))
        # A step of manual optimization would change the weights.
        for optimizer in trainer.optimizers:
            vars(optimizer)["step"] = _closure_alone
        self.evaluated: list[nn.Module] = []
        self.trained: list[nn.Module] = []
        self._record = Rewind([])
        self.step(self.batch)  # the first step may initialise caches
        self._record = Rewind([module, *trainer.callbacks])

    def tolerance(self, exact: float, coarse: float) -> float:
        """Return the tolerance for float32, or the one for lower precision."""
        return coarse if self.coarse else exact

    def step(self, batch: Batch, training: bool = True, graph: bool = False) -> tuple[list[Call], Tensor | None]:
        """Make a training step from the initial state.

        Args:
            batch: The batch.
            training: Use the training mode of layers such as dropout.
            graph: Keep the graph, so that the loss can be differentiated with respect to outputs of layers.

        Returns:
            The calls of all layers, and the loss; ``None`` for manual optimization.
        """
        # Caches, buffers and random states must be equal in all steps.
        self._record.restore()
        if not training:
            self.module.eval()
        for part in self.evaluated:
            part.eval()
        for part in self.trained:
            part.training = True
        batch = _copied(batch)
        keep = detached
        if graph:
            keep = as_it_is
        with recorded(self.module, keep) as calls, torch.compiler.set_stance("force_eager"):
            if self.module.automatic_optimization:
                return calls, loss_of(self.module, batch)
            with contextlib.suppress(ConfigurationError):  # the step returns no loss
                loss_of(self.module, batch)
            return calls, None

    def returned(self, batch: Batch, seed: int) -> Any:
        """Return the result of the module's own training step without techniques; ``None`` for manual optimization.

        Args:
            batch: The batch.
            seed: Seed of the step's random numbers.
        """
        if not self.module.automatic_optimization:
            return None
        self._record.restore()
        seed_everything(seed, verbose=False)
        step = type(self.module).training_step
        given = [_copied(batch), 0][: len(inspect.signature(step).parameters) - 1]
        precision = self.trainer.precision_plugin.train_step_context()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), precision:
            return step(self.module, *given)

    def gradients(self, compiled: bool = False) -> dict[str, Tensor]:
        """Return the loss of a training step, named ``loss``, and its gradients; empty for manual optimization.

        ``compiled`` runs compiled code as it is compiled.
        """
        self._record.restore()
        with contextlib.nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
            try:
                loss = loss_of(self.module, _copied(self.batch))
                return {"loss": loss.detach().clone(), **_gradients(self.module, loss)}
            except ConfigurationError:
                if self.module.automatic_optimization:
                    raise
                return {}

    def order(self) -> list[str]:
        """Return the names of the layers in the order in which a training step completes them."""
        return list(dict.fromkeys(call.name for call in self.step(self.batch)[0]))


class BenchClaim(Claim):
    """A claim that is checked on training steps before the first batch."""

    def check(self, subject: Subject) -> Verdict:
        return subject.within(lambda trainer, module: self.tried(Bench(trainer, module)))

    @abstractmethod
    def tried(self, bench: Bench) -> Verdict:
        """Return whether the property holds for the bench's steps."""


def _copied(batch: Batch) -> Batch:
    return tree_map_only(Tensor, Tensor.clone, batch)


def few_rows(batch: Batch, count: int = ROWS) -> tuple[Batch, int]:
    """Return the first rows of a batch and their number.

    The number is 0 if tensors have different numbers of rows. A batch with other values than tensors is not cut.
    """
    leaves = tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if len({leaf.shape[0] for leaf in tensors}) != 1:
        return batch, 0
    rows = tensors[0].shape[0]
    if rows <= count or any(not isinstance(leaf, Tensor) for leaf in leaves):
        return batch, rows
    return cut(batch, rows, slice(count)), count


def cut(batch: Batch, rows: int, chosen: slice | Tensor) -> Batch:
    """Return the chosen rows of a batch with ``rows`` rows."""
    return tree_map_only(Tensor, lambda t: t[chosen] if t.ndim and t.shape[0] == rows else t, batch)


def aligned(one: Sequence[Call], other: Sequence[Call]) -> Iterator[tuple[Call, Call]]:
    """Yield the calls that two steps have in common, in order."""
    known = {call.key: call for call in other}
    for call in one:
        if call.key in known:
            yield call, known[call.key]


def ends(calls: Sequence[Call], keys: Collection[tuple[str, int]]) -> list[Call]:
    """Return for each outermost call the last call within it that is among ``keys``: the result that is used on."""
    return list({call.outer: call for call in calls if call.key in keys}.values())


def by_rows(tensor: Tensor, rows: int) -> list[Tensor]:
    """Return a tensor as ``[rows, ...]`` in each possible layout: rows one after the other, or interleaved."""
    if tensor.ndim > 1 and tensor.shape[0] == 1 and rows > 1:
        tensor = tensor[0]
    if not tensor.ndim or not tensor.shape[0] or tensor.shape[0] % rows:
        return []
    times = tensor.shape[0] // rows
    flat = tensor.reshape(tensor.shape[0], -1)
    layouts = [flat.reshape(rows, -1)]
    if times > 1:
        layouts.append(flat.reshape(times, rows, -1).transpose(0, 1).flatten(1))
    return layouts


def by_tokens(tensor: Tensor, rows: int, length: int) -> Tensor | None:
    """Return a tensor as ``[rows, length, ...]``, also if its rows are joined; ``None`` if it has another shape."""
    if tensor.shape[:2] == (rows, length):
        return tensor.reshape(rows, length, -1)
    flat = tensor
    if tensor.ndim > 1 and tensor.shape[0] == 1:
        flat = tensor[0]
    if rows > 1 and flat.ndim > 1 and flat.shape[0] == rows * length:
        return flat.reshape(rows, length, -1)
    return None


def ratio(moved: float, own: float) -> float:
    """Return an unwanted change relative to the intended change."""
    if own:
        return moved / own
    return math.inf if moved else 0.0


def most(tensor: Tensor) -> float:
    """Return the largest magnitude of an element; 0 for an empty tensor."""
    if tensor.numel():
        return float(tensor.abs().max())
    return 0.0


def _gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    try:
        return gradients(module, loss)
    except RuntimeError as error:
        # Reentrant checkpoints refuse autograd.grad.
        if ".grad()" not in str(error):
            raise
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def _closure_alone(closure: Callable[[], object] | None = None, **_: object) -> object:
    # Lightning computes the loss and the gradients in the closure.
    if closure is None:
        return None
    return closure()
