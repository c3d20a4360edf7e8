"""A method over many parts, in processes of their own, with results in the order of the parts.

    parts -> process k does part k, k + n, k + 2n, ... -> results as one process would give them

The processes are plain ones that read pickles from their parent alone: nothing of the program that started it all runs
in them, as with ``multiprocessing``, which imports its script again. Costs a start of some seconds, so the first parts
are done here: what is short never pays for it.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from typing import IO, Any, TypeVar

from lit_efficient.errors import LitEfficientError

_FIRST = 16  # parts that are done in this process
_MOST = 16  # processes

Part = TypeVar("Part")
Result = TypeVar("Result")


def usable_processors() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(
    work: Callable[[Part], Result], parts: Iterable[Part], processes: int | None = None
) -> Iterator[tuple[Part, Result]]:
    """Yield each part, read little by little, and what ``work`` makes of it, in order.

    ``work`` is pickled; there are as many processes as processors, at most 16, if no number is given.
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
        workers = [stack.enter_context(_Worker(work)) for _ in ahead]
        for worker, part in zip(workers, ahead):
            worker.give(part)
        while ahead:
            worker, part = workers.pop(0), ahead.pop(0)
            result = worker.take()
            for following in islice(parts, 1):
                worker.give(following)
                workers.append(worker)
                ahead.append(following)
            yield part, result


class _Worker:
    """A process that has at most one part at a time, so that neither waits for the other to read."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        own = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        self._process: Any = subprocess.Popen(  # noqa: S603 (ourselves)
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **own}
        )
        self.give(work)

    def give(self, part: Any) -> None:
        try:
            _write(self._process.stdin, part)
        except BrokenPipeError:
            raise self._ended() from None

    def take(self) -> Any:
        try:
            done, result = pickle.load(self._process.stdout)  # noqa: S301 (from our own child)
        except EOFError:
            raise self._ended() from None
        if not done:
            raise result
        return result

    def _ended(self) -> LitEfficientError:
        return LitEfficientError(f"a process that tokenises has ended ({self._process.wait()})")

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *error: Any) -> None:
        with suppress(BrokenPipeError):  # of what an ended process has not read
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()


def _write(file: IO[bytes], content: Any) -> None:
    pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)
    file.flush()


def _sendable(error: Exception) -> Exception:
    """The error, or what it says, where it is of a class that pickle cannot make again."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:
        return LitEfficientError(f"{type(error).__name__}: {error}")
    return error


def _serve() -> None:
    """What a process does: read what to do, then one part after the other, until its parent ends."""
    given, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes elsewhere
    work = pickle.load(given)  # noqa: S301 (from our own parent)
    while True:
        try:
            part = pickle.load(given)  # noqa: S301
        except EOFError:
            return
        try:
            answer = True, work(part)
        except Exception as error:  # whatever it is, the parent raises it
            answer = False, _sendable(error)
        _write(results, answer)


if __name__ == "__main__":
    _serve()
