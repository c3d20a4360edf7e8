"""Fast matrix products: TF32, reduced-precision sums, and cuDNN's search for the fastest convolution, for one run.

    float32 product on tensor cores: operands rounded to 10 bits of mantissa (TF32), summed in float32
    reduced reductions: partial sums of fp16 and bf16 products are added in that dtype, not in float32

Saves: time: up to 8 times the rate of float32 products on an A100; convolutions with the kernel that was fastest
Costs: the last 13 bits of float32 operands; seconds of search for each new shape of a convolution
Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices

These settings belong to the process, not to the network. The previous settings are restored when the run ends.
"""

import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core import rank_zero
from torch import nn

from lit_efficient.declaration import Report
from lit_efficient.errors import check_choice
from lit_efficient.technique import Technique

_PRECISIONS = ("highest", "high", "medium")
_TENSOR_CORES = (8, 0)  # smallest compute capability of a GPU with TF32
_ADVICE = "You are using a CUDA device ("  # start of Lightning's advice to set the precision
_PRECISION = "float32_matmul_precision"  # torch has functions for it; its newer attributes make Lightning raise
_SETTINGS = {
    "fp16_reduced_reductions": (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "bf16_reduced_reductions": (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    "cudnn_benchmark": (torch.backends.cudnn, "benchmark"),
}


def swap_switches(wanted: Mapping[str, Any]) -> dict[str, object]:
    """Change torch's settings for products and convolutions. Return the previous ones, for a second call.

    Args:
        wanted: ``float32_matmul_precision`` (``highest``, ``high``, ``medium``), ``fp16_reduced_reductions``,
            ``bf16_reduced_reductions`` and ``cudnn_benchmark``. Other settings do not change.
    """
    before: dict[str, object] = {}
    for name, value in wanted.items():
        if name == _PRECISION:
            before[name] = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision(value)
        else:
            owner, attribute = _SETTINGS[name]
            before[name] = getattr(owner, attribute)
            setattr(owner, attribute, value)
    return before


class FastMatmul(Technique):
    """Let a CUDA GPU multiply float32 matrices as TF32 and choose its convolutions by measuring, during a run.

    On other devices nothing changes, as the report says. On a GPU without TF32 (before Ampere) the other settings
    apply.

    Args:
        precision: Precision of products of float32 matrices: ``highest`` (float32), ``high`` (TF32) or ``medium``
            (bf16).
        reduced_reductions: Let products of fp16 and bf16 add partial sums in less than float32, as torch does by
            default. False is slower and more accurate.
        cudnn_benchmark: Let cuDNN measure its kernels for each new shape. It has no effect in a deterministic run.

    Raises:
        ConfigurationError: For an argument out of range.
    """

    computes = "rounded"
    helps = {"speed": (2, "float32 products on tensor cores, from Ampere on")}

    def __init__(self, precision: str = "high", reduced_reductions: bool = True, cudnn_benchmark: bool = True) -> None:
        super().__init__()
        check_choice("FastMatmul", "precision", precision, _PRECISIONS)
        self.precision = precision
        self.reduced_reductions = reduced_reductions
        self.cudnn_benchmark = cudnn_benchmark
        self._runs: list[tuple[int, dict[str, object]]] = []  # nested runs: id of the trainer, previous settings
        self._summary = "nothing is set yet"
        _silence_advice()
        _LIVE.add(self)

    def capability(self, trainer: Trainer) -> tuple[int, int] | None:
        """Return the compute capability of the run's GPU, or ``None`` for another device."""
        device = trainer.strategy.root_device
        if device.type == "cuda":
            return torch.cuda.get_device_capability(device)
        return None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if any(run == id(trainer) for run, _ in self._runs):
            return
        capability = self.capability(trainer)
        if capability is None:
            kind = trainer.strategy.root_device.type
            self._summary = f"nothing is set, because a {kind} has neither TF32 nor cuDNN"
            return
        wanted: dict[str, object] = {
            "fp16_reduced_reductions": self.reduced_reductions,
            "bf16_reduced_reductions": self.reduced_reductions,
        }
        exceptions = []
        if capability >= _TENSOR_CORES:
            wanted[_PRECISION] = self.precision
        else:
            exceptions.append(f"no TF32 on a GPU of compute capability {capability[0]}.{capability[1]}")
        deterministic = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        if torch.backends.flags_frozen():
            exceptions.append("cuDNN's search does not change, because torch's flags are frozen")
        else:
            wanted["cudnn_benchmark"] = self.cudnn_benchmark and not deterministic
            if self.cudnn_benchmark and deterministic:
                exceptions.append("no search by cuDNN, because the run is deterministic")
        before = swap_switches(wanted)
        self._runs.append((id(trainer), before))
        changed = [f"{name} {before[name]} -> {value}" for name, value in wanted.items() if before[name] != value]
        self._summary = "; ".join([", ".join(changed) or "all settings had these values already", *exceptions])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._runs and self._runs[-1][0] == id(trainer):
            swap_switches(self._runs.pop()[1])
        super().teardown(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        return Report(self._summary)


_LIVE: "WeakSet[FastMatmul]" = WeakSet()


class _AdviceFilter(logging.Filter):
    """Filter that drops Lightning's advice to set the precision while a :class:`FastMatmul` exists."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (_LIVE and record.getMessage().startswith(_ADVICE))


def _silence_advice() -> None:
    """Install the filter. Lightning logs its advice before it calls any callback."""
    if not any(isinstance(one, _AdviceFilter) for one in rank_zero.log.filters):
        rank_zero.log.addFilter(_AdviceFilter())
