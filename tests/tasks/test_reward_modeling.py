"""Reward models: the scalar of transformers' own classifiers, that they learn, and what LoRA must be given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lit_efficient import ConfigurationError, ExactResume, GPTConfig, LanguageModeling, LoRA, RewardModeling
from lit_efficient.models.networks.reward import last_positions
from tests.support import assert_equal, weights
from tests.tasks.preference_kit import SaveAfter, loader, pairs, saved, trainer

GPT_TOY = GPTConfig(97, dim=32, depth=2, num_heads=4, max_length=16)


def test_the_last_token_is_found_on_either_side_of_filling() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]])
    assert last_positions(mask).tolist() == [1, 3, 3, 0]


def test_padding_on_the_left_gives_the_scores_of_padding_on_the_right(tmp_path: Path) -> None:
    for config in (GPT_TOY, saved(tmp_path, "gpt2"), saved(tmp_path)):
        task = RewardModeling(config)
        task.configure_model()
        torch.nn.init.normal_(task.eval().score.weight)
        batch = pairs(4)
        ids, mask = batch["rejected_input_ids"], batch["rejected_attention_mask"]
        right = task(ids, mask)
        order = [[*range(int(m.sum()), len(m)), *range(int(m.sum()))] for m in mask]
        places = torch.tensor(order)
        torch.testing.assert_close(task(ids.gather(1, places), mask.gather(1, places)), right)
        assert right.std() > 0.01


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_rewards_are_those_of_a_classifier_of_transformers(family: str, tmp_path: Path) -> None:
    task = RewardModeling(saved(tmp_path, family))
    task.configure_model()
    task.eval()
    theirs: Any = AutoModelForSequenceClassification.from_pretrained(saved(tmp_path, family).name_or_path, num_labels=1)
    theirs.config.pad_token_id = 2
    with torch.no_grad():
        task.score.weight.copy_(theirs.score.weight)
    batch = pairs(4)
    ids, mask = batch["rejected_input_ids"], batch["rejected_attention_mask"]
    with torch.no_grad():
        expected = theirs.eval()(ids, attention_mask=mask).logits[:, 0]
        torch.testing.assert_close(task(ids, mask), expected)
        single = [task(row[None, : int(m.sum())])[0] for row, m in zip(ids, mask)]
    torch.testing.assert_close(torch.stack(single), expected, rtol=1e-4, atol=1e-5)
    assert not any("lm_head" in name for name in task.state_dict())


@pytest.mark.turns(4, family="resumed")
@pytest.mark.parametrize("model", ["llama", "gpt"])
@pytest.mark.parametrize("adapters", [True, False])
def test_it_starts_at_log_2_learns_and_resumes_bit_for_bit(model: str, adapters: bool, tmp_path: Path) -> None:
    first: list[float] = []
    path = tmp_path / "middle.ckpt"

    def run(**options: Any) -> tuple[RewardModeling, Any]:
        torch.manual_seed(0)
        config: Any = GPT_TOY if model == "gpt" else saved(tmp_path)
        task = RewardModeling(config, learning_rate=5e-3 if adapters else 1e-2, warmup_steps=0)
        step = task.training_step
        task.training_step = lambda *a: _noted(step(*a), first)  # type: ignore[method-assign]
        callbacks: list[Any] = [ExactResume(), SaveAfter(3, path)]
        callbacks += [LoRA(rank=4, modules_to_save=["score"])] if adapters else []
        runner = trainer(default_root_dir=tmp_path, max_steps=30 if adapters else 8, callbacks=callbacks)
        runner.fit(task, loader(12, 2), loader(), **options)
        return task, runner

    whole, runner = run()
    assert first[0] == pytest.approx(math.log(2))
    figures = runner.validate(whole, loader(), verbose=False)[0]
    assert figures["val/accuracy"] >= 0.75  # 1.0, and the loss is at most 0.34, for each of five seeds
    assert figures["val/loss"] < 0.6
    assert figures["val/margin"] == pytest.approx(figures["val/rewards/chosen"] - figures["val/rewards/rejected"])
    again, _ = run(ckpt_path=str(path))
    assert_equal(weights(again), weights(whole))
    if not adapters:
        loaded = RewardModeling.load_from_checkpoint(path)
        assert loaded(pairs(2)["chosen_input_ids"]).shape == (2,)


def _noted(output: Any, losses: list[float]) -> Any:
    losses.append(float(output["loss"].detach()))
    return output


def test_lora_without_the_head_and_batches_without_masks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"modules_to_save=\['score'\]"):
        trainer(default_root_dir=tmp_path, callbacks=[LoRA(rank=2)]).fit(
            RewardModeling(saved(tmp_path)), loader(), loader()
        )
    task = RewardModeling(GPT_TOY)
    task.configure_model()
    batch = pairs(2)
    del batch["chosen_attention_mask"]
    with pytest.raises(ConfigurationError, match="must have chosen_attention_mask and rejected_attention_mask"):
        task.predict_step(batch, 0)
    with pytest.raises(ConfigurationError, match="rates texts and cannot generate them"):
        task.generate_text("a")
    with pytest.raises(ConfigurationError, match="centering must be at least 0, got -1"):
        RewardModeling(centering=-1)


def test_margins_and_a_start_from_a_language_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sft = LanguageModeling(GPT_TOY, warmup_steps=0)
    rows = torch.utils.data.DataLoader(
        [{"input_ids": pairs(2)["chosen_input_ids"], "labels": pairs(2)["chosen_labels"]}] * 2, batch_size=None
    )
    runner = trainer(default_root_dir=tmp_path, max_steps=2)
    runner.fit(sft, rows, rows)
    runner.save_checkpoint(tmp_path / "sft.ckpt")
    task = RewardModeling(GPT_TOY, start_from=str(tmp_path / "sft.ckpt"))
    task.configure_model()
    assert sft.network is not None
    assert task.network is not None
    assert torch.equal(task.network.get_parameter("embedding.weight"), sft.network.get_parameter("embedding.weight"))
    torch.nn.init.ones_(task.score.weight)
    task.log = lambda *args, **options: None  # type: ignore[method-assign]
    batch = pairs(3)
    differences = task.predict_step(batch, 0)
    margin = torch.tensor([0.0, 1.0, 2.0])
    expected = torch.nn.functional.softplus(margin - differences)
    torch.testing.assert_close(task.training_step({**batch, "margin": margin}, 0)["sample_loss"], expected)
    with pytest.raises(ConfigurationError, match="pass it as start_from"):
        RewardModeling.load_from_checkpoint(tmp_path / "sft.ckpt")
