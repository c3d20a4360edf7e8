"""Prompts whose samples have one reward are replaced (dynamic sampling), and empty answers are harmless."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from lit_efficient import ConfigurationError, ExactResume, GradientClipping, PolicyLoss, Reward, Rollout
from lit_efficient.data.prompt_data import prompt_batch
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer
from lit_efficient.losses.policy import KINDS
from lit_efficient.tasks import rewards
from tests.processes import run_ranks
from tests.tasks.test_policy_optimization import ROWS, Seen, _loader, _task, letters, trainer
from tests.tasks.test_text_generation import writer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
DIFFERENT = {"the cat": False, "a dog sat": True, "on": True, "the mat, and": False}


def length(prompt: str, completion: str, row: Any) -> float:
    return (len(completion) + 0.1 * sum(map(ord, completion))) / 100 if DIFFERENT[prompt] else 0.5


def _answered(task: Any) -> list[list[str]]:
    """The prompts that are answered from now on, those of one call in a list."""
    calls: list[list[str]] = []
    write = task._write

    def noted(prompts: Any, *more: Any) -> Any:
        calls.append(list(dict.fromkeys(prompts)))
        return write(prompts, *more)

    task._write = noted
    return calls


@pytest.mark.parametrize(
    ("wanted", "calls", "used", "kept"),
    [
        (1, [["the cat"], ["a dog sat"]], 1, ["a dog sat"]),
        (2, [["the cat", "a dog sat"], ["on"]], 2, ["a dog sat", "on"]),
        (3, [["the cat", "a dog sat", "on"], ["the mat, and"]], 2, ["the cat", "a dog sat", "on"]),
        (4, [["the cat", "a dog sat", "on", "the mat, and"]], 2, list(DIFFERENT)),
    ],
)
def test_prompts_whose_samples_have_one_reward_are_replaced(
    wanted: int, calls: list[list[str]], used: int, kept: list[str], tmp_path: Path
) -> None:
    task = _task([length], loss=PolicyLoss(prompts=wanted))
    trainer(default_root_dir=tmp_path, max_steps=1).fit(task, _loader(batch_size=4))
    found = _answered(task)
    made = task.experience(prompt_batch(ROWS), 3)
    assert found == calls
    assert made.figures["answered"] == sum(map(len, calls))
    assert made.figures["used"] == used
    assert len(made.advantage) == 4 * wanted
    for place, prompt in enumerate(kept):
        group = made.advantage[4 * place : 4 * place + 4]
        assert bool(group.any()) == DIFFERENT[prompt]
        row = made.rows["input_ids"][4 * place]
        assert task.tokenizer.decode(row.tolist()).startswith(prompt)
    task.loss = PolicyLoss()  # an answer does not depend on the others that are written
    whole = task.experience(prompt_batch(ROWS), 3)
    for place, prompt in enumerate(kept):
        number = list(DIFFERENT).index(prompt)
        for name in ("input_ids", "labels"):
            own, all_of = made.rows[name][4 * place : 4 * place + 4], whole.rows[name][4 * number : 4 * number + 4]
            least = min(own.shape[1], all_of.shape[1])
            assert torch.equal(own[:, :least], all_of[:, :least])


def test_a_batch_without_spare_prompts_is_refused_before_generation(tmp_path: Path) -> None:
    task = _task([length], loss=PolicyLoss(prompts=3))
    calls = _answered(task)
    with pytest.raises(
        ConfigurationError, match=r"loss\.prompts must be at most the number of prompts in a batch, 2, got 3"
    ):
        trainer(default_root_dir=tmp_path, max_steps=1).fit(task, _loader(batch_size=2))
    assert calls == []
    with pytest.raises(ConfigurationError, match="prompts must be null for reinforce"):
        PolicyLoss("reinforce++", prompts=2)
    with pytest.raises(ConfigurationError, match="prompts must be a whole number of at least 1 or null"):
        PolicyLoss(prompts=0)


def test_a_run_that_replaces_prompts_resumes_bit_for_bit(tmp_path: Path) -> None:
    found = []
    for path in (None, tmp_path / "half.ckpt"):
        seen = Seen(3, tmp_path / "half.ckpt")
        task = _task([length], loss=PolicyLoss(prompts=2), uses=2)
        run = trainer(default_root_dir=tmp_path, max_steps=6, callbacks=[ExactResume(), seen])
        run.fit(task, _loader(batch_size=4, shuffle=True), ckpt_path=path)
        found.append((task.state_dict(), seen.figures[-3:]))
    (whole, figures), (resumed, again) = found
    assert figures == again
    assert {step["train/answered"] for step in figures} <= {2.0, 3.0, 4.0}
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name])


@pytest.mark.turns(4, family="ranks")
def test_two_processes_that_replace_prompts_train_as_one(tmp_path: Path) -> None:
    """Each replaces its own: here process 0 the first prompt by the third, as one process does."""
    for kind in ("grpo", "dapo"):
        run_ranks(_in_ranks, tmp_path, kind)
        found = torch.load(tmp_path / "ranks.pt", weights_only=True)
        torch.testing.assert_close(found, _trained(kind, tmp_path), atol=2e-5, rtol=1e-4)


def _trained(kind: Any, folder: Path, **options: Any) -> Any:
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    rollout = Rollout(samples=4, max_new_tokens=8, stop=("a",))
    task = _task([length], loss=PolicyLoss(kind, prompts=2 // world), rollout=rollout)
    rows: Any = ROWS
    order: Any = DistributedSampler(rows, world, rank, False)
    run = trainer(default_root_dir=folder, max_steps=3, use_distributed_sampler=False, **options)
    task.configure_optimizers = lambda: torch.optim.SGD(task.parameters(), 0.1)  # type: ignore[method-assign]
    run.fit(task, _loader(batch_size=4 // world, sampler=order))
    return task.state_dict()


def _in_ranks(kind: str) -> None:
    found = _trained(kind, Path(), devices=2, strategy="ddp")
    if torch.distributed.get_rank() == 0:
        torch.save(found, "ranks.pt")


ALL = [
    Reward(rewards.exact_answer),
    Reward(rewards.numeric_answer),
    Reward(rewards.matches, arguments={"pattern": "a*"}),
    Reward(rewards.shorter),
    Reward(rewards.valid_python),
    Reward(rewards.python_tests, arguments={"column": "code"}),
    Reward(letters),
]


@pytest.mark.parametrize("kind", KINDS)
def test_empty_answers_have_a_reward_and_a_token_and_leave_no_nan(kind: Any, tmp_path: Path) -> None:
    """All rewards are equal: the loss is 0, and clipping divides by no norm of 0."""
    seen = Seen()
    task = _task(loss=PolicyLoss(kind, kl="k3", beta=0.1))
    task.rewards = ALL
    task.tokenizer_state = pack_tokenizer(writer()[1], stop=range(300))  # each token ends an answer
    rows = [{**row, "answer": 3, "code": ["assert 1"]} for row in ROWS]
    clip = GradientClipping(max_norm=1.0)
    trainer(default_root_dir=tmp_path, max_steps=2, callbacks=[seen, clip]).fit(task, _loader(rows))
    for figures in seen.figures:
        assert all(value == value and abs(value) < 1e6 for value in figures.values()), figures
        assert figures["train/empty"] == 1
        assert figures["train/length"] == 1
        assert figures["train/failed"] == 0
        assert figures["train/equal_rewards"] == 1
        assert figures["train/loss"] == pytest.approx(0, abs=1e-6)
    assert seen.figures[0]["train/reward/matches"] == 1
    assert seen.figures[0]["train/reward/python_tests"] == 1
    assert seen.figures[0]["train/reward/valid_python"] == 0
    made = task.experience(prompt_batch(rows), 0)
    assert (made.rows["labels"] != -100).sum(1).tolist() == [1] * 16
    assert all(parameter.isfinite().all() for parameter in task.parameters())
