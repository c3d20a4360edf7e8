"""Losses of policy optimisation: beside a loop over samples and tokens in the papers' words, and beside TRL."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.policy import (
    KINDS,
    PolicyLoss,
    advantages,
    overlong_penalty,
    policy_loss,
    token_advantages,
)
from lit_efficient.models.generation.batched import generate
from lit_efficient.models.generation.sampling import Sampling
from tests.tasks.test_text_generation import writer

LONGEST = 7


def _slow_advantages(rewards: list[float], group: int, kind: str) -> list[float]:
    def normal(value: float, like: list[float]) -> float:
        if len(like) < 2:
            return 0.0
        mean = sum(like) / len(like)
        return (value - mean) / (math.sqrt(sum((x - mean) ** 2 for x in like) / (len(like) - 1)) + 1e-4)

    found = []
    for i, reward in enumerate(rewards):
        first = i // group * group
        own = [r for r in rewards[first : first + group] if not math.isnan(r)]
        if math.isnan(reward):
            found.append(0.0)
        elif kind == "reinforce++":
            found.append(normal(reward, [r for r in rewards if not math.isnan(r)]))
        elif kind == "rloo":
            found.append(reward - (sum(own) - reward) / (len(own) - 1) if len(own) > 1 else 0.0)
        elif kind == "dr_grpo":
            found.append(reward - sum(own) / len(own))
        else:
            found.append(normal(reward, own))
    return found


def _slow_loss(
    how: PolicyLoss, new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, reference: Tensor, drawn: Tensor
) -> Tensor:
    low, high = how.limits
    each, tokens = [], 0

    def clipped(ratio: Tensor, a: Tensor) -> Tensor:
        return -torch.min(ratio * a, ratio.clamp(low, high) * a)

    for i in range(len(new)):
        places = [t for t in range(new.shape[1]) if mask[i, t]]
        tokens += len(places)
        gaps = [new[i, t] - old[i, t] for t in places]
        total = sum(gaps, start=torch.zeros(()))
        weights = [min(math.exp(old[i, t] - drawn[i, t]), how.cap) for t in places]
        if how.correction == "sequence":
            product = math.exp(sum(float(old[i, t] - drawn[i, t]) for t in places))
            weights = [product if product <= how.cap else 0.0] * len(places)
        elif how.correction == "none":
            weights = [1.0] * len(places)
        mean = float(how.correction != "token")  # of a sample without tokens, which has no gradient
        if places:
            mean = sum(weights) / len(weights)
        k3 = [(reference[i, t] - new[i, t]).exp() - (reference[i, t] - new[i, t]) - 1 for t in places]
        if how.kl == "none":
            k3 = []
        elif how.kl == "k3_weighted":
            ratios = {"rloo": [total] * len(gaps), "gspo": [total / max(len(gaps), 1)] * len(gaps)}.get(how.kind, gaps)
            k3 = [one * ratio.exp() for one, ratio in zip(k3, ratios)]
        penalty = sum((how.beta * one for one in k3), start=torch.zeros(()))
        if how.kind == "rloo":
            each.append(clipped(total.exp(), advantage[i]) * mean + penalty)
        elif how.kind == "gspo":
            each.append(
                clipped((total / max(len(places), 1)).exp(), advantage[i]) * mean * bool(places)
                + penalty / max(len(places), 1)
            )
        else:
            losses = [weight * clipped(gap.exp(), advantage[i]) for gap, weight in zip(gaps, weights)]
            losses = sum(losses, start=torch.zeros(())) + penalty
            each.append(losses / max(len(places), 1) if how.kind == "grpo" else losses)
    if how.kind == "dr_grpo":
        return torch.stack(each).sum() / (len(each) * LONGEST)
    if how.kind in ("dapo", "reinforce++"):
        return torch.stack(each).sum() / max(tokens, 1)
    return torch.stack(each).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_advantages_are_those_of_a_loop(kind: Any) -> None:
    """Over groups with failed, equal and single rewards, and samples without tokens."""
    draw = random.Random(kind)
    for case in range(60):
        torch.manual_seed(case)
        group, count = draw.choice([1, 2, 4]), draw.choice([1, 3])
        rewards = [draw.choice([0.0, 1.0, math.nan, draw.random()]) for _ in range(group * count)]
        if case % 7 == 0:
            rewards = [0.5] * len(rewards)
        found = advantages(torch.tensor(rewards), group, kind)
        torch.testing.assert_close(found, torch.tensor(_slow_advantages(rewards, group, kind)), atol=1e-4, rtol=1e-4)
        assert found.isfinite().all()
        new = (-torch.rand(len(rewards), LONGEST)).requires_grad_()
        old = new.detach() + 0.4 * torch.randn_like(new)
        reference = new.detach() + 0.4 * torch.randn_like(new)
        mask = torch.arange(LONGEST) < torch.randint(LONGEST + 1, (len(rewards), 1))
        kl: Any = draw.choice(["none", "k3", "k3_weighted"])
        clip = draw.choice([None, 0.1]), draw.choice([None, 0.3])
        beta = 0.0 if kl == "none" else 0.2
        correction: Any = draw.choice(["none", "token", "sequence"])
        how = PolicyLoss(kind, *clip, kl, beta, correction=correction, cap=1.2)
        drawn = old + 0.4 * torch.randn_like(new)
        done = policy_loss(how, new, old, found, mask, None if kl == "none" else reference, LONGEST, None, drawn)
        slow = _slow_loss(how, new, old, found, mask, reference, drawn) + 0 * new.sum()  # of no tokens, too
        torch.testing.assert_close(done.loss, slow, atol=1e-6, rtol=1e-5)
        ours, theirs = (torch.autograd.grad(loss, new)[0] for loss in (done.loss, slow))
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ratio_beyond_float32_gives_no_nan(kind: Any) -> None:
    """Of samples with the advantage 0, and of those that are left out."""
    for gap in (100.0, -100.0):
        new = torch.full((3, LONGEST), gap - 1, requires_grad=True)
        mask = torch.ones(3, LONGEST, dtype=torch.bool)
        mask[2] = False
        how = PolicyLoss(kind, kl="k3", beta=0.1)
        done = policy_loss(how, new, new.detach() - gap, torch.tensor([0.0, 1.0, 0.0]), mask, new - gap, LONGEST)
        assert done.loss.isfinite()
        assert torch.autograd.grad(done.loss, new)[0].isfinite().all()


def test_a_penalty_of_a_token_counts_for_it_and_for_those_before_it() -> None:
    rewards = torch.tensor([1.0, 0.0, math.nan])
    penalties = torch.tensor([[0.1, 0.2, 0.0], [0.0, 0.3, 0.5], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    returns = torch.tensor([0.7, 0.8, -0.8, -0.8, -0.5])
    expected = (returns - returns.mean()) / (returns.std() + 1e-4)
    found = token_advantages(rewards, penalties, mask)
    torch.testing.assert_close(found[mask][:5], expected)
    assert found[2].tolist() == [0.0] * 3


def test_an_answer_is_penalised_over_the_last_tokens() -> None:
    found = overlong_penalty(torch.tensor([1, 6, 8, 10]), 10, 4)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 0.5, 1.0]))
    assert overlong_penalty(torch.tensor([1, 10]), 10, 0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kind": "ppo"}, "kind must be one of"),
        ({"clip_low": 1.5}, "clip_low must be above 0 and at most 1"),
        ({"kl": "k3"}, "beta must be above 0 with a kl"),
        ({"beta": 0.1}, "beta must be above 0 with a kl"),
        ({"correction": "tis"}, "correction must be one of"),
        ({"cap": 0.5}, "cap must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        PolicyLoss(**arguments)


def _length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


TRL = [
    ("grpo", {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.0}),
    ("grpo", {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.3}),
    ("grpo", {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.3, "use_bias_correction_kl": False}),
    ("dr_grpo", {"loss_type": "dr_grpo", "beta": 0.3, "scale_rewards": "none", "use_bias_correction_kl": False}),
    ("dapo", {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0}),
    ("dapo", {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.3}),
    ("gspo", {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"}),
    ("rloo", {"epsilon": 0.2, "beta": 0.0}),
    ("rloo", {"epsilon": 0.2, "beta": 0.3}),
    ("grpo", {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.3, "temperature": 0.7}),
    ("rloo", {"epsilon": 0.2, "beta": 0.3, "temperature": 1.5}),
    ("grpo", {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.3, "vllm_importance_sampling_mode": "token_truncate"}),
    (
        "dapo",
        {
            **{"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
            **{"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 2.0},
        },
    ),
    (
        "gspo",
        {
            **{"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"},
            **{"temperature": 0.7, "vllm_importance_sampling_mode": "token_truncate"},
        },
    ),
]


class _Engine:
    """In the place of vLLM: tokens of another network at a temperature, with their log-probabilities."""

    def __init__(self, network: Any, temperature: float) -> None:
        self.network = network
        self.temperature = temperature
        self.drawn: list[list[float]] = []

    def sync_weights(self) -> None:
        """Nothing: the weights are those of another network on purpose."""

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, Any, Any, Any]:
        how = {"sampling": Sampling(self.temperature, 1.0), "seeds": range(len(prompts)), "stop": {1}}
        samples = generate(self.network, prompts, 12, **how)
        self.drawn = [sample.drawn_log_probs for sample in samples]
        return prompts, [sample.tokens for sample in samples], [[[one] for one in row] for row in self.drawn], None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "theirs"), TRL)
def test_losses_gradients_and_advantages_are_those_of_trl(kind: Any, theirs: dict[str, Any], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    network, tokenizer = writer()
    tokenizer.eos_token = "</s>"
    network.generation_config.eos_token_id = tokenizer.eos_token_id
    network.save_pretrained(tmp_path / "base")  # TRL reads the reference again
    network = type(network).from_pretrained(tmp_path / "base").eval()
    batch, group = 8, 4
    common = {"per_device_train_batch_size": batch, "num_generations": group, "max_completion_length": 12}
    common |= {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True}
    rloo = kind == "rloo"
    config = (trl.RLOOConfig if rloo else trl.GRPOConfig)(**common, **theirs)
    trainer = (trl.RLOOTrainer if rloo else trl.GRPOTrainer)(
        model=network,
        reward_funcs=_length_reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "the cat"}] * batch),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    temperature = theirs.get("temperature", 1.0)
    mode = theirs.get("vllm_importance_sampling_mode")
    if mode:
        other = type(network).from_pretrained(tmp_path / "base").eval()
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        trainer.use_vllm = True
        trainer._last_loaded_step = -1
        trainer.vllm_generation = _Engine(other, temperature)
    torch.manual_seed(2)
    beta = theirs.get("beta", 0.0)
    if beta:
        with torch.no_grad():
            for parameter in trainer.ref_model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    rows = [{"prompt": prompt} for prompt in ("the cat", "a dog sat") for _ in range(group)]
    torch.manual_seed(0)
    inputs = trainer._generate_and_score_completions(rows)
    mask = inputs["completion_mask"].bool()
    completions = inputs["completion_ids"]
    scores = _length_reward([ids[keep].tolist() for ids, keep in zip(completions, mask)])
    ids = torch.cat((inputs["prompt_ids"], completions), 1)
    attention = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)

    def log_probs(network: Any = network) -> Tensor:
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        logits = network(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False).logits
        logits = logits[:, -completions.shape[1] - 1 : -1]
        return (logits / temperature).log_softmax(-1).gather(-1, completions[..., None])[..., 0]

    torch.manual_seed(1)
    rewards = torch.tensor(scores)
    reference = None
    with torch.no_grad():
        now = log_probs()
        # Another policy than the present one, for ratios that are clipped
        size = 1.5e-3 if kind == "gspo" else 0.05 if rloo else 0.3
        old = now + size * torch.randn_like(now) * mask
        if beta:
            reference = log_probs(trainer.ref_model)
            assert float((reference - now)[mask].abs().max()) > 0.05
    weighted = "k3_weighted" if theirs.get("use_bias_correction_kl", True) else "k3"
    kl: Any = "none" if not beta else "k1" if rloo else weighted
    correction: Any = mode.split("_")[0] if mode else "none"
    cap = theirs.get("vllm_importance_sampling_clip_max", 3.0)
    how = PolicyLoss(kind, kl=kl, beta=beta, correction=correction, cap=cap)
    drawn = None
    if mode:
        drawn = now.clone()
        drawn[mask] = torch.tensor([one for row in trainer.vllm_generation.drawn for one in row])
        weights = ((now - drawn) * mask).sum(1, keepdim=True) if correction == "sequence" else (now - drawn)[mask]
        assert float(weights.exp().min()) < 0.8
        assert float(weights.exp().max()) > how.cap  # so that the cap counts
        drawn = drawn + old - now
    if rloo:
        inputs["old_logps"] = (old * mask).sum(1)
        if reference is not None:
            rewards = rewards - beta * ((now - reference) * mask).sum(1)
    inputs |= {"old_per_token_logps": old, "ref_per_token_logps": reference, "num_items_in_batch": mask.sum()}
    found = advantages(rewards, group, kind)
    torch.testing.assert_close(found, inputs["advantages"], atol=1e-5, rtol=1e-5)
    parameters = list(network.parameters())
    expected = trainer._compute_loss(network, inputs)
    done = policy_loss(how, log_probs(), old, found, mask, None if rloo else reference, 12, None, drawn)
    torch.testing.assert_close(done.loss, expected, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (done.loss, expected)]
    largest = max(1.0, *(float(one.abs().max()) for one in gradients[1] if one is not None))
    for ours, trls in zip(*gradients):
        if trls is not None:
            assert float((ours - trls).abs().max()) <= 1e-5 * largest
    assert sum(float(one.abs().sum()) for one in gradients[0] if one is not None) > 0
    assert 0 < float(done.clipped_low + done.clipped_high) < 1
