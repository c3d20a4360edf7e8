"""Frozen text encoders of transformers, which map captions to embeddings that a diffusion network attends to.

    hidden [B, L, D], mask [B, L], pooled [B, P] = encode(captions);      unconditional: encode([""], negative=True)

Supported are encoders of CLIP, T5 and relatives, BERT and relatives, and decoders (Gemma, Qwen, ...), whose hidden
states serve as well. Embeddings equal those that the pipelines of diffusers give to their networks. Where pipelines
differ, an argument decides:

    Stable Diffusion       layer -1 (with the final norm); clip skip n: layer -1 - n with ``final_norm``
    SDXL, SD3, Flux        ``pipeline``: all of their encoders, joined by :func:`join`
    PixArt, Sana           ``pipeline``: lower case; encoder and network do not see padding; Sana has an instruction
    Qwen-Image, Z-Image    ``pipeline``: a chat template; encoder and network do not see padding

Costs: each caption is encoded once, and then looked up (L x D numbers per caption, up to a gigabyte in memory).
Captions are encoded one by one on the CPU, so that an embedding depends on its caption only, to the last bit. A run
that is resumed, or that reads the embeddings from a cache, trains on the same numbers. ``cache-latents`` encodes ahead.
Source: Rombach et al. (2022), https://arxiv.org/abs/2112.10752; Saharia et al. (2022),
https://arxiv.org/abs/2205.11487;
Podell et al. (2023), https://arxiv.org/abs/2307.01952; Esser et al. (2024), https://arxiv.org/abs/2403.03206.
"""

import contextlib
import copy
import hashlib
import inspect
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.known_facts import beside_facts, content_key, known_facts, note_facts
from lit_efficient.files.records import rebuild
from lit_efficient.files.tensors import load_tensors, save_tensors
from lit_efficient.internals.torch_dispatch import fakes_are_made, no_dispatch_modes
from lit_efficient.models.libraries.caption_tokens import USUAL_LENGTH, CaptionTokens
from lit_efficient.models.libraries.latent_codec import EMBEDDED_BYTES
from lit_efficient.models.libraries.pipeline_folder import pipeline_index, text_kind, text_length
from lit_efficient.models.libraries.text_network import CaptionReading, TextEmbedding, TextEncoderConfig, TextNetwork

__all__ = ["CaptionReading", "TextEmbedding", "TextEncoder", "TextEncoderConfig"]

_REMEMBERED_BYTES = (2**28, 2**30)  # limits on a GPU, and on the CPU
_KINDS: dict[str, tuple[str, ...]] = {
    "sd": ("clip",),
    "sdxl": ("clip", "clip"),
    "sd3": ("clip", "clip", "t5"),
    "sd3_clip": ("clip", "clip"),
    "flux": ("clip", "t5"),
    "pixart": ("t5",),
    "sana": ("gemma",),
    "qwen_image": ("qwen",),
    "z_image": ("qwen",),
}
# Tokens of T5 (or zeros in its place), Gemma and Qwen in pipelines whose class is unknown.
_LENGTHS = {"sd3": 256, "sd3_clip": 256, "flux": 512, "pixart": 300, "sana": 300, "qwen_image": 512, "z_image": 512}


def located(spec: TextEncoderConfig) -> TextEncoderConfig:
    """Return the description with the kind of the pipeline, if it names a pipeline's folder, and with the length.

    Raises:
        ConfigurationError: For a pipeline whose text encoders are unknown here.
    """
    index = None
    if spec.place is not None and not spec.subfolder:
        index = pipeline_index(spec.place, spec.revision)
    if index is not None and spec.pipeline is None:
        name = str(index.get("_class_name"))
        if name.startswith("QwenImageEdit"):
            raise ConfigurationError(
                f"TextEncoderConfig: the text encoder of {name} in {spec.place} reads captions together with the image "
                "to edit, which is not supported: leave text_encoder out, and give the pipeline's prompt_embeds in "
                "batches, as text and text_mask"
            )
        kind = text_kind(index)
        if kind is None:
            raise ConfigurationError(
                f"TextEncoderConfig: the text encoders of {index.get('_class_name')} in {spec.place} are joined "
                "in a way that is unknown here: name one of them by subfolder, with its tokenizer in captions.subfolder"
            )
        spec = replace(spec, pipeline=kind)
    length = spec.max_length
    if length is None and spec.pipeline is None:
        length = USUAL_LENGTH
    if length is None and spec.pipeline in _LENGTHS:
        length = text_length(str((index or {}).get("_class_name") or "")) or _LENGTHS[spec.pipeline]
    return replace(spec, max_length=length)


