"""Units of FSDP2: modules whose parameters are gathered together, and hooks that gather them outside of a forward."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import distributed, nn

from lit_efficient.internals.torch_modules import StaysFloat32, tensor_tables
from lit_efficient.losses.deferred_logits import output_head
from lit_efficient.surgery import count, is_sharded

Sharded: TypeAlias = Any  # a module to which fully_shard has added FSDPModule's methods


def ends_of(module: nn.Module, blocks: list[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the embeddings and output heads outside of ``blocks`` with at least a quarter of a block's parameters.

    Returns:
        All of them, and the heads among them.
    """
    inside = {id(part) for block in blocks for part in block.modules()}
    outside = [part for part in module.modules() if id(part) not in inside]
    networks = (output_head(part) for part in outside if part is not module)
    heads = {id(head): head for head in networks if isinstance(head, nn.Linear)}
    least = min((count(block.parameters()) for block in blocks), default=0) / 4
    ends = [part for part in outside if isinstance(part, nn.Embedding) or id(part) in heads]
    ends = [end for end in ends if count(end.parameters()) >= least]
    return ends, [end for end in ends if id(end) in heads]


def owns_its_parameters(unit: nn.Module, root: nn.Module) -> bool:
    """Return whether a module has parameters and shares none of them with a module outside of it."""
    own = {id(p) for p in unit.parameters()}
    seen = {id(unit)}  # the walk does not enter the unit, whose modules may be reachable elsewhere
    waiting = [root]
    while own and waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            waiting.extend(part.children())
            if any(id(p) in own for p in part.parameters(recurse=False)):
                return False
    return bool(own)


@torch.no_grad()
def same_everywhere(module: nn.Module, device: torch.device) -> None:
    """Copy the parameters and buffers of process 0 to all processes."""
    if distributed.get_world_size() == 1:
        return
    for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
        if tensor.is_meta:
            continue
        there = tensor.data.to(device).contiguous()
        distributed.broadcast(there, 0)
        if there.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(there)


def gather_when_called(root: Sharded, units: Sequence[Sharded]) -> None:
    """Register hooks that gather weights for parts that are called outside of their unit's forward pass.

    Outside of a training step, such as generation in a callback, these are parts of the module that belong to no unit.
    In a step these are parts of a block that the network calls directly, as diffusers' DiT calls the first block's
    embedding.
    """

    def gather(*_: object) -> None:
        root.unshard()

    for part in _outside(root):
        if any(True for _ in part.parameters()):
            part.register_forward_pre_hook(torch.compiler.disable(gather))
    for unit in units:
        for part in unit.modules():
            if part is not unit and tensor_tables(part)[0]:
                part.register_forward_pre_hook(partial(gather_unit, unit))


def gather_unit(unit: Sharded, part: nn.Module, _: object) -> None:
    """Forward pre-hook of a part that gathers its unit if its own weights are shards."""
    if not torch.compiler.is_compiling() and any(map(is_sharded, tensor_tables(part)[0].values())):
        unit.unshard()


def _outside(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in ``root`` that are gathered together with it."""
    for part in root.children():
        if not hasattr(part, "unshard"):
            yield part
            yield from _outside(part)


def float32_parts(module: nn.Module, units: list[nn.Module], low: bool) -> list[list[nn.Module]]:
    """Return the float32 parts of each unit, and of the rest of the module, that must be gathered apart.

    A part is one if it trains beside parameters of other formats in its unit, or if units are gathered in 16 bits.

    Args:
        module: The module.
        units: Its units.
        low: Whether units are gathered in 16 bits.
    """
    wide: list[nn.Module] = [part for part in module.modules() if isinstance(part, StaysFloat32) and "" in part.float32]
    left = {id(part): part for part in wide if part not in units and owns_its_parameters(part, module)}
    seen: set[int] = set()
    found = []
    for unit in (*units, module):
        parts = [left.pop(id(part)) for part in unit.modules() if id(part) in left]
        seen |= {id(p) for part in parts for p in part.parameters()}
        mixed = (p.dtype != torch.float32 for p in unit.parameters() if p.requires_grad and id(p) not in seen)
        if parts and (low or any(mixed)):
            found.append(parts)
        seen |= {id(p) for p in unit.parameters()}
    return found
