"""LanguageModeling with models of transformers: the same loss, checkpoints that stand alone, packed documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lit_efficient import (
    CausalLMConfig,
    ChunkedCrossEntropy,
    ConfigurationError,
    CorpusFiles,
    GPTConfig,
    LanguageModeling,
    LoRA,
    PythonCorpus,
)
from lit_efficient.application import apply
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer, train_chat_tokenizer
from lit_efficient.losses.deferred_logits import output_head
from lit_efficient.models.libraries.causal_lm import build
from lit_efficient.tasks.loading import load_language_model
from tests.models.libraries.test_causal_lm import FAMILIES, SMALL


def _trainer(folder: Path, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {"max_steps": 3, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    settings |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "default_root_dir": folder}
    return Trainer(**(settings | {"enable_checkpointing": False} | changes))


def _corpus(folder: Path) -> PythonCorpus:
    source = folder / "source"
    source.mkdir(exist_ok=True)
    for index in range(12):
        (source / f"file{index}.py").write_text(f"def function_{index}(self):\n    return self.value + {index}\n" * 9)
    return PythonCorpus(
        vocab_size=300, sequence_length=16, batch_size=4, val_fraction=0.2, files=CorpusFiles([str(source)])
    )


def _batch(**more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (2, 10), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels, **more}


def _task(family: str) -> LanguageModeling:
    torch.manual_seed(0)
    task = LanguageModeling(CausalLMConfig(config_fields=FAMILIES[family]))
    task.configure_model()
    task.log = lambda *args, **options: None  # type: ignore[method-assign]
    return task


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_its_gradients_are_the_models_own(family: str) -> None:
    task, batch = _task(family), _batch()
    network: Any = task.network
    task.training_step(batch, 0)["loss"].backward()
    ours = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    theirs = network(**batch, use_cache=False)
    theirs.loss.backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-6)
    assert ("extra_loss" in task.training_step(batch, 0)) is (family == "mixtral")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("weighting", ["dft", "eaft"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt"])
def test_weighted_tokens_give_the_loss_of_llama_factory(family: str, weighting: Any, chunked: bool) -> None:
    """The formulas of LLaMA-Factory 0.9.5 (`_dft_cross_entropy`, `_eaft_cross_entropy`), with log 20 in place of 3."""
    torch.manual_seed(0)
    alpha = {"eaft_alpha": 0.5} if weighting == "eaft" else {}
    model = GPTConfig(97, dim=32, depth=2, num_heads=4, max_length=16)
    config = model if family == "gpt" else CausalLMConfig(config_fields=FAMILIES[family])
    task = LanguageModeling(config, weighting=weighting, **alpha)
    task.configure_model()
    task.log = lambda *args, **options: None  # type: ignore[method-assign]
    network: Any = task.network
    head: Any = output_head(network)
    torch.nn.init.normal_(head.weight, std=0.3)  # so that the weights of tokens differ
    batch = _batch()
    logits = task(batch["input_ids"]).float()
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="none"
    )
    top = logits.detach()[:, :-1].flatten(0, 1).topk(20).values.softmax(-1)
    entropy = -(top * top.log()).sum(-1) / torch.tensor(20.0).log()
    weights = (-losses.detach()).exp() if weighting == "dft" else entropy**0.5
    kept = batch["labels"][:, 1:].flatten() != -100
    expected = (losses * weights)[kept].mean()
    assert weights[kept].std() > 0.01 * weights[kept].mean()
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in network.named_parameters()}
    network.zero_grad()
    if chunked:
        apply(task, [ChunkedCrossEntropy(chunk_size=3)])
    loss = task.training_step(batch, 0)["loss"]
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    # Validation computes the cross-entropy.
    task.validation_step(batch, 0)
    assert float(task.epoch_metrics.compute()["loss"]) == pytest.approx(float(losses[kept].mean().detach()), rel=1e-5)


def test_an_exponent_without_eaft_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="eaft_alpha must be null with the weighting dft, because only eaft"):
        LanguageModeling(weighting="dft", eaft_alpha=2.0)
    with pytest.raises(ConfigurationError, match="weighting must be one of dft, eaft or null, got 'focal'"):
        LanguageModeling(weighting="focal")  # type: ignore[arg-type]


def test_labels_shifted_beforehand_give_the_same_loss() -> None:
    task, batch = _task("llama"), _batch()
    shifted = torch.full_like(batch["labels"], -100)
    shifted[:, :-1] = batch["labels"][:, 1:]
    expected = task.training_step(batch, 0)["loss"]
    got = task.training_step({"input_ids": batch["input_ids"], "shift_labels": shifted}, 0)["loss"]
    assert torch.equal(expected, got)


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_documents_packed_by_position_ids_do_not_see_each_other(family: str) -> None:
    task, batch = _task(family), _batch()
    packed = {"input_ids": batch["input_ids"].view(1, 20), "labels": batch["labels"].clone().view(1, 20)}
    packed["labels"][0, 10] = -100  # what would be predicted from the other document
    packed["position_ids"] = torch.arange(10).repeat(2)[None]
    apart = task.training_step(batch, 0)["loss"]
    torch.testing.assert_close(task.training_step(packed, 0)["loss"], apart, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_alone_gives_the_model_and_its_tokens_back(tmp_path: Path) -> None:
    fields = {key: value for key, value in SMALL.items() if key != "vocab_size" and not key.endswith("token_id")}
    model = LanguageModeling(CausalLMConfig(config_fields={"model_type": "llama", **fields}), warmup_steps=1)
    run = _trainer(tmp_path)
    run.fit(model, datamodule=_corpus(tmp_path))
    figures = run.validate(model, datamodule=run.datamodule, verbose=False)[0]
    assert figures["val/bits_per_byte"] > figures["val/loss"] / 8
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert model.network.config.vocab_size == run.datamodule.vocab_size
    again = LanguageModeling.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    written = again.generate_text("def f", max_new_tokens=8, seed=3)
    assert written == model.generate_text("def f", max_new_tokens=8, seed=3)
    assert len(written[0]) > len("def f")


def test_a_full_fine_tune_needs_no_base_and_adapters_do(tmp_path: Path) -> None:
    build(CausalLMConfig(config_fields={**FAMILIES["llama"], "vocab_size": 300})).save_pretrained(tmp_path / "base")
    for name, callbacks in (("full", []), ("adapters", [LoRA(rank=2)])):
        model = LanguageModeling(CausalLMConfig(str(tmp_path / "base")), warmup_steps=1)
        run = _trainer(tmp_path, callbacks=callbacks)
        run.fit(model, datamodule=_corpus(tmp_path))
        run.save_checkpoint(tmp_path / f"{name}.ckpt")
    (tmp_path / "base").rename(tmp_path / "moved")
    alone, _ = load_language_model(str(tmp_path / "full.ckpt"))
    assert alone.generate_text("def f", max_new_tokens=3)[0].startswith("def f")
    with pytest.raises(ConfigurationError, match="there is no folder"):
        load_language_model(str(tmp_path / "adapters.ckpt"))


def test_the_same_weights_with_other_heads_are_another_function() -> None:
    checkpoint: dict[str, Any] = {"state_dict": {}}
    _task("llama").on_save_checkpoint(checkpoint)
    other = LanguageModeling(
        CausalLMConfig(config_fields={**FAMILIES["llama"], "num_attention_heads": 8, "head_dim": 4})
    )
    other.configure_model()
    with pytest.raises(ConfigurationError, match="num_attention_heads is 4 in the checkpoint and 8 here"):
        other.on_load_checkpoint(checkpoint)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    task = _task("llama")
    checkpoint: dict[str, Any] = {"state_dict": {}}
    task.on_save_checkpoint(checkpoint)
    with pytest.raises(ConfigurationError, match="model_type is 'llama' in the checkpoint and 'qwen3' here"):
        _task("qwen3").on_load_checkpoint(checkpoint)
    ours = LanguageModeling()
    ours.model = type(ours.model)(vocab_size=97)
    ours.configure_model()
    with pytest.raises(ConfigurationError, match="model is 'of Hugging Face' in the checkpoint and 'GPT' here"):
        ours.on_load_checkpoint(checkpoint)


def test_a_chat_is_answered_in_the_template_and_begins_once() -> None:
    """Tokenizers like Llama's put a start before every text, and templates write it as well."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = train_chat_tokenizer(["def hello(): return 1\n"] * 4, 300)
    start = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, tokenizer.eos_token_id)]
    )
    tokenizer.chat_template = start + tokenizer.chat_template
    seen: list[list[int]] = []
    task = LanguageModeling(CausalLMConfig(config_fields=FAMILIES["llama"] | {"vocab_size": 300}))
    task.configure_model()
    task.tokenizer_state = pack_tokenizer(tokenizer)
    assert task.network is not None

    def keep(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        ids = inputs["input_ids"].tolist()
        seen.extend(row for row in ids if row[0] == tokenizer.eos_token_id)  # the others are the generator's trials

    task.network.register_forward_pre_hook(keep, with_kwargs=True)
    rendered = f"{start}<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    for prompt, chat in (("hello", True), (rendered.removeprefix(start), False)):
        text = task.generate_text(prompt, chat=chat, max_new_tokens=1)[0]
        given = rendered if chat else prompt
        assert text.startswith(given)
        alone = task.generate_text(prompt, chat=chat, max_new_tokens=1, with_prompts=False)[0]
        assert given + alone == text
    assert all(row == seen[0] for row in seen)
    assert seen[0].count(tokenizer.eos_token_id) == 1
    tokenizer.chat_template = None
    task.tokenizer_state = pack_tokenizer(tokenizer)
    with pytest.raises(ConfigurationError, match="chat needs a tokenizer with a chat template"):
        task.generate_text("hello", chat=True, max_new_tokens=1)
