"""Training steps of a fit without its weights: the trainer's own loop over tensors that have a shape and no values.

    parts of the fit -> fake weights -> Trainer.fit on fake batches -> memory by kind and FLOPs of the second step

The second step is the first that has the optimizer's states and the gradients of the one before. A value that is read
is assumed. Callbacks that leave traces outside the process do not take part, nor do those that fail for want of
values, which is noted.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn

from lit_efficient.application import reports_of
from lit_efficient.declaration import Declaration, Phase, held, in_order, overrides, techniques_of
from lit_efficient.errors import ConfigurationError, LitEfficientError
from lit_efficient.evidence.fits import Fit
from lit_efficient.evidence.memory_kinds import StepMemory, StepMeter
from lit_efficient.internals.lightning_trainer import set_default_root_dir
from lit_efficient.internals.torch_as_cuda import as_cuda
from lit_efficient.internals.torch_dispatch import ASKS_DEVICE, TorchDispatchMode, no_dispatch_modes
from lit_efficient.internals.torch_fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    forget_cached_fakes,
    like_real_ones,
)
from lit_efficient.internals.torch_modules import tensor_tables
from lit_efficient.internals.torch_operators import (
    GROUPED_MM,
    LSTM,
    Overload,
    base_name,
    lstm_workspace,
    returns_bool,
    writes,
)
from lit_efficient.internals.torch_trees import tree_leaves, tree_map_only
from lit_efficient.internals.wraps import does_nothing
from lit_efficient.mechanisms.flops import FlopMeter
from lit_efficient.mechanisms.trials.memory import format_bytes
from lit_efficient.mechanisms.trials.steps import leaves_traces, quiet
from lit_efficient.surgery import count

_STEPS = 2
_BY_HAND = 12  # of manual optimization, where a generator may step once in five batches


@dataclass
class Traced:
    """What a few steps without values have shown."""

    memory: StepMemory  # of the largest one behind the first
    flops: int  # of one behind the first
    parameters: int  # number of elements of the network's parameters
    trainable: int  # those that the optimizers step
    techniques: tuple[tuple[str, str], ...]  # names in the order in which they act, each with what it touched
    notes: list[str] = field(default_factory=list)  # what was assumed
    at_most: str = ""  # why a real step may take less; empty: it takes as much
    at_least: str = ""  # why it may take more


def trace(
    fit: Fit,
    make: Callable[[], Fit],
    batch: Any,
    batches: int | None,
    mode: FakeTensorMode,
    block: int = 1,
    stands_for: str | None = None,
) -> Traced:
    """Run two steps of a fit without values, of manual optimization a dozen.

    The fit's parts are real, on the meta device or fakes of ``mode``, and its data is prepared; ``make`` makes it anew,
    where a callback of it cannot take part. The batch holds tensors of any kind, in any structure; an epoch has
    ``batches``, if that is known. Sizes are rounded up to ``block``
    bytes. With ``stands_for`` ``cuda`` the CPU's kernels keep what CUDA's keep.
    """
    kernels = as_cuda if stands_for == "cuda" else contextlib.nullcontext
    left_out: dict[str, str] = {}
    data = fit.data
    while True:
        fit.data = data
        fit.trainer.callbacks = [one for one in fit.trainer.callbacks if type(one).__name__ not in left_out]
        try:
            with kernels():
                traced = _trace(fit, batch, batches, mode, block)
        except Exception as error:
            guilty = _callback_behind(error, fit.trainer.callbacks)
            if isinstance(error, LitEfficientError):
                raise
            if guilty is None and _unknown_to_fakes(error):
                said = " ".join(str(error).split())[:100]
                raise ConfigurationError(
                    "plan: torch cannot trace this step without values (ragged nested tensors, for example): "
                    f"{type(error).__name__}: {said}"
                ) from error
            if guilty is None:
                raise
            left_out[type(guilty).__name__] = str(error).strip().splitlines()[0][:100]
            fit = make()
            continue
        traced.notes += [f"{name} did not take part: it needs values ({why})." for name, why in left_out.items()]
        missing = [type(one).__name__ for one in techniques_of(make().trainer)] if left_out else []
        if names := ", ".join(name for name in missing if name in left_out):
            traced.at_least = f"{names} did not take part"
        return traced


def _trace(fit: Fit, batch: Any, batches: int | None, mode: FakeTensorMode, block: int = 1) -> Traced:
    observer, stand_ins = _Observer(block=block), _StandIns()
    trainer = fit.trainer
    observer.accumulated = trainer.accumulate_grad_batches
    trainer.accumulate_grad_batches = min(2, observer.accumulated)
    device = trainer.strategy.root_device
    faked = _Fakes(mode, device)
    faked.module(fit.module)
    loader = _Loader(faked.tree(batch), batches)
    if fit.datamodule is not None:
        for name in ("prepare_data", "setup", "teardown"):
            setattr(fit.datamodule, name, does_nothing)
        fit.datamodule.train_dataloader = lambda: loader
        data: dict[str, Any] = {"datamodule": fit.datamodule}
    else:
        data = {"train_dataloaders": loader}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.suppress(_Enough),
        torch.compiler.set_stance("force_eager"),
    ):
        _silence(trainer, observer, folder)
        try:
            with quiet(warns=False), like_real_ones(), mode, stand_ins, observer.counter:
                trainer.fit(fit.module, **data)
        finally:
            forget_cached_fakes()
    traced = observer.traced()
    sparing = [type(one).__name__ for one in techniques_of(trainer) if one.spares]
    if stand_ins.chose_all or sparing:
        what = f"what {sparing[0]} leaves out is" if sparing else "entries that values choose (a mask, nonzero) are all"
        traced.at_most = f"{what} taken"
    return traced


def _silence(trainer: Any, observer: Any, folder: str) -> None:
    """Leave only what takes part in steps."""
    trainer.callbacks = [one for one in trainer.callbacks if _takes_part(one)]
    for technique in techniques_of(trainer):
        technique.worst_case = True
    trainer.callbacks.append(observer)
    trainer.loggers = [DummyLogger()] if trainer.loggers else []
    trainer.profiler = PassThroughProfiler()
    set_default_root_dir(trainer, folder)
    trainer.save_checkpoint = trainer.strategy.teardown = does_nothing
    trainer.limit_val_batches = trainer.num_sanity_val_steps = 0


def _takes_part(callback: Any) -> bool:
    """Whether a callback has a part in what a step holds: techniques, though they write what they hold to files."""
    if getattr(callback, "tries_steps", False):
        return False
    if isinstance(callback, Declaration) and (callback.phase is not None or overrides(callback, "describe")):
        return True
    return not leaves_traces(callback) and not isinstance(callback, ModelSummary)


class _Enough(Exception):
    """All steps are done."""


class _Observer(StepMeter):
    """Keeps what is to be known of the steps, and ends the fit after the last one."""

    def __init__(self, block: int) -> None:
        super().__init__(block=block)
        self.counter = FlopMeter()
        self.flops = [0]  # after each batch
        self.accumulated = 1  # batches a step, of which no more than two are traced: the others are like the first
        self.known: dict[str, Any] = {}
        self.sparse = False  # whether some gradient is

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        techniques = techniques_of(trainer)
        reports = reports_of(pl_module, techniques)
        names = [type(one).__name__ for one in in_order(techniques)]
        stepped = [p for one in trainer.optimizers for group in one.param_groups for p in group["params"]]
        self.known = {
            "parameters": count(pl_module.parameters()),
            "trainable": count(p for p in stepped if p.requires_grad),
            "techniques": tuple((name, reports[name].summary if name in reports else "") for name in names),
            "notes": [note for one in in_order(techniques) for note in _notes(one)] + list(_unseen(trainer)),
        }
        if later := [p for name, p in pl_module.named_parameters() if name in held(pl_module)]:
            self.known["notes"].append(f"{count(later):,} parameters are frozen at first, and are taken as frozen.")
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for optimizer in trainer.optimizers:
            _remember(optimizer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.flops.append(self.counter.sums.total())
        self.sparse |= any(p.grad is not None and p.grad.layout != torch.strided for p in pl_module.parameters())
        if len(self.steps) == (_STEPS if pl_module.automatic_optimization else _BY_HAND):
            raise _Enough

    def traced(self) -> Traced:
        last = self.flops[-1] - self.flops[-2]
        flops = last if self.accumulated == 1 else last + (self.accumulated - 1) * (self.flops[-2] - self.flops[-3])
        if len(self.steps) > _STEPS:
            flops = (self.flops[-1] - self.flops[1]) // (len(self.flops) - 2)
            self.known["notes"].append(f"Optimized by hand: the largest of {len(self.steps)} steps, and mean FLOPs.")
        traced = Traced(max(self.steps[1:] or self.steps, key=lambda step: step.peak), flops, **self.known)
        traced.at_least = "gradients are sparse, and have no size without values" if self.sparse else ""
        return traced


def _notes(technique: Any) -> Iterator[str]:
    name = type(technique).__name__
    if technique.phase is Phase.COMPILE:
        yield f"{name}: what the compiler keeps or computes anew is its own; the step is taken as it is without it."
    if technique.draws_work:
        yield f"{name}: the step is one in which nothing is left out by chance."


def _unseen(trainer: Any) -> Iterator[str]:
    """What a step without values cannot show."""
    for optimizer in trainer.optimizers:
        if most := _longest(optimizer):
            size = 2 * sum(p.nbytes for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
            yield (
                f"{type(optimizer).__name__}: its history, which grows step by step, is counted as it is in the end: "
                f"{format_bytes(most * size)} of {most} steps."
            )


def _longest(optimizer: Any) -> int:
    """Steps that an optimizer such as LBFGS remembers."""
    return max((group.get("history_size", 0) for group in optimizer.param_groups), default=0)


def _remember(optimizer: Any) -> None:
    """Fill an optimizer's history up to its end, once it has begun."""
    for state in optimizer.state.values() if (most := _longest(optimizer)) else ():
        for name in ("old_dirs", "old_stps"):
            state[name] += [state["d"].clone() for _ in range(most - len(state[name]))]
        state["ro"] += [state["d"].new_ones(()) for _ in range(most - len(state["ro"]))]


