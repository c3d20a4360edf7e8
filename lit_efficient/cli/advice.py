"""Advice for a run: sizes that its GPU multiplies slowly, and techniques with which it needs less memory.

The techniques are those of the catalogue, tried on the run's network without data after it ran out of memory.
"""

import copy
from collections import defaultdict

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

import lit_efficient
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.catalog import helping, read_cards
from lit_efficient.declaration import Declaration, Phase, check_conflicts, overrides, parts_of
from lit_efficient.errors import LitEfficientError, is_out_of_memory
from lit_efficient.mechanisms.tensor_cores import capability_of, rows_of, slow_sizes
from lit_efficient.surgery import computed

_MOST = 6  # lines


class MemoryAdvice(Callback):
    """Adds lines for the config to an out-of-memory error, the best one first."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not is_out_of_memory(exception):
            return
        lines = memory_advice(trainer, pl_module)
        if lines:
            exception.add_note("\n".join(["What this run could do, best first (a line for its config):", *lines]))


class SizesAdvice(Callback):
    """Names sizes of the network and of the first batch that the run's GPU multiplies slowly, once."""

    def __init__(self) -> None:
        self._done = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        capability = capability_of(trainer.strategy.root_device)
        if self._done or capability is None:
            return
        self._done = True
        lines = slow_sizes(pl_module, rows_of(batch), str(trainer.precision), capability)
        if lines:
            rank_zero_info(f"sizes: {'. '.join(lines)}")


def memory_advice(trainer: Trainer, module: LightningModule) -> list[str]:
    """Return a line of YAML for each technique that saves memory and fits the run, the one that costs least first."""
    lines = []
    for name, reason in helping(read_cards(), "memory"):
        kind = getattr(lit_efficient, name)
        if not isinstance(kind, type) or not issubclass(kind, Declaration):
            continue
        technique = kind()
        if _saves_now(technique, trainer) and _fits(technique, trainer, module):
            lines.append(f"  trainer: {{callbacks+: [{name}]}}  # {reason}")
    return lines[:_MOST]


def _saves_now(technique: Declaration, trainer: Trainer) -> bool:
    """Return whether a technique saves memory in the part of the run that failed."""
    if trainer.training:
        return True
    if overrides(technique, "rewrite_optimizer"):  # optimizer states exist after the first step
        return bool(trainer.optimizers) and trainer.global_step > 0
    if technique.phase is Phase.RECOMPUTE:  # evaluations keep no activations
        return False
    return trainer.state.fn == "fit" or overrides(technique, "transform")


def _fits(technique: Declaration, trainer: Trainer, module: LightningModule) -> bool:
    """Return whether a technique accepts the trainer, the network and the optimizers."""
    parts = parts_of(trainer)
    if any(isinstance(part, type(technique)) for part in parts):
        return False
    try:
        copied, optimizers = _without_data(module, trainer)
        check_conflicts([*parts, technique, getattr(trainer, "datamodule", None), *trainer.optimizers])
        technique.check(trainer, module)
        if overrides(technique, "transform"):
            technique.transform(copied)
        elif isinstance(technique, OptimizerHooks) and overrides(technique, "rewrite_optimizer"):
            for optimizer in optimizers:
                technique.rewrite_optimizer(optimizer, copied)
    except LitEfficientError:
        return False
    except Exception:  # the copy has no data, so the failure says nothing about the run
        return True
    return True


def _without_data(module: LightningModule, trainer: Trainer) -> tuple[nn.Module, list[Optimizer]]:
    """Return copies of module and optimizers whose tensors take the memory of one element, on the CPU."""
    memo: dict[int, object] = {id(trainer): None, **computed(module)}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(_like(parameter), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = _like(buffer)
    for optimizer in trainer.optimizers:
        memo[id(optimizer.state)] = defaultdict(dict)
    return copy.deepcopy(module, memo), copy.deepcopy(list(trainer.optimizers), memo)


def _like(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
