"""The callback that every technique is: it lives in a trainer and has its declaration applied there.

The first technique's ``setup`` checks the whole set at once and wraps the methods of the module's instance;
``teardown`` or ``on_exception`` takes the wraps off again (see :mod:`lit_efficient.application`). What was done to the
network is kept in a ledger on the module, so that a second run does not do it twice, and in its checkpoints, so that
it is known which they were.
"""

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision

from lit_efficient import application
from lit_efficient.declaration import Declaration, in_order, techniques_of
from lit_efficient.internals.lightning_standalone import StandaloneCallback, StandalonePrecision
from lit_efficient.internals.lightning_trainer import AskedEarly, trainer_of


class AppliesTechniques(AskedEarly, Callback, StandaloneCallback):
    """Has the declarations of a trainer applied, whether they are callbacks or its precision."""

    def refuse(self, trainer: Any, module: Any) -> None:
        """Check all techniques of the trainer at once, on the first technique's turn."""
        if _is_first(self, trainer):
            application.check_run(trainer, module)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check all techniques of the trainer at once and wrap the module, on the first technique's turn."""
        application.install(trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the wraps off; what was done to the network stays."""
        application.uninstall(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Do what ``teardown`` does: Lightning does not call it after an exception."""
        self.teardown(trainer, pl_module, trainer.state.fn)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Log what all techniques touched, on the first technique's turn."""
        if _is_first(self, trainer):
            application.warn_of_rounding(trainer, pl_module)
            application.log_reports(trainer, application.reports_of(pl_module, techniques_of(trainer)))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put into the checkpoint which techniques the run used."""
        checkpoint.setdefault("lit_efficient", {})["techniques"] = [
            technique.record() for technique in in_order(techniques_of(trainer))
        ]


def _is_first(callback: AppliesTechniques, trainer: Any) -> bool:
    return next(c for c in trainer.callbacks if isinstance(c, AppliesTechniques)) is callback


class Technique(Declaration, AppliesTechniques):
    """Base of all techniques: what a subclass says is in :class:`lit_efficient.declaration.Declaration`.

    A subclass that defines ``setup``, ``teardown``, ``on_exception``, ``on_fit_start`` or ``on_save_checkpoint`` calls
    ``super()`` in it.
    """


class PrecisionTechnique(Declaration, Precision, StandalonePrecision):
    """Base of techniques that are a trainer's precision; what they change is changed in the order of all techniques.

    Lightning's ``convert_module`` comes after compilation and sharding. It acts here only where no callback is a
    technique, so that there is neither: it then adds the callback that has the precision applied.
    """

    def convert_module(self, module: Any) -> Any:
        """Have the declarations applied, unless a callback has."""
        trainer = trainer_of(module)
        if trainer is not None and not any(isinstance(one, AppliesTechniques) for one in trainer.callbacks):
            trainer.callbacks.insert(0, AppliesTechniques())
            application.install(trainer, module)
            application.apply(module, techniques_of(trainer))
        return super().convert_module(module)
