"""Memory-efficient layers: normalisation and gated MLPs keep their inputs, and nothing of what lies between.

    norm:  kept x, not x^2, x / rms, ...        MLP:  W_c (act(g) * u), kept g and u, not act(g) and the product

Saves: 1 to 3 times a norm's input, and half of what a gated MLP keeps between its matrices; gradients stay the same
Costs: the element-wise part once more in the backward pass; with Liger's kernels less time than without
Source: Hsu et al. (2024), https://arxiv.org/abs/2410.10989; recomputation: Chen et al. (2016), https://arxiv.org/abs/1604.06174

No matrix product is computed twice: the second computation stops at the last tensor that is needed. Which modules are
such layers is asked of the modules, by their numbers: names and classes play no part. Rotary positions keep nothing
that could be spared, as their gradient needs the table alone: torch's stay as they are, and Liger's kernel reads and
writes queries and keys once, which takes less time and less memory at the moment.
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

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_choice
from lit_efficient.losses.liger_cross_entropy import installed
from lit_efficient.mechanisms.blocks.rotary import Turns, turns_of
from lit_efficient.mechanisms.trials.memory import SavedTensors, format_bytes
from lit_efficient.models.probes.modes import evaluating, trial_of_layer
from lit_efficient.surgery import mix_in, mix_out, mix_under, parents
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_ROWS = 6  # that a layer is tried with
_ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.silu, F.gelu, partial(F.gelu, approximate="tanh"), F.relu, torch.sigmoid,
)  # fmt: skip


class _Norm(nn.Module):
    """Mix-in of a layer that is cheap to compute again from its input."""

    _fused_norm: tuple[float, float, str] | None  # of Liger's kernel: eps, what is added to the weight, what is cast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled() or len(args) != 1 or kwargs:
            return forward(*args, **kwargs)
        plain = args[0].dtype == self.weight.dtype and not torch.is_autocast_enabled(args[0].device.type)
        if self._fused_norm is not None and plain:
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction

            return LigerRMSNormFunction.apply(args[0], self.weight, *self._fused_norm, False)
        return checkpoint(forward, args[0], use_reentrant=False, preserve_rng_state=False)


class _Gated(nn.Module):
    """Mix-in of ``c(act(a(x)) * b(x))``."""

    _gated: tuple[str, str, str]  # names of a, b and c
    _activation: str | Callable[[Tensor], Tensor]  # name of a child, or a function
    _fused_gate: str | None  # Liger's function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or len(args) != 1 or kwargs:
            return super().forward(*args, **kwargs)
        a, b, c = (getattr(self, name) for name in self._gated)
        gate, up = a(args[0]), b(args[0])
        return checkpoint(self._rest, c, gate, up, use_reentrant=False)

    def _rest(self, c: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        if self._fused_gate is not None:
            return c(_liger(self._fused_gate).apply(gate, up))
        activation = getattr(self, self._activation) if isinstance(self._activation, str) else self._activation
        return c(activation(gate) * up)


class MemoryEfficientLayers(Technique):
    """Let norms and gated MLPs (SwiGLU, GeGLU) of any network keep less for the backward pass; names stay.

    With Liger's kernels queries and keys are turned (rotary positions) in one pass, too, where nothing is compiled.

    Each layer is tried with a few rows, and changed where it gives the same numbers and gradients and keeps less. In
    blocks that are recomputed as a whole nothing is changed: they keep nothing of it.

    Args:
        backend: ``torch`` computes the layer's own operations again, bit for bit; ``liger`` takes the fused kernels of
            liger-kernel, on a GPU; ``auto`` is Liger's where it is installed and gives the same, else torch's.

    Raises:
        ConfigurationError: Without such layers, and for ``liger`` where it is not installed or fits no layer.
    """

    phase = Phase.RECOMPUTE
    traits = frozenset({Trait.TRAINING_ONLY})
    worth: ClassVar[float] = 0.8  # of its bytes a layer must keep less: the two numbers a row of a LayerNorm are not
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"memory": (4, "what norms and gated MLPs keep, for little time")}

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        check_choice("MemoryEfficientLayers", "backend", backend, ("auto", "torch", "liger"))
        if backend == "liger" and not installed():
            raise ConfigurationError(
                "MemoryEfficientLayers: backend='liger' needs the package liger-kernel; install it, or use auto"
            )
        self.backend = backend
        self._device = torch.device("cpu")  # without a trainer

    def check(self, trainer: Any, module: Any) -> None:
        self._device = trainer.strategy.root_device

    def transform(self, module: nn.Module) -> Report:
        fused = self.backend == "liger" or (self.backend == "auto" and self._device.type == "cuda" and installed())
        recomputed = {name for name, part in module.named_modules() if getattr(part, "_recomputes", False)}
        parts = {n: p for n, p in module.named_modules() if recomputed.isdisjoint((n, *parents(n)))}
        norms: list[str] = []
        gates: list[str] = []
        kept = before = by_liger = 0
        for name, part in parts.items():
            width = _width(part)
            if width is None:
                continue
            with _trial(part, width) as (x, plain):
                found = _as_norm(part, x, fused) if not list(part.children()) else _as_gated(part, x, fused)
                if found is None:
                    continue
                kind, attributes = found
                mix_in(part, kind, **attributes)
                again = _kept(part, x)
                if again > self.worth * plain:
                    mix_out(part, kind)
                    continue
            (norms if kind is _Norm else gates).append(name)
            before, kept = before + plain, kept + again
            by_liger += any(value is not None for key, value in attributes.items() if key.startswith("_fused"))
        turned = []
        for name, part in parts.items() if fused else ():
            if turns := turns_of(part, self._device):
                mix_under(part, Turns, _fused_turns=turns)
                turned.append(name)
        if not norms and not gates and not turned:
            raise ConfigurationError(
                f"MemoryEfficientLayers: {type(module).__name__} has no norm or gated MLP that keeps more than its "
                "inputs" + (" outside of the blocks that are recomputed as wholes" if recomputed else "")
            )
        if self.backend == "liger" and not by_liger and not turned:
            raise ConfigurationError("MemoryEfficientLayers: Liger's kernels give no layer's own numbers here")
        spared = (before - kept) // _ROWS
        how = f"{by_liger} of them by Liger's kernels" if by_liger else "computed again by torch"
        return Report(
            f"{len(norms)} norms and {len(gates)} gated MLPs keep {format_bytes(spared)} a token less, {how}"
            + f"; {len(turned)} layers turn queries and keys by Liger's" * bool(turned),
            modules=(*norms, *gates, *turned),
            details={"bytes_per_token": before // _ROWS, "bytes_per_token_saved": spared},
        )


def _width(part: nn.Module) -> int | None:
    """Features that a layer which may be a norm or a gated MLP reads."""
    linear = [child for child in part.children() if hasattr(child, "in_features")]
    if len(linear) == 3:
        return int(linear[0].in_features)  # type: ignore[arg-type]
    own = list(part.parameters(recurse=False))
    vectors = 0 < len(own) < 3 and all(p.ndim == 1 and p.is_floating_point() for p in own)
    alone = vectors and not list(part.children()) and not list(part.buffers())
    return len(own[0]) if alone and not own[0].is_meta else None


@contextmanager
def _trial(part: nn.Module, width: int) -> Iterator[tuple[Tensor, int]]:
    """Some input for a layer, and what it keeps for it; with random states, modes and gradients as they were."""
    like = next((p for p in part.parameters() if p.is_floating_point()), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, _ROWS // 2, width, generator=generator, device="cpu").to(like).requires_grad_()
    with trial_of_layer(like.device):
        yield x, _kept(part, x)


def _kept(part: nn.Module, x: Tensor) -> int:
    try:
        with SavedTensors(part.parameters()) as saved:
            part(x)
    except Exception:  # a layer that takes something else
        return 0
    return saved.bytes


def _same(part: nn.Module, x: Tensor, other: Callable[[Tensor], Tensor], exact: bool = True) -> bool:
    """Whether it gives the layer's numbers and gradients, in training and evaluation, for large rows and small ones."""
    inputs = [x, (x.detach() / 1000).requires_grad_()]  # of which the eps of a norm shows
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
    except Exception:  # another number of arguments, of features, a kernel that fails here
        return False
    return True


