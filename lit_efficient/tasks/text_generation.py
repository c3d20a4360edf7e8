"""Reproducible text generation with the GPT of this package or a model of transformers."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.data.text.image_texts import ImageTexts, opened
from lit_efficient.data.text.left_out import occurs
from lit_efficient.data.text.message_images import Image, UnplacedImage, as_parts, place_images
from lit_efficient.data.text.template_limits import limited
from lit_efficient.data.text.token_cache import END_OF_TEXT
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.mechanisms.adapters.several import one_adapter
from lit_efficient.models.generation.batched import generate, longest_row
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
    pictured: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({}),
    adapters: Sequence[str | None] = (),
) -> list[tuple[str, bool]]:
    """Generate a continuation of each prompt, without reading or changing the global random state.

    Args:
        network: A `GPT`, or a causal model of transformers.
        tokenizer: Tokenizer of the network: a ``tokenizers.Tokenizer`` or a fast one of transformers.
        prompts: Texts to continue. A long prompt is cut at its beginning to leave room for new tokens.
        max_new_tokens: Largest number of new tokens.
        sampling: Settings of the sampling.
        seeds: One seed for each prompt.
        stop: Further ids of tokens that end a text.
        device: Device of the network.
        special: Let the tokenizer add the special tokens that begin a text. A chat template has added them already.
        batch_size: Largest number of prompts in a batch. The result does not depend on it.
        endings: Texts that end a continuation. It is cut before them.
        watch: Called after each token with the index of the prompt and the whole continuation so far.
        pictured: Inputs of the prompts with images, as of `pictured_chat`, by the index of the prompt.
        adapters: For each prompt the adapter that writes, or None for the base alone. Prompts of one adapter are
            written together. If it is empty, the active adapters write.

    Returns:
        Each continuation, and whether it was ended by the model or an ending instead of the limit.

    Raises:
        ConfigurationError: For arguments out of range, for an empty prompt if no token begins a text, and for a prompt
            with images that is too long.
    """
    sampling.check("generate_text")
    check_number("generate_text", "batch_size", batch_size, least=1, whole=True)
    if isinstance(endings, str) or not all(isinstance(ending, str) and ending for ending in endings):
        raise refusal("generate_text", "stop", "a list of non-empty texts", endings)
    if adapters:
        if len(adapters) != len(prompts):
            raise refusal("generate_text", "adapters", f"a name or null for each of {len(prompts)} prompts", adapters)
        of_prompts: list[tuple[str, bool]] = [("", False)] * len(prompts)
        for name in dict.fromkeys(adapters):
            own = [i for i, one in enumerate(adapters) if one == name]
            with one_adapter(network, name):
                found = continuations(
                    network,
                    tokenizer,
                    [prompts[i] for i in own],
                    max_new_tokens=max_new_tokens,
                    sampling=sampling,
                    seeds=[seeds[i] for i in own],
                    stop=stop,
                    device=device,
                    special=special,
                    batch_size=batch_size,
                    endings=endings,
                    watch=_numbered(watch, own),
                    pictured={place: pictured[i] for place, i in enumerate(own) if i in pictured},
                )
            for i, one in zip(own, found):
                of_prompts[i] = one
        return of_prompts
    room = room_for(network, max_new_tokens)
    stop = stop | stop_ids(network, tokenizer)
    rows = []
    for i, prompt in enumerate(prompts):
        if i not in pictured:
            rows.append(encoded_prompt(tokenizer, prompt, special, stop)[-room:])
            continue
        rows.append(pictured[i]["input_ids"][0].tolist())
        if len(rows[i]) > room:  # a cut may remove a part of an image
            raise ConfigurationError(
                f"generate_text: prompt {i + 1} has {len(rows[i])} tokens with those of its images, and the model "
                f"reads {room} before {max_new_tokens} new ones. Give smaller images, or less text"
            )
    ending = Ending(tokenizer, rows, endings)

    def written(i: int, new: list[int]) -> bool:
        text, ended = ending.text(i, new)
        if watch is not None:
            watch(i, text)
        return ended

    samples = generate(
        network,
        rows,
        max_new_tokens,
        sampling=sampling,
        seeds=seeds,
        stop=stop,
        written=written if endings or watch else None,
        rows=batch_size,
        device=device,
        pictured=pictured,
    )
    found = []
    for i, sample in enumerate(samples):
        by_model = sample.end == "stop"
        text, ended = ending.text(i, sample.tokens[:-1] if by_model else sample.tokens)
        found.append((text, by_model or ended))
    return found


def _numbered(watch: Callable[[int, str], None] | None, own: Sequence[int]) -> Callable[[int, str], None] | None:
    """Return ``watch`` for some of the prompts, of which ``own`` has the indexes."""
    if watch is None:
        return None
    return lambda place, text: watch(own[place], text)


def room_for(network: nn.Module, max_new_tokens: int) -> int:
    """Return the largest length of a prompt that leaves room for ``max_new_tokens``.

    Raises:
        ConfigurationError: If there is no room for a prompt.
    """
    longest = longest_row(network)
    if max_new_tokens < 1 or max_new_tokens >= longest:
        allowed = f"at least 1 and below the model's max_length, {longest}"
        raise refusal("generate_text", "max_new_tokens", allowed, max_new_tokens)
    return longest - max_new_tokens


def length_of(tokenizer: Any, chat: str) -> int:
    """Return the number of tokens of a chat that is already in its template."""
    return len(_encode(tokenizer, chat, False))


class Ending:
    """The texts of new tokens, and whether one of several texts ends them.

    Args:
        tokenizer: The tokenizer.
        rows: Ids of each prompt.
        endings: Texts that end a text. It is cut before them.
    """

    def __init__(self, tokenizer: Any, rows: Sequence[list[int]], endings: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.rows = rows
        self.endings = endings

    def __call__(self, i: int, new: list[int]) -> bool:
        """Return whether a text ends the new tokens of prompt number ``i``."""
        return self.text(i, new)[1]

    def text(self, i: int, new: list[int]) -> tuple[str, bool]:
        """Return the text of new tokens, cut before the first ending, and whether there was one."""
        return _before(_decoded_behind(self.tokenizer, self.rows[i], new), self.endings)


def _before(text: str, endings: Sequence[str]) -> tuple[str, bool]:
    """Cut ``text`` before the first ending, and return whether there was one."""
    places = [text.index(ending) for ending in endings if ending in text]
    if places:
        return text[: min(places)], True
    return text, False


def encoded_prompt(tokenizer: Any, prompt: str, special: bool, stop: set[int]) -> list[int]:
    """Return the token ids of a prompt, without a final end token. An empty prompt is the end of another text."""
    ids = _encode(tokenizer, prompt, special)
    if special and ids and ids[-1] == getattr(tokenizer, "eos_token_id", None):
        ids = ids[:-1]  # some tokenizers append the end token to every text
    if not ids and not stop:
        raise refusal("generate_text", "prompts", f"non-empty texts for a tokenizer without {END_OF_TEXT}", prompt)
    return ids or [min(stop)]  # the end of a text is what precedes a new one


def _decoded_behind(tokenizer: Any, ids: list[int], new: list[int]) -> str:
    """Return the text of ``new`` after ``ids``. Some tokenizers drop the space at the beginning of a decoded text."""
    before = tokenizer.decode(ids)
    whole = tokenizer.decode(ids + new)
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(new)


def check_template(tokenizer: Any, owner: str) -> None:
    """Raise ConfigurationError in the name of ``owner`` for a tokenizer without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigurationError(f"{owner} needs a tokenizer with a chat template, but the model's has none")


