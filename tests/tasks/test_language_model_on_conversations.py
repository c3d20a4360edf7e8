"""LanguageModeling on LanguageData: packed conversations, a loss without logits, tokens that all count the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lit_efficient import (
    CausalLMConfig,
    ChunkedCrossEntropy,
    GPTConfig,
    LanguageChat,
    LanguageData,
    LanguageModeling,
    LanguageRows,
)
from tests.models.libraries.test_causal_lm import FAMILIES, SMALL


def _fit(model: LanguageModeling, data: Any, callbacks: Any = (), **changes: Any) -> Trainer:
    settings: dict[str, Any] = {"max_steps": 3, "accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    settings |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    run = Trainer(callbacks=list(callbacks), **(settings | changes))
    loaders = {"train_dataloaders": data, "val_dataloaders": data}
    run.fit(model, **({"datamodule": data} if isinstance(data, LanguageData) else loaders))
    return run


def _conversations(**changes: Any) -> LanguageData:
    changes = {"rows": LanguageRows(max_rows=60), "chat": LanguageChat(vocab_size=400)} | changes
    return LanguageData(max_length=128, batch_size=2, val_fraction=0.2, **changes)


def _llama() -> CausalLMConfig:
    fields = {key: value for key, value in SMALL.items() if key != "vocab_size" and not key.endswith("token_id")}
    return CausalLMConfig(config_fields={"model_type": "llama", **fields})


@pytest.mark.turns(4)
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_loss_without_logits_trains_the_same_weights(kind: str, pack: bool) -> None:
    results = []
    for callbacks in ([], [ChunkedCrossEntropy(chunk_size=50)]):
        torch.manual_seed(0)
        model = LanguageModeling(
            GPTConfig(dim=32, depth=2, num_heads=2, max_length=128) if kind == "gpt" else _llama(),
            learning_rate=1e-2,
            warmup_steps=1,
        )
        data = _conversations(pack=pack)
        run = _fit(model, data, callbacks)
        figures = run.validate(model, datamodule=data, verbose=False)[0]
        assert figures["val/bits_per_byte"] > 0
        results.append((model.network.state_dict(), figures["val/loss"]))
    (plain, loss), (chunked, other) = results
    assert other == pytest.approx(loss, rel=1e-5)
    for name, tensor in plain.items():
        torch.testing.assert_close(chunked[name], tensor, rtol=1e-3, atol=2e-4)  # Adam divides by tiny roots


def test_a_short_run_on_few_rows_says_what_is_too_much_and_too_little(caplog: pytest.LogCaptureFixture) -> None:
    data = _conversations(rows=LanguageRows(max_rows=12))
    with caplog.at_level("INFO"):
        _fit(LanguageModeling(_llama(), warmup_steps=2), data)
    held_out = data.report["counts"]["val"]["rows"]
    assert 0 < held_out < 10
    assert f"only {held_out} of 12 rows" in caplog.text
    assert "warmup_steps is 2, which is more than half of the run's 3 steps" in caplog.text
    assert caplog.text.count("testing once whether packed documents attend to each other") == 1


def test_it_stops_where_the_template_ends_a_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = LanguageModeling(_llama(), warmup_steps=1), _conversations(rows=LanguageRows(max_rows=90))
    with caplog.at_level("INFO"):
        _fit(model, data)
    assert data.report["counts"]["val"]["rows"] >= 10  # of 90
    assert "held out" not in caplog.text
    assert "warmup_steps" not in caplog.text
    end = data.report["end_of_turn"]
    assert model.tokenizer_state is not None
    assert end in model.tokenizer_state["stop"]
    assert model.tokenizer.chat_template == data.chat_tokenizer.chat_template
    drawn = iter([5, 6, end, 7, 8])
    monkeypatch.setattr("lit_efficient.models.generation.batched.drawn", lambda *_: torch.tensor([next(drawn)]))
    text = model.generate_text("def", max_new_tokens=5)[0]
    assert text == "def" + model.tokenizer.decode([5, 6])


def _rows() -> list[dict[str, torch.Tensor]]:
    """Rows of equal width of which 2 to 9 tokens are learned."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for learned in (9, 2, 5, 3, 8, 4, 7, 2, 6, 3):
        ids = torch.randint(3, 97, (12,), generator=generator)
        labels = ids.clone()
        labels[: 12 - learned] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


@pytest.mark.parametrize("callbacks", [(), (ChunkedCrossEntropy,)])
def test_accumulated_micro_batches_are_one_batch_of_tokens(callbacks: Any, tmp_path: Path) -> None:
    """Ten rows: windows of four, four and two micro-batches against batches of four, four and two rows."""
    weights = []
    for batch_size, accumulated in ((4, 1), (1, 4)):
        torch.manual_seed(0)
        model = LanguageModeling(CausalLMConfig(config_fields=FAMILIES["llama"]))
        model.configure_optimizers = lambda model=model: torch.optim.SGD(model.parameters(), lr=0.5)  # type: ignore[method-assign]
        run = _fit(
            model.double(),
            DataLoader(_rows(), batch_size),
            [make() for make in callbacks],
            max_steps=-1,
            max_epochs=1,
            accumulate_grad_batches=accumulated,
            precision="64-true",
        )
        assert run.global_step == 3
        weights.append(model.network.state_dict())
    for name, tensor in weights[0].items():  # the weights are float64, the losses float32
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-6)
