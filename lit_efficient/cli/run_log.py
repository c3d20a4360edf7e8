"""The log of a run: what it shows in the terminal as plain lines, without bars and colours, from all processes."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lit_efficient.cli.secrets import masked
from lit_efficient.files.atomic_file import not_through_links

_REDRAWS = re.compile(r"^\r(?!\n)|\x1b\[\d*[A-HJK]")  # what bars write
_STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MOST = 10_000  # lines before there is a file, and characters before a line ends


class RunLog:
    """Copies what this process prints into a file, and hides it from the terminal of a quiet run.

    The streams stay the same objects: their ``write`` is replaced until :meth:`stop`. What is printed before
    :meth:`open` is kept until then.

    Args:
        quiet: ``"all"`` shows nothing of what is printed on stdout, ``"bars"`` all but bars, ``""`` everything. Errors
            and warnings are shown on stderr in each case. Log records below a warning are hidden in a quiet run.
    """

    def __init__(self, quiet: str) -> None:
        self.quiet = quiet
        self.warned: Callable[[str], object] = lambda text: None  # gets each warning
        self._early: list[str] = []
        self._file: IO[bytes] | None = None
        self._prefix = ""
        self._stopped = False
        self._undo: list[Callable[[], object]] = []
        self._watch(sys.stdout, hides=True)
        if sys.stderr is not sys.stdout:
            self._watch(sys.stderr, hides=False)
        self._show = warnings.showwarning
        warnings.showwarning = self._warn
        if quiet:
            os.environ.setdefault("WANDB_SILENT", "true")
            self._emit = logging.StreamHandler.emit
            setattr(logging.StreamHandler, "emit", lambda *given: self._tell(*given))  # noqa: B010, PLW0108 - a method here
            self._undo.append(lambda: setattr(logging.StreamHandler, "emit", self._emit))

    def open(self, path: Path, rank: int) -> None:
        """Write into a file from now on. Other processes may write into it, too. Does nothing after :meth:`stop`."""
        if self._stopped:
            return
        if rank:
            self._prefix = f"[rank {rank}] "
        with suppress(OSError):  # the folder may be on another machine
            self._file = open(path, "ab", buffering=0, opener=not_through_links)  # noqa: SIM115 - until the end
        early = self._early
        self._early = []
        for line in early:
            self.write(line)

    def write(self, line: str) -> None:
        """Add a line to the log, whether the terminal shows it or not."""
        line = masked(line)
        if self._file is None:
            self._early = [*self._early[-_MOST:], line]
            return
        with suppress(OSError, ValueError):  # a full disk ends no run
            self._file.write(f"{self._prefix}{line}\n".encode("utf-8", "replace"))

    def stop(self) -> None:
        """Restore the streams."""
        self._stopped = True
        for undo in self._undo:
            undo()
        if warnings.showwarning == self._warn:
            warnings.showwarning = self._show
        self._undo = []
        if self._file is not None:
            self._file.close()

    def _watch(self, stream: Any, hides: bool) -> None:
        """Replace the ``write`` of a stream; ``hides``: the stream is silent in a quiet run."""
        own = getattr(stream, "write", None)
        if own is None:
            return
        rest = ""  # of a line that has not ended

        def write(text: str) -> object:
            nonlocal rest
            text = masked(text)
            redraws = bool(_REDRAWS.search(text))
            shown = not self.quiet if redraws else self.quiet != "all"
            if shown or not (hides or redraws):
                result = own(text)
            else:
                result = len(text)
            if redraws:
                rest = ""
                return result
            *lines, rest = (rest + text).split("\n")
            if "\r" in rest or len(rest) > _MOST:
                rest = rest[rest.rfind("\r") + 1 :][-_MOST:]
            for line in lines:
                plain = _STYLES.sub("", line).rstrip().rpartition("\r")[2]
                if plain:
                    self.write(plain)
            return result

        def restore() -> None:
            if stream.write is write:  # no other code has replaced it since
                stream.__dict__.pop("write", None)

        with suppress(AttributeError):  # a stream whose attributes cannot be set
            stream.write = write
            self._undo.append(restore)

    def _warn(self, message: Warning | str, *arguments: Any, **options: Any) -> None:
        shown = masked(str(message))
        if shown != str(message):
            message = UserWarning(shown)
        self._show(message, *arguments, **options)
        self.warned(str(message))

    def _tell(self, handler: Any, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or handler.stream not in (sys.stdout, sys.stderr):
            self._emit(handler, record)
            return
        for line in record.getMessage().splitlines():
            self.write(line)
