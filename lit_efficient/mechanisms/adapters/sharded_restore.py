"""Checkpoints of adapters without the frozen base, restored under FSDP2."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import nn

from lit_efficient.distributed.shards import asking_for, check_everywhere, check_surplus, checkpoint_keys
from lit_efficient.errors import CheckpointError
from lit_efficient.internals.wraps import inner_method, wrap_method
from lit_efficient.mechanisms.adapters.base import frozen_keys, has_frozen_base


def restore_without_base(strategy: Strategy) -> None:
    """Make Lightning's ModelParallelStrategy (FSDP2) restore checkpoints of adapters without the frozen base.

    This strategy restores each weight by itself, without the hooks that add the weights of the base, and requests all
    tensors of the module from a sharded checkpoint. The wrapped method requests only the tensors in the checkpoint,
    after a check that no trained tensor is missing. For modules without a frozen base nothing changes.
    """
    wrap_method(strategy, "load_checkpoint", _load_checkpoint)


def _load_checkpoint(self: Any, checkpoint_path: object, *arguments: object, **named: object) -> Any:
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
