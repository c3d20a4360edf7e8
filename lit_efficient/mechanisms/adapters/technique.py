"""Base of techniques that freeze a network and train adapters, and checkpoints without the frozen base under FSDP2."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.distributed.shards import asking_for, check_everywhere, check_surplus, checkpoint_keys
from lit_efficient.errors import CheckpointError
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.wraps import inner_method, wrap_method
from lit_efficient.mechanisms.adapters.base import (
    adapter_parameters,
    check,
    frozen_keys,
    has_frozen_base,
    left_to_train,
    trim,
)
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class AdapterTechnique(OptimizerHooks, CheckpointHooks, Technique):
    """Technique whose ``transform`` ends with :func:`~lit_efficient.mechanisms.adapters.base.freeze_base`."""

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
        """Return the positions of the adapters in the module, as primitives for a checkpoint."""
        raise NotImplementedError

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        trim(module, checkpoint)
        checkpoint["lit_efficient"][cls.keeps] = cls.placement(module)

    @classmethod
    def check_checkpoint(cls, module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
        """Check that the base is the one with which the adapters were trained."""
        check(module, checkpoint)


def restore_without_base(strategy: Any) -> None:
    """Make Lightning's ModelParallelStrategy (FSDP2) restore checkpoints of adapters without the frozen base.

    This strategy restores each weight by itself, without the hooks that add the weights of the base, and requests all
    tensors of the module from a sharded checkpoint. The wrapped method requests only the tensors in the checkpoint,
    after a check that no trained tensor is missing. Other strategies and modules without a frozen base are not changed.
    """
    if traits_of(strategy).dtensors:
        wrap_method(strategy, "load_checkpoint", _load_checkpoint)


def _load_checkpoint(self: Any, checkpoint_path: Any, *arguments: Any, **named: Any) -> Any:
    module = self.lightning_module
    load = inner_method(self, "load_checkpoint", _load_checkpoint)
    path = Path(self.broadcast(checkpoint_path))
    if not has_frozen_base(module) or not path.exists():
        return load(path, *arguments, **named)
    check_everywhere(self, path)
    present = checkpoint_keys(path)
    check_adapters(module, present, path)
    with asking_for(module, present):
        return load(path, *arguments, **named)


def check_adapters(module: nn.Module, present: Collection[str], path: Path) -> None:
    """Check that a checkpoint contains all tensors of ``module`` except its frozen base, and no others.

    Raises:
        CheckpointError: If tensors are missing or left over. The message names the first ones.
    """
    check_surplus(module, present, path)
    own = module.state_dict().keys()
    wanted = own - frozen_keys(module, own)
    missing = sorted(wanted - set(present))
    if missing:
        listed = ", ".join(missing[:8])
        if len(missing) > 8:
            listed += ", ..."
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the {len(wanted)} tensors that are not part of the frozen base: {listed}. "
            "Resume from a checkpoint of the same adapters, or load the base's weights before techniques act (in "
            "__init__, setup or configure_model)"
        )
