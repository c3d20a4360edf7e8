"""Attention kernels by name: all of a run's attention goes through one kernel, and what ran is said.

    softmax(Q K^T / sqrt(d)) V    by flash, efficient or cudnn: no T x T in memory;    by math: T^2 numbers a head

Saves: a search for why attention is slow: the kernel is the named one, or the run stops with the reason
Costs: nothing; a step whose sizes, masks or dropout the kernel does not take stops the run
Source: Dao et al. (2022), https://arxiv.org/abs/2205.14135; https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

Torch chooses silently among the kernels that can run, and falls back to the slow one. Here the others are switched off
while the trainer runs: in training, in what the backward pass computes again, in validation and prediction alike.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice
from lit_efficient.internals.hugging_face import attention_of
from lit_efficient.internals.torch_compiler import is_compiled
from lit_efficient.internals.torch_dispatch import TorchDispatchMode
from lit_efficient.internals.torch_operators import ATTENTION_KERNELS
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

Backend = Literal["flash", "efficient", "cudnn", "math", "flex"]

_SWITCHES = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", "math": "math"}  # torch.backends.cuda's

_REFUSED = re.compile("No available kernel|No viable backend|Invalid backend")


def switch_kernels(allowed: dict[str, bool]) -> dict[str, bool]:
    """Switch torch's attention kernels on and off, by name, for the whole process; returns what they were."""
    before = {name: bool(getattr(torch.backends.cuda, f"{_SWITCHES[name]}_sdp_enabled")()) for name in allowed}
    for name, on in allowed.items():
        getattr(torch.backends.cuda, f"enable_{_SWITCHES[name]}_sdp")(on)
    return before


