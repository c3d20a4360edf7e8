"""Any text encoder of Hugging Face, frozen: captions to embeddings that a diffusion network attends to.

    hidden [B, L, D], mask [B, L], pooled [B, P] = encode(captions);      nothing = encode([""])

Encoders of CLIP, T5 and its kin, BERT and its kin, and decoders (Gemma, Qwen, ...) whose hidden states serve as well.
What comes out is what the pipelines of diffusers give their networks; where they differ, an argument says which:

    Stable Diffusion       layer -1 (with the final norm); clip skip n: layer -1 - n with ``final_norm``
    SDXL, SD3, Flux        ``pipeline``: all of their encoders (:mod:`lit_efficient.models.libraries.text_joins`)
    PixArt, Sana, ...      layer -1; padding is hidden from encoder and network

Costs: once a caption, its encoding; then a look-up (L x D numbers a caption, the latest gigabyte of them in memory).
Captions are encoded one by one, so that an embedding depends on its caption alone, to the last bit: a run that is
resumed, or that reads the embeddings from a cache, trains on the same numbers. To encode ahead: ``cache-latents``.
Source: Rombach et al. (2022), https://arxiv.org/abs/2112.10752; Saharia et al. (2022), https://arxiv.org/abs/2205.11487.
"""

import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.known_facts import beside_facts, content_key, known_facts, note_facts
from lit_efficient.files.records import rebuild
from lit_efficient.files.tensors import load_tensors, save_tensors
from lit_efficient.models.libraries.caption_tokens import CaptionTokens
from lit_efficient.models.libraries.latent_codec import EMBEDDED_BYTES
from lit_efficient.models.libraries.text_joins import join, members
from lit_efficient.models.libraries.text_network import CaptionReading, TextEmbedding, TextEncoderConfig, TextNetwork

__all__ = ["CaptionReading", "TextEmbedding", "TextEncoder", "TextEncoderConfig"]

_REMEMBERED_BYTES = (2**28, 2**30)  # on a GPU, and on the CPU


