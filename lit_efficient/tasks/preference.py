"""Teach a language model which of two answers is preferred: DPO and its kin, ORPO and SimPO.

    loss = dpo(log p(chosen), log p(rejected), log p_ref(chosen), log p_ref(rejected)),    p_ref = p before training

Saves: with adapters, the second model: the reference is the network itself with its adapters off
Costs: twice the rows a pair, and for DPO a forward pass of the reference; without adapters a copy of the weights, too

Chosen and rejected answers go through the network in one batch. The formulas are in
:mod:`lit_efficient.losses.preference`, where the reference comes from in :mod:`lit_efficient.tasks.reference`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lit_efficient.errors import CheckpointError, ConfigurationError, ConflictError, check_choice, check_number, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses.preference import check_dpo, dpo_loss, orpo_loss, sequence_log_probs, simpo_loss
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.tasks.language_modeling import _DEFAULT_MODEL
from lit_efficient.tasks.pair_task import PairTask
from lit_efficient.tasks.pairs import Comparison, joined, pairs_of
from lit_efficient.tasks.reference import Reference

Loss = Literal["sigmoid", "hinge", "ipo", "orpo", "simpo"]
_DPO = ("sigmoid", "hinge", "ipo")
_AVERAGED = ("ipo", "orpo", "simpo")  # take log-probabilities averaged over tokens
_KEY = "preference"


class Preference(PairTask):
    """Preference learning on batches of pairs, ``chosen_`` and ``rejected_`` each with ``input_ids`` and ``labels``.

    All are ``[B, T]``; ``labels`` stand under their own token and are -100 in the prompt; ``attention_mask`` is for
    padding. Our GPT takes padding on the right only.

    Logs ``loss``, ``accuracy`` (how often the chosen answer has the higher reward), ``margin``, ``rewards/chosen`` and
    ``rewards/rejected`` under ``train/``, ``val/`` and ``test/``. An answer's reward is ``beta`` times its
    log-probability minus the reference's; for orpo and simpo there is none, and the average over tokens counts.

    The reference is always in eval mode. Dropout in the policy adds noise that it has not: most people train without.

    Args:
        model: as for `LanguageModeling`; with trained weights, or with ``start_from``.
        loss: ``sigmoid`` (DPO), ``hinge`` (SLiC) and ``ipo`` keep near a reference; ``orpo`` and ``simpo`` need none.
        beta: of the reference's pull, of the odds ratio's weight for orpo, of the reward's scale for simpo; null is
            0.1, for simpo 2.
        label_smoothing: probability that a pair is labelled the wrong way round, in [0, 0.5); for sigmoid.
        gamma: the margin between rewards for simpo, at least 0; null is 1.
        start_from: a checkpoint of `LanguageModeling` (SFT) of the same shape to start from, its adapters merged. It
            must be there when the run is resumed, too.
        learning_rate: peak rate of AdamW; 1e-6 or below for all weights, ten times more for adapters.
        weight_decay: of the matrices.
        warmup_steps: as for `LanguageModeling`.
    """

    loads_as = "Preference"

    def __init__(
        self,
        model: GPTConfig | CausalLMConfig = _DEFAULT_MODEL,
        loss: Loss = "sigmoid",
        beta: float | None = None,
        label_smoothing: float = 0.0,
        gamma: float | None = None,
        start_from: str | None = None,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__(model, start_from, learning_rate, weight_decay, warmup_steps)
        check_choice("Preference", "loss", loss, (*_DPO, "orpo", "simpo"))
        if gamma is not None and loss != "simpo":
            raise refusal("Preference", "gamma", f"null with {loss}, as it is for simpo", gamma)
        check_number("Preference", "gamma", gamma, least=0, null=True)
        self.beta = (2.0 if loss == "simpo" else 0.1) if beta is None else beta
        check_dpo("Preference", self.beta, "sigmoid", label_smoothing)
        if label_smoothing and loss != "sigmoid":
            raise ConfigurationError(f"Preference: label_smoothing is for sigmoid, got {label_smoothing} with {loss}.")
        self.loss: Loss = loss
        self.label_smoothing = label_smoothing
        self.gamma = 1.0 if gamma is None else gamma
        self.save_hyperparameters({"loss": loss, "beta": beta, "label_smoothing": label_smoothing, "gamma": gamma})
        self._reference: Reference | None = None
        self._fingerprint: str | None = None  # of the reference of the run that wrote the checkpoint

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the network as it was."""
        return self.loss in _DPO

    def on_fit_start(self) -> None:
        self.reference()

    def reference(self) -> Reference | None:
        """The network as it was before training; None for a loss that needs none.

        Raises:
            CheckpointError: If the network has trained already and its start is not known.
            ConflictError: If weights that would have to be copied are sharded, but by ShardedStrategy.
        """
        if self._reference is not None or not self.needs_reference:
            return self._reference
        made = Reference(self._built(), self)
        traits = traits_of(getattr(trainer_of(self), "strategy", None))
        if made.tensors and traits.shards and not traits.shards_itself:
            raise ConflictError(
                f"Preference: loss={self.loss!r} keeps a copy of what trains in full ({len(made.tensors)} tensors), "
                f"which {traits.name} shards: train adapters (LoRA) alone, whose reference is the base itself, or use "
                "loss='orpo' or 'simpo', which need none"
            )
        self._check_start(made)
        self._reference = made
        rank_zero_info(f"Preference: the reference is {made.describe()}.")
        return made

    on_sharded = reference  # before a checkpoint's weights come, which the strategy reads

    def _check_start(self, made: Reference) -> None:
        if self._fingerprint is not None and made.fingerprint() != self._fingerprint:
            raise CheckpointError(
                "Preference: the reference of this checkpoint's run is not the network here before the checkpoint's "
                "weights are loaded. Build it from the same start (a folder, start_from, or the same seed for random "
                "weights) and give the checkpoint to the trainer: fit(ckpt_path=...) or validate(ckpt_path=...)"
            )

    def compare(self, batch: Mapping[str, Tensor]) -> Comparison:
        rows = joined(batch, "Preference")
        reference = self.reference()
        # The reference first: its activations are gone before the policy's are kept for the backward pass.
        refs = None if reference is None else pairs_of(reference(self._built(), lambda: self._log_probs(rows)[0]))
        log_probs, router_loss = self._log_probs(rows)
        policy = pairs_of(log_probs)
        losses = self._pair_losses(policy, refs)
        chosen, rejected = (p.detach() if r is None else p.detach() - r for p, r in zip(policy, refs or (None, None)))
        return Comparison(losses, self.beta * chosen, self.beta * rejected, router_loss)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[str] | Tensor:
        """Continued texts for ``prompts``, else by how much each chosen answer's reward is higher ``[B]``."""
        if "prompts" in batch:
            return self.generate_text(batch["prompts"])
        done = self.compare(batch)
        return done.chosen - done.rejected

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        kept = self._fingerprint if self._reference is None else self._reference.fingerprint()
        checkpoint[_KEY] = {"reference": kept}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        built = self.network is not None
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get(_KEY)
        if saved is None:  # a language model's: what is loaded is a start
            return
        self._fingerprint = saved["reference"]
        if self._reference is not None:
            self._check_start(self._reference)
        elif built and trainer_of(self) is not None:
            self.reference()

    def _log_probs(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        losses, targets, router_loss = self._losses(rows)
        sums, tokens = sequence_log_probs(losses, targets)
        return (sums / tokens if self.loss in _AVERAGED else sums), router_loss

    def _pair_losses(self, policy: tuple[Tensor, Tensor], refs: tuple[Tensor, Tensor] | None) -> Tensor:
        if self.loss == "orpo":
            return orpo_loss(*policy, self.beta)[0]
        if self.loss == "simpo":
            return simpo_loss(*policy, self.beta, self.gamma)
        assert refs is not None
        return dpo_loss(*policy, *refs, self.beta, self.loss, self.label_smoothing)
