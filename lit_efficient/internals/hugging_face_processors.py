"""Processors of transformers for images and text, also where a part of them for videos cannot be loaded.

The processors of some families read videos, too, and transformers then needs torchvision, which images do not need.
Checked with transformers 5.23.
"""

import json
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lit_efficient.errors import ConfigurationError, install_line
from lit_efficient.internals.wraps import temporarily

_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def load_processor(name: str, kind: Any = None) -> Any:
    """Load a processor: of the class ``kind``, or of the class that its files or its model's configuration name.

    Raises:
        OSError, ValueError, ImportError: If it cannot be loaded.
    """
    from transformers import AutoProcessor

    if kind is None and not find_spec("torchvision"):
        kind = _named_class(name)
    if kind is None:
        return AutoProcessor.from_pretrained(name, trust_remote_code=False)
    if "video_processor" in kind.get_attributes() and not find_spec("torchvision"):
        return _without_videos(kind, name)
    return kind.from_pretrained(name, trust_remote_code=False)


def _named_class(name: str) -> object:
    """Return the class of a processor that its files name, or that belongs to the model of its folder; else None."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    for text in processor_files(name).values():
        named = json.loads(text).get("processor_class")
        if named is not None:
            return processor_class(str(named))
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError):  # the folder holds no model
        return None
    return PROCESSOR_MAPPING.get(type(config), None)


def processor_class(name: str) -> Any:
    """Return the class of a processor by its name, which a file may state.

    Raises:
        ConfigurationError: If transformers has no such processor, or cannot import it.
    """
    import transformers

    kind = getattr(transformers, name, None)
    lacking = [package for package in getattr(kind, "_backends", ()) if not find_spec(package)]
    if lacking:  # a stand-in for a class that cannot be imported
        raise ConfigurationError(f"processor: {name} needs {' and '.join(lacking)}: {install_line(*lacking)}.")
    if not (isinstance(kind, type) and issubclass(kind, transformers.ProcessorMixin)):
        raise ConfigurationError(f"processor: transformers has no processor {name!r}.")
    return kind


def processor_files(name: str) -> dict[str, str]:
    """Return the files that describe a processor except its tokenizer, unchanged, by their names.

    Saving a processor again would drop a part for videos that was not loaded.
    """
    from transformers.utils import cached_file

    found = {}
    for file in _FILES:
        with suppress(OSError):  # not every processor has all of them
            found[file] = Path(str(cached_file(name, file))).read_text("utf-8")
    return found


def _without_videos(kind: Any, name: str) -> object:
    """Load a processor whose ``video_processor`` is None: ``check_argument_for_proper_class`` compares the parts."""
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor

    class ImagesOnly(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: object) -> object:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    ImagesOnly.__name__ = kind.__name__
    with temporarily(AutoVideoProcessor, from_pretrained=lambda *_, **__: None):
        return ImagesOnly.from_pretrained(name, trust_remote_code=False)
