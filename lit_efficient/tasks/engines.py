"""vLLM in the place of the generator of this package, which then writes the samples of a task.

    adapters of the network -> a folder in the format of peft -> vLLM loads it under a new name
    prompts with seeds -> vLLM -> samples, with the log-probabilities that they were drawn with

Each change of the adapters gives a new name, so that no sample comes from earlier weights, and the former name is
unloaded, at the end also the last one. Of several processes, the first one sends the adapters, and each one asks for
the samples of its own prompts.

Costs: the adapters are written to disk and read again after each optimizer step. vLLM rounds in another way than
training, which ``PolicyLoss.correction`` takes into account.
"""

import hashlib
import math
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lit_efficient.application.ledger import ledger
from lit_efficient.distributed.ranks import await_ranks, gather_objects, place_among_ranks
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, checks_types, refusal
from lit_efficient.mechanisms.adapters.base import added_names
from lit_efficient.mechanisms.adapters.peft_format import to_peft
from lit_efficient.mechanisms.adapters.peft_saved import write_peft_folder
from lit_efficient.mechanisms.adapters.technique import AdapterTechnique
from lit_efficient.models.generation.batched import Sample
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.models.libraries.causal_lm import CausalLMConfig
from lit_efficient.models.libraries.vllm_in_process import VLLMInProcess
from lit_efficient.models.libraries.vllm_server import VLLMServer
from lit_efficient.tasks.language_modeling import LanguageModeling

_COMPLETIONS = "/v1/completions"
_NONE = -1000.0  # vLLM writes -9999 for the logarithm of 0
# A smaller temperature would silently be raised to this one, and a larger one is refused.
_COLDEST = 0.01
_HOTTEST = 2.0


