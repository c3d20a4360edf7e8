"""Conversations of a language model with an environment, written side by side during training.

    ids        prompt | turn 1 of the model | answers | turn 2 of the model | ...
    loss       no     | yes                 | no      | yes                 |

Costs: each turn of the model reads the whole conversation before it again; the conversations of a batch wait for the
slowest one after each turn
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_efficient.data.text.chat_formats import MalformedRow, Message
from lit_efficient.data.text.growing_chat import GrowingChat
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.models.generation.batched import Sample
from lit_efficient.tasks.environments import Environment, call_environment

Write = Callable[[list[list[int]], list[int], list[int]], tuple[list[Sample], list[str]]]
"""Function of token ids, seeds, and largest numbers of new tokens; returns samples and their texts."""


@dataclass
class Conversation:
    """A conversation with a language model.

    Args:
        messages: The messages.
        environment: The environment, after the conversation.
        failure: Sentence about a failure of the environment, which ended the conversation.
        begun: Number of messages before the first turn of the model.
        ids: Token ids of the prompt.
        sample: All tokens that the model wrote, and those between its turns.
        text: Last turn of the model, without the token or the text that ends it.
    """

    messages: list[Message]
    environment: Environment | None = None
    failure: str = ""
    begun: int = 0
    ids: list[int] = field(default_factory=list)
    sample: Sample = field(default_factory=Sample)
    text: str = ""

    @property
    def before(self) -> list[Message]:
        """Return the messages before the last turn of the model."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if turns:
            return self.messages[: turns[-1]]
        return self.messages


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """Return the messages of a prompt, of which a text is a user's turn. Those with nothing but calls get a content."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [{**message, "content": "" if message.get("content") is None else message["content"]} for message in prompt]


def transcript(messages: Sequence[Message]) -> str:
    """Return messages as text, each with its role and its calls of tools."""
    parts = []
    for message in messages:
        content = message["content"]
        lines = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)]
        for call in message.get("tool_calls", ()):
            lines.append(json.dumps(call["function"], ensure_ascii=False, default=str))
        parts.append(f"{message['role']}: " + "\n".join(line for line in lines if line))
    return "\n".join(parts)


def converse(
    chat: GrowingChat,
    environment: Environment,
    prompts: Sequence[list[Message]],
    rows: Sequence[Mapping[str, Any]],
    seeds: Sequence[int],
    encode: Callable[[str], list[int]],
    write: Write,
    most: int,
) -> list[Conversation]:
    """Return a conversation for each prompt.

    Args:
        chat: Chat template with the tools of the environment.
        environment: The environment. Each conversation has a copy.
        prompts: Messages of each prompt.
        rows: Row of the data of each prompt.
        seeds: Seed of each conversation.
        encode: Function that returns the token ids of a rendered prompt.
        write: Generation.
        most: Largest number of tokens of the model in a conversation.
    """
    talks = [_begun(chat, environment, *one, encode) for one in zip(prompts, rows, seeds)]
    live = [i for i, talk in enumerate(talks) if not talk.failure]
    for turn in range(environment.turns):
        if not live:
            break
        before = [_ids(talks[i]) for i in live]
        own = [mix_seed(seed, turn) if turn else seed for seed in seeds]
        room = [most - len(talks[i].sample.tokens) for i in live]
        samples, texts = write(before, [own[i] for i in live], room)
        for i, ids, new, text in zip(live, before, samples, texts):
            _add(chat, talks[i], ids, new, text)
        live = [i for i in live if _answered(chat, talks[i], own[i], turn + 1 == environment.turns, most)]
    return talks


def _begun(
    chat: GrowingChat,
    environment: Environment,
    messages: list[Message],
    row: Mapping[str, Any],
    seed: int,
    encode: Callable[[str], list[int]],
) -> Conversation:
    own = copy.deepcopy(environment)
    found, failure = call_environment(own, seed, "reset", messages, row)
    text = ""
    try:
        text = chat.prompt(messages if failure else found)
    except MalformedRow as error:
        failure = failure or str(error)
    first = messages if failure else found
    return Conversation(first, own, failure, len(first), encode(text))


def _ids(talk: Conversation) -> list[int]:
    """Return all ids of a conversation."""
    return talk.ids + [token for tokens, _ in parts_of(talk.sample) for token in tokens]


def parts_of(sample: Sample) -> list[tuple[list[int], bool]]:
    """Return the parts of a sample behind its prompt in their order, and whether the model wrote them."""
    parts = []
    start = 0
    for place, tokens in sample.between.items():
        parts += [(sample.tokens[start:place], True), (tokens, False)]
        start = place
    return [*parts, (sample.tokens[start:], True)]


def _add(chat: GrowingChat, talk: Conversation, ids: list[int], new: Sample, text: str) -> None:
    """Add a turn of the model."""
    sample = talk.sample
    sample.tokens = sample.tokens + new.tokens
    sample.log_probs = sample.log_probs + new.log_probs
    sample.drawn_log_probs = sample.drawn_log_probs + new.drawn_log_probs
    sample.end = new.end
    talk.text = text
    calls = sum(len(message.get("tool_calls", ())) for message in talk.messages)
    talk.messages.append(chat.message(ids, new.tokens, text, calls))


def _answered(chat: GrowingChat, talk: Conversation, seed: int, is_last: bool, most: int) -> bool:
    """Let the environment answer, and return whether the model has another turn."""
    sample = talk.sample
    environment = talk.environment
    assert environment is not None
    if sample.end == "length":
        return False
    answers, talk.failure = call_environment(environment, seed, "step", talk.messages)
    if talk.failure or not answers:
        return False
    message = talk.messages[-1]
    talk.messages += answers
    try:
        tokens = chat.behind(message, answers, sample.end == "stop")
    except MalformedRow as error:
        talk.failure = str(error)
        return False
    given = sum(map(len, sample.between.values())) + len(tokens)
    if is_last or given > environment.max_tokens or len(sample.tokens) >= most:
        sample.end = "length"
        return False
    sample.between[len(sample.tokens)] = tokens
    return True
