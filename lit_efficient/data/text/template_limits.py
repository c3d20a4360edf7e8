"""Limits for what a chat template does: a program, which Jinja keeps from files and attributes, not from long loops."""

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from lit_efficient.errors import ConfigurationError

_SECONDS, _BYTES = 2, 1 << 30  # of a processor, and beyond what the process has: a conversation takes milliseconds


@contextlib.contextmanager
def limited(template: str) -> Iterator[None]:
    """Stop a template that takes a GiB of memory or seconds (the latter in a main thread alone) for a conversation.

    Raises:
        ConfigurationError: If it does, or raises numbers to powers: no signal would stop that.
    """
    import resource

    if _raises_to_powers(template):
        raise ConfigurationError("tokenizer: the chat template raises numbers to powers (**), which none needs")
    before = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):  # no such file; less is allowed already
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _BYTES, before[1]))
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGVTALRM, _stop) if main else None
    timer = signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS) if main else (0.0, 0.0)
    try:
        yield
    except (MemoryError, OverflowError, RecursionError) as error:
        raise ConfigurationError("tokenizer: the chat template takes a GiB and more, or calls itself") from error
    finally:
        if main:
            signal.setitimer(signal.ITIMER_VIRTUAL, *timer)
            signal.signal(signal.SIGVTALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _stop(*_: Any) -> NoReturn:
    raise ConfigurationError(f"tokenizer: the chat template takes more than {_SECONDS} s for one conversation")


@functools.lru_cache(maxsize=8)
def _raises_to_powers(template: str) -> bool:
    from jinja2 import Environment, TemplateSyntaxError

    with contextlib.suppress(TemplateSyntaxError):  # which rendering says
        return any(kind == "operator" and sign == "**" for _, kind, sign in Environment().lex(template))  # noqa: S701
    return False
