"""Low-bit twins of torch's optimizers with the 8-bit kernels of bitsandbytes.

Each twin keeps the keys of torch's class in its groups (``momentum``, ``alpha``, ``lr_decay``) and translates them in
every step, so that schedulers can change them. Settings that bitsandbytes keeps for the whole process (in its
``GlobalOptimManager``) are kept for each parameter here.

Import this module inside functions only, because importing bitsandbytes takes seconds.
"""

import functools
from collections.abc import Callable, Set
from typing import Any, ClassVar

import torch
from bitsandbytes.functional import create_dynamic_map, optimizer_update_8bit_blockwise
from bitsandbytes.optim.optimizer import Optimizer1State, Optimizer2State, Optimizer8bit
from torch import Tensor
from torch.optim.adam import adam

from lit_efficient.internals.torch_dispatch import has_values
from lit_efficient.optimizers.stepping import loss_of

_PAGED_FROM = 100_000  # elements; bitsandbytes does not page smaller tensors
_MOMENTS = ("state1", "state2")
_BLOCK = 256  # codes that share a scale
_PIECE = 2**17  # elements that a CPU steps at a time, a multiple of the block


class _Twin(Optimizer8bit):
    """Base of all twins."""

    kernel: ClassVar[str]  # name of the update in bitsandbytes
    options: ClassVar[tuple[str, ...]]  # settings that the class shares with torch's class
    coupled: ClassVar[bool] = False  # add weight decay to the gradient; the kernel's decay is decoupled

    def __init__(
        self,
        params: object,
        *,
        keep_32bit: Set[Tensor] = frozenset(),
        no_decay: Set[Tensor] = frozenset(),
        min_size: int = 4096,
        paged: bool = False,
        **options: object,
    ) -> None:
        Optimizer8bit.__init__(self, params, options, optim_bits=8, is_paged=paged)
        self.optimizer_name = self.kernel
        self.keep_32bit = keep_32bit
        self.no_decay = no_decay
        self.min_size = min_size
        self._pages: dict[tuple[Tensor, str], Tensor] = {}  # paged memory of each parameter and moment, kept forever
        self.initialized = True  # otherwise the first step would read the settings of the whole process

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # All kernels are queued on the device's stream. The loop of bitsandbytes would wait after each tensor.
        loss = loss_of(closure)
        for number, group in enumerate(self.param_groups):
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    if not self.state[p]:
                        self.init_state(group, p, number, index)
                    self.prefetch_state(p)
                    self.update_step(group, p, number, index)
        if self.is_paged:  # the driver moves pages outside the stream
            torch.accelerator.synchronize()
        return loss

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        """Return the two coefficients of the kernel. The first may be called ``alpha`` or ``momentum`` in torch."""
        if "betas" in self.options:
            return group["betas"]
        return group.get("alpha", group.get("momentum", 0.0)), 0.0

    def rate(self, group: dict[str, Any], steps: int) -> float:
        """Return the learning rate after ``steps`` steps, with the decay of torch's Adagrad."""
        return float(group["lr"]) / (1 + steps * group.get("lr_decay", 0.0))

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, object]:
        """Return the current settings of one parameter for the kernel."""
        p = group["params"][pindex]
        if self.coupled or p in self.no_decay:
            decay = 0.0
        else:
            decay = group["weight_decay"]
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
        """Step one parameter. Its gradient does not change."""
        if not self.coupled or p in self.no_decay or not group["weight_decay"]:
            super().update_step(group, p, gindex, pindex)
            return
        gradient = p.grad
        assert gradient is not None  # step() has looked
        p.grad = gradient.add(p, alpha=group["weight_decay"])
        super().update_step(group, p, gindex, pindex)
        p.grad = gradient

    def init_state(self, group: dict[str, object], p: Tensor, gindex: int, pindex: int) -> None:
        super().init_state(group, p, gindex, pindex)
        if self.is_paged:
            self._pages |= {(p, name): self.state[p][name] for name in _MOMENTS if name in self.state[p]}

    def prefetch_state(self, p: Tensor) -> None:
        """Fetch the states of a parameter, after moving states in other memory (loaded ones) to its pages."""
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
        """Return the state without bitsandbytes' mark on paged tensors, which copies in other memory would inherit."""
        return _unmarked(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, object], *args: object, **kwargs: object) -> None:
        super().load_state_dict(_unmarked(state_dict), *args, **kwargs)


class AdamW8bit(_Twin, Optimizer2State):
    """Twin of AdamW: two moments and decoupled weight decay."""

    kernel = "adam"
    options = ("lr", "betas", "eps", "weight_decay")

    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        on_cpu = p.device.type == "cpu" and p.dtype == torch.float32 and has_values(p)
        plain = not self.coupled or p in self.no_decay or not group["weight_decay"]
        low = self.state[p]["state1"].dtype == torch.uint8
        if not on_cpu or not plain or not low or not p.is_contiguous():
            super().update_step(group, p, gindex, pindex)
            return
        self.state[p]["step"] += 1
        _adamw_in_pieces(p, self.state[p], self.get_config(gindex, pindex, group))


