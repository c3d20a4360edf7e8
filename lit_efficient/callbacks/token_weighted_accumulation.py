"""Token-weighted accumulation: gradients equal those of one big batch, whatever the sizes of its micro-batches.

    g = sum_{r,k} n_rk g_rk / sum_{r,k} n_rk        micro-batch k of rank r: mean loss over n_rk tokens, gradient g_rk

Saves: nothing; accumulation and data parallelism give the gradient of the big batch. Plain Lightning averages the means
    of the micro-batches, and divides a short last window by too many micro-batches
Costs: a reduction of one number over the ranks and a pass over the gradients per optimizer step. Batches are counted on
    the host, or read from the device if a hook takes part in their transfer
Source: the analysis of transformers' and Unsloth's accumulation bug, https://huggingface.co/blog/gradient_accumulation

Each loss is scaled by n_rk / n, and the sum of gradients by ranks * micro-batches * n / tokens. Here n is the first
count of the window or, with several processes, the mean count of the window before, which all of them know. Both
factors are exactly 1 if all counts are equal, so the result is then bitwise that of Lightning.
"""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.gradients import gradients_of
from lit_efficient.application.loss import LossHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, refusal
from lit_efficient.internals.lightning_loops import accumulates, arrives_unchanged
from lit_efficient.internals.torch_optimizers import foreach_mul_
from lit_efficient.internals.torch_tensors import hooks_after_accumulation
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.losses.deferred_logits import shifts_labels
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_COUNTER = "num_tokens"  # method of the module that count="auto" prefers


def count_tokens(target: Tensor, *, ignore_index: int = -100, shift: bool = False) -> int:
    """Return the number of tokens of a batch that contribute to the loss.

    Args:
        target: Labels [B, T], or a boolean mask [B, T] that is true for tokens that contribute.
        ignore_index: Label of tokens that do not contribute.
        shift: Leave out the first position, which models that shift labels by themselves do not predict.
    """
    if shift:
        target = target[..., 1:]
    if target.dtype == torch.bool:
        contributes = target
    else:
        contributes = target != ignore_index
    return int(contributes.sum())


def combined_factor(ranks: int, micro_batches: int, reference: float, tokens: float) -> float:
    """Return the factor that turns averaged gradients into the gradient of the mean over all tokens.

    The gradients are those of losses that were scaled by n_rk / ``reference``.

    Args:
        ranks: Number of processes over which gradients were averaged.
        micro_batches: Number by which each loss was divided.
        reference: Number of tokens by which losses were scaled.
        tokens: Number of tokens of all ranks and micro-batches.
    """
    if not tokens:
        return 1.0
    return ranks * micro_batches * reference / tokens