def members(spec: TextEncoderConfig) -> list[TextEncoderConfig]:
    """Return the encoders of a pipeline, or ``spec`` itself if it names none.

    The hidden states of CLIP in SDXL and SD3 are those of the layer before the last. PixArt, Sana, Qwen-Image and
    Z-Image mask padding.
    """
    if spec.pipeline is None:
        return [spec]
    found = []
    for number, kind in enumerate(_KINDS[spec.pipeline], start=1):
        suffix = "" if number == 1 else f"_{number}"
        length = spec.max_length
        if kind == "clip" and spec.pipeline in _LENGTHS:
            length = None  # the tokenizer's own
        layer = spec.layer
        if kind == "clip" and spec.pipeline in ("sdxl", "sd3", "sd3_clip"):
            layer = -2
        reading = CaptionReading(subfolder=f"tokenizer{suffix}", padding="seen")
        if spec.pipeline in ("pixart", "sana"):
            reading = replace(reading, padding="hidden", lowercase=True)
        if spec.pipeline == "sana":
            reading = replace(reading, instruction=_sana_instruction())
        if spec.pipeline == "qwen_image":
            around, drop = _qwen_template()
            reading = replace(reading, padding="hidden", around=around, drop=drop)
        if spec.pipeline == "z_image":
            layer = -2
            reading = replace(reading, padding="hidden", around="chat")
        subfolder = f"text_encoder{suffix}"
        found.append(
            replace(spec, pipeline=None, subfolder=subfolder, max_length=length, layer=layer, captions=reading)
        )
    return found


def _qwen_template() -> tuple[list[str], int]:
    """Return the text around a prompt of Qwen-Image, and the number of its first tokens that are left out."""
    from diffusers import QwenImagePipeline

    parts = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")
    pipeline: Any = QwenImagePipeline(**dict.fromkeys(parts))
    before, _, after = pipeline.prompt_template_encode.partition("{}")
    return [before, after], pipeline.prompt_template_encode_start_idx


def _sana_instruction() -> str:
    """Return the text that Sana's pipeline places before each prompt."""
    from diffusers import SanaPipeline

    lines = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    return "\n".join(lines)


def join(spec: TextEncoderConfig, parts: list[TextEmbedding]) -> TextEmbedding:
    """Join the embeddings of a pipeline's encoders as diffusers does.

        sdxl      hidden = [CLIP | CLIP-G] by features;  pooled = CLIP-G's
        sd3       hidden = [CLIP | CLIP-G] by features, zeros up to T5's width, then T5's tokens;
                  pooled = [CLIP | CLIP-G]
        sd3_clip  the same with zeros in the place of T5's tokens, and without features that are 0 in all tokens
        flux      hidden = T5's;  pooled = CLIP's

    Args:
        spec: The pipeline, whose ``max_length`` is the number of T5's tokens. A single part is returned unchanged.
        parts: Embeddings of the encoders: hidden [..., L, D], mask [..., L], pooled [..., P].

    Returns:
        The joined embeddings.
    """
    if len(parts) == 1:
        return parts[0]
    if spec.pipeline == "flux":
        clip, t5 = parts
        return TextEmbedding(t5.hidden, t5.mask, clip.pooled)
    clips = torch.cat([parts[0].hidden, parts[1].hidden], dim=-1)
    if spec.pipeline == "sdxl":
        return TextEmbedding(clips, parts[0].mask, parts[1].pooled)
    if spec.pipeline == "sd3_clip":
        nothing = clips.new_zeros(*clips.shape[:-2], spec.max_length or 0, clips.shape[-1])
        t5 = TextEmbedding(nothing, torch.ones_like(nothing[..., 0], dtype=torch.bool), None)
    else:
        t5 = parts[2]
    padded: Tensor = F.pad(clips, (0, t5.hidden.shape[-1] - clips.shape[-1]))
    pooled = [part.pooled for part in parts[:2] if part.pooled is not None]
    return TextEmbedding(
        torch.cat([padded, t5.hidden], -2), torch.cat([parts[0].mask, t5.mask], -1), torch.cat(pooled, -1)
    )