class _Loader:
    """Yields copies of one batch."""

    def __init__(self, batch: Any, length: int | None) -> None:
        self.batch, self.length = batch, length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("nobody knows its length")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield tree_map_only(Tensor, torch.clone, self.batch)


class _Fakes:
    """Fakes of real and of meta tensors, on the device that a run would have them on: one for each."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode, self.device = mode, device
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor, device: torch.device) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._made:
            with self.mode, torch.no_grad():
                fake: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            elif not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta):
                fake.known = tensor  # type: ignore[attr-defined]
            self._made[id(tensor)] = (tensor, fake)
        return self._made[id(tensor)][1]

    def tree(self, tree: Any) -> Any:
        """A batch, on the CPU."""
        return tree_map_only(Tensor, lambda tensor: self(tensor, torch.device("cpu")), tree)

    def module(self, module: nn.Module) -> None:
        """Put fakes into a module, in place."""
        for part in module.modules():
            for tensors in tensor_tables(part):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = self(tensor, self.device)
            for name, value in vars(part).items():  # such as the states of a metric
                if isinstance(value, Tensor | dict | list) and any(_is_meta(leaf) for leaf in tree_leaves(value)):
                    vars(part)[name] = tree_map_only(Tensor, lambda tensor: self(tensor, self.device), value)


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta and not isinstance(leaf, FakeTensor)


_MOST_KNOWN = 2**20  # elements of a tensor whose values are followed
_UNKNOWN = object()


class _StandIns(TorchDispatchMode):
    """Follows what is known, and answers for values that are not there as if all were well.

    Known are the whole numbers of a batch, and what is made without a tensor; so is all that is computed of these
    alone. Of the rest something is true of all entries where those are taken that it is true of; what says that all is
    well is true, what says otherwise is not, and a number is 1.
    """

    supports_higher_order_operators = True
    chose_all = False  # whether values would have chosen some entries of several

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return func(*args)
        kwargs = kwargs or {}
        values = _UNKNOWN
        try:
            result = _CALLED.get(func, func)(*args, **kwargs)
        except DataDependentOutputException:
            values = _values(func, args, kwargs)
            return _guess(func, args) if values is _UNKNOWN else values
        except DynamicOutputShapeException:
            values = _values(func, args, kwargs)
            self.chose_all |= values is _UNKNOWN
            result = values.new_empty(values.shape) if isinstance(values, Tensor) else _largest(func, *args)
        if isinstance(func, Overload) and not _is_large(result):
            values = _values(func, args, kwargs) if values is _UNKNOWN else values
        if values is _UNKNOWN:
            _forget_written(func, args)
        for fake, value in zip(tree_leaves(result), tree_leaves(values), strict=False):
            if isinstance(fake, FakeTensor) and isinstance(value, Tensor):
                fake.known = value  # type: ignore[attr-defined]
        if values is _UNKNOWN and isinstance(result, FakeTensor) and result.dtype == torch.bool:
            result.says_wrong = _says_wrong(func, args)  # type: ignore[attr-defined]
        return result


def _values(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives where all that it takes is known."""
    taken = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if func is torch.ops.aten.rand.default:  # what happens with a probability below 1/2 does not happen
        func, args, kwargs = torch.ops.aten.full.default, (args[0], 0.5), {}
    elif torch.Tag.nondeterministic_seeded in func.tags or "empty" in base_name(func):
        return _UNKNOWN
    if not all(hasattr(one, "known") or not isinstance(one, FakeTensor) for one in taken):
        return _UNKNOWN
    args, kwargs = tree_map_only(Tensor, lambda one: getattr(one, "known", one), (args, kwargs))
    here = {"device": "cpu", "pin_memory": False} if kwargs.get("device") is not None else {}
    with no_dispatch_modes():
        return func(*args, **{**kwargs, **{key: here[key] for key in here if key in kwargs}})


