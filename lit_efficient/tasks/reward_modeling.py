"""Train a reward model, which rates answers, from pairs of a chosen and a rejected answer.

    loss = -log sigmoid(R(chosen) - R(rejected) - margin) + centering (R(chosen) + R(rejected))^2

R is a linear layer on the last hidden state of a causal language model. See
:mod:`lit_efficient.models.networks.reward`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.losses.preference import reward_loss
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.networks import reward
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.tasks.language_modeling import _DEFAULT_MODEL
from lit_efficient.tasks.pair_task import PairTask
from lit_efficient.tasks.pairs import Comparison, joined, pairs_of

_NEEDED = ("input_ids", "attention_mask")


class RewardModeling(PairTask):
    """Training of a reward model on batches of pairs.

    Batches have ``input_ids`` and ``attention_mask`` ``[B, T]``, each with the prefixes ``chosen_`` and ``rejected_``,
    and optionally ``margin`` ``[B]``, the amount by which the chosen reward should be higher (`PreferenceData` makes it
    of rows with a ``margin``, or with ``rows.margin: scores`` of two scores). The language model's head
    is removed. The layer ``score`` is initialised to zero, so the loss starts at log 2. With LoRA, set
    ``modules_to_save: [score]``. ``export`` writes a folder for ``AutoModelForSequenceClassification``.

    Logs ``loss``, ``accuracy``, ``margin``, ``rewards/chosen`` and ``rewards/rejected`` under ``train/``, ``val/`` and
    ``test/``. Prediction returns rewards ``[B]`` for batches with ``input_ids``, and differences ``[B]`` for pairs. The
    balancing loss of a mixture of experts is not added.

    Args:
        model: As in `LanguageModeling`, with trained weights or with ``start_from``.
        centering: Weight of a term that keeps rewards around 0, at least 0. Its paper uses 0.01.
        start_from: Checkpoint of `LanguageModeling` (SFT) of the same shape with the initial weights. Its adapters are
            merged.
        learning_rate: Peak learning rate of AdamW.
        weight_decay: Weight decay of the matrices.
        warmup_steps: As in `LanguageModeling`.
    """

    loads_as = "RewardModeling"
    lacks_balance = "rewards are computed from hidden states, without the network's own loss"
    commands_after_fit: ClassVar[tuple[str, ...]] = ()
    cannot_generate = "a reward model rates texts and cannot generate them"

    def __init__(
        self,
        model: GPTConfig | CausalLMConfig = _DEFAULT_MODEL,
        centering: float = 0.0,
        start_from: str | None = None,
        learning_rate: float = 1e-5,
        weight_decay: float = 0.0,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__(model, start_from, learning_rate, weight_decay, warmup_steps)
        check_number("RewardModeling", "centering", centering, least=0)
        self.centering = centering
        self.save_hyperparameters({"centering": centering})

    @property
    def score(self) -> nn.Linear:
        """Linear layer that maps hidden states to rewards, a part of the network."""
        layer = self._built().get_submodule("score")
        assert isinstance(layer, nn.Linear)
        return layer

    def on_fit_start(self) -> None:
        if not all(parameter.requires_grad for name, parameter in self.score.named_parameters() if name == "weight"):
            raise ConfigurationError(
                "RewardModeling: the layer score is zero and frozen: set modules_to_save=['score'] of the adapters"
            )

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the rewards ``[B]`` of texts ``[B, T]`` with padding on either side; none without a mask."""
        if attention_mask is None:
            attention_mask = input_ids.new_ones(input_ids.shape)
        rewards: Tensor = self.score(reward.last_hidden_states(self._built(), input_ids, attention_mask))
        return rewards[:, 0].float()

    def compare(self, batch: Mapping[str, Tensor]) -> Comparison:
        rows = joined(batch, "RewardModeling", _NEEDED, ())
        chosen, rejected = pairs_of(self(rows["input_ids"], rows["attention_mask"]))
        losses = reward_loss(chosen, rejected, batch.get("margin"), self.centering)
        return Comparison(losses, chosen.detach(), rejected.detach())

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Return rewards ``[B]``, or for pairs the difference between chosen and rejected rewards ``[B]``."""
        if "input_ids" in batch:
            return self(batch["input_ids"], batch.get("attention_mask"))
        done = self.compare(batch)
        return done.chosen - done.rejected

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check the checkpoint as `LanguageModeling` does. Raise ConfigurationError for one of a language model."""
        state = checkpoint.get("state_dict", [".score.weight"])  # missing if the strategy reads weights from a folder
        if "language_modeling" in checkpoint and not any(f".{name}".endswith(".score.weight") for name in state):
            raise ConfigurationError(
                "RewardModeling: this is a checkpoint of a language model without a layer score: pass it as start_from"
            )
        super().on_load_checkpoint(checkpoint)

    def _begin(self, network: nn.Module) -> nn.Module:
        return reward.with_score(super()._begin(network))
