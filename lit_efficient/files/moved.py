"""Where arguments, configs and modules of the release before are now: kept for one release, then this file goes.

A config with an old key, path or module is refused with the new one. A checkpoint is not: its arguments are translated.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any


def _into(group: str, *names: str) -> dict[str, str]:
    return {name: f"{group}.{name}" for name in names}


_ROWS = _into("rows", "columns", "max_rows", "max_malformed", "split", "val_split", "subset")
_CHAT = {"chat_template": "chat.template", "vocab_size": "chat.vocab_size", "untrained_end": "chat.untrained_end"}

# Of a class: an argument, and where its value stands now.
MOVED_KEYS: dict[str, dict[str, str]] = {
    "LanguageData": {
        **_ROWS,
        **_CHAT,
        **_into("rows", "format"),
        **_into("chat", "train_on", "truncation"),
        **_into("stream", "epoch_batches", "buffer"),
        "streaming": "stream.enabled",
    },
    "PreferenceData": {**_ROWS, **_CHAT, **_into("rows", "strings_as"), **_into("chat", "too_long")},
    "PythonCorpus": _into("files", "paths", "suffixes", "exclude"),
    "ImageData": {
        "split": "splits.train",
        "val_split": "splits.val",
        "test_split": "splits.test",
        "image_column": "columns.image",
        "label_column": "columns.label",
        "caption_column": "columns.caption",
        **_into("view", "resolution", "channels", "buckets", "crop", "horizontal_flip", "variants", "resample"),
        "judge": "scores.judge",
        "judge_images": "scores.images",
    },
    "LatentDiffusion": {"validation_samples": "samples.count", **_into("samples", "prompts", "preview")},
    "HiddenAlignment": _into("head", "widths", "seed"),
    "LatentAlignment": {
        **_into("loss", "adaptive", "distance_margin", "cosine_margin"),
        **_into("head", "widths", "seed"),
    },
    "GPTConfig": _into("constants", "rope_theta", "norm_eps"),
    "TextEncoderConfig": {
        **_into("captions", "tokenizer", "padding", "padding_side"),
        "tokenizer_subfolder": "captions.subfolder",
    },
    "DiTConfig": _into("variant", "positions", "qk_norm", "time_embedding"),
}
# Configs, and modules that a ``class_path`` could name.
MOVED_PATHS = {
    "configs/techniques/min_snr.yaml": "configs/techniques/snr_weighting.yaml",
    "lit_efficient.data.digits": "lit_efficient.data.digit_images",
    "lit_efficient.data.encoded_fields": "lit_efficient.data.latents.encoded_fields",
    "lit_efficient.data.image_buckets": "lit_efficient.data.images.aspect_buckets",
    "lit_efficient.data.teacher_features": "lit_efficient.data.latents.teacher_features",
    "lit_efficient.losses.perceptual": "lit_efficient.models.judges.perceptual",
    "lit_efficient.optimizers.adafactor": "lit_efficient.optimizers.grouped_adafactor",
    "lit_efficient.optimizers.adamw": "lit_efficient.optimizers.fused_adamw",
    "lit_efficient.optimizers.muon": "lit_efficient.optimizers.muon_adamw",
    "lit_efficient.optimizers.schedule_free": "lit_efficient.optimizers.schedule_free_adamw",
    "lit_efficient.plugins.checkpoint_io": "lit_efficient.plugins.safe_checkpoint_io",
}


def moved_key(owner: type | None, key: str) -> str:
    """Where an argument of a class (or of one that it inherits from) is now, as the end of a sentence; else ""."""
    name, dot, inside = key.partition(".")
    known = (MOVED_KEYS.get(cls.__name__, {}) for cls in (owner.__mro__ if owner else ()))
    return next((f": it is now {keys[name] + dot + inside!r}" for keys in known if name in keys), "")


def moved_path(path: str) -> str:
    """Where a config or a module is now, as the end of a sentence; "" for one that has not moved."""
    return next((f": it is now {new!r}" for old, new in MOVED_PATHS.items() if path.endswith(old)), "")


def takes_moved_keys(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that is given what checkpoints record, under the keys of the release before or of now."""

    @functools.wraps(init)
    def translated(self: object, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **translate(init.__qualname__.split(".")[0], kwargs))

    return translated


def translate(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a checkpoint records of the class ``name``, under the keys that the class has now."""
    now: dict[str, Any] = {}
    for key, value in arguments.items():
        *groups, leaf = MOVED_KEYS.get(name, {}).get(key, key).split(".")
        place = now
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = value
    return now
