"""Training steps of a fit without its weights: the trainer's own loop runs on tensors with shapes but without values.

    parts of the fit -> fake weights -> Trainer.fit on fake batches -> memory by kind and FLOPs of the second step

The second step is the first one with optimizer states and with the gradients of an earlier step. A value that the step
reads is assumed. Callbacks that leave traces outside of the process are left out. Callbacks that fail without values
are left out with a note.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor, nn

from lit_efficient.application.ledger import reports_of
from lit_efficient.declaration import Declaration, Phase, format_bytes, held, in_order, overrides, techniques_of
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
from lit_efficient.mechanisms.adapters.quantized import float_count
from lit_efficient.mechanisms.flops import FlopMeter
from lit_efficient.mechanisms.moving import holds_images
from lit_efficient.mechanisms.trials.steps import leaves_traces, quiet
from lit_efficient.surgery import count
from lit_efficient.traits import Trait, has_trait

_STEPS = 2
_MANUAL_STEPS = 12  # of manual optimization, where a generator may step only once in five batches


@dataclass
class Traced:
    """Results of a few steps without values."""

    memory: StepMemory  # of the step after the first with the highest peak
    flops: int  # operations of a step after the first
    parameters: int  # number of parameters; codes count as the weights that they encode
    trainable: int  # number of parameters that an optimizer updates
    techniques: tuple[tuple[str, str], ...]  # name and report of each technique, in the order in which they act
    notes: list[str] = field(default_factory=list)  # assumptions
    at_most: str = ""  # reason why a real step may need less; empty if it needs as much
    at_least: str = ""  # reason why it may need more
    reported: str = ""  # part of the network that the reports of techniques describe; empty if they describe all of it


def trace(
    fit: Fit,
    make: Callable[[], Fit],
    batch: object,
    batches: int | None,
    mode: FakeTensorMode,
    block: int = 1,
    simulated: str | None = None,
) -> Traced:
    """Run two steps of a fit without values, or twelve of manual optimization.

    Args:
        fit: Parts of the fit: real, on the meta device, or fake tensors of ``mode``. Its data is prepared.
        make: Function that makes the fit again, to leave out a callback that fails.
        batch: A batch of tensors in any structure.
        batches: Number of batches in an epoch; ``None`` if it is unknown.
        mode: Mode of the fake tensors.
        block: Bytes to whose multiples sizes are rounded up.
        simulated: ``cuda`` makes CPU kernels keep the tensors that CUDA kernels keep.

    Raises:
        ConfigurationError: If the fit would be refused, or torch cannot trace it.
    """
    kernels = as_cuda if simulated == "cuda" else contextlib.nullcontext
    left_out: dict[str, str] = {}
    data = fit.data
    while True:
        fit.data = data
        fit.trainer.callbacks = [one for one in fit.trainer.callbacks if type(one).__name__ not in left_out]
        try:
            with kernels():
                traced = _trace(fit, batch, batches, mode, block)
            break
        except LitEfficientError:
            raise
        except Exception as error:
            # An error of the observer is one of this module, and each trace has an observer.
            others = [one for one in fit.trainer.callbacks if not isinstance(one, _Observer)]
            guilty = _callback_behind(error, others)
            # Models of images split tensors by values of the batch, and each fails in its own way.
            if guilty is None and (_is_limit_of_fakes(error) or holds_images(batch)):
                text = " ".join(str(error).split())[:100]
                raise ConfigurationError(
                    "plan: torch cannot trace this step without values (ragged nested tensors, or numbers of images, "
                    f"for example): {type(error).__name__}: {text}"
                ) from error
            if guilty is None:
                raise
            left_out[type(guilty).__name__] = str(error).strip().splitlines()[0][:100]
        fit = make()
    if left_out:
        traced.notes += [f"{name} did not take part: it needs values ({why})." for name, why in left_out.items()]
        techniques = [type(one).__name__ for one in techniques_of(make().trainer)]
        missing = [name for name in techniques if name in left_out]
        if missing:
            traced.at_least = f"{', '.join(missing)} did not take part"
    return traced


def _trace(fit: Fit, batch: object, batches: int | None, mode: FakeTensorMode, block: int) -> Traced:
    trainer = fit.trainer
    observer = _Observer(block, trainer.accumulate_grad_batches)
    sizes = [leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    stand_ins = _StandIns(max(_MOST_KNOWN, *sizes))
    # All batches of a step but the last are equal: two are traced, and the first counts several times.
    trainer.accumulate_grad_batches = min(2, observer.accumulated)
    # The plan is for data that suffices for two whole steps, also if the batches of this data are too few.
    trainer.limit_train_batches = 1.0
    if batches is not None:
        batches = max(batches, _STEPS * trainer.accumulate_grad_batches)
    fakes = _Fakes(mode, trainer.strategy.root_device)
    fakes.module(fit.module)
    loader = _Loader(fakes.tree(batch), batches)
    data: dict[str, object] = {"train_dataloaders": loader}
    # The data was prepared for the batch, and its other hooks may need real values.
    if fit.datamodule is not None:
        for name in ("prepare_data", "setup", "teardown"):
            setattr(fit.datamodule, name, does_nothing)
        fit.datamodule.train_dataloader = lambda: loader  # type: ignore[method-assign]
        data = {"datamodule": fit.datamodule}
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
    sparing = [type(one).__name__ for one in techniques_of(trainer) if Trait.TAKES_LESS_THAN_MEASURED in one.traits]
    if sparing:
        # Techniques that drop work at random, or by value, are planned with all of it.
        traced.at_most = f"it is assumed that {sparing[0]} leaves nothing out"
    elif stand_ins.chose_all:
        traced.at_most = "it is assumed that selections by value (a mask, nonzero) select all entries"
    return traced


def _silence(trainer: Any, observer: Callback, folder: str) -> None:
    """Remove from a trainer all parts that do not affect the memory of a step."""
    trainer.callbacks = [one for one in trainer.callbacks if _affects_steps(one)]
    for technique in techniques_of(trainer):
        technique.worst_case = True  # draw nothing at random that saves work
    trainer.callbacks.append(observer)
    trainer.loggers = [DummyLogger()] if trainer.loggers else []
    trainer.profiler = PassThroughProfiler()
    set_default_root_dir(trainer, folder)
    trainer.save_checkpoint = does_nothing
    trainer.strategy.teardown = does_nothing
    trainer.limit_val_batches = 0
    trainer.num_sanity_val_steps = 0
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_interval = 1.0  # a fraction needs the length of the data, which may be unknown


def _affects_steps(callback: Callback) -> bool:
    if has_trait(callback, Trait.TRIES_STEPS):
        return False
    # A technique may hold tensors in a step although it writes files.
    if isinstance(callback, Declaration) and (callback.phase is not None or overrides(callback, "describe")):
        return True
    return not leaves_traces(callback) and not isinstance(callback, ModelSummary)


class _Enough(Exception):
    """All steps are done."""


class _Observer(StepMeter):
    """Collects the results of the steps, and ends the fit after the last one.

    Args:
        block: As in :func:`trace`.
        accumulated: Batches of a step. At most two are traced, because the others are equal to the first.
    """

    def __init__(self, block: int, accumulated: int) -> None:
        super().__init__(block=block)
        self.accumulated = accumulated
        self.counter = FlopMeter()
        self.flops = [0]  # total after each batch
        self.sparse = False  # whether some gradient is sparse
        self.parameters = 0
        self.trainable = 0
        self.techniques: list[tuple[str, str]] = []
        self.notes: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        techniques = in_order(techniques_of(trainer))
        reports = reports_of(pl_module, techniques)
        stepped = [p for one in trainer.optimizers for group in one.param_groups for p in group["params"]]
        self.parameters = float_count(pl_module)
        self.trainable = count(p for p in stepped if p.requires_grad)
        for technique in techniques:
            name = type(technique).__name__
            summary = ""
            if name in reports:
                summary = reports[name].summary
            self.techniques.append((name, summary))
            if technique.phase is Phase.COMPILE:
                self.notes.append(f"{name}: the step is planned without compilation, which keeps other tensors.")
            if Trait.DRAWS_WORK in technique.traits:
                self.notes.append(f"{name}: the step is planned as if nothing were dropped at random.")
        for optimizer in trainer.optimizers:
            history = _history_of(optimizer)
            if history:
                trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
                size = 2 * history * sum(p.nbytes for p in trained)
                self.notes.append(
                    f"{type(optimizer).__name__}: its history grows with each step and counts in full: "
                    f"{format_bytes(size)} for {history} steps."
                )
        frozen = held(pl_module)
        later = [p for name, p in pl_module.named_parameters() if name in frozen]
        if later:
            self.notes.append(f"{count(later):,} parameters are frozen at the start. They are planned as frozen.")
        super().on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        # The plan holds for a run of any length.
        for optimizer in trainer.optimizers:
            _fill_history(optimizer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.flops.append(self.counter.sums.total())
        self.sparse |= any(p.grad is not None and p.grad.layout != torch.strided for p in pl_module.parameters())
        steps = _STEPS
        if not pl_module.automatic_optimization:
            steps = _MANUAL_STEPS
        if len(self.steps) == steps:
            raise _Enough

    def traced(self) -> Traced:
        """Return the results after the last step."""
        flops = self.flops[-1] - self.flops[-2]
        if self.accumulated > 1:
            flops += (self.accumulated - 1) * (self.flops[-2] - self.flops[-3])
        # Steps of manual optimization differ, for example by optimizer.
        if len(self.steps) > _STEPS:
            flops = (self.flops[-1] - self.flops[1]) // (len(self.flops) - 2)
            self.notes.append(
                f"Manual optimization: the peak is the highest of {len(self.steps)} steps, and FLOPs are their mean."
            )
        memory = max(self.steps[1:] or self.steps, key=lambda step: step.peak)
        traced = Traced(memory, flops, self.parameters, self.trainable, tuple(self.techniques), self.notes)
        if self.sparse:
            traced.at_least = "gradients are sparse, and their size depends on values"
        return traced


def _history_of(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of steps that an optimizer such as LBFGS remembers."""
    return max(group.get("history_size", 0) for group in optimizer.param_groups)


