"""Packed documents are what they are alone, in every architecture or not at all; what is not causal is refused.

The oracle is the same network: the documents one by one, each in a row of its own.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchao.quantization
from torch import Tensor, nn
from torchmetrics import MeanMetric
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lit_efficient import CausalLMConfig, ConfigurationError, LanguageModeling, LoRA, QuantizeBase
from lit_efficient.mechanisms import documents
from lit_efficient.mechanisms.documents import DocumentRows, by_positions
from lit_efficient.models.libraries.causal_lm import build
from lit_efficient.models.networks import document_attention
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.models.probes.modes import evaluating
from tests.models.libraries.small_families import FAMILIES, NotSmall, small_config, small_network
from tests.models.libraries.test_causal_lm import SMALL
from tests.models.networks.test_document_attention import Squares

STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 8}
LINEAR = {f"linear_{name}": size for name, size in (("num_value_heads", 4), ("num_key_heads", 2))}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "state_size": 8},
    "bamba": {**STATES, "attn_layer_indices": [1]},
    "qwen3_5_text": {**LINEAR, "layer_types": ["linear_attention", "full_attention"]},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "rwkv": {"attention_hidden_size": 32},
    "roberta": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
SPLIT = 12  # where the second document begins
IDS = torch.tensor([[*range(3, 15), *range(40, 57)], [*range(60, 72), *range(20, 37)]])
PACKED = {
    "input_ids": IDS,
    "labels": torch.where(torch.arange(29) == SPLIT, -100, IDS),
    "position_ids": torch.cat((torch.arange(SPLIT), torch.arange(29 - SPLIT))).repeat(2, 1),
}


WITH_SPECIAL = PACKED | {"input_ids": torch.where(torch.arange(29) == SPLIT - 1, 1, IDS)}


def network_of(kind: str, **fields: Any) -> Any:
    """A small network of a family, which mixes well; ``gpt`` is ours."""
    torch.manual_seed(0)
    if kind == "gpt":
        network: Any = GPT(GPTConfig(vocab_size=97, dim=32, depth=2, num_heads=4, max_length=32))
    else:
        small = {name: value for name, value in SMALL.items() if hasattr(CONFIG_MAPPING[kind](), name)}
        network = build(CausalLMConfig(config_fields={**small, "model_type": kind, **FIELDS.get(kind, {}), **fields}))
    for parameter in network.parameters():
        if parameter.ndim > 1:  # at this width the usual ones mix next to nothing
            nn.init.normal_(parameter, std=0.15)
    return network


def _task(network: nn.Module) -> Any:
    task = LanguageModeling()
    task.network = network
    return task.eval()


def _sums(task: Any, ids: Tensor) -> Tensor:
    losses: Tensor = task.predict_step({"input_ids": ids, "labels": ids}, 0)
    return losses * (ids.shape[1] - 1)


@torch.no_grad()
def _apart(network: nn.Module) -> None:
    """The loss of packed rows is that of their documents, each alone."""
    task = _task(network)
    alone = _sums(task, IDS[:, :SPLIT]) + _sums(task, IDS[:, SPLIT:])
    torch.testing.assert_close(task.predict_step(PACKED, 0) * (29 - 2), alone, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt", "llama", "opt", "gpt_oss"])
def test_packed_documents_are_what_they_are_alone(kind: str) -> None:
    """gpt-oss has a window of 4 tokens in every second layer: the mask of its own must stay."""
    _apart(network_of(kind))


def test_documents_are_kept_apart_behind_layers_that_begin_with_zeros() -> None:
    """As fresh networks often do: nothing is mixed yet, so no output tells what will be."""
    network = network_of("opt")
    for layer in network.model.decoder.layers:
        nn.init.zeros_(layer.self_attn.out_proj.weight)
        nn.init.zeros_(layer.fc2.weight)
    rows = DocumentRows("Task")
    assert "attention_mask" in rows.arguments(network, PACKED)
    assert not network.model.decoder.layers[0].fc2.weight.any()
    blind = network_of("bert")
    for layer in blind.bert.encoder.layer:
        nn.init.zeros_(layer.attention.output.dense.weight)
    with pytest.raises(ConfigurationError, match="not causal"):
        rows.arguments(blind, {"input_ids": IDS})


def test_one_kind_of_layers_does_not_hide_what_another_begins_with_zeros_will_carry() -> None:
    network = network_of("bamba")
    for layer in network.model.layers:
        if hasattr(layer, "mamba"):
            nn.init.zeros_(layer.mamba.out_proj.weight)
    with pytest.raises(ConfigurationError, match="BambaForCausalLM does not isolate the documents"):
        DocumentRows("Task").arguments(network, PACKED)


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe"])
def test_short_convolutions_are_refused_although_initial_weights_mix_next_to_nothing(kind: str) -> None:
    """The leak at first is below what rounding makes in other families, and 150 steps make it 20 times as large."""
    network = small_network(kind)
    assert _leak(network, by_positions) < 5e-3
    with pytest.raises(ConfigurationError, match="because a path between the documents exists"):
        DocumentRows("Task").arguments(network, PACKED)
    _learn(network, by_positions)
    assert _leak(network, by_positions) > 2e-2


class Mixing(nn.Module):
    """A layer that adds the token before, or the next one, with a weight."""

    def __init__(self, weight: Any, shift: int, training_only: bool = False) -> None:
        super().__init__()
        self.weight, self.shift, self.training_only = nn.Parameter(torch.tensor([weight])), shift, training_only

    def forward(self, x: Tensor) -> Tensor:
        if self.training_only and not self.training:
            return x
        other = x.roll(self.shift, 1).clone()
        other[:, 0 if self.shift > 0 else -1] = 0
        return x + torch.sigmoid(self.weight) * other


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize(("gate", "training_only"), [(-15.0, False), (-200.0, False), (-15.0, True)])
@pytest.mark.parametrize("shift", [1, -1])
def test_a_path_that_is_closed_at_first_is_found(kind: str, training_only: bool, gate: float, shift: int) -> None:
    """Its weight is too small to change a logit, or zero in float32, or evaluation leaves it out."""
    network = network_of(kind)
    block = (network.blocks if kind == "gpt" else network.model.layers)[0]
    block.mixing = Mixing(gate, shift, training_only)
    block.register_forward_hook(lambda layer, inputs, output: layer.mixing(output))
    refusal = "is not causal" if shift < 0 else "does not isolate the documents"
    with pytest.raises(ConfigurationError, match=refusal):
        DocumentRows("Task").arguments(network.train(), PACKED)
    if training_only:
        assert DocumentRows("Task").arguments(network.eval(), PACKED)


def test_a_table_of_positions_that_count_through_a_row_is_refused_while_it_is_small() -> None:
    network = network_of("llama")
    network.places = nn.Embedding(64, 32)
    nn.init.normal_(network.places.weight, std=1e-6)

    def add(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + network.places(torch.arange(output.shape[1]))

    network.model.embed_tokens.register_forward_hook(add)
    with pytest.raises(ConfigurationError, match="does not isolate the documents"):
        DocumentRows("Task").arguments(network, PACKED)
    network.places.requires_grad_(False)  # as of rotations in a table, of which the difference matters alone
    assert DocumentRows("Task").arguments(network, PACKED)


class ByIndex(nn.Module):
    """A layer to which A's tokens, or the number of tokens in the row, come without a gradient for A's tokens."""

    def __init__(self, path: str, size: float) -> None:
        super().__init__()
        self.path, self.ids = path, torch.zeros(1, 1, dtype=torch.int64)
        self.table = nn.Parameter(torch.linspace(-3, 3, 64 * 32).sin().view(64, 32) * size)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1])
        previous = nn.functional.pad(self.ids[:, :-1], (1, 0))
        if self.path == "pairs of tokens":
            return x + self.table[(self.ids * 31 + previous * 17) % 64]
        if self.path == "one place in the row":
            return x + self.table[index % 64]
        if self.path == "length of the row":
            return x + x @ self.table[:32] * len(index) ** 0.5
        if self.path == "detached":
            return x + (x.cumsum(1) / (index + 1)[:, None]).detach() @ self.table[:32]
        if self.path == "a special token":
            return x + ((self.ids == 1)[..., None] * x).cumsum(1) @ self.table[:32]
        if not self.training:
            return x
        assert self.path == "capacity of experts in training"
        expert = nn.functional.one_hot(self.ids % 4, 4)
        kept = ((expert.cumsum(1) * expert).sum(-1) <= -(-len(index) // 4)).to(x.dtype)
        return x + x @ self.table[:32] * kept[..., None]


BY_INDEX = {
    "pairs of tokens", "one place in the row", "length of the row", "detached", "a special token",
    "capacity of experts in training",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("size", [0.1, 1e-5, 0.0])
@pytest.mark.parametrize("path", sorted(BY_INDEX))
def test_a_path_without_a_gradient_for_tokens_is_found(kind: str, path: str, size: float) -> None:
    """By the gradients of the weights, by bits that change, or by special tokens of the batch."""
    network = network_of(kind)
    add(network, ByIndex(path, size))
    with pytest.raises(ConfigurationError, match="does not isolate the documents"):
        DocumentRows("Task").arguments(network.train(), WITH_SPECIAL)


def add(network: Any, layer: Any) -> None:
    """Put a layer behind the first block, which knows the tokens of the call."""
    network.register_forward_pre_hook(
        lambda network, args, kwargs: setattr(layer, "ids", kwargs["input_ids"]), with_kwargs=True
    )
    block = (network.blocks if isinstance(network, GPT) else network.model.layers)[0]
    block.added = layer
    block.register_forward_hook(lambda block, inputs, output: layer(output))


HIDDEN: dict[str, Callable[[], nn.Module]] = {path: partial(ByIndex, path, 1e-5) for path in sorted(BY_INDEX)}
HIDDEN |= {
    "closed gate": partial(Mixing, -15.0, 1),
    "gate of zero": partial(Mixing, -200.0, 1),
    "closed gate in training": partial(Mixing, -15.0, 1, True),
    "later token": partial(Mixing, -15.0, -1),
    "later token in training": partial(Mixing, -15.0, -1, True),
}


def _kept_as(weights: str, network: Any) -> None:
    if weights == "bfloat16":
        network.to(torch.bfloat16)
    elif weights == "nf4":
        QuantizeBase().transform(network)
    elif weights == "int8 of torchao":
        torchao.quantization.quantize_(network.model.layers, torchao.quantization.Int8WeightOnlyConfig())
    if weights in {"nf4", "int8 of torchao"}:
        LoRA(rank=2, targets=["q_proj", "down_proj"]).transform(network)
        assert not network.model.layers[0].self_attn.q_proj.weight.requires_grad


@pytest.mark.turns(4, family="hidden paths")
@pytest.mark.parametrize("weights", ["bfloat16", "nf4", "int8 of torchao", "in shards"])
@pytest.mark.parametrize("path", ["none", *HIDDEN])
def test_weights_whose_gradients_are_coarse_or_missing_hide_no_path(
    path: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enlarged weights it changes the logits. Those in shards of several processes are in tests/ranks."""
    if weights == "in shards":
        monkeypatch.setattr(documents, "gathers_weights", lambda network: True)
    network = network_of("llama")
    _kept_as(weights, network)
    before = {name: value.clone() for name, value in network.state_dict().items() if type(value) is Tensor}
    if path == "none":
        assert DocumentRows("Task").arguments(network.train(), WITH_SPECIAL)
        assert all(torch.equal(value, network.state_dict()[name]) for name, value in before.items())
        return
    layer = HIDDEN[path]()
    add(network, layer.to(torch.bfloat16) if weights == "bfloat16" else layer)
    refusal = "is not causal" if "later" in path else "does not isolate the documents"
    with pytest.raises(ConfigurationError, match=refusal):
        DocumentRows("Task").arguments(network.train(), WITH_SPECIAL)


