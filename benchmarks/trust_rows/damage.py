"""Row 3: damage files of each kind that the package writes: flipped bits, truncation, pages of zeros.

    flip-0007     one bit of one file is flipped
    cut-0007      a file is truncated
    zero-0007     4 KiB of a file become zeros, or an eighth of a small file
    command-07    one of these, read by a command of the command line in a separate process

A case passes if the reader explains the error in a sentence, or if the content that it reads is unchanged in every bit:
the damaged bit may be unused, and a cache may be generated again. Flips keep size and time of the file, like bit rot.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.trust_rows import OURS, Piece
from benchmarks.trust_rows.damage_kinds import KINDS, PEERS, Command, Kind
from lit_efficient.errors import LitEfficientError
from tests import processes

FLIPS = 1000
CUTS = 200
ZEROS = 200
COMMANDS = 20
PAGE = 4096
MISSING = 12  # cases a set
SETS = tuple(name for name in KINDS if name not in ("checkpoint", "average", "merge", "scores", "ema-sweep"))


def cases(kind: Kind) -> list[str]:
    counts = {"flip": FLIPS, "cut": CUTS, "zero": ZEROS}
    names = [f"{how}-{number:04}" for how, count in counts.items() for number in range(count)]
    return names + [f"command-{number:02}" for number in range(COMMANDS) if kind.commands]


def trial(name: str, case: str, folder: Path) -> str:
    """Damage a copy of the prepared files and read it."""
    kind = {**KINDS, **PEERS}[name]
    made = prepared(name)
    readers: dict[str, Any] = dict(kind.readers)
    if case.startswith("command"):
        command = kind.commands[int(case.partition("-")[2]) % len(kind.commands)]
        readers = {command.line: command}
    wanted = {reader: seen(name, reader) for reader in readers}
    with _copied(made, made.parent / "here" if kind.fixed else folder):
        return _told(kind, readers, wanted, damage(kind, f"{name} {case}"))


def missing_cases() -> list[str]:
    return [f"{name}: {number:02}" for name in SETS for number in range(MISSING)]


def missing(case: str, folder: Path) -> str:
    """Delete a file of a set and read the others."""
    name, _, number = case.partition(": ")
    kind = KINDS[name]
    made = prepared(name)
    wanted = {reader: seen(name, reader) for reader in kind.readers}
    with _copied(made, made.parent / "here" if kind.fixed else folder):
        files = _files(kind)
        gone = files[int(number) % len(files)]
        gone.unlink()
        return _told(kind, kind.readers, wanted, f"{gone} is gone")


def _told(kind: Kind, readers: Mapping[str, Any], wanted: Mapping[str, str], done: str) -> str:
    """Return what is wrong with the reaction of the readers, or ''."""
    for reader, read in readers.items():
        said, found = _run(read) if isinstance(read, Command) else _read(read)
        if said.startswith("!") and kind.subject == OURS:  # of others any error will do
            return f"{done}: {reader}: {said[1:]}"
        if not said and found != wanted[reader]:
            return f"{done}: {reader} used it silently"
    return ""


def damage(kind: Kind, seed: str) -> str:
    """Damage one of the files below the working directory. Return a description."""
    draws = random.Random(seed)
    file = draws.choice(_files(kind))
    how = draws.choice(["flip", "cut", "zero"]) if "command" in seed else seed.rpartition(" ")[2].partition("-")[0]
    content = bytearray(file.read_bytes())
    before = file.stat()
    if how == "flip":
        bit = draws.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        done = f"bit {bit} flipped in {file}"
    elif how == "cut":
        length = draws.randrange(len(content))
        content = content[:length]
        done = f"{file} cut to {length} bytes"
    else:
        size = PAGE if len(content) > 4 * PAGE else max(1, len(content) // 8)
        begin = draws.randrange(0, len(content), size)
        content[begin : begin + size] = bytes(len(content[begin : begin + size]))
        done = f"{size} zeros at {begin} of {file}"
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return done


@cache
def prepared(name: str) -> Path:
    """Return a folder with the files of a kind."""
    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    here = root / "here"
    log = root / "log"
    here.mkdir()
    with _working_in(here):
        code = processes.run({**KINDS, **PEERS}[name].make, log=log)
    assert code == 0, f"{name} was not made: {log.read_text()[-3000:]}"
    return here.rename(root / "made")


@cache
def seen(name: str, reader: str) -> str:
    """Return the content that a reader or a command finds in an undamaged copy of the files of a kind."""
    kind = {**KINDS, **PEERS}[name]
    made = prepared(name)
    read = next((command for command in kind.commands if command.line == reader), None)
    with _copied(made, made.parent / ("here" if kind.fixed else "copy")):
        before = _files(kind)
        said, found = _run(read) if read else _read(kind.readers[reader])
        assert not said, f"{name}: {reader} refuses what is whole: {said}"
        assert not kind.kept or before == _files(kind), f"{name}: {reader} does not read what was made"
    return found


@contextmanager
def _copied(made: Path, place: Path) -> Iterator[None]:
    shutil.copytree(made, place, dirs_exist_ok=True)
    try:
        with _working_in(place):
            yield
    finally:
        shutil.rmtree(place, ignore_errors=True)


def digest(value: Any) -> str:
    """Return a hash of a value. Tensors and arrays are hashed by their bits."""
    found = hashlib.sha256()
    for part in _parts(value):
        found.update(part)
    return found.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        yield f"{plain.dtype}{list(plain.shape)}".encode()
        yield plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield f"{key!r}:".encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield f"{len(value)}[".encode()
        for one in value:
            yield from _parts(one)
    else:
        yield repr(value).encode()


def _read(read: Any) -> tuple[str, str]:
    """What a reader says against the files, with ! in front where it is no sentence; and a hash of what it gives."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "", digest(read())
    except LitEfficientError as error:
        return str(error) or "!an error without a word", ""
    except OSError as error:
        return (str(error) if error.filename else f"!{error!r}"), ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        return f"!{type(error).__name__}: {' '.join(str(error).split())[:150]}", ""


