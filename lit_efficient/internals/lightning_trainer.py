"""Private parts of a trainer, the link from a module to it, and the base classes that a standalone trainer asks for.

Checked with lightning 2.6.6, in both of its namespaces, and with the standalone package ``pytorch_lightning`` 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.wraps import unwrap_method, wrap_method

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    class StandaloneCallback:
        """``pytorch_lightning.Callback``, or an empty class."""

    class StandalonePrecision:
        """``pytorch_lightning.plugins.precision.Precision``, or an empty class."""

else:
    # The standalone package is a copy of ``lightning.pytorch`` with separate classes. Its trainer calls hooks by name,
    # but requires instances of its own classes in two places: a callback that is passed without a list must be a
    # ``Callback``, and a precision plugin must be a ``Precision``. So its classes are bases of ours if it is installed,
    # whichever of the two packages is imported first. Importing it takes 0.1 s, compared with 4 s for Lightning.
    try:
        from pytorch_lightning import Callback as StandaloneCallback
        from pytorch_lightning.plugins.precision import Precision as StandalonePrecision
    except Exception:  # not installed, or too old for this torch: then it has no trainer either

        class StandaloneCallback:
            """Empty class that replaces the missing one."""

        StandalonePrecision = StandaloneCallback


class TrainerOnly:
    """Mix-in of callbacks of a Trainer. Fabric calls ``on_after_setup`` of its callbacks, and no hook of a Trainer."""

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Raise an error, because the callback would do nothing."""
        raise refuse_fabric(self)


def refuse_fabric(part: object) -> ConfigurationError:
    """Return the error for a part of a Trainer that is given to Fabric."""
    name = type(part).__name__
    return ConfigurationError(
        f"{name} is a part of a Trainer, and would do nothing in Fabric, whose loop is your own. Call "
        "lit_efficient.apply(module, techniques) before fabric.setup for techniques that change the network, build "
        f"its optimizers and schedulers as those of torch, and leave {name} out, as in examples/fabric_loop.py"
    )


class AskedEarly(TrainerOnly):
    """Mix-in of callbacks whose ``refuse`` runs before data is prepared. ``setup`` runs after it.

    Trainers assign the module's ``log`` to each callback at that time, in every run
    (``_attach_model_logging_functions``).
    """

    @property
    def log(self) -> Any:
        """The ``log`` method of the module, during a run."""
        return self.__dict__["log"]

    @log.setter
    def log(self, function: Callable[..., object]) -> None:
        self.__dict__["log"] = function
        module: Any = getattr(function, "__self__", None)
        if trainer_of(module) is not None:
            self.refuse(trainer_of(module), module)

    def refuse(self, trainer: Trainer, module: LightningModule) -> None:
        """Raise an error if the callback does not support this trainer and module."""
        raise NotImplementedError


def trainer_of(module: nn.Module) -> Any:
    """Return the trainer of a module, or ``None``. ``module.trainer`` would raise an error: ``_trainer``."""
    return getattr(module, "_trainer", None)


def hook_of(module: LightningModule) -> str:
    """Return the name of the hook that Lightning calls now, or an empty string: ``_current_fx_name``."""
    return getattr(module, "_current_fx_name", None) or ""


def set_trainer(module: LightningModule, trainer: Trainer) -> None:
    """Set the trainer of a module, which may be of the other namespace: ``_trainer``."""
    module.__dict__["_trainer"] = trainer


def signal_connector(trainer: Trainer) -> Any:
    """Return the object that installs Lightning's signal handlers: ``_signal_connector``."""
    return trainer._signal_connector


def original_handlers(trainer: Trainer) -> dict[int, Any]:
    """Return the handlers that Lightning restores after a run: ``_signal_connector._original_handlers``."""
    return trainer._signal_connector._original_handlers


def answer_sigterm(trainer: Trainer, function: Callable[..., Any]) -> None:
    """Replace Lightning's handler of SIGTERM, except under automatic requeueing of SLURM.

    ``_signal_connector._sigterm_notifier_fn``.

    Args:
        trainer: The trainer.
        function: Called as ``function(connector, number, frame)``.
    """
    strategy: Any = trainer.strategy
    if not getattr(strategy.cluster_environment, "auto_requeue", False):
        wrap_method(trainer._signal_connector, "_sigterm_notifier_fn", function)


def leave_sigterm(trainer: Trainer, function: Callable[..., object]) -> None:
    """Restore Lightning's handler of SIGTERM for its next run."""
    unwrap_method(trainer._signal_connector, "_sigterm_notifier_fn", function)


def logger_connector(trainer: Trainer) -> Any:
    """Return the object that holds the logged metrics: ``_logger_connector``."""
    return trainer._logger_connector


def has_validation_data(trainer: Trainer) -> bool:
    """Return whether a fit has a validation step and a loader for it: ``val_loop._data_source``."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    own = trainer.lightning_module.validation_step.__module__
    return loop._data_source.is_defined() and not own.startswith(("lightning.", "pytorch_lightning."))


def log_step(trainer: Trainer) -> None:
    """Send the metrics of the step to the loggers now. Lightning does so after the last hook."""
    connector = logger_connector(trainer)
    connector.on_batch_end()
    connector.update_train_step_metrics()


def purge_from(logger: Any, step: int) -> None:
    """Make TensorBoard ignore what an earlier process logged from a step on: ``_kwargs`` of its writer."""
    logger._kwargs["purge_step"] = step


def set_default_root_dir(trainer: Trainer, folder: str) -> None:
    """Set ``trainer.default_root_dir``, which has no setter: ``_default_root_dir``."""
    vars(trainer)["_default_root_dir"] = folder


def begin_fit(trainer: Trainer, module: LightningModule, datamodule: Any) -> None:
    """Attach a module and its data to a trainer, as ``fit`` does before it prepares data.

    ``strategy._lightning_module``, ``_data_connector``, ``_callback_connector``, ``_verify_loop_configurations``.
    """
    from lightning.pytorch.loops.utilities import _parse_loop_limits
    from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

    trainer.strategy._lightning_module = module
    trainer.state.fn = TrainerFn.FITTING
    trainer.state.status = TrainerStatus.RUNNING
    trainer.training = True
    trainer._data_connector.attach_data(module, datamodule=datamodule)
    loop = trainer.fit_loop
    loop.min_epochs, loop.max_epochs = _parse_loop_limits(
        trainer.min_steps, trainer.max_steps, trainer.min_epochs, trainer.max_epochs, trainer
    )
    trainer.strategy.connect(module)
    trainer._callback_connector._attach_model_callbacks()
    _verify_loop_configurations(trainer)


def checkpoint_of(trainer: Trainer) -> dict[str, object]:
    """Return the contents of a full checkpoint, with all hooks: ``_checkpoint_connector.dump_checkpoint``."""
    return dict(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))


def call_callbacks(trainer: Trainer, hook: str) -> None:
    """Call a hook of all callbacks: ``call._call_callback_hooks``."""
    from lightning.pytorch.trainer import call

    call._call_callback_hooks(trainer, hook)


def call_module(trainer: Trainer, hook: str) -> None:
    """Call a hook of the module: ``call._call_lightning_module_hook``."""
    from lightning.pytorch.trainer import call

    call._call_lightning_module_hook(trainer, hook)


def arrived(trainer: Trainer, batch: object) -> Any:
    """Convert a batch of a loader as Lightning does for a step.

    ``_on_before_batch_transfer``, ``_call_strategy_hook``.
    """
    from lightning.pytorch.trainer import call

    batch = trainer.lightning_module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
