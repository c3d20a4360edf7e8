"""Embeddings of new words (textual inversion) as files that ``load_textual_inversion`` of diffusers loads.

    learned_embeds.safetensors    one word;  WORD.safetensors for each of several
    one text encoder: {WORD: [n, width]}      several: {"clip_l": [n, width], "clip_g": [n, width], "t5": [n, width]}

Source: the loaders of diffusers; https://github.com/huggingface/diffusers/tree/main/examples/textual_inversion.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.checkpoints import Checkpoint, Fields
from lit_efficient.files.tensors import save_tensors

_FILE = "learned_embeds.safetensors"
_KEYS = {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}


def new_words(checkpoint: Checkpoint) -> Fields | None:
    """Return the new words of a checkpoint of ``LatentDiffusion``, and the places of their embeddings, if any."""
    found: Fields | None = checkpoint.get("latent_diffusion", {}).get("tokens")
    return found


def write_embeddings(folder: Path, state: Mapping[str, Tensor], described: Fields) -> list[str]:
    """Write the embeddings of each new word, and return the names of the files.

    Args:
        folder: The folder.
        state: Weights by name.
        described: Result of :func:`new_words`.
    """
    files = []
    begin = 0
    for word, tokens in described["words"].items():
        rows = {}
        for encoder, name in described["rows"].items():
            rows[_key(encoder, word, described)] = state[name][begin : begin + len(tokens)].contiguous()
        begin += len(tokens)
        file = _FILE
        if len(described["words"]) > 1:
            file = f"{re.sub(r'[^A-Za-z0-9_-]', '', word) or begin}.safetensors"
        if file in files:
            raise ConfigurationError(f"export: {word!r} and another word would be written to the same file, {file}")
        save_tensors(folder / file, rows, format="pt")
        files.append(file)
    return files


def _key(encoder: str, word: str, described: Fields) -> str:
    if described["encoders"] == 1:
        return word
    if described["kinds"][encoder] == "t5":
        return "t5"
    return _KEYS.get(encoder, encoder)
