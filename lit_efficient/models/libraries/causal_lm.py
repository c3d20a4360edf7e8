"""Language models of transformers: weights from a hub or a folder, or random weights for a configuration.

A folder's weights are read from safetensors into a model that was built on the meta device, so that they are in memory
only once. Code in a repository is never run.

Costs: the model's memory, 4, 2 or about 0.5 bytes per parameter in float32, bfloat16 or NF4
Source: https://huggingface.co/docs/transformers/main/en/main_classes/model.
"""

import contextlib
import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lit_efficient.distributed.deferred_draws import DeferredDraws
from lit_efficient.distributed.weight_slices import Waiting, stored_places
from lit_efficient.errors import CheckpointError, ConfigurationError, check_installed, checks_types, refusal
from lit_efficient.files.checkpoints import missing_folder
from lit_efficient.files.sums import check_sums
from lit_efficient.internals.bitsandbytes_cpu import keep_unpacked
from lit_efficient.internals.hugging_face import (
    causal_model_of,
    from_config,
    language_auto_class,
    model_class_of,
    take_generation,
)
from lit_efficient.internals.hugging_face_loading import Replacing, empty_from_config, replacing_config
from lit_efficient.internals.torch_fake import detect_fake_mode
from lit_efficient.internals.torch_modules import exchange
from lit_efficient.models.libraries.config_fields import (
    check_bounds,
    check_names,
    check_names_class,
    check_values,
    check_whole,
    files_variant,
    library_errors,
)
from lit_efficient.models.libraries.gguf_file import is_gguf, read_model, read_tokenizer, stored_config
from lit_efficient.models.probes.read_weights import read_layers
from lit_efficient.surgery import NEW_ROWS, WAITS, match_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Primitive = bool | int | float | str | None
_Group = Primitive | list[Primitive] | dict[str, Primitive | list[Primitive]]  # such as rope_parameters
Field = Primitive | list[Primitive] | list[list[Primitive]] | dict[str, _Group]
DRAWN = "drawn_weights"  # attribute of a network: names of the weights that its files lack, which were drawn
_KEPT = 2  # maximum number of rows of a table that no position uses: OPT's first two, RoBERTa's for padding


@dataclass(frozen=True)
class Head:
    """Model of transformers around a body: its auto class, and fields of the configuration that describe the head."""

    auto: str | None = None  # None: that of a language model, of text or of images and text
    fields: Mapping[str, Any] = field(default_factory=dict)

    def auto_class(self, config: Any) -> Any:
        """Return the auto class of transformers that builds a configuration."""
        import transformers

        if self.auto is None:
            return language_auto_class(config)
        return getattr(transformers, self.auto)

    def describe(self, config: Any) -> None:
        """Set the fields of the head in a configuration, in place."""
        for name, value in self.fields.items():
            setattr(config, name, value)


CAUSAL = Head()