class Adam8bit(AdamW8bit):
    """Twin of Adam: two moments, and weight decay is added to the gradient."""

    coupled = True


class Lion8bit(_Twin, Optimizer1State):
    """Twin of Lion: one moment and decoupled weight decay."""

    kernel = "lion"
    options = ("lr", "betas", "weight_decay")


class SGD8bit(_Twin, Optimizer1State):
    """Twin of SGD with momentum. The kernel adds weight decay to the gradient, as torch does."""

    kernel = "momentum"
    options = ("lr", "momentum", "weight_decay")


class RMSprop8bit(_Twin, Optimizer1State):
    """Twin of RMSprop: a moving average of squares."""

    kernel = "rmsprop"
    options = ("lr", "alpha", "eps", "weight_decay")


class Adagrad8bit(_Twin, Optimizer1State):
    """Twin of Adagrad: a sum of squares."""

    kernel = "adagrad"
    options = ("lr", "lr_decay", "weight_decay", "eps")


def _adamw_in_pieces(p: Tensor, state: dict[str, Any], config: dict[str, Any]) -> None:
    """Step a float32 parameter on a CPU, piece by piece: its moments as floats stay in the cache.

    bitsandbytes' CPU kernel makes float32 copies of whole moments and passes over them eleven times. torch's fused
    kernel steps each piece in one pass. The moments are rounded as there. Measured: 0.78 of the time of bitsandbytes'
    step (``python -m benchmarks.low_bit_optimizer``). For bfloat16 parameters nothing was gained.
    """
    assert p.grad is not None  # step() has looked
    beta1, beta2 = config["betas"]
    settings = {"lr": config["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": config["weight_decay"]}
    settings |= {"eps": config["eps"], "amsgrad": False, "maximize": False}
    values = p.detach().view(-1).split(_PIECE)
    gradients = p.grad.reshape(-1).split(_PIECE)
    moments = []
    for number in "12":
        codes = state[f"state{number}"].view(-1).split(_PIECE)
        moments.append((codes, state[f"absmax{number}"].split(_PIECE // _BLOCK), state[f"qmap{number}"]))
    for index, (value, gradient) in enumerate(zip(values, gradients)):
        floats = [_dequantize(codes[index], scales[index], table) for codes, scales, table in moments]
        step = torch.tensor(state["step"] - 1.0)  # the kernel counts
        first, second = ([made] for made in floats)
        adam([value], [gradient], first, second, [], [step], fused=True, decoupled_weight_decay=True, **settings)
        for made, (codes, scales, table) in zip(floats, moments):
            new, largest = torch.ops.bitsandbytes.quantize_blockwise(made, table, _BLOCK)
            codes[index].copy_(new)
            scales[index].copy_(largest)


def _dequantize(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    made: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(codes, scales, table, _BLOCK, torch.float32)
    return made


def adam_8bit(gradient: Tensor, state: dict[str, object], betas: tuple[float, float], eps: float, step: int) -> Tensor:
    """Return Adam's step at a learning rate of 1, without weight decay, with 8-bit moments.

    Args:
        gradient: Contiguous, of any shape.
        state: Holds the moments, which are created in the first step.
        betas: Decay rates of the moments.
        eps: Term that is added to the denominator.
        step: Number of the step, from 1.
    """
    if "state1" not in state:
        for moment in "12":
            state[f"state{moment}"] = torch.zeros_like(gradient, dtype=torch.uint8)
            state[f"absmax{moment}"] = gradient.new_zeros(-(-gradient.numel() // 256), dtype=torch.float32)
    moved = torch.zeros_like(gradient)  # stands in for the parameter, which the kernel changes by minus the step
    codes = (state["state1"], state["state2"])
    settings = (*betas, 0.0, 0.0, eps, step, 1.0)  # zeros for AdEMAMix's third moment, and a learning rate of 1
    scales = (state["absmax1"], state["absmax2"])
    arguments: list[Any] = [gradient, moved, *codes, *settings, *_tables(gradient.device), *scales]
    optimizer_update_8bit_blockwise("adam", *arguments)
    return moved.neg_()


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the code tables of the first and the second moment."""
    return create_dynamic_map(signed=True).to(device), create_dynamic_map(signed=False).to(device)


def _unmarked(value: object) -> Any:
    """Replace tensors that are marked as paged by unmarked tensors with the same memory, also in nested dicts."""
    if isinstance(value, dict):
        return {key: _unmarked(item) for key, item in value.items()}
    if isinstance(value, Tensor) and hasattr(value, "is_paged"):
        return value.detach()
    return value


def state_bytes(p: Tensor, moments: int, low: bool) -> int:
    """Return the bytes of a parameter's moments: codes and one float32 scale for 256 codes, or float32 values."""
    elements = p.numel()
    if low:
        return moments * (elements + 4 * -(-elements // 256))
    return moments * 4 * elements


def table_bytes(moments: int) -> int:
    """Return the bytes of the code tables, which all parameters of an optimizer share."""
    return moments * 256 * torch.float32.itemsize
