"""Settings and statistics of torch.compile. Checked with torch 2.13."""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.torch_dispatch import fakes_are_made, no_dispatch_modes, storage_id

_VERSIONS = 64  # of a function: dtypes, autocast, devices, and numbers of layers
_SKIPPED = re.compile(r"frame skipped: \S+ \((.+) line (\d+)\)")


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called: ``nn.Module._compiled_call_impl``."""
    return module._compiled_call_impl is not None


def wraps_compiled(module: nn.Module) -> bool:
    """Return whether a module is the result of ``torch.compile(module)``: ``OptimizedModule``."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def at_most_versions(count: int) -> dict[str, int]:
    """Return the argument of `torch.compile` that limits recompilations of a function. torch 2.11 does not have it."""
    parameters = inspect.signature(torch.compile).parameters  # tests and tools may replace torch.compile
    known = "recompile_limit" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {"recompile_limit": count} if known else {}


@functools.cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled for all sizes. All calls in a process share it, also those of copies of a module.

    A plan, which runs nothing compiled, counts the tensors of :func:`as_compiled`.
    """

    # torch does not compile functions of its own files, such as `nn.RMSNorm.forward`, but this one with what it calls.
    def call(*args: object) -> Any:
        return function(*args)

    call.__code__ = call.__code__.replace()  # torch keeps versions by code object, so that each function has its own
    limit: dict[str, Any] = at_most_versions(_VERSIONS)
    compiled: Callable[..., Any] = torch.compile(call, dynamic=True, **limit)

    def run(*args: object) -> Any:
        if not runs_eagerly():
            return compiled(*args)
        if fakes_are_made():
            return as_compiled(function, *args)
        return function(*args)

    return run


def as_compiled(function: Callable[..., Any], *args: object) -> Any:
    """Run a function on tensors without values, and create and keep only the tensors that compiled code does.

    It creates only results and gradients. It keeps inputs and computes everything else again: the inputs that the
    function itself keeps for the backward pass, or all of them if it also keeps intermediate results.

    Args:
        function: Function that returns tensors.
        *args: Its arguments: tensors, and modules whose parameters it reads.
    """
    tensors = [one for one in args if isinstance(one, Tensor)]
    for one in args:
        if isinstance(one, nn.Module):
            tensors += one.parameters()
    kept = set()

    def note(tensor: Tensor) -> Tensor:
        kept.add(storage_id(tensor.untyped_storage()))
        return tensor

    with no_dispatch_modes(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        results = function(*args)
    alone = isinstance(results, Tensor)
    shapes = [one.detach() for one in ([results] if alone else results)]
    own = [storage_id(tensor.untyped_storage()) for tensor in tensors]
    if not kept <= set(own):
        kept = set(own)
    found = _AsCompiled.apply(shapes, [i for i, key in enumerate(own) if key in kept], *tensors)
    return found[0] if alone else found


class _AsCompiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shapes: list[Tensor], kept: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*(tensors[i] for i in kept))
        ctx.like = [(tensor.shape, {"dtype": tensor.dtype, "device": tensor.device}) for tensor in tensors]
        return tuple(map(torch.empty_like, shapes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return None, None, *(torch.empty(size, **how) if need else None for (size, how), need in zip(ctx.like, needed))


@contextmanager
def draws_as_uncompiled() -> Iterator[None]:
    """Context in which compiled code draws the same random numbers as eager code: ``torch._inductor.config``."""
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield


def swap_setting(name: str, value: object) -> Any:
    """Set an entry of ``torch._functorch.config``, and return its previous value."""
    from torch._functorch import config

    before = getattr(config, name)
    setattr(config, name, value)
    return before


def counts() -> tuple[int, int, int]:
    """Return the numbers of graphs, of functions to compile and of compiled functions.

    ``torch._dynamo.utils.counters``.
    """
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], counters["frames"]["total"], counters["frames"]["ok"]


def runs_eagerly() -> bool:
    """Return whether compiled functions run eagerly: ``torch._dynamo.eval_frame._stance``."""
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance in ("force_eager", "eager_on_recompile")


def breaks() -> Counter[tuple[str, str]]:
    """Count graph breaks by place (``file:line``) and reason: ``torch._dynamo.utils.graph_break_reasons``.

    Functions that are not compiled at all are in ``counters["unimplemented"]``. Their place is their first line.
    """
    from torch._dynamo.utils import counters, graph_break_reasons

    found: Counter[tuple[str, str]] = Counter()
    for one in graph_break_reasons:
        if one.user_stack:
            frame = _own_frame(one.user_stack)
            found[f"{frame.filename}:{frame.lineno}", _shortened(one.reason)] += 1
    for text, times in counters["unimplemented"].items():
        skipped = _SKIPPED.search(text)
        if skipped is not None:
            reason = f"{_shortened(text)}; the whole function runs uncompiled"
            found[f"{skipped[1]}:{skipped[2]}", reason] += times
    return found


def _own_frame(stack: Any) -> Any:
    """Return the innermost frame outside of installed packages, or the innermost of all."""
    return next((frame for frame in reversed(stack) if "site-packages" not in frame.filename), stack[-1])


def refused(exception: BaseException) -> tuple[str, str] | None:
    """Return the place and reason of an error of ``fullgraph=True``, or ``None``: ``torch._dynamo.exc.Unsupported``."""
    from torch._dynamo.exc import Unsupported

    if not isinstance(exception, Unsupported) or not exception.real_stack:
        return None
    frame = exception.real_stack[-1]
    return f"{frame.filename}:{frame.lineno}", _shortened(str(exception))


def _shortened(reason: str) -> str:
    """Return the first line of a reason with its explanation, at most 160 characters."""
    if reason.startswith("generic_jump"):
        return "Data-dependent branching"
    lines = [line.strip() for line in reason.splitlines()]
    about = next((line for line in lines if line.startswith("Explanation: ")), "")
    return " ".join(f"{lines[0]}. {about.removeprefix('Explanation: ')}".split())[:160].rstrip(". ")
