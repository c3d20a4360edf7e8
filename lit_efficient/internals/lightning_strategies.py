"""Properties of strategies: how they treat processes, parameters and checkpoints.

Strategies are recognised by the names of their classes and by a few private attributes. Lightning's classes exist
twice, in lightning.pytorch and in pytorch_lightning, and classes that a run does not use need not be imported. Checked
with lightning 2.6.6.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lit_efficient.errors import LitEfficientError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy

_REPLICATES = {"DDPStrategy"}
_FLATTENS = {"FSDPStrategy", "DeepSpeedStrategy"}  # the second of these is a subclass of DDPStrategy
_DTENSORS = {"ModelParallelStrategy"}
NEEDS_MESH = "configure_model, which needs the mesh of several processes"


@dataclass(frozen=True)
class Traits:
    """Properties of a trainer's strategy."""

    name: str  # class that determines the properties, for error messages
    spawns: bool  # spawns or forks processes with copies of the module: ``_MultiProcessingLauncher``
    replicates: bool  # each process holds and steps all parameters (DDP)
    dtensors: bool  # each parameter is sharded as a DTensor (FSDP2)
    flattens: bool  # the optimizer steps concatenations or copies of parameters (FSDP1, DeepSpeed)
    recomputes: bool  # recomputes activations itself: ``_activation_checkpointing_kwargs`` of FSDP
    saves_one_file: bool  # gathers sharded states in one file: ``ModelParallelStrategy._save_distributed_checkpoint``
    shards_itself: bool  # shards modules after ``configure_model`` if the module does not
    views: bool  # gradients are views of the buckets in which they are communicated
    stage: int = 3  # sharded: 1 optimizer states, 2 also gradients, 3 also parameters (the stages of DeepSpeed)

    @property
    def shards(self) -> bool:
        """True if no process holds whole parameters."""
        return self.dtensors or self.flattens

    @property
    def is_zero(self) -> bool:
        """True for DeepSpeed, which gathers the weights of a module whenever the module is called."""
        return self.name == "DeepSpeedStrategy"


class NamesUnused:
    """Mix-in of a module that names parameters without a gradient, for which DistributedDataParallel must not wait."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:  # read by DDP when it wraps the module
        return self.unused_parameters()

    def unused_parameters(self) -> list[str]:
        """Return the names of parameters on which no output depends."""
        raise NotImplementedError


def traits_of(strategy: object) -> Traits:
    """Return the properties of a strategy of Lightning or of a class derived from one."""
    names = [base.__name__ for base in type(strategy).__mro__]
    flattens = not _FLATTENS.isdisjoint(names)
    own = bool(getattr(strategy, "shards_itself", False))
    launchers = {base.__name__ for base in type(getattr(strategy, "launcher", None)).__mro__}
    sharding = [name for name in names if name in _FLATTENS | _DTENSORS]
    return Traits(
        name=names[0] if own or not sharding else sharding[0],
        spawns="_MultiProcessingLauncher" in launchers,
        replicates=not flattens and not _REPLICATES.isdisjoint(names),
        dtensors=not _DTENSORS.isdisjoint(names),
        flattens=flattens,
        recomputes=bool(getattr(strategy, "_activation_checkpointing_kwargs", None)),
        saves_one_file=getattr(strategy, "_save_distributed_checkpoint", True) is False,
        shards_itself=own,
        views=bool(getattr(strategy, "gradients_are_views", False)),
    )


def pickles(strategy: object) -> bool:
    """Return whether a strategy copies the trainer into its processes by pickle: ``_start_method`` of its launcher."""
    return getattr(getattr(strategy, "launcher", None), "_start_method", "fork") != "fork"


def data_rank(trainer: Trainer) -> int:
    """Return this process's rank among those with batches of their own. Processes of tensor parallelism share a
    batch.
    """
    return int((trainer.distributed_sampler_kwargs or {}).get("rank", trainer.global_rank))


def readers(trainer: Trainer) -> int:
    """Return the number of processes with tokens of their own. Processes that share layers, and so a batch, count
    once.
    """
    places = trainer.distributed_sampler_kwargs or {}
    slices = getattr(getattr(trainer.strategy, "parallel", None), "context", 1)
    return int(places.get("num_replicas", trainer.world_size)) * slices


def is_parallel(strategy: Strategy) -> bool:
    """Return whether a strategy supports several processes: ``ParallelStrategy``."""
    return any(base.__name__ == "ParallelStrategy" for base in type(strategy).__mro__)


def lacks_mesh(error: BaseException | None) -> bool:
    """Return whether an error arose in a ``configure_model`` that reads ``device_mesh``, which one process lacks."""
    if error is None or isinstance(error, LitEfficientError):
        return False
    names: set[str] = set()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names.update(frame.f_code.co_names, [frame.f_code.co_name])
    return {"device_mesh", "configure_model"} <= names


def traits_named(given: object) -> Traits:
    """Return the properties of the strategy in a config, without building it.

    Args:
        given: ``auto`` or ``None`` (DDP, for several devices), a short name of Lightning, or a mapping with
            ``class_path`` and ``init_args``.
    """
    from pydoc import locate

    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

    path = given
    own: dict[str, object] = {}
    if isinstance(given, dict):
        path = given.get("class_path")
        own = given.get("init_args") or {}
    if path in (None, "auto"):
        return traits_of(DDPStrategy.__new__(DDPStrategy))
    named = path in StrategyRegistry
    known: dict[str, Any]
    if named:
        known = StrategyRegistry[path]
    else:
        known = {"strategy": locate(str(path))}
    kind = known["strategy"]
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind.__init__).parameters.items()}
    stage = (defaults | known.get("init_params", {}) | own).get("stage", 3)
    return replace(traits_of(kind.__new__(kind)), stage=stage if isinstance(stage, int) else 3)


def run_alone(trainer: Trainer) -> None:
    """Replace the strategy of a trainer by one for a single process: ``_accelerator_connector``."""
    strategy: Any = trainer.strategy
    strategies = importlib.import_module(f"{_namespace(type(trainer))}.strategies")
    own = {"checkpoint_io": strategy.checkpoint_io, "precision_plugin": strategy.precision_plugin}
    device = strategy.parallel_devices[0]
    trainer._accelerator_connector.strategy = strategies.SingleDeviceStrategy(device, strategy.accelerator, **own)


def forget_first_backward(strategy: Any) -> None:
    """Make DDP flush a new static graph after its first backward pass under manual optimization.

    ``DDPStrategy._pl_static_graph_delay_done``.
    """
    strategy._pl_static_graph_delay_done = False


def _namespace(kind: type) -> str:
    """Return which of Lightning's two packages a class derives from."""
    names = [base.__module__ for base in kind.__mro__]
    if any(name.startswith("pytorch_lightning.") for name in names):
        return "pytorch_lightning"
    return "lightning.pytorch"
