"""Fresh processes at the price of a fork: a server that has imported the heavy packages and done nothing forks them.

Of three kinds: `python` runs a script or a module where nothing of Lightning and nothing of ours is imported yet, at
wish where the libraries are that load exports; `run`, `start` and `run_ranks` call a function where both are imported.
"""

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HEAVY = (
    "torchmetrics",
    "transformers",
    "torch._dynamo",
    "jsonargparse",
    "yaml",
)  # what importing Lightning imports, too
MODULES = {
    # bitsandbytes brings torch's compiler along, which takes longer than what most children do.
    "ready": (__name__, "tests.callbacks.interrupted_run", "tests.ranks.toys", "bitsandbytes"),
    "peers": ("peft", "diffusers"),
}


class Process:
    """A child of the server, seen from here."""

    def __init__(self, status):
        self._status = status
        (self.pid,) = struct.unpack("i", self._read(4))
        self._exitcode = None

    def _read(self, count):
        data = os.read(self._status, count)
        assert len(data) == count, "the server of processes is gone"
        return data

    def join(self, timeout=None):
        """Wait until it has ended, or for so many seconds."""
        if self._exitcode is None and select.select([self._status], [], [], timeout)[0]:
            self._exitcode = os.waitstatus_to_exitcode(struct.unpack("i", self._read(4))[0])
            os.close(self._status)

    @property
    def exitcode(self):
        self.join(0)
        return self._exitcode

    def is_alive(self):
        return self.exitcode is None

    def kill(self):
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Server:
    """A process that imports ``modules``, once it is asked for something, and forks a child for each job."""

    def __init__(self, modules, parent=None):
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if parent is not None:
            parent.start(_serve_on, modules, pass_on=theirs)
        elif os.fork() == 0:
            self._ours.close()
            _serve(theirs, modules)
        theirs.close()

    def close(self):
        self._ours.close()

    def start(self, job, *args, pass_on=None):
        """Call ``job(*args)`` in a new process."""
        status, theirs = os.pipe()
        socket.send_fds(
            self._ours, [pickle.dumps((job, args))], [theirs] if pass_on is None else [theirs, pass_on.fileno()]
        )
        os.close(theirs)
        return Process(status)


def _serve_on(modules, passed_on):
    _serve(socket.socket(fileno=passed_on), modules)


def _serve(requests, modules):
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "AssertionRewritingHook"]
    warnings.resetwarnings()  # as a fresh Python has them
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    answer_signals()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the parents of the children
    while True:
        request, handles, *_ = socket.recv_fds(requests, 1 << 16, 2)
        if not request:  # the tests have ended
            os._exit(0)
        if modules:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for module in modules:
                    prepare_part = pkgutil.resolve_name(module)
                    if callable(prepare_part):
                        prepare_part()
                    ready_torch()
            modules = ()
            gc.collect()
            gc.freeze()
        if os.fork() == 0:  # a parent for the child, which waits for it
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status, *passed_on = handles
            child = os.fork()
            if child == 0:
                os.close(status)
                os._exit(_work(request, passed_on))
            with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                os.write(status, struct.pack("i", child))
                os.write(status, struct.pack("i", os.waitpid(child, 0)[1]))
            os._exit(0)
        for handle in handles:
            os.close(handle)


def _work(request, passed_on):
    gc.enable()
    code = 1
    try:
        job, args = pickle.loads(request)
        job(*args, *passed_on)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code & 0xFF


_servers: dict[str, Server] = {}
run_command = subprocess.run


def answer_signals():
    """As a process in the foreground: whoever started this one may have it ignore them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def keep_kernels_as_written():
    """Compile nothing of bitsandbytes, which compiles its kernels for CPUs anew for each shape, in seconds of gcc's."""
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.compile.__module__ == __name__ or ("-m", "nightly") in pairwise(sys.argv):
        return
    compile_it = torch.compile

    def compile_others(model=None, **options):
        theirs = getattr(model, "__module__", "").startswith("bitsandbytes.")
        return model if theirs else compile_it(model, **options)

    torch.compile = compile_others


def queue_no_seeds():
    """Keep no seeds for devices that are not there: torch keeps each one that it is given, with the stack's text."""
    torch: Any = sys.modules.get("torch")
    if torch is None or ("-m", "gpu") in pairwise(sys.argv):
        return
    for device, module in ((torch.cuda, torch.cuda.random), (torch.xpu, torch.xpu.random), (torch.mtia, torch.mtia)):
        if not device.is_available():
            module._lazy_call = _forget


