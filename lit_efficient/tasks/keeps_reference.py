"""Mix-in of tasks with a reference, which is the network before training."""

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_efficient.errors import CheckpointError, ConflictError
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.tasks.reference import Reference

_KEY = "preference"


class KeepsReference(LightningModule):
    """Mix-in that makes the reference before the first step, and compares it when a run is resumed."""

    without_reference = ""  # advice for a strategy that shards a copy of the weights
    network: nn.Module | None
    _reference: Reference | None = None
    _fingerprint: str | None = None  # of the reference in the run that wrote the checkpoint

    @property
    def needs_reference(self) -> bool:
        """True if the loss needs a reference."""
        return True

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.reference()

    def reference(self) -> Reference | None:
        """Return the network as it was before training, or ``None`` for a loss without a reference.

        Raises:
            CheckpointError: If the network differs from the start of the run that wrote the checkpoint.
            ConflictError: If weights that must be copied are sharded by another strategy than ShardedStrategy.
        """
        if self._reference is not None or not self.needs_reference:
            return self._reference
        assert self.network is not None, "configure_model() builds the network"
        made = Reference(self.network, self)
        traits = traits_of(getattr(trainer_of(self), "strategy", None))
        if made.tensors and traits.shards and not traits.shards_itself:
            raise ConflictError(
                f"{type(self).__name__}: the reference needs a copy of {len(made.tensors)} tensors that train, which "
                f"{traits.name} shards: only train adapters (LoRA), whose reference is the base itself"
                f"{self.without_reference}"
            )
        self._check_start(made)
        self._reference = made
        rank_zero_info(f"{type(self).__name__}: the reference is {made.describe()}")
        return made

    on_sharded = reference  # before the strategy loads the weights of a checkpoint

    def _check_start(self, made: Reference) -> None:
        if self._fingerprint is not None and made.fingerprint() != self._fingerprint:
            raise CheckpointError(
                f"{type(self).__name__}: the run of this checkpoint started from other weights than this network has "
                "before the checkpoint is loaded. Build it from the same start (a folder, start_from, or the same seed "
                "for random weights) and pass the checkpoint to the trainer: fit(ckpt_path=...) or "
                "validate(ckpt_path=...)"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        fingerprint = self._fingerprint
        if self._reference is not None:
            fingerprint = self._reference.fingerprint()
        checkpoint[_KEY] = {"reference": fingerprint}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        built = self.network is not None
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get(_KEY)
        if saved is None:  # of a task without a reference, whose weights are a start
            return
        self._fingerprint = saved["reference"]
        if self._reference is not None:
            self._check_start(self._reference)
        elif built and trainer_of(self) is not None:
            self.reference()
