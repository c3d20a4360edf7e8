"""A network that keeps only the first blocks of its lists, since equal blocks need not all be built or traced."""

import contextlib
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.wraps import inner_method, wrap_method
from lit_efficient.mechanisms.blocks.block_map import find_blocks


def blocks_by_list(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the repeated blocks of a network by the name of the list that holds them; empty if there are none."""
    found: dict[str, list[nn.Module]] = {}
    with contextlib.suppress(ConfigurationError):  # a network without repeated blocks
        for name, block in find_blocks(module, who="FewBlocks", every=True):
            parent = name.rpartition(".")[0]
            if isinstance(module.get_submodule(parent), nn.ModuleList | nn.Sequential):
                found.setdefault(parent, []).append(block)
    return found


class FewBlocks(Callback):
    """Removes all but the first blocks of each list. It must be the first callback, to act before any technique.

    Args:
        keep: Number of blocks to keep.
        only_above: Act only on a network with a single list of more than so many equal blocks; ``None`` acts on all
            lists.

    Attributes:
        before: Number of blocks that the single list had; 0 if ``only_above`` is ``None`` or nothing was removed.
    """

    def __init__(self, keep: int = 2, only_above: int | None = None) -> None:
        self.keep = keep
        self.only_above = only_above
        self.before = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The callback is passed in an attribute, because a closure would not survive a deep copy.
        pl_module.__dict__["_lit_efficient_few"] = self
        wrap_method(pl_module, "configure_model", _configure_model)

    def cut(self, module: nn.Module) -> None:
        """Remove all but the first ``keep`` blocks of each list, or nothing if ``only_above`` does not allow it."""
        lists = blocks_by_list(module)
        if self.only_above is not None:
            blocks = next(iter(lists.values()), [])
            if len(lists) != 1 or len(blocks) <= self.only_above or len({_structure(block) for block in blocks}) > 1:
                return
            self.before = len(blocks)
        for name, blocks in lists.items():
            parent: Any = module.get_submodule(name)
            # A list may contain other modules between the blocks, so indices of blocks are not those of the list.
            removed = {id(block) for block in blocks[self.keep :]}
            for i in reversed(range(len(parent))):
                if id(parent[i]) in removed:
                    del parent[i]


def _structure(block: nn.Module) -> tuple[object, ...]:
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return type(block), *((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)


def _configure_model(self: nn.Module) -> None:
    inner_method(self, "configure_model", _configure_model)()
    few = self.__dict__.pop("_lit_efficient_few", None)
    if few is not None:
        few.cut(self)
