"""Reward models as rewards of `PolicyOptimization`: networks that score a prompt with its answer.

    prompt and answer -> the chat template and tokenizer of the reward model -> one score

Costs: memory for one more network, and one forward pass of it for each sample

A model of `RewardModeling` reads what it was trained on: a text ends with the token that ends texts. One of
transformers reads what its ``text-classification`` pipeline reads of a text, and what TRL's GRPOTrainer reads of a
conversation.
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lit_efficient.data.text.chat_formats import Document, MalformedRow
from lit_efficient.data.text.chat_tokenizer import of_transformers, unpack_tokenizer
from lit_efficient.data.text.chat_tokens import ChatTokens
from lit_efficient.data.text.turn_spans import TurnSpans
from lit_efficient.distributed.seeds import seed_all
from lit_efficient.errors import ConfigurationError, check_list, check_number, checks_types, refusal
from lit_efficient.files.checkpoints import missing_folder
from lit_efficient.files.sums import check_sums
from lit_efficient.files.tensors import load_tensors
from lit_efficient.models.libraries import causal_lm
from lit_efficient.models.libraries.causal_lm import DRAWN, CausalLMConfig, Head, learned_positions, resolve
from lit_efficient.surgery import own_draws
from lit_efficient.tasks.conversations import Conversation, as_messages
from lit_efficient.tasks.loading import hugging_face_tokenizer, load_language_model
from lit_efficient.tasks.reward_modeling import RewardModeling
from lit_efficient.tasks.rewards import LARGEST_REWARD, Reward
from lit_efficient.tasks.teacher import FrozenNetwork

_CLASSIFIER = Head("AutoModelForSequenceClassification")
_ADAPTER = "adapter_config.json"


@checks_types
@dataclass(frozen=True)
class RewardModel:
    """Score of a reward model as a reward of `PolicyOptimization`.

    It has a tokenizer and a chat template of its own. Prompts that the policy reads as a conversation are written with
    that template. An answer that spells one of its control tokens, and a text that is too long, has no reward.

    Args:
        model: Checkpoint or run of `RewardModeling`, folder or name of a model of transformers for sequence
            classification with ``num_labels`` 1, a `CausalLMConfig` of the latter (with ``quantize`` and ``dtype``), or
            folder of an adapter of peft for such a model, which is merged.
        weight: Factor of the score. Rewards are summed.
        name: Name in the logs.
        batch_size: Samples that are scored at a time.
    """

    model: str | CausalLMConfig
    weight: float = 1.0
    name: str = "reward_model"
    batch_size: int = 16

    def __post_init__(self) -> None:
        check_number("RewardModel", "weight", self.weight)
        check_number("RewardModel", "batch_size", self.batch_size, least=1, whole=True)
        if not self.name:
            raise refusal("RewardModel", "name", "a text", self.name)

    def load(self) -> "RewardScorer":
        """Load the network and its tokenizer, without changing the global random state.

        Raises:
            ConfigurationError: For a model that gives no single score, or has no tokenizer.
        """
        with own_draws():
            if isinstance(self.model, str) and (Path(self.model).expanduser() / _ADAPTER).is_file():
                return _of_adapter(self, Path(self.model).expanduser())
            if isinstance(self.model, str) and _holds_checkpoint(self.model):
                return _of_checkpoint(self, self.model)
            return _of_transformers(self, CausalLMConfig(self.model) if isinstance(self.model, str) else self.model)


@dataclass(frozen=True)
class RewardScorer:
    """A loaded reward model. The network is not a submodule of its owner.

    Args:
        spec: The reward.
        network: The network.
        tokens: Function from prompt and answer to token ids; a prompt that is a list of messages is a conversation.
        scores: Function from the network, ids and mask ``[B, T]`` to scores ``[B]``.
        pad: Id of the padding. None: one text is scored at a time.
        longest: Largest number of tokens. None: no limit.
        has_template: Whether conversations can be read.
    """

    spec: RewardModel
    network: FrozenNetwork
    tokens: Callable[[Any, str], Sequence[int]]
    scores: Callable[[Any, Tensor, Tensor], Tensor]
    pad: int | None
    longest: int | None
    has_template: bool

    def check_chat(self) -> None:
        """Raise ConfigurationError for a model that cannot read conversations."""
        if not self.has_template:
            raise ConfigurationError(
                f"RewardModel: {self.spec.name}: the prompts are conversations, and the tokenizer of {self.spec.model} "
                "has no chat template"
            )

    @torch.no_grad()
    def __call__(
        self, prompts: Sequence[Any], answers: Sequence[str], chat: bool, device: torch.device
    ) -> list[tuple[float, str]]:
        """Return the score of each answer and "", or NaN and a sentence.

        Args:
            prompts: Texts, or lists of messages.
            answers: An answer to each prompt.
            chat: A prompt that is a text is a user's turn.
            device: Device on which the network runs.
        """
        found = [(math.nan, "")] * len(answers)
        rows: dict[int, Sequence[int]] = {}
        for i, (prompt, answer) in enumerate(zip(prompts, answers)):
            if chat or not isinstance(prompt, str):
                self.check_chat()
                prompt = as_messages(prompt)  # noqa: PLW2901
            try:
                ids = self.tokens(prompt, answer)
            except MalformedRow as reason:
                found[i] = (math.nan, f"{self.spec.name}: {reason}")
                continue
            if 0 < len(ids) <= (self.longest or len(ids)):
                rows[i] = ids
            else:
                sentence = f"{len(ids)} tokens cannot be read, at least 1 and at most {self.longest}"
                found[i] = (math.nan, f"{self.spec.name}: {sentence}")
        network = self.network.on(device)
        places = list(rows)
        size = 1 if self.pad is None else self.spec.batch_size
        # Neither the precision of the run nor its default dtype changes the network.
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.autocast(device.type, enabled=False):
                for start in range(0, len(places), size):
                    some = places[start : start + size]
                    batch = padded([rows[i] for i in some], self.pad or 0, device)
                    for i, score in zip(some, self.scores(network, *batch).float().tolist()):
                        known = abs(score) <= LARGEST_REWARD
                        found[i] = (score, "") if known else (math.nan, f"{self.spec.name} returned {score}")
        finally:
            torch.set_default_dtype(default)
        return found


def check_rewards(owner: str, rewards: Sequence[Reward | RewardModel]) -> None:
    """Raise ConfigurationError for an empty list of rewards, and for two with one name."""
    check_list(owner, "rewards", rewards, "a list of at least one Reward")
    names = [reward.name for reward in rewards]
    if len({*names}) < len(names):
        raise refusal(owner, "rewards", "functions or models with different names", names)


def load_scorers(rewards: Sequence[Reward | RewardModel], chat: bool) -> dict[str, RewardScorer]:
    """Load the reward models of a list of rewards, by their names.

    Args:
        rewards: Rewards.
        chat: Prompts are conversations, which the models must be able to read.
    """
    scorers = {reward.name: reward.load() for reward in rewards if isinstance(reward, RewardModel)}
    if chat:
        for scorer in scorers.values():
            scorer.check_chat()
    return scorers


def rewards_of(
    rewards: Sequence[Reward | RewardModel],
    scorers: Mapping[str, RewardScorer],
    prompts: Sequence[Any],
    texts: Sequence[str],
    rows: Sequence[Any],
    chat: bool,
    device: torch.device,
    seed: int,
    talks: Sequence[Conversation] = (),
) -> tuple[Tensor, list[str]]:
    """Compute the weighted rewards of answers.

    Functions may use and seed the global generators, which the caller does not notice.

    Args:
        rewards: Rewards.
        scorers: Reward models, as `load_scorers` returns them.
        prompts: Texts, or lists of messages.
        texts: An answer to each prompt.
        rows: The row of the data of each prompt.
        chat: A prompt that is a text is a user's turn.
        device: Device on which reward models run.
        seed: Seed of the global generators for the functions.
        talks: Conversations of which the texts are the last answers. Empty: each is a prompt with its text.

    Returns:
        ``[N, rewards]`` float64, with NaN where one fails, and a sentence for each failure.
    """
    asked = [prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) for prompt in prompts]
    before = [talk.before for talk in talks] or prompts
    if not talks:
        answers = [{"role": "assistant", "content": text} for text in texts]
        talks = [Conversation([*as_messages(prompt), answer]) for prompt, answer in zip(prompts, answers)]
    found = []
    sentences = []
    with isolate_rng():
        seed_all(seed)
        for reward in rewards:
            if isinstance(reward, RewardModel):
                own = scorers[reward.name](before, texts, chat, device)
            else:
                own = [
                    (math.nan, "") if talk.failure else reward(prompt, text, row, talk.messages, talk.environment)
                    for prompt, text, row, talk in zip(asked, texts, rows, talks)
                ]
            own = [(math.nan, talk.failure) if talk.failure else one for one, talk in zip(own, talks)]
            found.append([value * reward.weight for value, _ in own])
            for prompt, text, (_, sentence) in zip(asked, texts, own):
                if sentence:
                    sentences.append(f"{sentence} (prompt {prompt[:60]!r}, completion {text[:60]!r})")
    return torch.tensor(found, dtype=torch.float64).T, sentences


def padded(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and mask ``[B, T]`` of rows, padded on the right."""
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    seen = [torch.ones_like(row) for row in ids]
    return pad_sequence(ids, True, pad).to(device), pad_sequence(seen, True).to(device)


