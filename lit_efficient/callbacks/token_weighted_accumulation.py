"""Token-weighted accumulation: the gradient of one big batch, however unequal its micro-batches are.

    g = sum_{r,k} n_rk g_rk / sum_{r,k} n_rk        micro-batch k of rank r: mean loss over n_rk tokens, gradient g_rk

Saves: nothing; it makes accumulation and data parallelism equal the big batch they stand for (plain Lightning averages
    the means, and divides a short last window by too many micro-batches)
Costs: a sum of one number over the ranks and a pass over the gradients an optimizer step; batches are counted on the
    host, or, where a hook has a hand in their transfer, read from the device
Source: the analysis of transformers' and Unsloth's accumulation bug, https://huggingface.co/blog/gradient_accumulation

Each loss is scaled by n_rk / n and the gradients' sum by ranks * micro-batches * n / tokens, where n is the window's
first count, or on several processes the mean count of the window before, which all of them know. Both are exactly 1
where all counts are equal: every bit is Lightning's then.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.application.gradients import gradients_of
from lit_efficient.application.loss import LossHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, refusal
from lit_efficient.internals.lightning_loops import accumulates, arrives_unchanged
from lit_efficient.internals.torch_foreach import foreach_mul_
from lit_efficient.internals.torch_tensors import hooks_after_accumulation
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.losses.deferred_logits import shifts_labels
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_COUNTER = "num_tokens"  # a method of the module that `auto` asks first


def count_tokens(target: Tensor, *, ignore_index: int = -100, shift: bool = False) -> int:
    """How many tokens of a batch count.

    Args:
        target: Labels [B, T], or a boolean mask, whose true elements count.
        ignore_index: Label that counts for nothing.
        shift: Whether the loss leaves out the first position, as models do that shift labels themselves.
    """
    target = target[..., 1:] if shift else target
    return int((target if target.dtype == torch.bool else target != ignore_index).sum())


def combined_factor(ranks: int, micro_batches: int, reference: float, tokens: float) -> float:
    """What turns the averaged gradients of losses scaled by n_rk / ``reference`` into those of the mean over tokens.

    Args:
        ranks: Over which gradients were averaged.
        micro_batches: By which each loss was divided.
        reference: The number that losses were scaled by.
        tokens: Of all ranks and micro-batches.
    """
    return ranks * micro_batches * reference / tokens if tokens else 1.0


class TokenWeightedAccumulation(LossHooks, Technique):
    """Weigh every micro-batch of an optimizer step, on all ranks, by its number of tokens.

    For modules whose ``training_step`` returns the mean over a batch's tokens. What the module logs stays that mean.
    Gradients are complete when ``on_after_backward`` of the window's last micro-batch runs, and so before any clipping.
    The backward pass of a micro-batch without tokens is left out on one process; on several it runs with the factor 0,
    and its gradients must be finite.

    Args:
        count: Where the tokens are: ``auto`` asks the module's ``num_tokens(batch)`` if it has one, else takes
            ``shift_labels`` or ``labels`` of the batch; a dotted path into the batch (``labels``, ``0.mask``, ``1``) to
            labels or a mask; ``self.NAME``, a method of the module that gets the batch and returns the number. Such a
            method gets the batch before it is moved to the device, unless a hook has a hand in its transfer.
        ignore_index: Label that counts for nothing.
        mask: Whether ``count`` names a mask, whose non-zero elements count, instead of labels; boolean ones always do.
        shift: Whether the loss leaves out the first label of each sequence; ``None``: where the labels are called
            ``labels`` and a transformers causal language model, which shifts them, is in the module.

    Raises:
        ConfigurationError: Where nothing in a batch has the name, or ``auto`` finds no labels.
        ConflictError: With manual optimization, and where gradients are gone before the window's tokens are known.
    """

    phase = Phase.LOSS
    traits = frozenset({Trait.NEEDS_ALL_GRADIENTS})
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (4, "accumulated gradients are those of the big batch")}

    def __init__(
        self, count: str = "auto", ignore_index: int = -100, mask: bool = False, shift: bool | None = None
    ) -> None:
        super().__init__()
        if not count or not all(count.split(".")):
            allowed = "auto, a dotted path into the batch or self.METHOD"
            raise refusal("TokenWeightedAccumulation", "count", allowed, count)
        self.count = count
        self.ignore_index = ignore_index
        self.mask = mask
        self.shift = shift
        self._window: dict[int, int] = {}  # tokens by micro-batch, of those that were differentiated
        self._counted: int | None = None  # tokens of the batch under way, from before its transfer
        self._batch = (0, 0)  # number of the micro-batch under way, its tokens
        self._reference: float | None = None  # of the window; None before the first one
        self._agreed: float | None = None  # that of the next window, where several processes know it
        self._complete = False
        self._alone = True
        self._resumed: dict[str, Any] = {}

    def check(self, trainer: Any, module: Any) -> None:
        name = type(module).__name__
        if not module.automatic_optimization:
            raise ConflictError(
                f"TokenWeightedAccumulation scales the losses of automatic optimization, but {name} optimizes "
                "manually: there, divide the sums of the losses by the tokens yourself"
            )
        if trainer.strategy.handles_gradient_accumulation:
            raise ConflictError(
                f"TokenWeightedAccumulation: {type(trainer.strategy).__name__} accumulates by itself and hands no "
                "window over; use DDP or ModelParallelStrategy"
            )
        if self.count.startswith("self.") and not callable(getattr(module, self.count[5:], None)):
            raise ConfigurationError(
                f"TokenWeightedAccumulation: count is {self.count!r}, but {name} has no such method"
            )

    def describe(self, module: nn.Module) -> Report:
        source = f"{_COUNTER}(batch)" if self.count == "auto" and hasattr(module, _COUNTER) else self.count
        return Report(f"sums over tokens by all tokens of an optimizer step, counted by {source}")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if any(hooks_after_accumulation(p) for p in pl_module.parameters()):
            raise ConflictError(
                "TokenWeightedAccumulation: a parameter has a post-accumulate hook, which uses its gradient before the "
                "tokens of the window are counted; leave out the optimizer in the backward pass, or this technique"
            )
        self._window, self._reference = {}, None
        self._alone = trainer.world_size == 1
        self._agreed = None if self._alone else self._resumed.get("agreed")
        wrap_method(pl_module, "backward", _backward)
        if arrives_unchanged(trainer):
            wrap_method(trainer.strategy, "batch_to_device", _batch_to_device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the tokens; at a window's start agree on a reference with the other ranks."""
        counted, self._counted = self._counted, None
        tokens = self._count(pl_module, batch) if counted is None else counted
        resumed, self._resumed = self._resumed, {}
        if "window" in resumed and any(parameter.grad is not None for parameter in pl_module.parameters()):
            self._window, self._reference = resumed["window"], resumed["reference"]
        if batch_idx % trainer.accumulate_grad_batches == 0 or self._reference is None:
            self._window = {}
            if self._agreed is None:
                self._reference = _sum_over_ranks(trainer, tokens) / trainer.world_size or 1.0
            else:
                self._reference = self._agreed
        self._batch = (batch_idx, tokens)
        self._complete = False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._finish(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        unwrap_method(pl_module, "backward", _backward)
        unwrap_method(trainer.strategy, "batch_to_device", _batch_to_device)
        super().teardown(trainer, pl_module, stage)

    @property
    def batch_weight(self) -> float:  # type: ignore[override]
        return self._batch[1]

    def state_dict(self) -> dict[str, Any]:
        """The tokens of a window that is still open; on one process, where `ExactResume` keeps its gradients.

        On several the reference of the next window.
        """
        if self._agreed is not None:
            return {"agreed": self._agreed}
        kept = self._alone and self._window and not self._complete
        return {"window": dict(self._window), "reference": self._reference} if kept else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    def _scale(self, trainer: Any, loss: Tensor) -> Tensor | None:
        """The loss times its share of the reference; ``None`` for a backward pass that is left out."""
        batch_idx, tokens = self._batch
        self._window[batch_idx] = tokens
        if tokens == 0 and trainer.world_size == 1:
            return None
        assert self._reference is not None
        factor = tokens / self._reference
        return loss if factor == 1 else loss * factor

    def _finish(self, trainer: Any) -> None:
        if self._complete:
            return
        self._complete = True
        assert self._reference is not None
        total = _sum_over_ranks(trainer, sum(self._window.values()))
        if not self._alone:
            number = self._batch[0] % trainer.accumulate_grad_batches + 1  # on every rank, whatever its steps returned
            self._agreed = total / (trainer.world_size * number) or 1.0
        factor = combined_factor(trainer.world_size, trainer.accumulate_grad_batches, self._reference, total)
        if factor != 1:
            scale_gradients((g for o in trainer.optimizers for g in gradients_of(o).values()), factor)

    def _count(self, module: Any, batch: Any) -> int:
        if self.count == "auto" and callable(getattr(module, _COUNTER, None)):
            return int(getattr(module, _COUNTER)(batch))
        if self.count.startswith("self."):
            return int(getattr(module, self.count[5:])(batch))
        path = self.count if self.count != "auto" else self._labels_of(batch)
        target: Any = batch
        for part in path.split("."):
            target = _member(target, part, path)
        if not isinstance(target, Tensor) or target.is_floating_point():
            kind = f"{target.dtype} tensor" if isinstance(target, Tensor) else type(target).__name__
            raise ConfigurationError(
                f"TokenWeightedAccumulation: count={path!r} must name labels or a mask (integers or booleans), got a "
                f"{kind}"
            )
        shift = self.shift if self.shift is not None else path == "labels" and any(map(shifts_labels, module.modules()))
        return count_tokens(target != 0 if self.mask else target, ignore_index=self.ignore_index, shift=shift)

    def _labels_of(self, batch: Any) -> str:
        found = [key for key in ("shift_labels", "labels") if isinstance(batch, Mapping) and batch.get(key) is not None]
        if not found:
            raise ConfigurationError(
                f"TokenWeightedAccumulation: count=auto finds no 'labels' in {_contents(batch)}; name what is to be "
                f"counted (count='attention_mask', mask=True), or give the module a method {_COUNTER}(batch)"
            )
        return found[0]


@torch.no_grad()
def scale_gradients(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients in place, shards too; each once."""
    each = {id(gradient): gradient for gradient in gradients}
    if each:
        foreach_mul_(list(each.values()), factor)


def _backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """The module's backward pass of the scaled loss; on the window's last one the gradients are completed."""
    technique = next(c for c in self.trainer.callbacks if isinstance(c, TokenWeightedAccumulation))
    scaled = technique._scale(self.trainer, loss)
    if scaled is not None:
        inner_method(self, "backward", _backward)(scaled, *args, **kwargs)
    technique._complete = False  # an optimizer may run its closure more than once
    if not accumulates(self.trainer):
        technique._finish(self.trainer)


def _batch_to_device(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The strategy's; a batch of training is counted before, as a count on a GPU has to be waited for."""
    trainer = self.lightning_module.trainer
    if trainer.training and batch is not None:  # which Lightning passes over
        technique = next(c for c in trainer.callbacks if isinstance(c, TokenWeightedAccumulation))
        technique._counted = technique._count(self.lightning_module, batch)
    return inner_method(self, "batch_to_device", _batch_to_device)(batch, *args, **kwargs)


def _sum_over_ranks(trainer: Any, number: int) -> float:
    if trainer.world_size == 1:
        return float(number)
    ours = torch.tensor(number, dtype=torch.int64, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(ours, reduce_op="sum"))


def _member(batch: Any, part: str, path: str) -> Any:
    try:
        if isinstance(batch, Mapping):
            return batch[part]
        return batch[int(part)] if isinstance(batch, list | tuple) else getattr(batch, part)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"TokenWeightedAccumulation: count={path!r}: there is no {part!r} in {_contents(batch)}"
        ) from error


def _contents(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a batch with {', '.join(map(str, batch))}"
    return f"a batch of {len(batch)} parts" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
