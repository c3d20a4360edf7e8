"""Continuing several sequences at once: each is what it is alone, and what reading all anew for every token gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_efficient.models.generation.batched import continue_rows
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.models.probes.output_head import output_head
from tests.mechanisms.test_documents import network_of
from tests.models.libraries.small_families import FAMILIES, NotSmall, small_network

PROMPTS = [list(range(5, 10)), list(range(20, 29)), list(range(40, 44))]


def _logits(network: Any, ids: torch.Tensor) -> torch.Tensor:
    output = network.eval()(ids) if isinstance(network, GPT) else network.eval()(ids, use_cache=False).logits
    return output[0, -1]


def _continued(network: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    given = {"temperature": 0.0, "stop": {-1}} | options
    given |= {"sampling": Sampling(given.pop("temperature"), 1.0)}
    generators = [torch.Generator().manual_seed(i) for i, _ in enumerate(prompts)]
    return continue_rows(network, prompts, 6, **{"generators": generators} | given)


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
    generators = [torch.Generator() for _ in prompts]
    sampling = Sampling(0.0, 1.0)
    together = continue_rows(network, prompts, 12, sampling=sampling, generators=generators, stop={-1})
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
        own = [torch.Generator().manual_seed(i)]
        assert _continued(network, [prompt], temperature=2.0, generators=own) == [drawn[i]]
    end = drawn[0][2]
    ended = _continued(network, PROMPTS, temperature=2.0, stop={end})
    assert ended[0] == drawn[0][: drawn[0].index(end) + 1]
    assert [new[: len(short)] for new, short in zip(drawn, ended)] == ended


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_only_the_logits_behind_a_prompt_are_computed(kind: str) -> None:
    """A prompt of 4,000 tokens times a vocabulary of 150,000 is 2.4 GB."""
    network = network_of(kind)
    shapes: list[Any] = []
    output_head(network).module.register_forward_hook(lambda _, __, output: shapes.append(output.shape[1]))
    _continued(network, PROMPTS)
    assert set(shapes) == {1}
