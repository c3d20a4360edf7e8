"""Client of a vLLM server that somebody has started, by its OpenAI-compatible API.

    vllm serve MODEL --max-logprobs 64                                            for a teacher
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --logprobs-mode processed_logprobs
                                                                                  for samples of a trained adapter

Prompts and answers are token ids, so the server's tokenizer has no effect. A key that the server asks for is read from
``VLLM_API_KEY``.

Source: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, NoReturn
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_number, refusal

_AT_A_TIME = 64  # requests
_SHOWN = 300  # characters of a wrong answer in an error
# Log-probabilities are rounded to float32, so what is left of a sum of probabilities is not exact below this.
_LEAST_REST = 1e-7
_LARGEST_EXCESS = 1e-3


class VLLMServer:
    """A vLLM server.

    Args:
        owner: Name of the class that asks, for messages.
        url: Address, such as ``http://localhost:8000``.
        seconds: Longest time to wait for an answer, above 0.
    """

    def __init__(self, owner: str, url: str, seconds: float) -> None:
        check_number(owner, "seconds", seconds, above=0)
        if not url.startswith(("http://", "https://")):
            raise refusal(owner, "url", "an address such as http://localhost:8000", url)
        self.owner = owner
        self.url = url.rstrip("/").removesuffix("/v1")
        self.seconds = seconds

    def models(self) -> list[str]:
        """Return the names of the models and adapters that are served. The first one is a model."""
        text = self.send("/v1/models")
        try:
            return [str(model["id"]) for model in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError):
            self.refuse("/v1/models", f"answered {text[:_SHOWN]!r}, which is no list of models")

    def complete(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the answer to each request for one completion. Requests are sent at the same time."""
        with ThreadPoolExecutor(min(_AT_A_TIME, max(len(requests), 1))) as pool:
            waiting = [pool.submit(self._complete, request) for request in requests]
            try:
                return [one.result() for one in waiting]
            finally:
                pool.shutdown(cancel_futures=True)  # after an error, the others are not sent any more

    def _complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        text = self.send("/v1/completions", request)
        try:
            (choice,) = json.loads(text)["choices"]
            return dict(choice)
        except (ValueError, KeyError, TypeError):
            self.refuse("/v1/completions", f"answered {text[:_SHOWN]!r}, which is not one completion")

    def load_adapter(self, name: str, folder: str) -> None:
        """Let the server load an adapter from a folder of peft that it can read."""
        self.send("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    def unload_adapter(self, name: str) -> None:
        """Let the server forget an adapter."""
        self.send("/v1/unload_lora_adapter", {"lora_name": name})

    def send(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """Send a request, a POST if there is a body, and return the answer.

        Raises:
            ConfigurationError: With the address and what the server answered, if it is no success.
        """
        headers = {"Content-Type": "application/json"}
        if os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {os.environ['VLLM_API_KEY']}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(self.url + path, data, headers), timeout=self.seconds) as answer:  # noqa: S310 (http)
                return str(answer.read().decode())
        except HTTPError as error:
            self.refuse(path, f"answered with status {error.code}: {_reason(error)}")
        except TimeoutError:
            self.refuse(path, f"has not answered in {self.seconds:g} seconds")
        except (OSError, HTTPException, ValueError) as error:
            self.refuse(path, f"cannot be asked: {getattr(error, 'reason', None) or error!r}. Is the server running?")

    def refuse(self, path: str, sentence: str) -> NoReturn:
        """Raise an error about an answer.

        Args:
            path: Path of the request.
            sentence: What happened, without a subject.
        """
        raise ConfigurationError(f"{self.owner}: {self.url}{path} {sentence}")


def _reason(error: HTTPError) -> str:
    """Return the message of an answer that is an error."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, HTTPException):
        return "no reason"
    try:
        found = json.loads(text)
        return str(found.get("error", found).get("message", text))[:_SHOWN]
    except (ValueError, AttributeError):
        return text[:_SHOWN]


class ServedTeacher:
    """Teacher behind a vLLM server, which returns its most likely tokens. The server needs ``--max-logprobs`` of ``k``.

    Args:
        url: Address of the server, such as ``http://localhost:8000``.
        k: Number of tokens at each position, at least 1.
        model: Name of the model. null: the first one of the server.
        seconds: Longest time to wait for the answer to a row.
    """

    def __init__(self, url: str, k: int = 20, model: str | None = None, seconds: float = 600.0) -> None:
        check_number("ServedTeacher", "k", k, least=1, whole=True)
        self.server = VLLMServer("ServedTeacher", url, seconds)
        self.k = k
        self.model = model

    def top_k(self, rows: Sequence[Sequence[int]]) -> list[tuple[Tensor, Tensor]]:
        """Return the teacher's distributions over the tokens of rows, at temperature 1.

        Position ``t`` of a result is the distribution over token ``t + 1`` of its row, whose length is ``T``.

        Args:
            rows: Token ids, at least two in each row.

        Returns:
            For each row, ids ``[T - 1, k]``, most likely first, and log-probabilities ``[T - 1, k + 1]``, the last one
            that of all other tokens: the format of `lit_efficient.losses.distillation.top_k_of`.
        """
        if self.model is None:
            self.model = self.server.models()[0]
        asked = {"model": self.model, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": self.k}
        answers = self.server.complete([{**asked, "prompt": list(row)} for row in rows])
        return [self._read(row, answer) for row, answer in zip(rows, answers)]

    def _read(self, row: Sequence[int], answer: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        found = answer.get("prompt_logprobs")
        try:
            # The first position has no distribution. The row's own token is there even if it is not among the k.
            places = [{int(token): float(entry["logprob"]) for token, entry in place.items()} for place in found[1:]]  # type: ignore[index]
            likely = [sorted(place.items(), key=lambda pair: -pair[1])[: self.k] for place in places]
        except (TypeError, KeyError, ValueError, AttributeError):
            likely = []
        if len(likely) != len(row) - 1 or any(len(place) < self.k for place in likely):
            self.server.refuse(
                "/v1/completions",
                f"has not returned {self.k} log-probabilities for each of {len(row) - 1} tokens of a prompt, but "
                f"{str(found)[:_SHOWN]}",
            )
        ids = torch.tensor([[token for token, _ in place] for place in likely])
        log_probs = torch.tensor([[value for _, value in place] for place in likely], dtype=torch.float64)
        total = log_probs.exp().sum(1, keepdim=True)
        if not bool((total <= 1 + _LARGEST_EXCESS).all()):  # also for NaN
            self.server.refuse(
                "/v1/completions",
                f"returned {self.k} tokens whose probabilities add up to {float(total.max()):.4g}: leave vLLM's "
                "logprobs-mode at raw_logprobs",
            )
        rest = (1 - total).clamp(min=_LEAST_REST).log()
        return ids, torch.cat((log_probs, rest), 1).float()
