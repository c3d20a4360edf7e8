"""The ``meta`` device in the place of a GPU: each place where the host waits for the device is noted and answered.

A wait is a read of a device's value (``item``, ``bool``, ``tolist``, ``cpu``, a boolean index: how many rows is known
on the device alone) and a copy from the host that is not ``non_blocking``. A GPU is busy until the host has come to its
next wait; in between it works off a queue. What is read is answered by ones, and so masks by ``True``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import bitsandbytes.optim.optimizer
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

META = torch.device("meta")


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device == META


def _place() -> str:
    """The innermost line of the package, and, of others than torch, what lies inside it."""
    frame: FrameType | None = sys._getframe(2)
    inside = ""
    while frame is not None:
        folder, _, file = frame.f_code.co_filename.rpartition("/site-packages/")
        line = f":{frame.f_lineno} {frame.f_code.co_name}"
        if not folder and "/lit_efficient/" in file:
            return file.rpartition("/lit_efficient/")[2] + line + inside
        if folder and not inside and not file.startswith("torch/"):
            inside = f" -> {file}{line}"
        frame = frame.f_back
    return inside


class Waits(TorchDispatchMode):
    """Notes the waits of what runs in it, and lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def note(self, kind: str) -> None:
        self.places[f"{kind} at {_place()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        first = args[0] if args else None
        if name == "_local_scalar_dense" and _is_meta(first):
            self.note("a read")
            return True if first.dtype == torch.bool else 1.0 if first.is_floating_point() else 1
        if name == "_to_copy":
            return self._copied(func, first, kwargs)
        if name == "copy_" and first.device != args[1].device:
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if blocking:
                self.note("a copy to the host" if _is_meta(args[1]) else "a copy from the host")
            return first.fill_(1) if _is_meta(args[1]) else first
        if name in ("equal", "allclose") and any(map(_is_meta, args)):
            self.note("a comparison")
            return True
        if name in (
            "nonzero",
            "masked_select",
            "unique_consecutive",
            "_unique2",
            "unique_dim",
            "bincount",
        ) and _is_meta(first):
            self.note(name)
            if name == "nonzero":
                return first.new_empty((first.numel(), first.ndim), dtype=torch.int64)
            return first.new_empty(args[1].shape.numel()) if name == "masked_select" else func(*args, **kwargs)
        if name == "repeat_interleave" and _is_meta(first) and kwargs.get("output_size") is None:
            self.note(name)
            return first.new_empty(first.numel(), dtype=torch.int64)
        if name.endswith("index_put_") and args[2].numel() == 1 and not _is_meta(args[2]):
            return first  # a number behind a mask, which is filled in without counting
        if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index") and _is_meta(first):
            return func(first, self._indices(args[1]), *args[2:], **kwargs)
        return func(*args, **kwargs)

    def _copied(self, func: Any, source: Tensor, kwargs: dict[str, Any]) -> Any:
        wanted = torch.device(kwargs.get("device") or source.device)
        if wanted == source.device:
            return func(source, **kwargs)
        if not kwargs.get("non_blocking"):
            self.note("a copy to the host" if _is_meta(source) else "a copy from the host")
        if _is_meta(source):
            return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype, device=wanted)
        return func(source, **kwargs)

    def _indices(self, given: Any) -> list[Any]:
        """With indices in the place of masks, as a GPU makes them when it has counted what is true."""
        indices: list[Any] = []
        for index in given:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                self.note("a boolean index")
                indices += [torch.empty(index.numel(), dtype=torch.int64, device=META) for _ in range(index.ndim)]
            elif index is not None and index.device != META:
                self.note("an index from the host")
                indices.append(index.to(META, non_blocking=True))
            else:
                indices.append(index)
        return indices


class _Generator(torch.Generator):
    """One of the host, for a device that has none."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu" if torch.device(device) == META else device)


class _Autocast(torch.autocast):
    """The host's, for a device that has none."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *args, **kwargs)


@contextmanager
def standing_in(waits: Waits) -> Iterator[None]:
    """What no dispatch shows: tensors made of Python's numbers, generators of the device, and waits by name."""

    def made(make: Any) -> Any:
        def new(data: Any, *args: Any, **kwargs: Any) -> Tensor:
            result = make(data, *args, **kwargs)
            if _is_meta(result) and not isinstance(data, Tensor):
                waits.note("a copy from the host")
            return result

        return new

    def synchronize(*_: Any) -> None:
        waits.note("synchronize")

    def enabled(kind: str | None = None) -> bool:
        return own() if kind is None else own("cpu" if kind == "meta" else kind)

    own, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype
    with (
        mock.patch.object(torch, "tensor", made(torch.tensor)),
        mock.patch.object(torch, "as_tensor", made(torch.as_tensor)),
        mock.patch.object(torch, "Generator", _Generator),
        mock.patch.object(torch, "autocast", _Autocast),
        mock.patch.object(torch, "is_autocast_enabled", enabled),
        mock.patch.object(torch, "get_autocast_dtype", lambda kind: dtype_of("cpu" if kind == "meta" else kind)),
        mock.patch.object(bitsandbytes.optim.optimizer, "sync_gpu", synchronize),
        mock.patch.object(torch.cuda, "synchronize", synchronize),
        mock.patch.object(torch.accelerator, "synchronize", synchronize),
        waits,
    ):
        yield


class _Accelerator(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        """Take any."""


class MetaStrategy(SingleDeviceStrategy):
    """One device; what is built on the host moves to ``meta`` when a GPU's strategy moves it, and is watched then."""

    def __init__(self, watching: ExitStack) -> None:
        super().__init__(device=torch.device("cpu"), accelerator=_Accelerator())
        self.waits = Waits()
        self.batches: list[tuple[int, Counter[str]]] = []  # optimizer steps before each batch, and its waits
        self._watching = watching

    def model_to_device(self) -> None:
        self._root_device = META
        assert self.model is not None
        for module in self.model.modules():  # a GPU's tensor may take the place of the host's in them, this one may not
            for name, parameter in module.named_parameters(recurse=False):
                if type(parameter) is not nn.Parameter:
                    module._parameters[name] = parameter.to(META)
        super().model_to_device()
        self._watching.enter_context(standing_in(self.waits))

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """A batch begins."""
        self.waits.places = Counter()
        trainer: Any = self.lightning_module.trainer
        self.batches.append((trainer.global_step, self.waits.places))
        return super().batch_to_device(batch, device, dataloader_idx)

    def teardown(self) -> None:
        """Nothing is moved back."""
        self._root_device = torch.device("cpu")
