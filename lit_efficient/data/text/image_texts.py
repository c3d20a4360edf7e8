"""Texts with images as the inputs of a model, by the model's own processor of transformers.

    text with "<image>" at each place + images  ->  processor  ->  input_ids with the tokens of each image, pixel_values

Which entries a processor makes differs between families: ``image_grid_thw``, ``pixel_attention_mask``,
``token_type_ids``, ``image_sizes``, ... None is named here. An entry [B, T] belongs to the tokens. Every other entry
holds items of images, and the number of items of a row is found by processing the row alone.

Costs: the pixels of a batch are computed when it is loaded, by the workers of the loader, and once more for each row
    when its tokens are counted.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_efficient.data.images.image_pixels import UnreadableImage, decode
from lit_efficient.data.text.chat_tokenizer import check_fast, pack_tokenizer, read_template, save_tokenizer
from lit_efficient.data.text.message_images import Image, PicturedText, UnplacedImage
from lit_efficient.data.text.template_limits import limited
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.checkpoints import missing_folder
from lit_efficient.files.sums import check_sums
from lit_efficient.internals.hugging_face_processors import load_processor, processor_class, processor_files
from lit_efficient.mechanisms.moving import COUNT_OF

MULTIPLE = 8  # of the length of a batch, which is faster on GPUs
_LENGTH = 32
"""Height and width of the image of `ImageTexts.example` in pixels."""


@dataclass(frozen=True)
class TokenRow:
    """Tokens of a text with images."""

    ids: np.ndarray  # [n] int64
    offsets: np.ndarray  # [n, 2] first character of each token in ``text``, and the character after the last
    text: str  # the text with the tokens of the images
    spans: list[tuple[int, int]]  # characters of each image in ``text``
    places: list[tuple[int, int]]  # end of each image's place in the given text, and the characters added up to it
    sizes: dict[str, int]

    def moved(self, place: int) -> int:
        """Return the character of ``text`` that is the character ``place`` of the given text."""
        return place + next((added for end, added in reversed(self.places) if end <= place), 0)


class ImageTexts:
    """Processor of transformers, with its tokenizer and chat template, that can be sent to other processes.

    Args:
        packed: The processor as texts, as of `read_processor`.
    """

    def __init__(self, packed: Mapping[str, Any]) -> None:
        self.packed = packed

    def __getstate__(self) -> dict[str, Any]:
        return {"packed": self.packed}

    @property
    def digest(self) -> str:
        """Hash of all files of the processor."""
        return hashlib.sha256(json.dumps(self.packed, sort_keys=True).encode()).hexdigest()

    @property
    def placeholders(self) -> list[str]:
        """Texts in whose places the processor writes the tokens of images, videos and sounds."""
        return list(self.processor.all_special_multimodal_tokens)

    @functools.cached_property
    def processor(self) -> Any:
        """The processor."""
        with tempfile.TemporaryDirectory() as folder:
            save_tokenizer(self.packed, folder)
            found = load_processor(folder, processor_class(self.packed["processor"]))
        if found.tokenizer.pad_token is None:  # any token will do: padding is masked, and has no label
            found.tokenizer.pad_token = found.tokenizer.eos_token
        return found

    def tokens(self, text: str, images: Sequence[Image]) -> TokenRow:
        """Return the tokens of a text in which the chat template has written a place for each image.

        Raises:
            UnplacedImage: If an image cannot be read, or the template has not written a place for each.
        """
        try:
            found = self.processor(
                text=[text],
                images=[[opened(image) for image in images]] if images else None,
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
            )
        except (TypeError, ValueError) as error:
            raise UnplacedImage(f"the processor refuses it: {' '.join(str(error).split())[:200]}") from error
        ids = np.asarray(found["input_ids"][0], dtype=np.int64)
        replaced = (found.get("text_replacement_offsets") or [[]])[0] or self._kept(text)
        if len(replaced) != len(images):
            raise UnplacedImage(
                f"it holds {len(images)} images, and the processor finds {len(replaced)} places for them in the text "
                "that the chat template writes"
            )
        parts = []
        begin = 0
        places = []
        for one in replaced:
            start, end = one["span"]
            parts += [text[begin:start], one["replacement"]]
            begin = end
            places.append((end, one["new_span"][1] - end))
        whole = "".join((*parts, text[begin:]))
        if ids.tolist() != self.processor.tokenizer(whole, add_special_tokens=False)["input_ids"]:
            raise UnplacedImage(
                f"{type(self.processor).__name__} changes the text that the chat template writes, so that the answers "
                "cannot be found in its tokens"
            )
        names = found.keys() - {"offset_mapping", "text_replacement_offsets"}
        sizes = {name: len(found[name]) for name in sorted(names) if not _is_of_tokens(found[name], len(ids))}
        offsets = np.asarray(found["offset_mapping"][0], dtype=np.int64).reshape(-1, 2)
        spans = [tuple(one["new_span"]) for one in replaced]
        return TokenRow(ids, offsets, whole, spans, places, sizes)

    def _kept(self, text: str) -> list[dict[str, Any]]:
        """Return the places of images if each has one token only, as of models with cross-attention."""
        token = getattr(self.processor, "image_token", None)
        spans = [found.span() for found in re.finditer(re.escape(token), text)] if token else []
        return [{"span": span, "new_span": span, "replacement": text[slice(*span)]} for span in spans]

    def batch(self, rows: Sequence[PicturedText]) -> dict[str, Tensor]:
        """Return the inputs of a model for some rows, padded on the right, with `COUNT_OF` for entries of images.

        Raises:
            ConfigurationError: If an image cannot be read.
        """
        try:
            images = [[opened(image) for image in row.images] for row in rows]
        except UnplacedImage as error:
            raise ConfigurationError(f"LanguageData: {error}") from error
        found = self.processor(
            text=[row.text for row in rows],
            images=images if any(images) else None,
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            pad_to_multiple_of=MULTIPLE,
            return_tensors="pt",
        )
        batch = dict(found)
        shape = batch["input_ids"].shape
        for name in [name for name, value in batch.items() if value.shape[:2] != shape]:
            counts = torch.tensor([row.sizes.get(name, 0) for row in rows])
            if int(counts.sum()) != len(batch[name]):  # the entry has one item for each row, with images or not
                assert len(batch[name]) == len(rows), (name, counts, batch[name].shape)
                counts = torch.ones(len(rows), dtype=torch.int64)
            batch[f"{COUNT_OF}{name}"] = counts
        return batch

    def example(self) -> dict[str, Tensor]:
        """Return the inputs for a short question about a grey image, for checks of a model."""
        from PIL import Image as Images

        content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
        text = self.processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        ramp = np.linspace(0, 255, 3 * _LENGTH**2).reshape(_LENGTH, _LENGTH, 3).astype(np.uint8)
        return self.inputs(text, [Images.fromarray(ramp)])

    def inputs(self, text: str, images: Sequence[Any]) -> dict[str, Tensor]:
        """Return the inputs of a model for one text and the pixels of its images.

        Raises:
            UnplacedImage: If the processor refuses them.
        """
        try:
            found = self.processor(text=[text], images=[list(images)], add_special_tokens=False, return_tensors="pt")
        except (TypeError, ValueError) as error:
            raise UnplacedImage(f"the processor refuses it: {' '.join(str(error).split())[:200]}") from error
        return dict(found)


def read_processor(name: str, template: str | None) -> Any:
    """Load the processor of a model of images and text, with the template set in it and its tokenizer.

    Args:
        name: Folder or name on the Hugging Face hub.
        template: Chat template that replaces its own, as of `read_template`.

    Raises:
        ConfigurationError: If there is no such processor, or it cannot be used.
    """
    missing = missing_folder(name)
    if missing is not None:
        raise ConfigurationError(f"processor: {missing}")
    check_sums(Path(name).expanduser(), weights=False)
    try:
        processor = load_processor(name)
    except ConfigurationError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise ConfigurationError(f"processor: {name} cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    if getattr(processor, "image_processor", None) is None or getattr(processor, "tokenizer", None) is None:
        raise ConfigurationError(
            f"processor: {name} has a {type(processor).__name__}, and no processor of images and text. Give a model of "
            "text as tokenizer."
        )
    if not hasattr(processor, "get_text_with_replacements"):
        raise ConfigurationError("processor: rows with images need a newer transformers, of version 5.18.")
    check_fast(processor.tokenizer, name)
    own = processor.chat_template or processor.tokenizer.chat_template
    processor.chat_template = processor.tokenizer.chat_template = own if template is None else read_template(template)
    return processor


def unwritten_beginning(processor: Any) -> str:
    """Return the token that begins each text for the tokenizer of a processor, if its chat template does not write it.

    ``apply_chat_template`` of transformers' processors then adds the token, and that of tokenizers and TRL do not.
    """
    from jinja2 import TemplateError

    tokenizer = processor.tokenizer
    begin = [tokenizer.bos_token_id]
    if tokenizer("a")["input_ids"][:1] != begin or not tokenizer.chat_template:
        return ""
    turn = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    try:
        with limited(tokenizer.chat_template):
            text = tokenizer.apply_chat_template([turn], tokenize=False)
    except TemplateError:  # rows show the error
        return ""
    if tokenizer(text, add_special_tokens=False)["input_ids"][:1] == begin:
        return ""
    return str(tokenizer.bos_token)


def pack_processor(processor: Any, name: str) -> dict[str, Any]:
    """Return a processor as texts: those of its tokenizer, and the files of the original that describe the rest."""
    packed = pack_tokenizer(processor.tokenizer)
    return {**packed, "files": packed["files"] | processor_files(name), "processor": type(processor).__name__}


def opened(image: Image) -> Any:
    """Return the pixels of an image.

    Raises:
        UnplacedImage: If it cannot be read.
    """
    where = "an image" if isinstance(image, bytes) else f"the image {image}"
    try:
        return decode(image if isinstance(image, bytes) else Path(image).read_bytes())
    except (OSError, UnreadableImage) as error:
        raise UnplacedImage(f"{where} cannot be read: {error}") from error


def _is_of_tokens(value: Any, length: int) -> bool:
    """Return whether an entry of a single row has one number for each token."""
    return len(value) == 1 and np.shape(value[0])[:1] == (length,)
