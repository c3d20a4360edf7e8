"""Answers that a language model writes during training, and the batch of rows that is made of them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_efficient.data.text.growing_chat import GrowingChat
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConflictError, check_number, checks_types, refusal
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.models.generation.batched import Sample, generate
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.tasks.conversations import Conversation, as_messages, converse, parts_of
from lit_efficient.tasks.engines import VLLM
from lit_efficient.tasks.environments import Environment, check_environment
from lit_efficient.tasks.language_modeling import LanguageModeling
from lit_efficient.tasks.text_generation import Ending, as_chat, check_template, encoded_prompt, room_for, stop_ids


@checks_types
@dataclass(frozen=True)
class Rollout:
    """Generation of a task's own answers.

    Args:
        samples: Samples of each prompt.
        max_new_tokens: Largest number of tokens of a sample. In a conversation, of all turns of the model together.
        temperature: Divides the logits, above 0. The policy that trains has this temperature, too.
        top_p: Draw from the most likely tokens that together have this probability, in (0, 1].
        top_k: Draw from this many most likely tokens. 0 is all.
        min_p: Draw from tokens whose probability is at least this share of the largest one, in [0, 1].
        stop: Texts that end a sample. The completion is cut before them.
        rows: Largest number of samples that are written at a time. null: all of a batch.
        seed: Seed of the draws, which also depend on the step and on the place in the batch.
        chat: Write each prompt that is a text as a user's turn in the chat template.
        engine: vLLM in the place of the generator of this package, for networks with LoRA. null: that generator.
    """

    samples: int = 8
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: Sequence[str] = ()
    rows: int | None = None
    seed: int = 0
    chat: bool = False
    engine: VLLM | None = None

    def __post_init__(self) -> None:
        check_number("Rollout", "samples", self.samples, least=1, whole=True)
        check_number("Rollout", "max_new_tokens", self.max_new_tokens, least=1, whole=True)
        check_number("Rollout", "temperature", self.temperature, above=0)
        check_number("Rollout", "rows", self.rows, least=1, whole=True, null=True)
        self.sampling.check("Rollout")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise refusal("Rollout", "stop", "a list of non-empty texts", self.stop)

    @property
    def sampling(self) -> Sampling:
        """Return the parameters of sampling."""
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p)


@dataclass(frozen=True)
class Answers:
    """Answers to prompts.

    Args:
        ids: Token ids of each prompt.
        samples: New tokens of each answer, with their log-probabilities.
        texts: Each answer without the token or the text that ends it. In a conversation it is the last one.
        conversations: Conversations with an environment. Empty without one.
    """

    ids: list[list[int]]
    samples: list[Sample]
    texts: list[str]
    conversations: list[Conversation] = field(default_factory=list)


def write_answers(
    task: LanguageModeling,
    prompts: Sequence[Any],
    seeds: Sequence[int],
    rollout: Rollout,
    environment: Environment | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
) -> Answers:
    """Let the network of a task answer prompts.

    Args:
        task: A task with a tokenizer.
        prompts: Texts, or lists of messages. A prompt that is too long loses its beginning.
        seeds: One seed for each prompt.
        rollout: How answers are drawn, and when they end.
        environment: Environment that answers the model.
        rows: Rows of the data, for the environment.
    """
    tokenizer: Any = task.tokenizer
    stop = _stop_ids(task)
    known: dict[str, list[int]] = {}

    def encode(text: str, chat: bool) -> list[int]:
        if text not in known:
            known[text] = encoded_prompt(tokenizer, text, not chat, stop)
        return known[text]

    if environment is not None:
        room = rollout.max_new_tokens + environment.max_tokens
        chat = GrowingChat(tokenizer, environment.tools, stop)

        def write(ids: list[list[int]], seeds: list[int], most: list[int]) -> tuple[list[Sample], list[str]]:
            answers = continue_ids(task, ids, seeds, rollout, most, chat.stop)
            return answers.samples, answers.texts

        messages = [as_messages(prompt) for prompt in prompts]
        talks = converse(
            chat,
            environment,
            messages,
            rows,
            seeds,
            lambda text: _cut(task, [encode(text, True)], room)[0],
            write,
            rollout.max_new_tokens,
        )
        samples = [talk.sample for talk in talks]
        return Answers([talk.ids for talk in talks], samples, [talk.text for talk in talks], talks)
    ids: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        if i and prompt is prompts[i - 1]:  # another sample
            ids.append(ids[-1])
            continue
        is_chat = rollout.chat or not isinstance(prompt, str)
        text = as_chat(tokenizer, prompt, f"{type(task).__name__}: chat") if is_chat else prompt
        ids.append(encode(text, is_chat))
    return continue_ids(task, ids, seeds, rollout)


def continue_ids(
    task: LanguageModeling,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    rollout: Rollout,
    room: Sequence[int] | None = None,
    stop: Collection[int] = (),
) -> Answers:
    """Let the network of a task continue token ids, as :func:`write_answers` does with texts.

    Args:
        task: A task with a tokenizer.
        prompts: Token ids. Those of a prompt that is too long lose their beginning.
        seeds: One seed for each prompt.
        rollout: How answers are drawn, and when they end.
        room: Largest number of new tokens for each prompt. None: ``rollout.max_new_tokens``.
        stop: Further ids that end an answer.
    """
    network = task._built()
    tokenizer = task.tokenizer
    ids = list(prompts)
    if room is None:
        room = [rollout.max_new_tokens] * len(prompts)
        ids = _cut(task, prompts, rollout.max_new_tokens)
    ending = Ending(tokenizer, ids, rollout.stop)
    how: dict[str, Any] = {"sampling": rollout.sampling, "seeds": seeds, "stop": _stop_ids(task) | {*stop}}
    how["written"] = ending if rollout.stop else None
    if rollout.engine is not None:
        samples = rollout.engine.write(task, ids, room, endings=rollout.stop, **how)
    else:
        samples = generate(network, ids, room, rows=rollout.rows, device=task.device, **how)
    texts = []
    for i, sample in enumerate(samples):
        texts.append(ending.text(i, sample.tokens[:-1] if sample.end == "stop" else sample.tokens)[0])
    return Answers(ids, samples, texts)


def sample_seeds(trainer: Trainer, seed: int, prompts: int, samples: int) -> list[int]:
    """Return one seed for each of several samples of each prompt in the batch of this process.

    Prompt i of process r is number i x processes + r of all, so that one process with all prompts draws the same.
    """
    places = [i * trainer.world_size + trainer.global_rank for i in range(prompts)]
    return [mix_seed(seed, place, number) for place in places for number in range(samples)]


def _cut(task: LanguageModeling, prompts: Sequence[list[int]], room: int) -> list[list[int]]:
    """Return the ends of prompts that leave room for further tokens."""
    most = room_for(task._built(), room)
    longest = max(map(len, prompts), default=0)
    if longest > most:
        rank_zero_warn(
            f"{type(task).__name__}: a prompt of {longest} tokens loses its beginning, which may be part of its chat "
            f"template, because the network reads {most} tokens before {room} new ones"
        )
    return [prompt[-most:] for prompt in prompts]


def _stop_ids(task: LanguageModeling) -> set[int]:
    return {*(task.tokenizer_state or {}).get("stop", ()), *stop_ids(task._built(), task.tokenizer)}


def asks_in_turns(task: LanguageModeling, rollout: Rollout) -> bool:
    """Return whether prompts are written in the chat template."""
    data = getattr(trainer_of(task), "datamodule", None)
    return rollout.chat or bool(getattr(data, "has_conversations", False))


def check_writes(task: LanguageModeling, rollout: Rollout, environment: Environment | None = None) -> None:
    """Check that a task can write answers during training.

    Raises:
        ConflictError: For a strategy that shards the weights.
        ConfigurationError: If the network reads too few tokens for an answer, if there is no chat template for
            conversations, or if it cannot write those with the environment.
    """
    traits = traits_of(task.trainer.strategy)
    if traits.shards:
        raise ConflictError(
            f"{type(task).__name__}: {traits.name} shards the weights, and processes generate different numbers of "
            "tokens: use one process or DDP, with LoRA or QuantizeBase to save memory"
        )
    if rollout.engine is not None:
        rollout.engine.check(task, rollout.sampling)
    room_for(task._built(), rollout.max_new_tokens + (0 if environment is None else environment.max_tokens))
    if asks_in_turns(task, rollout):
        check_template(task.tokenizer, f"{type(task).__name__}: chat")
    if environment is not None:
        check_environment(environment)
        GrowingChat(task.tokenizer, environment.tools, _stop_ids(task))


@dataclass
class Experience:
    """Samples of a batch of prompts, with all that the loss needs.

    Args:
        rows: ``input_ids``, ``labels`` and ``attention_mask`` of prompts with their samples, ``[N, T]``, padded on the
            right.
        advantage: ``[N]``, or ``[N, T]`` for each token.
        drawn: Log-probabilities of the tokens under the distribution that they were drawn from, ``[N, T]``.
        old: Log-probabilities under the policy of the first step with these samples. None before it.
        reference: Log-probabilities under the reference. None without a KL.
        figures: Figures to log.
    """

    rows: dict[str, Tensor]
    advantage: Tensor
    drawn: Tensor
    old: Tensor | None
    reference: Tensor | None
    figures: dict[str, float]


def moved(fields: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the fields of an :class:`Experience` with all tensors on a device."""
    found = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in fields.items()}
    return {**found, "rows": {name: value.to(device) for name, value in fields["rows"].items()}}


