"""On what a run was made: versions, commit, devices, command line."""

import importlib.metadata
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import lit_efficient

PACKAGE = "lit-efficient"


def environment(device: torch.device, indices: Sequence[int], command: str) -> dict[str, Any]:
    """What a run's folder keeps of where it was made, as plain data; ``command`` has no secrets."""
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
    """Those of our dependencies and extras that are installed, and of CUDA, if torch was built for it."""
    found = {}
    for name in sorted({re.split(r"[^\w.-]", requirement)[0] for requirement in _requirements()}):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _requirements() -> list[str]:
    try:
        return importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that was not installed
        file = Path(lit_efficient.__file__).parent.parent / "pyproject.toml"
        project: Any = tomllib.loads(file.read_text("utf-8"))["project"] if file.is_file() else {}
        extras = project.get("optional-dependencies", {}).values()
        return [*project.get("dependencies", ["torch"]), *(name for extra in extras for name in extra)]


def _commit() -> dict[str, Any] | None:
    """Commit of the working directory, and whether files that it tracks differ from it; ``None`` outside of git."""
    try:
        # Programs that the settings of the repository name, which may be somebody else's, are not for us to start.
        named = _git("config", "--show-scope", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$|^core\.")
        own = (line.split("\t") for line in named.splitlines() if line.startswith(("local", "worktree")))
        off = [f"{name}=" for _, name in own if name.startswith("filter.")] + ["core.fsmonitor=false"]
        without = [word for name in off for word in ("-c", name)]
        text = _git(*without, "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    lines = text.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid")), "")
    return {"id": commit, "dirty": any(not line.startswith("#") for line in lines)}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=True).stdout  # noqa: S603, S607 (no shell, and words of our own)


def _devices(device: torch.device, indices: Sequence[int]) -> list[str]:
    if device.type == "cuda":
        return [torch.cuda.get_device_name(index) for index in indices]
    if device.type != "cpu":
        return [device.type for _ in indices]
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return [model or platform.processor() or platform.machine()]