def test_weights_in_float64_are_enlarged_and_restored() -> None:
    network = network_of("llama").double()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert DocumentRows("Task").arguments(network.train(), PACKED)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_a_network_without_gradients_is_asked_for_equal_logits() -> None:
    network = network_of("llama")
    plain = network.model.layers[0].forward
    network.model.layers[0].forward = torch.no_grad()(plain)
    network.model.layers[1].forward = torch.no_grad()(network.model.layers[1].forward)
    assert DocumentRows("Task").arguments(network, PACKED)
    network.model.layers[0].mixing = Mixing(-9.0, 1)
    network.model.layers[0].register_forward_hook(lambda layer, inputs, output: layer.mixing(output))
    with pytest.raises(ConfigurationError, match="does not isolate the documents"):
        DocumentRows("Task").arguments(network, PACKED)


def test_the_question_can_be_asked_in_inference_mode() -> None:
    """Validation comes first, where nothing has a gradient."""
    network = small_network("lfm2")
    with torch.inference_mode(), pytest.raises(ConfigurationError, match="does not isolate the documents"):
        DocumentRows("Task").arguments(network, PACKED)


# Families that carry states, mix neighbours, choose keys, look back by blocks or count positions in their own way.
REFUSED = {
    "axk2", "bailing_hybrid", "bamba", "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "bloom",
    "camembert", "cpmant", "data2vec-text", "deepseek_v32", "deepseek_v4", "doge", "falcon_h1", "falcon_mamba",
    "glm_moe_dsa", "granitemoehybrid", "hy_v4", "inkling2_text", "inkling_text", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "lfm3", "mamba", "mamba2", "marian", "mbart", "minimax", "minimax_m3_vl_text", "mvp", "nemotron_h",
    "olmo_hybrid", "openai-gpt", "pegasus", "plbart", "prophetnet", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "qwen4_exp_text", "recurrent_gemma", "roberta", "roberta-prelayernorm", "rwkv", "trocr", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlstm", "zamba", "zamba2", "zaya",
}  # fmt: skip


