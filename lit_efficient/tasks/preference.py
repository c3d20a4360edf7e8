"""Train a language model on preferences between two answers: DPO and its variants, ORPO and SimPO.

    loss = dpo(log p(chosen), log p(rejected), log p_ref(chosen), log p_ref(rejected)),    p_ref = p before training

Saves: with adapters, a second model: the reference is the network itself with disabled adapters
Costs: two rows for each pair, and for DPO a forward pass of the reference; without adapters also a copy of the weights

Chosen and rejected answers are one batch of the network. Formulas: :mod:`lit_efficient.losses.preference`; the
reference: :mod:`lit_efficient.tasks.reference`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.losses.preference import check_dpo, dpo_loss, orpo_loss, simpo_loss
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.tasks.language_modeling import _DEFAULT_MODEL
from lit_efficient.tasks.pairs import Comparison, joined, pairs_of
from lit_efficient.tasks.reference_task import ReferenceTask

Loss = Literal["sigmoid", "hinge", "ipo", "orpo", "simpo"]
_DPO = ("sigmoid", "hinge", "ipo")
_AVERAGED = ("ipo", "orpo", "simpo")  # losses of log-probabilities that are averaged over tokens


class Preference(ReferenceTask):
    """Preference learning on batches of pairs.

    Batches have ``input_ids`` and ``labels`` ``[B, T]``, and optionally ``attention_mask`` for padding, each with the
    prefixes ``chosen_`` and ``rejected_``. Labels are aligned with ``input_ids``, and -100 in the prompt. The GPT of
    this package supports padding on the right only.

    Logs ``loss``, ``accuracy`` (share of pairs whose chosen answer has the higher reward), ``margin``,
    ``rewards/chosen`` and ``rewards/rejected`` under ``train/``, ``val/`` and ``test/``. The reward of an answer is
    ``beta`` times the difference between its log-probability and the reference's. For orpo and simpo it is ``beta``
    times its log-probability, averaged over tokens.

    ``cache_reference`` computes the reference's log-probabilities of all pairs before the first step, and keeps them
    on disk (``$LIT_EFFICIENT_CACHE``, or ``~/.cache/lit_efficient``) for all runs with the same start, data, loss and
    precision. Steps and validation then run no reference, and copies of weights wait in host memory.

    The reference is always in eval mode. Dropout in the policy adds noise to the comparison, so training usually
    disables it.

    Args:
        model: As in `LanguageModeling`, with trained weights or with ``start_from``.
        loss: ``sigmoid`` (DPO), ``hinge`` (SLiC) or ``ipo``, which need a reference; ``orpo`` or ``simpo``, which do
            not.
        beta: Strength of the reference; weight of the odds ratio for orpo; scale of the rewards for simpo. null takes
            0.1, or 2 for simpo.
        label_smoothing: Probability that a pair is labelled the wrong way round, in [0, 0.5). Only for sigmoid.
        gamma: Margin between rewards for simpo, at least 0. null takes 1.
        offset: Factor of the pairs' ``margin``, by which the reward of the chosen answer should exceed that of the
            rejected one (ODPO), at least 0. 0 ignores margins. Only for sigmoid.
        start_from: Checkpoint of `LanguageModeling` (SFT) of the same shape with the initial weights. Its adapters are
            merged. A resumed run needs this file too.
        learning_rate: Peak learning rate of AdamW: 1e-6 or below for all weights, ten times more for adapters.
        weight_decay: Weight decay of the matrices.
        warmup_steps: As in `LanguageModeling`.
        cache_reference: Compute the reference's log-probabilities once. The training data must be the same in each
            epoch.
    """

    loads_as = "Preference"
    prefixes = ("chosen_", "rejected_")
    without_reference = ", or use loss='orpo' or 'simpo', which need no reference"

    def __init__(
        self,
        model: GPTConfig | CausalLMConfig = _DEFAULT_MODEL,
        loss: Loss = "sigmoid",
        beta: float | None = None,
        label_smoothing: float = 0.0,
        gamma: float | None = None,
        offset: float = 0.0,
        start_from: str | None = None,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        warmup_steps: int = 100,
        cache_reference: bool = False,
    ) -> None:
        super().__init__(model, start_from, learning_rate, weight_decay, warmup_steps, cache_reference)
        if gamma is not None and loss != "simpo":
            raise refusal("Preference", "gamma", f"null with {loss}, because only simpo uses it", gamma)
        check_number("Preference", "gamma", gamma, least=0, null=True)
        self.beta = 2.0 if loss == "simpo" else 0.1
        if beta is not None:
            self.beta = beta
        check_dpo("Preference", self.beta, "sigmoid", label_smoothing)
        if label_smoothing and loss != "sigmoid":
            allowed = f"0 with {loss}, because only sigmoid uses it"
            raise refusal("Preference", "label_smoothing", allowed, label_smoothing)
        check_number("Preference", "offset", offset, least=0)
        if offset and loss != "sigmoid":
            raise refusal("Preference", "offset", f"0 with {loss}, because only sigmoid uses it", offset)
        self.loss: Loss = loss
        self.offset = offset
        self.label_smoothing = label_smoothing
        self.gamma = 1.0
        if gamma is not None:
            self.gamma = gamma
        own = {"loss": loss, "beta": beta, "label_smoothing": label_smoothing, "gamma": gamma, "offset": offset}
        self.save_hyperparameters(own)
        if cache_reference and loss not in _DPO:
            raise refusal("Preference", "cache_reference", f"false with {loss}, which has no reference", True)

    @property
    def needs_reference(self) -> bool:
        """True if the loss needs a reference."""
        return self.loss in _DPO

    def on_fit_start(self) -> None:
        if getattr(getattr(self.trainer, "datamodule", None), "has_margins", False) and not self.offset:
            rank_zero_info("Preference: the margins of the pairs are not used, because offset is 0")
        super().on_fit_start()

    def compare(self, batch: Mapping[str, Tensor]) -> Comparison:
        rows = joined(batch, "Preference")
        # It runs first, so that its activations are freed before the policy saves its own for the backward pass.
        refs = self.references(batch) if self.needs_reference else ()
        log_probs, router_loss = self._scores(rows)
        policy = pairs_of(log_probs)
        losses = self._pair_losses(policy, refs, self._offsets(batch))
        chosen, rejected = (log_prob.detach() for log_prob in policy)
        if refs:
            chosen = chosen - refs[0]
            rejected = rejected - refs[1]
        return Comparison(losses, self.beta * chosen, self.beta * rejected, router_loss)

    def _cached_settings(self) -> dict[str, Any]:
        return {"averaged": self.loss in _AVERAGED}

    def _live_references(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        reference = self.reference()
        assert reference is not None
        rows = joined(batch, "Preference")
        return pairs_of(reference(self._built(), lambda: self._scores(rows)[0]))

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[str] | Tensor:
        """Return continued texts for ``prompts``, else the difference between chosen and rejected rewards ``[B]``."""
        if "prompts" in batch:
            return self.generate_text(batch["prompts"])
        done = self.compare(batch)
        return done.chosen - done.rejected

    def _scores(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        sums, tokens, router_loss = self._log_probs(rows)
        return sums / tokens if self.loss in _AVERAGED else sums, router_loss

    def _offsets(self, batch: Mapping[str, Tensor]) -> Tensor | None:
        """Return the amount by which the reward of each chosen answer should be larger ``[B]``."""
        if not self.offset:
            return None
        if "margin" not in batch:
            raise ConfigurationError(
                f"Preference: offset={self.offset} needs margins, and the batch has none: give rows a margin, or set "
                "rows.margin to scores for rows with score_chosen and score_rejected"
            )
        return self.offset * batch["margin"]

    def _pair_losses(self, policy: tuple[Tensor, Tensor], refs: tuple[Tensor, ...], offsets: Tensor | None) -> Tensor:
        if self.loss == "orpo":
            return orpo_loss(*policy, self.beta)[0]
        if self.loss == "simpo":
            return simpo_loss(*policy, self.beta, self.gamma)
        chosen, rejected = refs
        return dpo_loss(*policy, chosen, rejected, self.beta, self.loss, self.label_smoothing, offsets)
