"""Base of tasks that compare the network with itself before training."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lit_efficient.errors import CheckpointError, ConflictError
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses.preference import sequence_log_probs
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.tasks.pair_task import PairTask
from lit_efficient.tasks.reference import Reference

_KEY = "preference"


class ReferenceTask(PairTask):
    """Base of tasks with a reference, which is the network before training.

    Args:
        model: As in `LanguageModeling`.
        start_from: As in `PairTask`.
        learning_rate: As in `LanguageModeling`.
        weight_decay: As in `LanguageModeling`.
        warmup_steps: As in `LanguageModeling`.
    """

    without_reference = ""  # advice for a strategy that shards a copy of the weights

    def __init__(
        self,
        model: GPTConfig | CausalLMConfig,
        start_from: str | None,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
    ) -> None:
        super().__init__(model, start_from, learning_rate, weight_decay, warmup_steps)
        self._reference: Reference | None = None
        self._fingerprint: str | None = None  # of the reference in the run that wrote the checkpoint

    @property
    def needs_reference(self) -> bool:
        """True if the loss needs a reference."""
        return True

    def on_fit_start(self) -> None:
        self.reference()

    def reference(self) -> Reference | None:
        """Return the network as it was before training, or ``None`` for a loss without a reference.

        Raises:
            CheckpointError: If the network differs from the start of the run that wrote the checkpoint.
            ConflictError: If weights that must be copied are sharded by another strategy than ShardedStrategy.
        """
        if self._reference is not None or not self.needs_reference:
            return self._reference
        made = Reference(self._built(), self)
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
        if saved is None:  # of a language model, whose weights are a start
            return
        self._fingerprint = saved["reference"]
        if self._reference is not None:
            self._check_start(self._reference)
        elif built and trainer_of(self) is not None:
            self.reference()

    def _log_probs(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the log-probability and number of tokens of each answer, and the balancing loss of experts."""
        losses, targets, router_loss = self._losses(rows)
        return (*sequence_log_probs(losses, targets), router_loss)
