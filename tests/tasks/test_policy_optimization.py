"""Reinforcement learning on a model's own answers: it learns, resumes, and leaves out what has no reward."""

from __future__ import annotations

import math
import os
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, DistributedSampler

from lit_efficient import (
    CausalLMConfig,
    ChunkedCrossEntropy,
    ExactResume,
    GPTConfig,
    LanguageModeling,
    LoRA,
    PolicyLoss,
    PolicyOptimization,
    PromptData,
    Reward,
    Rollout,
)
from lit_efficient.data.prompt_data import prompt_batch
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer
from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.policy import KINDS
from lit_efficient.tasks.loading import load_language_model
from lit_efficient.tasks.rewards import numeric_answer
from tests import support
from tests.models.libraries.test_causal_lm import FAMILIES
from tests.processes import run_ranks
from tests.tasks.test_text_generation import writer

GPT = GPTConfig(vocab_size=300, dim=32, depth=1, num_heads=2, max_length=64)
ROWS = [{"prompt": prompt} for prompt in ("the cat", "a dog sat", "on", "the mat, and")]
trainer = partial(support.trainer, max_epochs=-1, limit_val_batches=0)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


def letters(prompt: str, completion: str, row: Any) -> float:
    """Share of the letters a to m."""
    return sum(letter in "abcdefghijklm" for letter in completion) / max(len(completion), 1)


def _task(rewards: Any = (letters,), **options: Any) -> PolicyOptimization:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "model": GPT,
        "rollout": Rollout(samples=4, max_new_tokens=6),
        "learning_rate": 1e-2,
        "rewards": [Reward(one) for one in rewards],
    }
    task = PolicyOptimization(**given | options)
    task.tokenizer_state = pack_tokenizer(writer()[1])
    return task


def _loader(rows: list[dict[str, Any]] = ROWS, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    data: Any = rows
    return DataLoader(data, batch_size, collate_fn=prompt_batch, **options)


class Seen(Callback):
    """The logged figures of each step, and a checkpoint in the middle."""

    def __init__(self, save_at: int = -1, path: Path | None = None) -> None:
        self.figures: list[dict[str, float]] = []
        self.save_at = save_at
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        if trainer.global_step == self.save_at:
            trainer.save_checkpoint(self.path)  # type: ignore[arg-type]


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("kind", KINDS)
def test_the_reward_rises_under_every_loss(kind: Any, tmp_path: Path) -> None:
    seen = Seen()
    clip: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2} if kind == "gspo" else {}
    rollout = Rollout(samples=8, max_new_tokens=6)
    task = _task(loss=PolicyLoss(kind, **clip), rollout=rollout, uses=2, learning_rate=3e-2)
    run = trainer(default_root_dir=tmp_path, max_steps=40, callbacks=[seen], limit_val_batches=1.0)
    run.fit(task, _loader(batch_size=4), _loader(batch_size=4))
    rewards = [figures["train/reward"] for figures in seen.figures]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:4]) / 4 + 0.1
    assert seen.figures[0]["train/reward"] == pytest.approx(seen.figures[0]["train/reward/letters"])
    assert seen.figures[0]["train/entropy"] == pytest.approx(math.log(300), abs=0.2)
    assert seen.figures[0]["train/rounding"] < 1e-5
    assert seen.figures[0]["train/clipped_low"] == seen.figures[0]["train/clipped_high"] == 0
    assert float(run.validate(task, _loader(batch_size=4), verbose=False)[0]["val/reward"]) > rewards[0]


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_with_adapters_the_reference_is_the_base_and_a_strong_divergence_holds_the_policy_there(
    kl: Any, tmp_path: Path
) -> None:
    found = {}
    for beta in (1e-4, 10.0):
        seen = Seen()
        task = _task(loss=PolicyLoss("grpo" if kl == "k3" else "reinforce++", kl=kl, beta=beta))
        run = trainer(default_root_dir=tmp_path, max_steps=24, callbacks=[LoRA(rank=4, modules_to_save=None), seen])
        run.fit(task, _loader())
        reference = task.reference()
        assert reference is not None
        assert not reference.tensors
        assert seen.figures[0]["train/kl"] == pytest.approx(0, abs=1e-6)
        found[beta] = sum(figures["train/kl"] for figures in seen.figures[-8:]) / 8
    assert found[10.0] < found[1e-4] / 2