class TextEncoder:
    """Frozen text encoder (or several, joined) with a memory of what it has encoded.

    Deliberately no ``nn.Module``, as ``LatentCodec``: a LightningModule that holds one neither trains, counts, averages
    nor saves it as its own. It is on the device that it was last asked to encode for.

    Args:
        spec: How it was asked for.
        parts: The networks, in the order in which their embeddings are joined; None: they are loaded when needed.
        key: Under which facts about its files are known, of `content_key`; None: nothing is.
    """

    def __init__(self, spec: TextEncoderConfig, parts: list[TextNetwork] | None, key: str | None = None) -> None:
        self.spec = spec
        self.key = key
        self._parts = parts
        self._memories: dict[torch.device, _Memory] = {}
        self._fingerprint: str | None = None
        self._hides_padding: bool | None = None

    @classmethod
    def load(cls, spec: TextEncoderConfig) -> "TextEncoder":
        """The encoder that ``spec`` names, on the CPU. Leaves torch's global generator as it is.

        Raises:
            ConfigurationError: If it or its tokenizer cannot be built or loaded.
        """
        return cls(spec, [TextNetwork.load(member) for member in members(spec)])

    @classmethod
    def find(cls, spec: TextEncoderConfig) -> "TextEncoder":
        """As `load`; what is large, and was met before, waits on disk until a caption is to be encoded.

        The empty caption's embedding, which hides captions in training, is kept with what is known of the files.
        """
        key = _key_of(spec)
        facts = known_facts(key)
        if {"fingerprint", "bytes", "hides_padding"} <= facts.keys() and facts["bytes"] > EMBEDDED_BYTES:
            found = cls(spec, None, key)
            found._fingerprint, found._hides_padding = str(facts["fingerprint"]), bool(facts["hides_padding"])
            return found
        loaded = cls.load(spec)
        if key is not None and loaded.nbytes > EMBEDDED_BYTES:
            about = {"bytes": loaded.nbytes, "hides_padding": loaded.hides_padding}
            note_facts(key, {"fingerprint": loaded.fingerprint(), **about})
            loaded.key = key
        return loaded

    @property
    def parts(self) -> list[TextNetwork]:
        """The networks; those that wait on disk are loaded now."""
        if self._parts is None:
            self._parts = type(self).load(self.spec).parts
        return self._parts

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(part.nbytes for part in self.parts)

    @property
    def network(self) -> nn.Module:
        """The first network."""
        return self.parts[0].network

    @property
    def tokens(self) -> CaptionTokens:
        """The first tokenizer."""
        return self.parts[0].tokens

    @torch.inference_mode(False)  # what a validation embeds is remembered, and trained with later
    @torch.no_grad()
    def encode(self, captions: Sequence[str], device: torch.device | str = "cpu") -> TextEmbedding:
        """Embeddings of captions on ``device``, where the latest ones stay: one of them is not encoded again.

        On the CPU each caption is encoded by itself and has the same numbers in any batch, as in a cache of latents; a
        GPU takes all new ones at once, and the last bits of one are those of its batch.
        """
        device = torch.device(device)
        memory = self._memories.setdefault(device, _Memory(_REMEMBERED_BYTES[device.type == "cpu"]))
        if "" in captions and memory.get("") is None and (nothing := self._kept_nothing(device)) is not None:
            memory.put("", nothing)
        found: dict[str, Any] = {caption: memory.get(caption) for caption in dict.fromkeys(captions)}
        new = [caption for caption, embedding in found.items() if embedding is None]
        keeps = self.key is not None and "" in new
        for group in [[caption] for caption in new] if device.type == "cpu" else [new] if new else []:
            joined: Any = join(self.spec.pipeline, [part.embed(group, device) for part in self.parts])
            for number, caption in enumerate(group):  # copies: a row would hold on to its batch
                row: list[Any] = [None if t is None else t[number].clone() for t in joined]
                found[caption] = TextEmbedding(*row)
                memory.put(caption, found[caption])
        if keeps:
            self._keep_nothing(device, found[""])
        among = [found[caption] for caption in captions]
        hidden, mask = (torch.stack(parts) for parts in zip(*((one.hidden, one.mask) for one in among)))
        pooled = [one.pooled for one in among if one.pooled is not None]
        return TextEmbedding(hidden, mask, torch.stack(pooled) if pooled else None)

    @property
    def width(self) -> int:
        """D, features of a token."""
        return self.encode([""]).hidden.shape[-1]

    @property
    def max_length(self) -> int:
        """L, tokens of an embedding."""
        return self.encode([""]).hidden.shape[1]

    @property
    def pooled_width(self) -> int:
        """P, features of the pooled embedding; 0 if there is none."""
        pooled = self.encode([""]).pooled
        return 0 if pooled is None else pooled.shape[-1]

    @property
    def hides_padding(self) -> bool:
        """Whether masks leave the padding out; otherwise they are all true."""
        if self._hides_padding is None:
            self._hides_padding = any(part.hides_padding for part in self.parts)
        return self._hides_padding

    def _kept_nothing(self, device: torch.device) -> TextEmbedding | None:
        """The empty caption's embedding, as it was computed on such a device before."""
        if self.key is None:
            return None
        try:
            parts = load_tensors(beside_facts(self.key, f"{device.type}.safetensors"))
            return TextEmbedding(*(parts[n].to(device) if n in parts else None for n in TextEmbedding._fields))  # type: ignore[arg-type]
        except (CheckpointError, OSError):
            return None

    def _keep_nothing(self, device: torch.device, nothing: TextEmbedding) -> None:
        parts = {name: part.cpu() for name, part in zip(TextEmbedding._fields, nothing) if part is not None}
        with contextlib.suppress(OSError):  # a cache on a read-only disk
            save_tensors(beside_facts(self.key or "", f"{device.type}.safetensors"), parts)

    def fingerprint(self) -> str:
        """SHA-256 of all that an embedding depends on: the weights, the tokenizers and how they are read."""
        if self._fingerprint is None:
            described = [self.spec.pipeline, *(part.digest() for part in self.parts)]
            self._fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        """Primitives and tensors only; large weights stay where they are, named and with their fingerprint."""
        small = self._parts is not None and self.nbytes <= EMBEDDED_BYTES
        parts = [part.state_dict() for part in self.parts] if small else None
        return {"spec": asdict(self.spec), "parts": parts, "fingerprint": self.fingerprint()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "TextEncoder":
        """The encoder that ``state_dict`` was taken from. Leaves torch's global generator as it is.

        Raises:
            CheckpointError: If its weights are to be found by name and are others now, or gone.
        """
        spec = rebuild(TextEncoderConfig, state["spec"])
        if state["parts"] is None:
            try:
                encoder = cls.find(spec)
            except ConfigurationError as error:
                raise CheckpointError(f"The text encoder of the checkpoint cannot be loaded: {error}") from error
        else:
            described = zip(members(spec), state["parts"], strict=True)
            encoder = cls(spec, [TextNetwork.from_state_dict(member, part) for member, part in described])
        if encoder.fingerprint() != state["fingerprint"]:
            raise CheckpointError(
                f"The text encoder {spec.name_or_path or spec.config_fields} is not the one that the checkpoint was "
                f"trained with: its fingerprint is {encoder.fingerprint()[:12]}, not {state['fingerprint'][:12]}. "
                "Name the folder or the revision of the original run."
            )
        return encoder

    def __deepcopy__(self, memo: object) -> "TextEncoder":
        """Itself: it never changes, and may be larger than what holds it."""
        return self


def _key_of(spec: TextEncoderConfig) -> str | None:
    reading, folder = spec.captions, Path(spec.name_or_path or "")
    if spec.name_or_path is None or not folder.is_dir():
        return None
    parts = members(spec)
    places = [folder / part.subfolder for part in parts]
    places += [folder / part.captions.subfolder for part in parts if part.captions.subfolder]
    if reading.tokenizer not in (None, "bytes"):
        places.append(Path(str(reading.tokenizer), reading.subfolder))
    about = {name: value for name, value in asdict(spec).items() if name != "name_or_path"}
    return content_key(["text encoder", about], places, ["transformers", "tokenizers"])


class _Memory:
    """The latest embeddings by caption, on one device, in so many bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._held: OrderedDict[str, TextEmbedding] = OrderedDict()

    def get(self, caption: str) -> TextEmbedding | None:
        if caption in self._held:
            self._held.move_to_end(caption)
        return self._held.get(caption)

    def put(self, caption: str, embedding: TextEmbedding) -> None:
        self._held[caption] = embedding
        self.bytes += _size(embedding)
        while self.bytes > self.limit:
            self.bytes -= _size(self._held.popitem(last=False)[1])


def _size(embedding: TextEmbedding) -> int:
    return sum(part.nbytes for part in embedding if part is not None)
