"""Limits on time and memory for chat templates. A template is a program: Jinja restricts files, but not long loops."""

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from lit_efficient.errors import ConfigurationError

# Limit of processor time. A conversation takes milliseconds.
_SECONDS = 2
# Limit of memory, above the memory that the process has.
_BYTES = 1 << 30
_inside = threading.local()


@contextlib.contextmanager
def limited(template: str) -> Iterator[None]:
    """Stop a template that takes 1 GiB of memory or 2 s of processor time. Time is limited in the main thread only.

    Inside of another such block, the limits of the outer one hold for both.

    Raises:
        ConfigurationError: If it reaches a limit, or computes powers, which no signal can interrupt.
    """
    import resource

    if _computes_powers(template):
        raise ConfigurationError(
            "tokenizer: the chat template computes powers (**), which is not allowed. Give another chat_template."
        )
    if getattr(_inside, "block", False):
        yield
        return
    # The limit is on address space, of which the process already has some.
    before = resource.getrlimit(resource.RLIMIT_AS)
    # No /proc, or the limit is lower already.
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _BYTES, before[1]))
    _inside.block = True
    try:
        with _time_limit():
            yield
    except (MemoryError, OverflowError, RecursionError) as error:
        raise ConfigurationError(
            "tokenizer: the chat template takes 1 GiB of memory or more, or calls itself. Give another chat_template."
        ) from error
    finally:
        _inside.block = False
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    # Only the main thread receives signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, _stop)
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
        signal.signal(signal.SIGVTALRM, handler)


def _stop(*_: object) -> NoReturn:
    raise ConfigurationError(
        f"tokenizer: the chat template takes more than {_SECONDS} s for one conversation. Give another chat_template."
    )


@functools.lru_cache(maxsize=8)
def _computes_powers(template: str) -> bool:
    from jinja2 import Environment, TemplateSyntaxError

    with contextlib.suppress(TemplateSyntaxError):  # rendering raises it, too
        return any(kind == "operator" and sign == "**" for _, kind, sign in Environment().lex(template))  # noqa: S701
    return False