def try_kernel(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Run torch's attention, forward and backward, with the named kernel alone; returns why it cannot, or nothing."""
    before = switch_kernels({other: other == name for other in _SWITCHES})
    try:
        with warnings.catch_warnings(record=True) as said, torch.enable_grad():
            warnings.simplefilter("always")
            x = torch.zeros(1, 2, 16, 64, device=device, dtype=dtype, requires_grad=True)
            F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    except RuntimeError as error:
        reasons = [str(one.message).split(" (Triggered")[0] for one in said]
        return "; ".join(reasons or [str(error).strip().splitlines()[0]])
    finally:
        switch_kernels(before)
    return ""


class Kernels(TorchDispatchMode):
    """Count what torch's attention runs while active, by the kernel's name, forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = ATTENTION_KERNELS.get(func)
        if kind is not None:
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


class AttentionBackend(Technique):
    """Let all attention of the run go through one kernel, and say after the first step which one it was.

    Whatever calls ``torch.nn.functional.scaled_dot_product_attention`` is held to it, and models of transformers are
    set to it. On a GPU, packed rows of our GPT go through FlexAttention, which is not one of torch's choices.

    Args:
        backend: ``flash``, ``efficient`` (memory-efficient), ``cudnn`` or ``math``, of torch; ``flex`` is FlexAttention
            for models of transformers, on a GPU. A CPU has ``flash`` and ``math``.

    Raises:
        ConfigurationError: For a kernel that this device, number format or model does not have, and in a step whose
            sizes, mask or dropout it does not take, each with torch's reason; where no attention runs at all.
        ConflictError: If ``CausalLMConfig.attention`` asks for another one.
    """

    phase = Phase.LAYOUT
    traits = frozenset({Trait.AFTER_SHARDING, Trait.TRAINING_ONLY})
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (6, "no slow kernel for attention unseen")}

    def __init__(self, backend: Backend = "flash") -> None:
        super().__init__()
        check_choice("AttentionBackend", "backend", backend, get_args(Backend))
        self.backend = backend
        self.ran: dict[str, int] = {}  # calls of each kernel in the first step
        self._before: dict[str, bool] = {}

    def check(self, trainer: Any, module: Any) -> None:
        device = trainer.strategy.root_device
        asked = getattr(getattr(module, "model", None), "attention", None)
        if isinstance(asked, str) and not self._means(asked):
            raise ConflictError(
                f"AttentionBackend: backend={self.backend!r}, and model.attention={asked!r} names another kernel: "
                "leave out one of the two"
            )
        if self.backend == "flex":
            reason = "" if device.type == "cuda" else "FlexAttention has a backward pass on CUDA alone"
        else:
            precision = str(trainer.precision)
            dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else torch.float32
            reason = try_kernel(self.backend, device, dtype)
        if reason:
            raise ConfigurationError(
                f"AttentionBackend: backend={self.backend!r} cannot run on {device.type!r} with precision "
                f"{trainer.precision}: {reason}"
            )

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.backend in _SWITCHES and not self._before:
            self._before = switch_kernels({name: name == self.backend for name in _SWITCHES})
        for step in _STEPS:
            wrap_method(trainer.strategy, step.__name__.lstrip("_"), step)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
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
                f"AttentionBackend: backend='flex' is for models of transformers, and {type(module).__name__} holds "
                "none: torch's own attention chooses among flash, efficient, cudnn and math"
            )
        names: list[str] = []
        for name, part in found:
            if any(name.startswith(f"{other}.") for other in names):
                continue  # of one that is set already
            names.append(name)
            if not self._means(attention_of(part.config)):
                self._set(part)
        kinds = ", ".join(sorted({type(module.get_submodule(name)).__name__ for name in names}))
        return Report(
            f"all attention runs by {self.backend}, or the run stops" + (f"; {kinds} is set to it" if kinds else ""),
            modules=tuple(names),
        )

    def _means(self, implementation: str) -> bool:
        """Whether a name of transformers' is this kernel, or torch's attention, which is held to it."""
        if self.backend == "flex":
            return implementation == "flex_attention"
        own = self.backend == "flash" and "flash_attention" in implementation
        return own or implementation == "sdpa"

    def _set(self, network: Any) -> None:
        wanted = "flex_attention" if self.backend == "flex" else "sdpa"
        try:
            network.set_attn_implementation(wanted)
            reason = "its layers take no other"
        except (ValueError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
        if attention_of(network.config) != wanted:
            raise ConfigurationError(
                f"AttentionBackend: {type(network).__name__} has no {wanted} for backend={self.backend!r}: {reason}"
            )

    @contextmanager
    def step(self, module: nn.Module, training: bool) -> Iterator[None]:
        """A context around a step, in which torch's refusal becomes ours; the first of training is watched."""
        # What is watched would not be compiled.
        watched = training and not self.ran and not any(is_compiled(part) for part in module.modules())
        try:
            with Kernels() if watched else nullcontext() as kernels:
                yield
        except RuntimeError as error:
            if not _REFUSED.search(str(error)):
                raise
            raise ConfigurationError(self._refusal(module)) from error
        if kernels is not None:
            self._note(module, kernels.counts)

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        if isinstance(exception, RuntimeError) and _REFUSED.search(str(exception)):  # outside of a step
            exception.add_note(self._refusal(pl_module))
        super().on_exception(trainer, pl_module, exception)

    def _refusal(self, module: nn.Module) -> str:
        heads = ", grouped heads, which it has no kernel for on CUDA" if self.backend == "efficient" else ""
        return (
            f"AttentionBackend: backend={self.backend!r} does not take what {type(module).__name__} calls attention "
            f"with, of which torch's warnings say what (sizes, a mask, dropout{heads}): leave AttentionBackend out, or "
            "take 'math'"
        )

    def _note(self, module: nn.Module, counts: dict[str, int]) -> None:
        outside = [part for part in module.modules() if hasattr(part, "set_attn_implementation")]
        own = sorted({attention_of(part.config) for part in outside} - {"sdpa", "eager"})  # no operator of torch's
        self.ran = counts or dict.fromkeys(own, 1)
        if not self.ran:
            raise ConfigurationError(
                f"AttentionBackend: no attention ran in {type(module).__name__}.training_step: nothing calls "
                "torch.nn.functional.scaled_dot_product_attention"
            )
        said = ", ".join(f"{name} ({count} calls)" for name, count in counts.items()) or ", ".join(own)
        rank_zero_info(f"AttentionBackend: in the first step ran {said}")


def _run(strategy: Any, step: Any, *args: Any, **kwargs: Any) -> Any:
    module = strategy.lightning_module
    own = next(callback for callback in module.trainer.callbacks if isinstance(callback, AttentionBackend))
    name = step.__name__.lstrip("_")
    with own.step(module, name == "training_step"):
        return inner_method(strategy, name, step)(*args, **kwargs)


def _training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(self, _training_step, *args, **kwargs)


def _validation_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(self, _validation_step, *args, **kwargs)


def _test_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(self, _test_step, *args, **kwargs)


def _predict_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(self, _predict_step, *args, **kwargs)


_STEPS = (_training_step, _validation_step, _test_step, _predict_step)
