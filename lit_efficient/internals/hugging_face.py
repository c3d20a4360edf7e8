"""Private attributes and functions of transformers, diffusers and datasets.

Checked with transformers 5.23, diffusers 0.42 and datasets 5.2.
"""

import copy
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.wraps import temporarily

_BARS = {
    "transformers.utils.logging": ("_tqdm_active", False),
    "diffusers.utils.logging": ("_tqdm_active", False),
    "transformers.modeling_gguf_pytorch_utils": ("tqdm", lambda rows, **_: rows),
}
"""Modules, and the attribute that switches their progress bars off."""


@contextmanager
def bars_on_terminals() -> Iterator[None]:
    """Context in which these libraries show progress bars only if the standard error is a terminal.

    Their public functions change the bars of downloads, too, and do not restore them.
    """
    with ExitStack() as changed:
        for name, (attribute, value) in _BARS.items():
            module = sys.modules.get(name)
            if module is not None and not sys.stderr.isatty():
                changed.enter_context(temporarily(module, **{attribute: value}))
        yield


def load_saved(path: Path) -> Any:
    """Load a data set that ``Dataset.save_to_disk`` wrote, without reading files outside its folder.

    The files are listed in ``state.json``, under ``_data_files``.

    Raises:
        ConfigurationError: If a listed file is outside the folder.
    """
    import datasets

    for state in sorted(path.rglob("state.json")):
        for file in json.loads(state.read_text("utf-8")).get("_data_files", ()):
            if Path(file["filename"]).name != file["filename"]:
                raise ConfigurationError(f"{state} lists {file['filename']!r}, which leads out of its folder")
    return datasets.load_from_disk(str(path))


def keeps_float32(module: nn.Module) -> bool:
    """Return whether diffusers keeps some modules of a network in float32: ``_keep_in_fp32_modules``."""
    return bool(getattr(module, "_keep_in_fp32_modules", None))


def source_of(module: nn.Module) -> str:
    """Return the name or folder from which transformers or diffusers loaded a model: ``config._name_or_path``."""
    source = getattr(getattr(module, "config", None), "_name_or_path", "")
    return source if isinstance(source, str) else ""


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the class names of the repeated blocks of a diffusers model: ``_repeated_blocks``."""
    return tuple(getattr(module, "_repeated_blocks", None) or ())


def attention_of(config: Any) -> str:
    """Return the attention implementation of a transformers config: ``config._attn_implementation``."""
    return str(config._attn_implementation)


def set_attention(config: Any, name: str) -> None:
    """Set the attention implementation of models that are built from a config: ``config._attn_implementation``."""
    config._attn_implementation = name


def expert_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of stacked experts for which transformers offers several implementations, with their names.

    ``use_experts_implementation`` sets ``_is_expert_parallel`` on them.
    """
    return [(name, part) for name, part in root.named_modules() if hasattr(part, "_is_expert_parallel")]


def experts_way(experts: Any) -> str | None:
    """Return the implementation that a module of experts uses: ``config._experts_implementation``."""
    way: str | None = experts.config._experts_implementation
    return way


def set_experts_way(network: Any, name: str) -> None:
    """Set the implementation of the experts of a network of transformers, if its class offers a choice.

    ``_can_set_experts_implementation``.
    """
    if network._can_set_experts_implementation():
        network.set_experts_implementation(name)


def token_exchange() -> Any:
    """Return the class that sends tokens to the processes of their experts: ``AllToAllEP`` of transformers 5.21."""
    try:
        from transformers.distributed.expert_parallel import AllToAllEP
    except ImportError as error:
        raise ConfigurationError("ShardedStrategy: parallel.experts needs transformers 5.21 or later") from error
    return AllToAllEP


def from_config(kind: Any, config: object, **options: object) -> Any:
    """Build a transformers model with random weights: ``from_config`` of auto classes, else ``_from_config``."""
    make = getattr(kind, "from_config", None) or kind._from_config
    return make(config, **options)


