"""A network with the first blocks of its lists alone: what is alike need not be built, or looked at, so many times."""

import contextlib
from typing import Any

from lightning.pytorch import Callback
from torch import nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.wraps import inner_method, wrap_method
from lit_efficient.mechanisms.blocks.block_map import find_blocks


def blocks_by_list(module: nn.Module) -> dict[str, list[nn.Module]]:
    """The repeated blocks of a network by the list that holds them."""
    held: dict[str, list[nn.Module]] = {}
    with contextlib.suppress(ConfigurationError):  # there are none
        for name, block in find_blocks(module, who="FewBlocks", every=True):
            parent = name.rpartition(".")[0]
            if isinstance(module.get_submodule(parent), nn.ModuleList | nn.Sequential):
                held.setdefault(parent, []).append(block)
    return held


class FewBlocks(Callback):
    """Keeps the first blocks of each list, before any technique acts: it is the first of the callbacks.

    Args:
        keep: How many.
        only_above: Act where there is one list, of more blocks than these, and they are alike; ``None``: on any lists.
    """

    def __init__(self, keep: int = 2, only_above: int | None = None) -> None:
        self.keep, self.only_above = keep, only_above
        self.before = 0  # blocks of the one list that was cut

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.__dict__["_lit_efficient_few"] = self
        wrap_method(pl_module, "configure_model", _configure_model)

    def cut(self, module: nn.Module) -> None:
        """Take the other blocks out of a network."""
        lists = blocks_by_list(module)
        if self.only_above is not None:
            blocks = next(iter(lists.values()), [])
            if len(lists) != 1 or len(blocks) <= self.only_above or len({_shape(block) for block in blocks}) > 1:
                return
            self.before = len(blocks)
        for name, blocks in lists.items():
            parent: Any = module.get_submodule(name)
            gone = {id(block) for block in blocks[self.keep :]}
            for i in reversed([i for i, child in enumerate(parent) if id(child) in gone]):
                del parent[i]


def _shape(block: nn.Module) -> tuple[Any, ...]:
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return type(block), *((name, t.shape, t.dtype, t.requires_grad) for name, t in tensors)


def _configure_model(self: Any) -> None:
    inner_method(self, "configure_model", _configure_model)()
    few = self.__dict__.pop("_lit_efficient_few", None)
    if few is not None:
        few.cut(self)
