"""Attention kernels by name: all attention of a run uses one kernel, and the kernels that ran are logged.

    softmax(Q K^T / sqrt(d)) V    flash, efficient, cudnn: no T x T matrix in memory;    math: T^2 numbers per head

Saves: the search for the reason why attention is slow: the named kernel runs, or the run stops with the reason
Costs: nothing; a step whose sizes, masks or dropout the kernel does not support stops the run
Source: Dao et al. (2022), https://arxiv.org/abs/2205.14135; https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

Torch chooses silently among the kernels that can run, and falls back to the slow one. This technique disables the
others while the trainer runs: in training, including recomputation in the backward pass, validation and prediction.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_efficient.declaration import Phase, Report, technique_of
from lit_efficient.errors import ConfigurationError, ConflictError
from lit_efficient.internals.hugging_face import attention_of
from lit_efficient.internals.torch_compiler import is_compiled
from lit_efficient.internals.torch_dispatch import TorchDispatchMode
from lit_efficient.internals.torch_operators import ATTENTION_KERNELS
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.surgery import class_names
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

Backend = Literal["flash", "efficient", "cudnn", "math", "flex"]

_SWITCHES = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}  # names in torch

_REFUSED = re.compile("No available kernel|No viable backend|Invalid backend")


def switch_kernels(allowed: dict[str, bool]) -> dict[str, bool]:
    """Enable and disable torch's attention kernels by name, for the whole process. Return the previous settings."""
    before = {name: bool(getattr(torch.backends.cuda, f"{_SWITCHES[name]}_sdp_enabled")()) for name in allowed}
    for name, on in allowed.items():
        getattr(torch.backends.cuda, f"enable_{_SWITCHES[name]}_sdp")(on)
    return before


