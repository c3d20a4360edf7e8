"""Checkpoints without the frozen base under Lightning's ModelParallelStrategy (FSDP2).

That strategy restores weights tensor by tensor, past the hooks that fill in what such a checkpoint leaves out, and asks
a sharded checkpoint for all that the module has. Here it asks for what is there, after a check that all is there which
must be.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from lit_efficient.distributed.shards import check_everywhere, read_metadata
from lit_efficient.errors import CheckpointError
from lit_efficient.files.checkpoints import load_verified
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.wraps import inner_method, temporarily, wrap_method
from lit_efficient.mechanisms.adapters.base import frozen_keys, has_frozen_base


def restore_without_base(strategy: Any) -> None:
    """Let a ModelParallelStrategy restore adapters beside a base that its module has already; others can as they are.

    Modules without a frozen base are restored as before.
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


@contextmanager
def asking_for(module: Any, present: Collection[str]) -> Iterator[None]:
    """Have ``module`` ask a checkpoint for these of its keys alone."""

    def leave_out(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
        for key in state.keys() - present:
            del state[key]

    with module.register_state_dict_post_hook(leave_out), temporarily(module, strict_loading=False):
        yield


def check_adapters(module: nn.Module, present: Collection[str], path: Path) -> None:
    """Refuse a checkpoint that lacks anything of ``module`` but its frozen base, or holds more than it."""
    check_surplus(module, present, path)
    own = module.state_dict().keys()
    wanted = own - frozen_keys(module, own)
    missing = sorted(wanted - set(present))
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the {len(wanted)} tensors that train beside the frozen base: "
            f"{', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}. Resume from a checkpoint of the same "
            "adapters, or load the base's weights before techniques act (in __init__, setup or configure_model)"
        )


def check_surplus(module: Any, present: Collection[str], path: Path) -> None:
    """Refuse a checkpoint with tensors that ``module`` lacks: who asks for its own alone does not see that they go.

    Raises:
        CheckpointError: Naming what is left over.
    """
    over = sorted(set(present) - module.state_dict().keys())
    if over and module.strict_loading:
        raise CheckpointError(f"{path} holds {len(over)} tensors that the module lacks: {', '.join(over[:3])}")


def checkpoint_keys(path: Path) -> set[str]:
    """The keys of the ``state_dict`` in a checkpoint that was checked: a file, or a folder; no tensor is read."""
    if path.is_file():
        return set(load_verified(path, verify=False, mapped=True).get("state_dict", ()))
    return {places[1] for places in read_metadata(path).planner_data.values() if places[0] == "state_dict"}
