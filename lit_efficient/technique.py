"""Base classes of techniques: callbacks and precisions that have their declarations applied in a trainer.

The first technique's ``setup`` checks all techniques and wraps the methods of the module's instance. ``teardown`` or
``on_exception`` removes the wraps (see :mod:`lit_efficient.application`). The transforms of the network are recorded in
a ledger on the module, so that a second run does not repeat them, and in its checkpoints.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_efficient.application import check_run, install, transform_by, uninstall
from lit_efficient.application.ledger import log_reports, reports_of, session_of
from lit_efficient.declaration import Declaration, in_order, overrides, techniques_of
from lit_efficient.errors import diagnostic
from lit_efficient.internals.lightning_trainer import (
    AskedEarly,
    StandaloneCallback,
    StandalonePrecision,
    refuse_fabric,
    trainer_of,
)

_LOW = (torch.bfloat16, torch.float16)
# Attributes of optimizers whose small steps are not rounded away; the second one is torchao's.
_KEEPS_SMALL_UPDATES = ("keeps_small_updates", "bf16_stochastic_round")


class AppliesTechniques(AskedEarly, Callback, StandaloneCallback):
    """Callback that has the techniques of a trainer applied, its callbacks and its precision."""

    def refuse(self, trainer: Any, module: LightningModule) -> None:
        """Check all techniques of the trainer, if this is the first one."""
        if _is_first(self, trainer):
            check_run(trainer, module)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check all techniques of the trainer and wrap the module; in a run the first call does all of it."""
        install(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove the wraps; the transforms of the network stay."""
        uninstall(pl_module)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Do what ``teardown`` does: Lightning does not call it after an exception."""
        self.teardown(trainer, pl_module, trainer.state.fn)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the reports of all techniques, if this is the first one."""
        if _is_first(self, trainer):
            with diagnostic(type(self).__name__, "the rounding of 16-bit weights"):
                warn_of_rounding(trainer, pl_module)
            log_reports(trainer, reports_of(pl_module, techniques_of(trainer)))

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Warn after the first epoch of techniques that saw no optimizer step, if this technique is the first."""
        if _is_first(self, trainer):
            warn_of_uncounted_steps(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record the techniques of the run in the checkpoint."""
        checkpoint.setdefault("lit_efficient", {})["techniques"] = [
            technique.record() for technique in in_order(techniques_of(trainer))
        ]


def _is_first(callback: AppliesTechniques, trainer: Any) -> bool:
    return next(c for c in trainer.callbacks if isinstance(c, AppliesTechniques)) is callback


class Technique(Declaration, AppliesTechniques):
    """Base of all techniques. See :class:`lit_efficient.declaration.Declaration` for what a subclass declares.

    A subclass that defines ``setup``, ``teardown``, ``on_exception``, ``on_fit_start``, ``on_train_epoch_end`` or
    ``on_save_checkpoint`` calls ``super()`` in it.
    """


class PrecisionTechnique(Declaration, Precision, StandalonePrecision):
    """Base of techniques that are a trainer's precision. They change the network in the order of all techniques.

    Lightning's ``convert_module`` comes after compilation and sharding. Here it acts only if no callback is a
    technique, so that there is neither: it then adds the callback that has the precision applied.
    """

    def convert_module(self, module: Any) -> Any:
        """Have the declarations applied, unless a callback does."""
        trainer = trainer_of(module)
        if trainer is None:
            raise refuse_fabric(self)
        if not any(isinstance(one, AppliesTechniques) for one in trainer.callbacks):
            trainer.callbacks.insert(0, AppliesTechniques())
            install(trainer, module)
            transform_by(module, techniques_of(trainer))
        return super().convert_module(module)


def warn_of_uncounted_steps(trainer: Trainer, module: nn.Module) -> None:
    """Warn after the first epoch of a run of techniques that wait for optimizer steps, if none was seen."""
    session = session_of(module)
    if session is None or session.has_ended_epoch:
        return
    batches = trainer.fit_loop.total_batch_idx - session.first_batch
    if not batches:  # the run resumes after the last batch of an epoch
        return
    session.has_ended_epoch = True
    idle = []
    for technique in in_order(techniques_of(trainer)):
        waits = technique.counts_steps and trainer.global_step == session.first_step
        if waits or (overrides(technique, "after_step") and not session.has_stepped):
            idle.append(type(technique).__name__)
    if idle:
        rank_zero_warn(
            f"{', '.join(idle)}: no optimizer step was seen in the {batches} batches of the first epoch, so nothing "
            f"that waits for steps was done: trainer.global_step is {trainer.global_step}. Step the optimizers that "
            "configure_optimizers returns, by automatic optimization or by self.optimizers().step() in training_step"
        )


def warn_of_rounding(trainer: Trainer, module: nn.Module) -> None:
    """Warn if 16-bit numbers round away steps of an optimizer or the values of position tables."""
    for optimizer in trainer.optimizers:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        low = sum(p.numel() for p in trained if p.dtype in _LOW)
        # ``kahan_sum`` is None where an optimizer uses it only where needed.
        compensates = any(group.get("kahan_sum", False) is not False for group in optimizer.param_groups)
        keeps = compensates or any(getattr(optimizer, name, False) for name in _KEEPS_SMALL_UPDATES)
        if low and not keeps:
            rank_zero_warn(
                f"{type(optimizer).__name__} steps {low:,} parameters in 16 bits, where a step below 1/512 of a weight "
                "is rounded away: they hardly learn. Under precision: bf16-true add the callback StochasticRounding, "
                "or KahanSummation for 2 bytes a parameter; or use precision: bf16-mixed"
            )
    tables = []
    for name, part in module.named_modules():
        if list(part.parameters()) or list(part.children()):
            continue
        for key, held in part.named_buffers(recurse=False):
            if held.dtype in _LOW and held.numel() > 1:
                tables.append(f"{name}.{key}")
    if tables:
        rank_zero_warn(
            f"{len(tables)} tables beside the parameters are rounded to 16 bits, first {tables[0]!r}: frequencies of "
            "rotary positions then turn far ones by wrong angles. Add the callback KeepFloat32"
        )
