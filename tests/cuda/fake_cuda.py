"""A CUDA device that is not there: its tensors lie in the CPU's memory, and each storage knows on which side it counts.

What goes wrong on a GPU alone, and needs none to be seen: tensors that were made on the wrong side or left there when
the rest moved, a CPU's generator asked for a GPU's numbers, NumPy reading a GPU's memory, draws from the GPU's own
global generator. Values are real, so that a run can be compared with the same run on the CPU.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda", 0)
_GENERATOR = torch.Generator  # the real one
_COMPLETE = "register_post_accumulate_grad_hook"
_ASKED = {torch.Tensor.device.__get__: DEVICE, torch.Tensor.is_cuda.__get__: True, torch.Tensor.is_cpu.__get__: False}
# What takes tensors of both sides; the result lies where the first one does.
_MIXES = {"copy_", "_foreach_copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "set_"}
# What torch.use_deterministic_algorithms names as having no deterministic kernel, as far as images and text meet it.
_ONE_ORDER = {"put_", "kthvalue", "nll_loss2d_forward", "max_unpool2d", "_adaptive_avg_pool2d_backward"}
_ONE_ORDER |= {"adaptive_max_pool2d_backward", "avg_pool3d_backward", "_ctc_loss_backward", "grid_sampler_2d_backward"}
_ONE_ORDER |= {f"reflection_pad{n}d_backward" for n in (1, 2, 3)}
_ONE_ORDER |= {f"upsample_{kind}_backward" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")}
_ONE_ORDER |= {f"_upsample_{kind}_aa_backward" for kind in ("bilinear2d", "bicubic2d")}


class _Side:
    """Where what is made now goes, if something says so, and the device's own global generator."""

    makes: bool | None = None
    has_float64 = True
    draws = _GENERATOR().manual_seed(0)

    @classmethod
    @contextlib.contextmanager
    def making(cls, cuda: bool | None) -> Iterator[None]:
        before, cls.makes = cls.makes, cuda
        try:
            yield
        finally:
            cls.makes = before


def on_cuda(tensor: Tensor) -> bool:
    """Whether a tensor counts as lying on the device."""
    with torch._C.DisableTorchFunction():
        if is_traceable_wrapper_subclass(tensor):  # it has no numbers of its own
            return any(on_cuda(getattr(tensor, key)) for key in tensor.__tensor_flatten__()[0])
        return getattr(tensor.untyped_storage(), "on_fake_cuda", False)


def _is_here(x: object) -> bool:
    """Whether it is a tensor of numbers that are here; a wrapper of such may take its device for the GPU."""
    return isinstance(x, Tensor) and (x.device.type == "cpu" or is_traceable_wrapper_subclass(x))


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cuda: bool) -> Tensor:
        ctx.cuda = cuda
        with _Side.making(cuda):
            return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Move.apply(gradients[0], not ctx.cuda), None


