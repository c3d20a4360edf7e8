"""Memory-efficient layers: norms and gated MLPs save only their inputs for the backward pass, no intermediate results.

    norm:  saves x, not x^2, x / rms, ...        MLP:  W_c (act(g) * u) saves g and u, not act(g) and the product

Saves: 1 to 3 times the size of a norm's input, and half of what a gated MLP saves between its matrices; gradients stay
    the same
Costs: element-wise operations again in the backward pass; with fused kernels less time than without the technique
Source: Hsu et al. (2024), https://arxiv.org/abs/2410.10989; recomputation: Chen et al. (2016), https://arxiv.org/abs/1604.06174

No matrix product is computed twice, because recomputation stops at the last tensor that is needed. Layers are
recognised by their outputs and gradients for test inputs, not by names or classes. Rotary embeddings save nothing that
could be left out, because their gradient needs only the table: torch's stay as they are. Fused kernels, Liger's or
those that torch.compile makes of exactly these functions, read and write each tensor once, which needs less time and
less temporary memory.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import ConfigurationError, check_choice
from lit_efficient.internals.torch_compiler import compiled_once
from lit_efficient.losses.liger_cross_entropy import installed
from lit_efficient.mechanisms.blocks.rotary import Turns, turns_of
from lit_efficient.mechanisms.trials.memory import SavedTensors
from lit_efficient.models.probes.modes import evaluating, trial_of_layer
from lit_efficient.surgery import autocast_dtype, mix_in, mix_out, mix_under, parents
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_ROWS = 6  # rows of the test input
_ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.silu, F.gelu, partial(F.gelu, approximate="tanh"), F.relu, torch.sigmoid,
)  # fmt: skip


class _Norm(nn.Module):
    """Mix-in of a norm that recomputes its forward pass from its input in the backward pass."""

    # Arguments of Liger's kernel: eps, the number that is added to the weight, and what is cast. None without it.
    _fused_norm: tuple[float, float, str] | None
    _in_recomputed: bool  # its block is recomputed as a whole
    _compiles = False  # torch.compile makes kernels of its forward

    def forward(self, *args: Any, **kwargs: object) -> Any:
        forward: Any = super().forward
        if not torch.is_grad_enabled() or len(args) != 1 or kwargs:
            return forward(*args, **kwargs)
        x = args[0]
        if self._compiles and not torch.compiler.is_compiling():  # a compiled block fuses by itself
            return compiled_once(forward.__func__)(self, x)
        # The kernel computes in float32, as norms do under autocast, and returns the dtype of its input.
        if self._fused_norm is not None and (x.dtype == self.weight.dtype or x.dtype == autocast_dtype(x.device)):
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            return LigerRMSNormFunction.apply(x, self.weight, *self._fused_norm, False)
        if self._in_recomputed:
            return forward(x)
        return checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)


class _Gated(nn.Module):
    """Mix-in of a gated MLP ``c(act(a(x)) * b(x))`` that recomputes the product in the backward pass."""

    _gated: tuple[str, str, str]  # names of the linear layers a, b and c
    _activation: str | Callable[[Tensor], Tensor]  # name of a submodule, or a function
    _fused_gate: str | None  # name of Liger's function for act(a) * b
    _in_recomputed: bool  # its block is recomputed as a whole
    _compiles = False  # torch.compile makes a kernel of act(a) * b

    def forward(self, *args: object, **kwargs: object) -> Any:
        if not torch.is_grad_enabled() or len(args) != 1 or kwargs:
            return super().forward(*args, **kwargs)
        a, b, c = (getattr(self, name) for name in self._gated)
        gate = a(args[0])
        up = b(args[0])
        if self._in_recomputed:
            return self._project_down(c, gate, up)
        return checkpoint(self._project_down, c, gate, up, use_reentrant=False)

    def _project_down(self, c: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        if self._fused_gate is not None:
            return c(_liger(self._fused_gate).apply(gate, up))
        activation = self._activation
        if isinstance(activation, str):
            activation = getattr(self, activation)
        if self._compiles and not torch.compiler.is_compiling():
            return c(compiled_once(_activated_product)(activation, gate, up))
        return c(_activated_product(activation, gate, up))


def _activated_product(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


class MemoryEfficientLayers(Technique):
    """Let norms and gated MLPs (SwiGLU, GeGLU) of any network save less memory for the backward pass.

    Each layer is tested with a few rows. It is changed if outputs and gradients stay the same and it saves fewer bytes.
    Parameter names stay. With fused kernels, rotary embeddings also run in one pass if nothing is compiled. Layers
    inside blocks that are recomputed as a whole (activation checkpointing) save nothing: they are changed only where
    fused kernels run them, which read and write less.

    Args:
        backend: ``torch`` computes the layer's own operations again, with identical results. ``liger`` uses the fused
            kernels of liger-kernel, on a GPU. ``compile`` lets torch.compile make kernels of the functions of norms,
            rotary embeddings and gated MLPs, in some seconds of the first step and once for all sizes. ``auto`` uses
            Liger's kernels on a GPU for layers for which they give the same results, if liger-kernel is installed, else
            torch.

    Raises:
        ConfigurationError: If the network has no such layers, and with ``liger`` if liger-kernel is not installed or
            supports none of the layers.
    """

    phase = Phase.RECOMPUTE
    traits = frozenset({Trait.TRAINING_ONLY})
    # A layer is changed only if it saves less than this share of its bytes: two numbers per row of a LayerNorm are not
    # worth the time.
    worth: ClassVar[float] = 0.8
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (4, "activations of norms and gated MLPs, for little time")
    }

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        check_choice("MemoryEfficientLayers", "backend", backend, ("auto", "torch", "liger", "compile"))
        if backend == "liger" and not installed():
            raise ConfigurationError(
                "MemoryEfficientLayers: backend='liger' needs the package liger-kernel. Install it, or use 'auto'"
            )
        self.backend = backend
        self._device = torch.device("cpu")  # until a trainer gives its device

    def check(self, trainer: Any, module: nn.Module) -> None:
        self._device = trainer.strategy.root_device

    def transform(self, module: nn.Module) -> Report:
        compiles = self.backend == "compile"
        liger = self.backend == "liger" or (self.backend == "auto" and self._device.type == "cuda" and installed())
        fused = liger or compiles
        recomputed = {name for name, part in module.named_modules() if getattr(part, "_recomputes", False)}
        norms: list[str] = []
        gates: list[str] = []
        kept = 0  # bytes that the changed layers save for the test input
        before = 0  # bytes that these layers saved before
        by_kernels = 0  # number of layers that use fused kernels
        for name, part in module.named_modules():
            width = _width(part)
            # Layers within recomputed blocks save nothing, but fused kernels read and write less.
            inside = not recomputed.isdisjoint((name, *parents(name)))
            if width is None or (inside and not fused):
                continue
            with _trial(part, width) as (x, plain):
                if list(part.children()):
                    found = _as_gated(part, x, liger)
                else:
                    found = _as_norm(part, x, liger)
                if found is None:
                    continue
                kind, attributes = found
                named = [value for key, value in attributes.items() if key.startswith("_fused")]
                by_kernel = compiles or any(value is not None for value in named)
                if inside and not by_kernel:
                    continue
                mix_in(part, kind, **attributes, _in_recomputed=inside)
                changed = _saved_bytes(part, x)  # of the layer before it is compiled, which takes seconds
                # Both are 0 if the layer cannot be tried.
                if not inside and (changed >= plain or changed > self.worth * plain):
                    mix_out(part, kind)
                    continue
                if compiles:
                    part._compiles = True
            if kind is _Norm:
                norms.append(name)
            else:
                gates.append(name)
            by_kernels += by_kernel
            if not inside:
                before += plain
                kept += changed
        rotary: list[str] = []
        if fused:
            for name, part in module.named_modules():
                turns = turns_of(part, self._device, compiles)
                if turns:
                    mix_under(part, Turns, _fused_turns=turns)
                    rotary.append(name)
        if not norms and not gates and not rotary:
            where = ""
            if recomputed and not fused:
                where = " outside of the blocks that are recomputed as a whole"
            raise ConfigurationError(
                f"MemoryEfficientLayers: {type(module).__name__} has no norm or gated MLP{where} that saves more than "
                "its inputs. Leave out MemoryEfficientLayers"
            )
        if self.backend == "liger" and not by_kernels and not rotary:
            raise ConfigurationError(
                "MemoryEfficientLayers: Liger's kernels give other results than the layers of "
                f"{type(module).__name__}. Use backend='auto' or backend='torch'"
            )
        less = (before - kept) // _ROWS
        kernels = "Liger's kernels"
        if compiles:
            kernels = "compiled kernels"
        if by_kernels:
            how = f"{by_kernels} of them by {kernels}"
        else:
            how = "recomputed by torch"
        saved = "read and write less"  # all of them in recomputed blocks
        details: dict[str, float | int | str] = {}
        if before:
            saved = f"save {format_bytes(less)} less per token"
            details = {"bytes_per_token": before // _ROWS, "bytes_per_token_saved": less}
        summary = f"{len(norms)} norms and {len(gates)} gated MLPs {saved}, {how}"
        if rotary:
            summary += f"; {len(rotary)} layers rotate queries and keys by {kernels}"
        return Report(
            summary,
            modules=(*norms, *gates, *rotary),
            details=details,
        )


def _width(part: nn.Module) -> int | None:
    """Return the number of input features of a layer that may be a norm or a gated MLP, or ``None`` for another."""
    linear = [child for child in part.children() if hasattr(child, "in_features")]
    if len(linear) == 3:
        return int(linear[0].in_features)  # type: ignore[arg-type]
    own = list(part.parameters(recurse=False))
    vectors = 0 < len(own) < 3 and all(p.ndim == 1 and p.is_floating_point() for p in own)
    alone = vectors and not list(part.children()) and not list(part.buffers())
    if not alone or own[0].is_meta:
        return None
    return len(own[0])


@contextmanager
def _trial(part: nn.Module, width: int) -> Iterator[tuple[Tensor, int]]:
    """Give a test input for a layer, and leave random states, buffers, modes and gradients as they were.

    Yields:
        The input, and the number of bytes that the layer saves for it.
    """
    like = next((p for p in part.parameters() if p.is_floating_point()), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, _ROWS // 2, width, generator=generator, device="cpu").to(like).requires_grad_()
    with trial_of_layer(part, like.device):
        yield x, _saved_bytes(part, x)


def _saved_bytes(part: nn.Module, x: Tensor) -> int:
    """Return the number of bytes that a layer saves for the backward pass; 0 if it cannot run on ``x``."""
    try:
        with SavedTensors(part.parameters()) as saved:
            part(x)
    except Exception:  # the layer needs other arguments
        return 0
    return saved.bytes


def _same(part: nn.Module, x: Tensor, other: Callable[[Tensor], Tensor], exact: bool = True) -> bool:
    """Return whether ``other`` gives the layer's outputs and gradients, in training and evaluation."""
    # A norm's eps has an effect on small inputs only. Activations differ at large inputs, if weights are still small.
    inputs = [x, *((x.detach() * size).requires_grad_() for size in (0.001, 100.0))]
    try:
        with evaluating(part):
            for training, given in itertools.product((True, False), inputs):
                part.train(training)
                trained = [given, *(p for p in part.parameters() if p.requires_grad)]
                found = []
                for function in (part, other):
                    torch.default_generator.manual_seed(0)
                    out = function(given)
                    found.append((out.detach(), *torch.autograd.grad((out * x.detach().cos()).sum(), trained)))
                if not all(_equal(one, two, exact) for one, two in zip(*found, strict=True)):
                    return False
    except Exception:  # the layer needs other arguments or widths, or a kernel fails on this device
        return False
    return True