def _grouped(*args: Any, **kwargs: Any) -> Tensor:
    """Products of groups of rows, of which fakes know those in bfloat16 alone."""
    half = tree_map_only(Tensor, lambda one: one.bfloat16() if one.is_floating_point() else one, args)
    product: Tensor = GROUPED_MM(*half, **kwargs)
    return product.to(args[0].dtype)


def _lstm(*args: Any) -> tuple[Tensor, ...]:
    """A layer of an LSTM, with what it keeps, of which fakes know nothing."""
    *results, workspace = LSTM(*args)
    if args[-1]:  # it trains
        with no_dispatch_modes():
            size = lstm_workspace(*args)
        workspace = args[0].new_empty(size, dtype=torch.uint8)
    return (*results, workspace)


_CALLED: dict[Any, Callable[..., Any]] = {GROUPED_MM: _grouped, LSTM: _lstm}


def _largest(func: Any, tensor: Any, indices: Any = ()) -> Tensor:
    """What an operator gives that takes those entries of which something is true, where it is true of all."""
    name = base_name(func)
    if name == "index":
        whole = [
            [one.new_zeros(one.numel(), dtype=torch.int64)] * one.ndim
            if one is not None and one.dtype == torch.bool
            else [one]
            for one in indices
        ]
        return func(tensor, [one for each in whole for one in each])
    if name == "masked_select":
        return tensor.new_empty(torch.broadcast_shapes(tensor.shape, indices.shape).numel())
    if name != "nonzero":
        raise DynamicOutputShapeException(func)
    return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)


