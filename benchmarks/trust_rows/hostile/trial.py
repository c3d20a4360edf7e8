"""Run a case in a process that an audit hook watches, with limits of time and memory."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from benchmarks.trust_rows.hostile.cases import BYTES, CANARY, MAKERS, SECONDS, SECRET, dotted, mark_unread
from tests import processes


def _outside(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def trial(name: str, folder: Path) -> str:
    inside = folder / "inside"
    outside = folder / "outside"
    inside.mkdir()
    outside.mkdir()
    for file in (
        "secret.txt",
        "secret.yaml",
        "secret.png",
        "secret.json",
        "secret.ckpt",
        "victim",
        "victim.npy",
        "shard",
    ):
        (outside / file).write_text(f"default_root_dir: {SECRET}\n")
    homes = {variable: str(inside) for variable in ("HOME", "TMPDIR", "LIT_EFFICIENT_CACHE", "HF_HOME", "TORCH_HOME")}
    homes |= {"HF_DATASETS_CACHE": str(inside / "cache"), "HF_MODULES_CACHE": str(inside / "modules")}
    log = folder / "log"
    seen = folder / "seen"
    ready = folder / "ready"
    process = processes.start(_child, name, str(inside), str(outside), str(seen), str(ready), log=str(log), env=homes)
    process.join(300)
    late = process.is_alive()
    process.kill()
    process.join()
    said = log.read_text(errors="replace")
    if not ready.exists():
        return f"the case could not be made: {said[-300:]!r}"
    if any(CANARY in names + files for _, names, files in os.walk(folder)):
        return "its code ran"
    if seen.exists():
        return seen.read_text().splitlines()[0]
    before = json.loads(ready.read_text())
    for path in sorted(outside.rglob("*")):
        if path.is_file() and int(path.stat().st_atime) > 1 and not name.startswith("link"):
            return f"{path.name} outside was read"
    if before != {file: content.decode("latin-1") for file, content in _outside(outside).items()}:
        return "something outside was written"
    if SECRET in said:
        return "the secret was printed"
    for path in inside.rglob("*"):
        if path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes():
            return f"the secret is in {path.relative_to(inside)}"
    if late or process.exitcode in (-24, -9):
        return f"it took more than {SECONDS} s of a processor"
    if "MemoryError" in said or "llocate memory" in said or "bad_alloc" in said:
        return f"it asked for more than {BYTES >> 30} GiB"
    if process.exitcode != 0:
        return f"it ended with {process.exitcode}: {said[-200:]!r}"
    return ""


def _child(name: str, inside: str, outside: str, seen: str, ready: str) -> None:
    os.chdir(inside)
    act = MAKERS[name]()
    before = {file: content.decode("latin-1") for file, content in _outside(Path(outside)).items()}
    for path in Path(outside).rglob("*"):
        mark_unread(path)
    Path(ready).write_text(json.dumps(before))
    if not name.startswith("shadow"):
        _watch(os.path.realpath(inside), os.path.realpath(outside), seen, not name.startswith("link"))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + SECONDS, int(used) + SECONDS + 5))
    from lit_efficient.errors import LitEfficientError

    try:
        if callable(act):
            act()
            return
        code = dotted("lit_efficient.__main__.main")(act)
        if code not in (0, 2):
            raise SystemExit(f"the command ended with {code}")
    except LitEfficientError as error:
        print(f"refused: {error}")
    except (AssertionError, ImportError, NameError, AttributeError):
        raise  # of the case itself, most likely
    except Exception as error:  # not pretty, and no harm; MemoryError is seen in what is printed
        print(f"refused with a traceback: {type(error).__name__}: {str(error)[-300:]}")


_WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.symlink", "os.link", "shutil.rmtree")
_STARTS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "socket.getaddrinfo")


def _watch(inside: str, outside: str, seen: str, reads: bool) -> None:
    folder = os.path.dirname(inside)
    output = os.open(seen + ".partial", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    real = os.path.realpath
    busy: list[bool] = []

    def note(what: str) -> None:
        os.write(output, f"{what}\n".encode())
        if not os.path.exists(seen):
            os.link(seen + ".partial", seen)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if busy or (event != "open" and event not in _WRITES and event not in _STARTS):
            return
        busy.append(True)
        try:
            if event in _STARTS:
                words = str(args[:2])
                if not any(word in words for word in ("'git'", "'uname'", "AF_UNIX")):
                    note(f"{event}{words[:120]}")
                return
            led = event != "open" or not args[2] & os.O_NOFOLLOW
            place = (
                (real if led else os.path.abspath)(os.fsdecode(args[0]))
                if isinstance(args[0], str | bytes | os.PathLike)
                else folder
            )
            writes = event != "open" or bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if place.startswith(outside + os.sep) and (writes or reads):
                note(f"{event} of {os.path.basename(place)} outside")
            if writes and not place.startswith((folder, "/dev/", "/proc/")) and "__pycache__" not in place:
                note(f"{event} writes {place}")
        finally:
            busy.pop()

    sys.addaudithook(hook)
