"""Samples that vLLM writes train as those of our generator do, and come from the present adapters only."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lit_efficient import CausalLMConfig, LoRA, PolicyLoss, PolicyOptimization, Reward, Rollout
from lit_efficient.data.prompt_data import prompt_batch
from lit_efficient.data.text.chat_tokenizer import pack_tokenizer
from lit_efficient.errors import ConfigurationError
from lit_efficient.tasks.engines import VLLM
from lit_efficient.tasks.rollout import write_answers
from tests import support, vllm_server
from tests.processes import run_ranks
from tests.tasks.test_policy_optimization import Seen, letters
from tests.tasks.test_text_generation import writer
from tests.vllm_server import StandIn, served

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft
]
ROWS = [{"prompt": prompt} for prompt in ("the cat", "the mat, and")]


folder = vllm_server.folder
server = vllm_server.server


def _run(folder: Path, out: Path, steps: int = 3, lora: Any = True, world: int = 1, **rollout: Any) -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {"samples": 3, "max_new_tokens": 8, "stop": ("a",)} | rollout
    task = PolicyOptimization(
        [Reward(letters)],
        CausalLMConfig(str(folder)),
        PolicyLoss("dapo"),
        Rollout(**given),
        learning_rate=3e-2,
    )
    _, tokenizer = writer()
    task.tokenizer_state = pack_tokenizer(tokenizer) | {"stop": [*range(5, 25), 70]}
    seen = Seen()
    callbacks = [LoRA(rank=4) if lora is True else lora] if lora else []
    options = {"devices": world, "strategy": "ddp", "use_distributed_sampler": False} if world > 1 else {}
    run = support.trainer(
        max_epochs=-1,
        limit_val_batches=0,
        default_root_dir=out,
        max_steps=steps,
        callbacks=[*callbacks, seen],
        **options,
    )
    rows: Any = ROWS
    rank = int(os.environ["RANK"]) if world > 1 else 0
    order: Any = DistributedSampler(rows, world, rank, False)
    run.fit(task, DataLoader(rows, 2 // world, sampler=order, collate_fn=prompt_batch))
    return task, seen.figures


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("rollout", [{}, {"temperature": 0.7, "top_k": 50}])
def test_a_run_with_a_server_is_the_run_with_our_generator(
    folder: Path, server: StandIn, rollout: dict[str, Any], tmp_path: Path
) -> None:
    """The server loads the adapters by peft. If they were those of an earlier step, the samples would differ."""
    ours, expected = _run(folder, tmp_path, **rollout)
    theirs, found = _run(folder, tmp_path, engine=VLLM(server.url), **rollout)
    for mine, other in zip(expected, found):
        assert mine == pytest.approx(other, abs=2e-4)
    assert expected[-1]["train/length"] != expected[0]["train/length"]
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], tensor, atol=1e-4, rtol=1e-3)
    asked = [(path.rpartition("/")[2], body.get("lora_name", body.get("model"))) for path, body in server.asked]
    loaded = [name for path, name in asked if path == "load_lora_adapter"]
    assert len(loaded) == len({*loaded}) == 3
    assert [name for path, name in asked if path == "unload_lora_adapter"] == loaded
    assert [*server.served] == ["base"]
    assert [*(tmp_path / "adapters").iterdir()] == []
    present = ""
    for path, name in asked:
        if path == "load_lora_adapter":
            present = str(name)
        elif path == "completions":
            assert name == present
    ends = {sample.end for sample in _write(theirs)}
    assert ends == {"stop", "written", "length"}
    assert len([path for path, _ in server.asked if path == "/v1/load_lora_adapter"]) == 4  # of the last step


def _write(task: PolicyOptimization, count: int = 24) -> Any:
    return write_answers(task, ["the cat"] * count, range(count), task.rollout).samples


def test_a_server_with_other_log_probabilities_is_refused_where_they_differ(folder: Path, tmp_path: Path) -> None:
    with served(folder, processed=False) as server:
        task, _ = _run(folder, tmp_path, 1, engine=VLLM(server.url))
        for rollout in ({"temperature": 0.7}, {"top_k": 9}, {"min_p": 0.1}, {"top_p": 0.9}):
            task.rollout = replace(task.rollout, **rollout)
            with pytest.raises(ConfigurationError, match="start it with vLLM's logprobs-mode processed_logprobs"):
                _write(task)


@pytest.mark.turns(6, family="slow")
def test_wrong_answers_and_missing_adapters_are_sentences(folder: Path, server: StandIn, tmp_path: Path) -> None:
    task, _ = _run(folder, tmp_path, 1, engine=VLLM(server.url))
    log_probs = {"tokens": ["token_id:90", "token_id:91"], "token_logprobs": [-1.0, -2.0]}
    good = {"logprobs": log_probs, "finish_reason": "length", "stop_reason": None}
    for change, sentence in [
        ({"logprobs": None}, "returned no tokens with log-probabilities, but"),
        ({"logprobs": {"tokens": [], "token_logprobs": []}}, "returned no tokens"),
        ({"logprobs": {**log_probs, "token_logprobs": [-1.0]}}, "returned no tokens"),
        ({"logprobs": {**log_probs, "token_logprobs": [-1.0, None]}}, "returned no tokens"),
        ({"logprobs": {**log_probs, "token_logprobs": [-1.0, float("nan")]}}, "returned no tokens"),
        ({"finish_reason": "abort"}, "ended a sample after 2 of 8 tokens with finish_reason 'abort' and"),
        ({"finish_reason": "stop", "stop_reason": 77}, "finish_reason 'stop' and stop_reason 77"),
    ]:
        server.answers["/v1/completions"] = (200, {"choices": [good | change]})
        with pytest.raises(ConfigurationError, match=f"VLLM: {server.url}/v1/completions .*{sentence}"):
            _write(task)
    server.answers["/v1/completions"] = (200, {"choices": [good | {"finish_reason": "stop", "stop_reason": "a"}]})
    assert _write(task)[0].end == "written"
    many = {"tokens": ["token_id:90"] * 10, "token_logprobs": [-1.0] * 10}
    server.answers["/v1/completions"] = (200, {"choices": [good | {"logprobs": many}]})
    assert [(len(sample.tokens), sample.end) for sample in _write(task, 1)] == [(8, "length")]
    many["tokens"][3] = "token_id:70"  # an end, which the server has not seen
    assert [(sample.tokens, sample.end) for sample in _write(task, 1)] == [([90, 90, 90, 70], "stop")]
    server.answers = {"/v1/load_lora_adapter": (404, {"error": {"message": "Not Found"}})}
    with pytest.raises(ConfigurationError, match="/v1/load_lora_adapter answered with status 404: Not Found"):
        _run(folder, tmp_path, 1, engine=VLLM(server.url))
    server.answers.clear()
    for name, wrong in (("variant dora", {"variant": "dora"}), ("modules_to_save", {"modules_to_save": "lm_head"})):
        with pytest.raises(ConfigurationError, match=f"vLLM cannot load adapters of LoRA with {name}"):
            _run(folder, tmp_path, 1, lora=LoRA(rank=4, **wrong), engine=VLLM(server.url))
    for temperature in (0.005, 2.5):
        with pytest.raises(ConfigurationError, match=r"rollout.temperature must be at least 0.01 and at most 2.0 for"):
            _run(folder, tmp_path, 1, engine=VLLM(server.url), temperature=temperature)
    server.most_tokens = 3  # of a generation_config.json
    with pytest.raises(ConfigurationError, match="ended a sample after 3 of 8 tokens with finish_reason 'length'"):
        _run(folder, tmp_path, 1, engine=VLLM(server.url))
    with pytest.raises(ConfigurationError, match=r"no LoRA: add LoRA to trainer\.callbacks"):
        _run(folder, tmp_path, 1, lora=False, engine=VLLM(server.url))
    with pytest.raises(ConfigurationError, match="VLLM without a url needs vllm: pip install"):
        _run(folder, tmp_path, 1, engine=VLLM())
    for arguments in ({"url": "localhost"}, {"seconds": 0.0}, {"memory": 1.5}):
        with pytest.raises(ConfigurationError, match=f"VLLM: {next(iter(arguments))} must be"):
            VLLM(**arguments)


def test_vllm_in_this_process_is_asked_in_its_own_words(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With classes in the place of vLLM's that have the same arguments and results, in front of peft."""
    module: Any = ModuleType("vllm")
    module.__spec__ = SimpleNamespace(name="vllm")
    module.LLM = _LLM
    module.SamplingParams = lambda **how: how
    lora: Any = ModuleType("vllm.lora.request")
    lora.LoRARequest = lambda name, number, path: SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=path)
    for name, one in (("vllm", module), ("vllm.lora", ModuleType("vllm.lora")), ("vllm.lora.request", lora)):
        monkeypatch.setitem(sys.modules, name, one)
    _, expected = _run(folder, tmp_path, 2, temperature=0.7)
    _, found = _run(folder, tmp_path, 2, temperature=0.7, engine=VLLM(memory=0.4))
    for mine, other in zip(expected, found):
        assert mine == pytest.approx(other, abs=2e-4)


