"""The teacher behind a server gives what its network gives, and each wrong answer becomes a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.chunked_distillation import TopKTeacher
from lit_efficient.losses.distillation import Divergence, top_k_of
from lit_efficient.models.libraries.vllm_server import ServedTeacher
from tests import vllm_server
from tests.tasks.test_text_generation import writer
from tests.vllm_server import StandIn

folder = vllm_server.folder
server = vllm_server.server


def test_a_served_teacher_is_the_teacher_with_its_most_likely_tokens(server: StandIn) -> None:
    rows = [[5, 9, 40, 77, 3], [8, 8], [100, 2, 31] * 4] * 30  # more than are sent at a time
    found = ServedTeacher(server.url, k=7).top_k(rows)
    network, _ = writer()
    for row, (ids, log_probs) in zip(rows, found):
        with torch.no_grad():
            logits = network(torch.tensor([row])).logits[0, :-1]
        wanted = top_k_of(logits, 7)
        assert torch.equal(ids, wanted[0])
        torch.testing.assert_close(log_probs, wanted[1], atol=1e-5, rtol=0)
        student = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        for how in (Divergence(), Divergence("reverse_kl"), Divergence("jsd")):
            ours = TopKTeacher(ids, log_probs).compare(slice(None), student, how)
            theirs = TopKTeacher(*wanted).compare(slice(None), student, how)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_wrong_answers_name_the_address_and_what_was_answered(server: StandIn) -> None:
    def short(found: dict[str, Any]) -> dict[str, Any]:
        del found["choices"][0]["prompt_logprobs"][-1]
        return found

    def doubled(found: dict[str, Any]) -> dict[str, Any]:
        for entry in found["choices"][0]["prompt_logprobs"][1].values():
            entry["logprob"] = -0.5
        return found

    place = f"ServedTeacher: {server.url}/v1/completions"
    for answer, sentence in [
        ((500, {"error": {"message": "out of memory"}}), "answered with status 500: out of memory"),
        ((502, "<html>bad gateway"), "answered with status 502: <html>bad gateway"),
        ((200, "<html>hello"), "answered '<html>hello', which is not one completion"),
        ((200, {"choices": []}), "answered '{\"choices\": .*', which is not one completion"),
        ((200, {"choices": [{}]}), "has not returned 3 log-probabilities for each of 2 tokens of a prompt, but None"),
        (doubled, "returned 3 tokens whose probabilities add up to 1.82: leave vLLM's logprobs-mode at raw_logprobs"),
        (short, "has not returned 3 log-probabilities for each of 2 tokens"),
    ]:
        server.answers["/v1/completions"] = answer
        with pytest.raises(ConfigurationError, match=f"{place} {sentence}"):
            ServedTeacher(server.url, k=3).top_k([[1, 2, 3]])
    server.answers.clear()
    with pytest.raises(ConfigurationError, match="status 404: The model `other` does not exist"):
        ServedTeacher(server.url, model="other").top_k([[1, 2, 3]])
    server.answers["/v1/models"] = (200, {})
    with pytest.raises(ConfigurationError, match="which is no list of models"):
        ServedTeacher(server.url).top_k([[1, 2, 3]])
    with pytest.raises(ConfigurationError, match=r"127.0.0.1:9/v1/models cannot be asked: .*Is the server running\?"):
        ServedTeacher("http://127.0.0.1:9").top_k([[1, 2, 3]])


def test_arguments_and_times_are_limited(server: StandIn) -> None:
    with pytest.raises(ConfigurationError, match="ServedTeacher: url must be an address such as http://localhost:8000"):
        ServedTeacher("localhost:8000")
    with pytest.raises(ConfigurationError, match="ServedTeacher: k must be a whole number of at least 1"):
        ServedTeacher(server.url, k=0)
    with server.lock, pytest.raises(ConfigurationError, match=r"has not answered in 0.1 seconds"):
        ServedTeacher(server.url, seconds=0.1).top_k([[1, 2, 3]])
