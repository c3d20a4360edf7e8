"""Continuing several sequences at once: each is what it is alone, what reading all anew for every token gives, and what
transformers writes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from lit_efficient.errors import ConfigurationError
from lit_efficient.models.generation import batched
from lit_efficient.models.generation.batched import Sample, generate
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.models.probes.output_head import scaled_head
from tests.mechanisms.test_documents import network_of
from tests.models.generation.test_sampling import theirs
from tests.models.libraries.small_families import FAMILIES, NotSmall, small_network

PROMPTS = [list(range(5, 10)), list(range(20, 29)), list(range(40, 44))]


def _logits(network: Any, ids: torch.Tensor) -> torch.Tensor:
    output = network.eval()(ids) if isinstance(network, GPT) else network.eval()(ids, use_cache=False).logits
    return output[0, -1]


def _samples(network: Any, prompts: list[list[int]], count: int = 6, **options: Any) -> list[Sample]:
    given: dict[str, Any] = {"temperature": 0.0, "stop": {-1}, "seeds": range(len(prompts))} | options
    return generate(network, prompts, count, **{"sampling": Sampling(given.pop("temperature"), 1.0)} | given)


def _continued(network: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return [sample.tokens for sample in _samples(network, prompts, **options)]


@pytest.mark.parametrize("kind", ["llama", "gpt", "opt", "mamba", "mamba2", "qwen3_5_text", "rwkv"])
def test_rows_are_continued_as_if_alone_and_as_if_read_anew(kind: str) -> None:
    """RWKV of transformers does not go on rightly from the state of several rows: it is read anew."""
    network = network_of(kind)
    state = torch.get_rng_state()
    together = _continued(network, PROMPTS)
    assert torch.equal(state, torch.get_rng_state())
    assert network.training
    for prompt, new in zip(PROMPTS, together):
        assert new == _anew(network, prompt, 6)


@pytest.mark.parametrize("nested", [False, True])
def test_states_that_fail_behind_a_window_are_not_passed_on(nested: bool) -> None:
    """Its cache goes wrong as soon as it holds more tokens than a number says, whose name nobody knows."""
    network = network_of("llama")
    network.config.update({"of_ours": {"span": [20]}} if nested else {"of_ours": 20})
    attention = network.model.layers[0].self_attn

    def spoiled(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length(0) > 20:
            cache.layers[0].values[:, :, 0] = 50
        return args, kwargs

    attention.register_forward_pre_hook(spoiled, with_kwargs=True)
    prompts = [list(range(5, 23)), list(range(20, 38))]
    whole = [_anew(network, prompt, 6) for prompt in prompts]
    assert _continued(network, prompts) == whole
    network.config.update({"of_ours": 0})
    assert _continued(network, prompts) != whole  # no number tells of the window


def _anew(network: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat((ids, _logits(network, ids).argmax().view(1, 1)), 1)
    new: list[int] = ids[0, len(prompt) :].tolist()
    return new


@pytest.mark.turns(60, family="continued families")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_every_family_is_continued_as_if_read_anew(family: str) -> None:
    """Behind all windows, chunks and numbers of chosen keys, which are at most 8 tokens here."""
    try:
        network = small_network(family)
    except NotSmall as reason:
        pytest.skip(str(reason))
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    prompts = [list(range(5, 12)), list(range(20, 30))]
    together = [sample.tokens for sample in _samples(network, prompts, 12)]
    for prompt, new in zip(prompts, together):
        ids = torch.tensor([prompt + new])
        with torch.no_grad():
            logits = [_logits(network, ids[:, :end]) for end in range(len(prompt), ids.shape[1])]
        lost = [float(one.max() - one[token]) / float(one.abs().max()) for one, token in zip(logits, new)]
        assert max(lost) < 3e-3  # the token is the likeliest one, or as likely


def test_each_row_draws_from_its_own_seed_and_ends_by_itself() -> None:
    network = network_of("gpt")
    drawn = _continued(network, PROMPTS, temperature=2.0)
    for i, prompt in enumerate(PROMPTS):
        assert _continued(network, [prompt], temperature=2.0, seeds=[i]) == [drawn[i]]
    end = drawn[0][2]
    ended = _continued(network, PROMPTS, temperature=2.0, stop={end})
    assert ended[0] == drawn[0][: drawn[0].index(end) + 1]
    assert [new[: len(short)] for new, short in zip(drawn, ended)] == ended


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_only_the_logits_behind_a_prompt_are_computed(kind: str) -> None:
    """A prompt of 4,000 tokens times a vocabulary of 150,000 is 2.4 GB."""
    network = network_of(kind)
    _continued(network, PROMPTS)
    shapes: list[Any] = []
    scaled_head(network).module.register_forward_hook(lambda _, __, output: shapes.append(output.shape[1]))
    _continued(network, PROMPTS)
    assert set(shapes) == {1}


KINDS = ["llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "mixtral", "gpt"]
SAMPLINGS = [Sampling(1.0, 1.0), Sampling(0.7, 0.9, 20, 0.02, 1.3), Sampling(0.0, repetition_penalty=1.3)]


def _mixing(kind: str) -> Any:
    network = network_of("gpt") if kind == "gpt" else small_network(kind)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return network.eval()


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_greedy_tokens_are_those_of_transformers(kind: str) -> None:
    """Behind sliding windows of at most 8 tokens, in a batch that transformers pads on the left."""
    network = _mixing(kind)
    prompts = [*PROMPTS, list(range(30, 50))]
    ours = _samples(network, prompts, 12, rows=2)
    most = max(map(len, prompts))
    ids = torch.tensor([[0] * (most - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (most - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    how = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    written = network.generate(ids, attention_mask=mask, **how)[:, most:].tolist()
    assert [sample.tokens for sample in ours] == written
    stop = {written[0][3], written[1][5]}  # a list of end tokens
    how["eos_token_id"] = sorted(stop)
    ended_rows = network.generate(ids, attention_mask=mask, **how)
    for sample, row in zip(_samples(network, prompts, 12, stop=stop, rows=3), ended_rows):
        ended = row[most:].tolist()
        cut = next((i + 1 for i, token in enumerate(ended) if token in stop), 12)
        assert sample.tokens == ended[:cut]
        assert sample.end == ("stop" if ended[cut - 1] in stop else "length")


@pytest.mark.parametrize("how", SAMPLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_are_those_of_a_training_forward_and_of_the_filters_of_transformers(
    kind: str, how: Sampling
) -> None:
    network = _mixing(kind)
    prompts = [*PROMPTS, PROMPTS[1], list(range(30, 45))]
    for prompt, sample in zip(prompts, _samples(network, prompts, 8, sampling=how, rows=3)):
        ids = torch.tensor([prompt + sample.tokens])
        with torch.no_grad():
            output = network(ids) if kind == "gpt" else network(input_ids=ids, use_cache=False).logits
        logits = output[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(sample.tokens)[:, None]
        own = logits.log_softmax(-1).gather(-1, chosen)[:, 0]
        torch.testing.assert_close(torch.tensor(sample.log_probs), own, atol=1e-5, rtol=0)
        for i, (token, log_prob) in enumerate(zip(sample.tokens, sample.drawn_log_probs)):
            left = _left(logits[i : i + 1], ids[:, : len(prompt) + i], how)
            assert log_prob == pytest.approx(float(left[0, token].log()), abs=1e-5)


def _left(logits: torch.Tensor, seen: torch.Tensor, how: Sampling) -> torch.Tensor:
    if how.temperature:
        return theirs(logits, seen, how)
    penalized = RepetitionPenaltyLogitsProcessor(how.repetition_penalty)(seen, logits.clone())
    return torch.zeros_like(logits).scatter(-1, penalized.argmax(-1, keepdim=True), 1.0)


@pytest.mark.parametrize("kind", ["gpt", "llama", "gemma2"])
def test_a_prompt_is_read_once_for_all_its_samples_and_rows_that_end_are_replaced(kind: str) -> None:
    network = _mixing(kind)
    prompts = [prompt for prompt in PROMPTS for _ in range(5)]
    alone = [_samples(network, [prompt], 20, temperature=1.0, seeds=[i])[0] for i, prompt in enumerate(prompts)]
    stop = {alone[0].tokens[4], alone[6].tokens[2], alone[12].tokens[9]}
    shapes: list[tuple[int, int]] = []
    scaled_head(network).module.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.shape[:2])))
    found = _samples(network, prompts, 20, temperature=1.0, stop=stop, rows=4)
    for sample, whole in zip(found, alone):
        cut = next((i + 1 for i, token in enumerate(whole.tokens) if token in stop), 20)
        assert sample.tokens == whole.tokens[:cut]
    lengths = [len(sample.tokens) for sample in found]
    assert len(set(lengths)) > 3
    # Each prompt once, whose logits are the first token's, and all other tokens in rows without gaps.
    assert sum(rows for rows, _ in shapes) == len(PROMPTS) + sum(lengths) - len(prompts)
    assert len(shapes) < sum(lengths) / 2


def test_networks_with_other_states_than_keys_and_values_are_read_without_padding() -> None:
    """A filled column before a row has no effect only where masks hide it. The states themselves tell which do."""
    kinds = ("llama", "gpt", "opt", "mamba", "qwen3_5_text", "rwkv")
    found = [batched._is_cached(network_of(kind).eval(), 20, torch.device("cpu")) for kind in kinds]
    assert found == [True, True, True, False, False, False]


def test_the_trial_of_a_network_does_not_grow_with_its_layers() -> None:
    """Numbers of layers are no lengths of windows."""
    calls = []
    for depth in (1, 30):
        config = LlamaConfig(
            vocab_size=101,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=depth,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        network = LlamaForCausalLM(config).eval()
        counted: list[object] = []
        scaled_head(network).module.register_forward_hook(lambda *_, counted=counted: counted.append(None))
        for _ in range(2):
            calls.append(len(counted))
            _samples(network, [list(range(5, 20))] * 2, 20)
        calls[-1] -= len(counted) - calls[-1]  # the second time without a trial
    of_one, of_thirty = calls[1::2]
    assert of_thirty <= 1.5 * of_one


def test_a_network_that_hides_nothing_before_a_row_is_read_without_padding() -> None:
    network = network_of("llama").eval()
    network.register_forward_pre_hook(
        lambda _, args, kwargs: (args, kwargs | {"attention_mask": None}), with_kwargs=True
    )
    assert not batched._is_cached(network, 20, torch.device("cpu"))
    assert _continued(network, PROMPTS) == [_anew(network, prompt, 6) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        (
            [[1], []],
            {},
            "generate: prompts must have 1 to 26 tokens, because the network reads 32, got one of 0 tokens",
        ),
        ([[1] * 27], {}, "got one of 27 tokens"),
        ([[1]], {"seeds": [1, 2]}, "generate: seeds must be one for each of the 1 prompts"),
        ([[1]], {"rows": 0}, "generate: rows must be a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(prompts: list[list[int]], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        _samples(network_of("gpt"), prompts, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-42])
def test_logits_that_are_not_finite_are_refused(temperature: float) -> None:
    network = network_of("gpt")
    if temperature != 1e-42:
        torch.nn.init.constant_(network.norm.weight, torch.nan)
    with pytest.raises(ConfigurationError, match="the network's logits are not finite, or the temperature"):
        _samples(network, PROMPTS, temperature=temperature)