@checks_types
@dataclass(frozen=True)
class CausalLMConfig:
    """Language model of transformers, of text or of images and text, by name or by configuration.

    It is causal for `LanguageModeling` and the tasks derived from it. `TextLabelling` and `TextEmbedding` also take
    encoders.

    Args:
        name_or_path: a name on a hub, a local folder or a GGUF file, whose weights become floats; None builds the model
            from ``config_fields`` alone.
        config_fields: fields that replace those of the named model's configuration; without ``name_or_path`` the whole
            configuration, with ``model_type`` (``llama``, ``qwen3``, ...). Without ``vocab_size`` it is taken from the
            data. Models of images and text have the fields of their parts in ``text_config`` and ``vision_config``.
        random_weights: draw new weights although ``name_or_path`` has some.
        revision: branch, tag or commit of a hub's repository; only a commit never changes.
        dtype: number format of the weights; ``auto`` is the format of the files.
        quantize: load the linear layers in 4 bits (NF4, double quantisation) or 8, so that the float weights are never
            in memory as a whole; the head stays in float. Only for weights that are loaded; use `QuantizeBase` for
            random ones.
        resize_vocabulary: add a row to embeddings and head for each token id of the data that the model lacks; a new
            row starts as the mean of the others. With LoRA, ``trainable_token_indices`` or ``modules_to_save`` lets
            them train.
        attention: attention kernel by transformers' name: ``sdpa``, ``eager``, ``flash_attention_2``, ...; None is
            transformers' choice.
        frozen: parts of the network that do not train, such as ``vision_tower`` or ``model.connector``: regular
            expressions for the ends of dotted names. Adapters on ``all-linear`` layers leave them out.
    """

    name_or_path: str | None = None
    config_fields: dict[str, Field] | None = None
    random_weights: bool = False
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    quantize: Literal["nf4", "int8"] | None = None
    attention: str | None = None
    resize_vocabulary: bool = False
    frozen: Sequence[str] = ()

    def __post_init__(self) -> None:
        owner = "CausalLMConfig"
        if self.name_or_path is None:
            check_names_class(owner, "model_type", self.config_fields or {})
        check_installed(owner, "transformers", *(["bitsandbytes"] if self.quantize else []))
        if is_gguf(self.name_or_path) and self.quantize is not None:
            allowed = "null for a GGUF file; add QuantizeBase to trainer.callbacks instead"
            raise refusal(owner, "quantize", allowed, self.quantize)
        if self.draws_weights and self.quantize is not None:
            raise ConfigurationError(
                f"{owner}: quantize is for weights that are loaded, got {self.quantize!r} with random ones; "
                "add QuantizeBase to trainer.callbacks instead."
            )
        if self.draws_weights and self.dtype == "auto":
            raise refusal(owner, "dtype", "a format by name for random weights", self.dtype)

    @property
    def draws_weights(self) -> bool:
        """Return whether the weights are random."""
        return self.name_or_path is None or self.random_weights

    @property
    def takes_vocabulary(self) -> bool:
        """Return whether the number of token ids is taken from the data."""
        fields = self.config_fields or {}
        text = fields.get("text_config")
        return self.draws_weights and "vocab_size" not in {**fields, **(text if isinstance(text, dict) else {})}


def resolve(spec: CausalLMConfig, from_data: Mapping[str, int] | None = None) -> "PretrainedConfig":
    """Return the whole configuration of the model that the user asked for.

    Args:
        spec: Description of the model.
        from_data: ``vocab_size`` and ids of special tokens (``eos_token_id``, ...), used for random weights where
            ``spec.config_fields`` does not set them.

    Raises:
        ConfigurationError: for a name that has no configuration, or an unknown model type or field.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    changed = dict(spec.config_fields or {})
    stored: dict[str, Any] = {}
    if spec.name_or_path is not None:
        stored = _stored(spec)
    kind = str((stored or changed).get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise refusal("CausalLMConfig", "model_type", "a type that transformers knows", kind)
    known = CONFIG_MAPPING[kind]
    declared = declared_fields(known)
    check_values("CausalLMConfig", changed, declared_defaults(known))
    if spec.draws_weights and "text_config" in known.sub_configs:
        changed["text_config"] = {**stored.get("text_config", {}), **(from_data or {}), **_part(changed, "text_config")}
    elif spec.draws_weights:
        own = {name: value for name, value in (from_data or {}).items() if name in declared}  # a family may lack some
        changed = own | changed
    for name in known.sub_configs:
        if name in changed and isinstance(stored.get(name), Mapping):
            changed[name] = {**stored[name], **_part(changed, name)}
    if "num_hidden_layers" in changed:
        stored.pop("layer_types", None)  # transformers derives it from the new number of layers
    parts = [f"name_or_path {spec.name_or_path!r}"] * (spec.name_or_path is not None)
    parts += ["config_fields"] * bool(changed)
    with library_errors(f"CausalLMConfig: {' and '.join(parts)} do not make a {kind}", changed):
        config = known(**{k: v for k, v in {**stored, **changed}.items() if k != "model_type"})
        rows = config.get_text_config().vocab_size
    if not isinstance(rows, int):
        raise refusal("CausalLMConfig", "vocab_size", "a whole number", rows)
    undeclared = set(changed) - declared
    if undeclared:  # building the model is slow, so that it is asked for undeclared names only
        check_names("CausalLMConfig", sorted(undeclared - _read_names(config)), declared, f"the model type {kind}")
    return config


def _part(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the fields of a part of a model, such as ``text_config``."""
    found = fields.get(name, {})
    if not isinstance(found, Mapping):
        raise refusal("CausalLMConfig", f"config_fields.{name}", "a mapping of fields", found)
    return dict(found)


