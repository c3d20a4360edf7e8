"""Fresh processes at the price of a fork: a server that has imported the heavy packages and done nothing forks them."""

import multiprocessing
import os
import socket
import sys
import time
import traceback
import warnings

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.callbacks.interrupted_run", "tests.ranks.toys"])


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


def run_ranks(target, folder, *args, processes=2, timeout=240):
    """Run ``target(*args)`` in ``folder`` in ranks of one node, as torchrun would, and return what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    environment |= {"LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    for name in ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    done = _context.Barrier(processes)
    logs = [folder / f"rank{rank}.log" for rank in range(processes)]
    ranks = []
    for rank, log in enumerate(logs):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(start(_run_rank, target, args, folder, own, done, log=log))
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


def _run_rank(target, args, folder, environment, done):
    os.environ.clear()  # the server's are those of the first test that asked for a process
    os.environ.update(environment)
    os.chdir(folder)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    target(*args)
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
