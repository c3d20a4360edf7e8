"""Distillation: what is minimised, who may teach, and that the teacher stays outside of everything."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerFast

from lit_efficient import (
    EMA,
    CausalLMConfig,
    ConfigurationError,
    CorpusFiles,
    Distillation,
    DistillationLoss,
    Divergence,
    ExactResume,
    GPTConfig,
    LanguageData,
    LanguageModeling,
    LoRA,
    PythonCorpus,
    QuantizeBase,
    ShardedStrategy,
    TeacherServer,
    WeightedTeacher,
    distillation_divergence,
)
from lit_efficient.__main__ import main
from lit_efficient.data.text.token_cache import END_OF_TEXT
from lit_efficient.losses.distillation import coarse, top_k_of
from lit_efficient.losses.next_token import IGNORE, targets_of
from lit_efficient.models.libraries.causal_lm import build
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.surgery import is_sharded
from lit_efficient.tasks.teacher import FrozenNetwork, TeacherSource
from tests import support
from tests.models.libraries.test_causal_lm import FAMILIES, SMALL
from tests.processes import run_ranks
from tests.ranks.toys import everyones, whole
from tests.support import assert_equal, weights
from tests.vllm_server import served

STUDENT = GPTConfig(dim=16, depth=1, num_heads=2, max_length=64)
JSD = DistillationLoss(Divergence("jsd", beta=0.1, temperature=2.0), weight=0.7, chunk_size=5)


def corpus(folder: Path, **changes: Any) -> PythonCorpus:
    source = folder / "source"
    source.mkdir(exist_ok=True)
    for index in range(12):
        (source / f"file{index}.py").write_text(f"def function_{index}(self):\n    return self.value + {index}\n" * 9)
    settings = {
        "vocab_size": 300,
        "sequence_length": 16,
        "batch_size": 4,
        "val_fraction": 0.2,
        "files": CorpusFiles([str(source)]),
    }
    return PythonCorpus(**(settings | {"cache_dir": str(folder / "cache")} | changes))


trainer = partial(support.trainer, max_epochs=-1, max_steps=3, limit_val_batches=1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher as a folder of Hugging Face with 12 rows of padding, and one as a checkpoint of ours."""
    folder = tmp_path_factory.mktemp("distillation")
    data = corpus(folder)
    data.prepare_data()
    data.setup()
    torch.manual_seed(5)
    llama = build(CausalLMConfig(config_fields={**FAMILIES["llama"], "vocab_size": data.vocab_size + 12}))
    llama.save_pretrained(folder / "teacher")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=data.tokenizer, eos_token=END_OF_TEXT)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    tokenizer.save_pretrained(folder / "teacher")
    teacher = LanguageModeling(STUDENT)
    run = trainer(default_root_dir=folder, max_steps=1, limit_val_batches=0)
    run.fit(teacher, datamodule=data)
    run.save_checkpoint(folder / "teacher.ckpt")
    return folder


def ready(
    student: dict[str, Any], teacher: dict[str, Any], objective: DistillationLoss
) -> tuple[Distillation, dict[str, Any]]:
    """A task with random student and teacher, without a trainer; what it logs comes back in the second."""
    torch.manual_seed(0)
    task = Distillation("unused", CausalLMConfig(config_fields=student), objective)
    task.configure_model()
    torch.manual_seed(1)
    task._live = [FrozenNetwork(build(CausalLMConfig(config_fields=teacher)))]
    logged: dict[str, Any] = {}
    task.log = lambda name, value, **options: logged.update({name: value})  # type: ignore[method-assign]
    return task, logged


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (2, 10), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = IGNORE
    return {"input_ids": ids, "labels": labels}