def declared_defaults(kind: Any) -> dict[str, Any]:
    """Return the defaults of the fields of a configuration class of transformers."""
    fields = getattr(kind, "__dataclass_fields__", {})
    return {name: field.default for name, field in fields.items()}


def declared_fields(kind: Any) -> set[str]:
    """Return the names of the fields that a configuration class of transformers declares."""
    parameters = inspect.signature(kind.__init__).parameters
    return {*dir(kind), *getattr(kind, "__dataclass_fields__", ()), *kind.attribute_map, *parameters}


def _read_names(config: "PretrainedConfig") -> set[str]:
    """Return the names that a model reads from its configuration while it is built; some are declared nowhere."""
    asked = set[str]()
    kind = type(config)

    class Asked(kind):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            asked.add(name)
            return super().__getattribute__(name)

    model = causal_model_of(config)
    if model is not None:
        seen = copy.copy(config)
        seen.__class__ = Asked
        with torch.device("meta"):
            from_config(model, seen)
    return asked


def _stored(spec: CausalLMConfig) -> dict[str, Any]:
    from transformers import PretrainedConfig

    missing = None if is_gguf(spec.name_or_path) else missing_folder(spec.name_or_path or "")
    if missing is not None:
        raise ConfigurationError(f"CausalLMConfig: name_or_path: {missing}")
    check_sums(spec.name_or_path, weights=False)
    with library_errors(f"CausalLMConfig: name_or_path {spec.name_or_path!r} has no configuration that can be read"):
        if is_gguf(spec.name_or_path):
            return stored_config(str(spec.name_or_path), spec.config_fields or ())
        stored, _ = PretrainedConfig.get_config_dict(spec.name_or_path or "", revision=spec.revision)
        return dict(stored)


def build(
    spec: CausalLMConfig,
    from_data: Mapping[str, int] | None = None,
    replacing: Replacing | None = None,
    head: Head = CAUSAL,
) -> "PreTrainedModel":
    """Build the model, in training mode. Random weights come from torch's global generator.

    Args:
        spec: Description of the model.
        from_data: As in :func:`resolve`.
        replacing: Replaces linear layers as soon as their weights are read. It is not used for random weights, weights
            that ``spec`` or the files quantise, and embeddings that grow: the caller then has to replace layers later.
        head: Model around the body. Weights of the head that the files lack are drawn, and named in the attribute
            ``drawn_weights``.

    Raises:
        ConfigurationError: if the data has more token ids than the model has rows, or the model cannot be loaded.
    """
    config = resolve(spec, from_data)
    head.describe(config)
    kind = head.auto_class(config)
    vocab_size = (from_data or {}).get("vocab_size")
    rows = _embedded(config, head, vocab_size or 0)
    grows = vocab_size is not None and vocab_size > rows and not _has_tokens_without_rows(spec, vocab_size)
    if grows and not (spec.resize_vocabulary and not spec.draws_weights):
        raise ConfigurationError(
            f"CausalLMConfig: the data has {vocab_size} token ids, the model {rows}: use the model's own tokenizer, or "
            "set resize_vocabulary for one with added tokens."
        )
    options: dict[str, Any] = {}
    if spec.attention is not None:
        options["attn_implementation"] = spec.attention
    dtype: Any = spec.dtype
    if dtype != "auto":
        dtype = getattr(torch, dtype)
    mxfp4 = _holds_mxfp4(config)
    plain = not grows and spec.quantize is None and (mxfp4 or getattr(config, "quantization_config", None) is None)
    replaced = None
    plain = plain and not is_gguf(spec.name_or_path)  # transformers reads such a file by a quantiser of its own
    if replacing is not None and plain and torch.get_default_device().type != "meta":
        replaced = replacing_config(replacing, ("gate_up_proj", "down_proj") if mxfp4 else ())
        config = copy.deepcopy(config)
        vars(config).pop("quantization_config", None)  # of MXFP4, whose quantiser would be used instead
    fakes = detect_fake_mode() is not None  # tensors without memory, into which no file is read
    if fakes and spec.quantize is not None:
        raise refusal("plan", "model.quantize", "null (use QuantizeBase, which can be planned)", spec.quantize)
    if spec.quantize is not None and mxfp4:
        allowed = "null for files in MXFP4 (add QuantizeBase, which quantises the layers beside the experts)"
        raise refusal("CausalLMConfig", "quantize", allowed, spec.quantize)
    named = spec.name_or_path or "the model"
    with library_errors(f"CausalLMConfig: {named} cannot be built", spec.config_fields):
        if spec.draws_weights or fakes:
            if fakes and dtype == "auto":
                dtype = config.dtype or torch.float32
            model = kind.from_config(config, dtype=dtype, trust_remote_code=False, **options)
        else:
            check_sums(spec.name_or_path)
            check_bounds("CausalLMConfig", spec.name_or_path, config, kind)
            reports = head != CAUSAL and not is_gguf(spec.name_or_path)
            if reports:
                options["output_loading_info"] = True
            model = read_model(
                kind,
                spec.name_or_path or "",
                config=config,
                revision=spec.revision,
                variant=files_variant(spec.name_or_path or "", "CausalLMConfig"),
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                quantization_config=_quantization(spec, dtype, config, head) if replaced is None else replaced,
                **options,
            )
            if reports:
                model, loading = model
                model.__dict__[DRAWN] = sorted(loading["missing_keys"])
    check_whole("CausalLMConfig", model, spec.config_fields or {})
    if grows:
        grow_vocabulary(model, int(vocab_size or 0))
    keep_unpacked(model)
    return model.train()