class _Functions(TorchFunctionMode):
    """What is asked of a tensor, and where factories and ``to`` put theirs."""

    def __torch_function__(self, f: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(f, "__name__", "")
        if name == "__get__" and f in _ASKED:
            return _ASKED[f] if on_cuda(args[0]) else f(*args)
        if name == "get_device" and on_cuda(args[0]):
            return 0
        if name in ("numpy", "__array__") and on_cuda(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        if name in ("to", "cpu", "cuda"):
            return _moved(f, name, args, kwargs)
        kwargs.pop("pin_memory", None)
        if name == "pin_memory":
            return args[0].clone()
        if name == "_parse_to":  # what a subclass's own ``to`` reads its arguments with
            return f(*args, **kwargs)
        target = None
        if kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
            if device.type == "cuda":
                kwargs["device"] = "cpu"
            target = device.type == "cuda"
        generator = kwargs.get("generator")
        if generator is not None:
            side = target if target is not None else any(on_cuda(x) for x in args if isinstance(x, Tensor))
            if side != (generator.device.type == "cuda"):
                found, expected = generator.device.type, "cuda" if side else "cpu"
                raise RuntimeError(f"Expected a '{expected}' device type for generator but found '{found}'")
        if name == "as_tensor" and isinstance(args[0], Tensor) and target is not None:
            return _moved(f, "to", (args[0], DEVICE if target else "cpu"), {"dtype": kwargs.get("dtype")})
        if name == "__deepcopy__":
            target = on_cuda(args[0])
        with _Side.making(target):
            return f(*args, **kwargs)


def _moved(f: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
    x, *rest = args
    copy, dtype, memory_format = kwargs.pop("copy", False), None, kwargs.pop("memory_format", None)
    target: Any = {"cpu": torch.device("cpu"), "cuda": DEVICE}.get(name)
    if name == "to":
        other = rest[0] if rest and isinstance(rest[0], Tensor) else kwargs.pop("other", None)
        if other is not None:
            target, dtype = DEVICE if on_cuda(other) else other.device, other.dtype
        else:
            rest = [value for value in rest if value is not None and not isinstance(value, bool)]
            kwargs = {key: value for key, value in kwargs.items() if value is not None and key != "non_blocking"}
            if rest or kwargs:
                target, dtype, _, _ = torch._C._nn._parse_to(*rest, **kwargs)
    if target is not None and target.type == "meta":
        return f(*args, **kwargs)
    options = {"copy": copy} if memory_format is None else {"copy": copy, "memory_format": memory_format}
    y = Tensor.to(x, x.dtype if dtype is None else dtype, **options)  # not a subclass's, which has asked
    here = on_cuda(x)
    there = here if target is None else target.type == "cuda"
    return y if here == there else _Move.apply(y, there)


def _whole_counts(f: Any, values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return a histogram in the type of ``values``: a GPU counts whole numbers, too, and the CPU only real ones."""
    return f(values.double(), *args, **kwargs).to(values.dtype)


class _Operations(TorchDispatchMode):
    """Every operation, those of the backward pass too: what it may take, and on which side its results lie."""

    def __torch_dispatch__(self, f: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            given = [x for x in tree_leaves((args, kwargs)) if _is_here(x)]
            sides = [on_cuda(x) for x in given]
            cuda = any(sides)
            name = f._schema.name.partition("::")[2]
            if name in _MIXES:
                cuda = bool(sides) and sides[0]
            elif cuda and any(x.dim() and not side for x, side in zip(given, sides, strict=True)):
                devices = [
                    f"{x.dtype} {list(x.shape)} on {('cpu', DEVICE)[s]}" for x, s in zip(given, sides, strict=True)
                ]
                raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {devices}")
            if cuda and torch.are_deterministic_algorithms_enabled():
                sums = name in ("cumsum", "histc") and given[0].is_floating_point()
                if sums or name in _ONE_ORDER or (name == "median" and f._overloadname == "dim"):
                    raise RuntimeError(f"{name}_cuda does not have a deterministic implementation")
            cuda = cuda if _Side.makes is None else _Side.makes
            before = {x.untyped_storage()._cdata for x in given} if name != "lift_fresh" else set()
            own = cuda and torch.Tag.nondeterministic_seeded in f.tags and kwargs.get("generator") is None
            with _device_draws() if own else contextlib.nullcontext():
                made = _whole_counts(f, *args, **kwargs) if cuda and name == "histc" else f(*args, **kwargs)
            for x in tree_leaves(made):
                if isinstance(x, Tensor) and x.device.type == "cpu" and x.untyped_storage()._cdata not in before:
                    x.untyped_storage().on_fake_cuda = cuda
                    if cuda and x.dtype == torch.float64 and not _Side.has_float64:
                        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
            return made


@contextlib.contextmanager
def _device_draws() -> Iterator[None]:
    cpu = torch.default_generator.get_state()
    torch.default_generator.set_state(_Side.draws.get_state())
    try:
        yield
    finally:
        _Side.draws.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(cpu)


class _GeneratorKind(type(_GENERATOR)):
    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, _GENERATOR)


class _Generator(_GENERATOR, metaclass=_GeneratorKind):
    on: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        made = super().__new__(cls)
        made.on = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:
        """As it was asked for."""
        return self.on


def _autocast(real: Any) -> Callable[..., None]:
    def start(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        real(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return start


def _of_cpu(real: Any) -> Callable[..., Any]:
    return lambda device_type="cuda": real("cpu" if device_type == "cuda" else device_type)


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    """What autograd calls from within an operation, which has switched off all that is asked there."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _Functions() if _get_current_function_mode() is None else contextlib.nullcontext():
            return function(*args, **kwargs)

    return call


def _hooked(real: Any) -> Callable[..., Any]:
    return lambda self, *hooks: real(self, *map(_asking, hooks))


def _nothing(*_: Any, **__: Any) -> None:
    pass


_PROPERTIES = types.SimpleNamespace(name="fake", major=8, minor=0, total_memory=2**34, multi_processor_count=1)
_STREAM = types.SimpleNamespace(
    device=DEVICE,
    is_capturing=lambda: False,
    **dict.fromkeys(("synchronize", "wait_stream", "wait_event", "record_event"), _nothing),
)


class _Stream(torch.Stream):  # a type, for annotations
    def __new__(cls, *_: Any, **__: Any) -> Any:
        return _STREAM


_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: "fake",
    "get_device_capability": lambda *_: (8, 0),
    "get_device_properties": lambda *_: _PROPERTIES,
    "is_bf16_supported": lambda *_, **__: True,
    "manual_seed": _Side.draws.manual_seed,
    "manual_seed_all": _Side.draws.manual_seed,
    "get_rng_state": lambda *_: _Side.draws.get_state(),
    "set_rng_state": lambda state, *_: _Side.draws.set_state(state),
    "get_rng_state_all": lambda: [_Side.draws.get_state()],
    "set_rng_state_all": lambda states: _Side.draws.set_state(states[0]),
    "device": contextlib.nullcontext,
    "stream": contextlib.nullcontext,
    "Stream": _Stream,
    "current_stream": lambda *_: _STREAM,
    "get_per_process_memory_fraction": lambda *_: 1.0,
    "set_per_process_memory_fraction": _nothing,
    **dict.fromkeys(
        ("set_device", "synchronize", "empty_cache", "init", "_lazy_init", "reset_peak_memory_stats"), _nothing
    ),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), lambda *_: 0),
}
_ACCELERATOR: dict[str, Any] = {
    "is_available": lambda: True,
    "current_accelerator": lambda *_, **__: torch.device("cuda"),
    "current_device_index": lambda: 0,
    "current_stream": lambda *_: _STREAM,
    "get_memory_info": lambda *_: (2**33, 2**34),
    "max_memory_allocated": lambda *_: 0,
    "memory_reserved": lambda *_: 0,
    **dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "synchronize"), _nothing),
}


