"""One text encoder of transformers with its tokenizer: description, loading, embedding and digest."""

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, check_choice, check_number, checks_types, did_you_mean, refusal
from lit_efficient.files.sums import check_sums
from lit_efficient.files.tensors import load_tensors
from lit_efficient.internals.hugging_face import bars_on_terminals, from_config
from lit_efficient.internals.torch_dispatch import fakes_are_made
from lit_efficient.models.libraries.caption_tokens import CaptionTokens, load_tokenizer, replace_length
from lit_efficient.models.libraries.causal_lm import Primitive, declared_defaults, declared_fields
from lit_efficient.models.libraries.config_fields import (
    check_bounds,
    check_names,
    check_names_class,
    check_values,
    files_variant,
    library_errors,
)
from lit_efficient.models.libraries.diffusers_model import check_complete, check_single_file
from lit_efficient.models.libraries.pipeline_folder import TextKind
from lit_efficient.models.libraries.tiny_pipelines import local_name
from lit_efficient.surgery import moved, own_draws

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_OWNER = "TextEncoderConfig"
_FINAL_NORMS = ("text_model.final_layer_norm", "final_layer_norm", "encoder.final_layer_norm", "norm", "final_norm")


@checks_types
@dataclass(frozen=True)
class CaptionReading:
    """Options of a caption's tokens.

    Args:
        tokenizer: a name on a hub, a folder or a ``tokenizer.json``; ``bytes`` for one token per byte. None is the
            tokenizer of the encoder's ``name_or_path``, or ``bytes`` for an encoder without ``name_or_path``.
        subfolder: folder of the tokenizer in a pipeline, such as ``tokenizer``.
        padding: whether the network sees the padding: ``hidden`` or ``seen``; ``auto`` is the setting of the encoder's
            own training, ``seen`` for CLIP and ``hidden`` for the others.
        padding_side: side of the padding.
        lowercase: remove spaces at both ends and capital letters, as PixArt and Sana do.
        instruction: text before each caption except negative prompts, as in Sana. Of its tokens the network sees the
            first one only.
        around: text before and after each caption; ``chat`` is a user's turn of the tokenizer's chat template.
        drop: number of tokens at the beginning that the network does not see, beyond ``max_length``.
    """

    tokenizer: str | None = None
    subfolder: str = ""
    padding: Literal["auto", "hidden", "seen"] = "auto"
    padding_side: Literal["right", "left"] = "right"
    lowercase: bool = False
    instruction: str = ""
    around: list[str] | Literal["chat"] | None = None
    drop: int = 0

    def __post_init__(self) -> None:
        check_choice(_OWNER, "captions.padding", self.padding, ("auto", "hidden", "seen"))
        check_choice(_OWNER, "captions.padding_side", self.padding_side, ("right", "left"))
        check_number(_OWNER, "captions.drop", self.drop, least=0, whole=True)
        if isinstance(self.around, list) and len(self.around) != 2:
            raise refusal(_OWNER, "captions.around", "two texts, chat or null", self.around)


