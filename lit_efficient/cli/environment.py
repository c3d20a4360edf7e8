"""The environment of a run: versions, commit, devices, command line."""

import importlib.metadata
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import torch

import lit_efficient

PACKAGE = "lit-efficient"


def environment(device: torch.device, indices: Sequence[int], command: str) -> dict[str, object]:
    """Return what a run's folder records of where the run was made.

    Args:
        device: Kind of device.
        indices: Numbers of the devices.
        command: The command line, without secrets.

    Returns:
        Plain data.
    """
    return {
        "command": command,
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "lit_efficient": lit_efficient.__version__,
        "packages": _versions(),
        "commit": _commit(),
        "platform": platform.platform(),
        "devices": _devices(device, indices),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def _versions() -> dict[str, str]:
    """Return the versions of our dependencies and extras that are installed, and of CUDA if torch is built for it."""
    found = {}
    for name in sorted({re.split(r"[^\w.-]", requirement)[0] for requirement in _requirements()}):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that was not installed
        file = Path(lit_efficient.__file__).parent.parent / "pyproject.toml"
        if not file.is_file():
            return ["torch"]
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        names = list(project.get("dependencies", ["torch"]))
        for extra in project.get("optional-dependencies", {}).values():
            names += extra
        return names


def _commit() -> dict[str, object] | None:
    """Return the commit of the working directory, and whether tracked files differ from it; ``None`` outside of git."""
    try:
        # The settings of a repository may name programs that git starts. The repository may be of another origin, so
        # these programs are switched off.
        named = _git("config", "--show-scope", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$|^core\.")
        off = ["-c", "core.fsmonitor=false"]
        for line in named.splitlines():
            scope, _, name = line.partition("\t")
            if scope in ("local", "worktree") and name.startswith("filter."):
                off += ["-c", f"{name}="]
        text = _git(*off, "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    commit = ""
    dirty = False
    for line in text.splitlines():
        if line.startswith("# branch.oid"):
            commit = line.split()[-1]
        dirty = dirty or not line.startswith("#")
    return {"id": commit, "dirty": dirty}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=True).stdout  # noqa: S603, S607 (no shell, and words of our own)


def _devices(device: torch.device, indices: Sequence[int]) -> list[str]:
    if device.type == "cuda":
        return [torch.cuda.get_device_name(index) for index in indices]
    if device.type != "cpu":
        return [device.type for _ in indices]
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:  # not on Linux
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return [line.partition(":")[2].strip()]
    return [platform.processor() or platform.machine()]
