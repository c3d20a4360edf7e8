"""Continue texts with a language model, our GPT or one of transformers, by one set of rules and reproducibly."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lit_efficient.data.text.template_limits import limited
from lit_efficient.data.text.token_cache import END_OF_TEXT
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.models.generation.batched import continue_rows, longest_row
from lit_efficient.models.generation.sampling import Sampling

BATCH_SIZE = 8


def continuations(
    network: nn.Module,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    stop: set[int],
    device: torch.device,
    special: bool = True,
    batch_size: int = BATCH_SIZE,
    endings: Sequence[str] = (),
    watch: Callable[[int, str], None] | None = None,
) -> list[tuple[str, bool]]:
    """What follows each prompt, and whether the model or an ending (not the limit) ended it.

    No global random state is read or changed.

    Args:
        network: a `GPT`, or a causal model of transformers.
        tokenizer: its tokenizer, a ``tokenizers.Tokenizer`` or a fast one of transformers.
        prompts: texts to continue; the last tokens that leave room for the new ones are used.
        max_new_tokens: most tokens to add.
        sampling: how tokens are drawn.
        seeds: of each prompt.
        stop: further ids that end a text.
        device: where the network is.
        special: whether the tokenizer adds what begins a text; a chat template has written it.
        batch_size: most prompts at a time; each is continued as if it were alone.
        endings: texts that end a continuation, which is cut before them.
        watch: called after each token with the number of its prompt and the whole continuation so far.

    Raises:
        ConfigurationError: for arguments out of range, and an empty prompt where no token begins a text.
    """
    sampling.check("generate_text")
    check_number("generate_text", "batch_size", batch_size, least=1, whole=True)
    if isinstance(endings, str) or not all(isinstance(ending, str) and ending for ending in endings):
        raise refusal("generate_text", "stop", "a list of texts with something in them", endings)
    room = room_for(network, max_new_tokens)
    stop = stop | stop_ids(network, tokenizer)
    rows = [_ids(tokenizer, prompt, special, stop)[-room:] for prompt in prompts]
    found: dict[int, tuple[str, bool]] = {}

    def text_of(i: int, new: list[int]) -> tuple[str, bool]:
        return _before(_decoded_behind(tokenizer, rows[i], new), endings)

    for group in _groups([len(row) for row in rows], batch_size, max_new_tokens):

        def written(j: int, new: list[int], group: list[int] = group) -> bool:
            text, ended = text_of(group[j], new)
            if watch is not None:
                watch(group[j], text)
            return ended

        ways: dict[str, Any] = {"sampling": sampling, "stop": stop, "written": written if endings or watch else None}
        ways["generators"] = [torch.Generator(device).manual_seed(seeds[i]) for i in group]
        for i, new in zip(group, continue_rows(network, [rows[i] for i in group], max_new_tokens, **ways)):
            by_model = new[-1] in stop
            text, ended = text_of(i, new[:-1] if by_model else new)
            found[i] = text, by_model or ended
    return [found[i] for i in range(len(rows))]


def room_for(network: nn.Module, max_new_tokens: int) -> int:
    """Most tokens of a prompt beside so many new ones.

    Raises:
        ConfigurationError: if there is none.
    """
    longest = longest_row(network)
    if max_new_tokens < 1 or max_new_tokens >= longest:
        allowed = f"at least 1 and below the model's max_length, {longest}"
        raise refusal("generate_text", "max_new_tokens", allowed, max_new_tokens)
    return longest - max_new_tokens


def length_of(tokenizer: Any, chat: str) -> int:
    """Tokens of a chat in its template."""
    return len(_encode(tokenizer, chat, False))


def _before(text: str, endings: Sequence[str]) -> tuple[str, bool]:
    """``text`` up to the first of the endings, and whether there is one."""
    places = [text.index(ending) for ending in endings if ending in text]
    return (text[: min(places)], True) if places else (text, False)


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

    Raises:
        ConfigurationError: if the tokenizer has no template.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigurationError(f"{owner} needs a tokenizer with a chat template, and the model's has none")
    messages = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
    with limited(tokenizer.get_chat_template()):
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