def joined(
    prompts: Sequence[Sequence[int]], samples: Sequence[Sample], device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """Return prompts with their samples, padded on the right, and the log-probabilities of the tokens when drawn.

    Returns:
        ``input_ids``, ``labels`` and ``attention_mask`` ``[N, T]``; and ``[N, T - 1]``, 0 outside of samples.
    """
    parts = [[(list(prompt), False), *parts_of(sample)] for prompt, sample in zip(prompts, samples)]
    longest = max(sum(len(tokens) for tokens, _ in row) for row in parts)
    ids = []
    labels = []
    masks = []
    drawn = []
    for row, sample in zip(parts, samples):
        tokens = [token for part, _ in row for token in part]
        own = [is_own for part, is_own in row for _ in part]
        log_probs = iter(sample.drawn_log_probs)
        padding = longest - len(tokens)
        ids.append(tokens + [0] * padding)
        labels.append([token if is_own else IGNORE for token, is_own in zip(tokens, own)] + [IGNORE] * padding)
        masks.append([1] * len(tokens) + [0] * padding)
        drawn.append([next(log_probs) if is_own else 0.0 for is_own in own] + [0.0] * padding)
    rows = {"input_ids": ids, "labels": labels, "attention_mask": masks}
    tensors = {name: torch.tensor(values, device=device) for name, values in rows.items()}
    # The default dtype may have fewer bits.
    return tensors, torch.tensor(drawn, dtype=torch.float32, device=device)[:, 1:]
