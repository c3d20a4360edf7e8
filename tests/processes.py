"""Fresh processes at the price of a fork: a server that has imported the heavy packages and done nothing forks them."""

import multiprocessing
import os
import sys
import traceback

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.callbacks.interrupted_run"])


def start(target, *args, log=None, env=None, **kwargs):
    """Start ``target(*args, **kwargs)`` in a process of its own; what it prints goes to the file ``log``."""
    process = _context.Process(target=_run, args=(target, args, kwargs, log, env or {}))
    process.start()
    return process


def run(target, *args, log=None, env=None, **kwargs):
    """The exit code of ``target(*args, **kwargs)`` in a process of its own."""
    process = start(target, *args, log=log, env=env, **kwargs)
    process.join()
    return process.exitcode


def _run(target, args, kwargs, log, env):
    os.environ.update(env)
    if log is not None:
        sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115
    try:
        target(*args, **kwargs)
    except Exception:
        traceback.print_exc()
        raise