def _fill_history(optimizer: torch.optim.Optimizer) -> None:
    """Fill the history of an optimizer, if it has one and has made a step."""
    most = _history_of(optimizer)
    if not most:
        return
    for state in optimizer.state.values():
        for name in ("old_dirs", "old_stps"):
            state[name] += [state["d"].clone() for _ in range(most - len(state[name]))]
        state["ro"] += [state["d"].new_ones(()) for _ in range(most - len(state["ro"]))]


class _Loader:
    """Iterable of copies of one batch."""

    def __init__(self, batch: object, length: int | None) -> None:
        self.batch = batch
        self.length = length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("the length is unknown")
        return self.length

    def __iter__(self) -> Iterator[object]:
        while True:
            yield tree_map_only(Tensor, torch.clone, self.batch)


class _Fakes:
    """Fake tensors for real and meta tensors, one for each, on the device of the run."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode = mode
        self.device = device
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # the originals must live as long as their identities count

    def __call__(self, tensor: Tensor, device: torch.device) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._made:
            with self.mode, torch.no_grad():
                fake: Tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            # Parameters must stay parameters for optimizers and techniques.
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
            elif not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta):
                fake.known = tensor  # type: ignore[attr-defined]
            self._made[id(tensor)] = (tensor, fake)
        return self._made[id(tensor)][1]

    def tree(self, tree: object) -> Any:
        """Return a batch of fake tensors on the CPU, with known values. Models may select parts of images by values."""

        def known(tensor: Tensor) -> Tensor:
            fake = self(tensor, torch.device("cpu"))
            if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
                fake.known = tensor  # type: ignore[attr-defined]
            return fake

        return tree_map_only(Tensor, known, tree)

    def module(self, module: nn.Module) -> None:
        """Replace the tensors of a module by fake tensors, in place."""
        for part in module.modules():
            for tensors in tensor_tables(part):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = self(tensor, self.device)
            # Attributes may hold tensors too, such as the states of a metric.
            for name, value in vars(part).items():
                if isinstance(value, Tensor | dict | list) and any(_is_meta(leaf) for leaf in tree_leaves(value)):
                    vars(part)[name] = tree_map_only(Tensor, lambda tensor: self(tensor, self.device), value)


def _is_meta(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta and not isinstance(leaf, FakeTensor)


_MOST_KNOWN = 2**20  # elements of a tensor whose values are computed, if the batch has no larger one
_UNKNOWN = object()


class _StandIns(TorchDispatchMode):
    """Dispatch mode that follows known values, and answers for unknown values as if no error occurred.

    The values of a batch, and all results that depend on no tensor, are known, and so is every result of known values
    only, if it is not large. For other values, a selection by a condition selects all entries. A check whose truth
    means an error (such as "is NaN") is false, and any other check is true. A number is 1.
    """

    supports_higher_order_operators = True
    chose_all = False  # whether values would have selected some entries of several

    def __init__(self, most_known: int) -> None:
        super().__init__()
        self.most_known = most_known  # elements of a tensor whose values are computed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return func(*args)
        kwargs = kwargs or {}
        values = _UNKNOWN
        try:
            result = _SUPPORTED.get(func, func)(*args, **kwargs)
        except DataDependentOutputException:
            values = _values(func, args, kwargs)
            if values is _UNKNOWN:
                return _guess(func, args)
            return values
        except DynamicOutputShapeException:
            values = _values(func, args, kwargs)
            self.chose_all |= values is _UNKNOWN
            if values is _UNKNOWN:
                result = _all_entries(func, *args)
            else:
                result = tree_map_only(Tensor, lambda one: one.new_empty(one.shape), values)
        if values is _UNKNOWN and isinstance(func, Overload) and not self._is_large(result):
            values = _values(func, args, kwargs)
        if values is _UNKNOWN:
            _forget_written(func, args)
            if isinstance(result, FakeTensor) and result.dtype == torch.bool:
                result.means_error = _means_error(func, args)  # type: ignore[attr-defined]
        else:
            for fake, value in zip(tree_leaves(result), tree_leaves(values), strict=False):
                if isinstance(fake, FakeTensor) and isinstance(value, Tensor):
                    fake.known = value  # type: ignore[attr-defined]
        return result

    def _is_large(self, result: object) -> bool:
        return any(isinstance(one, Tensor) and one.numel() > self.most_known for one in tree_leaves(result))


def _values(func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """Return the result of an operator if all its inputs are known, else ``_UNKNOWN``."""
    if func is torch.ops.aten.rand.default:
        # Events with a probability below 1/2 do not occur.
        func = torch.ops.aten.full.default
        args = (args[0], 0.5)
        kwargs = {}
    elif torch.Tag.nondeterministic_seeded in func.tags or "empty" in base_name(func):
        return _UNKNOWN
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, FakeTensor) and not hasattr(leaf, "known"):
            return _UNKNOWN
    args, kwargs = tree_map_only(Tensor, lambda one: getattr(one, "known", one), (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "cpu"}
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
    with no_dispatch_modes():
        return func(*args, **kwargs)


def _grouped(*args: Any, **kwargs: object) -> Tensor:
    """Grouped matrix product, for which fake tensors support bfloat16 only."""
    half = tree_map_only(Tensor, lambda one: one.bfloat16() if one.is_floating_point() else one, args)
    product: Tensor = GROUPED_MM(*half, **kwargs)
    return product.to(args[0].dtype)


def _lstm(*args: Any) -> tuple[Tensor, ...]:
    """Layer of an LSTM with the workspace that it keeps, which fake tensors leave out."""
    *results, workspace = LSTM(*args)
    trains = args[-1]
    if trains:
        with no_dispatch_modes():
            size = lstm_workspace(*args)
        workspace = args[0].new_empty(size, dtype=torch.uint8)
    return (*results, workspace)


_SUPPORTED: dict[Any, Callable[..., Any]] = {GROUPED_MM: _grouped, LSTM: _lstm}


def _all_entries(func: Any, tensor: Any, indices: Any = ()) -> Tensor:
    """Return the result of an operator that selects entries by a condition, if the condition is true for all."""
    name = base_name(func)
    if name == "index":
        whole = []
        for one in indices:
            if one is not None and one.dtype == torch.bool:
                whole += [one.new_zeros(one.numel(), dtype=torch.int64)] * one.ndim
            else:
                whole.append(one)
        return func(tensor, whole)
    if name == "masked_select":
        return tensor.new_empty(torch.broadcast_shapes(tensor.shape, indices.shape).numel())
    if name != "nonzero":
        raise DynamicOutputShapeException(func)
    return tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64)


def _forget_written(func: Any, args: Any) -> None:
    if writes(func):
        for one in tree_leaves(args[:1]):
            if isinstance(one, FakeTensor):
                vars(one).pop("known", None)


def _guess(func: Any, args: Any) -> bool | float:
    if returns_bool(func) or args[0].dtype == torch.bool:
        return not getattr(args[0], "means_error", False)
    return 1.0 if args[0].dtype.is_floating_point else 1


def _means_error(func: Callable[..., object], args: tuple[object, ...]) -> bool:
    """True if the truth of an operator's result means an error, such as a number that is NaN or too large."""
    # A number differs from itself if it is NaN, and infinity is the usual error value.
    name = base_name(func)
    if name in ("ne", "eq") and not isinstance(args[1], Tensor):
        return name == "eq" and args[1] in (math.inf, -math.inf)
    if name in ("ne", "gt", "ge", "lt", "le", "isnan", "isinf"):
        return True
    before = any(getattr(one, "means_error", False) for one in args if isinstance(one, Tensor))
    return before != (name in ("logical_not", "bitwise_not"))


def _is_limit_of_fakes(error: BaseException) -> bool:
    """True if an error arose within torch's code for tensors without values, so that the step may be correct."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None:
        return False
    file = place.tb_frame.f_code.co_filename.replace("\\", "/")
    return "/torch/_subclasses/" in file or "/torch/nested/" in file


def _callback_behind(error: BaseException, callbacks: list[Callback]) -> Callback | None:
    """Return the callback in whose hook an error arose; ``None`` if it arose elsewhere."""
    guilty = None
    place = error.__traceback__
    while place is not None:
        owner = place.tb_frame.f_locals.get("self")
        guilty = next((one for one in callbacks if one is owner), guilty)
        place = place.tb_next
    return guilty
