"""What a run that ran out of memory could do: techniques of the catalogue, tried on its network without data."""

import copy
from collections import defaultdict
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

import lit_efficient
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.catalog import helping, read_cards
from lit_efficient.declaration import Declaration, Phase, check_conflicts, overrides, parts_of
from lit_efficient.errors import LitEfficientError, is_out_of_memory

_MOST = 6


class MemoryAdvice(Callback):
    """Add to an out-of-memory error what this run could do about it, best first, as lines for its config."""

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if is_out_of_memory(exception) and (lines := memory_advice(trainer, pl_module)):
            exception.add_note("\n".join(["What this run could do, best first (a line for its config):", *lines]))


def memory_advice(trainer: Any, module: Any) -> list[str]:
    """A line of YAML for each technique that saves memory and fits the run, the one that costs least first."""
    lines = []
    for name, reason in helping(read_cards(), "memory"):
        kind = getattr(lit_efficient, name)
        if not isinstance(kind, type) or not issubclass(kind, Declaration):
            continue
        if _spares(technique := kind(), trainer) and _fits(technique, trainer, module):
            lines.append(f"  trainer: {{callbacks+: [{name}]}}  # {reason}")
    return lines[:_MOST]


def _spares(technique: Declaration, trainer: Any) -> bool:
    """Whether it spares anything where the run is: evaluations keep no activations, and states come with a step."""
    if trainer.training:
        return True
    if overrides(technique, "rewrite_optimizer"):
        return bool(trainer.optimizers) and trainer.global_step > 0
    return technique.phase is not Phase.RECOMPUTE and (trainer.state.fn == "fit" or overrides(technique, "transform"))


def _fits(technique: Declaration, trainer: Any, module: Any) -> bool:
    """Whether the technique does not refuse the trainer, the network and the optimizers."""
    if any(isinstance(part, type(technique)) for part in parts_of(trainer)):
        return False
    try:
        copied, optimizers = _without_data(module, trainer)
        check_conflicts([*parts_of(trainer), technique, trainer.datamodule, *trainer.optimizers])
        technique.check(trainer, module)
        if overrides(technique, "transform"):
            technique.transform(copied)
        elif isinstance(technique, OptimizerHooks) and overrides(technique, "rewrite_optimizer"):
            for optimizer in optimizers:
                technique.rewrite_optimizer(optimizer, copied)
    except LitEfficientError:
        return False
    except Exception:  # without data it is not known
        return True
    return True


def _without_data(module: Any, trainer: Any) -> tuple[nn.Module, list[Optimizer]]:
    """Copies of module and optimizers whose tensors have the memory of one element, on the CPU."""
    memo: dict[int, Any] = {id(trainer): None}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(_like(parameter), parameter.requires_grad)
    memo |= {id(buffer): _like(buffer) for buffer in module.buffers()}
    memo |= {id(optimizer.state): defaultdict(dict) for optimizer in trainer.optimizers}
    return copy.deepcopy(module, memo), copy.deepcopy(list(trainer.optimizers), memo)


def _like(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