def _run(command: Command) -> tuple[str, str]:
    log = Path("command.log").absolute()
    process = processes.start(_main, command.line.split(), log=log)
    process.join(120)
    if process.is_alive():
        process.kill()
        return "!it does not end", ""
    text = log.read_text(errors="replace")
    if "Traceback" in text:
        return f"!Traceback: {' '.join(text.splitlines()[-1:])[:150]}", ""
    if process.exitcode == 0:
        return "", digest(command.seen(text))
    last = [line for line in text.splitlines() if line.startswith(("error: ", "usage: "))]
    return (last[-1] if last else f"!exit code {process.exitcode} without a word: {text[-150:]}"), ""


def _main(words: list[str]) -> None:
    from lit_efficient.__main__ import main

    raise SystemExit(main(words))


def _files(kind: Kind) -> list[Path]:
    found = sorted({path for pattern in kind.files for path in Path().glob(pattern) if path.is_file()})
    return [path for path in found if path.suffix != ".lock" and path.stat().st_size]


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _piece(name: str, kind: Kind) -> Piece:
    holds = "it is said, or changes nothing" if kind.subject == OURS else "an error of any kind, or nothing is changed"
    what = f"A bit is flipped in, a page of zeros put into, or the end cut off {kind.what}: {holds}."
    return Piece(3, f"damaged-{name}", what, partial(cases, kind), partial(trial, name), kind.subject, kind.in_ci)


PIECES = (
    *(_piece(name, kind) for name, kind in {**KINDS, **PEERS}.items()),
    Piece(
        3,
        "missing-file",
        "One file of a set is deleted (snapshot, shard, part of an export or cache): it is said, or nothing changes.",
        missing_cases,
        missing,
    ),
)
