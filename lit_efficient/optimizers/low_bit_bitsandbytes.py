"""Twins of torch's optimizers on bitsandbytes' kernels: the groups stay torch's own, the states are 8-bit.

Each twin keeps the keys of torch's class in its groups (``momentum``, ``alpha``, ``lr_decay``) and translates them in
every step, so that schedulers which change them go on working. What bitsandbytes decides for the whole process (its
``GlobalOptimManager``) is decided here for each parameter.

Import this module inside functions only: bitsandbytes takes seconds.
"""

from collections.abc import Set
from typing import Any, ClassVar

import torch
from bitsandbytes.optim.optimizer import Optimizer1State, Optimizer2State, Optimizer8bit
from torch import Tensor

_PAGED_FROM = 100_000  # elements; bitsandbytes pages no smaller tensor


class _Twin(Optimizer8bit):
    """What all twins share; ``kernel`` names the update."""

    kernel: ClassVar[str]
    coupled: ClassVar[bool] = False  # whether decay must be added to the gradient here, because the kernel decouples it

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        keep_32bit: Set[Tensor] = frozenset(),
        no_decay: Set[Tensor] = frozenset(),
        min_size: int = 4096,
        paged: bool = False,
    ) -> None:
        Optimizer8bit.__init__(self, params, defaults, optim_bits=8, is_paged=paged)
        self.optimizer_name = self.kernel
        self.keep_32bit = keep_32bit
        self.no_decay = no_decay
        self.min_size = min_size
        self.initialized = True  # the first step must not read the process-wide overrides

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        """The kernel's two coefficients."""
        return group["betas"]

    def rate(self, group: dict[str, Any], steps: int) -> float:
        """The learning rate after ``steps`` steps."""
        return float(group["lr"])

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """What the kernels need to know about one parameter, now."""
        p = group["params"][pindex]
        decay = 0.0 if self.coupled or p in self.no_decay else group["weight_decay"]
        low = p not in self.keep_32bit and p.numel() >= self.min_size
        return {
            "betas": self.betas(group),
            "eps": group.get("eps", 0.0),
            "weight_decay": decay,
            "lr": self.rate(group, self.state[p].get("step", 0)),
            "optim_bits": 8 if low else 32,
            "min_8bit_size": 0,
            "max_unorm": 0.0,
            "skip_zeros": False,
        }

    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Step one parameter; the gradient is left as it was."""
        if not self.coupled or p in self.no_decay or not group["weight_decay"]:
            super().update_step(group, p, gindex, pindex)
            return
        gradient = p.grad
        assert gradient is not None  # step() has looked
        p.grad = gradient.add(p, alpha=group["weight_decay"])
        super().update_step(group, p, gindex, pindex)
        p.grad = gradient

    def prefetch_state(self, p: Tensor) -> None:
        """Page what a resumed run has loaded into plain memory, then fetch it."""
        if self.is_paged and p.numel() >= _PAGED_FROM:
            state = self.state[p]
            for name in ("state1", "state2"):
                if name in state and not getattr(state[name], "is_paged", False):
                    buffer = self.get_state_buffer(p, dtype=state[name].dtype)
                    state[name] = buffer.copy_(state[name])
        super().prefetch_state(p)


class AdamW8bit(_Twin, Optimizer2State):
    """Two moments, decoupled decay."""

    kernel = "adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **low_bit: Any,
    ) -> None:
        _Twin.__init__(self, params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **low_bit)


class Adam8bit(AdamW8bit):
    """Two moments, decay added to the gradient."""

    coupled = True


class Lion8bit(_Twin, Optimizer1State):
    """The sign of an interpolated moment, decoupled decay."""

    kernel = "lion"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **low_bit: Any,
    ) -> None:
        _Twin.__init__(self, params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **low_bit)


class SGD8bit(_Twin, Optimizer1State):
    """Momentum; the kernel adds the decay to the gradient, as torch does."""

    kernel = "momentum"

    def __init__(
        self, params: Any, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0, **low_bit: Any
    ) -> None:
        _Twin.__init__(self, params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, **low_bit)

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        """Momentum, and nothing."""
        return group["momentum"], 0.0


class RMSprop8bit(_Twin, Optimizer1State):
    """A moving mean of squares."""

    kernel = "rmsprop"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **low_bit: Any,
    ) -> None:
        _Twin.__init__(self, params, {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay}, **low_bit)

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        """The smoothing constant, and nothing."""
        return group["alpha"], 0.0


class Adagrad8bit(_Twin, Optimizer1State):
    """A sum of squares."""

    kernel = "adagrad"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        eps: float = 1e-10,
        **low_bit: Any,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        _Twin.__init__(self, params, defaults, **low_bit)

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        """The kernel needs none."""
        return 0.0, 0.0

    def rate(self, group: dict[str, Any], steps: int) -> float:
        """The rate, decayed as torch decays it."""
        return float(group["lr"]) / (1 + steps * group["lr_decay"])


def state_bytes(p: Tensor, moments: int, low: bool) -> int:
    """Bytes of one parameter's states: codes and a float32 scale for each 256, or float32 values."""
    elements = p.numel()
    return moments * (elements + 4 * -(-elements // 256) if low else 4 * elements)


def table_bytes(moments: int) -> int:
    """Bytes of the code tables, which all parameters of an optimizer share."""
    return moments * 256 * torch.float32.itemsize