@contextlib.contextmanager
def fake_cuda(float64: bool = True) -> Iterator[None]:
    """As if there were one GPU, for whoever asks within the block; ``float64=False``: with Metal's types of numbers."""
    changes = [partial(mock.patch.object, torch.cuda, key, value) for key, value in _CUDA.items()]
    changes += [partial(mock.patch.object, torch.accelerator, key, value) for key, value in _ACCELERATOR.items()]
    changes += [
        partial(mock.patch.object, torch, "Generator", _Generator),
        partial(mock.patch.object, saved_tensors_hooks, "__init__", _hooked(saved_tensors_hooks.__init__)),
        partial(mock.patch.object, torch.Tensor, "register_hook", _hooked(torch.Tensor.register_hook)),
        partial(mock.patch.object, torch.Tensor, _COMPLETE, _hooked(getattr(torch.Tensor, _COMPLETE))),
        partial(mock.patch.object, torch.autocast, "__init__", _autocast(torch.autocast.__init__)),
        partial(mock.patch.object, torch, "is_autocast_enabled", _of_cpu(torch.is_autocast_enabled)),
        partial(mock.patch.object, torch, "get_autocast_dtype", _of_cpu(torch.get_autocast_dtype)),
    ]
    changes.append(partial(mock.patch.object, torch.Tensor, "record_stream", _nothing))  # which takes real ones alone
    changes.append(partial(mock.patch.object, _Side, "has_float64", float64))
    _Side.draws.manual_seed(0)
    get_torch_obj_rule_map()  # the compiler's, once a process: of the real functions
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change())
        stack.enter_context(_Operations())
        stack.enter_context(_Functions())
        yield
