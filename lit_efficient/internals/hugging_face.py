"""Attributes of transformers', diffusers' and datasets' objects that have no public name.

Checked with transformers 5.23, diffusers 0.42 and datasets 5.2.
"""

import copy
import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.wraps import temporarily


def load_saved(path: Path) -> Any:
    """What ``Dataset.save_to_disk`` wrote, if the files that it lists are its own: ``_data_files`` in ``state.json``.

    Raises:
        ConfigurationError: If one is not.
    """
    import datasets

    for state in sorted(path.rglob("state.json")):
        for file in json.loads(state.read_text("utf-8")).get("_data_files", ()):
            if Path(file["filename"]).name != file["filename"]:
                raise ConfigurationError(f"{state} lists {file['filename']!r}, which is not in its folder.")
    return datasets.load_from_disk(str(path))


def keeps_float32(module: nn.Module) -> bool:
    """Whether diffusers leaves modules of a network in float32 when it loads it: ``_keep_in_fp32_modules``."""
    return bool(getattr(module, "_keep_in_fp32_modules", None))


def source_of(module: nn.Module) -> str:
    """The name or folder that a model of transformers' or diffusers' was read from: ``config._name_or_path``."""
    source = getattr(getattr(module, "config", None), "_name_or_path", "")
    return source if isinstance(source, str) else ""


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """Class names of a diffusers model's repeated blocks: ``_repeated_blocks``."""
    return tuple(getattr(module, "_repeated_blocks", None) or ())


def attention_of(config: Any) -> str:
    """The attention that a transformers model uses: ``config._attn_implementation``."""
    return str(config._attn_implementation)


def set_attention(config: Any, name: str) -> None:
    """Have models that are built from now on use it: ``config._attn_implementation``."""
    config._attn_implementation = name


def from_config(kind: Any, config: Any, **options: Any) -> Any:
    """A transformers model with random weights: ``from_config`` of the auto classes, ``_from_config`` of all others."""
    make = getattr(kind, "from_config", None) or kind._from_config
    return make(config, **options)


@contextmanager
def masks_unread(device: torch.device) -> Iterator[None]:
    """A context in which transformers makes its masks on a GPU without reading there whether it could do without one.

    ``masking_utils.find_packed_sequence_indices`` and ``fast_all``. On a CPU, where a look is cheap, nothing changes.
    """
    if device.type == "cpu":
        yield
        return
    from transformers import masking_utils

    with temporarily(masking_utils, find_packed_sequence_indices=_documents, fast_all=lambda mask: False):
        yield


def _documents(position_ids: Tensor) -> Tensor:
    """The number of the document of each token, [B, T], by where positions start over."""
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


def causal_model_of(config: Any) -> Any:
    """The class of causal models that a configuration is for, or None: ``AutoModelForCausalLM._model_mapping``."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping.get(type(config), None)


def fingerprint(dataset: Any) -> str:
    """The hash of what made a data set: ``datasets.Dataset._fingerprint``."""
    return str(dataset._fingerprint)


def chat_environment(template: str) -> Any:
    """What transformers compiles a chat template in, with its filters and its ``generation`` tag.

    ``chat_template_utils._compile_jinja_template``.
    """
    from transformers.utils import chat_template_utils

    return chat_template_utils._compile_jinja_template(template).environment


def template_messages(messages: Sequence[Any]) -> list[Any]:
    """New messages as a chat template sees them: ``_plain_template_data``, ``_alias_reasoning_fields``, or copies."""
    from transformers.utils import chat_template_utils

    each = functools.partial(map, copy.deepcopy)  # of one message that stands there twice there are two copies
    plain = getattr(chat_template_utils, "_plain_template_data", each)
    alias = getattr(chat_template_utils, "_alias_reasoning_fields", list)
    return list(alias(plain(list(messages))))
