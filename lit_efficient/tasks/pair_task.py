"""Base of tasks on pairs of answers: steps, logging, and the checkpoint from which training starts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor, nn

from lit_efficient.errors import CheckpointError, LitEfficientError
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.mechanisms.adapters.merge import merge_adapters
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.tasks.language_modeling import LanguageModeling
from lit_efficient.tasks.loading import load_language_model
from lit_efficient.tasks.pairs import Comparison


class PairTask(LanguageModeling):
    """Base of tasks that compare the two answers of each pair. Every pair has the same weight.

    Args:
        model: As in `LanguageModeling`.
        start_from: Checkpoint of `LanguageModeling` of the same shape with the initial weights. Its adapters are
            merged.
        learning_rate: As in `LanguageModeling`.
        weight_decay: As in `LanguageModeling`.
        warmup_steps: As in `LanguageModeling`.
    """

    trains_on = ("pairs",)
    takes_slices = False  # the answers of a pair are summed whole

    def __init__(
        self,
        model: GPTConfig | CausalLMConfig,
        start_from: str | None,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
    ) -> None:
        super().__init__(model, learning_rate, weight_decay, warmup_steps)
        self.start_from = start_from
        self.save_hyperparameters({"start_from": start_from})

    def compare(self, batch: Mapping[str, Tensor]) -> Comparison:
        """Return the losses and rewards of the pairs of a batch."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Build the network once, and load the weights of ``start_from``."""
        fresh = self.network is None
        super().configure_model()
        if fresh and self.network is not None:
            self.network = self._begin(self.network)

    def configure_callbacks(self) -> list[Callback]:
        """Return no callbacks, because the loss is a mean over pairs and not over tokens."""
        return []

    def num_tokens(self, batch: dict[str, Tensor]) -> int:
        """Return the number of pairs in a batch, by which `TokenWeightedAccumulation` weights batches."""
        return len(batch["chosen_input_ids"])

    def _begin(self, network: nn.Module) -> nn.Module:
        """Return the network with the weights of ``start_from``."""
        # Without a trainer, a checkpoint is being loaded. Only a checkpoint of adapters needs the start, and it is
        # checked later that it is the right one.
        if self.start_from is None or (trainer_of(self) is None and not Path(self.start_from).is_file()):
            return network
        try:
            start, _ = load_language_model(self.start_from)
        except LitEfficientError as error:
            raise type(error)(f"{type(self).__name__}: start_from: {error}") from error
        own = self.tokenizer_state
        if start.tokenizer_state is not None:  # checked first: its error explains why sizes of vocabularies differ
            self._adopt_tokenizer(start.tokenizer_state, f"start_from ({self.start_from})")
        self.tokenizer_state = own or start.tokenizer_state
        merged: Any = merge_adapters(start)
        try:
            network.load_state_dict(merged.network.state_dict())
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"{type(self).__name__}: start_from {self.start_from} does not fit the model here: {reason}"
            ) from error
        return network

    def _builds_alone(self) -> bool:
        return self.start_from is None and type(self).configure_model is PairTask.configure_model

    def _rebuilt(self, described: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> nn.Module:
        network = super()._rebuilt(described, checkpoint)
        return self._begin(network)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss over pairs, and the loss of each pair ``[B]`` for techniques that reweight samples."""
        done = self.compare(batch)
        self._log(done, "train")
        output = {"loss": done.losses.mean(), "sample_loss": done.losses}
        if done.router_loss is not None:
            self.log("train/router_loss", done.router_loss, batch_size=len(done.losses))
            output |= {"loss": output["loss"] + done.router_loss, "extra_loss": done.router_loss}
        return output

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the figures of the batch. Those of the epoch are means over pairs."""
        self._log(self.compare(batch), "val")

    def on_validation_epoch_end(self) -> None:
        """Do nothing, because the steps have logged all figures."""

    on_test_epoch_end = on_validation_epoch_end

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log(self.compare(batch), "test")

    def _log(self, done: Comparison, prefix: str) -> None:
        training = prefix == "train"
        for name, value in done.figures().items():
            shown = name in ("loss", "accuracy") and (not training or logs_in_bar(value))
            self.log(f"{prefix}/{name}", value, prog_bar=shown, batch_size=len(done.losses), sync_dist=not training)
