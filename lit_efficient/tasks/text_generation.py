"""Continue texts with a language model, our GPT or one of transformers, by one set of rules and reproducibly."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lit_efficient.data.text.token_cache import END_OF_TEXT
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.models.generation import continue_rows, longest_row
from lit_efficient.models.sampling import check_sampling

BATCH_SIZE = 8


def continue_texts(
    network: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    chat: bool = False,
    stop: set[int],
    device: torch.device,
    batch_size: int = BATCH_SIZE,
) -> list[str]:
    """Prompts with their continuations, up to where the model ends them; no global random state is read or changed.

    Args:
        network: a `GPT`, or a causal model of transformers.
        tokenizer: its tokenizer, a ``tokenizers.Tokenizer`` or a fast one of transformers.
        prompts: texts to continue; the last tokens that leave room for the new ones are used.
        max_new_tokens: most tokens to add.
        temperature: at least 0; 0 takes the likeliest token.
        top_p: draw among the likeliest tokens that together have this probability, in (0, 1].
        seed: prompt number i is continued with the seed ``seed + i``.
        chat: whether each prompt is a user's turn, to be answered.
        stop: further ids that end a text.
        device: where the network is.
        batch_size: most prompts at a time; each is continued as if it were alone.

    Raises:
        ConfigurationError: for arguments out of range, an empty prompt where no token begins a text, and a chat without
            a template.
    """
    prompts = [as_chat(tokenizer, prompt) for prompt in prompts] if chat else list(prompts)
    found = continuations(
        network,
        tokenizer,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seeds=range(seed, seed + len(prompts)),
        stop=stop,
        device=device,
        special=not chat,
        batch_size=batch_size,
    )
    return [prompt + new for prompt, (new, _) in zip(prompts, found)]


def continuations(
    network: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seeds: Sequence[int],
    stop: set[int],
    device: torch.device,
    special: bool = True,
    batch_size: int = BATCH_SIZE,
) -> list[tuple[str, bool]]:
    """As `continue_texts`: the continuations alone, and of each whether the model (not the limit) ended it."""
    check_sampling("generate_text", temperature, top_p)
    check_number("generate_text", "batch_size", batch_size, least=1, whole=True)
    longest = longest_row(network)
    room = longest - max_new_tokens
    if max_new_tokens < 1 or room < 1:
        allowed = f"at least 1 and below the model's max_length, {longest}"
        raise refusal("generate_text", "max_new_tokens", allowed, max_new_tokens)
    stop = stop | stop_ids(network, tokenizer)
    rows = [_ids(tokenizer, prompt, special, stop)[-room:] for prompt in prompts]
    found: dict[int, tuple[str, bool]] = {}
    for group in _groups([len(row) for row in rows], batch_size, max_new_tokens):
        generators = [torch.Generator(device).manual_seed(seeds[i]) for i in group]
        ways: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "generators": generators, "stop": stop}
        for i, new in zip(group, continue_rows(network, [rows[i] for i in group], max_new_tokens, **ways)):
            ended = new[-1] in stop
            found[i] = _decoded_behind(tokenizer, rows[i], new[:-1] if ended else new), ended
    return [found[i] for i in range(len(rows))]


def _groups(lengths: Sequence[int], size: int, most: int) -> list[list[int]]:
    """Numbers of rows to go on with together: at most ``size``, which differ by at most ``most`` tokens in length."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or len(groups[-1]) == size or lengths[i] - lengths[groups[-1][0]] > most:
            groups.append([])
        groups[-1].append(i)
    return groups


def _ids(tokenizer: Any, prompt: str, special: bool, stop: set[int]) -> list[int]:
    # ``special``: what begins a tokenizer's texts. A chat template has written it, and no model has seen two of them.
    ids = _encode(tokenizer, prompt, special)
    if special and ids and ids[-1] == getattr(tokenizer, "eos_token_id", None):
        ids = ids[:-1]  # some tokenizers end every text, and nothing goes on behind its end
    if not ids and not stop:
        raise refusal("generate_text", "prompts", f"texts with something in them, without {END_OF_TEXT}", prompt)
    return ids or [min(stop)]  # an empty prompt starts a new text


def _decoded_behind(tokenizer: Any, ids: list[int], new: list[int]) -> str:
    """The text of ``new`` behind ``ids``: some tokenizers drop the space that begins whatever they decode."""
    before, whole = tokenizer.decode(ids), tokenizer.decode(ids + new)
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)


def as_chat(tokenizer: Any, turns: str | list[dict[str, str]], owner: str = "generate_text: chat") -> str:
    """Turns (or a user's only one) in the tokenizer's chat template, with what begins the answer.

    Args:
        tokenizer: one of transformers.
        turns: each with ``role`` and ``content``.
        owner: who asks, for the error.

    Raises:
        ConfigurationError: if the tokenizer has no template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigurationError(f"{owner} needs a tokenizer with a chat template, and the model's has none")
    messages = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def stop_ids(network: nn.Module, tokenizer: Any) -> set[int]:
    """Ids that end a text: the tokenizer's, and those of the model's generation settings."""
    found = {getattr(tokenizer, "eos_token_id", None)}
    if not hasattr(tokenizer, "backend_tokenizer"):
        found.add(tokenizer.token_to_id(END_OF_TEXT))
    settings = getattr(getattr(network, "generation_config", None), "eos_token_id", None)
    found |= set(settings) if isinstance(settings, list) else {settings}
    return {token for token in found if token is not None}


def _encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    encoded = tokenizer.encode(text, add_special_tokens=special)
    return list(encoded if isinstance(encoded, list) else encoded.ids)
