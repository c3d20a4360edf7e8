"""What each layer gives out in a training step, call by call, and which rows or tokens of that a change has moved.

    one, other = (bench.calls(batch) for batch in (batch, changed));    moved(one, other, ...)

A fit is tried before its first batch, again and again from one state; nothing of it is kept.
"""

import contextlib
import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.verifying.claims import Claim, Subject, Verdict, first_batch, gradients, loss_of
from lit_efficient.evidence.verifying.recorded_calls import Call, as_it_is, detached, recorded
from lit_efficient.internals.torch_trees import tree_leaves, tree_map_only
from lit_efficient.mechanisms.rewind import Rewind
from lit_efficient.models.probes.modes import whole_precision

ROWS = 4  # of a batch that are looked at


class Bench:
    """A module in a fit before its first batch, whose steps are tried again and again from one state.

    Optimizers do nothing. What is zero at the start, and would hide all that lies behind it, gets small numbers.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self.trainer, self.module = trainer, module
        self.batch = first_batch(trainer)
        device = trainer.strategy.root_device
        self.coarse = not whole_precision(module, device) or "16" in str(trainer.precision)
        self.coarse |= device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"
        with torch.no_grad():
            for one in module.parameters():
                if type(one) is nn.Parameter and one.is_floating_point() and one.itemsize > 1 and not one.any():
                    one.copy_(torch.arange(one.numel(), device=one.device).sin().mul(0.05).view_as(one))
        for optimizer in trainer.optimizers:
            vars(optimizer)["step"] = _closure_alone
        self.still: list[nn.Module] = []  # layers that are in evaluation whatever the others do
        self.awake: list[nn.Module] = []  # and in training
        self._record = Rewind([])
        self.step(self.batch)  # what is asked once is asked here
        self._record = Rewind([module, *trainer.callbacks])

    def tolerance(self, exact: float, coarse: float) -> float:
        """What rounding may make of a comparison, in float32 or below."""
        return coarse if self.coarse else exact

    def step(self, batch: Any, training: bool = True, graph: bool = False) -> tuple[list[Call], Tensor | None]:
        """The calls of a training step from the state at the start, and its loss; manual optimization has none.

        ``training``: dropout and the like act. ``graph``: autograd can go back from the loss to what the calls gave.
        """
        self._record.restore()
        for part in [self.module, *self.still] if not training else self.still:
            part.eval()
        for part in self.awake:
            part.training = True
        keep = as_it_is if graph else detached
        batch = tree_map_only(Tensor, Tensor.clone, batch)
        with recorded(self.module, keep) as calls, torch.compiler.set_stance("force_eager"):
            if self.module.automatic_optimization:
                return calls, loss_of(self.module, batch)
            with contextlib.suppress(ConfigurationError):  # it returns no loss
                loss_of(self.module, batch)
            return calls, None

    def returned(self, batch: Any, seed: int) -> Any:
        """What the module's own training step returns, without what techniques make of it, by draws of a seed; nothing
        where it goes back by itself.
        """
        if not self.module.automatic_optimization:
            return None
        self._record.restore()
        seed_everything(seed, verbose=False)
        step = type(self.module).training_step
        given = [tree_map_only(Tensor, Tensor.clone, batch), 0][: len(inspect.signature(step).parameters) - 1]
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), self._precision():
            return step(self.module, *given)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self.trainer.precision_plugin.train_step_context()
        return context

    def gradients(self, compiled: bool = False) -> dict[str, Tensor]:
        """The loss of a training step, as ``loss``, and its gradients by parameter; nothing of manual optimization."""
        self._record.restore()
        with contextlib.nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
            try:
                loss = loss_of(self.module, tree_map_only(Tensor, Tensor.clone, self.batch))
                return {"loss": loss.detach().clone(), **_gradients(self.module, loss)}
            except ConfigurationError:
                if self.module.automatic_optimization:
                    raise
                return {}

    def order(self) -> list[str]:
        """Names of the layers in the order in which a training step is done with them."""
        return list(dict.fromkeys(call.name for call in self.step(self.batch)[0]))


class BenchClaim(Claim):
    """A claim that is tried on steps before the first batch."""

    def check(self, subject: Subject) -> Verdict:
        return subject.within(lambda trainer, module: self.tried(Bench(trainer, module)))

    @abstractmethod
    def tried(self, bench: Bench) -> Verdict:
        """Whether it is true of the bench's steps."""


def few_rows(batch: Any, count: int = ROWS) -> tuple[Any, int]:
    """The first rows of a batch, and how many there are: 0 if its tensors do not have as many of them each.

    Of a batch that holds texts and other things that are no tensors none are left out.
    """
    leaves = tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if len({leaf.shape[0] for leaf in tensors}) != 1:
        return batch, 0
    rows = tensors[0].shape[0]
    if rows <= count or any(not isinstance(leaf, Tensor) for leaf in leaves):
        return batch, rows
    return cut(batch, rows, slice(count)), count


def cut(batch: Any, rows: int, chosen: Any) -> Any:
    """Some rows of a batch of so many."""
    return tree_map_only(Tensor, lambda t: t[chosen] if t.ndim and t.shape[0] == rows else t, batch)


def aligned(one: Sequence[Call], other: Sequence[Call]) -> Iterator[tuple[Call, Call]]:
    """The calls that two steps have in common, in order."""
    known = {call.key: call for call in other}
    yield from ((call, known[call.key]) for call in one if call.key in known)


def ends(calls: Sequence[Call], keys: Collection[tuple[str, int]]) -> list[Call]:
    """Of each outermost call the last one within it of these: what the rest of the step goes on with."""
    last = {call.outer: call for call in calls if call.key in keys}
    return list(last.values())


def by_rows(tensor: Tensor, rows: int) -> list[Tensor]:
    """A tensor as ``[rows, ...]``, in each way in which it may hold them: one after the other, or by turns."""
    if tensor.ndim > 1 and tensor.shape[0] == 1 and rows > 1:
        tensor = tensor[0]
    if not tensor.ndim or not tensor.shape[0] or tensor.shape[0] % rows:
        return []
    times = tensor.shape[0] // rows
    flat = tensor.reshape(tensor.shape[0], -1)
    found = [flat.reshape(rows, -1)]
    return [*found, flat.reshape(times, rows, -1).transpose(0, 1).flatten(1)] if times > 1 else found


def by_tokens(tensor: Tensor, rows: int, length: int) -> Tensor | None:
    """A tensor as ``[rows, length, ...]``, if it is one of tokens; rows may lie one behind the other."""
    if tensor.shape[:2] == (rows, length):
        return tensor.reshape(rows, length, -1)
    flat = tensor[0] if tensor.ndim > 1 and tensor.shape[0] == 1 else tensor
    if rows > 1 and flat.ndim > 1 and flat.shape[0] == rows * length:
        return flat.reshape(rows, length, -1)
    return None


def ratio(moved: float, own: float) -> float:
    """How much moves that must not, of what moves as it should."""
    return moved / own if own else float("inf") if moved else 0.0


def most(tensor: Tensor) -> float:
    """The largest size of an element; 0 of none."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    try:
        return gradients(module, loss)
    except RuntimeError as error:
        if ".grad()" not in str(error):  # a reentrant checkpoint wants to be gone through whole
            raise
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def _closure_alone(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
    return None if closure is None else closure()