def stored_folder(spec: CausalLMConfig) -> Path:
    """Return the folder of a named model's files, or its GGUF file; files on a hub are downloaded.

    Raises:
        OSError, ValueError: If the files are not available.
    """
    folder = Path(spec.name_or_path or "")
    if folder.is_dir() or is_gguf(spec.name_or_path):
        return folder
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    return Path(snapshot_download(str(spec.name_or_path), revision=spec.revision, allow_patterns=wanted))


def _has_tokens_without_rows(spec: CausalLMConfig, number: int) -> bool:
    """Return whether the base's own tokenizer has ``number`` tokens, more than the base has rows.

    Tokenizers of small models may have tokens that only larger ones of the family know: Gemma 3's that of images.
    """
    if spec.resize_vocabulary or spec.draws_weights:
        return False
    with contextlib.suppress(OSError, ValueError, ImportError):
        return len(read_tokenizer(spec.name_or_path or "", revision=spec.revision)) >= number
    return False


def build_empty(spec: CausalLMConfig, from_data: Mapping[str, int] | None = None) -> "PreTrainedModel | None":
    """Build the model without memory for its weights, which :func:`fill_waiting` reads after sharding.

    Returns:
        The model in training mode. ``None`` where :func:`build` does more than read files under the network's own
        names.
    """
    if spec.draws_weights or spec.quantize is not None or is_gguf(spec.name_or_path):
        return None
    config = resolve(spec, from_data)
    wanted = (from_data or {}).get("vocab_size", 0)
    grows = wanted > _embedded(config, CAUSAL, wanted)
    if grows or getattr(config, "quantization_config", None) is not None:
        return None
    try:
        folder = stored_folder(spec)
        stored = stored_places(folder).keys()
    except (OSError, ValueError, CheckpointError):
        return None  # `build` raises the error
    dtype = getattr(config, "dtype", None) if spec.dtype == "auto" else getattr(torch, spec.dtype)
    options: dict[str, Any] = {"dtype": dtype or torch.float32, "trust_remote_code": False}
    if spec.attention is not None:
        options["attn_implementation"] = spec.attention
    with torch.device("cpu"), DeferredDraws():
        model = empty_from_config(language_auto_class(config), config, **options)
    exchange(model, lambda p: p.to("meta"))  # DeferredDraws has made small tensors with memory
    # A weight that is tied here may be stored with other numbers. `build` checks that.
    needed = {name for name in model.state_dict() if name not in model.all_tied_weights_keys}
    if needed != stored or any(buffer.device.type == "meta" for buffer in model.buffers()):
        return None
    dtypes = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
    model.__dict__[WAITS] = Waiting(str(folder), dtypes)
    settings = folder / "generation_config.json"
    if settings.is_file():  # `from_pretrained` reads it
        take_generation(model, settings.read_text("utf-8"))
    keep_unpacked(model)
    return model.train()


