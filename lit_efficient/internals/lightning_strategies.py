"""What a strategy does to processes, parameters and checkpoints, by names of classes and a few private attributes.

By name, because Lightning's classes exist twice, in lightning.pytorch and in pytorch_lightning, and to import none that
a run does not use. Checked with lightning 2.6.6.
"""

import importlib
import inspect
import traceback
from dataclasses import dataclass, replace
from typing import Any

from lit_efficient.errors import LitEfficientError

_REPLICATES = {"DDPStrategy"}
_FLATTENS = {"FSDPStrategy", "DeepSpeedStrategy"}  # the second of these is a subclass of DDPStrategy
_DTENSORS = {"ModelParallelStrategy"}
NEEDS_MESH = "configure_model, which needs the mesh of several processes"


@dataclass(frozen=True)
class Traits:
    """What a trainer's strategy does."""

    name: str  # the class that decides, for errors
    spawns: bool  # it spawns or forks processes, which have copies of the module: ``_MultiProcessingLauncher``
    replicates: bool  # each process holds all parameters and steps by itself between two gradients (DDP)
    dtensors: bool  # parameters are sharded one by one, as DTensors (FSDP2)
    flattens: bool  # parameters are joined into larger ones, or stepped as copies of them (FSDP1, DeepSpeed)
    recomputes: bool  # it recomputes activations by itself: FSDP's ``_activation_checkpointing_kwargs``
    # it writes sharded states into one file: ``ModelParallelStrategy._save_distributed_checkpoint``
    saves_one_file: bool
    shards_itself: bool  # it shards modules that have not done so, after ``configure_model``
    views: bool  # gradients are views of the buckets in which they travel
    stage: int = 3  # of what is sharded: 1 is states of the optimizer, 2 gradients, too, 3 all (DeepSpeed's names)

    @property
    def shards(self) -> bool:
        """No process holds all of each parameter."""
        return self.dtensors or self.flattens

    @property
    def is_zero(self) -> bool:
        """DeepSpeed, which leaves modules as they are, and gathers weights whenever one of them is called."""
        return self.name == "DeepSpeedStrategy"


def traits_of(strategy: Any) -> Traits:
    """The traits of a strategy of Lightning's or of a class derived from one."""
    names = [base.__name__ for base in type(strategy).__mro__]
    flattens = not _FLATTENS.isdisjoint(names)
    own = bool(getattr(strategy, "shards_itself", False))
    launchers = {base.__name__ for base in type(getattr(strategy, "launcher", None)).__mro__}
    return Traits(
        name=names[0] if own else next((name for name in names if name in _FLATTENS | _DTENSORS), names[0]),
        spawns="_MultiProcessingLauncher" in launchers,
        replicates=not flattens and not _REPLICATES.isdisjoint(names),
        dtensors=not _DTENSORS.isdisjoint(names),
        flattens=flattens,
        recomputes=bool(getattr(strategy, "_activation_checkpointing_kwargs", None)),
        saves_one_file=getattr(strategy, "_save_distributed_checkpoint", True) is False,
        shards_itself=own,
        views=bool(getattr(strategy, "gradients_are_views", False)),
    )


def is_parallel(strategy: Any) -> bool:
    """Whether a strategy is one of several processes, the others of which may not be there: ``ParallelStrategy``."""
    return any(base.__name__ == "ParallelStrategy" for base in type(strategy).__mro__)


def lacks_mesh(error: Any) -> bool:
    """Whether it came up in a ``configure_model`` that reads ``device_mesh``, which one process alone does not have."""
    codes = (
        [] if isinstance(error, LitEfficientError) else [f.f_code for f, _ in traceback.walk_tb(error.__traceback__)]
    )
    names = {name for code in codes for name in (*code.co_names, code.co_name)}
    return {"device_mesh", "configure_model"} <= names


def traits_named(given: Any) -> Traits:
    """The traits of the strategy that a config names: ``auto`` (DDP, where there are several devices), a short name of
    Lightning's, or a class path with its arguments.
    """
    from pydoc import locate

    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

    path = given.get("class_path") if isinstance(given, dict) else given
    if path in (None, "auto"):
        return traits_of(DDPStrategy.__new__(DDPStrategy))
    named = path in StrategyRegistry
    known: dict[str, Any] = StrategyRegistry[path] if named else {"strategy": locate(str(path))}
    kind: Any = known["strategy"]
    arguments = {name: one.default for name, one in inspect.signature(kind.__init__).parameters.items()}
    arguments |= known.get("init_params", {}) | (given.get("init_args") or {} if isinstance(given, dict) else {})
    stage = arguments.get("stage", 3)
    return replace(traits_of(kind.__new__(kind)), stage=stage if isinstance(stage, int) else 3)


def run_alone(trainer: Any) -> None:
    """Give a trainer of several processes a strategy of one: ``_accelerator_connector``, which holds its strategy."""
    strategy = trainer.strategy
    strategies = importlib.import_module(f"{_namespace(type(trainer))}.strategies")
    own = {"checkpoint_io": strategy.checkpoint_io, "precision_plugin": strategy.precision_plugin}
    device = strategy.parallel_devices[0]
    trainer._accelerator_connector.strategy = strategies.SingleDeviceStrategy(device, strategy.accelerator, **own)


def forget_first_backward(strategy: Any) -> None:
    """Let DDP's new static graph be flushed after its first backward pass, too, under manual optimization:
    ``DDPStrategy._pl_static_graph_delay_done``.
    """
    strategy._pl_static_graph_delay_done = False


def _namespace(kind: type) -> str:
    """Which of Lightning's two packages a class derives from."""
    names = [base.__module__ for base in kind.__mro__]
    return "pytorch_lightning" if any(name.startswith("pytorch_lightning.") for name in names) else "lightning.pytorch"