@pytest.mark.turns(60, family="packed families")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_every_family_isolates_before_and_after_training(family: str) -> None:
    """Or is refused. High rates let all weights grow that mix tokens."""
    try:
        network = small_network(family)
    except NotSmall as reason:
        pytest.skip(str(reason))
    rows = DocumentRows("Task")
    try:
        rows.arguments(network, PACKED)
    except ConfigurationError as refusal:
        assert family in REFUSED, refusal  # noqa: PT017
        return
    assert family not in REFUSED
    way = rows._way
    assert way is not None
    for steps in (0, 150):
        _learn(network, way, steps)
        leak, unlike_alone = _changes(network, way)
        assert leak < 1e-6, steps
        assert unlike_alone < 1e-3, steps


def _leak(network: Any, way: Any) -> float:
    return _changes(network, way)[0]


def _changes(network: Any, way: Any) -> tuple[float, float]:
    """Return how much another first document, and none at all, change the second one, relative to its first tokens."""
    ids = IDS.clone()
    ids[:, :SPLIT] = IDS[:, :SPLIT] + 7
    changed = IDS.clone()
    changed[:, SPLIT : SPLIT + 4] += 7
    with torch.no_grad(), evaluating(network):
        own, other, effect = (_logits(network, way, tokens)[:, SPLIT:] for tokens in (IDS, ids, changed))
        alone = network(input_ids=IDS[:, SPLIT:], use_cache=False).logits
    most = (own - effect)[:, 4:].norm(dim=-1).max()
    return float((own - other).norm(dim=-1).max() / most), float((own - alone).norm(dim=-1).max() / most)


