"""Feed-forward modules of a network: linear layers that map each token by itself, to as many features as it had.

A trial finds them: three tokens pass the module, one of them is changed, and the outputs of the others must stay.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_fx import has_parts
from lit_efficient.mechanisms.blocks.block_map import BlockMap, find_blocks, trained_blocks
from lit_efficient.mechanisms.trials.memory import SavedTensors
from lit_efficient.models.networks.expert_layers import is_linear, width_of
from lit_efficient.models.probes.modes import evaluating, trial_of_layer
from lit_efficient.surgery import endings, expert_stacks, match_modules, weights_wait


def find_feed_forwards(root: nn.Module, patterns: str | Sequence[str], *, who: str) -> list[tuple[str, nn.Module]]:
    """Return names and modules of a network's feed-forward modules, in the order of its blocks.

    Args:
        root: Any module, with weights, or with weights that are read later.
        patterns: ``auto`` takes, in each block, the innermost such modules with at least two linear layers; or regular
            expressions for the ends of dotted names.
        who: Name of the technique that asks, for the error.

    Raises:
        ConfigurationError: If there is none, or a named module is none; the message gives the reason.
    """
    if any(p.device.type == "meta" for p in root.parameters()) and not weights_wait(root):
        raise ConfigurationError(f"{who}: weights are on the meta device: give the network its weights first")
    if patterns != "auto":
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        found = match_modules(root, wanted, who=f"{who}: layers")
        for name, module in found:
            why = why_no_feed_forward(module)
            if why is not None:
                raise ConfigurationError(f"{who}: {name!r} is no feed-forward module: {why}")
        return found
    block_map = BlockMap(root)
    found = []
    reasons: dict[str, str] = {}
    for name, block in trained_blocks(find_blocks(root, who=who, example="layers=['mlp']")):
        inside: list[tuple[str, nn.Module]] = []
        for key, part in reversed(list(block.named_modules(prefix=name))[1:]):
            every = sum(isinstance(layer, nn.Linear) or is_linear(layer) for layer in part.modules())
            if any(inner.startswith(f"{key}.") for inner, _ in inside) or every < 2:
                continue
            why = block_map.once("feed-forward", part, why_no_feed_forward)
            if why is None:
                inside.append((key, part))
            else:
                reasons[key] = why
        found += reversed(inside)
    if not found:
        seen = "; ".join(
            f"{end}: {reasons[next(k for k in reasons if k.endswith(end))]}" for end in endings(reasons)[:4]
        )
        raise ConfigurationError(
            f"{who}: the blocks of {type(root).__name__} have no module of linear layers that maps tokens one by one"
            + (f" ({seen})" if seen else ": theirs stand in the block itself")
        )
    return found


def why_no_feed_forward(module: nn.Module) -> str | None:
    """Return why experts cannot replace a module, or ``None``."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return "it is a list of modules"
    linears = _linears(module)
    if len(linears) < 2:
        derived = {type(part).__name__ for part in module.modules() if isinstance(part, nn.Linear)} - {"Linear"}
        more = f": {', '.join(sorted(derived))} may compute more than nn.Linear, from which it is derived"
        return f"it has fewer than two plain linear layers{more if derived else ''}"
    of_linears = {id(p) for part in linears for p in part.parameters()}
    if any(id(p) not in of_linears for p in module.parameters()):
        return "it has weights beside those of its linear layers"
    try:
        width = width_of(module)
        moved = None
        empty = any(p.is_meta for p in module.parameters())
        if not empty:
            moved = _maps_alone(module, width, next(module.parameters()))
        if moved is None:  # without weights, or with a last layer of zeros, a copy with random weights is run
            twin = copy.deepcopy(module)
            if empty:
                twin = twin.to_empty(device="cpu")
            with torch.no_grad():
                for p in twin.parameters():
                    p.copy_(_drawn(p.shape).to(p) / p.shape[-1] ** 0.5)
            moved = _maps_alone(twin, width, next(twin.parameters()))
    except Exception as error:  # user code may raise anything for arguments that do not fit
        return f"it takes more than tokens [B, T, D] ({type(error).__name__})"
    if not moved:
        return "it mixes tokens, or changes their shape"
    return None


