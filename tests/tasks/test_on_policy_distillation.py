"""Distillation on the student's own answers: what is answered, how often, and what is minimised on it."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, DistributedSampler

from lit_efficient import (
    CausalLMConfig,
    ConfigurationError,
    DistillationLoss,
    Divergence,
    ExactResume,
    GPTConfig,
    LanguageData,
    LoRA,
    OnPolicyDistillation,
    PromptData,
    Rollout,
    WeightedTeacher,
)
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.losses.next_token import IGNORE, targets_of
from lit_efficient.models.generation.batched import generate
from lit_efficient.models.libraries.causal_lm import build
from lit_efficient.tasks.on_policy_distillation import prompts_of
from lit_efficient.tasks.teacher import FrozenNetwork
from tests import support
from tests.models.libraries.test_causal_lm import FAMILIES
from tests.processes import run_ranks
from tests.support import assert_equal, weights
from tests.tasks.test_text_generation import chat_writer, writer

STUDENT = GPTConfig(dim=16, depth=1, num_heads=2, max_length=64)
trainer = partial(support.trainer, max_epochs=-1, max_steps=6, limit_val_batches=0)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two teachers with one tokenizer, conversations of two turns, and prompts."""
    folder = tmp_path_factory.mktemp("own")
    network, tokenizer = chat_writer()
    for number in (1, 2):
        torch.manual_seed(number)
        for parameter in network.parameters():
            parameter.data.normal_(0, 0.2)
        network.save_pretrained(folder / f"teacher{number}")
        tokenizer.save_pretrained(folder / f"teacher{number}")
    rows = []
    for number in range(24):
        turns = [
            ("user", f"the cat {number}"),
            ("assistant", "sat"),
            ("user", "and"),
            ("assistant", "a dog" * (number % 3 + 1)),
        ]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"the cat {n}"}) + "\n" for n in range(12)))
    return folder


def _data(home: Path, **options: Any) -> LanguageData:
    given: dict[str, Any] = {"train": str(home / "rows.jsonl"), "tokenizer": str(home / "teacher1"), "max_length": 64}
    given |= {"batch_size": 2, "val_fraction": 0.1, "cache_dir": str(home / "cache"), "pack": False}
    return LanguageData(**given | options)


def _task(home: Path, **options: Any) -> OnPolicyDistillation:
    torch.manual_seed(0)
    given: dict[str, Any] = {"teacher": str(home / "teacher1"), "model": STUDENT, "learning_rate": 1e-2}
    given |= {"rollout": Rollout(samples=1, max_new_tokens=6)}
    return OnPolicyDistillation(**given | options)


class Seen(Callback):
    """The batches of each step, with the weights before them."""

    def __init__(self) -> None:
        self.batches: list[dict[str, torch.Tensor]] = []
        self.before: list[dict[str, torch.Tensor]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)
        self.before.append({name: tensor.clone() for name, tensor in pl_module.state_dict().items()})