def _holds_checkpoint(path: str) -> bool:
    place = Path(path).expanduser()
    if place.suffix in (".ckpt", ".pt", ".pth") or (place / ".metadata").is_file():
        return True
    return place.is_dir() and not (place / "config.json").is_file()


def _of_checkpoint(spec: RewardModel, path: str) -> RewardScorer:
    task, _ = load_language_model(path)
    if not isinstance(task, RewardModeling):
        raise refusal("RewardModel", "model", "a checkpoint of RewardModeling", f"{path}, of {type(task).__name__}")
    if task.tokenizer_state is None:
        raise ConfigurationError(f"RewardModel: model: the checkpoint {path} holds no tokenizer")
    tokenizer = of_transformers(unpack_tokenizer(task.tokenizer_state))
    reader = ChatTokens(tokenizer, train_on="all")

    def tokens(prompt: Any, answer: str) -> Sequence[int]:
        document = Document(text=prompt + answer) if isinstance(prompt, str) else _conversation(prompt, answer)
        (found,) = reader.encode([document])
        if isinstance(found, MalformedRow):
            raise found
        return found.ids.tolist()

    def scores(network: Any, ids: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = network(ids, mask)
        return found

    has_template = bool(tokenizer.chat_template)
    return RewardScorer(spec, FrozenNetwork(task), tokens, scores, 0, task.max_length, has_template)


def _of_transformers(spec: RewardModel, model: CausalLMConfig) -> RewardScorer:
    missing = missing_folder(model.name_or_path or "")
    if missing or model.draws_weights:
        raise refusal("RewardModel", "model", "one with trained weights", missing or "random weights")
    labels = resolve(model).num_labels
    if labels != 1:
        raise ConfigurationError(
            f"RewardModel: model: {model.name_or_path} has num_labels {labels}, and a reward model has 1: one score"
        )
    state = hugging_face_tokenizer(model)
    if state is None:
        raise ConfigurationError(f"RewardModel: model: the folder {model.name_or_path} has no tokenizer")
    network: Any = causal_lm.build(model, head=_CLASSIFIER)
    if network.__dict__.get(DRAWN):
        drawn = ", ".join(network.__dict__[DRAWN])
        raise ConfigurationError(f"RewardModel: model: the files of {model.name_or_path} lack the weights of {drawn}")
    return _of_network(spec, network, state)


def _of_adapter(spec: RewardModel, folder: Path) -> RewardScorer:
    """Return the scorer of an adapter of peft, merged into its base."""
    from peft import PeftModel, get_peft_model_state_dict  # only adapters need it

    config = json.loads((folder / _ADAPTER).read_text("utf-8"))
    base = config.get("base_model_name_or_path") or ""
    missing = missing_folder(base) if base else "it names no base_model_name_or_path"
    if config.get("task_type") != "SEQ_CLS" or missing:
        found = missing or f"task_type {config.get('task_type')}"
        raise refusal("RewardModel", "model", "an adapter for sequence classification on a base", f"{folder}: {found}")
    check_sums(folder)
    model = CausalLMConfig(base, config_fields={"num_labels": 1})
    state = hugging_face_tokenizer(CausalLMConfig(str(folder))) or hugging_face_tokenizer(model)
    if state is None:
        raise ConfigurationError(f"RewardModel: model: neither {folder} nor {base} has a tokenizer")
    tensors = load_tensors(folder / "adapter_model.safetensors")
    network: Any = causal_lm.build(model, head=_CLASSIFIER)
    drawn = [name for name in network.__dict__.get(DRAWN, ()) if not any(key.endswith(name) for key in tensors)]
    if drawn:
        raise ConfigurationError(f"RewardModel: model: {folder} and {base} lack the weights of {', '.join(drawn)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing tensors, which are looked for below
            adapted = PeftModel.from_pretrained(network, folder)
    except (RuntimeError, ValueError, KeyError) as error:  # such as a head with several labels
        raise ConfigurationError(f"RewardModel: model: {folder} does not fit {base} with one label: {error}") from error
    wrong = sorted(get_peft_model_state_dict(adapted).keys() ^ tensors.keys())
    if wrong:
        raise ConfigurationError(f"RewardModel: model: {folder} does not fit {base}, first at {wrong[0]}")
    network = adapted.merge_and_unload()
    return _of_network(spec, network, state)


def _of_network(spec: RewardModel, network: Any, state: Mapping[str, Any]) -> RewardScorer:
    """Return the scorer of a network of transformers for sequence classification, with its tokenizer."""
    tokenizer = of_transformers(unpack_tokenizer(state))
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    network.config.get_text_config().pad_token_id = pad
    control = [token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token]
    turns = TurnSpans(tokenizer, "all", control)

    def tokens(prompt: Any, answer: str) -> Sequence[int]:
        is_text = isinstance(prompt, str)
        text = prompt + answer if is_text else turns.find(_conversation(prompt, answer))[0]
        ids: list[int] = tokenizer(text, add_special_tokens=is_text, verbose=False)["input_ids"]
        return ids

    def scores(network: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = network(input_ids=ids, attention_mask=mask).logits[:, 0]
        return found

    longest = learned_positions(network)
    return RewardScorer(spec, FrozenNetwork(network), tokens, scores, pad, longest, bool(tokenizer.chat_template))


def _conversation(prompt: Sequence[Mapping[str, Any]], answer: str) -> Document:
    turns = [{name: value for name, value in turn.items() if name != "weight"} for turn in prompt]
    return Document(messages=(*turns, {"role": "assistant", "content": answer}))
