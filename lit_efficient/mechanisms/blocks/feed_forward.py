"""Feed-forward modules of a network: linear layers that map each token independently, to the same number of features.

A trial finds them: the module runs on three tokens twice. In the second run one token is changed, and the outputs of
the other tokens must not change.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, check_list
from lit_efficient.internals.torch_dispatch import has_values
from lit_efficient.internals.torch_fx import has_parts
from lit_efficient.mechanisms.blocks.block_map import BlockMap, find_blocks, trained_blocks
from lit_efficient.mechanisms.trials.memory import SavedTensors
from lit_efficient.models.networks.expert_layers import is_linear, width_of
from lit_efficient.models.probes.modes import evaluating, trial_of_layer
from lit_efficient.models.probes.noise import noise_for_vectors, noise_for_zeros, replaced
from lit_efficient.surgery import computed, endings, expert_stacks, match_modules, weights_wait


def find_feed_forwards(root: nn.Module, patterns: str | Sequence[str], *, who: str) -> list[tuple[str, nn.Module]]:
    """Return the feed-forward modules of a network with their names, in the order of its blocks.

    Args:
        root: Any module, with its weights or with weights that are read later.
        patterns: ``auto`` finds in each block the innermost modules of this kind with at least two linear layers.
            Otherwise regular expressions for the ends of dotted names.
        who: Name of the technique, for errors.

    Raises:
        ConfigurationError: If there is no such module, or if a matched module is of another kind. The message gives the
            reason.
    """
    if any(p.device.type == "meta" for p in root.parameters()) and not weights_wait(root):
        raise ConfigurationError(f"{who}: weights are on the meta device. Load the network's weights first")
    if patterns != "auto":
        check_list(who, "layers", patterns, "auto, a pattern or a list of patterns", text=True)
        found = match_modules(root, patterns, who=f"{who}: layers")
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
        examples = []
        for end in endings(reasons)[:4]:
            key = next(key for key in reasons if key.endswith(end))
            examples.append(f"{end}: {reasons[key]}")
        detail = "; ".join(examples) or "the blocks contain their linear layers directly"
        raise ConfigurationError(
            f"{who}: the blocks of {type(root).__name__} have no module of linear layers that maps each token "
            f"independently ({detail})"
        )
    return found


def why_no_feed_forward(module: nn.Module) -> str | None:
    """Return the reason why experts cannot replace a module, or ``None`` if they can."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return "it is a list of modules"
    linears = _linears(module)
    if len(linears) < 2:
        derived = {type(part).__name__ for part in module.modules() if isinstance(part, nn.Linear)} - {"Linear"}
        reason = "it has fewer than two plain linear layers"
        if derived:
            reason += f": subclasses of nn.Linear ({', '.join(sorted(derived))}) may compute more"
        return reason
    of_linears = {id(p) for part in linears for p in part.parameters()}
    if any(id(p) not in of_linears for p in module.parameters()):
        return "it has other weights than those of its linear layers"
    try:
        width = width_of(module)
        moved = None
        empty = any(p.is_meta for p in module.parameters())
        if not empty:
            moved = _maps_alone(module, width, next(module.parameters()))
        if moved is None:  # without weights, or with a last layer of zeros: run a copy with random weights
            twin = copy.deepcopy(module, computed(module))
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
    """Return the modules that map each token independently and save tensors for the backward pass.

    They can contain any layers, quantised layers and adapters, unlike the modules of :func:`find_feed_forwards`. Of
    nested modules only the outer one is returned. A mixture of experts is not returned, because its losses depend on
    all tokens of a call, but each of its experts may be. On the meta device only shapes are compared.

    Args:
        root: Any module.
        patterns: ``auto`` searches the repeated blocks. Otherwise regular expressions for the ends of dotted names.
        who: Name of the technique, for errors.

    Returns:
        Name, module, and saved bytes per token.

    Raises:
        ConfigurationError: If there is no such module, or if a matched module is of another kind.
    """
    if patterns != "auto":
        check_list(who, "layers", patterns, "auto, a pattern or a list of patterns", text=True)
        matched = match_modules(root, patterns, who=f"{who}: layers")
        named = [(name, part, _kept_by_token(part)) for name, part in matched]
        for name, _, kept in named:
            if not kept:
                raise ConfigurationError(
                    f"{who}: layers: {name!r} does not map each token independently, or saves nothing besides its input"
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
            f"{who}: the blocks of {type(root).__name__} have no module that maps each token independently and saves "
            "more than its input for the backward pass"
        )
    return found


