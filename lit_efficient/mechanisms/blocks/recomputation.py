"""Activation checkpointing of a single call, and the choice of the blocks that keep their activations.

The functions change no module. :mod:`lit_efficient.callbacks.activation_checkpointing` does.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_modules import NormWithStatistics, SpectralNorm
from lit_efficient.internals.torch_operators import ATTENTION, MATMUL
from lit_efficient.mechanisms.trials.memory import SavedTensors

OPERATORS: dict[str, list[Any]] = {
    "matmul": MATMUL,
    "attention": ATTENTION,
    "convolution": [torch.ops.aten.convolution.default],
}


def recompute(
    block: nn.Module,
    forward: Callable[..., object],
    *args: object,
    save: Sequence[str] = (),
    counter: SavedTensors | None = None,
    **kwargs: Any,
) -> Any:
    """Return ``forward(*args, **kwargs)`` and recompute its activations in the backward pass.

    Args:
        block: Module of the forward. The recomputation sees the buffers of its normalisation layers as the first
            forward did.
        forward: The forward: ``block.forward``, or the original of a changed one.
        *args: Positional arguments of the forward.
        save: Kinds of operators whose results are kept: ``matmul``, ``attention``, ``convolution``.
        counter: Counter of the bytes that a forward without recomputation would have saved.
        **kwargs: Keyword arguments of the forward.
    """
    operators = [operator for kind in save for operator in OPERATORS[kind]]
    selective = None
    if operators:
        selective = functools.partial(create_selective_checkpoint_contexts, operators)
    if torch.compiler.is_compiling():  # the compiler preserves random states and side effects by itself
        options: dict[str, Any] = {}
        if selective is not None:
            options["context_fn"] = selective
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    def contexts() -> tuple["_Nested", "_Nested"]:
        """Return the contexts of the first forward and of the recomputation."""
        first = nullcontext()
        second = nullcontext()
        if selective is not None:
            first, second = selective()
        buffers = [(buffer, buffer.clone()) for buffer in _moving_buffers(block)]
        restored = functools.partial(_with_buffers_of_first_forward, buffers)
        return _Nested(lambda: counter or nullcontext(), lambda: first), _Nested(restored, lambda: second)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _Nested:
    """Nested contexts that can be entered several times, once for each backward pass."""

    def __init__(self, *contexts: Callable[[], AbstractContextManager[object]]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        self._entered = ExitStack()
        for context in self._contexts:
            self._entered.enter_context(context())

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def _moving_buffers(block: nn.Module) -> list[torch.Tensor]:
    """Return the buffers that a training forward changes: running statistics, and vectors of spectral normalisation."""
    buffers: list[torch.Tensor] = []
    for part in block.modules():
        if isinstance(part, NormWithStatistics | SpectralNorm) or hasattr(part, "weight_u"):
            buffers += part.buffers(recurse=False)
    return buffers


@contextmanager
def _with_buffers_of_first_forward(start: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Context in which buffers have the values from before the first forward. Their present values return afterwards.

    Args:
        start: Pairs of a buffer and a copy from before the first forward.
    """
    left = [buffer.clone() for buffer, _ in start]
    for buffer, before in start:
        buffer.copy_(before)
    try:
        yield
    finally:
        for (buffer, _), after in zip(start, left, strict=True):
            buffer.copy_(after)


def choose_kept(sizes: Sequence[int], budget: float) -> list[bool]:
    """Return which blocks keep their activations, such that they hold at most ``budget`` of all bytes.

    The largest blocks are chosen first, because then fewer blocks are recomputed. Of equal blocks the last ones are
    chosen: the backward pass recomputes the last blocks first, while all kept activations are still in memory.

    Args:
        sizes: Bytes of activations of each block, in execution order.
        budget: Fraction of their sum, in [0, 1].

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
    """Raise an error if blocks, or modules around or inside them, use the activation checkpointing of another package.

    Args:
        module: The whole module.
        names: Names of the blocks.
        who: Name of the technique, for the error.

    Raises:
        ConfigurationError: With the name of the module that checkpoints, and the call that switches it off.
    """
    flags = ("gradient_checkpointing", "grad_checkpointing")  # of transformers and diffusers; of timm
    for name, part in module.named_modules():
        if not any(getattr(part, flag, False) is True for flag in flags):
            continue
        near = [b for b in names if not name or b == name or b.startswith(f"{name}.") or name.startswith(f"{b}.")]
        if near:
            raise ConfigurationError(
                f"{who}: {name or type(module).__name__!r} already recomputes its activations, so {near[0]!r} would "
                "run three times. Switch that off (transformers: activation_checkpointing_disable(), diffusers: "
                "disable_gradient_checkpointing(), timm: set_grad_checkpointing(False))"
            )