def _equal(one: Tensor, two: Tensor, exact: bool) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype or exact:
        return torch.equal(one, two)
    # Fused kernels sum in another order. In 16 bits this changes the last digits, which are about one percent.
    close = 1e-4 if one.dtype == torch.float32 else 2e-2
    return torch.allclose(one, two, rtol=close, atol=close * float(one.abs().max()))


def _as_norm(part: nn.Module, x: Tensor, fused: bool) -> tuple[type, dict[str, object]]:
    """Return the mix-in of a norm and its attributes, with Liger's kernel if that gives the same results."""
    if fused:
        # The layer's eps is unknown: it is one of the numbers in its attributes, or the default of torch's RMSNorm.
        numbers = {value for value in vars(part).values() if isinstance(value, float)} | {torch.finfo(x.dtype).eps}
        for fused_norm in itertools.product(numbers, (0.0, 1.0), ("llama", "gemma", "none")):
            if _is_equivalent(part, x, _Norm, {"_fused_norm": fused_norm}, exact=False):
                return _Norm, {"_fused_norm": fused_norm}
    return _Norm, {"_fused_norm": None}


def _as_gated(part: nn.Module, x: Tensor, fused: bool) -> tuple[type, dict[str, object]] | None:
    """Return the mix-in of a gated MLP and its attributes, or ``None`` if the layer computes something else."""
    children = dict(part.named_children())
    linear = [name for name, child in children.items() if hasattr(child, "in_features")]
    own = [name for name, child in children.items() if not any(True for _ in child.parameters())]
    for names, activation in itertools.product(itertools.permutations(linear), (*own, *_ACTIVATIONS)):
        found = {"_gated": names, "_activation": activation, "_fused_gate": None}
        if not _is_equivalent(part, x, _Gated, found):
            continue
        if fused:
            for function in ("swiglu.LigerSiLUMul", "geglu.LigerGELUMul"):
                if _is_equivalent(part, x, _Gated, found | {"_fused_gate": function}, exact=False):
                    return _Gated, found | {"_fused_gate": function}
        return _Gated, found
    return None


def _is_equivalent(part: nn.Module, x: Tensor, kind: type, attributes: dict[str, object], exact: bool = True) -> bool:
    """Return whether a layer gives the same results with the mix-in as without it."""
    own = part.forward
    mix_in(part, kind, **attributes, _in_recomputed=False)
    try:
        return _same(part, x, own, exact)
    finally:
        mix_out(part, kind)


def _liger(name: str) -> Any:
    """Return the autograd function of liger-kernel with a name such as ``swiglu.LigerSiLUMul``."""
    module, function = name.split(".")
    return getattr(import_module(f"liger_kernel.ops.{module}"), f"{function}Function")