@contextmanager
def masks_unread(device: torch.device) -> Iterator[None]:
    """Context in which transformers builds attention masks on a GPU without synchronisation.

    transformers reads values on the device to find out whether a mask is needed at all, in
    ``masking_utils.find_packed_sequence_indices`` and ``fast_all``. Nothing changes on a CPU, where reading is cheap.
    """
    if device.type == "cpu":
        yield
        return
    from transformers import masking_utils

    with temporarily(masking_utils, find_packed_sequence_indices=_documents, fast_all=lambda mask: False):
        yield


def _documents(position_ids: Tensor) -> Tensor:
    """Return the index of the document of each token, [B, T]. A document starts where positions restart."""
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


def balancing_module(network: nn.Module) -> Any:
    """Return the Python module with the balancing loss of a network's experts, ``load_balancing_loss_func``, or None.

    Techniques may have mixed classes of their own into the network's class.
    """
    for kind in type(network).__mro__:
        home = sys.modules.get(kind.__module__)
        if hasattr(home, "load_balancing_loss_func"):
            return home
    return None


@contextmanager
def balancing_over(network: nn.Module, real: Tensor | None) -> Iterator[None]:
    """Context in which the balancing loss of a network's experts counts ``real`` [B, T] tokens only, or all.

    transformers passes the attention mask of the call to ``load_balancing_loss_func``.
    """
    home = balancing_module(network)
    own = home.load_balancing_loss_func
    signature = inspect.signature(own)

    def over_real(*args: object, **kwargs: object) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["attention_mask"] = real
        return own(*bound.args, **bound.kwargs)

    with temporarily(home, load_balancing_loss_func=over_real):
        yield


def records_routers(network: nn.Module) -> bool:
    """Return whether a model of transformers has modules whose outputs are the logits of routers.

    ``_can_record_outputs`` names their classes. The model may have none of them, if all of its layers are dense.
    """
    kinds: set[Any] = set()
    for part in network.modules():
        recorded = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        for item in recorded if isinstance(recorded, list) else [recorded]:
            kinds.add(getattr(item, "target_class", item))
    return any(isinstance(part, tuple(kinds)) for part in network.modules())


