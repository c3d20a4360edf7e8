"""On-policy distillation (GKD): the student writes answers, and learns the teacher's distribution on them.

    loss = D(p, q) on the student's own answers                 in a share of the batches
           w D(p, q) + (1 - w) * -log q on the given answers    in the others

Both are means over the tokens of answers. D is the forward or reverse KL or the Jensen-Shannon divergence of
:mod:`lit_efficient.losses.distillation`. Its gradient does not flow through the draws.

Saves: the mismatch of training on given answers and continuing one's own; a student corrects the errors that it makes
Costs: generation in that share of the steps, which then usually takes most of the time
Source: Agarwal et al. (2023), https://arxiv.org/abs/2306.13649.
"""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.internals.lightning_loops import BEFORE_TRANSFER
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.internals.wraps import inner_method, unwrap_method, wrap_method
from lit_efficient.losses.distillation import Divergence
from lit_efficient.losses.next_token import IGNORE, targets_of
from lit_efficient.mechanisms.moving import holds_images
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.tasks.distillation import Distillation, DistillationLoss
from lit_efficient.tasks.language_modeling import _DEFAULT_MODEL
from lit_efficient.tasks.rollout import Rollout, check_writes, continue_ids, joined, sample_seeds, write_answers
from lit_efficient.tasks.teacher import TeacherServer, WeightedTeacher, documents_of

_TRUNCATED = "truncated"  # entry of a batch of own answers


def prompts_of(batch: Mapping[str, Tensor]) -> list[list[int]]:
    """Return the tokens before the last answer of each document of a batch.

    The last answer is the last run of tokens that contribute to the loss. Documents without such tokens are left out.
    A text whose tokens all contribute keeps its first token.

    Args:
        batch: ``input_ids`` and ``labels`` (or ``shift_labels``) ``[B, T]``, with ``attention_mask`` for padded rows
            and ``position_ids`` for packed rows.
    """
    learned = targets_of(batch) != IGNORE
    found = []
    for row, places in documents_of(batch):
        own = learned[row, places].tolist()
        if any(own):
            start = len(own) - 1 - own[::-1].index(True)  # the last token of the last answer
            while start > 0 and own[start - 1]:
                start -= 1
            found.append(batch["input_ids"][row, places[: start + 1]].tolist())  # a target is the token behind
    return found


class OnPolicyDistillation(Distillation):
    """`Distillation` on answers that the student writes, mixed with the given ones.

    In a share of the training batches, the last answer of each row is replaced by one that the student draws. Such a
    batch has no cross-entropy. Rows may be packed, and each of their documents is answered. `PromptData` is possible
    with ``share`` 1: its validation logs ``val/divergence`` on drawn answers only.

    Logs what `Distillation` logs, and for own answers ``train/length`` and ``train/truncated`` (share). Their
    ``train/cross_entropy`` estimates the student's entropy.

    Args:
        teacher: As in `Distillation`.
        model: The student, as in `LanguageModeling`.
        objective: Objective of the student. The divergence has its own temperature, which does not affect the draws.
        share: Share of the batches with own answers, in [0, 1]. All processes choose the same.
        rollout: Generation of the answers.
        learning_rate: As in `LanguageModeling`.
        weight_decay: As in `LanguageModeling`.
        warmup_steps: As in `LanguageModeling`.
    """

    trains_on = ("tokens", "prompts")

    def __init__(
        self,
        teacher: str | CausalLMConfig | TeacherServer | list[WeightedTeacher],
        model: GPTConfig | CausalLMConfig = _DEFAULT_MODEL,
        objective: DistillationLoss = DistillationLoss(Divergence("reverse_kl"), weight=1.0),  # noqa: B008 (frozen)
        share: float = 0.5,
        rollout: Rollout = Rollout(samples=1),  # noqa: B008 (frozen)
        learning_rate: float = 1e-5,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(
            teacher,
            model,
            objective,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
        )
        check_number("OnPolicyDistillation", "share", share, least=0, most=1)
        self.share = share
        self.rollout = rollout
        self._asked = False  # the validation data are prompts without answers
        self.save_hyperparameters({"share": share})

    def setup(self, stage: str) -> None:
        data = getattr(trainer_of(self), "datamodule", None)
        if getattr(data, "batches", None) == "prompts":
            self._check_share()
        super().setup(stage)

    def on_fit_start(self) -> None:
        check_writes(self, self.rollout)

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        if self.rollout.engine is not None:
            self.rollout.engine.close()

    def on_train_start(self) -> None:
        super().on_train_start()
        wrap_method(self, BEFORE_TRANSFER, _before_transfer)

    def on_train_end(self) -> None:
        unwrap_method(self, BEFORE_TRANSFER, _before_transfer)
        super().on_train_end()

    def _mixed(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a training batch, or rows with the student's own answers in a share of the batches."""
        seed = mix_seed(self.rollout.seed, self.trainer.fit_loop.total_batch_idx)
        if "prompts" in batch:
            self._check_share()
        if random.Random(seed).random() >= self.share:  # noqa: S311
            return batch
        with self.trainer.precision_plugin.forward_context():
            return self._answered(batch, seed)

    def _check_share(self) -> None:
        if self.share != 1:
            allowed = "1 for data of prompts, which have no given answers"
            raise refusal("OnPolicyDistillation", "share", allowed, self.share)

    def _answered(self, batch: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
        """Return rows with the student's answers to the prompts of a batch, on the CPU."""
        if holds_images(batch):
            raise ConfigurationError("OnPolicyDistillation: rows with images cannot be answered: set share to 0")
        texts = "prompts" in batch
        prompts = batch["prompts"] if texts else prompts_of(batch)
        if not prompts:
            return {**batch}
        seeds = sample_seeds(self.trainer, seed, len(prompts), self.rollout.samples)
        prompts = [prompt for prompt in prompts for _ in range(self.rollout.samples)]
        written = (write_answers if texts else continue_ids)(self, prompts, seeds, self.rollout)
        rows, _ = joined(written.ids, written.samples, torch.device("cpu"))
        rows[_TRUNCATED] = torch.tensor([sample.end == "length" for sample in written.samples])
        return rows

    def _weight(self, batch: Mapping[str, Tensor]) -> float:
        if _TRUNCATED in batch:
            return 1.0
        return super()._weight(batch)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        if _TRUNCATED in batch:
            lengths = (batch["labels"] != IGNORE).sum(1)
            self.log("train/length", lengths.float().mean())
            self.log("train/truncated", batch[_TRUNCATED].float().mean())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._asked = "prompts" in batch
        if not self._asked:
            super().validation_step(batch, batch_idx)
            return
        rows = self._answered(batch, mix_seed(self.rollout.seed, batch_idx))
        rows = {name: tensor.to(self.device) for name, tensor in rows.items()}
        parts, targets, _ = self._token_losses(rows, 1.0)
        self.epoch_divergence.update(parts.divergence, targets)

    def _log_epoch(self, prefix: str) -> None:
        if self._asked:
            self._log_divergence(prefix)
        else:
            super()._log_epoch(prefix)


def _before_transfer(self: Any, batch: object, *args: object, **kwargs: object) -> Any:
    """Wrap of the method that gets each batch on the host, before its tokens are counted."""
    batch = inner_method(self, BEFORE_TRANSFER, _before_transfer)(batch, *args, **kwargs)
    if self.trainer.training and batch is not None:
        return self._mixed(batch)
    return batch
