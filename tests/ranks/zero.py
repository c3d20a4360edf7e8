"""ZeroStrategy on two gloo ranks of a CPU, for which DeepSpeed has an accelerator, and Lightning asks for a GPU."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lit_efficient import ZeroStrategy
from tests.ranks import isolation as documents
from tests.ranks import sharded


class ZeroOnCPU(ZeroStrategy):
    """Asks for no GPU, and compiles no kernel."""

    def __init__(self, stage: int, **arguments: Any) -> None:
        super().__init__(stage, **arguments)
        self._timeout = timedelta(seconds=60)
        assert self.config is not None
        if stage == 3:  # a toy's weights are small, and stay whole once they are gathered
            self.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # DeepSpeed asks for the number

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def gathered(self, module: Any) -> AbstractContextManager[Any]:
        """Whole weights, where the third stage has sharded them."""
        import deepspeed

        return deepspeed.zero.GatheredParameters([*module.parameters()], enabled=self.stage == 3)


ZeroOnCPU.__name__ = ZeroStrategy.__name__  # for the words of refusals


def stand_in(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Put a package with these functions in DeepSpeed's place, where strategies are made."""
    package: Any = types.ModuleType("deepspeed")
    package.__spec__ = ModuleSpec("deepspeed", None)
    package.__dict__.update(functions)
    logger = types.SimpleNamespace(setLevel=lambda level: None)
    package.utils = types.SimpleNamespace(logging=types.SimpleNamespace(logger=logger))
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.comm.torch", types.ModuleType("deepspeed.comm.torch"))
    for name in ("_DEEPSPEED_AVAILABLE", "_DEEPSPEED_GREATER_EQUAL_0_16"):
        monkeypatch.setattr(f"lightning.pytorch.strategies.deepspeed.{name}", True)


def techniques(names: Sequence[str], stage: int, **arguments: Any) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    sharded.techniques(names, partial(ZeroOnCPU, stage, **arguments))


def isolation() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    documents.asked(partial(ZeroOnCPU, 3))
