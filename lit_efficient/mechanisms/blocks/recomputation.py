"""Recomputation from outside: a call whose activations are computed again, for which blocks, and which may keep theirs.

Nothing here changes a module; :mod:`lit_efficient.callbacks.activation_checkpointing` does.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_layers import NormWithStatistics, SpectralNorm
from lit_efficient.internals.torch_operators import ATTENTION, MATMUL
from lit_efficient.mechanisms.trials.memory import SavedTensors

OPERATORS: dict[str, list[Any]] = {
    "matmul": MATMUL,
    "attention": ATTENTION,
    "convolution": [torch.ops.aten.convolution.default],
}


def recompute(
    block: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    save: Sequence[str] = (),
    counter: SavedTensors | None = None,
    **kwargs: Any,
) -> Any:
    """``forward(*args, **kwargs)`` of ``block``, whose activations are computed again when a gradient needs them.

    Args:
        block: The module whose forward it is; what its normalisation layers keep is in the second one as in the first.
        forward: The forward itself: ``block.forward``, or what stands behind a changed one.
        *args: Its arguments.
        save: Kinds of operators whose results are kept: ``matmul``, ``attention``, ``convolution``.
        counter: Counts what a forward without recomputation would have saved.
        **kwargs: Its keyword arguments.
    """
    operators = [operator for kind in save for operator in OPERATORS[kind]]
    selective = functools.partial(create_selective_checkpoint_contexts, operators) if operators else None
    if torch.compiler.is_compiling():  # the compiler keeps random states and side effects apart by itself
        options: dict[str, Any] = {} if selective is None else {"context_fn": selective}
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    def contexts() -> tuple[Any, Any]:
        first, second = selective() if selective is not None else (nullcontext(), nullcontext())
        again = functools.partial(_as_before, [(buffer, buffer.clone()) for buffer in _moving_buffers(block)])
        return _Within(lambda: counter or nullcontext(), lambda: first), _Within(again, lambda: second)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _Within:
    """Contexts one in the other, entered as often as gradients are asked for."""

    def __init__(self, *contexts: Callable[[], Any]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        self._entered = ExitStack()
        for context in self._contexts:
            self._entered.enter_context(context())

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def _moving_buffers(block: nn.Module) -> list[torch.Tensor]:
    """What a training forward changes: running statistics, and the vectors of spectral normalisation."""
    keepers = [
        part
        for part in block.modules()
        if isinstance(part, NormWithStatistics | SpectralNorm) or hasattr(part, "weight_u")
    ]
    return [buffer for part in keepers for buffer in part.buffers(recurse=False)]


@contextmanager
def _as_before(start: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Compute from where the first forward began, and leave behind what it left."""
    left = [buffer.clone() for buffer, _ in start]
    for buffer, before in start:
        buffer.copy_(before)
    try:
        yield
    finally:
        for (buffer, _), after in zip(start, left, strict=True):
            buffer.copy_(after)


def choose_kept(sizes: Sequence[int], budget: float) -> list[bool]:
    """Which blocks keep their activations, so that they hold at most ``budget`` of all bytes.

    The largest first, since fewer blocks are run again then; of equal ones the last, since what the backward pass
    computes again first would be there at once with all that was kept.

    Args:
        sizes: Bytes of activations a block, in the order in which the blocks run.
        budget: Share of their sum, from 0 to 1.

    Example:
        >>> choose_kept([4, 4, 4, 4], 0.5)
        [False, False, True, True]
    """
    left = budget * sum(sizes)
    kept = [False] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (sizes[i], i), reverse=True):
        if 0 < sizes[i] <= left:
            kept[i] = True
            left -= sizes[i]
    return kept


def refuse_twice(module: nn.Module, names: Sequence[str], who: str) -> None:
    """Raise if blocks, what holds them or what they hold is recomputed already, in the ways of other packages."""
    flags = ("gradient_checkpointing", "grad_checkpointing")  # transformers and diffusers; timm
    for name, part in module.named_modules():
        if not any(getattr(part, flag, False) is True for flag in flags):
            continue
        near = [b for b in names if not name or b == name or b.startswith(f"{name}.") or name.startswith(f"{b}.")]
        if near:
            raise ConfigurationError(
                f"{who}: {name or type(module).__name__!r} recomputes activations by itself, so that "
                f"{near[0]!r} would run three times: switch that off (transformers: activation_checkpointing_disable(),"
                " diffusers: disable_gradient_checkpointing(), timm: set_grad_checkpointing(False))"
            )
