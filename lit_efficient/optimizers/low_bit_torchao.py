"""Low-bit twins of torch's Adam and AdamW with torchao's quantised tensors: 8-bit, 4-bit and fp8 states, also sharded.

Differences from torchao's own classes:

- Learning rates stay floats, because schedulers, rate finders and fine-tuning callbacks assign floats.
- Any parameter can keep unquantised states, and weight decay can be off for some parameters.
- Checkpoints contain plain tensors, so they load with ``weights_only=True`` and without torchao.

Import this module inside functions only, because importing torchao takes seconds.
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
from lit_efficient.optimizers.stepping import loss_of, with_gradient
from lit_efficient.surgery import local

_STATES: dict[int | str, Any] = {8: OptimState8bit, 4: OptimState4bit, "fp8": OptimStateFp8}
BLOCKS: dict[int | str, int] = {8: 256, 4: 128, "fp8": 256}  # elements that share a scale
_TABLES: dict[int | str, int] = {8: 256, 4: 16, "fp8": 0}  # float32 values in the code table of each tensor


class _Twin(QuantisedAdam):
    """Base of both twins."""

    adamw: ClassVar[bool]
    param_groups: list[dict[str, Any]]

    def __init__(
        self,
        params: object,
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
        fixed = {"amsgrad": False, "block_size": BLOCKS[bits], "bf16_stochastic_round": False}
        super().__init__(params, lr, betas, eps, weight_decay, is_adamw=self.adamw, **fixed)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Add a group without converting its learning rate to a tensor, as torchao's method does."""
        Optimizer.add_param_group(self, param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = loss_of(closure)
        for group in self.param_groups:
            rate = torch.tensor(float(group["lr"]), dtype=torch.float32)
            for p in with_gradient(group):
                assert p.grad is not None  # `with_gradient` has looked
                if p.grad.is_sparse:
                    raise RuntimeError("LowBitOptimizer: torchao does not support sparse gradients")
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = self.new_state(p, signed=True)
                    state["exp_avg_sq"] = self.new_state(p, signed=False)
                state["step"] += 1
                tensors = (p.detach(), p.grad, state["step"], state["exp_avg"], state["exp_avg_sq"])
                decay = 0.0 if p in self.no_decay else group["weight_decay"]
                self.step_one(group, rate, decay, *map(local, tensors))
        return loss

    def new_state(self, p: Tensor, signed: bool) -> Tensor:
        """Return a moment of zeros for a parameter, quantised if its size allows it and sharded as the parameter is.

        Args:
            p: The parameter.
            signed: Whether the moment can be negative.
        """
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
        """Return the state with quantised tensors converted to dicts of plain tensors.

        Sharded tensors stay as they are, because sharded checkpoints flatten them.
        """
        packed = super().state_dict()
        states = packed["state"]
        state = {i: {key: _plain(value) for key, value in states[i].items()} for i in states}
        return {**packed, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        owners = dict(zip(ids, parameters, strict=False))  # the base class compares the numbers of parameters
        state = {}
        for i, values in state_dict["state"].items():
            state[i] = {key: self._quantised(owners.get(i), key, value) for key, value in values.items()}
        super().load_state_dict({**state_dict, "state": state})

    def _quantised(self, p: Tensor | None, key: str, value: object) -> Any:
        """Convert a dict of plain tensors to a quantised tensor. Return other values unchanged."""
        if p is None or not isinstance(value, dict):
            return value
        empty = self.new_state(p, signed=key == "exp_avg")
        names, context = empty.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = {name: value[name].to(p.device, copy=True) for name in names}
        return type(empty).__tensor_unflatten__(parts, context)  # type: ignore[attr-defined]


class AdamWLowBit(_Twin):
    """Twin of AdamW: two moments and decoupled weight decay."""

    adamw = True


class AdamLowBit(_Twin):
    """Twin of Adam: two moments, and weight decay is added to the gradient."""

    adamw = False


def _plain(value: object) -> Any:
    if not isinstance(value, tuple(_STATES.values())):
        return value
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names}


def is_low(p: Tensor, bits: int | str, min_size: int, kept: bool) -> bool:
    """Return whether a parameter gets quantised states. Its local shard must be a whole number of blocks.

    Args:
        p: The parameter.
        bits: 8, 4 or ``"fp8"``.
        min_size: Smallest number of elements.
        kept: Whether the parameter keeps 32 bits on request.
    """
    elements = local(p).numel()
    return not kept and elements >= max(min_size, 1) and elements % BLOCKS[bits] == 0


def state_bytes(p: Tensor, bits: int | str, low: bool) -> int:
    """Return the bytes of both moments of a local shard: codes, scales and tables, or values in its dtype."""
    elements = local(p).numel()
    if not low:
        return 2 * elements * p.element_size()
    codes = elements // 2 if bits == 4 else elements
    return 2 * (codes + 4 * (elements // BLOCKS[bits]) + 4 * _TABLES[bits])
