"""Prefixes: what the untrained network computes, with masks, positions, caches and documents, in each family."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lit_efficient import GPT, ConfigurationError, GPTConfig, PrefixTuning
from lit_efficient.mechanisms.adapters.prefix import add_prefix, find_decoder
from lit_efficient.mechanisms.adapters.prefix_cache import extend_mask
from tests.mechanisms.adapters.decoders import FAMILIES, IDS, WINDOW, WINDOWED, decoder, logits

TOKENS = [5, 9, 9, 30]
N = len(TOKENS)
WHOLE = torch.cat((torch.tensor([TOKENS] * len(IDS)), IDS), dim=1)
GREEDY = {"max_new_tokens": 3, "do_sample": False}


def prefixed(family: str, projection: int = 0, **arguments: Any) -> Any:
    model = decoder(family, **arguments)
    add_prefix(find_decoder(model, "PrefixTuning")[1], N, TOKENS, projection=projection)
    return model


def gpt() -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(32, dim=16, depth=2, num_heads=4, num_kv_heads=2, hidden_dim=32, max_length=24)
    return GPT(config).eval()


def prefixed_gpt(projection: int = 0) -> GPT:
    add_prefix(model := gpt(), N, TOKENS, projection=projection)
    return model


@pytest.mark.turns(3)
@pytest.mark.parametrize("projection", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_untrained_prefix_is_the_tokens_it_started_from(family: str, projection: int) -> None:
    plain, model = decoder(family), prefixed(family, projection)
    want = plain(WHOLE).logits[:, N:]
    assert not torch.allclose(logits(plain), want, atol=1e-4)  # they matter
    for arguments in ({}, {"attention_mask": torch.ones_like(IDS)}, {"position_ids": torch.arange(8).expand(4, 8)}):
        torch.testing.assert_close(model(IDS, **arguments).logits, want, rtol=1e-5, atol=1e-5)
    assert plain.state_dict().keys() < model.state_dict().keys()


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_generates_with_and_without_a_cache_what_the_tokens_would(family: str) -> None:
    model, mask = prefixed(family), torch.ones_like(IDS)
    want = decoder(family).generate(WHOLE, attention_mask=torch.ones_like(WHOLE), **GREEDY)[:, N:]
    for arguments in ({}, {"use_cache": False}):
        assert torch.equal(model.generate(IDS, attention_mask=mask, **GREEDY, **arguments), want)
    beams = {"num_beams": 2, **GREEDY}
    want = decoder(family).generate(WHOLE, attention_mask=torch.ones_like(WHOLE), **beams)[:, N:]
    assert torch.equal(model.generate(IDS, attention_mask=mask, **beams), want)


@pytest.mark.parametrize("family", ["GPT2", "Llama", "Gemma2"])
@torch.no_grad()
def test_padding_is_left_out_and_the_prefix_never_is(family: str) -> None:
    mask = torch.ones_like(IDS)
    mask[1, -3:] = 0
    if family != "Gemma2":  # whose window counts padding between the prefix and the tokens
        mask[2, :2] = 0
    whole = torch.cat((torch.ones(len(IDS), N, dtype=mask.dtype), mask), dim=1)
    want = decoder(family)(WHOLE, attention_mask=whole).logits[:, N:]
    got = prefixed(family)(IDS, attention_mask=mask).logits
    torch.testing.assert_close(got[mask == 1], want[mask == 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
@torch.no_grad()
def test_rows_padded_on_the_left_past_a_window_are_refused_and_others_are_as_alone(family: str) -> None:
    model = prefixed(family)
    longest = WINDOW - N
    rows = torch.tensor([[0] * (longest - 1) + [7], [9] * longest])[:, -longest:]
    mask = (rows != 0).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = model(rows, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(got[0, -1], model(rows[:1, -1:]).logits[0, -1], rtol=1e-5, atol=1e-5)
    short = IDS[:1, :5]
    right = torch.cat([short, short.new_zeros(1, 3)], 1)
    got = model(right, attention_mask=(right != 0).long()).logits[:, :5]
    torch.testing.assert_close(got, model(short).logits, rtol=1e-5, atol=1e-5)
    for ask in (model, lambda ids, **more: model.generate(ids, **more, **GREEDY)):
        with pytest.raises(ConfigurationError, match=f"at most {WINDOW} positions, the sliding window of {family}"):
            ask(right.flip(1), attention_mask=(right.flip(1) != 0).long())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["GPT2", "Llama"])
@torch.no_grad()
def test_packed_documents_see_the_prefix_and_not_each_other(family: str, attention: str) -> None:
    model = prefixed(family, attn_implementation=attention)
    first, second = IDS[:2, :5], IDS[:2, 5:]
    positions = torch.cat((torch.arange(5), torch.arange(3))).expand(2, 8)
    got = model(IDS[:2], position_ids=positions).logits
    want = torch.cat((model(first).logits, model(second).logits), dim=1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model(IDS[:2]).logits, want, atol=1e-4)


def test_packed_documents_are_refused_where_a_window_would_hide_the_prefix() -> None:
    positions = torch.cat((torch.arange(5), torch.arange(3))).expand(4, 8)
    with pytest.raises(ConfigurationError, match="at most 6 positions, the sliding window; got 'sdpa' and 12"):
        prefixed("Mistral")(IDS, position_ids=positions)


def test_masks_of_all_kinds_are_extended() -> None:
    four = torch.full((1, 1, 2, 2), -9.0).triu(1)
    assert torch.equal(extend_mask(four, 1, "PrefixTuning")[0, 0], torch.tensor([[0.0, 0.0, -9.0], [0.0, 0.0, 0.0]]))
    assert extend_mask(four == 0, 1, "PrefixTuning")[0, 0].tolist() == [[True, True, False], [True, True, True]]
    assert extend_mask({"full": torch.zeros(1, 2), "none": None}, 1, "PrefixTuning")["full"].tolist() == [[1, 0, 0]]
    with pytest.raises(ConfigurationError, match=r"must be a tensor \[B, S\]"):
        extend_mask(torch.ones(2, 2, 2), 1, "PrefixTuning")


@pytest.mark.parametrize("projection", [0, 3])
@torch.no_grad()
def test_the_projects_own_gpt_computes_and_writes_what_it_would_with_the_tokens(projection: int) -> None:
    plain, model = gpt(), prefixed_gpt(projection)
    torch.testing.assert_close(model(IDS), plain(WHOLE)[:, N:], rtol=1e-5, atol=1e-5)
    want = plain.generate(WHOLE, 4, temperature=0)[:, N:]
    for use_cache in (True, False):
        assert torch.equal(model.generate(IDS, 4, temperature=0, use_cache=use_cache), want)
    with pytest.raises(ConfigurationError, match="sequences have at most 20 tokens, got 21"):
        model(IDS[:, :1].expand(4, 21))


@pytest.mark.parametrize("build", [prefixed_gpt, lambda: prefixed("Llama"), lambda: prefixed("Gemma2")])
def test_bfloat16_autocast_and_gradients_reach_the_prefix(build: Any) -> None:
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(IDS)
    (output if isinstance(output, torch.Tensor) else output.logits).float().square().mean().backward()
    prefix = find_decoder(model, "PrefixTuning")[1].prefix_tuning
    assert prefix.prefix_keys.grad.abs().sum((1, 2, 3)).all()
    assert prefix.prefix_values.grad.abs().sum((1, 2, 3)).all()
    with torch.no_grad():
        narrow = model.to(torch.bfloat16)
        output = narrow(IDS)
    assert torch.isfinite(output if isinstance(output, torch.Tensor) else output.logits).all()


def test_a_deep_copy_has_a_prefix_of_its_own() -> None:
    model = prefixed("Llama")
    twin = copy.deepcopy(model)
    before = logits(twin)
    with torch.no_grad():
        find_decoder(model, "PrefixTuning")[1].prefix_tuning.prefix_values.zero_()
    assert torch.equal(logits(twin), before)
    assert not torch.allclose(logits(model), before, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_")  # transformers has a second name for it
@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_gradient_checkpointing_is_refused_whenever_it_is_switched_on(family: str) -> None:
    early = decoder(family)
    early.gradient_checkpointing_enable()
    with pytest.raises(ConfigurationError, match=r"gradient checkpointing: .*gradient_checkpointing_disable"):
        add_prefix(find_decoder(early, "PrefixTuning")[1], N, TOKENS)
    late = prefixed(family).train()
    late.gradient_checkpointing_enable()
    with pytest.raises(ConfigurationError, match="cannot be combined with gradient checkpointing"):
        late(IDS)
    late.gradient_checkpointing_disable()
    assert late(IDS).logits.shape == (4, 8, 32)


@pytest.mark.parametrize("family", WINDOWED)
def test_a_prefix_as_long_as_the_window_is_refused(family: str) -> None:
    with pytest.raises(ConfigurationError, match="num_virtual_tokens must be below 6, the sliding window"):
        add_prefix(find_decoder(decoder(family), "PrefixTuning")[1], 6, [3] * 6)


def test_what_can_have_no_prefix_is_refused() -> None:
    import transformers

    sizes: Any = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    with pytest.raises(ConfigurationError, match=r"exactly one decoder.* found 2 \('encoder', 'decoder'\)"):
        find_decoder(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)), "PrefixTuning")
    with pytest.raises(ConfigurationError, match="found none in Linear"):
        find_decoder(torch.nn.Linear(1, 1), "PrefixTuning")
    with pytest.raises(ConfigurationError, match=r"below the vocabulary's 32, got \(5, 32\)"):
        PrefixTuning(init_tokens=[5, 32]).start(gpt())
    with pytest.raises(ConfigurationError, match="virtual tokens require a DynamicCache, got a StaticCache"):
        prefixed("Llama").generate(IDS, attention_mask=torch.ones_like(IDS), cache_implementation="static", **GREEDY)
