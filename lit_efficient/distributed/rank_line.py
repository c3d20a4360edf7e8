"""Connections between processes, over which each reports how it ends. A lost connection reveals a process that is
killed.

    process 0 accepts and forwards;  every other process keeps a connection to it;  "RANK failed | left | done WHY"

The operating system closes the connections of a killed process. A machine that disappears closes nothing: idle
connections are probed, and closed after half a minute. A connecting process must know a key that is sent through the
process group. Only text is sent over the connections.
"""

import hmac
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from torch import distributed

from lit_efficient.distributed.ranks import gather_objects, join_ranks, place_among_ranks

ENDED = "this process ends, because it would wait forever: "
"""Beginning of the message, and of the note on the error, when a process ends because another one has ended."""
FAILED = "failed"
LEFT = "left"
DONE = "done"
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # seconds, seconds, how often
WAIT = 30.0  # seconds for all to connect
_LONGEST = 1000  # bytes of a message
_GRACE = 3.0  # seconds that a command has to end by itself


@contextmanager
def joined_processes() -> Iterator[tuple[int, int]]:
    """Join the processes of torchrun in a command, as :func:`join_ranks`, and end this process if another one fails."""
    rank, count = join_ranks()
    if count == 1:
        yield rank, count
        return

    def heard(number: int, how: str, why: str) -> None:
        if how == FAILED:  # all processes may have found the same mistake: each gets time to report it
            timer = threading.Timer(_GRACE, _end, (f"process {number} has failed ({why})",))
            timer.daemon = True
            timer.start()

    with closing(RankLine(heard, os.environ["MASTER_ADDR"])) as line:
        try:
            yield rank, count
        except BaseException as error:
            if isinstance(error, RuntimeError):  # a collective may have failed because another process has ended
                threading.Event().wait(2 * _GRACE)
            line.say(FAILED, f"{type(error).__name__}: {error}")
            raise
        line.say(DONE)


def _end(why: str) -> None:
    print(f"error: {ENDED}{why}", file=sys.stderr, flush=True)
    os._exit(2)


class RankLine:
    """Connections that inform this process how the others end. All processes of the group must create theirs together.

    Args:
        heard: Called in a thread of its own with a process's rank, ``failed``, ``left`` or ``done``, and the reason.
            After ``failed`` or ``done`` no more calls follow for that process. A connection that ends without either
            counts as ``failed``.
        host: Address of process 0 for the others.

    Raises:
        ConnectionError: In all processes, if one of them cannot reach process 0.
    """

    def __init__(self, heard: Callable[[int, str, str], None], host: str) -> None:
        self._heard = heard
        self._rank, self._world = place_among_ranks()
        self._lines: dict[socket.socket, int] = {}  # rank at the other end
        self._lock = threading.Lock()
        self._silent = False
        call: list[Any] = [0, ""]
        if self._rank == 0:
            server = socket.create_server(("", 0), backlog=self._world)
            server.settimeout(WAIT)
            call = [server.getsockname()[1], secrets.token_hex(16)]
        distributed.broadcast_object_list(call, src=0)
        port, key = call
        problem = ""
        try:
            if self._rank == 0:
                self._accept(server, key)
            else:
                line = socket.create_connection((host, port), WAIT)
                line.sendall(f"{key} {self._rank:8d}".encode())
                self._lines[line] = 0
        except OSError as error:
            problem = f"process {self._rank}: {error}"
        problems = gather_objects(problem)
        if any(problems):
            self.close()
            raise ConnectionError(next(filter(None, reversed(problems))))  # process 0 reports only a missing connection
        for line in self._lines:
            _probe(line)
        threading.Thread(target=self._listen, name="lit_efficient.rank_line", daemon=True).start()

    def _accept(self, server: socket.socket, key: str) -> None:
        with server:
            while len(self._lines) < self._world - 1:
                line, _ = server.accept()
                line.settimeout(5)
                try:
                    given, _, rank = line.recv(len(key) + 9, socket.MSG_WAITALL).decode(errors="replace").partition(" ")
                except OSError:  # another program has connected
                    line.close()
                    continue
                if hmac.compare_digest(given.encode(), key.encode()):
                    self._lines[line] = int(rank)
                else:
                    line.close()

    def say(self, how: str, why: str = "") -> None:
        """Report to all others how this process ends."""
        self._send(f"{self._rank} {how} {' '.join(why.split())}", self._lines)

    def close(self) -> None:
        """Close the connections; reports that were sent are still delivered."""
        self._silent = True
        for line in list(self._lines):
            line.close()

    def _send(self, text: str, lines: Iterable[socket.socket]) -> None:
        with self._lock:
            for line in list(lines):
                try:
                    line.sendall(text.encode()[:_LONGEST] + b"\n")
                except OSError:  # the listening thread notices the end of the connection
                    continue

    def _listen(self) -> None:
        known: set[int] = set()  # ranks that have reported their end
        rests = dict.fromkeys(self._lines, b"")
        with selectors.DefaultSelector() as selector:
            for each in self._lines:
                selector.register(each, selectors.EVENT_READ)
            while rests and not self._silent:
                for key, _ in selector.select(timeout=1):
                    line: Any = key.fileobj
                    try:
                        read = line.recv(4096)
                    except OSError:  # the probes were not answered
                        read = b""
                    *texts, rest = (rests[line] + read).decode(errors="replace").split("\n")
                    rests[line] = rest.encode()
                    if not read:
                        selector.unregister(line)
                        del rests[line]
                        why = "its connection ended without a message, as that of a killed process"
                        texts = [f"{self._lines[line]} {FAILED} {why}"]
                    for text in texts if not self._silent else ():
                        rank, how, why = (text + "  ").split(" ", 2)
                        if int(rank) in known:
                            continue
                        if how != LEFT:
                            known.add(int(rank))
                        if self._rank == 0:
                            self._send(text, [other for other in rests if self._lines[other] != int(rank)])
                        self._heard(int(rank), how, why.strip())


def _probe(line: socket.socket) -> None:
    """Let the operating system probe the connection while it is idle."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