def _equal(one: Tensor, two: Tensor, exact: bool) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype or exact:
        return torch.equal(one, two)
    close = 1e-4 if one.dtype == torch.float32 else 2e-2
    return torch.allclose(one, two, rtol=close, atol=close * float(one.abs().max()))


def _as_norm(part: nn.Module, x: Tensor, fused: bool) -> tuple[type, dict[str, Any]]:
    numbers = {value for value in vars(part).values() if isinstance(value, float)} | {torch.finfo(x.dtype).eps}
    for fused_norm in itertools.product(numbers, (0.0, 1.0), ("llama", "gemma", "none")) if fused else ():
        if _stands_for(part, x, _Norm, {"_fused_norm": fused_norm}, exact=False):
            return _Norm, {"_fused_norm": fused_norm}
    return _Norm, {"_fused_norm": None}


def _as_gated(part: nn.Module, x: Tensor, fused: bool) -> tuple[type, dict[str, Any]] | None:
    children = dict(part.named_children())
    linear = [name for name, child in children.items() if hasattr(child, "in_features")]
    own = [name for name, child in children.items() if not any(True for _ in child.parameters())]
    for names, activation in itertools.product(itertools.permutations(linear), (*own, *_ACTIVATIONS)):
        found = {"_gated": names, "_activation": activation, "_fused_gate": None}
        if not _stands_for(part, x, _Gated, found):
            continue
        for function in ("swiglu.LigerSiLUMul", "geglu.LigerGELUMul") if fused else ():
            if _stands_for(part, x, _Gated, found | {"_fused_gate": function}, exact=False):
                return _Gated, found | {"_fused_gate": function}
        return _Gated, found
    return None


def _stands_for(part: nn.Module, x: Tensor, kind: type, attributes: dict[str, Any], exact: bool = True) -> bool:
    """Whether a layer gives the same with the mix-in as without."""
    own = part.forward
    mix_in(part, kind, **attributes)
    try:
        return _same(part, x, own, exact)
    finally:
        mix_out(part, kind)


def _liger(name: str) -> Any:
    module, function = name.split(".")
    return getattr(import_module(f"liger_kernel.ops.{module}"), f"{function}Function")