def as_chat(tokenizer: Any, turns: str | list[dict[str, str]], owner: str = "generate_text: chat") -> str:
    """Format turns with the tokenizer's chat template, followed by the beginning of the answer.

    Args:
        tokenizer: The tokenizer.
        turns: Messages with ``role`` and ``content``, or the text of a single user turn.
        owner: Name at the beginning of the error message.

    Raises:
        ConfigurationError: If the tokenizer has no template.
    """
    check_template(tokenizer, owner)
    messages = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
    how = {"tokenize": False, "add_generation_prompt": True}
    with limited(tokenizer.get_chat_template()):
        text = str(tokenizer.apply_chat_template(messages, **how))
        if occurs(messages[-1]["content"], text):
            return text
        # Templates of models of images and text may read lists of parts only, and omit a text silently.
        in_parts = str(tokenizer.apply_chat_template([as_parts(message) for message in messages], **how))
    if occurs(messages[-1]["content"], in_parts):
        return in_parts
    return text


def pictured_chat(images: ImageTexts, text: str, pictures: Sequence[Image]) -> tuple[str, dict[str, Tensor]]:
    """Return a user's turn with images in the chat template, with the beginning of the answer, and the model's inputs.

    Args:
        images: Processor of the model.
        text: Text of the turn. Images come before it, or at the places of ``<image>``.
        pictures: Paths or encoded bytes of the images.

    Raises:
        ConfigurationError: If an image cannot be read or placed.
    """
    tokenizer = images.processor.tokenizer
    try:
        placed, _ = place_images([{"role": "user", "content": text}], {"images": list(pictures)})
        with limited(tokenizer.chat_template):
            rendered = str(
                tokenizer.apply_chat_template(list(map(as_parts, placed)), tokenize=False, add_generation_prompt=True)
            )
        return rendered, images.inputs(rendered, [opened(picture) for picture in pictures])
    except UnplacedImage as error:
        raise ConfigurationError(f"generate_text: images: {error}") from error


def stop_ids(network: nn.Module, tokenizer: Any) -> set[int]:
    """Return the ids that end a text, from the tokenizer and the model's generation config."""
    found = {getattr(tokenizer, "eos_token_id", None)}
    if not hasattr(tokenizer, "backend_tokenizer"):
        found.add(tokenizer.token_to_id(END_OF_TEXT))
    settings = getattr(getattr(network, "generation_config", None), "eos_token_id", None)
    found.update(settings if isinstance(settings, list) else [settings])
    return {token for token in found if token is not None}


def _encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    encoded = tokenizer.encode(text, add_special_tokens=special)
    return list(encoded if isinstance(encoded, list) else encoded.ids)