class TokenWeightedAccumulation(LossHooks, Technique):
    """Weigh all micro-batches of an optimizer step, on all ranks, by their numbers of tokens.

    The module's ``training_step`` must return the mean over the tokens of its batch. Values that the module logs do not
    change. Gradients are final in ``on_after_backward`` of the last micro-batch, before any clipping. On one process
    the backward pass of a micro-batch without tokens is skipped. On several processes it runs with the factor 0, so its
    gradients must be finite.

    Args:
        count: Source of the number of tokens. ``auto``: the module's method ``num_tokens(batch)`` if it exists, else
            ``shift_labels`` or ``labels`` of the batch. A dotted path into the batch (``labels``, ``0.mask``, ``1``):
            labels or a mask. ``self.NAME``: a method of the module that gets the batch and returns the number. The
            method gets the batch before it is moved to the device, unless a hook takes part in the transfer.
        ignore_index: Label of tokens that do not contribute.
        mask: ``count`` names a mask whose nonzero elements contribute, instead of labels. Boolean tensors are always
            masks.
        shift: Leave out the first label of each sequence. ``None``: if the labels are called ``labels`` and the module
            contains a causal language model of transformers, which shifts them.

    Raises:
        ConfigurationError: If the batch has no such entry, or ``auto`` finds no labels.
        ConflictError: With manual optimization, or if gradients are used before the tokens of the window are counted.
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
        self._window: dict[int, int] = {}  # tokens of each micro-batch of the window that had a backward pass
        self._counted: int | None = None  # tokens of the present batch, if counted before its transfer
        self._batch = (0, 0)  # number of the present micro-batch, and its tokens
        self._reference: float | None = None  # n of the window; None before the first window
        self._agreed: float | None = None  # n of the next window, with several processes
        self._complete = False  # the window's gradients have their final scale
        self._alone = True  # one process
        self._resumed: dict[str, Any] = {}

    def check(self, trainer: Any, module: Any) -> None:
        name = type(module).__name__
        if not module.automatic_optimization:
            raise ConflictError(
                f"TokenWeightedAccumulation scales the losses of automatic optimization, but {name} optimizes "
                "manually. Divide the sums of its losses by the number of tokens in training_step"
            )
        if trainer.strategy.handles_gradient_accumulation:
            raise ConflictError(
                f"TokenWeightedAccumulation: {type(trainer.strategy).__name__} accumulates gradients by itself, so "
                "they cannot be scaled. Use DDP or ModelParallelStrategy"
            )
        if self.count.startswith("self.") and not callable(getattr(module, self.count[5:], None)):
            raise ConfigurationError(
                f"TokenWeightedAccumulation: count is {self.count!r}, but {name} has no such method"
            )

    def describe(self, module: nn.Module) -> Report:
        source = self.count
        if self.count == "auto" and hasattr(module, _COUNTER):
            source = f"{_COUNTER}(batch)"
        return Report(f"losses are means over all tokens of an optimizer step, counted by {source}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if any(hooks_after_accumulation(p) for p in pl_module.parameters()):
            raise ConflictError(
                "TokenWeightedAccumulation: a parameter has a post-accumulate hook, which uses the gradient before the "
                "tokens of the window are counted. Leave out OptimizerInBackward, or this technique"
            )
        self._window = {}
        self._reference = None
        self._alone = trainer.world_size == 1
        self._agreed = None if self._alone else self._resumed.get("agreed")
        wrap_method(pl_module, "backward", _backward)
        if arrives_unchanged(trainer):
            wrap_method(trainer.strategy, "batch_to_device", _batch_to_device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: object, batch_idx: int) -> None:
        """Count the tokens. At the start of a window choose its reference, in agreement with the other ranks."""
        tokens = self._counted
        self._counted = None
        if tokens is None:
            tokens = self._count(pl_module, batch)
        resumed = self._resumed
        self._resumed = {}
        # An open window continues only if its gradients were restored as well.
        if "window" in resumed and any(parameter.grad is not None for parameter in pl_module.parameters()):
            self._window = resumed["window"]
            self._reference = resumed["reference"]
        if batch_idx % trainer.accumulate_grad_batches == 0 or self._reference is None:
            self._window = {}
            if self._agreed is None:
                self._reference = _sum_over_ranks(trainer, tokens) / trainer.world_size or 1.0
            else:
                self._reference = self._agreed
        self._batch = (batch_idx, tokens)
        self._complete = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._finish(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        unwrap_method(pl_module, "backward", _backward)
        unwrap_method(trainer.strategy, "batch_to_device", _batch_to_device)
        super().teardown(trainer, pl_module, stage)

    @property
    def batch_weight(self) -> float:  # type: ignore[override]
        return self._batch[1]

    @property
    def batch_factor(self) -> float:  # type: ignore[override]
        if self._reference:
            return self._batch[1] / self._reference
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the tokens of an open window, or with several processes the reference of the next window.

        `ExactResume` saves the gradients of an open window, on one process only.
        """
        if self._agreed is not None:
            return {"agreed": self._agreed}
        if self._alone and self._window and not self._complete:
            return {"window": dict(self._window), "reference": self._reference}
        return {}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        self._resumed = state_dict

    def _scale(self, trainer: Any, loss: Tensor) -> Tensor | None:
        """Return the scaled loss of the present batch, or ``None`` if its backward pass is skipped."""
        batch_idx, tokens = self._batch
        self._window[batch_idx] = tokens
        if tokens == 0 and trainer.world_size == 1:
            return None
        assert self._reference is not None
        factor = self.batch_factor
        return loss if factor == 1 else loss * factor

    def _finish(self, trainer: Any) -> None:
        """Give the window's gradients their final scale, once."""
        if self._complete:
            return
        self._complete = True
        assert self._reference is not None
        total = _sum_over_ranks(trainer, sum(self._window.values()))
        if not self._alone:
            # The position in the window is the same on all ranks, also if a training step returned None.
            micro_batches = self._batch[0] % trainer.accumulate_grad_batches + 1
            self._agreed = total / (trainer.world_size * micro_batches) or 1.0
        factor = combined_factor(trainer.world_size, trainer.accumulate_grad_batches, self._reference, total)
        if factor != 1:
            scale_gradients((g for o in trainer.optimizers for g in gradients_of(o).values()), factor)

    def _count(self, module: nn.Module, batch: object) -> int:
        if self.count == "auto" and callable(getattr(module, _COUNTER, None)):
            return int(getattr(module, _COUNTER)(batch))
        if self.count.startswith("self."):
            return int(getattr(module, self.count[5:])(batch))
        path = self.count if self.count != "auto" else self._labels_of(batch)
        target = batch
        for part in path.split("."):
            target = _member(target, part, path)
        if not isinstance(target, Tensor) or target.is_floating_point():
            if isinstance(target, Tensor):
                kind = f"{target.dtype} tensor"
            else:
                kind = type(target).__name__
            raise ConfigurationError(
                f"TokenWeightedAccumulation: count={path!r} must name labels or a mask (integers or booleans), got a "
                f"{kind}"
            )
        shift = self.shift
        if shift is None:
            shift = path == "labels" and any(map(shifts_labels, module.modules()))
        if self.mask:
            target = target != 0
        return count_tokens(target, ignore_index=self.ignore_index, shift=shift)

    def _labels_of(self, batch: object) -> str:
        found = [key for key in ("shift_labels", "labels") if isinstance(batch, Mapping) and batch.get(key) is not None]
        if not found:
            raise ConfigurationError(
                f"TokenWeightedAccumulation: count=auto finds no 'labels' in {_contents(batch)}. Set count (for "
                f"example count='attention_mask', mask=True), or add a method {_COUNTER}(batch) to the module"
            )
        return found[0]


