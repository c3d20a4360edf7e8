"""Base of techniques that freeze a network and train adapters."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.mechanisms.adapters.base import adapter_parameters, check, left_to_train, trim
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class AdapterTechnique(OptimizerHooks, CheckpointHooks, Technique):
    """Technique whose ``transform`` ends with :func:`~lit_efficient.mechanisms.adapters.base.freeze_base`."""

    traits = frozenset({Trait.REFUSES_EARLY})
    alters = ("weights",)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if traits_of(trainer.strategy).dtensors:
            # The formats of sharded checkpoints are loaded only for a run that shards.
            from lit_efficient.mechanisms.adapters.sharded_restore import restore_without_base

            restore_without_base(trainer.strategy)

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        return left_to_train(module)

    def adapters(self, module: nn.Module) -> list[nn.Parameter]:
        return adapter_parameters(module)

    @classmethod
    def placement(cls, module: nn.Module) -> dict[str, Any]:
        """Return the positions of the adapters in the module, as primitives for a checkpoint."""
        raise NotImplementedError

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        trim(module, checkpoint)
        checkpoint["lit_efficient"][cls.keeps] = cls.placement(module)

    @classmethod
    def check_checkpoint(cls, module: nn.Module, checkpoint: Mapping[str, object]) -> None:
        """Check that the base is the one with which the adapters were trained."""
        check(module, checkpoint)