def find_tokenwise(root: nn.Module, patterns: str | Sequence[str], *, who: str) -> list[tuple[str, nn.Module, int]]:
    """Return the modules that map tokens one by one and keep tensors for the backward pass: name, module, bytes per
    token.

    Unlike feed-forward modules that experts may replace, they can contain any layers, quantised layers and adapters. Of
    nested modules the outer ones count. A mixture of experts is none, because its losses depend on all tokens of a
    call, but each of its experts may be one. On the meta device only shapes are compared.

    Args:
        root: Any module.
        patterns: ``auto`` searches the repeated blocks; or regular expressions for the ends of dotted names.
        who: Name of the technique that asks, for the error.

    Raises:
        ConfigurationError: If there is none, or a named module is none.
    """
    if patterns != "auto":
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        named = [(name, part, _kept_by_token(part)) for name, part in match_modules(root, wanted, who=f"{who}: layers")]
        for name, _, kept in named:
            if not kept:
                raise ConfigurationError(
                    f"{who}: layers: {name!r} does not map each token by itself, or keeps nothing beside its input"
                )
        return named
    block_map = BlockMap(root)
    found: list[tuple[str, nn.Module, int]] = []
    for name, block in find_blocks(root, who=who, example="layers=['mlp']"):
        for key, part in list(block.named_modules(prefix=name))[1:]:
            if any(key.startswith(f"{outer}.") for outer, _, _ in found):
                continue
            kept = block_map.once("kept by a token", part, _kept_by_token)
            if kept:
                found.append((key, part, kept))
    if not found:
        raise ConfigurationError(
            f"{who}: the blocks of {type(root).__name__} have no module that maps tokens one by one and keeps more "
            "than its input for the backward pass"
        )
    return found


def _kept_by_token(part: nn.Module) -> int:
    """Return the bytes per token that a module keeps besides its input, or 0 if it mixes tokens or keeps no more than
    the input.
    """
    width = width_of(part)
    if not width or isinstance(part, nn.ModuleList | nn.ModuleDict) or _has_experts(part):
        return 0
    weights = [*part.parameters(), *part.buffers()]
    like = next((p for p in weights if p.is_floating_point()), torch.empty(0, device=weights[0].device))
    x = _drawn((2, 3, width)).to(like).requires_grad_()
    try:
        with SavedTensors([*weights, x]) as saved, trial_of_layer(x.device):
            out = part(x)
        if x.is_meta:
            alone: bool | None = part(x.flatten(0, 1)).shape == (6, width)
        else:
            alone = _maps_alone(part, width, like)
    except Exception:  # user code may raise anything for arguments that do not fit
        return 0
    if not isinstance(out, Tensor) or out.shape != x.shape or alone is False or saved.bytes < x.nbytes:
        return 0
    return saved.bytes // 6


def _has_experts(module: nn.Module) -> bool:
    lists = (part for part in module.modules() if isinstance(part, nn.ModuleList))
    alike = any(len(part) > 1 and len({type(one) for one in part}) == 1 and has_parts(part[0]) for part in lists)
    return alike or bool(expert_stacks(module))


def _maps_alone(module: nn.Module, width: int, like: Tensor) -> bool | None:
    """Return whether a token changes its own output only, or ``None`` if it changes no output."""
    x = _drawn((2, 3, width)).to(like)
    other = x.clone()
    other[:, 0] += 1
    with evaluating(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
        before, after = module(x), module(other)
        if not isinstance(before, Tensor) or before.shape != x.shape:
            return False
        change = (after - before).abs().amax((0, 2)).float()
        if not change.any():
            return None
        if (change[1:] > 1e-3 * change[0]).any():
            return False
        flat, wanted = module(x.flatten(0, 1)).float(), before.flatten(0, 1).float()
    return torch.allclose(flat, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()))


def _linears(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if is_linear(part)]


def _drawn(shape: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)
