"""What tasks on pairs of answers have in common: their steps, what they log, and where they start."""

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
    """A task that compares the two answers of each pair; every pair counts the same.

    ``start_from`` is a checkpoint of `LanguageModeling` of the same shape, its adapters merged; the rest is as there.
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
        """Losses and rewards of the pairs of a batch."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Build the network, once, and give it the weights of ``start_from``."""
        fresh = self.network is None
        super().configure_model()
        if fresh and self.network is not None:
            self._begin(self.network)

    def configure_callbacks(self) -> list[Callback]:
        """None: the loss is a mean over pairs, not over tokens."""
        return []

    def num_tokens(self, batch: dict[str, Tensor]) -> int:
        """How many pairs a batch has: what `TokenWeightedAccumulation` is to count here."""
        return len(batch["chosen_input_ids"])

    def _begin(self, network: nn.Module) -> None:
        # Without a trainer a checkpoint is being read: only one of adapters needs the start, and it refuses another.
        if self.start_from is None or (trainer_of(self) is None and not Path(self.start_from).is_file()):
            return
        try:
            start, _ = load_language_model(self.start_from)
        except LitEfficientError as error:
            raise type(error)(f"{type(self).__name__}: start_from: {error}") from error
        own = self.tokenizer_state
        if start.tokenizer_state is not None:  # first: another tokenizer is why vocabularies differ in size
            self._adopt_tokenizer(start.tokenizer_state, f"start_from ({self.start_from})")
        self.tokenizer_state = own or start.tokenizer_state
        merged: Any = merge_adapters(start)
        try:
            network.load_state_dict(merged.network.state_dict())
        except RuntimeError as error:
            reason, who = " ".join(str(error).split())[:300], f"{type(self).__name__}: start_from {self.start_from}"
            raise CheckpointError(f"{who} does not fit the model here: {reason}") from error

    def _builds_alone(self) -> bool:
        return self.start_from is None and type(self).configure_model is PairTask.configure_model

    def _rebuilt(self, described: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> nn.Module:
        network = super()._rebuilt(described, checkpoint)
        self._begin(network)
        return network

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Loss over all pairs of the batch, and of each ``[B]`` for who reweights them."""
        done = self.compare(batch)
        self._log(done, "train")
        output = {"loss": done.losses.mean(), "sample_loss": done.losses}
        if done.router_loss is not None:
            self.log("train/router_loss", done.router_loss, batch_size=len(done.losses))
            output |= {"loss": output["loss"] + done.router_loss, "extra_loss": done.router_loss}
        return output

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the figures of the batch; those of the epoch are means over pairs."""
        self._log(self.compare(batch), "val")

    def on_validation_epoch_end(self) -> None:
        """Nothing: the steps have logged."""

    on_test_epoch_end = on_validation_epoch_end

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log(self.compare(batch), "test")

    def _log(self, done: Comparison, prefix: str) -> None:
        training = prefix == "train"
        for name, value in done.figures().items():
            shown = name in ("loss", "accuracy") and (not training or logs_in_bar(value))
            self.log(f"{prefix}/{name}", value, prog_bar=shown, batch_size=len(done.losses), sync_dist=not training)