def _embedded(config: Any, head: Head, wanted: int) -> int:
    """Return the number of token ids that a model reads: ``vocab_size``, or more with rows for tokens of images.

    The model is built without weights if ``wanted`` is above ``vocab_size``.
    """
    rows = int(config.get_text_config().vocab_size)
    if wanted <= rows:
        return rows
    with torch.device("meta"):
        model = from_config(head.auto_class(config), copy.deepcopy(config))
    return int(model.get_input_embeddings().weight.shape[0])


def freeze_parts(spec: CausalLMConfig, network: nn.Module) -> None:
    """Exclude the parts that ``spec.frozen`` names from training, in place.

    Raises:
        ConfigurationError: If a pattern matches no parameter.
    """
    if spec.frozen:
        for _, parameter in match_parameters(network, spec.frozen, who="CausalLMConfig: frozen"):
            parameter.requires_grad_(False)


def format_advice(spec: CausalLMConfig) -> str | None:
    """Return a sentence on weights that take more memory than in their files, or None."""
    if spec.draws_weights:
        return None
    stored = _stored(spec)
    if _holds_mxfp4(stored):
        dtype = "bfloat16" if spec.dtype == "auto" else spec.dtype
        return (
            f"{spec.name_or_path} holds its experts in MXFP4 (0.53 bytes per weight), which has no backward pass: they "
            f"are dequantised to {dtype}, or become nf4 one stack at a time with QuantizeBase(experts=True)"
        )
    kinds = (part.get(key) for part in (stored, stored.get("text_config") or {}) for key in ("dtype", "torch_dtype"))
    kind = next(filter(None, kinds), None)
    if spec.dtype != "float32" or spec.quantize is not None or kind not in ("bfloat16", "float16"):
        return None
    return (
        f"{spec.name_or_path} holds {kind}, and the model is built in float32, which takes twice the memory: set "
        "dtype: auto to keep the format"
    )


def _holds_mxfp4(config: Any) -> bool:
    """Return whether the files of a model hold MXFP4 (GPT-OSS), by its configuration as an object or a mapping."""
    fields = config if isinstance(config, Mapping) else config.to_dict()
    return (fields.get("quantization_config") or {}).get("quant_method") == "mxfp4"


@torch.no_grad()
def grow_vocabulary(model: "PreTrainedModel", size: int) -> None:
    """Add rows up to ``size`` to the embeddings and the head, tied or not, in place. A new row is the mean of the old
    ones.

    A new token is then at first as probable as the average token, and the proportions of the others do not change.
    Source: Hewitt (2021), https://nlp.stanford.edu/~johnhew/vocab-expansion.html.
    """
    rows = int(model.config.get_text_config().vocab_size)
    model.resize_token_embeddings(size, mean_resizing=False)
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    for layer in filter(None, layers):
        for parameter in layer.parameters(recurse=False):
            parameter[rows:] = parameter[:rows].float().mean(0).to(parameter.dtype)
    model.__dict__[NEW_ROWS] = list(range(rows, size))


def _quantization(spec: CausalLMConfig, dtype: Any, config: "PretrainedConfig", head: Head) -> Any:
    if spec.quantize is None and _holds_mxfp4(config):
        from transformers.utils.quantization_config import Mxfp4Config

        # Otherwise it depends on the packages of the machine whether layers without a backward pass are built.
        return Mxfp4Config(dequantize=True)
    if spec.quantize is None:
        return None
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.base import get_keys_to_not_convert

    kept: list[str] = []

    def make() -> nn.Module:
        model = from_config(head.auto_class(config), copy.deepcopy(config), trust_remote_code=False)
        kept.extend(get_keys_to_not_convert(model))
        return model

    skipped = sorted({*read_layers(make), *kept})
    if spec.quantize == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    compute = torch.float32 if dtype == "auto" else dtype
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute,
        llm_int8_skip_modules=skipped,
    )  # fmt: skip


