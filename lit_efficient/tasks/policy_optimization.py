"""Reinforcement learning on a language model's own answers: GRPO and its relatives.

    prompts -> several samples of each (:mod:`lit_efficient.models.generation`) -> rewards -> advantages in the group
            -> loss on the tokens of the samples, for one or several optimizer steps

Saves: a critic, because the other samples of a prompt are the baseline; with adapters also a second model, because the
    reference is the network with disabled adapters; the forward of a prompt for all its samples but one
Costs: generation, which usually takes most of the time; for a KL one forward pass of the reference per batch of samples

Formulas and sources: :mod:`lit_efficient.losses.policy`; rewards: :mod:`lit_efficient.tasks.rewards`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_efficient.application.gradients import gradients_of
from lit_efficient.callbacks.token_weighted_accumulation import combined_factor, scale_gradients
from lit_efficient.distributed.ranks import gather_objects, place_among_ranks
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.internals.lightning_loops import accumulates
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.losses.policy import (
    PER_TOKEN,
    PolicyLoss,
    PolicyResult,
    advantages,
    differing,
    overlong_penalty,
    policy_loss,
    token_advantages,
)
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.networks.gpt import GPTConfig
from lit_efficient.tasks.environments import Environment
from lit_efficient.tasks.judged_samples import JudgedSamples, enough_samples, table_of
from lit_efficient.tasks.language_modeling import _DEFAULT_MODEL
from lit_efficient.tasks.reference_task import ReferenceTask
from lit_efficient.tasks.reward_models import RewardModel, RewardScorer, check_rewards, load_scorers, rewards_of
from lit_efficient.tasks.rewards import Reward
from lit_efficient.tasks.rollout import (
    Answers,
    Experience,
    Rollout,
    asks_in_turns,
    check_writes,
    joined,
    moved,
    sample_seeds,
    write_answers,
)

_MOST_SENTENCES = 3  # warnings about rewards in one batch
_HELD = "policy_optimization"


class PolicyOptimization(ReferenceTask):
    """Train a language model on rewards of its own answers.

    Batches have ``prompts`` (texts, or lists of messages) and ``rows``, which rewards get; `PromptData` makes them. The
    rewards of the samples of a prompt are compared with each other. A sample whose reward fails is left out, with a
    warning. If all rewards of a prompt are equal, its samples have no effect.

    Logs under ``train/``: ``loss``, ``reward``, ``reward/NAME`` of each function, ``reward_std`` (mean over prompts),
    ``equal_rewards`` (share of prompts whose samples all have one reward), ``failed`` (share of samples without a
    reward), ``length``, ``truncated`` and ``empty`` (shares of samples), ``entropy`` (estimate: minus the mean
    log-probability of the tokens), ``clipped_low``, ``clipped_high``, ``kl`` (k3), ``rounding``, the mean difference
    between the log-probabilities of the tokens when they were drawn and in training, and ``importance`` and
    ``importance_max``, the mean and the largest ratio of these probabilities. With ``loss.prompts`` also ``answered``,
    the number of prompts that were answered, and ``used``, the number of prompts with different rewards. Under ``val/``
    and ``test/``: ``reward``, ``reward/NAME``, ``length`` and ``truncated`` of one sample of each prompt.

    Args:
        rewards: Rewards, summed by their weights: functions (`Reward`) and networks (`RewardModel`).
        model: As in `LanguageModeling`, with trained weights or with ``start_from``.
        loss: The loss.
        rollout: Generation of the samples, at least 2 of each prompt.
        uses: Optimizer steps with the same samples. In the others the batch's own prompts are not used.
        environment: Environment that answers the model, such as `ToolEnvironment`. Prompts are then written in the chat
            template, and a sample is a conversation.
        start_from: Checkpoint of `LanguageModeling` (SFT) of the same shape with the initial weights. Its adapters are
            merged. A resumed run needs this file too.
        learning_rate: Peak learning rate of AdamW: about 1e-6 for all weights of a large model, 1e-5 to 3e-4 for
            adapters.
        weight_decay: Weight decay of the matrices.
        warmup_steps: As in `LanguageModeling`.
    """

    trains_on = ("prompts",)
    loads_as = "Preference"  # without rewards, and with start_from, whose weights adapters need
    without_reference = ", or set loss.kl to none"

    def __init__(
        self,
        rewards: list[Reward | RewardModel],
        model: GPTConfig | CausalLMConfig = _DEFAULT_MODEL,
        loss: PolicyLoss = PolicyLoss(),  # noqa: B008 (frozen)
        rollout: Rollout = Rollout(),  # noqa: B008 (frozen)
        uses: int = 1,
        environment: Environment | None = None,
        start_from: str | None = None,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(model, start_from, learning_rate, weight_decay, warmup_steps, cache_reference=False)
        check_rewards("PolicyOptimization", rewards)
        check_number("PolicyOptimization", "uses", uses, least=1, whole=True)
        check_number("PolicyOptimization", "rollout.samples", rollout.samples, least=2, whole=True)
        if loss.overlong > rollout.max_new_tokens:
            allowed = f"at most rollout.max_new_tokens = {rollout.max_new_tokens}"
            raise refusal("PolicyOptimization", "loss.overlong", allowed, loss.overlong)
        self.rewards = rewards
        self.loss = loss
        self.rollout = rollout
        self.environment = environment
        self.uses = uses
        self._held: dict[int, Experience] = {}  # by the number of the micro-batch in an optimizer step
        self._counts: list[float] = []  # learned tokens of each micro-batch in an optimizer step
        self._rewarded = False  # a sample of this run has had a reward
        self._scorers: dict[str, RewardScorer] = {}  # reward models by their names
        self.sample_table: list[dict[str, Any]] = []
        """The last samples that were written for training, with their rewards."""
        self.save_hyperparameters({"uses": uses})

    @property
    def needs_reference(self) -> bool:
        """True if the loss has a KL."""
        return self.loss.kl != "none"

    @property
    def _chats(self) -> bool:
        """True if prompts that are texts are written in the chat template."""
        return self.rollout.chat or self.environment is not None

    def num_tokens(self, batch: dict[str, Any]) -> int:
        """Return the number of prompts of a batch."""
        return len(batch["prompts"])

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit":  # a checkpoint is loaded later
            self._held = {}
            self._counts = []
        if stage == "predict":
            return
        in_turns = self._chats or asks_in_turns(self, self.rollout)
        self._scorers = self._scorers or load_scorers(self.rewards, in_turns)

    def on_fit_start(self) -> None:
        check_writes(self, self.rollout, self.environment)
        super().on_fit_start()

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        if self.rollout.engine is not None:
            self.rollout.engine.close()

    def on_train_start(self) -> None:
        """Do nothing, because batches have no labels to count."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Return the loss on samples: new ones, or those of an earlier step."""
        step = self.trainer.global_step
        place = batch_idx % self.trainer.accumulate_grad_batches
        if step % self.uses == 0 or place not in self._held:
            self._held = {number: held for number, held in self._held.items() if number < place}
            self._held[place] = self.experience(batch, mix_seed(self.rollout.seed, step, place))
        held = self._held[place]
        if held.advantage.device != self.device:  # from a checkpoint
            held = self._held[place] = Experience(**moved(vars(held), self.device))
        log_probs, router_loss = self._token_log_probs(held.rows)
        if held.old is None:
            held.old = log_probs.detach()
            mask = self._mask(held)
            apart = (held.old - held.drawn)[mask]
            held.figures |= {
                "entropy": _mean(-held.old[mask]),
                "rounding": _mean(apart.abs()),
                "importance": _mean(apart.exp()),
                "importance_max": float(apart.exp().max()) if len(apart) else 0.0,
            }
            for name, value in held.figures.items():
                self.log(f"train/{name}", value, batch_size=self.num_tokens(batch), prog_bar=name == "reward")
        done = self._loss_of(held, log_probs)
        size = self.num_tokens(batch)
        self.log("train/loss", done.loss.detach(), batch_size=size)
        self.log("train/clipped_low", done.clipped_low, batch_size=size)
        self.log("train/clipped_high", done.clipped_high, batch_size=size)
        if self.needs_reference:
            self.log("train/kl", done.kl, batch_size=size)
        output = {"loss": done.loss}
        if router_loss is not None:
            self.log("train/router_loss", router_loss, batch_size=size)
            output = {"loss": done.loss + router_loss, "extra_loss": router_loss}
        if self.uses == 1:
            self._held = {}
        if self.trainer.accumulate_grad_batches > 1 and self.loss.kind in PER_TOKEN:
            if place == 0:
                self._counts = []
            self._counts.append(float(self._learned_tokens(held)))
            share = self._counts[-1] / max(self._counts[0], 1.0)
            output = {name: value * share for name, value in output.items()}
        return output

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run the backward pass. After the last micro-batch, complete the mean over the tokens of all of them."""
        super().backward(loss, *args, **kwargs)
        if self._counts and not accumulates(self.trainer):
            factor = combined_factor(
                1, self.trainer.accumulate_grad_batches, max(self._counts[0], 1.0), sum(self._counts)
            )
            self._counts = []
            if factor != 1:
                scale_gradients((g for o in self.trainer.optimizers for g in gradients_of(o).values()), factor)

    def _learned_tokens(self, held: Experience) -> Tensor:
        """Return the number of learned tokens, or its mean over processes, which average their gradients."""
        count = self._mask(held).sum().to(held.drawn.dtype)
        if self.trainer.world_size > 1:
            count = self.trainer.strategy.reduce(count, reduce_op="mean")
        return count

    def _mask(self, held: Experience) -> Tensor:
        return held.rows["labels"][:, 1:] != IGNORE

    def _loss_of(self, held: Experience, log_probs: Tensor) -> PolicyResult:
        assert held.old is not None
        tokens = self._learned_tokens(held) if self.loss.kind in PER_TOKEN else None
        return policy_loss(
            self.loss,
            log_probs,
            held.old,
            held.advantage,
            self._mask(held),
            held.reference,
            self.rollout.max_new_tokens,
            tokens,
            held.drawn,
        )

    def _token_log_probs(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the log-probability of each token but the first ``[N, T - 1]``, and the balancing loss of experts."""
        losses, _, router_loss = self._losses(rows, temperature=self.rollout.temperature)
        return -losses[:, : rows["labels"].shape[1] - 1], router_loss

    def experience(self, batch: Mapping[str, Any], seed: int) -> Experience:
        """Write samples for the prompts of a batch, and compute their rewards and advantages."""
        count = len(batch["prompts"])
        wanted = count if self.loss.prompts is None else self.loss.prompts
        if wanted > count:
            allowed = f"at most the number of prompts in a batch, {count}"
            raise refusal("PolicyOptimization", "loss.prompts", allowed, wanted)
        group = self.rollout.samples
        found, kept = enough_samples(lambda numbers: self._answered(batch, numbers, seed), count, wanted, group)
        figures = self._figures(found.parts, found.rewards, found.lengths, found.cut)
        figures["empty"] = sum(not text.strip() for text in found.written.texts) / len(found.rewards)
        if self.loss.prompts is not None:
            figures["answered"] = len(found.rewards) / group
            figures["used"] = float(differing(kept.learned, group).sum())
        rewards = kept.learned
        inputs, drawn = joined(kept.written.ids, kept.written.samples, self.device)
        reference = None
        if self.needs_reference:
            network = self.reference()
            assert network is not None
            reference = network(self._built(), lambda: self._token_log_probs(inputs)[0])
        left_out = rewards.isnan()
        policy = drawn
        if self.loss.kl == "k1" and self.rollout.sampling != Sampling(self.rollout.temperature, 1.0):
            # A filter raises the probabilities of what it leaves, and k1 would grow with each token.
            with torch.no_grad():
                policy = self._token_log_probs(inputs)[0]
        advantage = self._advantage(rewards, policy, reference, inputs["labels"][:, 1:] != IGNORE)
        inputs["labels"] = inputs["labels"].masked_fill(left_out[:, None], IGNORE)
        self.sample_table = table_of(kept, [reward.name for reward in self.rewards], advantage)
        return Experience(inputs, advantage, drawn, None, reference, figures)

    def _answered(self, batch: Mapping[str, Any], numbers: range, seed: int) -> JudgedSamples:
        """Write samples for some prompts of a batch, and compute their rewards."""
        group = self.rollout.samples
        prompts = [batch["prompts"][i] for i in numbers for _ in range(group)]
        seeds = sample_seeds(self.trainer, seed, numbers.stop, group)[numbers.start * group :]
        rows = [batch["rows"][i] for i in numbers for _ in range(group)]
        written = self._write(prompts, seeds, rows)
        parts = self._judge(prompts, written, rows, mix_seed(seed, numbers.start))
        lengths = torch.tensor([len(sample.tokens) for sample in written.samples], device=self.device)
        cut = torch.tensor([sample.end == "length" for sample in written.samples], device=self.device)
        rewards = parts.sum(1).to(self.device)
        rewards = rewards - overlong_penalty(lengths, self.rollout.max_new_tokens, self.loss.overlong)
        learned = rewards
        if self.loss.mask_truncated:
            learned = torch.where(cut, math.nan, rewards)
        return JudgedSamples(prompts, written, parts, rewards, learned, lengths, cut)

    def _advantage(self, rewards: Tensor, policy: Tensor, reference: Tensor | None, mask: Tensor) -> Tensor:
        kind = self.loss.kind
        if self.loss.kl == "k1":
            assert reference is not None
            penalties = self.loss.beta * (policy - reference) * mask
            if kind == "reinforce++":
                return token_advantages(rewards, penalties, mask, _gathered)
            rewards = rewards - penalties.sum(1)
        return advantages(rewards, self.rollout.samples, kind, _gathered)

    def _write(self, prompts: Sequence[Any], seeds: Sequence[int], rows: Sequence[Any]) -> Answers:
        return write_answers(self, prompts, seeds, self.rollout, self.environment, rows)

    def _judge(self, prompts: Sequence[Any], written: Answers, rows: Sequence[Any], seed: int) -> Tensor:
        """Return the weighted rewards ``[N, functions]``, with NaN where one fails, and warn about these."""
        seed = mix_seed(seed, self.trainer.global_rank)
        parts, sentences = rewards_of(
            self.rewards,
            self._scorers,
            prompts,
            written.texts,
            rows,
            self._chats,
            self.device,
            seed,
            written.conversations,
        )
        parts = parts.float()
        for sentence in sentences[:_MOST_SENTENCES]:
            rank_zero_warn(f"PolicyOptimization: a sample is left out: {sentence}")
        if not self._rewarded:  # then all processes are here together
            rewarded = not bool(parts.sum(1).isnan().all())
            self._rewarded = self.trainer.strategy.reduce_boolean_decision(rewarded, all=False)
        if not self._rewarded:
            raise ConfigurationError(
                f"PolicyOptimization: no sample of the first batch has a reward. The first failure: {sentences[0]}"
            )
        return parts

    def _figures(self, parts: Tensor, rewards: Tensor, lengths: Tensor, cut: Tensor) -> dict[str, float]:
        figures = {
            "reward": float(rewards.nanmean()),
            "failed": _mean(rewards.isnan().float()),
            "length": _mean(lengths.float()),
            "truncated": _mean(cut.float()),
        }
        for reward, values in zip(self.rewards, parts.T):
            figures[f"reward/{reward.name}"] = float(values.nanmean())
        if len(rewards) % self.rollout.samples == 0:
            groups = [row[row.isfinite()] for row in rewards.view(-1, self.rollout.samples)]
            # The mean of equal numbers is rounded, and their standard deviation is then not 0.
            differ = [bool((row != row[:1]).any()) for row in groups]
            spreads = [float(row.std()) if apart else 0.0 for row, apart in zip(groups, differ)]
            figures |= {"reward_std": sum(spreads) / len(groups), "equal_rewards": 1 - sum(differ) / len(groups)}
        return figures

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, "test")

    def _evaluate(self, batch: dict[str, Any], batch_idx: int, prefix: str) -> None:
        """Log the rewards of one sample of each prompt, whose draws are the same in each validation."""
        written = self._write(batch["prompts"], self._seeds(batch, batch_idx), batch["rows"])
        parts = self._judge(batch["prompts"], written, batch["rows"], mix_seed(self.rollout.seed, batch_idx))
        lengths = torch.tensor([len(sample.tokens) for sample in written.samples])
        cut = torch.tensor([sample.end == "length" for sample in written.samples])
        figures = self._figures(parts, parts.sum(1), lengths, cut)
        for name in ("failed", "length", "truncated"):
            self.log(f"{prefix}/{name}", figures[name], batch_size=len(parts), sync_dist=True)
        # Means over the samples of all batches that have a reward
        columns = {"reward": parts.sum(1)} | {f"reward/{one.name}": part for one, part in zip(self.rewards, parts.T)}
        for name, values in columns.items():
            found = values[values.isfinite()]
            self.log(f"{prefix}/{name}", _mean(found), batch_size=len(found), sync_dist=True)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[str]:
        """Return an answer to each of ``prompts``, which is written as in validation."""
        return self._write(batch["prompts"], self._seeds(batch, batch_idx), batch.get("rows", ())).texts

    def _seeds(self, batch: dict[str, Any], batch_idx: int) -> list[int]:
        """Return seeds that are the same in each validation."""
        return [mix_seed(self.rollout.seed, batch_idx, self.global_rank, i) for i in range(len(batch["prompts"]))]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        cpu = torch.device("cpu")
        held = {place: moved(vars(one), cpu) for place, one in self._held.items()}
        checkpoint[_HELD] = {"held": gather_objects(held), "counts": self._counts, "rewarded": self._rewarded}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get(_HELD)
        if saved is None:
            return
        self._counts = saved["counts"]
        self._rewarded = saved["rewarded"]
        rank, count = place_among_ranks()
        if len(saved["held"]) == count:  # with another number of processes, samples are drawn anew
            self._held = {place: Experience(**fields) for place, fields in saved["held"][rank].items()}


def _gathered(values: Tensor) -> Tensor:
    """Return the numbers ``[N]`` of all processes."""
    return torch.cat(gather_objects(values.cpu())).to(values.device)


def _mean(values: Tensor) -> float:
    if values.numel():
        return float(values.float().mean())
    return 0.0
