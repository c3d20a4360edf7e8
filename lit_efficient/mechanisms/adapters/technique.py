"""What the techniques share that freeze a network and train what they put beside it."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.mechanisms.adapters.base import adapter_parameters, check, left_to_train, trim
from lit_efficient.mechanisms.adapters.sharded import restore_without_base
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class AdapterTechnique(OptimizerHooks, CheckpointHooks, Technique):
    """Its ``transform`` ends with :func:`~lit_efficient.mechanisms.adapters.base.freeze_base`."""

    traits = frozenset({Trait.REFUSES_EARLY})
    alters = ("weights",)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        restore_without_base(trainer.strategy)

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        return left_to_train(module)

    def adapters(self, module: nn.Module) -> list[nn.Parameter]:
        return adapter_parameters(module)

    @classmethod
    def placement(cls, module: nn.Module) -> dict[str, Any]:
        """What a reader of the checkpoint must know of where the adapters are."""
        raise NotImplementedError

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        trim(module, checkpoint)
        checkpoint["lit_efficient"][cls.keeps] = cls.placement(module)

    @classmethod
    def check_checkpoint(cls, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        """Compare the base with the one that the adapters were trained beside."""
        check(module, checkpoint)
