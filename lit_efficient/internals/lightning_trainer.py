"""A trainer's parts, and the module's tie to it. Checked with lightning 2.6.6, in both of its namespaces."""

from collections.abc import Callable
from typing import Any

from lit_efficient.internals.wraps import unwrap_method, wrap_method


class AskedEarly:
    """A callback that is asked before data is prepared: its trainer hands it the module's ``log`` then, in each run
    (``_attach_model_logging_functions``); its ``setup`` comes after that of the data.
    """

    @property
    def log(self) -> Any:
        """The module's, in a run."""
        return self.__dict__["log"]

    @log.setter
    def log(self, function: Any) -> None:
        self.__dict__["log"] = function
        module = getattr(function, "__self__", None)
        if trainer_of(module) is not None:
            self.refuse(trainer_of(module), module)

    def refuse(self, trainer: Any, module: Any) -> None:
        """Raise what is wrong with this trainer and module."""
        raise NotImplementedError


def trainer_of(module: Any) -> Any:
    """The module's trainer, ``None`` where it has none, for which ``module.trainer`` raises: ``_trainer``."""
    return getattr(module, "_trainer", None)


def set_trainer(module: Any, trainer: Any) -> None:
    """Tie a module to a trainer, of another namespace even: ``_trainer``."""
    module.__dict__["_trainer"] = trainer


def signal_connector(trainer: Any) -> Any:
    """What Lightning's own signal handlers belong to: ``_signal_connector``."""
    return trainer._signal_connector


def original_handlers(trainer: Any) -> dict[int, Any]:
    """What Lightning puts back at a run's end, by signal: ``_signal_connector._original_handlers``."""
    handlers: dict[int, Any] = trainer._signal_connector._original_handlers
    return handlers


def answer_sigterm(trainer: Any, function: Callable[..., Any]) -> None:
    """Call ``function(connector, number, frame)`` where Lightning would broadcast in its handler, until it is left; not
    under SLURM's automatic requeueing: ``_signal_connector._sigterm_notifier_fn``.
    """
    environment = trainer.strategy.cluster_environment
    if not getattr(environment, "auto_requeue", False):
        wrap_method(trainer._signal_connector, "_sigterm_notifier_fn", function)


def leave_sigterm(trainer: Any, function: Callable[..., Any]) -> None:
    """Let Lightning answer again, from its next run on."""
    unwrap_method(trainer._signal_connector, "_sigterm_notifier_fn", function)


def logger_connector(trainer: Any) -> Any:
    """What holds the metrics that were logged: ``_logger_connector``."""
    return trainer._logger_connector


def log_step(trainer: Any) -> None:
    """Hand the loggers the step's row, which Lightning does after the last hook."""
    connector = logger_connector(trainer)
    connector.on_batch_end()
    connector.update_train_step_metrics()


def purge_from(logger: Any, step: int) -> None:
    """Let TensorBoard pass over what an earlier process has logged from a step on: ``_kwargs``, of its writer."""
    logger._kwargs["purge_step"] = step


def set_default_root_dir(trainer: Any, folder: str) -> None:
    """``trainer.default_root_dir = folder``, which has no setter: ``_default_root_dir``."""
    trainer._default_root_dir = folder


def begin_fit(trainer: Any, module: Any, datamodule: Any) -> None:
    """Tie a trainer to what it fits, as ``fit`` does before it prepares data: ``strategy._lightning_module``,
    ``_data_connector``, ``_callback_connector``, ``_verify_loop_configurations``.
    """
    from lightning.pytorch.loops.utilities import _parse_loop_limits
    from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
    from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

    trainer.strategy._lightning_module = module
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    trainer.training = True
    trainer._data_connector.attach_data(module, datamodule=datamodule)
    loop = trainer.fit_loop
    loop.min_epochs, loop.max_epochs = _parse_loop_limits(
        trainer.min_steps, trainer.max_steps, trainer.min_epochs, trainer.max_epochs, trainer
    )
    trainer.strategy.connect(module)
    trainer._callback_connector._attach_model_callbacks()
    _verify_loop_configurations(trainer)


def checkpoint_of(trainer: Any) -> dict[str, Any]:
    """What a full checkpoint would hold now, hooks included: ``_checkpoint_connector.dump_checkpoint``."""
    return dict(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))


def call_callbacks(trainer: Any, hook: str) -> None:
    """Call a hook of all callbacks: ``call._call_callback_hooks``."""
    from lightning.pytorch.trainer import call

    call._call_callback_hooks(trainer, hook)


def call_module(trainer: Any, hook: str) -> None:
    """Call a hook of the module: ``call._call_lightning_module_hook``."""
    from lightning.pytorch.trainer import call

    call._call_lightning_module_hook(trainer, hook)


def arrived(trainer: Any, batch: Any) -> Any:
    """What a step gets of what a loader gave: ``_on_before_batch_transfer``, ``call._call_strategy_hook``."""
    from lightning.pytorch.trainer import call

    batch = trainer.lightning_module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