def _kept_by_token(part: nn.Module) -> int:
    """Return the bytes per token that a module saves for its backward pass.

    The result is 0 if the module mixes tokens, or saves nothing besides its input.
    """
    width = width_of(part)
    if not width or isinstance(part, nn.ModuleList | nn.ModuleDict) or _has_experts(part):
        return 0
    weights = [*part.parameters(), *part.buffers()]
    like = next((p for p in weights if p.is_floating_point()), torch.empty(0, device=weights[0].device))
    x = _drawn((2, 3, width)).to(like).requires_grad_()
    try:
        with SavedTensors([*weights, x]) as saved, trial_of_layer(part, x.device):
            out = part(x)
        if x.is_meta:
            alone: bool | None = part(x.flatten(0, 1)).shape == (6, width)
        else:
            alone = _maps_alone(part, width, like)
    except Exception:  # user code may raise anything for arguments that do not fit
        return 0
    if not isinstance(out, Tensor) or out.shape != x.shape or alone is False or saved.bytes < x.nbytes:
        return 0
    return saved.bytes // 6  # tokens in x


def _has_experts(module: nn.Module) -> bool:
    """Return whether a module contains experts: a list of several modules of one class, or stacked weights."""
    lists = (part for part in module.modules() if isinstance(part, nn.ModuleList))
    alike = any(len(part) > 1 and len({type(one) for one in part}) == 1 and has_parts(part[0]) for part in lists)
    return alike or bool(expert_stacks(module))


def _maps_alone(module: nn.Module, width: int, like: Tensor) -> bool | None:
    """Return whether a token only changes its own output, or ``None`` if it changes no output at all."""
    x = _drawn((2, 3, width)).to(like)
    other = x.clone()
    other[:, 0] += 1
    # Weights of zero and closed gates may hide that tokens are mixed, and small weights mix next to nothing: noise, and
    # gradients that must be zero.
    noise = noise_for_zeros(module) + noise_for_vectors(module)
    with evaluating(module), torch.no_grad(), torch.random.fork_rng(devices=[]), replaced(noise):
        before = module(x)
        after = module(other)
        if not isinstance(before, Tensor) or before.shape != x.shape:
            return False
        change = (after - before).abs().amax((0, 2)).float()
        if not change.any():
            return None
        if (change[1:] > 1e-3 * change[0]).any():
            return False
        if _depends_on_first(module, x):
            return False
        flat = module(x.flatten(0, 1)).float()
        wanted = before.flatten(0, 1).float()
    return torch.allclose(flat, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max()))


def _depends_on_first(module: nn.Module, x: Tensor) -> bool:
    """Return whether the outputs of other tokens have a gradient for the first token of each row."""
    if not has_values(x):  # of a plan, which compares shapes
        return False
    given = x.detach().requires_grad_()
    with torch.enable_grad():
        others = module(given)[:, 1:]
        if not others.requires_grad:
            return False
        gradient = torch.autograd.grad(others.float(), given, _drawn(others.shape).to(others.device))[0]
    return bool(gradient[:, 0].any())


def _linears(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if is_linear(part)]


def _drawn(shape: Sequence[int]) -> Tensor:
    """Return a tensor of normal random numbers, always the same for a shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)