@pytest.mark.parametrize("uses", [1, 3])
def test_a_run_resumes_in_the_middle_of_its_samples_bit_for_bit(uses: int, tmp_path: Path) -> None:
    weights = []
    for path in (None, tmp_path / "half.ckpt"):
        seen = Seen(4, tmp_path / "half.ckpt")
        task = _task(uses=uses, loss=PolicyLoss(kl="k3", beta=0.1))
        run = trainer(default_root_dir=tmp_path, max_steps=8, callbacks=[ExactResume(), seen])
        run.fit(task, _loader(shuffle=True), ckpt_path=path)
        weights.append((task.state_dict(), seen.figures[-4:]))
    (whole, figures), (resumed, again) = weights
    assert figures == again
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name])


def _sometimes(prompt: str, completion: str, row: Any) -> float:
    if prompt == "on":
        raise KeyError("nothing here")
    if prompt == "the cat" and len(completion) % 2:
        return math.nan
    return letters(prompt, completion, row)


@pytest.mark.filterwarnings("ignore:PolicyOptimization. a sample is left out")
def test_samples_whose_reward_fails_are_left_out_with_a_sentence(tmp_path: Path) -> None:
    task = _task([_sometimes])
    run = trainer(default_root_dir=tmp_path, max_steps=1)
    with pytest.warns(UserWarning, match="a sample is left out: _sometimes (raised KeyError: 'nothing|returned nan)"):
        run.fit(task, _loader(batch_size=4))
    assert 0.25 < float(run.callback_metrics["train/failed"]) < 0.5
    assert all(parameter.isfinite().all() for parameter in task.parameters())
    held = task.experience(prompt_batch(ROWS), 0)
    assert held.advantage[8:12].tolist() == [0.0] * 4
    assert bool((held.rows["labels"][8:12] == -100).all())
    assert task.experience(prompt_batch(ROWS[2:3]), 0).advantage.tolist() == [0.0] * 4
    with pytest.raises(ConfigurationError, match="no sample of the first batch has a reward"):
        trainer(default_root_dir=tmp_path, max_steps=1).fit(_task([_sometimes]), _loader(ROWS[2:3], 1))


def _of_two(prompt: str, completion: str, row: Any) -> float:
    return float(row["answer"]) if row["answer"] is not None else math.nan


@pytest.mark.filterwarnings("ignore:PolicyOptimization. a sample is left out")
def test_rewards_of_validation_are_means_over_the_samples_that_have_one(tmp_path: Path) -> None:
    answers = [1.0, 2.0, None, 6.0, None]
    rows = [{"prompt": "on", "answer": answer} for answer in answers]
    found = trainer(default_root_dir=tmp_path, limit_val_batches=1.0).validate(
        _task([_of_two]), _loader(rows), verbose=False
    )[0]
    assert found["val/reward"] == found["val/reward/_of_two"] == pytest.approx(3)
    assert found["val/failed"] == pytest.approx(0.4)


def _wild(prompt: str, completion: str, row: Any) -> float:
    torch.manual_seed(0)
    random.seed(0)
    row["seen"].append(completion)
    row["prompt"] = "x"
    return float(len(row["seen"]))


def test_a_reward_changes_neither_rows_nor_the_random_numbers_of_the_run(tmp_path: Path) -> None:
    rows = [{"prompt": "on", "seen": []}]
    task = _task([_wild])
    trainer(default_root_dir=tmp_path, max_steps=1).fit(task, _loader(rows, 1))
    before = torch.get_rng_state(), random.getstate()
    assert task.experience(prompt_batch(rows), 0).figures["reward"] == 1
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert rows == [{"prompt": "on", "seen": []}]


@pytest.mark.parametrize("kind", ["grpo", "dapo"])
def test_accumulated_batches_have_the_gradients_of_one_batch(kind: Any, tmp_path: Path) -> None:
    """Also where the numbers of tokens differ between them, and where the last window is short."""
    found = []
    for size in (6, 2):
        task = _task(loss=PolicyLoss(kind), rollout=Rollout(samples=4, max_new_tokens=9, stop=("a", "e")))
        write = task._write

        def by_place(prompts: Any, _: Any, rows: Any, write: Any = write) -> Any:
            return write(prompts, [len(prompt) * 4 + i % 4 for i, prompt in enumerate(prompts)], rows)

        task._write = by_place  # type: ignore[method-assign]
        task.configure_optimizers = lambda task=task: torch.optim.SGD(task.parameters(), 1.0)  # type: ignore[method-assign]
        rows = [*ROWS, {"prompt": "a"}, {"prompt": "sat on"}]
        run = trainer(default_root_dir=tmp_path, max_epochs=1, accumulate_grad_batches=6 // size)
        run.fit(task, _loader(rows, size))
        found.append(task.state_dict())
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=2e-6, rtol=1e-5)


def _lengths(prompt: str, completion: str, row: Any) -> float:
    return 1000 + 0.01 * len(completion)


