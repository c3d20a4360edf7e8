"""TextEmbedding: the loss and weights of sentence-transformers on the same rows, Matryoshka sizes, exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer

from lit_efficient import CausalLMConfig, ConfigurationError, EmbeddingData, EmbeddingRows, LoRA, TextEmbedding
from lit_efficient.losses.contrastive import info_nce
from tests.support import QUIET
from tests.support_cli import export
from tests.tasks.text_kit import FAMILIES, saved, sentence, written

ROWS = [
    {"anchor": sentence(i, 3), "positive": sentence(i, 6), "negative": [sentence(i + 5, 4), sentence(i + 3, 2)]}
    for i in range(12)
]


def _data(folder: Path, family: str, negatives: int = 2) -> EmbeddingData:
    source = written(folder / "rows.jsonl", ROWS)
    return EmbeddingData(
        train=source, val=source, tokenizer=saved(folder, family), batch_size=6, max_length=32,
        cache_dir=str(folder / "cache"), rows=EmbeddingRows(negatives=negatives),
    )  # fmt: skip


def test_the_loss_compares_each_anchor_with_all_texts_of_the_batch() -> None:
    torch.manual_seed(0)
    found = torch.randn(4, 3, 8, dtype=torch.float64)
    losses = info_nce(found, 0.1, [3, 8])
    for row in range(4):
        expected = 0.0
        for size in (3, 8):
            anchor = found[row, 0, :size]
            score = lambda other: float(F.cosine_similarity(anchor, other[:size], dim=0)) / 0.1  # noqa: B023, E731
            others = [score(found[i, k]) for i in range(4) for k in (1, 2)]
            expected += float(torch.tensor(others, dtype=torch.float64).logsumexp(0)) - score(found[row, 1])
        assert float(losses[row]) == pytest.approx(expected)
    assert torch.autograd.gradcheck(lambda x: info_nce(x, 0.1, [3, 8]), found.requires_grad_())


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_padding_does_not_change_an_embedding(pooling: Any, tmp_path: Path) -> None:
    task = TextEmbedding(CausalLMConfig(saved(tmp_path, "bert")), pooling)
    task.configure_model()
    ids = torch.tensor([[2, 7, 8, 9, 3, 0, 0], [2, 5, 3, 0, 0, 0, 0]])
    mask = (ids != 0).long()
    found = task.eval().predict_step({"input_ids": ids, "attention_mask": mask}, 0)
    alone = torch.cat([task(one[None, : int(m.sum())]) for one, m in zip(ids, mask)])
    torch.testing.assert_close(found, alone)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(2))


@pytest.mark.turns(4, always=("bert-False", "llama-True"))
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_gives_transformers_and_sentence_transformers_the_same_embeddings(
    family: str, adapters: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModel, AutoTokenizer

    torch.manual_seed(0)
    pooling: Any = "last" if family in ("llama", "gpt2", "qwen3") else "mean"
    task = TextEmbedding(CausalLMConfig(saved(tmp_path, family)), pooling, sizes=[8, 16], learning_rate=1e-2)
    run = Trainer(callbacks=[LoRA(rank=2)] if adapters else [], **{**QUIET, "max_steps": 4, "max_epochs": -1})
    run.fit(task, datamodule=_data(tmp_path, family))
    run.save_checkpoint(tmp_path / "run.ckpt")
    for format in ["merged", *["peft"] * adapters]:
        assert export([str(tmp_path / "run.ckpt"), "--format", format, "--output", str(tmp_path / format)]) == 0
        assert "outputs of" in capsys.readouterr().err
    texts = [row["positive"] for row in ROWS[:5]]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    task.eval()
    with torch.no_grad():
        ours = task(**batch)
        states = AutoModel.from_pretrained(tmp_path / "merged").eval()(**batch).last_hidden_state
    last = batch.attention_mask.sum(1) - 1
    pooled = states[torch.arange(5), last]
    if pooling == "mean":
        pooled = (states * batch.attention_mask[..., None]).sum(1) / batch.attention_mask.sum(1, keepdim=True)
    torch.testing.assert_close(F.normalize(pooled), ours, rtol=1e-4, atol=1e-5)
    settings = json.loads((tmp_path / "merged" / "sentence_bert_config.json").read_text())
    assert settings["max_seq_length"] == 32
    library = pytest.importorskip("sentence_transformers")
    theirs = library.SentenceTransformer(str(tmp_path / "merged"), device="cpu")
    torch.testing.assert_close(torch.tensor(theirs.encode(texts)), ours, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("negatives", [0, 2])
def test_training_equals_sentence_transformers(negatives: int, tmp_path: Path) -> None:
    """MultipleNegativesRankingLoss inside MatryoshkaLoss, batch by batch, with plain descent."""
    library = pytest.importorskip("sentence_transformers")
    losses = pytest.importorskip("sentence_transformers.losses")
    torch.manual_seed(0)
    base = saved(tmp_path, "bert")
    data = _data(tmp_path, "bert", negatives)
    data.prepare_data()
    data.setup()
    task = TextEmbedding(CausalLMConfig(base), sizes=[16, 8])
    task.configure_model()
    task.log = lambda *args, **options: None  # type: ignore[method-assign]
    theirs = library.SentenceTransformer(base, device="cpu")
    inner = losses.MultipleNegativesRankingLoss(theirs, scale=20.0)
    loss = losses.MatryoshkaLoss(theirs, inner, matryoshka_dims=[16, 8])
    ours, other = (torch.optim.SGD(model.parameters(), 0.05) for model in (task, theirs))
    theirs.eval()
    task.eval()
    for batch in data.val_dataloader():
        ours.zero_grad()
        other.zero_grad()
        found = task.training_step(batch, 0)["loss"]
        columns = [{name: value[:, k] for name, value in batch.items()} for k in range(2 + negatives)]
        expected = loss(columns, None)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        found.backward()
        expected.backward()
        ours.step()
        other.step()
    moved = dict(theirs[0].named_parameters())
    for name, parameter in task.network.named_parameters():  # type: ignore[union-attr]
        (twin,) = [value for key, value in moved.items() if key.endswith(f".{name}")]
        torch.testing.assert_close(parameter, twin, rtol=1e-4, atol=1e-6)


def test_it_learns_and_bad_arguments_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = CausalLMConfig(saved(tmp_path, "bert"))
    task = TextEmbedding(model, sizes=[4, 16], learning_rate=1e-2, warmup_steps=0)
    data = _data(tmp_path, "bert")
    run = Trainer(**{**QUIET, "max_steps": 40, "max_epochs": -1})
    before = run.validate(task, data, verbose=False)[0]
    run.fit(task, datamodule=data)
    after = run.validate(task, data, verbose=False)[0]
    assert after["val/accuracy"] > before["val/accuracy"]
    assert after["val/accuracy"] > 0.8
    assert {"val/accuracy/4", "val/accuracy/16", "val/loss"} <= after.keys()
    batch = next(iter(data.val_dataloader()))
    assert (task.predict_step(batch, 0) > 0).float().mean() == after["val/accuracy"] or len(ROWS) > 6
    with pytest.raises(
        ConfigurationError, match=r"sizes must be at most 16, the size of the model's states, got \[32\]"
    ):
        TextEmbedding(model, sizes=[32]).configure_model()
    with pytest.raises(ConfigurationError, match="temperature must be above 0, got 0"):
        TextEmbedding(model, temperature=0)
    with pytest.raises(ConfigurationError, match=r"input_ids must be of the shape .* got \[2, 3\]"):
        task.training_step({"input_ids": torch.ones(2, 3, dtype=torch.long)}, 0)
