"""Runs a function over many parts in worker processes, and yields the results in the order of the parts.

    parts -> process k takes part k, k + n, k + 2n, ... -> results as from one process

The processes are plain ones that read pickles from their parent alone. They run nothing of the main program, unlike
``multiprocessing``, which imports the main script again. They take some seconds to start, so the first parts are
processed here, and short work needs no process.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from typing import IO, Any, TypeVar

from lit_efficient.errors import LitEfficientError

_FIRST = 16  # parts that are processed here
_MOST = 16  # processes

Part = TypeVar("Part")
Result = TypeVar("Result")


def usable_processors() -> int:
    """Return the number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_processes(
    work: Callable[[Part], Result], parts: Iterable[Part], processes: int | None = None
) -> Iterator[tuple[Part, Result]]:
    """Yield each part and the result of ``work`` for it, in order. Parts are read when they are needed.

    Args:
        work: Function that can be pickled.
        parts: Its arguments.
        processes: Number of processes. None: as many as processors, at most 16.
    """
    parts = iter(parts)
    for part in islice(parts, _FIRST):
        yield part, work(part)
    count = min(_MOST, usable_processors()) if processes is None else processes
    ahead = list(islice(parts, count))
    if count < 2 or len(ahead) < 2:
        for part in (*ahead, *parts):
            yield part, work(part)
        return
    with ExitStack() as stack:
        busy: deque[tuple[_Worker, Part]] = deque()
        for part in ahead:
            worker = stack.enter_context(_Worker(work))
            worker.give(part)
            busy.append((worker, part))
        while busy:
            worker, part = busy.popleft()
            result = worker.take()
            # The next part is read and sent before the result is used, so the process does not wait for the caller.
            for following in islice(parts, 1):
                worker.give(following)
                busy.append((worker, following))
            yield part, result


class _Worker:
    """Process that holds at most one part at a time, so that neither side waits for the other one to read."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        self._process: Any = subprocess.Popen(  # noqa: S603 (this file)
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **own}
        )
        self.give(work)

    def give(self, part: object) -> None:
        """Send a part to the process."""
        try:
            _write(self._process.stdin, part)
        except BrokenPipeError:
            raise self._ended() from None

    def take(self) -> Any:
        """Wait for the result of the part. Raise the error that the process raised."""
        try:
            done, result = pickle.load(self._process.stdout)  # noqa: S301 (from our own child)
        except EOFError:
            raise self._ended() from None
        if not done:
            raise result
        return result

    def _ended(self) -> LitEfficientError:
        return LitEfficientError(
            f"a process that tokenises has ended ({self._process.wait()}): it may have run out of memory."
        )

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *error: object) -> None:
        # The process ended before it had read everything.
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()


def _write(file: IO[bytes], content: object) -> None:
    pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)
    file.flush()


def _sendable(error: Exception) -> Exception:
    """Return the error, or one with its message if its class cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:
        return LitEfficientError(f"{type(error).__name__}: {error}")
    return error


def _serve() -> None:
    """Main function of a process: read the work, then one part after the other, until the parent ends."""
    given = sys.stdin.buffer
    results = os.fdopen(os.dup(1), "wb")
    # Printed text goes to the standard error, and not among the results.
    os.dup2(2, 1)
    work = pickle.load(given)  # noqa: S301 (from our own parent)
    while True:
        try:
            part = pickle.load(given)  # noqa: S301
        except EOFError:
            return
        try:
            answer = True, work(part)
        except Exception as error:  # the parent raises it
            answer = False, _sendable(error)
        _write(results, answer)


if __name__ == "__main__":
    _serve()