def test_rewards_are_not_rounded_to_the_precision_of_the_weights(tmp_path: Path) -> None:
    task = _task([_lengths])
    held: list[Any] = []
    task._loss_of = lambda one, log_probs: held.append(one) or PolicyOptimization._loss_of(task, one, log_probs)  # type: ignore
    trainer(default_root_dir=tmp_path, max_steps=1, precision="bf16-true").fit(task, _loader())
    assert held[0].advantage.dtype == held[0].drawn.dtype == torch.float32
    assert held[0].advantage.unique().numel() > 2


def test_filters_of_sampling_do_not_count_as_divergence(tmp_path: Path) -> None:
    """At the first step the policy is the reference, and k1 is 0 for every token."""
    how: dict[str, Any] = {"rollout": Rollout(samples=4, max_new_tokens=6, top_k=5, stop=("a",))}
    held: list[Any] = []
    for loss in (PolicyLoss("rloo"), PolicyLoss("rloo", kl="k1", beta=1.0)):
        task = _task(loss=loss, **how)
        task._loss_of = lambda one, log_probs, task=task: (  # type: ignore[method-assign]
            held.append(one.advantage) or PolicyOptimization._loss_of(task, one, log_probs)
        )
        trainer(default_root_dir=tmp_path, max_steps=1).fit(task, _loader())
    torch.testing.assert_close(held[0], held[1], atol=1e-5, rtol=1e-5)


def test_answers_are_predicted_as_in_validation(tmp_path: Path) -> None:
    task = _task([_lengths])
    rows = [{"prompt": "on"}, {"prompt": "a dog"}]
    (answers,) = trainer(default_root_dir=tmp_path).predict(task, _loader(rows))
    run = trainer(default_root_dir=tmp_path, limit_val_batches=1.0)
    found = run.validate(task, _loader(rows), verbose=False)[0]["val/reward"]
    assert found == pytest.approx(sum(_lengths("", answer, None) for answer in answers) / 2)


def test_another_fit_draws_new_samples(tmp_path: Path) -> None:
    weights = []
    task = _task(uses=4)
    task.configure_model()
    start = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    for _ in range(2):
        task.load_state_dict(start)
        trainer(default_root_dir=tmp_path, max_steps=3).fit(task, _loader())
        weights.append({name: tensor.clone() for name, tensor in task.state_dict().items()})
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name])


def _same(prompt: str, completion: str, row: Any) -> float:
    return 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_change_nothing(kind: Any, tmp_path: Path) -> None:
    # The standard deviation of eight times 0.1 is not 0.
    task = _task([_same], loss=PolicyLoss(kind), rollout=Rollout(samples=8, max_new_tokens=6))
    run = trainer(default_root_dir=tmp_path, max_steps=1)
    before: dict[str, Any] = {}
    task.on_train_start = lambda: before.update({name: p.clone() for name, p in task.state_dict().items()})  # type: ignore[method-assign]
    run.fit(task, _loader())
    assert run.callback_metrics["train/equal_rewards"] == 1
    for name, tensor in task.state_dict().items():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore:PolicyOptimization. a prompt of")
