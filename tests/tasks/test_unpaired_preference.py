"""Unpaired preferences: TRL's losses on the same rows, batches of other answers, learning and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lit_efficient import (
    CausalLMConfig,
    ConfigurationError,
    ExactResume,
    LoRA,
    UnpairedChat,
    UnpairedPreference,
    UnpairedRows,
)
from lit_efficient.application import apply
from lit_efficient.losses.preference import kto_loss
from tests.support import QUIET, assert_equal, weights
from tests.tasks import unpaired_kit as kit
from tests.tasks.preference_kit import SaveAfter


def test_each_prompt_gets_the_answer_of_the_row_before(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"Is {i} two?"}, {"role": "assistant", "content": f"Answer {i}"}]}
        for i in range(4)
    ]
    data = kit.data(tmp_path, [{**row, "label": i % 2} for i, row in enumerate(chats)])
    data.prepare_data()
    data.setup()
    (batch,) = data.val_dataloader()
    assert batch["desirable"].tolist() == [False, True, False, True]
    read = data.chat_tokenizer
    for prefix, shift in (("", 0), ("kl_", 1)):
        for row in range(4):
            ids, labels, mask = (batch[f"{prefix}{name}"][row] for name in ("input_ids", "labels", "attention_mask"))
            answer = f"Answer {(row - shift) % 4}<|im_end|>"
            assert read.decode(labels[labels != -100]) == answer
            text = read.decode(ids[mask == 1])
            assert text.strip() == f"<|im_start|>user\nIs {row} two?<|im_end|>\n<|im_start|>assistant\n{answer}"


def test_fixed_answers_to_other_prompts_are_the_same_in_each_epoch(tmp_path: Path) -> None:
    """Each answer goes to one other prompt, whatever the batches are."""
    chats = [
        {"messages": [{"role": "user", "content": f"Is {i} two?"}, {"role": "assistant", "content": f"Answer {i}"}]}
        for i in range(9)
    ]
    data = kit.data(tmp_path, [{**row, "label": 1} for row in chats], fixed_others=True, batch_size=1, val_batch_size=5)
    data.prepare_data()
    data.setup()
    read = data.chat_tokenizer
    found: list[dict[str, str]] = []
    for loader in (data.val_dataloader(), data.train_dataloader(), data.train_dataloader()):
        found.append({})
        for batch in loader:
            for ids, mask in zip(batch["kl_input_ids"], batch["kl_attention_mask"]):
                prompt, _, answer = read.decode(ids[mask == 1]).partition("assistant\n")
                found[-1][prompt.split()[2]] = answer.split()[1].removesuffix("<|im_end|>")
    assert found[0] == found[1] == found[2]
    assert sorted(found[0]) == sorted(found[0].values()) == [str(i) for i in range(9)]
    assert all(prompt != answer for prompt, answer in found[0].items())


def test_long_rows_are_left_out_or_lose_the_beginning_of_the_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": "one two " * i + "?", "completion": " Four", "label": 1} for i in range(8)]
    lengths = {}
    for too_long in ("drop", "left"):
        data = kit.data(tmp_path, rows, max_length=12, batch_size=2, chat=UnpairedChat(too_long=too_long))  # type: ignore[arg-type]
        data.prepare_data()
        data.setup()
        assert data.train_rows is not None
        lengths[too_long] = len(data.train_rows)
        for ids, labels, _, _ in (data.train_rows[i] for i in range(len(data.train_rows))):
            assert len(ids) <= 12
            assert data.chat_tokenizer.decode(labels[labels != -100]) == " Four<|endoftext|>"
    assert 0 < lengths["drop"] < lengths["left"] == 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label": None}, "label is None, neither true .a good answer. nor false"),
        ({"label": "good"}, "label is 'good', neither"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"completion": " "}, "completion is empty"),
    ],
)
def test_malformed_rows_are_counted_and_shown(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    rows = [*kit.ROWS[:5], {**kit.ROWS[5], **change}]
    with pytest.raises(ConfigurationError, match=rf"1 of 6 rows for train are malformed(.|\n)*:6: {reason}"):
        kit.data(tmp_path, rows).prepare_data()


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no row has the key label"):
        kit.data(tmp_path, [{"prompt": "a", "completion": "b"}]).prepare_data()
    with pytest.raises(ConfigurationError, match=r"batch_size must be at least 2, .* got 1"):
        kit.data(tmp_path, batch_size=1)
    with pytest.raises(ConfigurationError, match=r"rows.columns may name .*label.*, got 'good'"):
        UnpairedRows(columns={"good": "x"})
    with pytest.raises(ConfigurationError, match="loss must be one of kto, apo_zero, got 'bco'"):
        UnpairedPreference(loss="bco")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="desirable_weight must be at least 0, got -1"):
        UnpairedPreference(desirable_weight=-1)
    task = UnpairedPreference(CausalLMConfig(kit.base(tmp_path)))
    task.configure_model()
    with pytest.raises(ConfigurationError, match="it lacks labels, kl_input_ids, kl_labels, desirable"):
        task.training_step({"input_ids": torch.ones(1, 2)}, 0)


def test_the_loss_by_hand() -> None:
    ratios = torch.tensor([2.0, -1.0, 0.5])
    desirable = torch.tensor([True, False, True])
    s = torch.sigmoid
    expected = [
        3 * (1 - s(0.5 * ratios[0] - 0.2)),
        0.5 * (1 - s(0.2 - 0.5 * ratios[1])),
        3 * (1 - s(0.5 * ratios[2] - 0.2)),
    ]
    torch.testing.assert_close(kto_loss(ratios, desirable, 0.5, 0.4, 3.0, 0.5), torch.stack(expected))


@pytest.mark.filterwarnings("ignore")  # of TRL, which calls deprecated names of transformers
@pytest.mark.parametrize("loss", ["kto", "apo_zero"])
def test_losses_and_batches_are_those_of_trl(loss: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = kit.base(tmp_path)
    data = kit.data(tmp_path)
    data.prepare_data()
    data.setup()
    task = UnpairedPreference(CausalLMConfig(base), loss, 0.3, 1.5, 0.7)
    task.configure_model()
    task.log = lambda *args, **options: None  # type: ignore[method-assign]
    task.reference()
    config = trl.KTOConfig(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, max_length=100, beta=0.3, report_to=[],
        loss_type="kto" if loss == "kto" else "apo_zero_unpaired", desirable_weight=1.5, undesirable_weight=0.7,
        bf16=False, use_cpu=True, gradient_checkpointing=False, disable_dropout=True,
    )  # fmt: skip
    model, reference = (AutoModelForCausalLM.from_pretrained(base) for _ in range(2))
    trainer = trl.KTOTrainer(
        model,
        reference,
        config,
        train_dataset=Dataset.from_list(kit.ROWS),
        processing_class=AutoTokenizer.from_pretrained(base),
    )
    draw = torch.Generator().manual_seed(3)
    moved = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in task.network.named_parameters():  # type: ignore[union-attr]
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
            moved[name].copy_(parameter)
    for ours, theirs in zip(data.val_dataloader(), trainer.get_train_dataloader()):
        for prefix, other in (("", ""), ("kl_", "KL_")) if loss == "kto" else (("", ""),):
            for row in range(4):
                ids = ours[f"{prefix}input_ids"][row][ours[f"{prefix}attention_mask"][row] == 1]
                assert torch.equal(ids, theirs[f"{other}input_ids"][row][theirs[f"{other}attention_mask"][row] == 1])
        assert ours["desirable"].tolist() == theirs["label"].tolist()
        found = task.training_step(ours, 0)["loss"]
        expected = trainer.compute_loss(trainer.model, dict(theirs))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        found.backward()
        expected.backward()
    for name, parameter in task.network.named_parameters():  # type: ignore[union-attr]
        torch.testing.assert_close(parameter.grad, moved[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("adapters", [True, False])
def test_it_learns_and_resumes_bit_for_bit(adapters: bool, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"

    def run(**options: Any) -> tuple[UnpairedPreference, Any]:
        torch.manual_seed(0)
        task = UnpairedPreference(CausalLMConfig(kit.base(tmp_path)), learning_rate=1e-2, warmup_steps=0)
        callbacks: list[Any] = [ExactResume(), SaveAfter(4, path)]
        callbacks += [LoRA(rank=4)] if adapters else []
        runner = Trainer(callbacks=callbacks, **{**QUIET, "max_steps": 12, "max_epochs": -1})
        data = kit.data(tmp_path)
        runner.fit(task, datamodule=data, **options)
        return task, runner.validate(task, data, verbose=False)[0]

    whole, figures = run()
    assert figures["val/rewards/desirable"] > 0.05
    assert figures["val/rewards/undesirable"] < figures["val/rewards/desirable"] - 0.1
    assert figures["val/loss"] < 0.49
    again, same = run(ckpt_path=str(path))
    assert_equal(weights(again), weights(whole))
    assert same == figures


def test_the_loss_starts_at_one_half(tmp_path: Path) -> None:
    task = UnpairedPreference(CausalLMConfig(kit.base(tmp_path)))
    task.configure_model()
    apply(task, [LoRA(rank=2)])
    task.log = lambda *args, **options: None  # type: ignore[method-assign]
    data = kit.data(tmp_path)
    data.prepare_data()
    data.setup()
    batch = next(iter(data.train_dataloader()))
    torch.testing.assert_close(task.training_step(batch, 0)["sample_loss"].detach(), torch.full((4,), 0.5))
