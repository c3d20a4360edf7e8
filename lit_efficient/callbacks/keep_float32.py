"""What must stay in float32 stays there under any precision: norms, routers of experts, tables of positions.

    y = T(f(float32(x)))    of each such module f, its weights and buffers in float32, for x of the type T

bfloat16 has 8 bits: with rotary frequencies that are rounded to it position 1500 is turned by a wrong angle, weights of
norms near one stop moving, and near ties between experts fall the other way. Softmax and losses are no modules: the
kernels of attention, transformers' losses and ours compute them in float32 already.

Saves: what ``bf16-true``, ``16-true`` and autocast lose there, for 2 bytes more of very few parameters
Costs: the inputs of these modules in float32 until the backward pass has read them; a cast before and after each
Source: Micikevicius et al. (2018), https://arxiv.org/abs/1710.03740; Fedus et al. (2021), https://arxiv.org/abs/2101.03961
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.internals.torch_modules import StaysFloat32
from lit_efficient.internals.torch_trees import tree_leaves, tree_map_only
from lit_efficient.surgery import call_layers, count, expert_stacks, match_modules, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class _InFloat32(StaysFloat32):
    """Keeps all that a module holds in float32, and computes there whatever comes in."""

    float32 = ("",)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
        given = inputs[0].dtype if inputs else torch.float32
        args, kwargs = tree_map_only(Tensor, _wide, (args, kwargs))
        with torch.autocast(inputs[0].device.type if inputs else "cpu", enabled=False):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]  # of the module
        if given.itemsize >= torch.float32.itemsize:
            return output
        return tree_map_only(Tensor, lambda y: y.to(given) if y.is_floating_point() else y, output)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() and x.element_size() < torch.float32.itemsize else x


def norms(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Normalisations with weights: torch's own, and what is called one and holds vectors alone."""
    for name, module in root.named_modules():
        own = list(module.parameters(recurse=False))
        called = "norm" in type(module).__name__.lower() and not list(module.children())
        if own and (isinstance(module, nn.LayerNorm | nn.RMSNorm) or (called and all(p.ndim < 2 for p in own))):
            yield name, module


def routers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What chooses between experts: a matrix with a row for each expert of those that stand beside it."""
    sizes = {name: part.get_parameter(keys[0]).shape[0] for name, part, keys in expert_stacks(root)}
    for name, module in root.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(part) for part in module}) == 1:
            sizes.setdefault(name, len(module))
    for name, experts in sizes.items():
        around = name.rpartition(".")[0]
        for key, beside in root.get_submodule(around).named_children():
            own = dict(beside.named_parameters(recurse=False))
            leaf = not list(beside.children()) and "weight" in own and own["weight"].ndim == 2
            if leaf and own["weight"].shape[0] == experts and own["weight"].is_floating_point():
                yield f"{around}.{key}".lstrip("."), beside


def positions(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Tables: modules without parameters that hold numbers with a fraction, as rotary frequencies."""
    for name, module in root.named_modules():
        held = [b for b in module.buffers(recurse=False) if b.is_floating_point() and b.numel() > 1]
        if held and not list(module.children()) and not list(module.parameters(recurse=False)):
            yield name, module


_KINDS = {"norms": norms, "routers": routers, "positions": positions}


class KeepFloat32(Technique):
    """Keep norms, routers and tables of positions, and modules of your choice, in float32, and compute them there.

    They are found by what they are: norms by class, routers by the experts beside them, tables as modules that hold
    numbers and no parameter. What a network computes in its own forward, outside of such modules, is its own affair.

    Args:
        kinds: Which of norms, routers and positions.
        modules: Regular expressions for the ends of dotted names of further modules without parts.

    Raises:
        ConfigurationError: For a kind that there is not, a pattern that matches nothing, and if nothing is found.
    """

    phase = Phase.LAYOUT
    traits = frozenset({Trait.REFUSES_EARLY, Trait.TRAINING_ONLY})
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "quality": (0, "exact positions, norms and choices of experts where all else is bfloat16")
    }

    def __init__(self, kinds: Sequence[str] = ("norms", "routers", "positions"), modules: Sequence[str] = ()) -> None:
        super().__init__()
        if isinstance(kinds, str) or not set(kinds) <= _KINDS.keys():
            raise refusal("KeepFloat32", "kinds", f"a list of {', '.join(_KINDS)}", kinds)
        if not kinds and not modules:
            raise refusal("KeepFloat32", "kinds", f"some of {', '.join(_KINDS)} where modules names none", kinds)
        self.kinds, self.modules = tuple(kinds), tuple(modules)

    def transform(self, module: nn.Module) -> Report:
        found = {kind: dict(_KINDS[kind](module)) for kind in self.kinds}
        if self.modules:
            alone = {"where": lambda part: not list(part.children())}
            found["others"] = dict(match_modules(module, self.modules, who="KeepFloat32: modules", **alone))  # type: ignore[arg-type]
        parts = {name: part for named in found.values() for name, part in named.items()}
        if not parts:
            raise ConfigurationError(
                f"KeepFloat32: {type(module).__name__} has no {', '.join(self.kinds) or 'module'} with numbers to "
                "keep; name modules, or leave it out"
            )
        for part in parts.values():
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                tensor.data = _wide(tensor.data)
            mix_in(part, _InFloat32)
        call_layers(module)
        kept = count(p for part in parts.values() for p in part.parameters(recurse=False))
        counts = ", ".join(f"{len(named)} {kind}" for kind, named in found.items() if named)
        return Report(f"{counts} in float32, {kept:,} parameters", tuple(parts), kept)
