"""A line between processes, on which each says how it ends: one that says nothing is noticed by its end of the line.

    process 0 listens, and passes on;  every other one keeps a connection to it;  "RANK failed | left | done WHY"

The system closes the connections of a process that is killed, whatever it was doing. A machine that disappears closes
nothing: idle connections are probed, and given up after half a minute. Whoever connects must know a key that travels
through the process group; all that goes over the line is text.
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

ENDED = "this process ends, as it would wait for ever: "
"""Begins what is said, and noted on the error, where a process ends because another one has."""
FAILED, LEFT, DONE = "failed", "left", "done"
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # seconds, seconds, how often
WAIT = 30.0  # seconds for all to connect
_LONGEST = 1000  # letters of a message
_GRACE = 3.0  # seconds for a command to end by itself


@contextmanager
def together() -> Iterator[tuple[int, int]]:
    """In a command: meet torchrun's other processes, as :func:`join_ranks`; where one of them fails, this one ends."""
    rank, count = join_ranks()
    if count == 1:
        yield rank, count
        return

    def heard(number: int, how: str, why: str) -> None:
        if how == FAILED:  # time to say the same mistake, which all may have found
            timer = threading.Timer(_GRACE, _end, (f"process {number} has failed ({why})",))
            timer.daemon = True
            timer.start()

    with closing(RankLine(heard, os.environ["MASTER_ADDR"])) as line:
        try:
            yield rank, count
        except BaseException as error:
            if isinstance(error, RuntimeError):  # as a collective's, of which another process's end is the reason
                threading.Event().wait(2 * _GRACE)
            line.say(FAILED, f"{type(error).__name__}: {error}")
            raise
        line.say(DONE)


def _end(why: str) -> None:
    print(f"error: {ENDED}{why}", file=sys.stderr, flush=True)
    os._exit(2)


class RankLine:
    """Lets this process know how the others end. All processes of the group make theirs together.

    Args:
        heard: Called in a thread of its own with a process's number, ``failed``, ``left`` or ``done``, and why. After
            ``failed`` or ``done`` nothing more comes from it; one whose line ends before has failed.
        host: Address of process 0, as the others reach it.

    Raises:
        ConnectionError: On all processes alike, if one of them cannot reach process 0.
    """

    def __init__(self, heard: Callable[[int, str, str], None], host: str) -> None:
        self._heard = heard
        self._rank, self._world = place_among_ranks()
        self._lines: dict[socket.socket, int] = {}  # to whom
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
            raise ConnectionError(next(filter(None, reversed(problems))))  # process 0 only misses one
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
                except OSError:  # a stranger's
                    line.close()
                    continue
                if hmac.compare_digest(given.encode(), key.encode()):
                    self._lines[line] = int(rank)
                else:
                    line.close()

    def say(self, how: str, why: str = "") -> None:
        """Tell all others how this process ends."""
        self._send(f"{self._rank} {how} {' '.join(why.split())}", self._lines)

    def close(self) -> None:
        """Hang up; what was said is delivered."""
        self._silent = True
        for line in list(self._lines):
            line.close()

    def _send(self, text: str, lines: Iterable[socket.socket]) -> None:
        with self._lock:
            for line in list(lines):
                try:
                    line.sendall(text.encode()[:_LONGEST] + b"\n")
                except OSError:  # its end is noticed where it is listened to
                    continue

    def _listen(self) -> None:
        known: set[int] = set()  # how they end
        rests = dict.fromkeys(self._lines, b"")
        with selectors.DefaultSelector() as selector:
            for each in self._lines:
                selector.register(each, selectors.EVENT_READ)
            while rests and not self._silent:
                for key, _ in selector.select(timeout=1):
                    line: Any = key.fileobj
                    try:
                        read = line.recv(4096)
                    except OSError:  # given up
                        read = b""
                    *texts, rest = (rests[line] + read).decode(errors="replace").split("\n")
                    rests[line] = rest.encode()
                    if not read:
                        selector.unregister(line)
                        del rests[line]
                        texts = [f"{self._lines[line]} {FAILED} it ended without a word, as a killed process does"]
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
    """Have the system probe the connection while nothing is said."""
    line.settimeout(None)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