def _logits(network: Any, way: Any, ids: Tensor) -> Tensor:
    logits: Tensor = network(**way(network, ids, PACKED["position_ids"]), use_cache=False).logits
    return logits.reshape(*ids.shape, -1)


def _learn(network: Any, way: Any, steps: int = 150) -> None:
    """Train on documents that repeat their first three tokens, so that a token must look back."""
    draws = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    network.train()
    for _ in range(steps):
        first, second = (torch.randint(3, 97, (2, 3), generator=draws).repeat(1, 6) for _ in range(2))
        ids = torch.cat((first[:, :SPLIT], second[:, : 29 - SPLIT]), 1)
        labels = ids[:, 1:].where(torch.arange(1, 29) != SPLIT, -100)
        loss = nn.functional.cross_entropy(_logits(network, way, ids)[:, :-1].flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()


def test_what_lies_far_apart_is_asked_in_a_row_as_long_as_the_batchs() -> None:
    """As of DeepSeek-V4, which reads what is 128 tokens away as one: no short row shows it."""
    network = network_of("llama")

    def look_back(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        far = output.cumsum(1)[:, :-64] / 8
        return output + nn.functional.pad(far, (0, 0, min(64, output.shape[1]), 0))[:, : output.shape[1]]

    network.model.layers[0].register_forward_hook(look_back)
    assert DocumentRows("Task").arguments(network, PACKED)
    length = 200
    positions = torch.cat((torch.arange(100), torch.arange(length - 100)))[None]
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM does not isolate the documents"):
        DocumentRows("Task").arguments(network, {"input_ids": positions % 97, "position_ids": positions})
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM does not isolate the documents"):
        DocumentRows("Task", longest=length).arguments(network, PACKED)


@pytest.mark.turns(6, family="slow")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("minimax_m3_vl_text", {"index_block_size": 32, "index_topk_blocks": 2}),
        ("doge", {"keep_window_size": 32}),
        ("glm_moe_dsa", {"index_topk": 32, "index_n_heads": 32}),
        ("deepseek_v32", {"index_topk": 32, "index_n_heads": 32}),
    ],
)
def test_choices_among_tokens_are_refused_in_rows_in_which_not_all_are_chosen(
    family: str, fields: dict[str, Any]
) -> None:
    """As of sparse attention with an indexer. Most scores differ at first, and the choice is the same by chance."""
    config = small_config(family)
    config.update(fields)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    assert DocumentRows("Task").arguments(network, PACKED)
    with pytest.raises(ConfigurationError, match="does not isolate the documents"):
        DocumentRows("Task", longest=200).arguments(network, PACKED)