@checks_types
@dataclass
class VLLM:
    """vLLM, for samples of a network with LoRA.

    Args:
        url: Address of a server of the same base, such as ``http://localhost:8000``, with ``--enable-lora`` and with
            ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` in its environment. For another temperature than 1 and for top-p,
            top-k and min-p it also needs ``--logprobs-mode processed_logprobs``. null: vLLM runs in this process, on a
            GPU, with the extra ``vllm``.
        folder: Folder for the adapters, which the server reads under the same path. null: ``adapters`` in the trainer's
            ``default_root_dir``.
        seconds: Longest time to wait for an answer of the server, above 0.
        memory: Share of the GPU's memory for vLLM in this process, in (0, 1].
    """

    url: str | None = None
    folder: str | None = None
    seconds: float = 600.0
    memory: float = 0.3
    _backend: Any = field(default=None, init=False, repr=False)
    _name: str = field(default="", init=False, repr=False)  # of the adapters that vLLM has
    _folder: Path = field(default=Path(), init=False, repr=False)  # of their folder
    _digest: str = field(default="", init=False, repr=False)  # of their tensors
    _is_checked: bool = field(default=False, init=False, repr=False)  # the log-probabilities are those of the draws

    def __post_init__(self) -> None:
        check_number("VLLM", "seconds", self.seconds, above=0)
        check_number("VLLM", "memory", self.memory, above=0, most=1)
        if self.url is not None:
            self._backend = VLLMServer("VLLM", self.url, self.seconds)

    def check(self, task: LanguageModeling, sampling: Sampling) -> None:
        """Check that vLLM can write samples for a task.

        Raises:
            ConflictError: For a network without LoRA, or with adapters that vLLM cannot load.
            ConfigurationError: If vLLM does not draw at the temperature, if the base of vLLM in this process would be
                another one, or if vLLM is missing.
        """
        if not _COLDEST <= sampling.temperature <= _HOTTEST:
            allowed = f"at least {_COLDEST} and at most {_HOTTEST} for vLLM"
            raise refusal("VLLM", "rollout.temperature", allowed, sampling.temperature)
        _, config = _adapters_of(task)
        if self._backend is not None:
            return
        model = task.model
        own = isinstance(model, CausalLMConfig) and model.name_or_path and not model.draws_weights
        if not own or getattr(task, "start_from", None):
            raise ConfigurationError(
                "VLLM: vLLM in this process reads its base from model.name_or_path, and this network has other "
                "weights: export it (--format merged), and name that folder without start_from"
            )
        if place_among_ranks()[1] > 1:
            raise ConfigurationError("VLLM: with several processes, start a server, and give its url")
        with isolate_rng():  # vLLM may seed the global generators
            self._backend = VLLMInProcess("VLLM", str(model.name_or_path), config["r"], self.memory)  # type: ignore[union-attr]

    def write(
        self,
        task: LanguageModeling,
        prompts: Sequence[Sequence[int]],
        room: Sequence[int],
        *,
        sampling: Sampling,
        seeds: Sequence[int],
        stop: set[int],
        endings: Sequence[str],
        written: Callable[[int, list[int]], bool] | None,
    ) -> list[Sample]:
        """Return a continuation of each prompt, as :func:`lit_efficient.models.generation.batched.generate`.

        Args:
            task: The task, whose network writes.
            prompts: Token ids of each prompt.
            room: Largest number of new tokens for each prompt.
            sampling: Parameters of sampling.
            seeds: Seed of each prompt.
            stop: Ids that end a sample.
            endings: Texts that end a sample.
            written: Function of the number of a prompt and its new ids, which is true at an ending.
        """
        if self._backend is None:
            self.check(task, sampling)
        name = self._send_adapters(task)
        asked: dict[str, Any] = {"model": name, "logprobs": 0, "return_tokens_as_token_ids": True, **vars(sampling)}
        # The server's own values may come from the model's generation_config.json.
        asked |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        # Without ignore_eos, the server also stops at the end tokens of its own files.
        asked |= {"stop_token_ids": sorted(stop), "ignore_eos": True, "stop": list(endings)}
        asked |= {"skip_special_tokens": False}
        if prompts and sampling != Sampling(1.0, 1.0) and not self._is_checked:
            self._check_log_probs({**asked, "prompt": list(prompts[0])})
        requests = [
            {**asked, "prompt": list(prompt), "max_tokens": most, "seed": seed}
            for prompt, most, seed in zip(prompts, room, seeds)
        ]
        answers = self._backend.complete(requests)
        return [self._sample(i, answer, room[i], stop, written) for i, answer in enumerate(answers)]

    def _send_adapters(self, task: LanguageModeling) -> str:
        """Return the name of the network's adapters, after sending them if they have changed."""
        tensors, config = _adapters_of(task)
        digest = _digest_of(tensors)
        if digest == self._digest:
            return self._name
        name = f"{type(task).__name__}-{secrets.token_hex(8)}"
        folder = Path(self.folder or Path(task.trainer.default_root_dir) / "adapters").resolve()
        self._folder = folder
        sentence = ""
        is_first = place_among_ranks()[0] == 0
        if is_first:
            try:
                (folder / name).mkdir(parents=True)
                write_peft_folder(folder / name, tensors, config)
                self._backend.load_adapter(name, str(folder / name))
            except (ConfigurationError, OSError) as error:  # the others wait
                sentence = str(error)
        name, sentence = gather_objects((name, sentence))[0]
        if sentence:
            raise ConfigurationError(sentence)
        if is_first and self._name:  # no process asks for the former ones any more, because all are here
            self._backend.unload_adapter(self._name)
            shutil.rmtree(folder / self._name, ignore_errors=True)
        self._name = name
        self._digest = digest
        return name

    def close(self) -> None:
        """Unload the adapters that vLLM has, and remove their folder. All processes call it together."""
        if not self._name:
            return
        await_ranks()  # no process asks for samples any more
        if place_among_ranks()[0] == 0:
            try:
                self._backend.unload_adapter(self._name)
            except ConfigurationError as error:  # the run is complete
                rank_zero_warn(f"The adapters of this run stay in vLLM. {error}")
            shutil.rmtree(self._folder / self._name, ignore_errors=True)
        self._name = ""
        self._digest = ""

    def _check_log_probs(self, asked: Mapping[str, Any]) -> None:
        """Check that log-probabilities are those after temperature and filters: of the best token alone, 0 and none.

        Raises:
            ConfigurationError: If they are not.
        """
        request = {**asked, "max_tokens": 1, "top_k": 1, "logprobs": 2, "stop": []}
        (answer,) = self._backend.complete([request])
        try:
            (top,) = answer["logprobs"]["top_logprobs"]
            _, *others = sorted(map(float, top.values()), reverse=True)
            if not others:
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            self._backend.refuse(
                _COMPLETIONS, f"returned no log-probabilities of the best two tokens, but {str(answer)[:300]}"
            )
        if any(value > _NONE for value in others):
            self._backend.refuse(
                _COMPLETIONS,
                "returns log-probabilities before temperature and filters: start it with vLLM's "
                "logprobs-mode processed_logprobs, or set temperature and top_p to 1, and top_k and min_p to 0",
            )
        self._is_checked = True

    def _sample(
        self,
        number: int,
        answer: Mapping[str, Any],
        most: int,
        stop: set[int],
        written: Callable[[int, list[int]], bool] | None,
    ) -> Sample:
        try:
            found = answer["logprobs"]
            tokens = [int(token.removeprefix("token_id:")) for token in found["tokens"]]
            values = [float(value) for value in found["token_logprobs"]]
        except (KeyError, TypeError, ValueError, AttributeError):
            tokens = []
            values = []
        if not tokens or len(tokens) != len(values) or not all(-math.inf < value < 1e-3 for value in values):
            self._backend.refuse(_COMPLETIONS, f"returned no tokens with log-probabilities, but {str(answer)[:300]}")
        sample = Sample()
        for token, value in zip(tokens[:most], values):
            sample.tokens.append(token)
            sample.drawn_log_probs.append(value)
            if token in stop:
                sample.end = "stop"
                break
            if written is not None and written(number, sample.tokens):
                sample.end = "written"
                break
        else:
            reason = answer.get("finish_reason")
            if reason == "stop" and isinstance(answer.get("stop_reason"), str):
                sample.end = "written"
            elif len(tokens) < most:  # also for "length": a server may have a limit of its own
                self._backend.refuse(
                    _COMPLETIONS,
                    f"ended a sample after {len(tokens)} of {most} tokens with finish_reason {reason!r} and "
                    f"stop_reason {answer.get('stop_reason')!r}",
                )
        sample.log_probs = sample.drawn_log_probs
        return sample


