"""Each module of the benchmarks imports without side effects, so parts can share code and tests can call them."""

import importlib
import os
import signal
import sys
from pathlib import Path

from tests import processes

ROOT = Path(__file__).parent.parent
MODULES = [
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
]
SET_BY_LIBRARIES = {
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # Lightning
    "TORCHINDUCTOR_CACHE_DIR",  # torch's compiler
    "JSONARGPARSE_DEPRECATION_WARNINGS",  # the command line of this package
}


def _state() -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if name not in SET_BY_LIBRARIES}
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    return {"environment": environment, "folder": os.getcwd(), "sys.path": list(sys.path), "signals": handlers}


def _import_each() -> None:
    before = _state()
    for name in MODULES:
        importlib.import_module(name)
        changed = [part for part, value in _state().items() if value != before[part]]
        assert not changed, f"import {name} changes: {', '.join(changed)}"


def test_each_module_imports_and_changes_nothing_in_the_process(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    assert processes.run(_import_each, log=log) == 0, log.read_text()
