"""Optimizer states in CPU memory: each step brings them to the GPU a piece at a time and takes them back.

    for each piece of the parameters:  states -> GPU,  step,  states -> CPU

Saves: the optimizer's states on the GPU: 8 bytes a parameter with AdamW, all but those of one piece
Costs: twice the states' bytes over the bus in each step: 0.3 s a billion parameters at 50 GB/s; as much CPU memory
Source: Rajbhandari et al. (2021), https://arxiv.org/abs/2104.07857; here states are streamed, not gradients

torchao's ``CPUOffloadOptimizer`` steps on the CPU; it has no ``state`` and no ``defaults``, hides the groups that the
user made and forbids clipping. Streaming keeps torch's own step on the GPU: any optimizer class, bit by bit the same
numbers, groups, schedulers, clipping and checkpoints as without it.
"""

import functools
from collections.abc import Iterator, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.torch_optimizers import mark_counted, mark_stepped
from lit_efficient.surgery import is_sharded
from lit_efficient.technique import Technique

_STREAMED = "_lit_efficient_streamed"


class OffloadOptimizer(Technique):
    """Keep the states of the optimizer that the module returns, whatever its class, in CPU memory.

    Args:
        piece_mb: Parameters whose states are on the GPU at a time, in MB, at least 1. Large pieces launch few kernels.

    Raises:
        ConfigurationError: Without a GPU, where the states are in CPU memory anyway; for sharded parameters (DTensors);
            for an argument out of range.
    """

    phase = Phase.OPTIMIZER
    conflicts: ClassVar[dict[str, str]] = {
        "LowBitOptimizer": "both decide where the states live: use LowBitOptimizer(paged=True), which does both"
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (5, "all of the optimizer's states, for transfers in each step")
    }

    def __init__(self, piece_mb: int = 256) -> None:
        super().__init__()
        check_number("OffloadOptimizer", "piece_mb", piece_mb, least=1, whole=True)
        self.piece_mb = piece_mb

    def check(self, trainer: Any, module: Any) -> None:
        device = trainer.strategy.root_device.type
        if device == "cpu":
            raise ConfigurationError(
                "OffloadOptimizer: this trainer's device is 'cpu', where optimizer states are in CPU memory already: "
                "there is nothing to save. Use accelerator='gpu', or LowBitOptimizer to save CPU memory"
            )

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        """Let ``optimizer`` stream its states."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(map(is_sharded, parameters)):
            raise ConfigurationError("OffloadOptimizer: sharded parameters (DTensors) bring CPU offload of their own")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigurationError("OffloadOptimizer: LBFGS keeps one state for all parameters, which has no pieces")
        stream_states(optimizer, self.piece_mb * 2**20)
        total = sum(p.numel() for p in parameters)
        return Report(
            f"{type(optimizer).__name__}: states of {total:,} parameters in CPU memory, those of {self.piece_mb} MB of "
            "parameters at a time on the device",
            parameters=total,
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Lightning moves restored states to the device; take them back before the first activations."""
        for optimizer in trainer.optimizers:
            if hasattr(type(optimizer), _STREAMED):
                for group in optimizer.param_groups:
                    move_states(optimizer, group["params"], to_device=False)


def stream_states(optimizer: Optimizer, piece_bytes: int) -> None:
    """Change ``optimizer``'s class, in place, to one that keeps its states in CPU memory between steps.

    Args:
        optimizer: Any optimizer whose step treats each parameter on its own.
        piece_bytes: Bytes of the parameters that are stepped at a time.
    """
    kind: Any = type(optimizer)
    optimizer.__class__ = _streamed(kind)
    optimizer.piece_bytes = piece_bytes  # type: ignore[attr-defined]
    # A scheduler may have set a counted step on the instance, which calls the old class's: put ours inside.
    step = optimizer.__dict__.get("step")
    if step is not None:
        optimizer.__dict__["step"] = functools.partial(_counted_step, optimizer)
        mark_counted(optimizer.__dict__["step"])


def _counted_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    mark_stepped(optimizer)
    return type(optimizer).step(optimizer, *args, **kwargs)


@functools.cache
def _streamed(base: type[Optimizer]) -> type[Optimizer]:
    """``base`` with a step in pieces; the class keeps its name."""
    inner: Any = base.step
    # The hooks of a step are in the function that torch puts around each class's: run them once, not for each piece.
    inner = inner.__wrapped__ if getattr(inner, "hooked", False) else inner

    @torch.no_grad()
    def step(self: Any, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            for group in groups:
                for piece in _pieces(group["params"], self.piece_bytes):
                    self.param_groups = [group | {"params": piece}]
                    move_states(self, piece, to_device=True)
                    inner(self)
                    move_states(self, piece, to_device=False)
        finally:
            self.param_groups = groups
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the copies to the host may be read from now on
        return loss

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    namespace = {"step": hooked, _STREAMED: True, "__module__": base.__module__}
    return type(base.__name__, (base,), namespace)


def _pieces(parameters: list[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    piece: list[Tensor] = []
    size = 0
    for p in parameters:
        if p.grad is None:
            continue
        if piece and size + p.nbytes > piece_bytes:
            yield piece
            piece, size = [], 0
        piece.append(p)
        size += p.nbytes
    if piece:
        yield piece


def move_states(optimizer: Optimizer, parameters: list[Tensor], to_device: bool) -> None:
    """Move the states of ``parameters`` to their device, or to pinned CPU memory; step counters stay where they are."""
    for p in parameters:
        state = optimizer.state.get(p)
        if isinstance(state, MutableMapping):
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    state[key] = value.to(p.device, non_blocking=True) if to_device else _to_host(value)


def _to_host(value: Tensor) -> Tensor:
    if value.device.type == "cpu":
        return value
    host = torch.empty_like(value, device="cpu", pin_memory=value.device.type == "cuda")
    return host.copy_(value, non_blocking=True)
