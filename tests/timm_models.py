"""timm's models without torchvision, which timm imports and its models never call.

The index holds no build of torchvision for the CPU build of torch, so that package has a stand-in while timm is
imported, and only then: every model is timm's own.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest


class _Names(type):
    """A class whose every attribute is its name: what stands for an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(ModuleType):
    """A module whose every name is a class; its submodules are made when they are imported."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


class _Finder:
    """Finds ``torchvision`` and everything below it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def import_timm() -> Any:
    """timm itself; the test is skipped where it is not installed (``pip install --no-deps timm``)."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed: pip install --no-deps timm==1.0.31")
    if importlib.util.find_spec("torchvision") is not None:
        import timm

        return timm
    finder = _Finder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        import timm
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    return timm
