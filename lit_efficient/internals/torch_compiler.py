"""What torch's compiler has done, and settings that it reads when it compiles. Checked with torch 2.13."""

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_SKIPPED = re.compile(r"frame skipped: \S+ \((.+) line (\d+)\)")


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called: ``nn.Module._compiled_call_impl``."""
    return module._compiled_call_impl is not None


def wraps_compiled(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile(module)`` gave: ``torch._dynamo.eval_frame.OptimizedModule``."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def at_most_versions(count: int) -> dict[str, int]:
    """Of `torch.compile`: how often one function may be compiled anew; torch 2.11 has no such argument, only eight."""
    takes = inspect.signature(torch.compile).parameters  # or whatever is there in its place
    known = "recompile_limit" in takes or any(one.kind is one.VAR_KEYWORD for one in takes.values())
    return {"recompile_limit": count} if known else {}


@contextmanager
def draws_as_uncompiled() -> Iterator[None]:
    """What is compiled meanwhile draws the random numbers that it draws uncompiled: ``torch._inductor.config``."""
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield


def swap_setting(name: str, value: Any) -> Any:
    """Set an entry of ``torch._functorch.config``; returns what it was."""
    from torch._functorch import config

    before = getattr(config, name)
    setattr(config, name, value)
    return before


def counts() -> tuple[int, int, int]:
    """``torch._dynamo.utils.counters``: graphs so far, functions that were to be compiled, and those that were."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], counters["frames"]["total"], counters["frames"]["ok"]


def runs_eagerly() -> bool:
    """Whether what is compiled runs as it would without: ``torch._dynamo.eval_frame._stance``."""
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance in ("force_eager", "eager_on_recompile")


def breaks() -> Counter[tuple[str, str]]:
    """Where graphs have ended so far, ``file:line``, and why: ``torch._dynamo.utils.graph_break_reasons``.

    Of functions that were given up whole, which ``counters["unimplemented"]`` knows, it is where they begin.
    """
    from torch._dynamo.utils import counters, graph_break_reasons

    reasons = [(_own_frame(one.user_stack), one.reason) for one in graph_break_reasons if one.user_stack]
    found = Counter((f"{frame.filename}:{frame.lineno}", _shortly(reason)) for frame, reason in reasons)
    for text, times in counters["unimplemented"].items():
        if skipped := _SKIPPED.search(text):
            found[f"{skipped[1]}:{skipped[2]}", f"{_shortly(text)}; all of the function runs uncompiled"] += times
    return found


def _own_frame(stack: Any) -> Any:
    """The innermost frame outside of installed packages: what a library does inside was called from there."""
    return next((frame for frame in reversed(stack) if "site-packages" not in frame.filename), stack[-1])


def refused(exception: BaseException) -> tuple[str, str] | None:
    """Where and why a graph had to be whole and could not be: ``torch._dynamo.exc.Unsupported``."""
    from torch._dynamo.exc import Unsupported

    if not isinstance(exception, Unsupported) or not exception.real_stack:
        return None
    frame = exception.real_stack[-1]
    return f"{frame.filename}:{frame.lineno}", _shortly(str(exception))


def _shortly(reason: str) -> str:
    if reason.startswith("generic_jump"):
        return "Data-dependent branching"
    lines = [line.strip() for line in reason.splitlines()]
    about = next((line for line in lines if line.startswith("Explanation: ")), "")
    return " ".join(f"{lines[0]}. {about.removeprefix('Explanation: ')}".split())[:160].rstrip(". ")
