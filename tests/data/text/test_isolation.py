"""Tests of document isolation: a packed batch gives the loss and the gradients of its separate documents."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lit_efficient.data.text.collate import packed_batch, padded_batch
from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.models.networks.gpt import GPT, GPTConfig, KVCache

VOCABULARY = 50


def documents(seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return six documents of very different lengths, each with a masked prompt, one with a single token with loss."""
    rng = np.random.default_rng(seed)
    found = []
    for length in (9, 2, 7, 5, 3, 11):
        ids = rng.integers(1, VOCABULARY, length)
        labels = ids.copy()
        labels[: max(1, length // 3)] = IGNORE
        found.append((ids, labels))
    return found


def rows() -> list[list[tuple[np.ndarray, np.ndarray]]]:
    d = documents()
    return [[d[0], d[1], d[2]], [d[3], d[4], d[5]]]


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of all labels, shifted by one."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum")


def gradients(model: torch.nn.Module, losses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.stack(losses).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_by_one(model: torch.nn.Module, call) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    losses = []
    for ids, labels in documents():
        losses.append(summed_loss(call(model, torch.tensor(ids)[None]), torch.tensor(labels)[None]))
    return torch.stack(losses).sum().detach(), gradients(model, losses)


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    assert len(a) > 5
    return max((a[name] - b[name]).abs().max().item() / b[name].abs().max().clamp(min=1e-3).item() for name in a)


def hugging_face(kind: str, attention: str) -> torch.nn.Module:
    import transformers

    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    extra = {"head_dim": 8} if kind == "Qwen3" else {}
    config = getattr(transformers, f"{kind}Config")(**shape, **extra, attn_implementation=attention)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)  # initial attention is so flat that it hides a leak
    return model.double().train()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_hugging_face_models_keep_documents_apart_without_mask_and_cache(kind: str, attention: str) -> None:
    model = hugging_face(kind, attention)
    close = 1e-10 if attention == "sdpa" else 1e-6  # eager attention has its softmax in float32, whatever the model
    batch = packed_batch(rows(), length=24)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    alone, expected = one_by_one(model, lambda m, ids: m(input_ids=ids, use_cache=False).logits)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    packed = summed_loss(model(**inputs, use_cache=False).logits, batch["labels"])
    assert packed.item() == pytest.approx(alone.item(), rel=close)
    assert worst(gradients(model, [packed]), expected) < close
    # The two ways in which it silently goes wrong, so that whoever changes the collator knows what it is for.
    leaking = summed_loss(model(**inputs, use_cache=True).logits, batch["labels"])
    assert abs(leaking.item() - alone.item()) > 1e-3
    masked = model(**inputs, attention_mask=torch.ones_like(batch["input_ids"]), use_cache=False)
    assert abs(summed_loss(masked.logits, batch["labels"]).item() - alone.item()) > 1e-3
    padded = padded_batch(documents())
    outputs = model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"], use_cache=False)
    below = summed_loss(outputs.logits, padded["labels"])
    assert worst(gradients(model, [below]), expected) < close


def test_the_loss_that_hugging_face_shifts_itself_is_the_same() -> None:
    model = hugging_face("Llama", "sdpa").float()
    batch = packed_batch(rows(), length=24)
    alone, _ = one_by_one(model, lambda m, ids: m(input_ids=ids, use_cache=False).logits)
    learned = sum((labels[1:] != IGNORE).sum() for _, labels in documents())
    assert model(**batch, use_cache=False).loss.item() == pytest.approx(alone.item() / learned, rel=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_our_gpt_keeps_documents_apart(kv_heads: int) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCABULARY, dim=32, depth=2, num_heads=4, num_kv_heads=kv_heads, max_length=24))
    keys = list(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    model = model.double()
    batch = packed_batch(rows(), length=24)
    alone, expected = one_by_one(model, lambda m, ids: m(ids))
    packed = summed_loss(model(batch["input_ids"], position_ids=batch["position_ids"]), batch["labels"])
    # Rotary angles are float32 on purpose: they are equal, but the tables are cut out of tables of other lengths.
    assert abs(packed.item() - alone.item()) < 1e-6
    assert worst(gradients(model, [packed]), expected) < 1e-6
    assert keys == list(model.state_dict())
    mixed = summed_loss(model(batch["input_ids"]), batch["labels"])
    assert abs(mixed.item() - alone.item()) > 1e-3


def test_positions_without_boundaries_change_nothing() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCABULARY, dim=32, depth=2, num_heads=4, max_length=24))
    ids = torch.randint(0, VOCABULARY, (3, 10))
    positions = torch.arange(10).expand(3, 10)
    torch.testing.assert_close(model(ids, position_ids=positions), model(ids), rtol=1e-5, atol=1e-6)


def test_positions_and_cache_exclude_each_other() -> None:
    model = GPT(GPTConfig(vocab_size=VOCABULARY, dim=32, depth=1, num_heads=4))
    ids = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ConfigurationError, match="position_ids of packed documents cannot be combined with a cache"):
        model(ids, [KVCache(4)], ids)


def test_stochastic_depth_of_rows_takes_each_row_with_its_positions() -> None:
    """A technique that runs blocks on some rows must select the rows of positions and mask as well."""
    from lit_efficient.models.networks.gpt import packed_layout

    batch = packed_batch(rows(), length=24)
    table, mask = packed_layout(batch["position_ids"], batch["position_ids"].shape[1], 8, 10_000.0)
    assert len(table) == len(mask) == len(batch["input_ids"])
    model = GPT(GPTConfig(vocab_size=VOCABULARY, dim=32, depth=1, num_heads=4)).blocks[0]
    x = torch.randn(2, 24, 32)
    whole = model(x, table, None, mask)
    torch.testing.assert_close(model(x[1:], table[1:], None, mask[1:]), whole[1:])


def test_packed_layout_of_the_collator() -> None:
    d = [(np.array([5, 6, 7]), np.array([5, 6, 7])), (np.array([8, 9]), np.array([IGNORE, 9]))]
    batch = packed_batch([d, d[1:]], length=7, pad_id=3)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 3, 3], [8, 9, 3, 3, 3, 3, 3]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, -100, -100], [-100, 9, *[-100] * 5]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 1, 0, 1, 2, 3, 4]]
    with pytest.raises(ConfigurationError, match="at most 4 tokens"):
        packed_batch([d], length=4)


def test_padded_layout_of_the_collator() -> None:
    d = [(np.array([5, 6, 7]), np.array([5, IGNORE, 7])), (np.array([8, 9]), np.array([8, 9]))]
    batch = padded_batch(copy.deepcopy(d), pad_id=3, most=4)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 3], [8, 9, 3, 3]]
    assert batch["labels"].tolist() == [[-100, -100, 7, -100], [-100, 9, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert padded_batch(d, most=20)["input_ids"].shape == (2, 8)