def by_hand(task: Distillation, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss from whole logits."""
    assert task._live
    objective, targets = task.objective, targets_of(tokens)
    balance = task._balance()
    asked = {"output_router_logits": True} if balance.is_on else {}
    output = task.network(tokens["input_ids"], use_cache=False, **asked)
    student = output.logits[targets != IGNORE]
    with torch.no_grad():
        teacher = task._live[0].on(task.device)(tokens["input_ids"], use_cache=False).logits[targets != IGNORE]
    divergence = distillation_divergence(student, teacher, objective.divergence).mean()
    loss = objective.weight * divergence + (1 - objective.weight) * F.cross_entropy(student, targets[targets != IGNORE])
    return loss + balance.coefficient * output.aux_loss if balance.is_on else loss


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_its_gradients_are_those_of_whole_logits(family: str) -> None:
    """Gemma's soft bound, GPT-2's tied head and Mixtral's auxiliary loss included, but not that of a teacher."""
    teacher = FAMILIES["mixtral"] | {"output_router_logits": True} if family == "mixtral" else FAMILIES["gemma2"]
    task, logged = ready(FAMILIES[family], teacher, JSD)
    network: Any = task.network
    output = task.training_step(batch(), 0)
    output["loss"].backward()
    ours = {name: parameter.grad.clone() for name, parameter in network.named_parameters()}
    network.zero_grad()
    expected = by_hand(task, batch())
    torch.testing.assert_close(output["loss"], expected)
    expected.backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert ("extra_loss" in output) is (family == "mixtral")
    mixed = 0.7 * logged["train/divergence"] + 0.3 * logged["train/cross_entropy"]
    torch.testing.assert_close(mixed + output.get("extra_loss", 0.0), output["loss"])


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens go through the heads."""
    monkeypatch.setattr("lit_efficient.tasks.distillation.computes_ignored", lambda device: True)


def test_on_a_gpu_tokens_that_are_not_learned_count_for_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = {"cache_top_k": 8, "cache_dir": str(tmp_path)}

    def found() -> dict[str, Any]:
        task, logged = ready(FAMILIES["llama"], FAMILIES["gemma2"], JSD)
        output = task.training_step(batch(), 0)
        output["loss"].backward()
        gradients = {name: parameter.grad for name, parameter in task.network.named_parameters()}
        return {**logged, **output, **gradients, **fitted(home, 0, **cached)["weights"]}

    expected = found()
    as_on_a_gpu(monkeypatch)
    whole = found()
    assert expected.keys() == whole.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-4, atol=1e-5)


def test_losses_of_samples_have_gradients_of_their_own() -> None:
    task, _ = ready(FAMILIES["llama"], FAMILIES["qwen3"], JSD)
    network: Any = task.network
    output = task.training_step(batch(), 0)
    assert output["sample_loss"].shape == (2,)
    (output["sample_loss"] * torch.tensor([3.0, 0.5])).sum().backward()
    ours = network.lm_head.weight.grad.clone()
    network.zero_grad()
    rows = [by_hand(task, {name: tensor[i : i + 1] for name, tensor in batch().items()}) for i in range(2)]
    (3 * rows[0] + 0.5 * rows[1]).backward()
    torch.testing.assert_close(ours, network.lm_head.weight.grad, rtol=1e-4, atol=1e-6)


def test_rationales_are_a_second_weighted_task() -> None:
    task, logged = ready(FAMILIES["llama"], FAMILIES["llama"], DistillationLoss(rationale_weight=0.25, chunk_size=4))
    answers, rationales = batch(), {name: tensor.flip(1) for name, tensor in batch().items()}
    alone = task.training_step(answers, 0)
    both = task.training_step(answers | {f"rationale_{name}": tensor for name, tensor in rationales.items()}, 0)
    logits = task.network(rationales["input_ids"], use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets_of(rationales).flatten())
    torch.testing.assert_close(logged["train/rationale"], expected)
    torch.testing.assert_close(both["loss"], alone["loss"] + 0.25 * expected)
    assert both["sample_loss"].shape == (2,)
    with pytest.raises(ConfigurationError, match="must have a row for each of the 2 answers, got 1"):
        task.training_step(answers | {f"rationale_{name}": tensor[:1] for name, tensor in rationales.items()}, 0)


@pytest.mark.parametrize("kind", ["shift", "soft cap", "factor", "matrix of zero", "small matrix"])
def test_a_head_that_cannot_be_split_is_refused(kind: str) -> None:
    """A soft cap leaves small logits as they are, and a trained factor is one at first, or its matrix zero."""
    task, _ = ready(FAMILIES["gemma2"], FAMILIES["llama"], JSD)
    network: Any = task.network
    network.factor = torch.nn.Parameter(torch.ones(()))
    size = network.config.vocab_size
    network.matrix = torch.nn.Parameter(torch.randn(size, size) * (1e-8 if kind == "small matrix" else 0.0))
    forward = network.forward

    def shifted(*arguments: Any, **options: Any) -> Any:
        output = forward(*arguments, **options)
        if kind == "shift":
            output.logits = output.logits + 1
        elif kind == "factor":
            output.logits = output.logits * network.factor
        elif "matrix" in kind:
            output.logits = output.logits + output.logits @ network.matrix
        else:
            output.logits = 20 * torch.tanh(output.logits / 20)
        return output

    network.forward = shifted
    with pytest.raises(ConfigurationError, match="changes its logits after the head in a way that is not supported"):
        task.training_step(batch(), 0)


class Learned(Callback):
    """The divergence before and after."""

    def __init__(self) -> None:
        self.divergence: list[float] = []

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.divergence.append(float(trainer.callback_metrics["val/divergence"]))


@pytest.mark.turns(4, family="learns")
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_the_student_comes_nearer_to_a_teacher_with_padded_rows(home: Path, kind: Any) -> None:
    torch.manual_seed(0)
    objective = DistillationLoss(Divergence(kind, temperature=2.0), weight=1.0, chunk_size=24)
    task, seen = Distillation(str(home / "teacher"), STUDENT, objective, learning_rate=0.03, warmup_steps=1), Learned()
    run = trainer(default_root_dir=home, max_steps=12, callbacks=[seen], num_sanity_val_steps=1, val_check_interval=12)
    run.fit(task, datamodule=corpus(home))
    assert seen.divergence[-1] < 0.7 * seen.divergence[0]
    assert {"train/loss", "train/divergence", "train/cross_entropy", "val/loss"} <= run.callback_metrics.keys()
    assert task._live
    assert task._live[0].on(task.device).lm_head.out_features == task.network.head.out_features + 12


def test_nothing_touches_the_teacher(home: Path) -> None:
    torch.manual_seed(0)
    student = CausalLMConfig(config_fields={"model_type": "llama", **SMALL, "vocab_size": 300})
    task = Distillation(str(home / "teacher"), student, JSD, warmup_steps=1)
    run = trainer(default_root_dir=home, callbacks=[QuantizeBase(), LoRA(rank=2), EMA(decay=0.5, warmup=None)])
    run.fit(task, datamodule=corpus(home))
    run.save_checkpoint(home / "student.ckpt")
    assert task._live
    teacher = task._live[0].on(task.device)
    assert_equal(weights(teacher), weights(build(CausalLMConfig(str(home / "teacher")))))
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in teacher.parameters())
    assert not any(module.training for module in teacher.modules())
    inside = {id(part) for part in (*task.modules(), *task.parameters())}
    assert not inside & {id(part) for part in (*teacher.modules(), *teacher.parameters())}
    assert copy.deepcopy(task)._live[0] is task._live[0]
    saved = torch.load(home / "student.ckpt", weights_only=True)
    assert saved["state_dict"].keys() < weights(task).keys()
    assert all("lora" in name for name in saved["state_dict"])
    assert sum(len(group["params"]) for group in run.optimizers[0].param_groups) == 28  # factors of 14 linear layers


def test_a_checkpoint_alone_writes_and_can_teach(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    task = Distillation(str(home / "teacher.ckpt"), STUDENT, JSD, warmup_steps=1)
    run = trainer(default_root_dir=home)
    run.fit(task, datamodule=corpus(home))
    run.save_checkpoint(home / "second.ckpt")
    assert main(["generate", "--ckpt", str(home / "second.ckpt"), "--prompt", "def", "--max_new_tokens", "8"]) == 0
    assert capsys.readouterr().out == task.generate_text("def", max_new_tokens=8)[0] + "\n"
    again = Distillation.load_from_checkpoint(home / "second.ckpt", weights_only=True)
    assert (again.teacher, again.objective) == (task.teacher, JSD)
    assert not again._live
    third = Distillation(str(home / "second.ckpt"), STUDENT, JSD)
    trainer(default_root_dir=home, max_steps=1).fit(third, datamodule=corpus(home))
    assert third._live
    assert_equal(weights(third._live[0].on(third.device)), weights(task.network))


class SaveAt(Callback):
    """A checkpoint after an optimizer step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def fitted(home: Path, seed: int, *callbacks: Callback, ckpt_path: Path | None = None, **arguments: Any) -> Any:
    """Two epochs and a bit, shuffled anew in each, with dropout and accumulation."""
    torch.manual_seed(0 if ckpt_path is None else seed)
    student = GPTConfig(dim=16, depth=1, num_heads=2, dropout=0.2)
    task = Distillation(str(home / "teacher"), student, JSD, warmup_steps=1, **arguments)
    run = trainer(
        default_root_dir=home,
        max_steps=8,
        accumulate_grad_batches=2,
        max_epochs=9,
        callbacks=[ExactResume(), *callbacks],
    )
    run.fit(task, datamodule=corpus(home, batch_size=8), ckpt_path=ckpt_path)
    assert run.current_epoch > 0
    return {"weights": weights(task), "optimizer": run.optimizers[0].state_dict()}


@pytest.mark.turns(4, family="resumed")
@pytest.mark.parametrize("cached", [False, True])
def test_resumed_in_the_middle_it_ends_with_the_same_bits(home: Path, tmp_path: Path, cached: bool) -> None:
    more: dict[str, Any] = {"cache_top_k": 8, "cache_dir": str(tmp_path)} if cached else {}
    whole = fitted(home, 0, SaveAt(5, tmp_path / "5.ckpt"), **more)
    assert_equal(whole, fitted(home, 7, ckpt_path=tmp_path / "5.ckpt", **more))


@pytest.mark.turns(3, family="from a cache")
def test_a_teacher_asked_once_teaches_as_a_live_one(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of the vocabulary kept; two shuffled epochs."""
    data = corpus(home)
    data.prepare_data()
    data.setup()
    live = fitted(home, 0)["weights"]
    every = {"cache_top_k": data.vocab_size, "cache_dir": str(tmp_path)}
    cached = fitted(home, 0, **every)["weights"]
    for name, tensor in live.items():
        torch.testing.assert_close(cached[name], tensor, rtol=1e-5, atol=1e-5)
    few = fitted(home, 0, **(every | {"cache_top_k": 2}))["weights"]
    assert not torch.allclose(few["network.head.weight"], live["network.head.weight"], atol=1e-3)
    assert len(list((tmp_path / "teacher").iterdir())) == 2  # one folder for each k
    monkeypatch.setattr(TeacherSource, "load", None)  # what is on disk is not asked for again
    assert_equal(cached, fitted(home, 0, **every)["weights"])


@pytest.mark.turns(3, family="from a cache")
@pytest.mark.parametrize("pack", [True, False])
def test_conversations_packed_or_padded_are_found_in_the_cache(home: Path, tmp_path: Path, pack: bool) -> None:
    """Only answers are learned; padded rows are as long as the longest of a batch that shuffling makes."""
    turns = [
        [{"role": "user", "content": f"def {i}?"}, {"role": "assistant", "content": "x " * (1 + i % 20)}]
        for i in range(40)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": two}) + "\n" for two in turns))
    student = CausalLMConfig(config_fields={**FAMILIES["llama"], "vocab_size": 310})
    found = []
    for more in ({}, {"cache_top_k": 298, "cache_dir": str(tmp_path)}):
        data = LanguageData(
            train=str(tmp_path / "a.jsonl"),
            tokenizer=str(home / "teacher"),
            max_length=64,
            pack=pack,
            val_fraction=0.1,
            cache_dir=str(tmp_path),
        )
        torch.manual_seed(0)
        task = Distillation(str(home / "teacher"), student, JSD, warmup_steps=1, **more)
        trainer(default_root_dir=home, max_steps=4, limit_val_batches=0, callbacks=[ExactResume()]).fit(
            task, datamodule=data
        )
        found.append(weights(task))
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.turns(6, family="ranks")
def test_two_processes_share_one_cache_and_keep_the_teacher_out_of_ddp(home: Path, tmp_path: Path) -> None:
    run_ranks(_train_live_and_from_one_cache, tmp_path, home)
    assert len(list((tmp_path / "teacher").iterdir())) == 1


def _train_live_and_from_one_cache(home: Path) -> None:
    found = []
    for more in ({}, {"cache_top_k": 298, "cache_dir": "."}):
        torch.manual_seed(0)
        task = Distillation(str(home / "teacher"), STUDENT, JSD, warmup_steps=1, **more)
        run = trainer(default_root_dir=home, devices=2, strategy="ddp", max_steps=2, limit_val_batches=0)
        run.fit(task, datamodule=corpus(home))
        first, second = everyones({name: parameter.detach() for name, parameter in task.named_parameters()})
        assert_equal(first, second)
        found.append(first)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.turns(4, family="ranks")
def test_a_live_teacher_is_sharded_by_its_blocks_as_the_student_is(home: Path, tmp_path: Path) -> None:
    run_ranks(_train_on_shards_of_a_teacher, tmp_path, home)


def _train_on_shards_of_a_teacher(home: Path) -> None:
    found = []
    for strategy in ("ddp", ShardedStrategy(save_distributed_checkpoint=False)):
        torch.manual_seed(0)
        task = Distillation(str(home / "teacher"), replace(STUDENT, depth=2), JSD, warmup_steps=1)
        run = trainer(default_root_dir=home, devices=2, strategy=strategy, max_steps=2)
        run.fit(task, datamodule=corpus(home))
        found.append((whole(task.state_dict()), {k: v for k, v in run.callback_metrics.items() if "divergence" in k}))
        assert task._live
        blocks = [p for name, p in task._live[0].on(task.device).named_parameters() if ".layers." in name]
        assert all(is_sharded(p) is (strategy != "ddp") for p in blocks)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_data_that_cannot_be_cached_are_refused(home: Path, tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield from (batch() for _ in range(4))

    task = Distillation(str(home / "teacher"), STUDENT, cache_top_k=4, cache_dir=str(tmp_path))
    task.model = GPTConfig(vocab_size=97, dim=16, depth=1, num_heads=2)
    with pytest.raises(ConfigurationError, match="needs one DataLoader over an indexed data set"):
        trainer(default_root_dir=home).fit(task, *(DataLoader(Stream(), batch_size=None) for _ in range(2)))
    task = Distillation(str(home / "teacher"), STUDENT, cache_top_k=299, cache_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"cache_top_k must be at most 298, the size of .*, got 299"):
        trainer(default_root_dir=home).fit(task, datamodule=corpus(home))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache_top_k": 0}, "cache_top_k must be a whole number of at least 1 or null, got 0"),
        ({"teacher": CausalLMConfig(config_fields=FAMILIES["llama"])}, "teacher must have trained weights"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Distillation(**{"teacher": "x", **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": 0.0}, "weight must be above 0 and at most 1, got 0.0"),
        ({"rationale_weight": -1.0}, "rationale_weight must be at least 0, got -1.0"),
        ({"chunk_size": 0}, "chunk_size must be a whole number of at least 1, got 0"),
    ],
)
def test_a_bad_objective_is_refused_at_once(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DistillationLoss(**arguments)


def test_a_teacher_of_other_tokens_is_refused(home: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build(CausalLMConfig(config_fields={**FAMILIES["llama"], "vocab_size": 300})).save_pretrained(tmp_path)
    task = Distillation(str(tmp_path), STUDENT)
    with pytest.raises(ConfigurationError, match="has no tokenizer to compare"):
        trainer(default_root_dir=home).fit(task, datamodule=corpus(home))
    words = Tokenizer(WordLevel({"def": 1, "return": 2}))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"tokens have another id there or none .*write-data"):
        trainer(default_root_dir=home).fit(task, datamodule=corpus(home))
    with pytest.raises(ConfigurationError, match="tokenizer of no/such cannot be read"):
        trainer(default_root_dir=home).fit(Distillation("no/such", STUDENT), datamodule=corpus(home))


def test_without_a_tokenizer_the_number_of_ids_must_be_the_same(home: Path, tmp_path: Path) -> None:
    rows = [{name: tensor[0] for name, tensor in batch().items()}] * 4
    cached = Distillation(
        str(home / "teacher"), GPTConfig(vocab_size=97, dim=16), cache_top_k=4, cache_dir=str(tmp_path)
    )
    with pytest.raises(ConfigurationError, match="same number of token ids, got 97 and 310"):
        trainer(default_root_dir=home).fit(cached, *(DataLoader(rows, batch_size=2) for _ in range(2)))
    task, _ = ready(FAMILIES["llama"], {**FAMILIES["llama"], "vocab_size": 104}, JSD)
    with pytest.raises(ConfigurationError, match="same number of token ids, got 97 and 104"):
        task.training_step(batch(), 0)


@pytest.mark.parametrize(
    ("path", "message"), [("typo.ckpt", "there is no file typo.ckpt"), ("runs/llm/typo", "there is no folder")]
)
def test_a_path_at_which_nothing_is_is_not_asked_of_a_hub(path: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TeacherSource(path).tokenizer_state()


@pytest.mark.parametrize(("form", "k", "size"), [("padded", 5, 298), ("packed", 5, 298), ("packed", 100, 100)])
def test_a_served_teacher_teaches_as_its_own_most_likely_tokens_do(
    home: Path, tmp_path: Path, form: str, k: int, size: int
) -> None:
    """Beside a live teacher; the reference has one document in each batch, and whole logits."""
    torch.manual_seed(2)
    build(CausalLMConfig(config_fields={**FAMILIES["llama"], "vocab_size": size})).save_pretrained(tmp_path)
    PreTrainedTokenizerFast.from_pretrained(home / "teacher").save_pretrained(tmp_path)
    with served(tmp_path) as server:
        spec = TeacherServer(server.url, str(home / "teacher"), k)
        teachers = [WeightedTeacher(spec, 3.0), WeightedTeacher(str(tmp_path))]
        task = Distillation(teachers, STUDENT, DistillationLoss(Divergence("reverse_kl"), weight=0.7, chunk_size=4))
        torch.manual_seed(3)
        task.network = GPT(replace(STUDENT, vocab_size=size))
        task._live = [source.load() for source in task._sources]
        task._shared = size
        task.log = lambda *_, **__: None  # type: ignore[method-assign]
        ids = torch.randint(3, size, (2, 14), generator=torch.Generator().manual_seed(1))
        labels = ids.clone()
        labels[:, [0, 1, 2, 8]] = IGNORE
        if form == "padded":
            labels[1, 8:] = IGNORE
            mask = torch.ones_like(ids)
            mask[1, 9:] = 0
            tokens = {"input_ids": ids, "labels": labels, "attention_mask": mask}
            bounds = [(0, 0, 14), (1, 0, 9)]
        else:
            tokens = {"input_ids": ids, "labels": labels, "position_ids": torch.tensor([[*range(8), *range(6)]] * 2)}
            bounds = [(row, *place) for row in (0, 1) for place in ((0, 8), (8, 14))]
        loss = task.training_step(tokens, 0)["loss"]
        assert len(server.asked) == len(bounds) + 1  # with the question for the model's name
        teacher: Any = task._teacher_networks()[0]
        task._shared = size - 1
        with pytest.raises(ConfigurationError, match=f"id {size - 1}, and student and teacher have {size - 1} tokens"):
            task.training_step(tokens, 0)
    total, count = torch.zeros(()), 0
    for row, begin, end in bounds:
        own = {"input_ids": ids[row : row + 1, begin:end], "labels": labels[row : row + 1, begin:end]}
        targets = targets_of(own)[0]
        for place in (targets != IGNORE).nonzero()[:, 0].tolist():
            student = task.network(own["input_ids"])[:, place]
            with torch.no_grad():
                whole = teacher(own["input_ids"]).logits[:, place]
            kept, log_probs = top_k_of(whole, k)
            log_q = student.log_softmax(-1)
            merged = Divergence("reverse_kl").measure(log_probs, coarse(log_q, kept, log_probs))[0]
            exact = distillation_divergence(student, whole, Divergence("reverse_kl"), vocab_size=size)
            total = total + 0.3 * -log_q[0, targets[place]] + 0.7 * (0.75 * merged + 0.25 * exact).sum()
            count += 1
    torch.testing.assert_close(loss, total / count, atol=1e-5, rtol=1e-4)
    parameters = list(task.network.parameters())
    for found, right in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(total / count, parameters)):
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-3)


def test_a_served_teacher_is_checked_before_training(home: Path, tmp_path: Path) -> None:
    spec = TeacherServer("http://127.0.0.1:9", str(home / "teacher"))
    with pytest.raises(ConfigurationError, match="cache_top_k must be null with several teachers or a server"):
        Distillation(spec, STUDENT, cache_top_k=4)
    with pytest.raises(ConfigurationError, match=r"objective.divergence.temperature must be 1 with a server"):
        Distillation(spec, STUDENT, JSD)
    with pytest.raises(ConfigurationError, match="k must be a whole number of at least 1"):
        TeacherServer("http://127.0.0.1:9", "a", 0)
    with pytest.raises(ConfigurationError, match="cannot be asked"):
        trainer(default_root_dir=tmp_path).fit(Distillation(spec, STUDENT), datamodule=corpus(home))
    task = Distillation([WeightedTeacher(spec, 2.0)], STUDENT)
    assert Distillation(task.hparams["teacher"], STUDENT).teacher == spec