def _adapters_of(task: LanguageModeling) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the configuration of the network's LoRA in peft's format."""
    for entry in ledger(task):
        if issubclass(entry.kind, AdapterTechnique) and entry.kind.keeps == "adapters":
            state = task.state_dict()
            trained = {name for name, parameter in task.named_parameters() if parameter.requires_grad}
            kept = trained | added_names(task, state)
            own = {name: state[name].detach() for name in state if name in kept}
            tensors, config = to_peft(own, entry.kind.placement(task), entry.record["arguments"])
            _check_adapters(config)
            return tensors, config
    raise ConflictError(
        "VLLM: only adapters are sent to vLLM, and the network has no LoRA: add LoRA to trainer.callbacks, or leave "
        "rollout.engine out"
    )


def _check_adapters(config: Mapping[str, Any]) -> None:
    """Raise ConflictError for adapters that vLLM cannot load."""
    wrong = {
        "variant dora": config["use_dora"],
        f"bias {config['bias']}": config["bias"] != "none",
        "modules_to_save": config["modules_to_save"],
        "trainable_token_indices": config.get("trainable_token_indices"),
    }
    for name, found in wrong.items():
        if found:
            raise ConflictError(f"VLLM: vLLM cannot load adapters of LoRA with {name}: leave it or rollout.engine out")


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