@checks_types
@dataclass(frozen=True)
class TextEncoderConfig:
    """Text encoder of transformers, by name or by configuration.

    Args:
        name_or_path: a name on a hub or a local folder, of the encoder or of a pipeline (with ``subfolder``); or
            ``tiny:FAMILY`` (sd15, sdxl, sd3, flux), a tiny random pipeline that is built offline; None builds the
            encoder from ``config_fields`` alone, with random weights (always the same ones).
        config_fields: fields that replace those of the named model's configuration; without ``name_or_path`` the whole
            configuration, with ``model_type`` (``clip_text_model``, ``t5``, ...). ``architectures`` chooses the class:
            ``[CLIPTextModelWithProjection]``.
        subfolder: folder of the encoder in a pipeline: ``text_encoder``.
        max_length: tokens of a caption, special tokens included; longer captions are truncated, shorter ones padded.
            None is the length of the pipeline, or 77.
        chunks: number of chunks of ``max_length`` tokens in which CLIP encodes a caption, each with its own begin and
            end token. Their states are concatenated; the pooled embedding is that of the first chunk. Shorter captions
            are filled up with empty chunks. More than 1 only for CLIP alone and the pipelines ``sd`` and ``sdxl``.
        layer: layer whose output is used: -1 is the last, after the final norm; -2 the one before it, and so on.
        final_norm: apply the final norm to an earlier layer.
        captions: the tokenizer and its padding.
        pipeline: use all encoders of a pipeline's folder and join them as it does: ``sd``, ``sdxl``, ``sd3``,
            ``sd3_clip`` (without T5), ``flux``, ``pixart``, ``sana``, ``qwen_image`` or ``z_image``. None with a
            pipeline's folder and no ``subfolder`` is the kind of that folder. Options that the pipeline fixes are then
            left unset: tokenizers, subfolders, layers (``sd`` leaves the layer free), padding; ``max_length`` is that
            of T5, Gemma or Qwen.
        revision: branch, tag or commit of a hub's repository; only a commit never changes.
        dtype: number format of the weights and of the embeddings.
        config: folder or name of the pipeline that has the configurations and tokenizers of a checkpoint in one file.
        variant: variant of the weights, such as ``fp16``; None takes the files without one, or a folder's only one.
    """

    name_or_path: str | None = None
    config_fields: dict[str, Primitive | list[Primitive] | dict[str, Primitive]] | None = None
    subfolder: str = ""
    max_length: int | None = None
    chunks: int = 1
    layer: int = -1
    final_norm: bool = False
    captions: CaptionReading = CaptionReading()
    pipeline: TextKind | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    config: str | None = None
    variant: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name_or_path", local_name(self.name_or_path))
        check_single_file(_OWNER, self.name_or_path, self.config)
        if self.pipeline is not None:
            self._check_pipeline()
        elif self.name_or_path is None:
            check_names_class(_OWNER, "model_type", self.config_fields or {})
            if find_spec("transformers"):
                _check_fields(self.config_fields or {})
        check_number(_OWNER, "max_length", self.max_length, least=2, whole=True, null=True)
        check_number(_OWNER, "chunks", self.chunks, least=1, whole=True)
        check_number(_OWNER, "layer", self.layer, most=-1, whole=True)
        if self.final_norm and self.layer == -1:
            raise refusal(_OWNER, "final_norm", "false for layer -1, which includes the final norm", self.final_norm)

    @property
    def place(self) -> str | None:
        """Return the folder or name from which configurations and tokenizers are read."""
        return self.config or self.name_or_path

    def _check_pipeline(self) -> None:
        check_choice(_OWNER, "pipeline", self.pipeline, get_args(TextKind), null=True)
        free = {"name_or_path", "max_length", "pipeline", "revision", "dtype", "config", "variant"}
        if self.pipeline in ("sd", "sdxl"):
            free.add("chunks")
        if self.pipeline == "sd":
            free |= {"layer", "final_norm"}
        fixed = [f.name for f in fields(self) if f.name not in free and getattr(self, f.name) != f.default]
        if fixed:
            raise refusal(_OWNER, "pipeline", f"null with {', '.join(fixed)}, which a pipeline fixes", self.pipeline)
        if self.name_or_path is None:
            raise refusal(_OWNER, "name_or_path", "the pipeline's folder or name", None)


class TextEmbedding(NamedTuple):
    """Embeddings of B captions (or of one, without the first dimension).

    Args:
        hidden: One vector per token, [B, L, D].
        mask: True for tokens that the network may see, [B, L] bool.
        pooled: One vector per caption, [B, P]; None for an encoder without.
    """

    hidden: Tensor
    mask: Tensor
    pooled: Tensor | None