class TextEncoder:
    """Frozen text encoder, or several joined ones, which remembers the embeddings of captions.

    Like ``LatentCodec`` it is deliberately not an ``nn.Module``: a LightningModule that holds one does not train,
    count, average or save it. It stays on the device of the last call of `encode`.

    Args:
        spec: Description of the encoder.
        parts: The networks, in the order in which their embeddings are joined; None: they are loaded when needed.
        key: Key of `content_key` under which facts about the files are stored; None: there are none.
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
        """Load the encoder that ``spec`` names, on the CPU. Torch's global generator does not change.

        Raises:
            ConfigurationError: If the encoder or its tokenizer cannot be built or loaded.
        """
        spec = located(spec)
        return cls(spec, [TextNetwork.load(member) for member in members(spec)])

    @classmethod
    def find(cls, spec: TextEncoderConfig) -> "TextEncoder":
        """Return the encoder as `load` does, but leave a large one that an earlier run has loaded on disk until it is
        needed.

        The embedding of the empty caption, which replaces dropped captions in training, is stored with the facts about
        the files.
        """
        spec = located(spec)
        key = _key_of(spec)
        facts = known_facts(key)
        if {"fingerprint", "bytes", "hides_padding"} <= facts.keys() and facts["bytes"] > EMBEDDED_BYTES:
            found = cls(spec, None, key)
            found._fingerprint = str(facts["fingerprint"])
            found._hides_padding = bool(facts["hides_padding"])
            return found
        loaded = cls.load(spec)
        if key is not None and loaded.nbytes > EMBEDDED_BYTES:
            about = {"bytes": loaded.nbytes, "hides_padding": loaded.hides_padding}
            note_facts(key, {"fingerprint": loaded.fingerprint(), **about})
            loaded.key = key
        return loaded

    @property
    def parts(self) -> list[TextNetwork]:
        """Return the networks; those on disk are loaded."""
        if self._parts is None:
            self._parts = type(self).load(self.spec).parts
        return self._parts

    def own_parts(self) -> list[TextNetwork]:
        """Return copies of the networks. Those on disk are loaded for the caller alone."""
        if self._parts is None:
            return type(self).load(self.spec).parts
        return [TextNetwork(part.spec, _copied(part.network), part.tokens) for part in self._parts]

    def remember_empty(self) -> None:
        """Encode the empty caption on the CPU, and keep its embedding alone. The networks are loaded when needed."""
        self.encode([""])
        self.encode([""], negative=True)
        self._hides_padding = self.hides_padding
        self._parts = None

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all weights."""
        return sum(part.nbytes for part in self.parts)

    @property
    def network(self) -> nn.Module:
        """Return the first network."""
        return self.parts[0].network

    @property
    def tokens(self) -> CaptionTokens:
        """Return the first tokenizer."""
        return self.parts[0].tokens

    @torch.inference_mode(False)  # embeddings from a validation are remembered, and used in training later
    @torch.no_grad()
    def encode(
        self, captions: Sequence[str], device: torch.device | str = "cpu", negative: bool = False
    ) -> TextEmbedding:
        """Return embeddings of captions on ``device``, and remember the latest ones, which are not encoded again.

        With ``negative`` they are negative prompts, which some pipelines encode without their instruction.

        On the CPU each caption is encoded by itself and has the same numbers in any batch, as in a cache of latents. A
        GPU encodes all new captions together, and the last bits of an embedding depend on the batch.
        """
        device = torch.device(device)
        memory = self._memories.setdefault(device, _Memory(_REMEMBERED_BYTES[device.type == "cpu"]))
        negative = negative and self.is_instructed
        if "" in captions and memory.get(("", negative)) is None and negative == self.is_instructed:
            nothing = self._load_empty_caption(device)
            if nothing is not None:
                memory.put(("", negative), nothing)
        found: dict[str, Any] = {caption: memory.get((caption, negative)) for caption in dict.fromkeys(captions)}
        new = [caption for caption, embedding in found.items() if embedding is None]
        keeps = self.key is not None and "" in new and negative == self.is_instructed
        groups = [[caption] for caption in new]
        if device.type != "cpu" and new:
            groups = [new]
        for group in groups:
            embedded = [part.embed(group, device, negative) for part in self.parts]
            joined: Any = join(self.spec, embedded)
            for number, caption in enumerate(group):  # rows are copied, because a view would keep its batch in memory
                row: list[Any] = [None if t is None else t[number].clone() for t in joined]
                found[caption] = TextEmbedding(*row)
                memory.put((caption, negative), found[caption])
        if keeps:
            self._save_empty_caption(device, found[""])
        among = [found[caption] for caption in captions]
        hidden = torch.stack([one.hidden for one in among])
        mask = torch.stack([one.mask for one in among])
        pooled = [one.pooled for one in among if one.pooled is not None]
        return TextEmbedding(hidden, mask, torch.stack(pooled) if pooled else None)

    @property
    def width(self) -> int:
        """Return D, the number of features of a token."""
        return self.encode([""], negative=True).hidden.shape[-1]

    @property
    def max_length(self) -> int:
        """Return L, the number of tokens of an embedding."""
        return self.encode([""], negative=True).hidden.shape[1]

    @property
    def is_padded(self) -> bool:
        """Return whether the network's pipeline adds features of zeros: those of SD3's missing T5."""
        return self.spec.pipeline == "sd3_clip"

    @property
    def pooled_width(self) -> int:
        """Return P, the number of features of the pooled embedding; 0 if there is none."""
        pooled = self.encode([""], negative=True).pooled
        if pooled is None:
            return 0
        return pooled.shape[-1]

    @property
    def is_instructed(self) -> bool:
        """Return whether captions follow an instruction, and negative prompts do not."""
        return any(member.captions.instruction for member in members(self.spec))

    @property
    def hides_padding(self) -> bool:
        """Return whether masks exclude padding; otherwise they are all true."""
        if self._hides_padding is None:
            self._hides_padding = any(part.hides_padding for part in self.parts)
        return self._hides_padding

    def _load_empty_caption(self, device: torch.device) -> TextEmbedding | None:
        """Return the stored embedding of the empty caption, as it was computed on a device of this type, or
        ``None``.
        """
        if self.key is None:
            return None
        try:
            parts = load_tensors(beside_facts(self.key, f"{device.type}.safetensors"))
            return TextEmbedding(*(parts[n].to(device) if n in parts else None for n in TextEmbedding._fields))  # type: ignore[arg-type]
        except (CheckpointError, OSError):
            return None

    def _save_empty_caption(self, device: torch.device, nothing: TextEmbedding) -> None:
        """Store the embedding of the empty caption."""
        parts = {name: part.cpu() for name, part in zip(TextEmbedding._fields, nothing) if part is not None}
        with contextlib.suppress(OSError):  # a cache on a read-only disk
            save_tensors(beside_facts(self.key or "", f"{device.type}.safetensors"), parts)

    def fingerprint(self) -> str:
        """Return a SHA-256 digest of all that an embedding depends on: weights, tokenizers and options."""
        if self._fingerprint is None:
            described = [self.spec.pipeline, *(part.digest() for part in self.parts)]
            self._fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        return self._fingerprint

    def state_dict(self) -> dict[str, Any]:
        """Return primitives and tensors. Large weights are not included, but named, with their fingerprint."""
        parts = None
        if self._parts is not None and self.nbytes <= EMBEDDED_BYTES:
            parts = [part.state_dict() for part in self.parts]
        return {"spec": asdict(self.spec), "parts": parts, "fingerprint": self.fingerprint()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "TextEncoder":
        """Return the encoder that ``state_dict`` was called on. Torch's global generator does not change.

        Raises:
            CheckpointError: If weights that are not included are missing or have changed.
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
        """Return the encoder itself: it never changes, and may be larger than the object that holds it."""
        return self


def _key_of(spec: TextEncoderConfig) -> str | None:
    reading = spec.captions
    folder = Path(spec.name_or_path or "")
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
    """Latest embeddings by caption, negative or not, on one device, limited by their number of bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self._held: OrderedDict[tuple[str, bool], TextEmbedding] = OrderedDict()

    def get(self, caption: tuple[str, bool]) -> TextEmbedding | None:
        if caption in self._held:
            self._held.move_to_end(caption)
        return self._held.get(caption)

    def put(self, caption: tuple[str, bool], embedding: TextEmbedding) -> None:
        self._held[caption] = embedding
        self.bytes += _size(embedding)
        while self.bytes > self.limit:
            self.bytes -= _size(self._held.popitem(last=False)[1])


def _size(embedding: TextEmbedding) -> int:
    return sum(part.nbytes for part in embedding if part is not None)


def _copied(network: nn.Module) -> nn.Module:
    """Return a copy of a network. In a plan, where tensors have no values, those of the copy have none, either."""
    if not fakes_are_made():
        return copy.deepcopy(network)
    with no_dispatch_modes():
        made = copy.deepcopy(network)
    for module in made.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter), parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer))
    return made
