"""Fresh processes at the price of a fork: a server that has imported the heavy packages and done nothing forks them."""

import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
import warnings

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


def run_ranks(script, environment, processes, timeout):
    """Run a file in ranks of one node, with the variables that torchrun would set, and return what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    shared |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "none"}
    done = _context.Barrier(processes)
    logs = [script.with_name(f"rank{rank}.log") for rank in range(processes)]
    ranks = []
    for rank, log in enumerate(logs):
        own = {key: str(value) for key, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        ranks.append(start(_run_file, script, {**environment, **own}, done, log=log))
    deadline = time.monotonic() + timeout
    while any(rank.is_alive() for rank in ranks):
        if time.monotonic() > deadline or any(rank.exitcode for rank in ranks):
            time.sleep(1)  # for what the others have to say
            for rank in ranks:
                rank.kill()
        time.sleep(0.02)
    printed = "".join(log.read_text() for log in logs if log.exists())
    assert all(rank.exitcode == 0 for rank in ranks), printed[-4000:]
    return printed


def _run_file(script, environment, done):
    os.environ.clear()  # the server's are those of the first test that asked for a process
    os.environ.update(environment)
    os.chdir(script.parent)
    warnings.simplefilter("ignore")
    runpy.run_path(str(script), run_name="__main__")
    done.wait(60)  # rank 0 holds the store that the others may still ask


def _run(target, args, kwargs, log, env):
    os.environ.update(env)
    if log is not None:
        sys.stdout = sys.stderr = open(log, "w", buffering=1)  # noqa: SIM115
    try:
        target(*args, **kwargs)
    except Exception:
        traceback.print_exc()
        raise
