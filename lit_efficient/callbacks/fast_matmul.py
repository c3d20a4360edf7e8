"""Fast matrix products: TF32, sums in less than float32, and cuDNN's search for the fastest convolution, for one run.

    float32 product on tensor cores: operands rounded to 10 bits of mantissa (TF32), summed in float32
    reduced reductions: partial sums of fp16 and bf16 products are added in that type, not in float32

Saves: time: up to 8 times the rate of float32 products on an A100; convolutions by the kernel that was measured best
Costs: the last 13 bits of float32 operands; a search of seconds for each new shape that a convolution meets
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices

These switches belong to the process, not to the network: what was there before comes back when the run ends.
"""

import logging
from lightning.pytorch import LightningModule, Trainer
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from lightning_utilities.core import rank_zero
from torch import nn

from lit_efficient.declaration import Report
from lit_efficient.errors import check_choice, refusal
from lit_efficient.technique import Technique

_PRECISIONS = ("highest", "high", "medium")
_TENSOR_CORES = (8, 0)  # compute capability from which a GPU has TF32
_PRODUCTS: Any = torch.backends.cuda.matmul
_ADVICE = "You are using a CUDA device ("  # how Lightning's begins


def _set_precision(value: Any) -> None:
    torch.set_float32_matmul_precision(value)  # the newer switches of each backend make Lightning's own start raise


_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "float32_matmul_precision": (torch.get_float32_matmul_precision, _set_precision),
    "fp16_reduced_reductions": (
        lambda: _PRODUCTS.allow_fp16_reduced_precision_reduction,
        lambda value: setattr(_PRODUCTS, "allow_fp16_reduced_precision_reduction", value),
    ),
    "bf16_reduced_reductions": (
        lambda: _PRODUCTS.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(_PRODUCTS, "allow_bf16_reduced_precision_reduction", value),
    ),
    "cudnn_benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
}


def swap_switches(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Set torch's switches for products and convolutions; return what they were, which a second call puts back.

    Args:
        wanted: ``float32_matmul_precision`` (``highest``, ``high``, ``medium``), ``fp16_reduced_reductions``,
            ``bf16_reduced_reductions`` and ``cudnn_benchmark``; what is not named stays.
    """
    before = {name: _SWITCHES[name][0]() for name in wanted}
    for name, value in wanted.items():
        _SWITCHES[name][1](value)
    return before


class FastMatmul(Technique):
    """Let a CUDA GPU multiply float32 matrices as TF32 and choose its convolutions by measuring, while the run lasts.

    On other devices nothing is set, and the report says so. A GPU without TF32 (before Ampere) gets the rest.

    Args:
        precision: Of products of float32 matrices: ``highest`` (float32), ``high`` (TF32) or ``medium`` (bf16).
        reduced_reductions: Whether products of fp16 and bf16 may add partial sums in less than float32, as torch's
            default is; false trades speed for accuracy.
        cudnn_benchmark: Whether cuDNN measures its kernels for each new shape. Under ``deterministic`` it does not.

    Raises:
        ConfigurationError: For an argument out of range.
    """

    computes = "rounded"
    helps = {"speed": (2, "float32 products on tensor cores, from Ampere on")}

    def __init__(self, precision: str = "high", reduced_reductions: bool = True, cudnn_benchmark: bool = True) -> None:
        super().__init__()
        check_choice("FastMatmul", "precision", precision, _PRECISIONS)
        for name, value in (("reduced_reductions", reduced_reductions), ("cudnn_benchmark", cudnn_benchmark)):
            if not isinstance(value, bool):
                raise refusal("FastMatmul", name, "true or false", value)
        self.precision = precision
        self.reduced_reductions = reduced_reductions
        self.cudnn_benchmark = cudnn_benchmark
        self._runs: list[tuple[int, dict[str, Any]]] = []  # of trainers in each other: id, switches before
        self._said = ""
        _silence_advice()
        _LIVE.add(self)

    def capability(self, trainer: Trainer) -> tuple[int, int] | None:
        """Of the run's GPU; ``None`` for another device."""
        device = trainer.strategy.root_device
        return torch.cuda.get_device_capability(device) if device.type == "cuda" else None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if any(run == id(trainer) for run, _ in self._runs):
            return
        capability = self.capability(trainer)
        if capability is None:
            kind = trainer.strategy.root_device.type
            self._said = f"nothing is set: {kind} has neither TF32 nor cuDNN; products stay as they are"
            return
        wanted: dict[str, Any] = dict.fromkeys(
            ("fp16_reduced_reductions", "bf16_reduced_reductions"), self.reduced_reductions
        )
        left = []
        if capability >= _TENSOR_CORES:
            wanted["float32_matmul_precision"] = self.precision
        else:
            left.append(f"no TF32 on a GPU of compute capability {capability[0]}.{capability[1]}")
        deterministic = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        if torch.backends.flags_frozen():
            left.append("cuDNN's search stays as it is, as torch's flags are frozen")
        else:
            wanted["cudnn_benchmark"] = self.cudnn_benchmark and not deterministic
            if self.cudnn_benchmark and deterministic:
                left.append("no search by cuDNN, as the run is deterministic")
        before = swap_switches(wanted)
        self._runs.append((id(trainer), before))
        changed = [f"{name} {before[name]} -> {value}" for name, value in wanted.items() if before[name] != value]
        self._said = "; ".join([", ".join(changed) or "all was as asked for already", *left])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._runs and self._runs[-1][0] == id(trainer):
            swap_switches(self._runs.pop()[1])
        super().teardown(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        return Report(self._said or "nothing is set yet")


_LIVE: "WeakSet[FastMatmul]" = WeakSet()


class _Heeded(logging.Filter):
    """Advice is left out while there is who heeds it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (_LIVE and record.getMessage().startswith(_ADVICE))


def _silence_advice() -> None:
    """Lightning advises to set what is about to be set: it looks before any callback is called."""
    if not any(isinstance(one, _Heeded) for one in rank_zero.log.filters):
        rank_zero.log.addFilter(_Heeded())