def test_positions_that_a_network_counts_in_its_own_way_are_not_replaced() -> None:
    """RoBERTa's begin behind the id of its filling: documents that begin at 0 would not be what they are alone."""
    task = _task(network_of("roberta", is_decoder=True))
    with pytest.raises(ConfigurationError, match="with position_ids, a document changes"):
        task.predict_step(PACKED, 0)


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_networks_of_torchs_attention_get_no_mask(kind: str) -> None:
    """Neither from us nor of their own making, forward or backward; gradients are those under transformers' mask."""
    network = network_of(kind)
    inputs = DocumentRows("Task").arguments(network, PACKED)
    with Squares(29) as squares:
        network(**inputs).logits.square().mean().backward()
    found = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    with Squares(29) as masks:
        network(
            **documents.by_mask(network, IDS, PACKED["position_ids"]), use_cache=False
        ).logits.square().mean().backward()
    assert not squares.found
    assert masks.found
    for gradient, parameter in zip(found, network.parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)
    plain = network(input_ids=IDS[:, :SPLIT], attention_mask=torch.ones(2, SPLIT), use_cache=False).logits
    torch.testing.assert_close(network(**inputs).logits[:, :SPLIT], plain, rtol=1e-4, atol=1e-4)


WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 64},
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_layers_that_do_not_see_all_of_a_document_get_their_windows(kind: str) -> None:
    """No mask; the numbers and gradients are those under transformers' masks."""
    network = network_of(kind, **WINDOWS[kind]).eval()
    inputs = DocumentRows("Task").arguments(network, PACKED)
    with Squares(29) as squares:
        logits = network(**inputs).logits
        logits.square().mean().backward()
    found = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    masked = documents.by_mask(network, IDS, PACKED["position_ids"])
    with Squares(29) as masks:
        expected = network(**masked, use_cache=False).logits
        expected.square().mean().backward()
    assert not squares.found
    assert masks.found
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for gradient, parameter in zip(found, network.parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", WINDOWS)
def test_rows_may_be_longer_than_the_configuration_says(kind: str) -> None:
    """Windows and chunks are then those of the longer row, and layers without them see the whole document."""
    name = next(iter(WINDOWS[kind]))
    network = network_of(kind, **WINDOWS[kind] | {name: 20}, max_position_embeddings=12).eval()
    document_attention.read_starts()
    way = documents._without_masks(network, documents.by_positions)
    assert way is not None
    positions = torch.cat((torch.arange(26), torch.arange(4)))[None]
    ids = torch.arange(30)[None] % 17 + 3
    with torch.no_grad():
        packed = network(**way(network, ids, positions)).logits
        expected = network(**documents.by_mask(network, ids, positions), use_cache=False).logits
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mistral", "llama4_text"])
def test_windows_far_longer_than_rows_are_found(kind: str) -> None:
    """No short row shows them."""
    fields = {"sliding_window": 4096} if kind == "mistral" else {"attention_chunk_size": 4096}
    network: Any = nn.Module()
    config: Any = CONFIG_MAPPING[kind]
    network.config = config(**SMALL | fields, attn_implementation="sdpa")
    reach = document_attention.reach_of(network, 1 << 14)
    assert reach is not None
    assert not reach.whole
    earlier: Any = reach.earlier
    if isinstance(earlier, dict):
        earlier = earlier["chunked_attention"]
    assert isinstance(earlier, Tensor)
    place = torch.arange(1 << 14)
    assert torch.equal(earlier, place.clamp(max=4095) if kind == "mistral" else place % 4096)
    other: Any = nn.Module()
    config = CONFIG_MAPPING["mistral"]
    other.config = config(**SMALL | {"sliding_window": None}, attn_implementation="sdpa")
    reach = document_attention.reach_of(other, 1 << 14)
    assert reach is not None
    assert reach.whole


def test_a_layer_that_wants_more_than_documents_is_not_given_their_starts() -> None:
    attention = network_of("llama").model.layers[0].self_attn
    document_attention.read_starts()
    x = torch.zeros(1, 4, 5, 8)
    for more in ({"softcap": 3.0}, {"position_bias": x}, {"is_causal": False}):
        with pytest.raises(ValueError, match="cannot replace the mask"):
            AttentionInterface()["sdpa"](attention, x, x, x, torch.zeros(1, 1, 1, 5, dtype=torch.int64), **more)


@pytest.mark.parametrize("kind", ["mamba", "qwen3_5_text"])
def test_carried_states_are_refused_in_packed_rows_alone(kind: str) -> None:
    task = _task(network_of(kind))
    with pytest.raises(ConfigurationError, match=r"does not isolate the documents .*: with position_ids, .*pack=false"):
        task.predict_step(PACKED, 0)
    padded = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
    assert task.predict_step(padded, 0).shape == (2,)


@pytest.mark.turns(6, family="slow")
def test_kernels_for_states_get_the_documents_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has none of them: what they compute, document by document, stands in for them."""
    from transformers.models.bamba import modeling_bamba as module

    def by_document(function: Any, dim: int) -> Any:
        plain = inspect.unwrap(function)

        def kernel(x: Tensor, *args: Any, seq_idx: Tensor | None = None, **options: Any) -> Tensor:
            if seq_idx is None:
                return plain(x, *args, **options)
            assert seq_idx.shape == (x.shape[0], x.shape[dim])
            sizes = torch.bincount(seq_idx[0]).tolist()

            def parts(value: Any) -> list[Any]:
                long = isinstance(value, Tensor) and value.ndim > 2 and value.shape[dim] == x.shape[dim]
                return list(value.split(sizes, dim)) if long else [value] * len(sizes)

            calls = zip(*map(parts, (x, *args)), strict=True)
            return torch.cat([plain(*call, **options) for call in calls], dim)

        return kernel

    monkeypatch.setattr(module, "causal_conv1d_fn", by_document(module.causal_conv1d_fn, 2))
    monkeypatch.setattr(module, "mamba2_chunk_scan", by_document(module.mamba2_chunk_scan, 1))
    network = network_of("bamba").eval()  # in training it takes another kernel, which has no stand-in here
    assert DocumentRows("Task").arguments(network, PACKED)["cu_seq_lens_q"].tolist() == [0, 12, 29, 41, 58]
    _apart(network)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_what_is_not_causal_is_refused_unless_it_can_be_made_so(kind: str) -> None:
    batch = {"input_ids": IDS, "labels": IDS}
    with pytest.raises(ConfigurationError, match=r"not causal: a later token changes the logits .*is_decoder: true"):
        _task(network_of(kind)).predict_step(batch, 0)
    assert _task(network_of(kind, is_decoder=True)).predict_step(batch, 0).isfinite().all()


def test_the_question_leaves_no_trace() -> None:
    """Weights, buffers, modes, counters and random states: only the step itself is seen."""
    network = network_of("opt")
    network.register_buffer("calls", torch.zeros(1))
    network.count, network.log = 0, []
    network.model.decoder.layers[0].eval()

    def counting(module: Any, *_: Any) -> None:
        module.calls += 1
        module.count += 1
        module.log.append(random.random() + np.random.rand() + float(torch.rand(1)))

    class Counter:
        def __init__(self) -> None:
            self.calls, self.seen, self.metric = 0, list[Any](), MeanMetric()

        def count(self, *inputs: Any) -> None:
            self.calls += 1
            self.seen.append(inputs)
            self.metric.update(1.0)

    counter = Counter()
    network.model.register_forward_hook(counter.count)
    network.register_forward_pre_hook(counting)
    modes = [part.training for part in network.modules()]
    weights = deepcopy({name: value for name, value in network.state_dict().items() if name != "calls"})
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = random.random() + np.random.rand() + float(torch.rand(1))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    inputs = DocumentRows("Task").arguments(network, PACKED)
    assert (network.count, network.log, network.calls.item()) == (0, [], 0)
    assert (counter.calls, counter.seen, counter.metric.update_count) == (0, [], 0)
    assert [part.training for part in network.modules()] == modes
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in weights.items())
    network(**inputs)
    assert network.log == [first]


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("kind", ["gpt", "gemma2", "llama"])
def test_the_question_takes_as_many_calls_as_is_documented(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most are in 16 bits, where a second way replaces the first."""
    sizes: list[torch.Size] = []
    call = documents._Probe._call

    def counted(self: Any, inputs: dict[str, Any], state: Any) -> Tensor:
        sizes.append(inputs["input_ids"].shape)
        return call(self, inputs, state)

    monkeypatch.setattr(documents._Probe, "_call", counted)
    numbers = []
    for dtype in (torch.float32, torch.bfloat16):
        sizes.clear()
        DocumentRows("Task", longest=64).arguments(network_of(kind).to(dtype).train(), PACKED)
        numbers.append(len(sizes))
        assert sum(size.numel() > 5 * 16 or 16 < size[1] <= 64 for size in sizes) <= 40
    assert numbers[0] >= 50
    assert numbers[1] <= 160


def test_the_first_step_in_autocast_still_has_gradients() -> None:
    """A weight cast without gradients would otherwise be found again in autocast's cache."""
    task, gradients = _task(network_of("llama")).train(), []
    for _ in range(2):
        task.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            task._losses(PACKED)[0].mean().backward()
        gradients.append([p.grad.clone() for p in task.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients))
    assert all(gradient.any() for gradient in gradients[0])


def test_all_processes_go_the_same_way() -> None:
    """What one of them cannot do, none does; one that has found nothing is not left behind by the others."""
    asked: list[bool] = []

    def agree(decision: bool) -> bool:
        asked.append(decision)
        return decision and len(asked) != 2

    inputs = DocumentRows("Task").arguments(network_of("llama"), PACKED, agree)
    # causal; apart by positions, which another process denies; by a mask; without that mask
    assert asked == [True, True, True, True]
    assert "attention_mask" in inputs


def test_processes_are_asked_at_once_whose_packed_rows_come_in_different_steps() -> None:
    """One that answers alone waits for the others for ever."""
    asked: list[list[bool]] = [[], []]
    plain = PACKED | {"position_ids": torch.arange(29).repeat(2, 1), "attention_mask": torch.ones_like(IDS)}
    packed = PACKED | {"attention_mask": torch.ones_like(IDS)}
    network = network_of("opt")
    for answers, batch in zip(asked, (plain, packed)):

        def ask(yes: bool, answers: list[bool] = answers) -> bool:
            answers.append(yes)
            return yes

        DocumentRows("Task").arguments(network, batch, ask)
    assert asked == [[True, False, True, True]] * 2
    rows = DocumentRows("Task")
    network = network_of("mamba")
    assert rows.arguments(network, plain)["attention_mask"] is plain["attention_mask"]
    with pytest.raises(ConfigurationError, match="does not isolate the documents"):
        rows.arguments(network, packed)


def test_a_network_that_mixes_nothing_is_not_judged() -> None:
    network = network_of("gpt")
    network.embedding.weight.data.fill_(1.0)
    with pytest.warns(UserWarning, match="could not test whether"):
        assert "position_ids" in DocumentRows("Task").arguments(network, PACKED)


def test_positions_of_padded_rows_are_no_documents() -> None:
    """Filled up on the left, as transformers does for generation: the filling's positions start over, too."""
    network = network_of("opt")
    mask = torch.ones_like(IDS)
    mask[:, :5] = 0
    batch = {"input_ids": IDS, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    assert DocumentRows("Task").arguments(network, batch)["attention_mask"] is mask
    both = DocumentRows("Task").arguments(network, PACKED | {"attention_mask": torch.ones_like(IDS)})
    assert both["attention_mask"].ndim == 4


def test_the_ways_are_those_that_are_documented() -> None:
    assert list(documents.WAYS) == ["position_ids", "a block-diagonal mask", "lengths of documents"]