def test_the_loss_is_that_of_rows_read_alone_and_truncated_samples_are_left_out(tmp_path: Path) -> None:
    """Prompts of different lengths, and one that is longer than the network reads."""
    rows = [*ROWS[:2], {"prompt": "the cat sat on the mat " * 20}]
    task = _task(loss=PolicyLoss(mask_truncated=True), rollout=Rollout(samples=6, max_new_tokens=20, stop=("a",)))
    run = trainer(default_root_dir=tmp_path, max_steps=1)
    with pytest.warns(UserWarning, match="a prompt of .* tokens loses its beginning, which may be part of its chat"):
        run.fit(task, _loader(rows, batch_size=3))
    held = task.experience(prompt_batch(rows), 3)
    log_probs, _ = task._token_log_probs(held.rows)
    truncated = 0
    losses = []
    for i in range(18):
        ids, labels = held.rows["input_ids"][i], held.rows["labels"][i]
        learned = [t for t in range(1, len(ids)) if labels[t] != -100]
        if not learned:
            assert held.advantage[i] == 0
            truncated += 1
            losses.append(torch.zeros(()))
            continue
        assert task.tokenizer.decode(ids[learned[-1]].item()).count("a")
        alone = task.network(ids[None, : learned[-1] + 1])[0].log_softmax(-1)  # type: ignore[misc]
        own = torch.stack([alone[t - 1, ids[t]] for t in learned])
        torch.testing.assert_close(log_probs[i, [t - 1 for t in learned]], own, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(held.drawn[i, [t - 1 for t in learned]], own, atol=1e-5, rtol=1e-5)
        losses.append(-held.advantage[i])
    assert 0 < truncated < 18
    held.old = log_probs.detach()
    torch.testing.assert_close(task._loss_of(held, log_probs).loss, torch.stack(losses).mean())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rewards": []}, "rewards must be a list of at least one Reward"),
        ({"rewards": [letters, letters]}, "rewards must be functions or models with different names"),
        ({"uses": 0}, "uses must be a whole number of at least 1"),
        ({"rollout": Rollout(samples=1)}, "rollout.samples must be a whole number of at least 2"),
        ({"loss": PolicyLoss(overlong=7)}, "loss.overlong must be at most rollout.max_new_tokens = 6"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        _task(options.pop("rewards", (letters,)), **options)
    with pytest.raises(ConfigurationError, match="samples must be a whole number of at least 1"):
        Rollout(samples=0)


def test_prompts_come_from_files_and_the_answer_is_written_after_training(tmp_path: Path) -> None:
    network, tokenizer = writer()
    network.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "the cat", "answer": 3}\n{"messages": [{"role": "user", "content": "on"}, '
        '{"role": "assistant", "content": "it"}], "answer": 5}\n'
    )
    data = PromptData(
        train=str(tmp_path / "rows.jsonl"), tokenizer=str(tmp_path / "base"), val_fraction=0.0, batch_size=2
    )
    data.setup()
    assert [row["prompt"] for row in data.train_rows] == ["the cat", [{"role": "user", "content": "on"}]]
    assert next(iter(data.train_dataloader()))["rows"][0]["answer"] in (3, 5)
    assert data.example_prompt() == ("the cat", False)
    data.train_rows.reverse()
    assert data.example_prompt() == ("on", True)
    data = PromptData(train="arithmetic", tokenizer=str(tmp_path / "base"), batch_size=4, val_batch_size=50)
    rewards = [Reward(numeric_answer, 0.5), Reward(letters)]
    task = PolicyOptimization(
        rewards, CausalLMConfig(str(tmp_path / "base")), rollout=Rollout(samples=2, max_new_tokens=4)
    )
    run = trainer(default_root_dir=tmp_path, max_steps=2)
    run.fit(task, datamodule=data)
    found = trainer(limit_val_batches=1.0).validate(task, datamodule=data, verbose=False)[0]
    parts = found["val/reward/numeric_answer"] + found["val/reward/letters"]
    assert float(found["val/reward"]) == pytest.approx(float(parts))
    run.save_checkpoint(tmp_path / "run.ckpt")
    model, _ = load_language_model(str(tmp_path / "run.ckpt"))
    assert model.generate_text("1+2=", max_new_tokens=3, seed=1) == task.generate_text("1+2=", max_new_tokens=3, seed=1)
    turns = ('["hi"]', '[{"content": "a"}]', '[{"role": "user", "content": null}]')
    for bad in ('{"question": "a"}', *(f'{{"messages": {one}}}' for one in turns)):
        (tmp_path / "bad.jsonl").write_text(bad)
        with pytest.raises(ConfigurationError, match="a row needs a prompt"):
            PromptData(train=str(tmp_path / "bad.jsonl"), tokenizer=str(tmp_path / "base")).setup()


def test_adapters_on_a_start_are_loaded_with_it(tmp_path: Path) -> None:
    """They do not fit the weights of the folder that the start was trained from."""
    writer()[0].save_pretrained(tmp_path / "base")
    model = CausalLMConfig(str(tmp_path / "base"))
    start = LanguageModeling(model)
    start.tokenizer_state = pack_tokenizer(writer()[1])
    start.configure_model()
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.mul_(1.5)
    run = trainer(default_root_dir=tmp_path, max_steps=1)
    run.strategy.connect(start)
    run.save_checkpoint(tmp_path / "start.ckpt")
    task = _task(model=model, start_from=str(tmp_path / "start.ckpt"))
    run = trainer(default_root_dir=tmp_path, max_steps=2, callbacks=[LoRA(rank=4, modules_to_save=None)])
    run.fit(task, _loader())
    run.save_checkpoint(tmp_path / "run.ckpt")
    loaded, _ = load_language_model(str(tmp_path / "run.ckpt"))
    ids = torch.arange(20)[None]
    torch.testing.assert_close(loaded.network(ids).logits, task.eval().network(ids).logits)


@pytest.mark.turns(4, family="ranks")
def test_two_processes_train_as_one_on_both_parts(tmp_path: Path) -> None:
    for loss in (PolicyLoss("dapo"), PolicyLoss("reinforce++"), PolicyLoss("reinforce++", kl="k1", beta=0.5)):
        run_ranks(_in_ranks, tmp_path, loss)
        torch.testing.assert_close(
            torch.load(tmp_path / "ranks.pt", weights_only=True), _trained(loss, tmp_path), atol=2e-5, rtol=1e-4
        )


@pytest.mark.turns(4, family="ranks")
def test_no_process_waits_for_one_without_rewards(tmp_path: Path) -> None:
    run_ranks(_fail_in_a_rank, tmp_path)


def _fail_in_a_rank() -> None:
    rank = int(os.environ["RANK"])
    rows = [ROWS[2], ROWS[1], ROWS[2], ROWS[2]]  # the first process has no rewards, and the second one in one step
    order: Any = DistributedSampler(rows, 2, rank, False)  # type: ignore[arg-type]
    options: dict[str, Any] = {"default_root_dir": Path(), "devices": 2, "strategy": "ddp"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = trainer(max_steps=2, use_distributed_sampler=False, **options)
        task = _task([_sometimes], loss=PolicyLoss("dapo"))
        run.fit(task, _loader(rows, batch_size=1, sampler=order))
        assert all(parameter.isfinite().all() for parameter in task.parameters())
        run = trainer(max_steps=2, use_distributed_sampler=False, **options)
        with pytest.raises(ConfigurationError, match="no sample of the first batch has a reward"):
            run.fit(_task([_sometimes]), _loader(rows[2:], batch_size=1, sampler=order))


def _trained(loss: PolicyLoss, folder: Path, **options: Any) -> Any:
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    task = _task(loss=loss, uses=2, rollout=Rollout(samples=4, max_new_tokens=8, stop=("a",)))
    rows: Any = ROWS
    order: Any = DistributedSampler(rows, world, rank, False)
    run = trainer(default_root_dir=folder, max_steps=4, use_distributed_sampler=False, **options)
    task.configure_optimizers = lambda: torch.optim.SGD(task.parameters(), 0.1)  # type: ignore[method-assign]
    run.fit(task, _loader(batch_size=4 // world, sampler=order))
    return task.state_dict()


def _in_ranks(loss: PolicyLoss) -> None:
    found = _trained(loss, Path(), devices=2, strategy="ddp")
    if torch.distributed.get_rank() == 0:
        torch.save(found, "ranks.pt")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("family", ["gpt", "llama", "gemma2"])
def test_the_policy_that_trains_has_the_temperature_of_generation(family: str, chunked: bool, tmp_path: Path) -> None:
    """The drawn log-probabilities are those of the training forward, and the loss's gradient is that of logits / T."""
    model: Any = GPT
    if family != "gpt":
        model = CausalLMConfig(config_fields={**FAMILIES[family], "vocab_size": 300, "initializer_range": 0.2})
    task = _task(model=model, rollout=Rollout(samples=4, max_new_tokens=6, temperature=0.7))
    run = trainer(default_root_dir=tmp_path, max_steps=1, callbacks=[ChunkedCrossEntropy()] if chunked else [])
    run.fit(task, _loader())
    assert float(run.callback_metrics["train/rounding"]) < 1e-5
    assert float(run.callback_metrics["train/importance_max"]) == pytest.approx(1, abs=1e-5)
    held = task.experience(prompt_batch(ROWS[:2]), 3)
    ids, mask = held.rows["input_ids"], held.rows["labels"][:, 1:] != -100
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.mul_(1.5)  # large logits, so that a soft cap has an effect
    ours = task._token_log_probs(held.rows)[0][mask]
    output = task.network(ids) if family == "gpt" else task.network(ids, attention_mask=held.rows["attention_mask"])  # type: ignore[misc]
    logits = output if family == "gpt" else output.logits
    theirs = (logits / 0.7).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0][mask]
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
    gradients = [torch.autograd.grad(one.mean(), parameters) for one in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_tokens_of_filtered_draws_have_a_smaller_weight(tmp_path: Path) -> None:
    """The filtered distribution gives its tokens more probability than the policy."""
    task = _task(rollout=Rollout(samples=4, max_new_tokens=6, top_k=20))
    run = trainer(default_root_dir=tmp_path, max_steps=1)
    run.fit(task, _loader())
    held = task.experience(prompt_batch(ROWS), 3)
    log_probs = task._token_log_probs(held.rows)[0].detach()
    mask = held.rows["labels"][:, 1:] != -100
    weights = (log_probs - held.drawn)[mask].exp()
    assert 0.05 < float(weights.min()) < float(weights.max()) < 0.3
    assert 0.05 < float(run.callback_metrics["train/importance"]) < 0.3
