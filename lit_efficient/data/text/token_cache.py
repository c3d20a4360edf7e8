"""Texts as a byte-level BPE tokenizer and memory-mapped token ids, in one folder whose content can be checked.

The folder holds ``tokenizer.json``, ``train.bin`` and ``val.bin`` (uint16, or uint32 above 65,536 ids; native byte
order), and ``manifest.json`` with the size and SHA-256 of each. Each text ends with `END_OF_TEXT`.

Costs (2 cores): 5 CPU-seconds to train 4,096 tokens on 8 MB of text and 7 to tokenise it, once.
Source: Sennrich et al. (2016), https://arxiv.org/abs/1508.07909; on bytes: GPT-2.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import map_numbers, read_manifest, seal
from lit_efficient.files.sums import check_sums
from lit_efficient.mechanisms.progress import Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
# Part of every key; raise it when the meaning of the files changes.
FORMAT = 3


def train_tokenizer(texts: Iterable[str], vocab_size: int, special: Sequence[str] = (END_OF_TEXT,)) -> "Tokenizer":
    """Train a byte-level BPE, which can represent any text.

    Args:
        texts: Texts to train on. With few texts the tokenizer may have fewer ids than ``vocab_size``.
        vocab_size: Number of ids.
        special: Tokens that stand for no text. They have the first ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        # All 256 bytes are in the vocabulary, so no text is unknown.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """Read a ``tokenizer.json``.

    Raises:
        ConfigurationError: If there is no such file, it holds no tokenizer, or the tokenizer lacks `END_OF_TEXT`.
    """
    from tokenizers import Tokenizer

    check_sums(path)
    try:
        content = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"tokenizer_file: {path} cannot be read: {error}.") from error
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # tokenizers raises bare Exception
        raise ConfigurationError(f"tokenizer_file: {path} holds no tokenizer of the tokenizers library.") from error
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ConfigurationError(
            f"tokenizer_file: {path} has no token {END_OF_TEXT}, which separates texts. Give a tokenizer of another "
            "run of PythonCorpus."
        )
    return tokenizer


def bytes_of_tokens(tokenizer: "Tokenizer") -> np.ndarray:
    """Return the bytes of text that each id stands for, [V] int64; 0 for special tokens.

    A byte-level vocabulary spells a token with one character for each byte.
    """
    special = tokenizer.get_added_tokens_decoder()
    sizes = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        if index not in special:
            sizes[index] = len(token)
    return sizes


def write_token_cache(
    folder: Path, tokenizer: "Tokenizer", train: Sequence[str], val: Sequence[str], about: dict[str, object]
) -> None:
    """Write all files of a cache into an empty folder. The manifest includes ``about``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    dtype = "uint16" if tokenizer.get_vocab_size() <= 2**16 else "uint32"
    for name, texts in (("train.bin", train), ("val.bin", val)):
        with (folder / name).open("wb") as file:
            progress = Progress("tokenising", "texts", len(texts))
            for ids in _tokenise(tokenizer, texts, np.dtype(dtype)):
                file.write(ids.tobytes())
                progress.update(1)
    seal(folder, FORMAT, {"dtype": dtype, **about})


def open_tokens(folder: Path, split: str) -> np.ndarray:
    """Return the ids of ``split`` ("train" or "val"), memory-mapped and read-only."""
    return map_numbers(folder / f"{split}.bin", np.dtype(read_manifest(folder)["dtype"]))


def _tokenise(tokenizer: "Tokenizer", texts: Sequence[str], dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the ids of each text."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    # A text that spells END_OF_TEXT, as this file does, must not end there.
    tokenizer.encode_special_tokens = True
    # Encodings are many times larger than their ids, so keep few of them.
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch_fast(list(texts[start : start + 256])):
            yield np.asarray([*encoding.ids, end], dtype=dtype)
