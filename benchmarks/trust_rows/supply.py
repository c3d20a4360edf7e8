"""Row 11: no allowed version of a dependency has a vulnerability of ``advisories.json``; imports have no effects."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from benchmarks.trust_rows import Piece
from tests.processes import ROOT

ADVISORIES = ROOT / "benchmarks" / "records" / "advisories.json"
FLOORS = ".ci/floors.txt"
_UNPINNED = ("pyyaml", "vllm")  # vllm pins another version of torch, so CI cannot install it
IMPORTS = {
    "lit_efficient": "import lit_efficient",
    "the command": "import lit_efficient.__main__",
    "help": "from lit_efficient.__main__ import main; main(['--help']); main(['techniques'])",
    "configs": "from lit_efficient.__main__ import main; main(['configs', '--json'])",
}


@functools.cache
def requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of pyproject.toml by name, including extras and build requirements."""
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = whole["project"]
    lines = [*project["dependencies"], *whole["build-system"]["requires"]]
    lines += [line for extra in project["optional-dependencies"].values() for line in extra]
    found: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, lines):
        found.setdefault(normal(requirement.name), []).append(requirement)
    return found


def pins(file: str) -> dict[str, Version]:
    """Return the versions in a file of ``NAME==VERSION`` lines."""
    lines = (ROOT / file).read_text("utf-8").splitlines()
    found = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {normal(name): Version(version.split()[0]) for name, _, version in found}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def listed() -> list[dict[str, Any]]:
    return json.loads(ADVISORIES.read_text("utf-8"))["advisories"]


def _cases() -> tuple[str, ...]:
    own = [f"known {name}" for name in requirements() if name != "lit-efficient"]
    holes = [f"hole {number} {one['package']} {one['affected']}" for number, one in enumerate(listed())]
    return (*own, *holes, *(f"import {name}" for name in IMPORTS), "date")


def trial(case: str, folder: Path) -> str:
    kind, _, rest = case.partition(" ")
    if kind == "hole":
        return _hole(listed()[int(rest.split()[0])])
    if kind == "import":
        return _import(IMPORTS[rest], folder)
    if kind == "known":
        return _known(rest)
    content = json.loads(ADVISORIES.read_text("utf-8"))
    unknown = {one["source"] for one in content["advisories"] + content["open"]} - set(content["sources"])
    return f"no such source: {unknown}" if unknown else ""


def _hole(one: dict[str, Any]) -> str:
    affected = SpecifierSet(one["affected"])
    name = normal(one["package"])
    for requirement in requirements().get(name, []):
        if not requirement.specifier:
            continue
        begins = [Version(part.version) for part in requirement.specifier if part.operator in (">=", "==")]
        edges = [Version(part.version) for part in affected if part.operator in (">=", "<=", "==")]
        bad = [version for version in begins if affected.contains(version)]
        if bad:
            return f"{requirement} allows {bad[0]}, which has {one['id']}"
        bad = [version for version in edges if requirement.specifier.contains(version)]
        if bad:
            return f"{requirement} allows {bad[0]}, which has {one['id']}"
    for file in ("constraints.txt", FLOORS):
        version = pins(file).get(name)
        if version is not None and affected.contains(version):
            return f"{file} has {name} {version}, which has {one['id']}"
    return ""


def _known(name: str) -> str:
    """Each has a floor, a version that CI tests, and a version in .ci/floors.txt that is its floor."""
    found = [one for one in requirements()[name] if one.specifier]
    if name.startswith("types-"):
        return ""
    if not found:
        return f"{name} has no floor"
    if name not in pins("constraints.txt") and name not in _UNPINNED:
        return f"{name} is not in constraints.txt"
    for file in ("constraints.txt", FLOORS):
        version = pins(file).get(name)
        if version is not None and not all(one.specifier.contains(version) for one in found):
            return f"{file} has {name} {version}, which pyproject.toml does not allow"
    return ""


_WATCH = """
import os, sys
sys.dont_write_bytecode = True
seen = []
def hook(event, args):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"):
        seen.append(f"{event}{args[:2]}")
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto"):
        seen.append(f"{event}{args[1:]}")
    if event == "open" and isinstance(args[0], (str, bytes)) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if os.fsdecode(args[0]) != "/dev/null":
            seen.append(f"it writes {args[0]}")
    if event in ("os.mkdir", "os.rename", "os.remove", "os.symlink"):
        seen.append(f"{event}{args[:1]}")
sys.addaudithook(hook)
"""


def _import(code: str, folder: Path) -> str:
    script = f"{_WATCH}\n{code}\nprint('seen:', seen[:3])"
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"it failed: {done.stderr[-300:]!r}"
    said = done.stdout.splitlines()[-1]
    left = [path.name for path in folder.iterdir()]
    if left:
        return f"{said}, left {left[:3]}"
    return "" if said == "seen: []" else said


PIECES = (
    Piece(
        11,
        "supply",
        "A hole that benchmarks/records/advisories.json knows, a dependency, or an import: no version that "
        "pyproject.toml, constraints.txt or .ci/floors.txt allow has the hole, each dependency has a floor and a pin, "
        "and importing starts no process, opens no connection and writes no file.",
        _cases,
        trial,
        in_ci=4,
    ),
)