def test_the_prompt_of_a_document_ends_before_its_last_answer() -> None:
    ids = torch.arange(20).view(2, 10)
    labels = ids.clone()
    labels[0, [0, 1, 4, 5, 8, 9]] = IGNORE  # learned: 2, 3 and 6, 7
    labels[1, [0, 1, 2, 5, 6, 9]] = IGNORE  # 13, 14 and 17, 18
    assert prompts_of({"input_ids": ids, "labels": labels}) == [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15, 16]]
    shifted = targets_of({"labels": labels})
    assert prompts_of({"input_ids": ids, "shift_labels": shifted})[0] == [0, 1, 2, 3, 4, 5]
    positions = torch.tensor([[*range(5), *range(5)], [*range(6), *range(4)]])
    packed = {"input_ids": ids, "labels": labels, "position_ids": positions}
    assert prompts_of(packed) == [[0, 1], [5], [10, 11, 12], [16]]
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    assert prompts_of({"input_ids": ids, "labels": labels, "attention_mask": mask})[0] == [2, 3, 4, 5]
    assert prompts_of({"input_ids": ids, "labels": torch.full_like(ids, IGNORE)}) == []
    assert prompts_of({"input_ids": ids, "labels": ids}) == [[0], [10]]


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("pack", [False, True])
def test_a_share_of_batches_has_the_answers_of_a_slow_loop(home: Path, tmp_path: Path, pack: bool) -> None:
    seen = Seen()
    rollout = Rollout(samples=2, max_new_tokens=5, temperature=1.3, seed=4)
    task = _task(home, rollout=rollout)
    run = trainer(default_root_dir=tmp_path, max_steps=12, max_epochs=9, callbacks=[seen])
    run.fit(task, datamodule=_data(home, pack=pack, batch_size=1 if pack else 2))
    given = Seen()
    untouched = _task(home, rollout=rollout, share=0.0)
    again = trainer(default_root_dir=tmp_path, max_steps=12, max_epochs=9, callbacks=[given])
    again.fit(untouched, datamodule=_data(home, pack=pack, batch_size=1 if pack else 2))
    own = ["truncated" in batch for batch in seen.batches]
    assert 2 < sum(own) < 10
    assert not any("truncated" in batch for batch in given.batches)
    for number, is_own in enumerate(own):
        if not is_own:
            continue
        batch = seen.batches[number]
        task.load_state_dict(seen.before[number])
        prompts = prompts_of(given.batches[number])
        assert len(batch["input_ids"]) == 2 * len(prompts)
        for row in range(len(batch["input_ids"])):
            ids = batch["input_ids"][row, : int(batch["attention_mask"][row].sum())].tolist()
            start = next(t for t, label in enumerate(batch["labels"][row].tolist()) if label != IGNORE)
            seed = mix_seed(mix_seed(4, number - 1), row // 2, row % 2)
            (sample,) = generate(
                task._built(),
                [ids[:start]],
                5,
                sampling=rollout.sampling,
                seeds=[seed],
                stop={task.tokenizer.eos_token_id},
            )
            assert ids[start:] == sample.tokens
            assert bool(batch["truncated"][row]) == (sample.end == "length")
            assert ids[:start] == prompts[row // 2]


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_the_loss_is_the_divergence_on_answer_tokens_and_its_gradients_follow(home: Path, kind: str) -> None:
    """Whole logits, one row after the other."""
    task = _task(home, objective=DistillationLoss(Divergence("jsd", 0.3, temperature=1.5), weight=0.4, chunk_size=3))
    network, tokenizer = writer()
    task.tokenizer_state = pack_tokenizer(tokenizer)
    size = len(tokenizer)
    task.model = GPTConfig(dim=16, depth=1, num_heads=2, max_length=64, vocab_size=size)
    if kind == "llama":
        task.model = CausalLMConfig(config_fields=FAMILIES["llama"] | {"vocab_size": size})
    task.configure_model()
    task._live = [FrozenNetwork(network)]
    task._shared = size
    logged: dict[str, Any] = {}
    task.log = lambda name, value, **options: logged.update({name: value})  # type: ignore[method-assign]
    ids = torch.randint(3, size, (3, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    mask = torch.ones_like(ids)
    for row, (start, stop) in enumerate(((4, 12), (2, 7), (6, 9))):
        labels[row, :start] = IGNORE
        labels[row, stop:] = IGNORE
        mask[row, stop:] = 0
    batch = {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": mask,
        "truncated": torch.tensor([True, False, False]),
    }
    loss = task.training_step(batch, 0)["loss"]
    ours = torch.autograd.grad(loss, list(task.parameters()))
    sums = []
    for row, (start, stop) in enumerate(((4, 12), (2, 7), (6, 9))):
        own = ids[row : row + 1, :stop]
        output = task._built()(own)
        student = (output if kind == "gpt" else output.logits)[0, start - 1 : -1] / 1.5
        with torch.no_grad():
            teacher = network(own).logits[0, start - 1 : -1] / 1.5
        p, q = teacher.softmax(-1), student.softmax(-1)
        m = 0.3 * p + 0.7 * q
        sums.append(0.3 * (p * (p / m).log()).sum() + 0.7 * (q * (q / m).log()).sum())
    expected = 1.5**2 / (0.3 * 0.7) * torch.stack(sums).sum() / 16
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    for found, right in zip(ours, torch.autograd.grad(expected, list(task.parameters()))):
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)
    assert logged["train/length"] == pytest.approx(16 / 3)
    assert logged["train/truncated"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_losses_and_gradients_are_those_of_trl(beta: float, temperature: float) -> None:
    """TRL does not divide by beta (1 - beta), and does not multiply by the squared temperature."""
    gkd = pytest.importorskip("trl.experimental.gkd")
    torch.manual_seed(0)
    student, teacher = (build(CausalLMConfig(config_fields=FAMILIES["llama"] | {"vocab_size": 300})) for _ in range(2))
    ids = torch.randint(3, 300, (3, 12))
    labels = ids.clone()
    labels[:, :4] = IGNORE
    labels[1, 9:] = IGNORE
    kind: Any = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    how = Divergence(kind, beta if kind == "jsd" else 0.5, False, temperature, temperature_squared=False)
    task = OnPolicyDistillation("unused", objective=DistillationLoss(how, weight=1.0, chunk_size=5))
    task.network = student
    task._live = [FrozenNetwork(teacher)]
    task.log = lambda *_, **__: None  # type: ignore[method-assign]
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.mul_(3)
        theirs = teacher(ids).logits[:, :-1]
    ours = task.training_step({"input_ids": ids, "labels": labels}, 0)["loss"]
    expected = gkd.GKDTrainer.generalized_jsd_loss(
        student(ids).logits[:, :-1], theirs, labels[:, 1:], beta, temperature
    )
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    parameters = list(student.parameters())
    for found, right in zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(expected, parameters)):
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-4)


@pytest.mark.turns(6, family="slow")
def test_a_run_on_prompts_comes_nearer_to_both_teachers(home: Path, tmp_path: Path) -> None:
    teachers = [WeightedTeacher(str(home / "teacher1"), 3.0), WeightedTeacher(CausalLMConfig(str(home / "teacher2")))]
    task = _task(home, teacher=teachers, share=1.0, learning_rate=3e-2)
    data = PromptData(
        train=str(home / "prompts.jsonl"), tokenizer=str(home / "teacher1"), batch_size=4, val_fraction=0.3
    )
    run = trainer(default_root_dir=tmp_path, max_steps=30, limit_val_batches=1.0)
    before = trainer(limit_val_batches=1.0).validate(task, datamodule=data, verbose=False)[0]
    run.fit(task, datamodule=data)
    after = trainer(limit_val_batches=1.0).validate(task, datamodule=data, verbose=False)[0]
    assert before.keys() == {"val/divergence"}
    assert after["val/divergence"] < 0.9 * before["val/divergence"]
    run.save_checkpoint(tmp_path / "last.ckpt")
    again = OnPolicyDistillation.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.teacher == teachers
    assert_equal(weights(task), weights(again))


def fitted(home: Path, folder: Path, seed: int, path: Path | None = None) -> Any:
    torch.manual_seed(seed)
    task = _task(home, model=GPTConfig(dim=16, depth=1, num_heads=2, dropout=0.2, max_length=64))
    save = SaveAt(3, folder / "3.ckpt")
    run = trainer(default_root_dir=folder, max_epochs=9, accumulate_grad_batches=3, callbacks=[ExactResume(), save])
    run.fit(task, datamodule=_data(home), ckpt_path=path)
    assert run.current_epoch > 0
    return {"weights": weights(task), "optimizer": run.optimizers[0].state_dict()}


class SaveAt(Callback):
    """A checkpoint after an optimizer step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def test_resumed_in_the_middle_it_ends_with_the_same_bits(home: Path, tmp_path: Path) -> None:
    whole = fitted(home, tmp_path, 0)
    assert_equal(whole, fitted(home, tmp_path, 7, tmp_path / "3.ckpt"))


def test_adapters_of_a_quantised_student_learn_from_a_quantised_teacher(home: Path, tmp_path: Path) -> None:
    spec = CausalLMConfig(str(home / "teacher1"), quantize="nf4")
    task = _task(home, teacher=CausalLMConfig(str(home / "teacher2"), quantize="nf4"), model=spec, share=1.0)
    run = trainer(default_root_dir=tmp_path, max_steps=12, callbacks=[LoRA(rank=4, modules_to_save=None)])
    figures: list[float] = []
    task.log = lambda name, value, **_: figures.append(float(value)) if name == "train/divergence" else None  # type: ignore[method-assign]
    run.fit(task, datamodule=_data(home, batch_size=8))
    assert sum(figures[-3:]) < 0.97 * sum(figures[:3])


@pytest.mark.turns(4, family="ranks")
def test_two_processes_train_as_one_on_both_parts(home: Path, tmp_path: Path) -> None:
    run_ranks(_in_ranks, tmp_path, home)
    found = torch.load(tmp_path / "ranks.pt", weights_only=True)
    torch.testing.assert_close(found, _trained(home, tmp_path), atol=2e-5, rtol=1e-4)


def _trained(home: Path, folder: Path, **options: Any) -> Any:
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    data = _data(home)
    data.setup("fit")
    task = _task(home, share=0.7, rollout=Rollout(samples=1, max_new_tokens=8, stop=("a",)))
    task.tokenizer_state = pack_tokenizer(data.chat_tokenizer)
    task.model = GPTConfig(dim=16, depth=1, num_heads=2, max_length=64, vocab_size=data.vocab_size)
    rows: Any = data.train_rows
    order: Any = DistributedSampler(rows, world, rank, False)
    loader: Any = data.train_dataloader()
    collate = loader.collate_fn
    run = trainer(default_root_dir=folder, max_steps=4, use_distributed_sampler=False, **options)
    task.configure_optimizers = lambda: torch.optim.SGD(task.parameters(), 0.1)  # type: ignore[method-assign]
    run.fit(task, DataLoader(rows, 4 // world, collate_fn=collate, sampler=order))
    return task.state_dict()


def _in_ranks(home: Path) -> None:
    found = _trained(home, Path(), devices=2, strategy="ddp")
    if torch.distributed.get_rank() == 0:
        torch.save(found, "ranks.pt")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"share": 1.5}, "share must be at least 0 and at most 1"),
        ({"teacher": []}, "teacher must be a model, or a list of at least one WeightedTeacher"),
    ],
)
def test_wrong_arguments_are_refused(home: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        _task(home, **options)


def test_prompts_and_images_that_cannot_be_answered_are_refused(home: Path, tmp_path: Path) -> None:
    data = PromptData(train=str(home / "prompts.jsonl"), tokenizer=str(home / "teacher1"), batch_size=4)
    with pytest.raises(ConfigurationError, match="share must be 1 for data of prompts"):
        trainer(default_root_dir=tmp_path).fit(_task(home), datamodule=data)
    with pytest.raises(ConfigurationError, match="weight must be above 0"):
        WeightedTeacher("a", 0.0)
    pictured = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "pixel_values": torch.zeros(1)}
    with pytest.raises(ConfigurationError, match="rows with images cannot be answered"):
        _task(home)._answered(pictured, 0)