def try_kernel(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Run torch's attention forward and backward with the named kernel only. Return why it cannot run, or ``""``."""
    before = switch_kernels({other: other == name for other in _SWITCHES})
    try:
        with warnings.catch_warnings(record=True) as caught, torch.enable_grad():
            warnings.simplefilter("always")
            x = torch.zeros(1, 2, 16, 64, device=device, dtype=dtype, requires_grad=True)
            F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    except RuntimeError as error:
        reasons = [str(warning.message).split(" (Triggered")[0] for warning in caught]
        return "; ".join(reasons or [str(error).strip().splitlines()[0]])
    finally:
        switch_kernels(before)
    return ""


class Kernels(TorchDispatchMode):
    """Mode that counts the calls of torch's attention by the kernel's name, forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kind = ATTENTION_KERNELS.get(func)
        if kind is not None:
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


class AttentionBackend(Technique):
    """Run all attention with one kernel, and log after the first step which kernel it was.

    The choice holds for all code that calls ``torch.nn.functional.scaled_dot_product_attention``. Models of
    transformers are configured to call it. On a GPU packed rows use FlexAttention, which torch's settings do not cover,
    except with ``flash``: torch's flash kernel then gets the lengths of the documents (``varlen_attn``).

    Args:
        backend: Kernel. ``flash``, ``efficient`` (memory-efficient), ``cudnn`` and ``math`` are torch's; a CPU has
            ``flash`` and ``math``. ``flex`` is FlexAttention, for models of transformers on a GPU.

    Raises:
        ConfigurationError: For a kernel that the device, precision or model does not support; in a step whose sizes,
            mask or dropout it does not support; and if the first step calls no attention.
        ConflictError: If ``CausalLMConfig.attention`` names another kernel.
    """

    phase = Phase.LAYOUT
    traits = frozenset({Trait.AFTER_SHARDING, Trait.TRAINING_ONLY})
    computes = "same"
    helps = {"speed": (6, "no slow attention kernel that goes unnoticed")}

    def __init__(self, backend: Backend = "flash") -> None:
        super().__init__()
        self.backend = backend
        self.ran: dict[str, int] = {}  # number of calls of each kernel in the first step
        self._before: dict[str, bool] = {}

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        device = trainer.strategy.root_device
        asked = getattr(getattr(module, "model", None), "attention", None)
        if isinstance(asked, str) and not self._permits(asked):
            raise ConflictError(
                f"AttentionBackend: backend={self.backend!r}, but model.attention={asked!r} names another kernel: "
                "leave one of them out"
            )
        reason = ""
        if self.backend != "flex":
            dtype = torch.float32
            if "16" in str(trainer.precision):
                dtype = torch.float16
                if "bf16" in str(trainer.precision):
                    dtype = torch.bfloat16
            reason = try_kernel(self.backend, device, dtype)
        elif device.type != "cuda":
            reason = "FlexAttention has a backward pass on CUDA only"
        if reason:
            raise ConfigurationError(
                f"AttentionBackend: backend={self.backend!r} cannot run on {device.type!r} with precision "
                f"{trainer.precision}: {reason}"
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.backend in _SWITCHES and not self._before:
            self._before = switch_kernels({name: name == self.backend for name in _SWITCHES})
        for step in _STEPS:
            wrap_method(trainer.strategy, step.__name__.lstrip("_"), step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        switch_kernels(self._before)
        self._before = {}
        for step in _STEPS:
            unwrap_method(trainer.strategy, step.__name__.lstrip("_"), step)
        super().teardown(trainer, pl_module, stage)

    def transform(self, module: nn.Module) -> Report:
        found: list[tuple[str, Any]] = [
            (name, part) for name, part in module.named_modules() if hasattr(part, "set_attn_implementation")
        ]
        if self.backend == "flex" and not found:
            raise ConfigurationError(
                f"AttentionBackend: backend='flex' is for models of transformers, and {type(module).__name__} has "
                "none: choose flash, efficient, cudnn or math"
            )
        names: list[str] = []
        for name, part in found:
            if any(name.startswith(f"{other}.") for other in names):
                continue  # part of a model that is configured already
            names.append(name)
            if not self._permits(attention_of(part.config)):
                self._configure(part)
        summary = f"all attention uses {self.backend}, or the run stops"
        if names:
            summary += f"; {class_names(map(module.get_submodule, names))} is configured for it"
        return Report(summary, modules=tuple(names) or None)

    def _permits(self, implementation: str) -> bool:
        """Return whether an implementation of transformers runs this kernel, directly or through torch's attention."""
        if self.backend == "flex":
            return implementation == "flex_attention"
        return implementation == "sdpa" or (self.backend == "flash" and "flash_attention" in implementation)

    def _configure(self, network: Any) -> None:
        wanted = "flex_attention" if self.backend == "flex" else "sdpa"
        try:
            network.set_attn_implementation(wanted)
            reason = "its layers support no other"
        except (ValueError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
        if attention_of(network.config) != wanted:
            raise ConfigurationError(
                f"AttentionBackend: {type(network).__name__} has no {wanted} for backend={self.backend!r}: {reason}"
            )

    @contextmanager
    def step(self, module: nn.Module, training: bool) -> Iterator[None]:
        """Context of a step that explains torch's errors. The first training step also counts the kernels' calls."""
        # Torch does not compile under a dispatch mode, so compiled modules are not counted.
        watched = training and not self.ran and not any(is_compiled(part) for part in module.modules())
        try:
            with Kernels() if watched else nullcontext() as kernels:
                yield
        except RuntimeError as error:
            if not _REFUSED.search(str(error)):
                raise
            raise ConfigurationError(self._refusal(module)) from error
        if kernels is not None:
            self._report(module, kernels.counts)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, RuntimeError) and _REFUSED.search(str(exception)):  # raised outside a step
            exception.add_note(self._refusal(pl_module))
        super().on_exception(trainer, pl_module, exception)

    def _refusal(self, module: nn.Module) -> str:
        heads = ""
        if self.backend == "efficient":
            heads = ", grouped heads, which it does not support on CUDA"
        return (
            f"AttentionBackend: backend={self.backend!r} does not support the arguments with which "
            f"{type(module).__name__} calls attention. Torch's warnings name the reason (sizes, a mask, "
            f"dropout{heads}): leave AttentionBackend out, or use 'math'"
        )

    def _report(self, module: nn.Module, counts: dict[str, int]) -> None:
        """Log the kernels of the first step, or raise if it called no attention."""
        implementations = {attention_of(p.config) for p in module.modules() if hasattr(p, "set_attn_implementation")}
        own = sorted(implementations - {"sdpa", "eager"})  # kernels that are no operators of torch cannot be counted
        self.ran = counts or dict.fromkeys(own, 1)
        if not self.ran:
            raise ConfigurationError(
                f"AttentionBackend: no attention ran in {type(module).__name__}.training_step: nothing calls "
                "torch.nn.functional.scaled_dot_product_attention. Leave AttentionBackend out"
            )
        kernels = ", ".join(f"{name} ({count} calls)" for name, count in counts.items()) or ", ".join(own)
        rank_zero_info(f"AttentionBackend: kernels of the first step: {kernels}")


def _run(strategy: Any, step: Any, *args: object, **kwargs: object) -> Any:
    module = strategy.lightning_module
    technique = technique_of(module.trainer, AttentionBackend)
    name = step.__name__.lstrip("_")
    if technique is None:  # Lightning's finders run trial steps without the callbacks
        return inner_method(strategy, name, step)(*args, **kwargs)
    with technique.step(module, name == "training_step"):
        return inner_method(strategy, name, step)(*args, **kwargs)


def _training_step(self: nn.Module, *args: object, **kwargs: object) -> Any:
    return _run(self, _training_step, *args, **kwargs)


def _validation_step(self: nn.Module, *args: object, **kwargs: object) -> object:
    return _run(self, _validation_step, *args, **kwargs)


def _test_step(self: nn.Module, *args: object, **kwargs: object) -> object:
    return _run(self, _test_step, *args, **kwargs)


def _predict_step(self: nn.Module, *args: object, **kwargs: object) -> object:
    return _run(self, _predict_step, *args, **kwargs)


_STEPS = (_training_step, _validation_step, _test_step, _predict_step)