def _forget(call, **options):
    """Call nothing."""


def ready_torch():
    """What tests change of torch, once it is imported."""
    keep_kernels_as_written()
    queue_no_seeds()


def prepare(heavy):
    """Fork the first server while this process is young; ``heavy``: and has imported what most tests need."""
    if heavy:
        for module in HEAVY:
            importlib.import_module(module)
        ready_torch()
    _servers["young"] = Server(HEAVY)


def end():
    """Let the servers end."""
    while _servers:
        _servers.popitem()[1].close()


def _server(name):
    if name not in _servers:
        _servers[name] = Server(MODULES[name], _servers["young"])
    return _servers[name]


def start(target, *args, log=None, env=None, server="ready", **kwargs):
    """Start ``target(*args, **kwargs)`` in a process of its own; what it prints goes to the file ``log``."""
    return _server(server).start(_call, target, args, kwargs, log, {**os.environ, **(env or {})}, os.getcwd())


def run(target, *args, log=None, env=None, **kwargs):
    """The exit code of ``target(*args, **kwargs)`` in a process of its own."""
    process = start(target, *args, log=log, env=env, **kwargs)
    process.join()
    return process.exitcode


def run_check(command, **options):
    """``subprocess.run``, but for what an export is checked by: that runs where the peers are imported already."""
    if command[1:3] != ["-m", "lit_efficient.export.check"]:
        return run_command(command, **options)
    return python(*command[1:], env=options["env"], server="peers")


def python(*arguments, cwd=None, path=(), env=None, timeout=240, server="young"):
    """``python FILE ...`` or ``python -m MODULE ...``, where nothing of ours or of Lightning is imported yet.

    Returns:
        What it printed and its exit code, as from ``subprocess.run``.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        environment = {**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))}
        for name in ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
            environment.pop(name, None)
        words = [str(word) for word in arguments]
        process = _server(server).start(_python, words, str(cwd or os.getcwd()), environment, str(out), str(err))
        process.join(timeout)
        process.kill()
        process.join()
        return subprocess.CompletedProcess(words, process.exitcode, out.read_text(), err.read_text())


def _python(words, cwd, environment, out, err):
    _redirect(out, err)
    _become(environment, cwd)
    added = environment["PYTHONPATH"].split(os.pathsep)
    own = cwd if words[0] == "-m" else str(Path(words[0]).parent)
    sys.path[:] = list(dict.fromkeys([own, *added, *sys.path]))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _redirect(out, err):
    sys.stdout.flush()
    sys.stderr.flush()
    for number, path in ((1, out), (2, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115


def _become(environment, cwd):
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)


def start_ranks(target, folder, *args, processes=2):
    """Start ``target(*args)`` in ``folder`` in ranks of one node, as torchrun would: the processes, and their logs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    environment |= {"LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    logs = [folder / f"rank{rank}.log" for rank in range(processes)]
    done = [folder / f"rank{rank}.done" for rank in range(processes)]
    for file in done:
        file.unlink(missing_ok=True)
    ranks = []
    for rank, log in enumerate(logs):
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(start(_run_rank, target, args, folder, rank, done, log=log, env=own))
    return ranks, logs


def await_ends(ranks, seconds):
    """Wait for ranks, each so many seconds at most, and kill those that still run."""
    for rank in ranks:
        rank.join(seconds)
        rank.kill()


def run_ranks(target, folder, *args, processes=2, timeout=240):
    """Run ``target(*args)`` in ``folder`` in ranks of one node, and return what they printed."""
    ranks, logs = start_ranks(target, folder, *args, processes=processes)
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


def _run_rank(target, args, folder, rank, done):
    for name in ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
        os.environ.pop(name, None)
    os.chdir(folder)
    warnings.simplefilter("ignore")
    sys.modules["torch"].set_num_threads(1)
    target(*args)
    done[rank].touch()
    deadline = time.monotonic() + 60
    while rank == 0 and time.monotonic() < deadline and not all(file.exists() for file in done):
        time.sleep(0.02)  # rank 0 holds the store that the others may still ask


def _call(target, args, kwargs, log, environment, cwd):
    if log is not None:
        _redirect(log, log)
    _become(environment, cwd)
    target(*args, **kwargs)
