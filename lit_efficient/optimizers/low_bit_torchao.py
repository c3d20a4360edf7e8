"""Twins of torch's Adam and AdamW on torchao's quantised tensors: 8-bit, 4-bit and fp8 states, sharded or not.

Unlike torchao's own classes, rates stay floats (schedulers, rate finders and fine-tuning callbacks assign floats),
any parameter can keep unquantised states, decay can be off for some, and a checkpoint holds plain tensors, so that it
loads safely, anywhere, without torchao.

Import this module inside functions only: torchao takes seconds.
"""

from collections.abc import Set
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

from lit_efficient.internals.torchao_adam import QuantisedAdam
from lit_efficient.surgery import local

_STATES: dict[int | str, Any] = {8: OptimState8bit, 4: OptimState4bit, "fp8": OptimStateFp8}
_BLOCKS: dict[int | str, int] = {8: 256, 4: 128, "fp8": 256}  # elements that share a scale
_TABLES: dict[int | str, int] = {8: 256, 4: 16, "fp8": 0}  # float32 values of each tensor's code table


class _Twin(QuantisedAdam):
    """What both twins share."""

    adamw: ClassVar[bool]
    param_groups: list[dict[str, Any]]

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        bits: int | str = 8,
        keep_32bit: Set[Tensor] = frozenset(),
        no_decay: Set[Tensor] = frozenset(),
        min_size: int = 4096,
    ) -> None:
        self.bits = bits
        self.keep_32bit = keep_32bit
        self.no_decay = no_decay
        self.min_size = min_size
        fixed: Any = {"amsgrad": False, "block_size": _BLOCKS[bits], "bf16_stochastic_round": False}
        super().__init__(params, lr, betas, eps, weight_decay, is_adamw=self.adamw, **fixed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and leave its rate a float: torchao's own method makes it a tensor."""
        Optimizer.add_param_group(self, param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            rate = torch.tensor(float(group["lr"]), dtype=torch.float32)
            for p in (p for p in group["params"] if p.grad is not None):
                if p.grad.is_sparse:
                    raise RuntimeError("Sparse gradient is not supported")
                if not (state := self.state[p]):
                    moments = {"exp_avg": self.new_state(p, True), "exp_avg_sq": self.new_state(p, False)}
                    state.update(step=torch.tensor(0.0), **moments)
                state["step"] += 1
                tensors = map(local, (p.detach(), p.grad, *(state[key] for key in ("step", "exp_avg", "exp_avg_sq"))))
                self.step_one(group, rate, 0.0 if p in self.no_decay else group["weight_decay"], *tensors)
        return loss

    def new_state(self, p: Tensor, signed: bool) -> Tensor:
        if not is_low(p, self.bits, self.min_size, p in self.keep_32bit):
            return torch.zeros_like(p)
        part = local(p)
        arguments = (part.shape, self.block_size) if self.bits == "fp8" else (part.shape, signed, self.block_size)
        out = _STATES[self.bits].zeros(*arguments, device=part.device, dtype=p.dtype)
        if not isinstance(p, DTensor):
            return out
        out = DTensor.from_local(out, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
        return out.to(p.device)

    def state_dict(self) -> dict[str, Any]:
        """The state with quantised tensors as dicts of plain ones.

        Sharded ones go as they are: sharded checkpoints take them apart themselves.
        """
        packed = super().state_dict()
        state = {i: {key: _plain(value) for key, value in one.items()} for i, one in packed["state"].items()}
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        owners = dict(zip(ids, parameters, strict=False))  # the base class compares the counts
        state = {
            i: {key: self._quantised(owners.get(i), key, value) for key, value in one.items()}
            for i, one in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})

    def _quantised(self, p: Tensor | None, key: str, value: Any) -> Any:
        if p is None or not isinstance(value, dict):
            return value
        empty = self.new_state(p, signed=key == "exp_avg")
        names, context = empty.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: value[name].to(p.device, copy=True) for name in names}
        return type(empty).__tensor_unflatten__(parts, context)  # type: ignore[attr-defined]


class AdamWLowBit(_Twin):
    """Two moments, decoupled decay."""

    adamw = True


class AdamLowBit(_Twin):
    """Two moments, decay added to the gradient."""

    adamw = False


def _plain(value: Any) -> Any:
    if not isinstance(value, tuple(_STATES.values())):
        return value
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names}


def is_low(p: Tensor, bits: int | str, min_size: int, kept: bool) -> bool:
    """Whether a parameter gets quantised states: its local shard must be a whole number of blocks."""
    elements = local(p).numel()
    return not kept and elements >= max(min_size, 1) and elements % _BLOCKS[bits] == 0


def state_bytes(p: Tensor, bits: int | str, low: bool) -> int:
    """Bytes of one parameter's two moments here: codes, scales and tables, or values of the parameter's type."""
    elements = local(p).numel()
    if not low:
        return 2 * elements * p.element_size()
    codes = elements // 2 if bits == 4 else elements
    return 2 * (codes + 4 * (elements // _BLOCKS[bits]) + 4 * _TABLES[bits])