@torch.no_grad()
def scale_gradients(gradients: Iterable[Tensor], factor: float) -> None:
    """Multiply gradients by a factor, in place. Duplicates are multiplied once; of DTensors the local shard is."""
    unique = {id(gradient): gradient for gradient in gradients}
    if unique:
        foreach_mul_(list(unique.values()), factor)


def _backward(self: Any, loss: Tensor, *args: object, **kwargs: object) -> None:
    """Run the module's backward pass on the scaled loss, and complete the gradients after the last of a window."""
    technique = next(c for c in self.trainer.callbacks if isinstance(c, TokenWeightedAccumulation))
    scaled = technique._scale(self.trainer, loss)
    if scaled is not None:
        inner_method(self, "backward", _backward)(scaled, *args, **kwargs)
    technique._complete = False  # an optimizer may call its closure several times
    if not accumulates(self.trainer):
        technique._finish(self.trainer)


def _batch_to_device(self: Any, batch: object, *args: object, **kwargs: object) -> Any:
    """Count a training batch before the strategy moves it, because a count on a GPU would wait for the GPU."""
    trainer = self.lightning_module.trainer
    if trainer.training and batch is not None:  # Lightning skips a batch that is None
        technique = next(c for c in trainer.callbacks if isinstance(c, TokenWeightedAccumulation))
        technique._counted = technique._count(self.lightning_module, batch)
    return inner_method(self, "batch_to_device", _batch_to_device)(batch, *args, **kwargs)


def _sum_over_ranks(trainer: Trainer, number: int) -> float:
    if trainer.world_size == 1:
        return float(number)
    ours = torch.tensor(number, dtype=torch.int64, device=trainer.strategy.root_device)
    return float(trainer.strategy.reduce(ours, reduce_op="sum"))


def _member(batch: object, part: str, path: str) -> object:
    try:
        if isinstance(batch, Mapping):
            return batch[part]
        if isinstance(batch, list | tuple):
            return batch[int(part)]
        return getattr(batch, part)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"TokenWeightedAccumulation: count={path!r}: there is no {part!r} in {_contents(batch)}"
        ) from error


def _contents(batch: object) -> str:
    if isinstance(batch, Mapping):
        return f"a batch with {', '.join(map(str, batch))}"
    if isinstance(batch, list | tuple):
        return f"a batch of {len(batch)} parts"
    return f"a {type(batch).__name__}"
