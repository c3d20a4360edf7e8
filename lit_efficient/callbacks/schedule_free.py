"""Schedule-free training: AdamW without a learning-rate schedule, evaluated with averaged weights.

    train on y = (1 - b1) z + b1 x;    validate, test, predict and save x = the running average of z

Saves: the schedule, so that the number of steps need not be known; the state has 8 bytes per parameter as with AdamW
Costs: 4 bytes per parameter during validation and in checkpoints
Source: Defazio et al. (2024), https://arxiv.org/abs/2405.15682
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.mechanisms.averages.weights import check_unchanged, fingerprint
from lit_efficient.optimizers.fused_adamw import FusedAdamW
from lit_efficient.optimizers.schedule_free_adamw import ScheduleFreeAdamW
from lit_efficient.surgery import become
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class ScheduleFree(OptimizerHooks, Technique):
    """Replace the module's AdamW by schedule-free AdamW, and switch between training weights and averaged weights.

    Training steps use the training weights. Validation, and testing and prediction after the fit, use the averaged
    weights, and each checkpoint contains them. A resumed run continues from the training weights, bit for bit. A
    ``ScheduleFreeAdamW`` that the module or a config creates keeps its settings. Learning-rate schedulers still act,
    so the module should return none, except for a restart.

    Args:
        warmup_steps: Steps in which the rate grows linearly, at least 0. It only applies to a replaced AdamW.

    Raises:
        ConfigurationError: For an argument out of range, or for an optimizer that is neither AdamW, nor Adam
            without weight decay, nor ``ScheduleFreeAdamW``.
    """

    phase = Phase.OPTIMIZER
    traits = frozenset({Trait.SCHEDULE_FREE})
    alters = ("optimizer",)
    conflicts: ClassVar[dict[str | Trait, str]] = {
        **ScheduleFreeAdamW.conflicts,
        "BatchSizeFinder": "it runs trial steps without ScheduleFree, which switches the weights: use MaxBatchSize",
        "LearningRateFinder": "it runs trial steps without ScheduleFree, which switches the weights: use LRFinder",
        Trait.NO_SCHEDULE_FREE_FORM: "it has no schedule-free form. Leave ScheduleFree out, or use ScheduleFreeAdamW",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "needs no schedule, so a run may end at any step")}

    def __init__(self, warmup_steps: int = 0) -> None:
        super().__init__()
        check_number("ScheduleFree", "warmup_steps", warmup_steps, least=0, whole=True)
        self.warmup_steps = warmup_steps
        self._evaluated: list[float] = []  # fingerprint of the weights that are validated

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        kind = type(optimizer)
        if kind is not ScheduleFreeAdamW:
            if kind not in (torch.optim.AdamW, torch.optim.Adam, FusedAdamW):
                raise ConfigurationError(
                    f"ScheduleFree: {kind.__name__} has no schedule-free form. Use AdamW, FusedAdamW, "
                    "ScheduleFreeAdamW, or Adam without weight decay"
                )
            for group in optimizer.param_groups:
                if kind is torch.optim.Adam and group["weight_decay"] and not group["decoupled_weight_decay"]:
                    raise ConfigurationError(
                        f"ScheduleFree: Adam(weight_decay={group['weight_decay']:g}) adds the decay to the gradient, "
                        "which has no schedule-free form. Use AdamW, or weight_decay=0"
                    )
            for flag in ("amsgrad", "maximize"):
                if any(group.get(flag) for group in optimizer.param_groups):
                    raise ConfigurationError(
                        f"ScheduleFree: {kind.__name__}({flag}=True) has no schedule-free form. Set {flag}=False"
                    )
            become(optimizer, ScheduleFreeAdamW, warmup_steps=self.warmup_steps)
        return Report(f"{kind.__name__} without a schedule, {count:,} parameters averaged", parameters=count)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switch to the training weights, which may have been restored, and save averaged weights in checkpoints."""
        _switch(trainer, training=True)
        # The hook of the module, because Lightning calls no hooks of callbacks with ``save_weights_only``.
        wrap_method(pl_module, "on_save_checkpoint", _save_averages)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _switch(trainer, training=False)
        self._evaluated = fingerprint(_parameters(trainer))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            check_unchanged("ScheduleFree", self._evaluated, _parameters(trainer))
            _switch(trainer, training=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _switch(trainer, training=False)
        unwrap_method(pl_module, "on_save_checkpoint", _save_averages)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the averaged weights in the module, as at the end of training."""
        self.on_train_end(trainer, pl_module)
        super().on_exception(trainer, pl_module, exception)


def _schedule_free(trainer: Trainer) -> Iterator[ScheduleFreeAdamW]:
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, ScheduleFreeAdamW):
            yield optimizer


def _parameters(trainer: Trainer) -> list[Tensor]:
    return [p for optimizer in _schedule_free(trainer) for group in optimizer.param_groups for p in group["params"]]


def _switch(trainer: Trainer, training: bool) -> None:
    for optimizer in _schedule_free(trainer):
        if training:
            optimizer.train()
        else:
            optimizer.eval()


def _save_averages(self: LightningModule, checkpoint: dict[str, Any]) -> None:
    inner_method(self, "on_save_checkpoint", _save_averages)(checkpoint)
    for optimizer in _schedule_free(self.trainer):
        averages = optimizer.averages()
        for name, p in self.named_parameters(remove_duplicate=False):
            if p in averages and name in checkpoint["state_dict"]:
                checkpoint["state_dict"][name] = averages[p]
