"""A stand-in for a vLLM server: the same API, in front of a model of transformers with adapters that peft loads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_efficient.models.generation.batched import generate
from lit_efficient.models.generation.sampling import Sampling, remaining
from lit_efficient.tasks.text_generation import Ending
from tests.tasks.test_text_generation import writer

_LEAST = -9999.0  # vLLM's number in the place of minus infinity


class StandIn(ThreadingHTTPServer):
    """The server. What it was asked is in ``asked``: paths with bodies."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, folder: Path, processed: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.processed = processed  # the option --logprobs-mode
        self.most_tokens: int | None = None  # the limit of a generation_config.json
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.served: dict[str, Any] = {"base": self._load()}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}  # by path: what is sent instead, or a function that changes an answer
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def _load(self) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self.folder).eval()
        model.generation_config.eos_token_id = None
        return model

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return a status and an answer: a text, or what becomes JSON."""
        with self.lock:
            self.asked.append((path, body))
            name = str(body.get("lora_name", body.get("model")))
            if path == "/v1/models":
                return 200, {"data": [{"id": known} for known in self.served]}
            if path == "/v1/load_lora_adapter":
                if name in self.served:
                    return 400, _error(f"The lora adapter '{name}' has already been loaded.")
                wrong = _wrong_adapter(json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text()))
                if wrong:
                    return 500, _error(wrong, 500)
                self.served[name] = PeftModel.from_pretrained(self._load(), body["lora_path"]).eval()
                return 200, f"Success: LoRA adapter '{name}' added successfully."
            if path == "/v1/unload_lora_adapter":
                if name not in self.served:
                    return 404, _error(f"The lora adapter '{name}' cannot be found.", 404)
                del self.served[name]
                return 200, f"Success: LoRA adapter '{name}' removed successfully."
            if name not in self.served:
                return 404, _error(f"The model `{name}` does not exist. Valid aliases: {[*self.served]}.", 404)
            wrong = _wrong_request(body, self.served["base"].config)
            if wrong:
                return 400, _error(wrong)
            with torch.no_grad():
                return 200, {"choices": [self._complete(self.served[name], body)]}

    def _complete(self, model: Any, body: dict[str, Any]) -> dict[str, Any]:
        network = model.get_base_model() if isinstance(model, PeftModel) else model
        how = Sampling(*(body.get(key, off) for key, off in _OFF.items()))
        ending = Ending(self.tokenizer, [body["prompt"]], body.get("stop", ()))
        most = min(body.get("max_tokens", 16), self.most_tokens or body.get("max_tokens", 16))
        (sample,) = generate(
            network,
            [body["prompt"]],
            most,
            sampling=how,
            seeds=[body.get("seed", 0)],
            stop={*body.get("stop_token_ids", ())},
            written=ending if body.get("stop") else None,
        )
        text = ending.text(0, sample.tokens[:-1] if sample.end == "stop" else sample.tokens)[0]
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "stop", "stop_reason": None}
        if sample.end == "length":
            choice["finish_reason"] = "length"
        elif sample.end == "stop":
            choice["stop_reason"] = sample.tokens[-1]
        else:
            choice["stop_reason"] = body["stop"][0]
        if body.get("logprobs") is not None:
            choice["logprobs"] = self._log_probs(network, body, sample.tokens, how)
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [None, *_of_prompt(network, body["prompt"], body["prompt_logprobs"])]
        return choice

    def _log_probs(self, network: Any, body: dict[str, Any], tokens: list[int], how: Sampling) -> dict[str, Any]:
        """Return the log-probabilities of new tokens, each with the most likely ones, of which it may be one."""
        logits = network(torch.tensor([body["prompt"] + tokens])).logits[0][len(body["prompt"]) - 1 : -1]
        rows = remaining(logits, how) if self.processed else logits.log_softmax(-1)
        rows = rows.clamp(min=_LEAST)
        top = []
        for row, token in zip(rows, tokens):
            likely = dict.fromkeys([token, *row.topk(body["logprobs"]).indices.tolist()])
            top.append({f"token_id:{one}": float(row[one]) for one in likely})
        names = [f"token_id:{token}" if body.get("return_tokens_as_token_ids") else str(token) for token in tokens]
        values = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        return {"tokens": names, "token_logprobs": values, "top_logprobs": top}


_OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def _of_prompt(network: Any, prompt: list[int], k: int) -> Iterator[dict[str, Any]]:
    log_probs = network(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for row, token in zip(log_probs, prompt[1:]):
        # The row's own token comes first, as from vLLM.
        kept = list(dict.fromkeys([token, *row.topk(k).indices.tolist()]))
        ranks = (row[kept][:, None] < row).sum(1) + 1
        yield {str(one): {"logprob": float(row[one]), "rank": int(rank)} for one, rank in zip(kept, ranks)}


# What a request may hold, of vLLM's CompletionRequest, and whether a value is allowed.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "model": lambda value: isinstance(value, str),
    "prompt": lambda value: bool(value) and all(isinstance(token, int) and token >= 0 for token in value),
    "max_tokens": lambda value: value >= 1,
    "temperature": lambda value: value == 0 or 0.01 <= value <= 2,  # vLLM raises the ones in between to 0.01
    "top_p": lambda value: 0 < value <= 1,
    "top_k": lambda value: isinstance(value, int) and value >= -1,
    "min_p": lambda value: 0 <= value <= 1,
    "repetition_penalty": lambda value: value > 0,
    "presence_penalty": lambda value: -2 <= value <= 2,
    "frequency_penalty": lambda value: -2 <= value <= 2,
    "seed": lambda value: -(2**63) <= value < 2**63,
    "stop": lambda value: isinstance(value, list) and all(value),
    "stop_token_ids": lambda value: all(isinstance(token, int) for token in value),
    "ignore_eos": lambda value: value is True,  # the end tokens of the server's files have no part here
    "skip_special_tokens": lambda value: isinstance(value, bool),
    "return_tokens_as_token_ids": lambda value: isinstance(value, bool),
    "logprobs": lambda value: isinstance(value, int) and 0 <= value <= _MOST_LOG_PROBS,
    "prompt_logprobs": lambda value: isinstance(value, int) and 0 <= value <= _MOST_LOG_PROBS,
}
_MOST_LOG_PROBS = 120  # the option --max-logprobs
_LARGEST_RANK = 64  # the option --max-lora-rank


def _wrong_request(body: Mapping[str, Any], config: Any) -> str:
    """Return why vLLM would refuse a request, or ""."""
    for name, value in body.items():
        if name not in _FIELDS or not _FIELDS[name](value):
            return f"{name} must not be {value!r}"
    if max((*body["prompt"], *body.get("stop_token_ids", ()))) >= config.vocab_size:
        return f"a token id is not in the vocabulary of {config.vocab_size}"
    most = config.max_position_embeddings
    asked = len(body["prompt"]) + body.get("max_tokens", 16)
    return f"This model's maximum context length is {most} tokens, and {asked} are asked for." if asked > most else ""


def _wrong_adapter(config: Mapping[str, Any]) -> str:
    """Return why vLLM cannot load an adapter of peft, or "": the rules of its PEFTHelper."""
    if config["peft_type"] != "LORA" or config["r"] > _LARGEST_RANK:
        return f"LoRA rank {config.get('r')} is greater than max_lora_rank {_LARGEST_RANK}."
    found = [name for name in ("use_dora", "modules_to_save", "trainable_token_indices") if config.get(name)]
    if config["bias"] != "none":
        found.append("bias")
    return f"vLLM does not support {', '.join(found)}." if found else ""


def _error(message: str, code: int = 400) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": code}}


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        instead = self.server.answers.get(self.path)
        if instead is not None and not callable(instead):
            status, found = instead
        else:
            status, found = self.server.answer(self.path, body)
            if instead is not None:
                found = instead(found)
        data = (found if isinstance(found, str) else json.dumps(found)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def served(folder: Path, processed: bool = True) -> Iterator[StandIn]:
    """A server of the model in a folder."""
    with StandIn(folder, processed) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a network and a tokenizer. Modules with tests name it as their own."""
    network, tokenizer = writer()
    place = tmp_path_factory.mktemp("base")
    network.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def server(folder: Path) -> Iterator[StandIn]:
    """A server of the model in `folder`."""
    with served(folder) as one:
        yield one