class _LLM:
    def __init__(
        self, model: str, enable_lora: bool, max_lora_rank: int, gpu_memory_utilization: float, logprobs_mode: str
    ) -> None:
        assert enable_lora
        assert (max_lora_rank, gpu_memory_utilization, logprobs_mode) == (8, 0.4, "processed_logprobs")
        self.server = StandIn(Path(model))
        self.server.server_close()  # it is asked without a connection
        self.llm_engine = SimpleNamespace(remove_lora=self.known.remove)

    known: list[int] = []  # noqa: RUF012

    def generate(self, prompts: Any, params: Any, lora_request: Any, use_tqdm: bool) -> Any:
        if lora_request.lora_int_id not in self.known:
            self.known.append(lora_request.lora_int_id)
            self.server.answer(
                "/v1/load_lora_adapter", {"lora_name": lora_request.lora_name, "lora_path": lora_request.lora_path}
            )
        for prompt, how in zip(prompts, params):
            body = {"model": lora_request.lora_name, "prompt": prompt["prompt_token_ids"], **how}
            _, found = self.server.answer("/v1/completions", body | {"return_tokens_as_token_ids": True})
            (choice,) = found["choices"]
            tokens = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
            reasons = {name: choice[name] for name in ("finish_reason", "stop_reason")}
            logprobs = []
            for place in choice["logprobs"]["top_logprobs"]:
                values = {int(name.removeprefix("token_id:")): value for name, value in place.items()}
                logprobs.append({token: SimpleNamespace(logprob=value) for token, value in values.items()})
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(tokens), logprobs=logprobs, **reasons)])


@pytest.mark.turns(4, family="ranks")
def test_two_processes_use_one_adapter_and_train_as_one(folder: Path, server: StandIn, tmp_path: Path) -> None:
    ours, _ = _run(folder, tmp_path)
    run_ranks(_in_ranks, tmp_path, str(folder), server.url)
    found = torch.load(tmp_path / "ranks.pt", weights_only=True)
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=1e-3)
    loaded = [body["lora_name"] for path, body in server.asked if path == "/v1/load_lora_adapter"]
    assert len(loaded) == 3
    assert [*server.served] == ["base"]


def _in_ranks(folder: str, url: str) -> None:
    task, _ = _run(Path(folder), Path(), world=2, engine=VLLM(url))
    if torch.distributed.get_rank() == 0:
        torch.save(task.state_dict(), "ranks.pt")
