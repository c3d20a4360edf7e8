"""Preference learning: what the reference is, what is compared, that it learns, and that it resumes."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import distributed
from torch.utils.data import DataLoader, DistributedSampler

from lit_efficient import (
    CausalLMConfig,
    ChunkedCrossEntropy,
    ConfigurationError,
    ExactResume,
    GPTConfig,
    LabelSmoothing,
    LanguageModeling,
    LoRA,
    Preference,
    ShardedStrategy,
)
from lit_efficient.application import apply
from lit_efficient.errors import CheckpointError, ConflictError
from lit_efficient.losses.next_token import token_losses
from lit_efficient.models.libraries.causal_lm import build
from tests.processes import run_ranks
from tests.ranks.toys import whole
from tests.support import assert_equal, weights
from tests.tasks.preference_kit import Rows, SaveAfter, loader, pairs, saved, trainer

GPT_TOY = GPTConfig(97, dim=32, depth=2, num_heads=4, max_length=16)


def _answer_log_probs(network: Any, batch: dict[str, Any], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """By a loop over single rows without padding."""
    sums, counts = [], []
    for ids, labels, mask in zip(*(batch[f"{side}_{name}"] for name in ("input_ids", "labels", "attention_mask"))):
        length = int(mask.sum())
        output = network(ids[None, :length])
        logits = output if isinstance(output, torch.Tensor) else output.logits
        losses = token_losses(logits[:, :-1], labels[None, 1:length])
        sums.append(-losses.sum())
        counts.append((labels[1:length] != -100).sum())
    return torch.stack(sums), torch.stack(counts)


def _quiet(task: Preference) -> Preference:
    task.configure_model()
    task.log = lambda *args, **options: None  # type: ignore[method-assign]
    return task


@pytest.mark.turns(3)
@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo", "orpo", "simpo"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt"])
def test_the_loss_is_that_of_single_rows_by_the_papers_formulas(family: str, loss: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT_TOY if family == "gpt" else saved(tmp_path, family)
    task = _quiet(Preference(model, loss))
    task.reference()
    start = build(model) if isinstance(model, CausalLMConfig) else None
    network: Any = task.network
    batch = pairs(4)
    with torch.no_grad():
        refs = [_answer_log_probs(start.eval() if start else network, batch, s)[0] for s in ("chosen", "rejected")]
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
        policy = [_answer_log_probs(network, batch, side) for side in ("chosen", "rejected")]
    (pc, nc), (pr, nr) = policy
    if loss in ("sigmoid", "hinge"):
        h = (pc - refs[0]) - (pr - refs[1])
        expected = -torch.log(torch.sigmoid(0.1 * h)) if loss == "sigmoid" else (1 - 0.1 * h).clamp(min=0)
    elif loss == "ipo":
        expected = ((pc - refs[0]) / nc - (pr - refs[1]) / nr - 5).square()
    elif loss == "orpo":
        p, q = (pc / nc).exp(), (pr / nr).exp()
        expected = -p.log() - 0.1 * torch.sigmoid((p / (1 - p) / (q / (1 - q))).log()).log()
    else:
        expected = -torch.log(torch.sigmoid(2 * (pc / nc - pr / nr) - 1))
    output = task.training_step(batch, 0)
    torch.testing.assert_close(output["sample_loss"].detach(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output["loss"].detach(), expected.mean(), rtol=1e-4, atol=1e-5)


def test_margins_of_pairs_are_offsets_of_their_rewards(tmp_path: Path) -> None:
    task = _quiet(Preference(saved(tmp_path), offset=0.5))
    batch = pairs(3)
    margin = torch.tensor([0.0, 1.0, 4.0])
    got = task.training_step({**batch, "margin": margin}, 0)["sample_loss"].detach()
    torch.testing.assert_close(got, torch.nn.functional.softplus(0.5 * margin))  # the policy is the reference
    with pytest.raises(ConfigurationError, match=r"offset=0.5 needs margins, and the batch has none"):
        task.training_step(batch, 0)


@pytest.mark.turns(4, family="learns")
@pytest.mark.parametrize("variant", ["lora", "rslora", "dora", "pissa", None])
def test_the_loss_starts_at_log_2_and_the_pairs_are_learned(variant: str | None, tmp_path: Path) -> None:
    """The validation margin after training is 0.24 or more for each variant, with a standard deviation of 0.02."""
    torch.manual_seed(0)
    if variant:
        steps = 40
        task = Preference(saved(tmp_path), learning_rate=5e-3, warmup_steps=0)
        callbacks = [LoRA(rank=4, variant=variant, dropout=0.2)]
    else:
        steps = 12
        task = Preference(saved(tmp_path), learning_rate=1e-3, warmup_steps=0)
        callbacks = []
    logged: dict[str, list[float]] = {"loss": [], "accuracy": [], "margin": []}
    original = task.log
    task.log = (
        lambda name, value, **options: (  # type: ignore[method-assign]
            logged[name[6:]].append(float(value)) if name[6:] in logged else None,
            original(name, value, **options),
        )
    )
    runner = trainer(default_root_dir=tmp_path, max_steps=steps, callbacks=callbacks)
    runner.fit(task, loader(), loader())
    assert logged["loss"][0] == pytest.approx(math.log(2), abs=0.05 if variant else 1e-7)  # LoRA B = 0, but DoRA rounds
    assert logged["accuracy"][0] == 0.5 or variant
    assert logged["accuracy"][-1] == 1
    assert abs(logged["margin"][0]) < 0.15
    figures = runner.validate(task, loader(), verbose=False)[0]
    assert figures["val/margin"] > 0.15
    assert figures["val/loss"] < 0.63
    assert figures["val/accuracy"] > 0.8
    assert figures["val/margin"] == pytest.approx(figures["val/rewards/chosen"] - figures["val/rewards/rejected"])


@pytest.mark.parametrize(
    "technique",
    [LabelSmoothing(0.1), ChunkedCrossEntropy(label_smoothing=0.1), ChunkedCrossEntropy(z_loss=0.1)],
    ids=["LabelSmoothing", "label_smoothing", "z_loss"],
)
def test_what_changes_log_probabilities_is_refused(technique: Any, tmp_path: Path) -> None:
    """The loss would be that of other numbers, and that of the reference would not match it."""
    runner = trainer(default_root_dir=tmp_path, callbacks=[technique])
    with pytest.raises(ConflictError, match="the loss of Preference compares log-probabilities of answers"):
        runner.fit(Preference(saved(tmp_path)), loader(), loader())


@pytest.mark.parametrize("adapters", [True, False])
def test_under_autocast_the_reference_leaves_no_cached_weights_to_the_policy(adapters: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = _quiet(Preference(saved(tmp_path)))
    if adapters:
        apply(task, [LoRA(rank=4, modules_to_save=["lm_head"])])
    task.reference()
    network: Any = task.network
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    gradients = []
    for options in ({"enabled": False}, {"dtype": torch.bfloat16}):
        network.zero_grad()
        with torch.autocast("cpu", **options):  # type: ignore[arg-type]
            loss = task.training_step(pairs(4), 0)["loss"]
        loss.backward()
        gradients.append((loss.detach(), network.lm_head.weight.grad.clone()))
    torch.testing.assert_close(*(loss for loss, _ in gradients), rtol=0.05, atol=0)
    assert not torch.equal(gradients[0][0], gradients[1][0])
    difference = (gradients[0][1] - gradients[1][1]).norm() / gradients[0][1].norm()
    assert difference < 0.1


def test_under_lora_the_reference_is_the_base_bit_for_bit_and_holds_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = Preference(saved(tmp_path), learning_rate=2e-2, warmup_steps=0)
    trainer(default_root_dir=tmp_path, callbacks=[LoRA(rank=4, dropout=0.5)]).fit(task, loader(), loader())
    base, batch = build(saved(tmp_path)).eval(), pairs(4)
    reference, network = task.reference(), task.network
    assert reference is not None
    assert network is not None
    assert reference.tensors == {}
    ids = batch["chosen_input_ids"]
    with torch.no_grad():
        expected = base(ids).logits
        assert not torch.allclose(network(ids).logits, expected)
    network.train()
    assert torch.equal(reference(network, lambda: network(ids).logits), expected)
    assert all(part.training for part in network.modules())


def test_what_trains_in_full_beside_adapters_is_copied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = Preference(saved(tmp_path), learning_rate=2e-2, warmup_steps=0)
    trainer(default_root_dir=tmp_path, callbacks=[LoRA(rank=4, modules_to_save=["lm_head"])]).fit(
        task, loader(), loader()
    )
    reference, network = task.reference(), task.network
    assert reference is not None
    assert network is not None
    assert list(reference.tensors) == ["lm_head.weight"]
    ids = pairs(4)["chosen_input_ids"]
    with torch.no_grad():
        expected = build(saved(tmp_path)).eval()(ids).logits
    assert torch.equal(reference(network, lambda: network(ids).logits), expected)
    network.get_parameter("model.norm.weight").requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"'model.norm.weight' was unfrozen after training began"):
        reference(network, lambda: None)


@pytest.mark.turns(4, family="resumed")
@pytest.mark.parametrize("adapters", [True, False])
def test_a_run_resumes_bit_for_bit_with_the_same_reference(adapters: bool, tmp_path: Path) -> None:
    path = tmp_path / "three.ckpt"

    def run(**options: Any) -> Preference:
        torch.manual_seed(0)
        task = Preference(saved(tmp_path), learning_rate=1e-2, warmup_steps=0)
        callbacks: list[Any] = [ExactResume(), SaveAfter(3, path)] + ([LoRA(rank=4, dropout=0.2)] if adapters else [])
        runner = trainer(default_root_dir=tmp_path, max_steps=7, callbacks=callbacks)
        runner.fit(task, loader(12, 2), loader(), **options)
        return task

    whole = run()
    again = run(ckpt_path=str(path))
    assert_equal(weights(again), weights(whole))
    kept = torch.load(path, weights_only=True)
    names = set(kept["state_dict"])
    assert names == {name for name in weights(again) if not adapters or "lora_" in name}  # no copy of the start
    a, b = again.reference(), whole.reference()
    assert a is not None
    assert b is not None
    assert a.fingerprint() == b.fingerprint() == kept["preference"]["reference"]


def test_another_start_is_refused_on_resume_and_a_trained_network_as_its_own_reference(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = Preference(saved(tmp_path), warmup_steps=0)
    runner = trainer(default_root_dir=tmp_path)
    runner.fit(task, loader(), loader())
    path = str(tmp_path / "last.ckpt")
    runner.save_checkpoint(path)
    expected = runner.validate(task, loader(), verbose=False)
    same = Preference(saved(tmp_path))
    assert trainer(default_root_dir=tmp_path).validate(same, loader(), ckpt_path=path, verbose=False) == expected
    loaded = Preference.load_from_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"pass the checkpoint to the trainer"):
        trainer(default_root_dir=tmp_path).validate(loaded, loader(), verbose=False)
    other = CausalLMConfig(saved(tmp_path).name_or_path, random_weights=True)
    with pytest.raises(CheckpointError, match="from the same start"):
        trainer(default_root_dir=tmp_path).fit(Preference(other), loader(), loader(), ckpt_path=path)


def test_validation_before_training_does_not_change_it(tmp_path: Path) -> None:
    results = []
    for validate_first in (False, True):
        torch.manual_seed(0)
        task = Preference(saved(tmp_path), learning_rate=1e-3, warmup_steps=0)
        if validate_first:
            figures = trainer(default_root_dir=tmp_path).validate(task, loader(), verbose=False)[0]
            assert figures["val/loss"] == pytest.approx(math.log(2), abs=1e-6)
        trainer(default_root_dir=tmp_path).fit(task, loader(), loader())
        results.append(weights(task))
    assert_equal(*results)


@pytest.mark.turns(2)
@pytest.mark.parametrize("adapters", [True, False])
def test_a_run_starts_from_a_language_models_checkpoint_with_adapters_merged(adapters: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sft = LanguageModeling(saved(tmp_path), learning_rate=1e-2, warmup_steps=0)
    runner = trainer(default_root_dir=tmp_path, callbacks=[LoRA(rank=4)] if adapters else [])
    batches = [{"input_ids": pairs(4)["chosen_input_ids"], "labels": pairs(4)["chosen_labels"]}] * 4
    rows = torch.utils.data.DataLoader(batches, batch_size=None)
    runner.fit(sft, rows, rows)
    path = str(tmp_path / "sft.ckpt")
    runner.save_checkpoint(path)
    task = Preference(saved(tmp_path), start_from=path, learning_rate=1e-2, warmup_steps=0)
    task.configure_model()
    ids = pairs(4)["chosen_input_ids"]
    sft.eval()
    assert task.network is not None
    with torch.no_grad():
        torch.testing.assert_close(task.network.eval()(ids).logits, sft(ids))
    task.train()
    second = trainer(default_root_dir=tmp_path, callbacks=[LoRA(rank=2)])
    second.fit(task, loader(), loader())
    second.save_checkpoint(tmp_path / "dpo.ckpt")
    again = Preference(saved(tmp_path), start_from=path)
    resumed = trainer(default_root_dir=tmp_path, callbacks=[LoRA(rank=2)])
    got = resumed.validate(again, loader(), ckpt_path=str(tmp_path / "dpo.ckpt"), verbose=False)
    assert got == second.validate(task, loader(), verbose=False)
    plain = Preference(CausalLMConfig(config_fields={"model_type": "gpt2", "n_embd": 8, "n_head": 2, "vocab_size": 97}))
    plain.start_from = path
    with pytest.raises(CheckpointError, match="does not fit the model here"):
        plain.configure_model()


def test_prediction_gives_margins_and_generation_works(tmp_path: Path) -> None:
    task = _quiet(Preference(saved(tmp_path), "simpo"))
    batch = pairs(3)
    margins = task.predict_step(batch, 0)
    assert isinstance(margins, torch.Tensor)
    (pc, nc), (pr, nr) = (_answer_log_probs(task.network, batch, side) for side in ("chosen", "rejected"))
    torch.testing.assert_close(margins, 2 * (pc / nc - pr / nr).detach())


def test_sides_of_different_lengths_are_filled_up_and_routers_balanced() -> None:
    from tests.models.libraries.test_causal_lm import FAMILIES

    torch.manual_seed(0)
    task = _quiet(Preference(CausalLMConfig(config_fields=FAMILIES["mixtral"])))
    batch = pairs(3)
    whole = task.training_step(batch, 0)
    assert float(whole["extra_loss"].detach()) > 0
    assert float(whole["loss"].detach()) == pytest.approx(math.log(2) + float(whole["extra_loss"].detach()))
    shorter = {name: (t[:, :8] if name.startswith("rejected") else t) for name, t in batch.items()}
    masked = dict(batch) | {"rejected_labels": batch["rejected_labels"].clone()}
    masked["rejected_labels"][:, 8:] = -100
    masked["rejected_attention_mask"] = batch["rejected_attention_mask"].clone()
    masked["rejected_attention_mask"][:, 8:] = 0
    margins = [task.compare(one) for one in (shorter, masked)]
    torch.testing.assert_close(margins[0].rejected, margins[1].rejected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offset": -1.0}, "offset must be at least 0, got -1"),
        ({"offset": 1.0, "loss": "hinge"}, "offset must be 0 with hinge, because only sigmoid uses it, got 1"),
        ({"loss": "kto"}, "loss must be one of sigmoid, hinge, ipo, orpo, simpo, got 'kto'"),
        ({"beta": 0.0}, "beta must be above 0, got 0.0"),
        ({"label_smoothing": 0.7}, "label_smoothing must be at least 0 and below 0.5, got 0.7"),
        ({"loss": "orpo", "label_smoothing": 0.1}, "label_smoothing must be 0 with orpo, .* got 0.1"),
        ({"gamma": 0.5}, "gamma must be null with sigmoid, because only simpo uses it, got 0.5"),
        ({"loss": "simpo", "gamma": -1.0}, "gamma must be at least 0 or null, got -1.0"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Preference(GPT_TOY, **arguments)


class FSDPStrategy(SingleDeviceStrategy):
    """A real strategy under the name of one that shards: several processes would tell no more."""


def test_a_copy_of_sharded_weights_is_refused_before_training(tmp_path: Path) -> None:

    def strategy() -> dict[str, Any]:
        return {"strategy": FSDPStrategy(torch.device("cpu"), CPUAccelerator()), "accelerator": "auto"}

    with pytest.raises(ConflictError, match=r"needs a copy of .* which FSDPStrategy shards"):
        trainer(default_root_dir=tmp_path, **strategy()).fit(Preference(saved(tmp_path)), loader(), loader())
    for loss, callbacks in (("simpo", []), ("sigmoid", [LoRA(rank=2)])):
        task = Preference(saved(tmp_path), loss)  # type: ignore[arg-type]
        trainer(default_root_dir=tmp_path, max_steps=1, callbacks=callbacks, **strategy()).fit(task, loader(), loader())


@pytest.mark.turns(4, family="ranks")
def test_two_processes_share_the_reference_as_they_share_the_weights(tmp_path: Path) -> None:
    """In shards, from a checkpoint too, beside one process on both batches."""
    saved(tmp_path)
    run_ranks(_in_shards, tmp_path)
    straight = _fit_all(tmp_path)
    for path in ("straight.pt", "resumed.pt"):
        torch.testing.assert_close(torch.load(tmp_path / path, weights_only=True), straight, rtol=1e-5, atol=1e-5)


def _fit_all(folder: Path, ckpt_path: str | None = None, save: str = "", **arguments: Any) -> dict[str, torch.Tensor]:
    """Weights and figures of four steps of all weights; the state after two."""
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    task = Preference(saved(folder), beta=0.5, learning_rate=1e-2, warmup_steps=1)
    callbacks = [ExactResume(), *([Halfway(save)] if save else [])]
    run = trainer(default_root_dir=folder, callbacks=callbacks, use_distributed_sampler=False, **arguments)
    both = (DataLoader(Rows(n), 4 // world, sampler=DistributedSampler(Rows(n), world, rank, False)) for n in (16, 8))
    run.fit(task, *both, ckpt_path=ckpt_path)
    return whole(task.state_dict()) | {name: value for name, value in run.callback_metrics.items() if "val" in name}


class Halfway(Callback):
    """Saves after two steps, in all processes."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def _in_shards() -> None:
    for name, more in {"straight.pt": {"save": "half.ckpt"}, "resumed.pt": {"ckpt_path": "half.ckpt"}}.items():
        found = _fit_all(Path(), devices=2, strategy=ShardedStrategy(), **more)  # type: ignore[arg-type]
        if distributed.get_rank() == 0:
            torch.save(found, name)
        distributed.barrier()


def test_batches_without_pairs_are_refused() -> None:
    task = _quiet(Preference(GPT_TOY, "orpo"))
    ids = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ConfigurationError, match="must have chosen_input_ids and rejected_input_ids; got input_ids"):
        task.training_step({"input_ids": ids, "labels": ids}, 0)
    batch = pairs(2)
    del batch["rejected_attention_mask"]
    with pytest.raises(ConfigurationError, match="chosen_attention_mask and rejected_attention_mask"):
        task.training_step(batch, 0)
