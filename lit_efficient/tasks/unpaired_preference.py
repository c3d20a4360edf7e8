"""Train a language model on answers that are good or bad, without pairs: KTO and APO-zero.

    loss = w (1 - sigmoid(+- beta (log p(y|x) - log p_ref(y|x) - k))),    k = mean log p(y'|x) - log p_ref(y'|x) >= 0

y' are answers to other prompts of the batch. The formulas: :mod:`lit_efficient.losses.preference`; the reference:
:mod:`lit_efficient.tasks.reference`.

Saves: with adapters, a second model: the reference is the network itself with disabled adapters
Costs: a forward pass of the reference, and for KTO a further one of both; without adapters also a copy of the weights
Source: KTO https://arxiv.org/abs/2402.01306, APO https://arxiv.org/abs/2408.06266
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torchmetrics import MeanMetric

from lit_efficient.data.unpaired_preference_data import UnpairedPreferenceData
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses.preference import kto_loss
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.tasks.language_modeling import _DEFAULT_MODEL
from lit_efficient.tasks.reference_task import ReferenceTask

Loss = Literal["kto", "apo_zero"]
_ROWS = ("input_ids", "labels", "attention_mask")


@dataclass(frozen=True)
class Judged:
    """Losses and rewards of a batch of answers."""

    losses: Tensor  # ``[B]``
    rewards: Tensor  # ``[B]``, without a gradient
    kl: Tensor  # ``[]``, without a gradient
    router_loss: Tensor | None = None


class UnpairedPreference(ReferenceTask):
    """Preference learning on batches of answers that are good or bad.

    Batches have ``input_ids``, ``labels`` ``[B, T]``, and optionally ``attention_mask``; the same with the prefix
    ``kl_`` for each prompt with the answer to another one (for kto); and ``desirable`` ``[B]``. Labels are aligned with
    ``input_ids``, and -100 in the prompt. `UnpairedPreferenceData` makes such batches.

    The divergence k is the mean over the batches of all processes in one step, not over accumulated batches. The
    weights should balance the answers: ``desirable_weight`` times the number of good answers should be 1 to 4/3 times
    ``undesirable_weight`` times the number of bad ones.

    Logs ``loss``, ``kl`` and (in validation) ``rewards/desirable`` and ``rewards/undesirable`` under ``train/``,
    ``val/`` and ``test/``. The reward of an answer is ``beta`` times the difference between its log-probability and the
    reference's. Prediction returns rewards ``[B]``.

    Args:
        model: As in `LanguageModeling`, with trained weights or with ``start_from``.
        loss: ``kto``, or ``apo_zero``, which has no divergence.
        beta: Strength of the reference, above 0.
        desirable_weight: Weight of good answers, at least 0.
        undesirable_weight: Weight of bad answers, at least 0.
        start_from: Checkpoint of `LanguageModeling` (SFT) of the same shape with the initial weights. Its adapters are
            merged. A resumed run needs this file too.
        learning_rate: Peak learning rate of AdamW: 1e-6 or below for all weights, ten times more for adapters.
        weight_decay: Weight decay of the matrices.
        warmup_steps: As in `LanguageModeling`.
        cache_reference: As in `Preference`. For kto, the data must pair each prompt with the same answer in each epoch:
            ``fixed_others`` of `UnpairedPreferenceData`.
    """

    logs: ClassVar[tuple[str, ...]] = (
        *("train/loss", "train/kl", "val/loss", "val/kl"),
        *("val/rewards/desirable", "val/rewards/undesirable"),
    )
    loads_as = "UnpairedPreference"
    trains_on = ("judged answers",)

    def __init__(
        self,
        model: GPTConfig | CausalLMConfig = _DEFAULT_MODEL,
        loss: Loss = "kto",
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        start_from: str | None = None,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        warmup_steps: int = 100,
        cache_reference: bool = False,
    ) -> None:
        super().__init__(model, start_from, learning_rate, weight_decay, warmup_steps, cache_reference)
        check_number("UnpairedPreference", "beta", beta, above=0)
        check_number("UnpairedPreference", "desirable_weight", desirable_weight, least=0)
        check_number("UnpairedPreference", "undesirable_weight", undesirable_weight, least=0)
        self.loss: Loss = loss
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight
        own = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        self.save_hyperparameters({"loss": loss, "beta": beta, **own})
        self.epoch_rewards = torch.nn.ModuleDict({"desirable": MeanMetric(), "undesirable": MeanMetric()})

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of the answers, and for kto of the answers to other prompts."""
        if self.loss == "kto":
            return ("", "kl_")
        return ("",)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        data = getattr(trainer_of(self), "datamodule", None)
        changing = isinstance(data, UnpairedPreferenceData) and not data.fixed_others
        if stage == "fit" and self.cache_reference and self.loss == "kto" and changing:
            raise ConfigurationError(
                "UnpairedPreference: cache_reference needs the same answers to other prompts in each epoch: set "
                "fixed_others of UnpairedPreferenceData, or leave out cache_reference"
            )

    def num_tokens(self, batch: dict[str, Tensor]) -> int:
        """Return the number of answers in a batch, by which `TokenWeightedAccumulation` weights batches."""
        return len(batch["input_ids"])

    def judge(self, batch: Mapping[str, Tensor]) -> Judged:
        """Return the losses and rewards of the answers of a batch."""
        needed = [f"{prefix}{name}" for prefix in self.prefixes for name in ("input_ids", "labels")] + ["desirable"]
        missing = [name for name in needed if name not in batch]
        if missing:
            raise ConfigurationError(
                f"UnpairedPreference: a batch must have {', '.join(needed)}; it lacks {', '.join(missing)}. "
                "UnpairedPreferenceData makes such batches"
            )
        rows, *others = self._answers(batch)
        # The reference runs first, so that its activations are freed before the policy saves its own.
        refs, *kl_refs = self.references(batch)
        with torch.no_grad():
            kl_policy = [self._log_probs(other)[0] for other in others]
        policy, _, router_loss = self._log_probs(rows)
        ratios = policy - refs
        kl = ratios.new_zeros(())
        if others:
            kl = (kl_policy[0] - kl_refs[0]).mean()
            if trainer_of(self) is not None:
                gathered = self.all_gather(kl)
                assert isinstance(gathered, Tensor)
                kl = gathered.mean()
            kl = kl.clamp(min=0)
        weights = self.desirable_weight, self.undesirable_weight
        losses = kto_loss(ratios, batch["desirable"].bool(), self.beta, kl, *weights)
        return Judged(losses, self.beta * ratios.detach(), kl, router_loss)

    def _answers(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the tensors of the answers, and for kto of the answers to other prompts."""
        return [
            {name: batch[f"{prefix}{name}"] for name in _ROWS if f"{prefix}{name}" in batch} for prefix in self.prefixes
        ]

    def _live_references(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        reference = self.reference()
        assert reference is not None
        answers = self._answers(batch)
        found: tuple[Tensor, ...] = reference(
            self._built(), lambda: tuple(self._log_probs(rows)[0] for rows in answers)
        )
        return found

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the mean loss, and the loss of each answer ``[B]`` for techniques that reweight samples."""
        done = self.judge(batch)
        loss = done.losses.mean()
        self.log("train/loss", loss, prog_bar=logs_in_bar(loss), batch_size=len(done.losses))
        self.log("train/kl", done.kl, batch_size=len(done.losses))
        output = {"loss": loss, "sample_loss": done.losses}
        if done.router_loss is not None:
            self.log("train/router_loss", done.router_loss, batch_size=len(done.losses))
            output |= {"loss": loss + done.router_loss, "extra_loss": done.router_loss}
        return output

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        for metric in self.epoch_rewards.values():
            metric.reset()  # type: ignore[operator]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log_judged(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._log_judged(batch, "test")

    def _log_judged(self, batch: Mapping[str, Tensor], prefix: str) -> None:
        done = self.judge(batch)
        for name, value in (("loss", done.losses.mean()), ("kl", done.kl)):
            self.log(f"{prefix}/{name}", value, prog_bar=name == "loss", batch_size=len(done.losses), sync_dist=True)
        desirable = batch["desirable"].to(done.rewards.dtype)
        self.epoch_rewards["desirable"].update(done.rewards, desirable)  # type: ignore[operator]
        self.epoch_rewards["undesirable"].update(done.rewards, 1 - desirable)  # type: ignore[operator]

    def on_validation_epoch_end(self) -> None:
        """Log the mean rewards of the epoch."""
        self._log_epoch("val")

    def on_test_epoch_end(self) -> None:
        self._log_epoch("test")

    def _log_epoch(self, prefix: str) -> None:
        for name, metric in self.epoch_rewards.items():
            self.log(f"{prefix}/rewards/{name}", metric.compute(), sync_dist=True)  # type: ignore[operator]

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[str] | Tensor:
        """Return continued texts for ``prompts``, else the reward of each answer ``[B]``."""
        if "prompts" in batch:
            return self.generate_text(batch["prompts"])
        return self.judge(batch).rewards
