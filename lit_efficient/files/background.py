"""Writing in the background: one thread runs jobs in order, and readers wait for it.

If a job fails, the jobs behind it are skipped, so that a checkpoint is never removed before its successor is written.
The next ``wait`` raises the error.
"""

import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Jobs:
    """Queue of jobs with a thread of its own. The interpreter finishes the jobs before it exits."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._last: Future[None] | None = None
        self._after: dict[str, bool] = {}  # paths that jobs write (True) or remove
        _queues.add(self)

    def submit(self, job: Callable[[], object], path: str | os.PathLike[str], writes: bool = True) -> None:
        """Run ``job``, which writes or removes ``path``, after all jobs so far, unless one of them fails."""
        self._after[os.fspath(path)] = writes
        before = self._last

        def run() -> None:
            if before is not None:
                before.result()
            job()

        self._last = self._pool.submit(run)

    def wait(self) -> None:
        """Return when all jobs are done. Raise the error of a failed job, once."""
        last, self._last = self._last, None
        self._after = {}
        if last is not None:
            last.result()

    def will_exist(self, path: str | os.PathLike[str]) -> bool | None:
        """Return whether a path exists after the jobs, or None if no job writes or removes it."""
        return self._after.get(os.fspath(path))


_queues: weakref.WeakSet[Jobs] = weakref.WeakSet()


def finish_writing() -> None:
    """Wait for all jobs of this process, before a file is read that one of them may be writing."""
    for jobs in list(_queues):
        jobs.wait()
