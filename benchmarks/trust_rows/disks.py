"""Row 6: full disks, read-only or missing folders, loader workers that die, and two runs in one folder."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from benchmarks.trust_rows import Piece
from benchmarks.trust_rows.interruptible import fit_words, program, trained, write_config
from benchmarks.trust_rows.signals import compared, ended, expected, ran
from lit_efficient.errors import EXIT_CODES
from lit_efficient.files.checkpoints import load_verified
from tests import processes

SOON = 10  # seconds within which a cause is to be named
SIZE = 4 << 20  # bytes of a small disk
PAGE = 4096


def can_mount() -> bool:
    """Whether this process may make a small disk: the 22nd of root's rights."""
    status = Path("/proc/self/status")
    rights = status.read_text().partition("CapEff:")[2].split()[:1] if status.exists() else []
    return bool(rights) and bool(int(rights[0], 16) >> 21 & 1)


@contextmanager
def small_disk(folder: Path, inodes: int = 10_000) -> Iterator[Path]:
    folder.mkdir()
    options = f"size={SIZE},nr_inodes={inodes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, pages: int) -> Path:
    """Fill a disk except for the given number of free pages."""
    ballast = disk / "ballast"
    found = os.statvfs(disk)
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, (found.f_bfree - pages) * found.f_bsize)
    return ballast


@cache
def half() -> Path:
    """Return the folder of a run that ended its first epoch, to be copied."""
    folder = Path(tempfile.mkdtemp())
    before = Path.cwd()
    os.chdir(folder)
    try:
        write_config()
        code, said = ran(program, *fit_words("--trainer.max_epochs=1"))
        assert code == 0, said[-2000:]
    finally:
        os.chdir(before)
    return folder


def unhelpful(said: str, code: int, cause: str | tuple[str, ...]) -> str:
    """Return what is wrong with the final message of a run that failed."""
    if "Traceback" in said:
        return f"a traceback: {said.strip()[-300:]!r}"
    if code not in EXIT_CODES or code in (0, 1):
        return f"it ended with {code}: {said[-200:]!r}"
    last = said[said.rfind("error: ") :] if "error: " in said else ""
    if not any(word in last for word in ([cause] if isinstance(cause, str) else cause)):
        return f"the cause is not named: {said[-300:]!r}"
    return f"{len(last.splitlines())} lines: {last!r}" if len(last.splitlines()) > 10 else ""


def spoilt(folder: Path, before: dict[str, bytes]) -> str:
    """Return the name of a file that is incomplete or lost its content."""
    for path in folder.rglob("*.ckpt"):
        try:
            load_verified(path)
        except Exception as error:
            return f"{path.name} is not whole: {error}"
    for name, content in before.items():
        path = folder / name
        if name.endswith(".ckpt") and "kept" in name and (not path.exists() or path.read_bytes() != content):
            return f"{name} has changed"
        grows = path.suffix in (".csv", ".jsonl", ".txt")
        if grows and not (path.exists() and path.read_bytes().startswith(content)):
            return f"{name} has lost what it held"
    left = [str(path) for path in folder.rglob(".*") if path.is_file() and not path.is_symlink()]
    return f"strays are left: {left}" if left else ""


def full_cases() -> list[str]:
    found = [f"{pages} pages" for pages in range(64)] + [f"{pages} pages of a new run" for pages in range(0, 64, 3)]
    found += [f"{count} files" for count in range(24)]
    return found + [f"{command} {pages} pages" for command in ("export", "average") for pages in (0, 1, 2, 3)]


def full_trial(case: str, folder: Path) -> str:
    words = case.split()
    if words[0] in ("export", "average"):
        return _full_command(words[0], int(words[1]), folder)
    number = int(words[0])
    new = case.endswith("new run")
    with small_disk(folder / "disk") as disk:
        write_config()
        os.symlink(disk / "runs", "runs")
        if new:
            os.mkdir(disk / "runs")
        else:
            shutil.copytree(half() / "runs", disk / "runs", symlinks=True)
        files = [path for path in (disk / "runs").rglob("*") if path.is_file() and "latest" not in path.parts]
        before = {str(path.relative_to(disk)): path.read_bytes() for path in files}
        if "files" in words:
            subprocess.run(["mount", "-o", f"remount,nr_inodes={_inodes(disk) + number}", disk], check=True)
        else:
            fill(disk, number)
        start = time.monotonic()
        code, said = ran(program, *fit_words("--ckpt_path=last"))
        took = time.monotonic() - start
        wrong = spoilt(disk, before) if code == 0 else unhelpful(said, code, "No space left") or spoilt(disk, before)
        if wrong:
            return wrong
        if took > SOON + 3 * expected("")[2]:
            return f"the cause was named after {took:.0f} s"
        if "files" in words:
            subprocess.run(["mount", "-o", "remount,nr_inodes=10000", disk], check=True)
        else:
            (disk / "ballast").unlink()
        if code:
            code, said = ran(program, *fit_words("--ckpt_path=last"))
            if code:
                return f"with room again it ended with {code}: {said[-300:]!r}"
        return compared("", table=False)


