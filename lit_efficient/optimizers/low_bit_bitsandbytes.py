"""Twins of torch's optimizers on bitsandbytes' kernels: the groups stay torch's own, the states are 8-bit.

Each twin keeps the keys of torch's class in its groups (``momentum``, ``alpha``, ``lr_decay``) and translates them in
every step, so that schedulers which change them go on working. What bitsandbytes decides for the whole process (its
``GlobalOptimManager``) is decided here for each parameter.

Import this module inside functions only: bitsandbytes takes seconds.
"""

import functools
from collections.abc import Callable, Set
from typing import Any, ClassVar

import torch
from bitsandbytes.functional import create_dynamic_map, optimizer_update_8bit_blockwise
from bitsandbytes.optim.optimizer import Optimizer1State, Optimizer2State, Optimizer8bit
from torch import Tensor

from lit_efficient.optimizers.stepping import loss_of

_PAGED_FROM = 100_000  # elements; bitsandbytes pages no smaller tensor
_MOMENTS = ("state1", "state2")


class _Twin(Optimizer8bit):
    """What all twins share; ``kernel`` names the update, ``options`` are the settings that it shares with torch's."""

    kernel: ClassVar[str]
    options: ClassVar[tuple[str, ...]]
    coupled: ClassVar[bool] = False  # whether decay must be added to the gradient here, because the kernel decouples it

    def __init__(
        self,
        params: Any,
        *,
        keep_32bit: Set[Tensor] = frozenset(),
        no_decay: Set[Tensor] = frozenset(),
        min_size: int = 4096,
        paged: bool = False,
        **options: Any,
    ) -> None:
        Optimizer8bit.__init__(self, params, options, optim_bits=8, is_paged=paged)
        self.optimizer_name = self.kernel
        self.keep_32bit = keep_32bit
        self.no_decay = no_decay
        self.min_size = min_size
        self._pages: dict[tuple[Tensor, str], Tensor] = {}  # of each parameter and moment, for good
        self.initialized = True  # the first step must not read the process-wide overrides

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """All kernels one behind the other on the device's stream; bitsandbytes' own loop waits after each tensor."""
        loss = loss_of(closure)
        for number, group in enumerate(self.param_groups):
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    if not self.state[p]:
                        self.init_state(group, p, number, index)
                    self.prefetch_state(p)
                    self.update_step(group, p, number, index)
        if self.is_paged:  # the driver moves pages beside the stream
            torch.accelerator.synchronize()
        return loss

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        """The kernel's two coefficients; of one moment the smoothing constant or momentum, if it has one."""
        return group["betas"] if "betas" in self.options else (group.get("alpha", group.get("momentum", 0.0)), 0.0)

    def rate(self, group: dict[str, Any], steps: int) -> float:
        """The learning rate after ``steps`` steps; of Adagrad decayed as torch decays it."""
        return float(group["lr"]) / (1 + steps * group.get("lr_decay", 0.0))

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

    def init_state(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        super().init_state(group, p, gindex, pindex)
        if self.is_paged:
            self._pages |= {(p, name): self.state[p][name] for name in _MOMENTS if name in self.state[p]}

    def prefetch_state(self, p: Tensor) -> None:
        """Put what lies elsewhere, as loaded and copied states do, into the parameter's own pages, then fetch them."""
        if self.is_paged and p.numel() >= _PAGED_FROM:
            state = self.state[p]
            for name in _MOMENTS:
                page = self._pages.get((p, name))
                if name in state and state[name] is not page:
                    if page is None or page.dtype != state[name].dtype:
                        page = self._pages[p, name] = self.get_state_buffer(p, dtype=state[name].dtype)
                    state[name] = page.copy_(state[name])
        super().prefetch_state(p)

    def state_dict(self) -> dict[str, Any]:
        """The state without bitsandbytes' mark of pages, which copies would keep in ordinary memory."""
        return _unmarked(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load what :meth:`state_dict` gave, or gave with marks in an earlier version."""
        super().load_state_dict(_unmarked(state_dict), *args, **kwargs)


class AdamW8bit(_Twin, Optimizer2State):
    """Two moments, decoupled decay."""

    kernel = "adam"
    options = ("lr", "betas", "eps", "weight_decay")


class Adam8bit(AdamW8bit):
    """Two moments, decay added to the gradient."""

    coupled = True


class Lion8bit(_Twin, Optimizer1State):
    """The sign of an interpolated moment, decoupled decay."""

    kernel = "lion"
    options = ("lr", "betas", "weight_decay")


class SGD8bit(_Twin, Optimizer1State):
    """Momentum; the kernel adds the decay to the gradient, as torch does."""

    kernel = "momentum"
    options = ("lr", "momentum", "weight_decay")


class RMSprop8bit(_Twin, Optimizer1State):
    """A moving mean of squares."""

    kernel = "rmsprop"
    options = ("lr", "alpha", "eps", "weight_decay")


class Adagrad8bit(_Twin, Optimizer1State):
    """A sum of squares."""

    kernel = "adagrad"
    options = ("lr", "lr_decay", "weight_decay", "eps")


def adam_8bit(gradient: Tensor, state: dict[str, Any], betas: tuple[float, float], eps: float, step: int) -> Tensor:
    """Adam's step at a rate of one, without decay, from 8-bit moments that ``state`` keeps from step one on.

    The gradient is contiguous, of any shape.
    """
    if "state1" not in state:
        for moment in "12":
            state[f"state{moment}"] = torch.zeros_like(gradient, dtype=torch.uint8)
            state[f"absmax{moment}"] = gradient.new_zeros(-(-gradient.numel() // 256), dtype=torch.float32)
    moved, tables = torch.zeros_like(gradient), _tables(gradient.device)
    settings = (*betas, 0.0, 0.0, eps, step, 1.0)  # two zeros for AdEMAMix's third moment; a rate of one
    states = (state["state1"], state["state2"]), (state["absmax1"], state["absmax2"])
    arguments: list[Any] = [gradient, moved, *states[0], *settings, *tables, *states[1]]
    optimizer_update_8bit_blockwise("adam", *arguments)
    return moved.neg_()


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The code tables of the first moment and of the second."""
    return create_dynamic_map(signed=True).to(device), create_dynamic_map(signed=False).to(device)


def _unmarked(value: Any) -> Any:
    """The same, with tensors that are marked as paged by others of the same memory."""
    if isinstance(value, dict):
        return {key: _unmarked(item) for key, item in value.items()}
    return value.detach() if isinstance(value, Tensor) and hasattr(value, "is_paged") else value


def state_bytes(p: Tensor, moments: int, low: bool) -> int:
    """Bytes of one parameter's states: codes and a float32 scale for each 256, or float32 values."""
    elements = p.numel()
    return moments * (elements + 4 * -(-elements // 256) if low else 4 * elements)


def table_bytes(moments: int) -> int:
    """Bytes of the code tables, which all parameters of an optimizer share."""
    return moments * 256 * torch.float32.itemsize