class TextNetwork:
    """Encoder with its tokenizer. The network is frozen and put into evaluation mode."""

    def __init__(self, spec: TextEncoderConfig, network: nn.Module, tokens: CaptionTokens) -> None:
        self.spec = spec
        self.network: Any = network.eval().requires_grad_(False)
        self.tokens = tokens
        self._instructed: CaptionTokens | None = None  # of captions with the instruction
        if spec.captions.instruction:
            self._instructed = replace_length(tokens, tokens.length + self._instruction_tokens() - 2)

    @classmethod
    def load(cls, spec: TextEncoderConfig) -> "TextNetwork":
        """Load the encoder that ``spec`` names, on the CPU. Torch's global generator does not change.

        Raises:
            ConfigurationError: If the encoder or its tokenizer cannot be built or loaded.
        """
        reading = spec.captions
        name = reading.tokenizer or spec.place or "bytes"
        subfolder = reading.subfolder if reading.tokenizer != "bytes" else ""
        length = spec.max_length
        if length is not None:
            length += reading.drop
        around = None if reading.around == "chat" else reading.around or ("", "")
        tokens = load_tokenizer(name, subfolder, spec.revision, length, reading.padding_side, around)
        config = _configuration(spec, tokens)
        with library_errors(f"{_OWNER}: the encoder {spec.name_or_path or config.model_type} cannot be built"):
            needs_weights = spec.name_or_path is not None and not fakes_are_made()  # a plan needs shapes alone
            network = _loaded(spec, config) if needs_weights else _drawn(config, spec.dtype)
            loaded = cls(spec, network, tokens)
            loaded._check()
        return loaded

    def embed(self, captions: Sequence[str], device: torch.device, negative: bool = False) -> TextEmbedding:
        """Return embeddings of n captions, or negative prompts, [n, ...], on ``device``."""
        tokens = self.tokens
        if self.spec.captions.lowercase:
            captions = [caption.lower().strip() for caption in captions]
        instructed = self._instructed is not None and not negative
        if instructed:
            assert self._instructed is not None
            tokens = self._instructed
            captions = [self.spec.captions.instruction + caption for caption in captions]
        count = self.spec.chunks
        chunks = [chunk for caption in captions for chunk in tokens.encode_chunks(caption, count)]
        ids, mask = (moved(torch.stack(rows), device) for rows in zip(*chunks))
        if not self.hides_padding:
            mask = torch.ones_like(mask)
        options: dict[str, Any] = {"attention_mask": mask} if self.hides_padding else {}
        if self.spec.layer != -1:
            options["output_hidden_states"] = True
        with torch.autocast(device.type, enabled=False):  # a training step must compute the same numbers as a cache
            output = self.network.to(device)(input_ids=ids, return_dict=True, **options)
        if self.spec.layer == -1:
            hidden = output.last_hidden_state
        else:
            hidden = output.hidden_states[self.spec.layer]
            if self.spec.final_norm:
                hidden = self._final_norm()(hidden)
        pooled = getattr(output, "text_embeds", None)
        if pooled is None:
            pooled = getattr(output, "pooler_output", None)
        if instructed:
            last = 1 - self.tokens.length
            hidden = torch.cat([hidden[:, :1], hidden[:, last:]], dim=1)
            mask = torch.cat([mask[:, :1], mask[:, last:]], dim=1)
        if count > 1:
            hidden = hidden.unflatten(0, (-1, count)).flatten(1, 2)
            mask = mask.unflatten(0, (-1, count)).flatten(1, 2)
            pooled = None if pooled is None else pooled[::count]
        drop = self.spec.captions.drop
        return TextEmbedding(hidden[:, drop:], mask[:, drop:], pooled)

    def add_words(self, words: Mapping[str, Sequence[str]], who: str) -> None:
        """Let captions have new words. Arguments and errors are those of `CaptionTokens.with_words`."""
        if self.spec.captions.lowercase:
            capital = [word for word in words if word != word.lower()]
            if capital:
                allowed = f"in small letters for {type(self.network).__name__}, whose captions lose their capital ones"
                raise refusal(who, "the words", allowed, capital)
        self.tokens = self.tokens.with_words(words, who)
        if self._instructed is not None:
            self._instructed = replace_length(self.tokens, self._instructed.length)

    @property
    def is_clip(self) -> bool:
        """Return whether the network is a text encoder of CLIP."""
        return bool(self.network.config.model_type == "clip_text_model")

    @property
    def is_instructed(self) -> bool:
        """Return whether captions follow an instruction, and negative prompts do not."""
        return self._instructed is not None

    def unread(self, pooled: bool) -> list[nn.Module]:
        """Return the parts after the hidden state that is read. ``pooled`` also reads the output of the last layer."""
        config = self.network.config
        if pooled or self.spec.layer == -1:
            return []
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        count = text.num_hidden_layers
        lists = [part for part in self.network.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
        parts = [*lists[0][count + 1 + self.spec.layer :]]
        named = dict(self.network.named_modules())
        norms = [named[name] for name in _FINAL_NORMS if name in named]
        return parts if self.spec.final_norm else parts + norms[:1]

    @property
    def hides_padding(self) -> bool:
        """Return whether masks exclude padding; otherwise they are all true."""
        config = self.network.config
        if self.spec.captions.padding == "auto":
            return not self.is_clip or bool(getattr(config, "use_attention_mask", False))
        return self.spec.captions.padding == "hidden"

    def digest(self) -> str:
        """Return a SHA-256 digest of all that an embedding depends on: weights, tokenizer and options."""
        reading = {name: getattr(self.spec, name) for name in ("chunks", "layer", "final_norm", "dtype")}
        prepared = [self.spec.captions.lowercase, self.spec.captions.instruction, self.spec.captions.drop]
        described = [reading, self.hides_padding, prepared, self.tokens.state()]
        digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
        for name, tensor in sorted(self.network.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of the weights."""
        return sum(tensor.nbytes for tensor in self.network.state_dict().values())

    def state_dict(self) -> dict[str, Any]:
        """Return primitives and tensors."""
        return {
            "config": json.loads(self.network.config.to_json_string(use_diff=False)),
            "architecture": type(self.network).__name__,
            "tokenizer": self.tokens.state(),
            "weights": {name: tensor.detach().cpu() for name, tensor in self.network.state_dict().items()},
        }

    @classmethod
    def from_state_dict(cls, spec: TextEncoderConfig, state: dict[str, Any]) -> "TextNetwork":
        """Return the encoder that ``state_dict`` was called on. Torch's global generator does not change."""
        from transformers import AutoConfig

        stored = {key: value for key, value in state["config"].items() if key != "model_type"}
        config = AutoConfig.for_model(state["config"]["model_type"], **stored)
        config.architectures = [state["architecture"]]
        network = _drawn(config, spec.dtype)
        network.load_state_dict(state["weights"])
        return cls(spec, network, CaptionTokens(**state["tokenizer"]))

    def _instruction_tokens(self) -> int:
        from tokenizers import Tokenizer

        return len(Tokenizer.from_str(self.tokens.json).encode(self.spec.captions.instruction).ids)

    def _final_norm(self) -> nn.Module:
        modules = dict(self.network.named_modules())
        return next(modules[name] for name in _FINAL_NORMS if name in modules)

    def _check(self) -> None:
        """Refuse, before any work, options that would fail at the first caption: too many tokens, a missing layer or
        norm.
        """
        config = self.network.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        positions = getattr(text, "max_position_embeddings", None)
        if positions is not None:
            if self.tokens.length > positions:
                allowed = f"at most {positions}, the positions of {type(self.network).__name__}"
                raise refusal(_OWNER, "max_length", allowed, self.tokens.length)
            try:  # RoBERTa reserves positions for padding: it takes two tokens fewer than its configuration says
                real = next(i for i in range(3) if i not in (self.tokens.pad, getattr(text, "pad_token_id", None)))
                with torch.no_grad():
                    self.network(input_ids=torch.full((1, self.tokens.length), real))
            except (IndexError, RuntimeError) as error:
                allowed = f"less than {positions}: {type(self.network).__name__} keeps some of its positions"
                raise refusal(_OWNER, "max_length", allowed, self.tokens.length) from error
        if self.spec.chunks > 1 and not self.is_clip:
            raise refusal(_OWNER, "chunks", f"1 for {type(self.network).__name__}, which is no CLIP", self.spec.chunks)
        layers = getattr(text, "num_hidden_layers", None)
        if layers is not None and self.spec.layer < -1 - layers:
            allowed = f"-1 to {-1 - layers}, as {type(self.network).__name__} has {layers} layers"
            raise refusal(_OWNER, "layer", allowed, self.spec.layer)
        if self.spec.final_norm and not set(_FINAL_NORMS) & set(dict(self.network.named_modules())):
            raise ConfigurationError(
                f"{_OWNER}: final_norm: {type(self.network).__name__} has no final norm with a known name."
            )
        rows = getattr(text, "vocab_size", None)
        if rows is not None and rows < self.tokens.vocab_size:
            raise ConfigurationError(
                f"{_OWNER}: the tokenizer has {self.tokens.vocab_size} token ids and the encoder has {rows}: "
                "use the encoder's own tokenizer."
            )


def _check_fields(fields: dict[str, Any]) -> None:
    """Refuse unknown fields and invalid values when the config is read, because captions may be encoded much later."""
    from transformers import CONFIG_MAPPING

    kind = str(fields["model_type"])
    if kind not in CONFIG_MAPPING:
        allowed = f"a type that transformers knows{did_you_mean(kind, CONFIG_MAPPING).rstrip('?')}"
        raise refusal(_OWNER, "config_fields.model_type", allowed, kind)
    values = {name: value for name, value in fields.items() if name != "model_type"}
    _check_names(kind, values)
    check_values(_OWNER, values, declared_defaults(CONFIG_MAPPING[kind]))
    for name in (name for name in values if name.endswith(("_size", "_heads")) and values[name] == 0):
        raise refusal(_OWNER, f"config_fields.{name}", "a number of at least 1", 0)


def _check_names(kind: str, values: Iterable[str]) -> None:
    from transformers import CONFIG_MAPPING

    declared = declared_fields(CONFIG_MAPPING[kind])  # other fields may be read although they are not declared
    typos = [name for name in values if name not in declared and difflib.get_close_matches(name, declared, 1, 0.8)]
    check_names(_OWNER, typos, declared, f"the model type {kind}")


def _configuration(spec: TextEncoderConfig, tokens: CaptionTokens) -> "PretrainedConfig":
    from transformers import CONFIG_MAPPING, AutoConfig

    values = dict(spec.config_fields or {})
    if spec.name_or_path is not None and (known := str(values.get("model_type"))) in CONFIG_MAPPING:
        _check_names(known, values)
    named = spec.name_or_path or spec.config_fields
    with library_errors(f"{_OWNER}: {named} has no configuration that can be read"):
        if spec.name_or_path is None:
            # Missing special tokens are those of the tokenizer: CLIP pools at the end token.
            special = {"pad_token_id": tokens.pad, "bos_token_id": tokens.end, "eos_token_id": tokens.end}
            values = {"vocab_size": tokens.vocab_size} | special | values
            config = AutoConfig.for_model(str(values.pop("model_type")), **values)
        else:
            check_sums(spec.place, spec.subfolder, weights=False)
            located = {"subfolder": spec.subfolder, "revision": spec.revision, "trust_remote_code": False}
            config = AutoConfig.from_pretrained(str(spec.place), **located)
            for name, value in values.items():
                setattr(config, name, value)
    if config.model_type == "clip":  # a model of images and text
        return config.text_config
    return config


def _architecture(config: "PretrainedConfig") -> Any:
    """Return the class for a configuration that reads text only, if transformers has one."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

    named = next(iter(config.architectures or ()), "")
    if named.startswith("CLIPText"):
        return getattr(transformers, named)
    if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
        return MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)]
    return transformers.AutoModel


def _drawn(config: "PretrainedConfig", dtype: str) -> nn.Module:
    """Build the encoder with random weights, always the same ones."""
    architecture = _architecture(config)
    config.use_cache = False
    with own_draws(0):
        return _reader(architecture, from_config(architecture, config, dtype=getattr(torch, dtype)))


def _loaded(spec: TextEncoderConfig, config: "PretrainedConfig") -> nn.Module:
    architecture = _architecture(config)
    config.use_cache = False
    if spec.config is not None:
        return _from_single_file(spec, architecture)
    check_sums(spec.name_or_path, spec.subfolder)
    check_bounds(_OWNER, spec.name_or_path, config, architecture, spec.subfolder)
    with bars_on_terminals():
        model = architecture.from_pretrained(
            spec.name_or_path,
            config=config,
            subfolder=spec.subfolder,
            revision=spec.revision,
            variant=spec.variant or files_variant(f"{spec.name_or_path}/{spec.subfolder}", _OWNER),
            dtype=getattr(torch, spec.dtype),
            use_safetensors=True,
            trust_remote_code=False,
        )
    return _reader(architecture, model)


def _from_single_file(spec: TextEncoderConfig, architecture: Any) -> nn.Module:
    """Load CLIP or T5 from a checkpoint in one file, which diffusers converts."""
    from diffusers.loaders import single_file_utils as files

    path = Path(str(spec.name_or_path)).expanduser()
    tensors = load_tensors(path)
    described = {"config": spec.config, "subfolder": spec.subfolder, "torch_dtype": getattr(torch, spec.dtype)}
    model: nn.Module
    if files.is_clip_model_in_single_file(architecture, tensors):
        model = files.create_diffusers_clip_model_from_ldm(architecture, tensors, **described)
    elif files.is_t5_in_single_file(tensors):
        model = files.create_diffusers_t5_model_from_checkpoint(architecture, tensors, **described)
    else:
        raise ConfigurationError(
            f"{_OWNER}: {path} has no text encoder {architecture.__name__}: name the folder of one in place of the file"
        )
    check_complete(_OWNER, model, path)
    return _reader(architecture, model)


def _reader(architecture: Any, model: Any) -> nn.Module:
    """Return the encoder of a model of encoder and decoder, or the model itself."""
    whole = architecture.__name__ == "AutoModel" and model.config.is_encoder_decoder
    reader: nn.Module = model.get_encoder() if whole else model
    return reader
