"""Writing in the background: one thread runs jobs in order, and readers wait for it.

If a job fails, the jobs behind it are skipped, so that a checkpoint is never removed before its successor is written.
The next ``wait`` raises the error.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Jobs:
    """Queue of jobs with a thread of its own. The interpreter finishes the jobs before it exits."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._last: Future[None] | None = None
        _queues.add(self)

    def submit(self, job: Callable[[], object]) -> None:
        """Run ``job`` after all jobs so far, unless one of them fails."""
        before = self._last

        def run() -> None:
            if before is not None:
                before.result()
            job()

        self._last = self._pool.submit(run)

    def wait(self) -> None:
        """Return when all jobs are done. Raise the error of a failed job, once."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


_queues: weakref.WeakSet[Jobs] = weakref.WeakSet()


def finish_writing() -> None:
    """Wait for all jobs of this process, before a file is read that one of them may be writing."""
    for jobs in list(_queues):
        jobs.wait()