def _is_large(result: Any) -> bool:
    return any(isinstance(one, Tensor) and one.numel() > _MOST_KNOWN for one in tree_leaves(result))


def _forget_written(func: Any, args: Any) -> None:
    for one in tree_leaves(args[:1]) if writes(func) else ():
        vars(one).pop("known", None) if isinstance(one, FakeTensor) else None


def _guess(func: Any, args: Any) -> bool | float:
    dtype = torch.bool if returns_bool(func) else args[0].dtype
    if dtype == torch.bool:
        return not getattr(args[0], "says_wrong", False)
    return 1.0 if dtype.is_floating_point else 1


def _says_wrong(func: Any, args: Any) -> bool:
    """Whether what is true of a number, if an operator says so, is what one fears: that it is no number, or large."""
    name = base_name(func)
    if name in ("ne", "eq") and not isinstance(args[1], Tensor):
        return name == "eq" and args[1] in (math.inf, -math.inf)
    if name in ("ne", "gt", "ge", "lt", "le", "isnan", "isinf"):
        return True
    before = any(getattr(one, "says_wrong", False) for one in args if isinstance(one, Tensor))
    return before != (name in ("logical_not", "bitwise_not"))


def _unknown_to_fakes(error: BaseException) -> bool:
    """Whether an error arose within torch's tensors without values, and is no fault of the step's."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    file = place.tb_frame.f_code.co_filename.replace("\\", "/") if place is not None else ""
    return "/torch/_subclasses/" in file or "/torch/nested/" in file


def _callback_behind(error: BaseException, callbacks: list[Any]) -> Any:
    """The callback in whose hook an error arose."""
    guilty, place = None, error.__traceback__
    while place is not None:
        owner = place.tb_frame.f_locals.get("self")
        guilty = next((one for one in callbacks if one is owner), guilty)
        place = place.tb_next
    return guilty
