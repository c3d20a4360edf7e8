"""Engine that runs vLLM in this process, with the interface of :mod:`lit_efficient.models.libraries.vllm_server`.

Costs: a second copy of the base on the GPU, and the keys and values of all samples
Source: https://docs.vllm.ai/en/latest/features/lora.html
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lit_efficient.errors import ConfigurationError, check_installed

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of max_lora_rank
_OF_THE_API = ("model", "prompt", "return_tokens_as_token_ids")  # the other entries of a request are SamplingParams


class VLLMInProcess:
    """vLLM in this process.

    Args:
        owner: Name of the class that asks, for messages.
        model: Name or folder of the base.
        rank: Rank of the adapters.
        memory: Share of the GPU's memory for vLLM, in (0, 1].
    """

    def __init__(self, owner: str, model: str, rank: int, memory: float) -> None:
        check_installed(f"{owner} without a url", "vllm")
        from vllm import LLM

        self.owner = owner
        self.llm = LLM(
            model=model,
            enable_lora=True,
            max_lora_rank=next((known for known in _RANKS if known >= rank), rank),
            gpu_memory_utilization=memory,
            logprobs_mode="processed_logprobs",
        )
        self.adapters: dict[str, Any] = {}
        self.loaded = 0  # adapters so far

    def complete(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the answer to each request, as the server's ``complete``. All name the same adapter."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        how = [{key: value for key, value in one.items() if key not in _OF_THE_API} for one in requests]
        outputs = self.llm.generate(
            prompts,
            [SamplingParams(**one) for one in how],
            lora_request=self.adapters[requests[0]["model"]],
            use_tqdm=False,
        )
        return [_choice(output.outputs[0]) for output in outputs]

    def load_adapter(self, name: str, folder: str) -> None:
        """Make an adapter known. vLLM reads it with the first request that names it."""
        from vllm.lora.request import LoRARequest

        self.loaded += 1
        self.adapters[name] = LoRARequest(name, self.loaded, folder)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        self.llm.llm_engine.remove_lora(self.adapters.pop(name).lora_int_id)

    def refuse(self, path: str, sentence: str) -> NoReturn:
        """Raise an error about an answer, as the server's ``refuse``."""
        raise ConfigurationError(f"{self.owner}: vLLM in this process {sentence}")


def _choice(output: Any) -> dict[str, Any]:
    tokens = list(output.token_ids)
    top = [{f"token_id:{token}": one.logprob for token, one in place.items()} for place in output.logprobs]
    names = [f"token_id:{token}" for token in tokens]
    values = [place[name] for place, name in zip(top, names)]
    logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": top}
    return {"logprobs": logprobs, "finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
