"""Model card of an export, ``README.md``: base, licence, data, techniques and metrics, as far as they are known.

The data and the metrics are read from the folder of the run, beside the checkpoint: ``config.yaml`` and
``events.jsonl``. The licence is that in the base's own card or GGUF file.

Source: https://huggingface.co/docs/hub/model-cards.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.checkpoints import Checkpoint
from lit_efficient.files.events import EVENTS
from lit_efficient.internals.hugging_face import gguf_header
from lit_efficient.models.libraries.gguf_file import is_gguf

_LIBRARIES = {"peft": "peft", "merged": "transformers", "gguf": "gguf"}
_MEASURED = ("val/", "test/", "eval/")
_LONGEST = 120  # letters of a technique's arguments


def model_card(checkpoint: Checkpoint, path: Path, format: str, base: str | None, said: str) -> str:
    """Return the text of a card.

    Args:
        checkpoint: The exported checkpoint.
        path: Its file.
        format: Format of the export.
        base: Name, folder or GGUF file of the base model; None if it has none.
        said: Sentence about the export.
    """
    techniques = list(_techniques(checkpoint))
    head: dict[str, Any] = {"tags": ["lit_efficient", *(name for name, _ in techniques)]}
    if format in _LIBRARIES:
        head["library_name"] = _LIBRARIES[format]
    if "language_modeling" in checkpoint:
        head["pipeline_tag"] = _pipeline(checkpoint)
    is_on_hub = base is not None and base.count("/") == 1 and not Path(base).exists()
    if is_on_hub:
        head["base_model"] = base
    license = licence_of(base)
    if license is not None:
        head["license"] = license
    rows = [("Base", base or "none: trained from random weights or a module of its own")]
    if license is not None:
        rows.append(("Licence of the base", license))
    rows += [("Data", source) for source in _sources(path.parent)]
    rows += [("Technique", f"{name}{arguments}") for name, arguments in techniques]
    rows.append(("Steps", f"{checkpoint.get('global_step', 'unknown')}, epoch {checkpoint.get('epoch', 'unknown')}"))
    rows += _metrics(path.parent, checkpoint.get("global_step"))
    table = "".join(f"| {name} | {_cell(value)} |\n" for name, value in rows)
    front = yaml.safe_dump(head, sort_keys=True, allow_unicode=True)
    return f"---\n{front}---\n\n# {path.parent.parent.name or path.stem}\n\n{said}\n\n| | |\n| --- | --- |\n{table}"


def _pipeline(checkpoint: Checkpoint) -> str:
    """Return the Hugging Face hub's name of what the model of a task does."""
    about = checkpoint["language_modeling"]
    if about.get("task") == "TextLabelling":
        tags = checkpoint.get("hyper_parameters", {}).get("labels") == "tags"
        if tags:
            return "token-classification"
        return "text-classification"
    if "processor" in (about.get("tokenizer") or {}):
        return "image-text-to-text"
    return {"TextEmbedding": "sentence-similarity", "RewardModeling": "text-classification"}.get(
        about.get("task"), "text-generation"
    )


def licence_of(base: str | None) -> str | None:
    """Return the licence that a base model names in its card or GGUF file; None if it is not known."""
    if base is None:
        return None
    if is_gguf(base):
        try:
            found = gguf_header(base)[0].get("general.license")
        except (OSError, ValueError, ConfigurationError):
            return None
        if found is None:
            return None
        return str(found)
    text = _card_of(base)
    if not text.startswith("---\n"):
        return None
    try:
        fields = yaml.safe_load(text[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return None
    found = fields.get("license") if isinstance(fields, dict) else None
    if isinstance(found, str):
        return found
    return None


def _card_of(base: str) -> str:
    """Return the card of a folder, or of a name on a hub that is in the cache."""
    from huggingface_hub import try_to_load_from_cache

    file: Any = Path(base) / "README.md"
    if not Path(base).is_dir():
        try:
            file = try_to_load_from_cache(base, "README.md")
        except ValueError:  # no name of a repository
            return ""
    try:
        if isinstance(file, str | Path):
            return Path(file).read_text("utf-8")
        return ""
    except (OSError, UnicodeDecodeError):
        return ""


def _techniques(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield the names of the techniques that changed the network, with their arguments."""
    for record in checkpoint.get("lit_efficient", {}).get("transforms", ()):
        given = ", ".join(f"{name}={value!r}" for name, value in record["arguments"].items() if value is not None)
        if len(given) > _LONGEST:
            given = f"{given[:_LONGEST]}..."
        yield record["name"], f"({given})"


def _sources(run: Path) -> list[str]:
    """Return the data that the config of a run names."""
    try:
        config = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
        data = config.get("data") or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):
        return []
    arguments = data.get("init_args") or {}
    given = arguments.get("train")
    if given is None:
        if "class_path" in data:
            return [str(data["class_path"])]
        return []
    sources = given if isinstance(given, list) else [given]
    return [str(source.get("path", source)) if isinstance(source, Mapping) else str(source) for source in sources]


def _metrics(run: Path, step: Any) -> list[tuple[str, str]]:
    """Return the last measured values of a run up to a step."""
    try:
        lines = (run / EVENTS).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found: dict[str, float] = {}
    for line in lines:
        try:
            event = json.loads(line)
            if event["kind"] == "metrics" and not (isinstance(step, int) and event["step"] > step):
                found |= {name: value for name, value in event["values"].items() if name.startswith(_MEASURED)}
        except (ValueError, KeyError, TypeError, AttributeError):  # a damaged line
            continue
    return [(f"`{name}`", f"{value:.5g}") for name, value in sorted(found.items()) if isinstance(value, int | float)]


def _cell(value: str) -> str:
    return " ".join(value.replace("|", "\\|").split())
