"""Keep float32: norms, routers of experts and position tables stay in float32 under any precision.

    y = T(f(float32(x)))    for each such module f, with weights and buffers in float32, and an input x of type T

A bfloat16 number has 8 significant bits. If rotary frequencies are rounded to it, the angle of position 1500 is wrong;
weights of norms that are close to 1 stop changing; and the router may choose another expert if two scores are close.
Softmax and losses are not modules. Attention kernels, and the losses of transformers and of this package, already
compute them in float32.

Saves: the precision that ``bf16-true``, ``16-true`` and autocast lose in these modules
Costs: 2 bytes more for their few parameters; their inputs in float32 until the backward pass; casts around each module
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
from lit_efficient.mechanisms.router_balance import routers
from lit_efficient.surgery import call_layers, count, match_modules, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class _InFloat32(StaysFloat32):
    """Mix-in that keeps a module's parameters and buffers in float32 and computes its forward in float32."""

    float32 = ("",)

    def forward(self, *args: object, **kwargs: object) -> Any:
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
        if not inputs:
            with torch.autocast("cpu", enabled=False):
                return super().forward(*args, **kwargs)  # type: ignore[misc]  # of the module
        dtype = inputs[0].dtype
        device = inputs[0].device.type
        args, kwargs = tree_map_only(Tensor, _in_float32, (args, kwargs))
        with torch.autocast(device, enabled=False):
            output = super().forward(*args, **kwargs)  # type: ignore[misc]  # of the module
        if dtype.itemsize >= torch.float32.itemsize:
            return output
        return tree_map_only(Tensor, lambda y: y.to(dtype) if y.is_floating_point() else y, output)


def _in_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32 if it has a smaller floating-point type, else ``x``."""
    if x.is_floating_point() and x.element_size() < torch.float32.itemsize:
        return x.float()
    return x


def norms(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of normalisations with weights.

    They are torch's LayerNorm and RMSNorm, and leaf modules with "norm" in their class name whose parameters are all
    vectors.
    """
    for name, module in root.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        called_norm = "norm" in type(module).__name__.lower() and not list(module.children())
        if isinstance(module, nn.LayerNorm | nn.RMSNorm) or (called_norm and all(p.ndim < 2 for p in own)):
            yield name, module


def positions(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of tables: leaf modules without parameters that have floating-point buffers.

    Rotary frequencies are an example.
    """
    for name, module in root.named_modules():
        held = [b for b in module.buffers(recurse=False) if b.is_floating_point() and b.numel() > 1]
        if held and not list(module.children()) and not list(module.parameters(recurse=False)):
            yield name, module


_KINDS = {"norms": norms, "routers": routers, "positions": positions}


class KeepFloat32(Technique):
    """Keep norms, routers, position tables and further modules of your choice in float32, and compute them in it.

    Norms are recognised by their class, routers by the experts next to them, and tables as modules that have buffers
    but no parameters. Operations that a network computes outside of such modules keep their precision.

    Args:
        kinds: Kinds of modules to keep in float32, out of ``norms``, ``routers`` and ``positions``.
        modules: Regular expressions for the ends of dotted names of further modules, which must have no submodules.

    Raises:
        ConfigurationError: For an unknown kind, for a pattern that matches nothing, if no module is found.
    """

    phase = Phase.LAYOUT
    traits = frozenset({Trait.REFUSES_EARLY, Trait.TRAINING_ONLY})
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "quality": (0, "exact positions, norms and routing with 16-bit weights")
    }

    def __init__(self, kinds: Sequence[str] = ("norms", "routers", "positions"), modules: Sequence[str] = ()) -> None:
        super().__init__()
        if not set(kinds) <= _KINDS.keys():
            raise refusal("KeepFloat32", "kinds", f"a list of {', '.join(_KINDS)}", kinds)
        if not kinds and not modules:
            raise refusal("KeepFloat32", "kinds", f"some of {', '.join(_KINDS)} if modules is empty", kinds)
        self.kinds = tuple(kinds)
        self.modules = tuple(modules)
        self._precision = ""  # of the trainer, if there is one

    def check(self, trainer: Any, module: nn.Module) -> None:
        self._precision = str(trainer.precision)

    def transform(self, module: nn.Module) -> Report:
        found = {kind: dict(_KINDS[kind](module)) for kind in self.kinds}
        if self.modules:
            found["others"] = dict(match_modules(module, self.modules, who="KeepFloat32: modules", where=_is_leaf))
        parts: dict[str, nn.Module] = {}
        for named in found.values():
            parts |= named
        if not parts:
            raise ConfigurationError(
                f"KeepFloat32: {type(module).__name__} has no {' or '.join(self.kinds)} to keep in float32. Name "
                "modules in modules=[...], or leave out KeepFloat32"
            )
        rounds = any(p.is_floating_point() and p.itemsize < 4 for p in _tensors(module))
        for part in parts.values():
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                tensor.data = _in_float32(tensor.data)
            mix_in(part, _InFloat32)
        call_layers(module)
        kept = count(p for part in parts.values() for p in part.parameters(recurse=False))
        counts = ", ".join(f"{len(named)} {kind}" for kind, named in found.items() if named)
        if self._precision.startswith(("32", "64")) and not rounds:
            summary = f"no effect: {counts} are float32 already, and so is all under precision {self._precision}"
            return Report(summary, idle=True)
        return Report(f"{counts} in float32, {kept:,} parameters", tuple(parts), kept or None)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _is_leaf(module: nn.Module) -> bool:
    return not list(module.children())