def _inodes(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_files - found.f_ffree


def _full_command(command: str, pages: int, folder: Path) -> str:
    with small_disk(folder / "disk") as disk:
        fill(disk, pages)
        found = sorted(half().glob("runs/run/*/kept*.ckpt"))[:1] + sorted(half().glob("runs/run/*/last.ckpt"))[:1]
        output = disk / ("out" if command == "export" else "average.ckpt")
        words = [str(found[-1])] if command == "export" else [str(path) for path in found]
        code, said = ran(program, command, *words, "--output", str(output))
        wrong = "" if code == 0 else unhelpful(said, code, "No space left")
        left = [path for path in disk.rglob("*") if path.name != "ballast"]
        if wrong or (code and left):
            return wrong or f"left behind: {left}"
        (disk / "ballast").unlink()
        code, said = ran(program, command, *words, "--output", str(output)) if code else (0, "")
        return f"with room again it ended with {code}: {said[-300:]!r}" if code else ""


GONE = ("train-start 1", "forward 2", "batch-end 4", "save 1", "before-fsync 1", "validation-end 1", "sample-image 2")
GONE = (*GONE, "epoch-end 1", "forward 9", "save 3", "train-end 1")


def gone_cases() -> list[str]:
    found = [f"{fault} {at}" for fault in ("read-only", "vanish", "vanish-all") for at in GONE]
    return [*found, "read-only from the start", "a file in its place", "a run that is read-only", "a link to nowhere"]


def gone_trial(case: str, folder: Path) -> str:
    fault, *at = case.split()
    write_config()
    env = {"TRUST_NOBODY": "1"}
    words = fit_words("--ckpt_path=last")
    if at[-2:-1] and at[-1].isdigit():
        env["TRUST_STRIKE"] = f'["{at[0]}", {at[1]}, "{fault}", 1]'
    else:
        shutil.copytree(half() / "runs", folder / "runs", symlinks=True)
        _spoil(case, folder)
    code, said = ran(program, *words, env=env)
    try:
        wrong = "" if code == 0 else unhelpful(said, code, ("ermission denied", "No such file", "Not a dir", "xists"))
        if wrong:
            return wrong
        for path in folder.rglob("*.ckpt"):
            load_verified(path)
    finally:
        for path in [folder, *folder.rglob("*")]:
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)
    if fault.startswith("vanish"):
        shutil.rmtree("vanished" if Path("vanished").exists() else "runs", ignore_errors=True)
        shutil.rmtree("runs", ignore_errors=True)
    elif fault != "read-only":
        shutil.rmtree("runs", ignore_errors=True) if Path("runs").is_dir() else Path("runs").unlink()
        shutil.copytree(half() / "runs", folder / "runs", symlinks=True)
    code, said = ran(program, *words)
    return f"mended, it ended with {code}: {said[-300:]!r}" if code else compared("", table=False)


def _spoil(case: str, folder: Path) -> None:
    from benchmarks.trust_rows.interruptible import make_read_only

    runs = folder / "runs"
    if case == "a run that is read-only":
        make_read_only(next(path for path in runs.glob("run/*") if path.is_dir() and not path.is_symlink()))
    elif case == "read-only from the start":
        make_read_only(runs)
    else:
        shutil.rmtree(runs)
        if case == "a link to nowhere":
            runs.symlink_to("/proc/nowhere/runs")
        else:
            runs.write_text("a file")


CAUSES = {
    **dict.fromkeys(("SIGKILL", "SIGSEGV", "SIGBUS", "exits"), "DataLoader worker "),
    "raises": "row 7 cannot be read",
    "raises-ours": "row 7 cannot be read",
    "misses": "rows/7.txt",
    "hangs": "timed out",
}


def worker_cases() -> list[str]:
    return [f"{fault} of {workers}" for fault in CAUSES for workers in (1, 2, 3)] + ["SIGINT twice of 2"]


