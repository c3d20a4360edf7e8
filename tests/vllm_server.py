"""A stand-in for a vLLM server: the same API, in front of a model of transformers with adapters that peft loads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_efficient.models.generation.batched import generate
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.tasks.text_generation import Ending

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
                self.served[name] = PeftModel.from_pretrained(self._load(), body["lora_path"]).eval()
                return 200, f"Success: LoRA adapter '{name}' added successfully."
            if name not in self.served:
                return 404, _error(f"The model `{name}` does not exist.")
            if path == "/v1/unload_lora_adapter":
                del self.served[name]
                return 200, f"Success: LoRA adapter '{name}' removed successfully."
            with torch.no_grad():
                return 200, {"choices": [self._complete(self.served[name], body)]}

    def _complete(self, model: Any, body: dict[str, Any]) -> dict[str, Any]:
        network = model.get_base_model() if isinstance(model, PeftModel) else model
        how = Sampling(*(body.get(key, off) for key, off in _OFF.items()))
        ending = Ending(self.tokenizer, [body["prompt"]], body.get("stop", ()))
        assert body.get("ignore_eos", True)
        (sample,) = generate(
            network,
            [body["prompt"]],
            body["max_tokens"],
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
            assert body["return_tokens_as_token_ids"]
            names = [f"token_id:{token}" for token in sample.tokens]
            plain = network(torch.tensor([body["prompt"] + sample.tokens])).logits[0].log_softmax(-1)
            rows = plain[len(body["prompt"]) - 1 : -1]
            values = rows.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0].tolist()
            top = [{name: value} for name, value in zip(names, values)]
            if self.processed:
                values = sample.drawn_log_probs
                top = [{name: value} for name, value in zip(names, values)]
            if body["logprobs"] == 1:
                for row, place, token in zip(rows, top, sample.tokens):
                    second = next(one for one in row.argsort(descending=True).tolist() if one != token)
                    hidden = self.processed and body["top_k"] == 1
                    place[f"token_id:{second}"] = _LEAST if hidden else float(row[second])
            choice["logprobs"] = {"tokens": names, "token_logprobs": values, "top_logprobs": top}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [None, *_of_prompt(network, body["prompt"], body["prompt_logprobs"])]
        return choice


_OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def _of_prompt(network: Any, prompt: list[int], k: int) -> Iterator[dict[str, Any]]:
    log_probs = network(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for row, token in zip(log_probs, prompt[1:]):
        # The row's own token comes first, as from vLLM.
        kept = list(dict.fromkeys([token, *row.topk(k).indices.tolist()]))
        ranks = (row[kept][:, None] < row).sum(1) + 1
        yield {str(one): {"logprob": float(row[one]), "rank": int(rank)} for one, rank in zip(kept, ranks)}


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "code": 400}}


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