def read_config(text: str) -> dict[str, Any]:
    """Return the fields of a configuration from its JSON text, in which transformers writes infinity as an object."""

    def floats(fields: dict[str, Any]) -> Any:
        if fields.keys() == {"__float__"}:
            return float(fields["__float__"])
        return fields

    found: dict[str, Any] = json.loads(text, object_hook=floats)
    return found


def from_json(
    config: Mapping[str, Any], dtype: torch.dtype = torch.float32, whole: bool = True, head: Head = CAUSAL
) -> "PreTrainedModel":
    """Build a model for the weights of a checkpoint, from the configuration stored in it.

    Args:
        config: The configuration.
        dtype: Number format of the weights.
        whole: Whether the checkpoint holds all weights, so that none have to be initialised.
        head: Model around the body.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(config["model_type"])
    fields = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    made = CONFIG_MAPPING[kind](**fields)
    make = empty_from_config if whole else from_config
    return make(head.auto_class(made), made, dtype=dtype, trust_remote_code=False)


def reads_images(spec: CausalLMConfig) -> bool:
    """Return whether the described model reads images, too: ``pixel_values`` of its ``forward``."""
    kind = causal_model_of(resolve(spec))
    return kind is not None and "pixel_values" in inspect.signature(kind.forward).parameters


def positions_of(spec: CausalLMConfig, head: Head = CAUSAL) -> int | None:
    """Return :func:`learned_positions` of the described model, which is built without weights if its configuration does
    not decide.
    """
    config = resolve(spec)
    text: Any = config.get_text_config()
    kind = model_class_of(head.auto_class(config), config)
    if kind is None or getattr(text, "max_position_embeddings", None) is None or getattr(text, "rope_parameters", None):
        return None
    with torch.device("meta"):
        return learned_positions(from_config(kind, config))


def learned_positions(network: Any) -> int | None:
    """Return the number of positions of a network with a learned table of positions (GPT-2, OPT); ``None`` without one.

    A lookup past the end of the table fails. Rotary positions (Llama) and ALiBi (BLOOM) have no such limit.

    Example:
        >>> from transformers import OPTConfig, OPTForCausalLM
        >>> sizes = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 8, "num_hidden_layers": 1}
        >>> learned_positions(OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=1, max_position_embeddings=16)))
        16
    """
    most = getattr(network.config.get_text_config(), "max_position_embeddings", None)
    words = network.get_input_embeddings()
    if most is None:
        return None
    for part in network.modules():
        if isinstance(part, nn.Embedding) and part is not words and 0 <= part.num_embeddings - most <= _KEPT:
            kept = 0
            if part.padding_idx is not None:  # RoBERTa counts positions from after the padding's row
                kept = part.padding_idx + 1
            return part.num_embeddings - int(getattr(part, "offset", kept))
    return None


def rotary_length(config: Any) -> int | None:
    """Return the number of positions for which a model's rotary embedding is made, or ``None`` without such an end.

    A rotary embedding computes any position, so that longer rows do not fail. Dynamic scaling is made for longer rows.

    Example:
        >>> from transformers import LlamaConfig
        >>> rotary_length(LlamaConfig(max_position_embeddings=64))
        64
        >>> scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        >>> rotary_length(LlamaConfig(max_position_embeddings=64, rope_parameters=scaled)) is None
        True
    """
    text = config.get_text_config()
    rotary = getattr(text, "rope_parameters", None)
    if not rotary:
        return None
    # One description for all layers, or one for each kind of layer.
    kinds = [rotary, *(value for value in rotary.values() if isinstance(value, dict))]
    if any("dynamic" in str(kind.get("rope_type")) for kind in kinds):
        return None
    most = getattr(text, "max_position_embeddings", None)
    if isinstance(most, int) and most > 0:
        return most
    return None