def worker_trial(case: str, folder: Path) -> str:
    fault = case.split(maxsplit=1)[0]
    workers = case.rsplit(maxsplit=1)[-1]
    write_config()
    own = "hangs" if fault == "SIGINT" else fault
    faulty = [f"--data.num_workers={workers}", f"--data.fault={own}"]
    faulty += ["--data.timeout=2"] if fault == "hangs" else []
    log = folder / "log"
    start = time.monotonic()
    process = processes.start(program, *fit_words(*faulty), log=log)
    if fault == "SIGINT":
        time.sleep(2 * expected("")[2])
        for _ in range(2):
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.5)
        start = time.monotonic()
    code, said = ended(process, log)
    took = time.monotonic() - start
    if fault == "SIGINT":
        wrong = ""
        if "Traceback" in said:
            wrong = "a traceback"
        elif code != 130:
            wrong = f"it ended with {code}"
    elif fault == "raises":  # what is no error of ours is a bug of somebody's, and shows where
        wrong = f"it ended with {code}: {said[-300:]!r}" if code != 1 or CAUSES[fault] not in said else ""
    else:
        wrong = unhelpful(said, code, CAUSES[fault])
    if wrong:
        return wrong
    if took > SOON + 3 * expected("")[2]:
        return f"the cause was named after {took:.0f} s"
    wrong = spoilt(Path("runs"), {})
    if wrong:
        return wrong
    Path("mended").touch()
    code, said = ran(program, *fit_words(f"--data.num_workers={workers}", "--ckpt_path=last"))
    return f"mended, it ended with {code}: {said[-300:]!r}" if code else compared("", table=False)


def together_cases() -> list[str]:
    found = [f"{n} {kind}" for n in range(10) for kind in ("new", "last", "new and last", "killed and last")]
    return [*found, "three last"]


def together_trial(case: str, folder: Path) -> str:
    """Start two runs within half a second of each other."""
    write_config()
    kind = case.partition(" ")[2] or case
    if "last" in kind or "and" in kind:
        shutil.copytree(half() / "runs", folder / "runs", symlinks=True)
    known = {path.name for path in Path("runs/run").glob("*")} if Path("runs").exists() else set()
    words = {"new": fit_words(), "last": fit_words("--ckpt_path=last")}
    both = [words[one if one in words else "last"] for one in kind.split(" and ")]
    if len(both) == 1:
        both *= 3 if kind == "three last" else 2
    logs = [folder / f"log{i}" for i in range(len(both))]
    started = []
    for one, log in zip(both, logs, strict=True):
        started.append(processes.start(program, *one, log=log))
        time.sleep(random.Random(case).random() * 0.5)
    if kind.startswith("killed"):
        started[0].kill()
    ends = [ended(process, log) for process, log in zip(started, logs, strict=True)]
    for i, (code, said) in enumerate(ends):
        if kind.startswith("killed") and i == 0:
            continue
        if code:
            wrong = unhelpful(said, code, ("in use", "nothing is left to do"))  # where the other has ended
            if wrong:
                return wrong
    wrong = spoilt(Path("runs"), {})
    if wrong:
        return wrong
    whole, lines, _ = expected("")
    from benchmarks.trust_rows.interruptible import rows
    from tests.callbacks.resume_kit import equal

    folders = [path for path in Path("runs/run").glob("*") if path.is_dir() and not path.is_symlink()]
    over = [path for path in folders if (path / "last.ckpt").exists()]
    wanted = sum(code == 0 and "sample at step" in said for code, said in ends)  # others began at the other's end
    if len(over) < wanted:
        return f"{wanted} runs have ended well, in {len(over)} folders"
    # One that goes on from the other's newest checkpoint has the rows from there on; a validation's end a step.
    places = {row: (int(row[1]), row[0] == "val/loss") for row in lines}
    tails = [[row for row in lines if places[row] >= begin] for begin in {*places.values()}]
    for path in over:
        if not equal(trained(path / "last.ckpt"), whole):
            if kind.startswith("killed") or path.name in known:
                continue
            return f"{path.name}: what was trained differs"
        table = rows(path)
        if table not in tails:
            return f"{path.name}: rows {table}"
    return ""


PIECES = (
    Piece(
        6,
        "full-disks",
        "A disk that is full after so many pages or files, in a fit, an export and an average: previous files whole, "
        "one sentence, exit code 2 or none; with room again the fit goes on to the same bits",
        full_cases,
        full_trial,
        in_ci=int(can_mount()),
    ),
    Piece(
        6,
        "folders-gone",
        "A run's folder becomes read-only or vanishes at a named instant, or is no folder: one sentence, checkpoints "
        "whole, and mended it goes on to the same bits",
        gone_cases,
        gone_trial,
    ),
    Piece(
        6,
        "loader-workers",
        "A loader worker is killed, exits, raises, or hangs beyond its timeout: the cause within 10 s, and mended the "
        "fit goes on to the same bits",
        worker_cases,
        worker_trial,
    ),
    Piece(
        6,
        "two-runs",
        "Two fits begin at once in one folder, new or going on: each has a folder of its own, all checkpoints are "
        "whole, and both end with the right bits",
        together_cases,
        together_trial,
    ),
)