def language_auto_class(config: Any) -> Any:
    """Return the auto class that builds the language model of a config, of text or of images and text.

    Configs of images and text may also have a model of their text alone. Then ``architectures`` decides, which names
    the class of the saved weights, and a config without it describes the model of text. ``_model_mapping``.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    of_text = AutoModelForCausalLM._model_mapping.get(type(config), None)
    of_images: Any = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    if of_images is None or config.is_encoder_decoder:
        return AutoModelForCausalLM
    named = of_images.__name__ in (config.architectures or ())
    if of_text is None or named:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def model_class_of(auto: Any, config: object) -> object:
    """Return the class that an auto class of transformers builds for a config, or ``None``: ``_model_mapping``."""
    return auto._model_mapping.get(type(config), None)


def causal_model_of(config: object) -> Any:
    """Return the class of the language model of a config, or ``None``: ``_model_mapping`` of its auto class."""
    return model_class_of(language_auto_class(config), config)


def image_token_ids(config: Any) -> set[int]:
    """Return the ids of tokens that stand for images, videos or sounds in a config, or mark their places.

    They are in fields such as ``image_token_id``, ``image_token_index`` and ``boi_token_index``.
    """
    named = config.to_dict().items()
    return {value for key, value in named if key.endswith(("token_id", "token_index")) and isinstance(value, int)}


def forget_positions(network: nn.Module) -> None:
    """Remove the shifts of positions by images that a model keeps from its last batch: ``rope_deltas``.

    ``generate`` of transformers computes them for its own prompts.
    """
    for part in network.modules():
        if getattr(part, "rope_deltas", None) is not None:
            part.rope_deltas = None  # type: ignore[assignment]


def generation_json(network: object) -> str | None:
    """Return the settings of ``generate`` of a transformers model as JSON, without defaults; None for other models.

    The configuration of a model does not contain them.
    """
    settings = getattr(network, "generation_config", None)
    if settings is None:
        return None
    return str(settings.to_json_string(use_diff=True, keys_to_pop=["compile_config"]))


def take_generation(network: Any, settings: str | None) -> None:
    """Set the settings of ``generate`` of a transformers model to those of :func:`generation_json`."""
    from transformers import GenerationConfig

    if settings is not None:
        network.generation_config = GenerationConfig.from_dict(json.loads(settings))


def stopping_at(settings: Any, stop: Sequence[int]) -> Any:
    """Return a copy of the settings of ``generate`` with further ids at which it stops."""
    own = settings.eos_token_id
    known = [] if own is None else own if isinstance(own, list) else [own]
    added = [token for token in stop if token not in known]
    changed = copy.deepcopy(settings)
    if added:
        changed.eos_token_id = known + added
    return changed


def classifier_of(config: object) -> Any:
    """Return the class for sequence classification of a config, or ``None``, as :func:`model_class_of`."""
    from transformers import AutoModelForSequenceClassification

    return model_class_of(AutoModelForSequenceClassification, config)


def fingerprint(dataset: Any) -> str:
    """Return the fingerprint of a data set: ``datasets.Dataset._fingerprint``."""
    return str(dataset._fingerprint)


def chat_environment(template: str) -> Any:
    """Return the Jinja environment in which transformers compiles a chat template, with its filters and tags.

    ``chat_template_utils._compile_jinja_template``.
    """
    from transformers.utils import chat_template_utils

    return chat_template_utils._compile_jinja_template(template).environment


def template_messages(messages: Sequence[object]) -> list[object]:
    """Return copies of messages in the form that transformers passes to chat templates.

    ``_plain_template_data`` and ``_alias_reasoning_fields``, which earlier versions do not have.
    """
    from transformers.utils import chat_template_utils

    if hasattr(chat_template_utils, "_plain_template_data"):
        copies = chat_template_utils._plain_template_data(list(messages))
    else:
        copies = [copy.deepcopy(message) for message in messages]  # separate copies even of equal objects
    alias = getattr(chat_template_utils, "_alias_reasoning_fields", list)
    return list(alias(copies))


def gguf_header(path: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of a GGUF file and the names of its tensors. Lists of texts are replaced by their lengths."""
    from transformers import modeling_gguf_pytorch_utils  # noqa: F401 - `bars_on_terminals` finds it when it is loaded
    from transformers.integrations.gguf import read_gguf_metadata

    return read_gguf_metadata(str(Path(path).expanduser()))


def gguf_places(model: Any, architecture: str) -> dict[str, str]:
    """Return the names of a model's weights by their names in a GGUF file; none for a model that is read another way.

    ``modeling_gguf_pytorch_utils.get_gguf_hf_weights_map``.
    """
    from transformers import modeling_gguf_pytorch_utils as reading
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

    if architecture in GGUF_CONFIG_ARCHS:
        return {}
    processor = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)(config=model.config.to_dict())
    return dict(reading.get_gguf_hf_weights_map(model, processor))


def gguf_splits() -> dict[str, str]:
    """Return regular expressions by which transformers splits texts, by the name of a GGUF file's pre-tokenizer.

    ``integrations.gguf.gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS``.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return dict(GGUF_PRE_TOKENIZER_SPLITS)


def encodes_alone(tokenizer: Any) -> bool:
    """Return whether a fast tokenizer only calls its Rust tokenizer. Some classes change the texts first.

    Such a class overrides ``__call__`` or ``PreTrainedTokenizerFast._encode_plus``.
    """
    from transformers import PreTrainedTokenizerFast

    own = type(tokenizer)
    return all(getattr(own, name) is getattr(PreTrainedTokenizerFast, name) for name in ("__call__", "_encode_plus"))
