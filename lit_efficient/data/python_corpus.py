"""Real text that every machine has: the sources of Python's standard library, or your own text.

Files are split into training and validation by a hash of their path. A byte-level BPE is trained on the training files.
The tokens are in a memory-mapped cache, named by the hash of everything that they were made from. The standard library
has about 400 files, 8 MB and 2.3 million tokens, which take 13 CPU-seconds once.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lit_efficient.data.text import token_cache
from lit_efficient.data.text.arguments import CorpusFiles
from lit_efficient.data.text.chat_data import check_length
from lit_efficient.data.text.text_files import find_files, read_texts, split_texts, standard_library
from lit_efficient.errors import ChecksTypes, ConfigurationError, check_number, refusal
from lit_efficient.files.cache import cache_folder, prepared_folder, read_manifest
from lit_efficient.files.file_hashes import broken_seal
from lit_efficient.mechanisms.order.keyed_batch_sampler import loading, no_loaders

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of a long array of token ids.

    Window i holds the tokens [i T, (i + 1) T) as inputs, and the tokens one place further as labels.

    Args:
        tokens: Ids [N], in memory or memory-mapped. The last (N - 1) mod T ids are not used.
        length: Tokens of a window, T.
        token_bytes: Bytes of text that each id stands for, [V]. If given, an item has ``num_bytes``, the bytes that its
            labels stand for, from which bits per byte are computed exactly.
    """

    def __init__(self, tokens: np.ndarray, length: int, token_bytes: np.ndarray | None = None) -> None:
        self.tokens = np.asarray(tokens)  # each slice of a memmap calls seven functions of Python
        self.length = length
        self.token_bytes = token_bytes

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``shift_labels`` [T] int64 and, if sizes are known, ``num_bytes`` [] int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        window = self.tokens[start : start + self.length + 1].astype(np.int64)
        # Inputs and labels share the memory of one window.
        ids = torch.from_numpy(window)
        item = {"input_ids": ids[:-1], "shift_labels": ids[1:]}
        if self.token_bytes is not None:
            item["num_bytes"] = torch.tensor(int(self.token_bytes[window[1:]].sum()))
        return item


class PythonCorpus(ChecksTypes, LightningDataModule):
    """DataModule of windows of Python source, or of any text.

    Batches are ``{"input_ids": [B, T], "shift_labels": [B, T]}``, with labels that are shifted by one already.
    Validation batches also have ``num_bytes`` [B], the bytes of text that the labels of a window stand for. Testing
    uses the validation files: there is no third split. Prediction continues ``prompts``, as batches
    ``{"prompts": [text, ...]}``.

    Args:
        vocab_size: Number of ids of the BPE, at least 257. With little text the BPE may have fewer ids.
        sequence_length: Tokens of a window, T.
        batch_size: Windows in a training batch, for each process.
        val_batch_size: Windows in a validation batch. null: ``batch_size``.
        num_workers: Worker processes of a loader. 0 is fastest for memory-mapped tokens.
        pin_memory: Place batches for a CUDA device in pinned memory, which allows asynchronous copies.
        val_fraction: Approximate share of the files for validation, at least 0 and below 1. A single file is cut
            instead. 0: train on all files, without validation.
        files: Files to read.
        tokenizer_file: ``tokenizer.json`` to use instead of training a tokenizer, such as that of another run whose
            training is continued on new text. Its size replaces ``vocab_size``.
        prompts: Texts that ``predict`` continues.
        cache_dir: Folder of the cache of tokens. null: ``$LIT_EFFICIENT_CACHE``, or ``~/.cache/lit_efficient``.
        seed: Seed of the split.
    """

    batches: ClassVar[str] = "tokens"

    def __init__(
        self,
        *,
        vocab_size: int = 4096,
        sequence_length: int = 256,
        batch_size: int = 16,
        val_batch_size: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = True,
        val_fraction: float = 0.05,
        files: CorpusFiles = CorpusFiles(),  # noqa: B008 (frozen)
        tokenizer_file: str | None = None,
        prompts: Sequence[str] = ("def main(", "class Reader:", "import"),
        cache_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_number("PythonCorpus", "vocab_size", vocab_size, least=257, whole=True)
        check_number("PythonCorpus", "sequence_length", sequence_length, least=1, whole=True)
        check_number("PythonCorpus", "batch_size", batch_size, least=1, whole=True)
        check_number("PythonCorpus", "val_batch_size", val_batch_size, least=1, whole=True, null=True)
        check_number("PythonCorpus", "num_workers", num_workers, least=0, whole=True)
        check_number("PythonCorpus", "val_fraction", val_fraction, least=0, below=1)
        if any("\0" in prompt or not prompt for prompt in prompts):
            raise refusal("PythonCorpus", "prompts", "texts that are not empty", list(prompts))
        self._vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size or batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.val_fraction = val_fraction
        self.files = files
        self.tokenizer_file = tokenizer_file
        self.prompts = list(prompts)
        self.cache_dir = cache_dir
        self.seed = seed
        self._folder: Path | None = None
        self._tokenizer: Tokenizer | None = None
        self.train_windows: TokenWindows | None = None
        self.val_windows: TokenWindows | None = None

    @property
    def tokenizer(self) -> "Tokenizer":
        """Tokenizer of these tokens; known after `setup`."""
        if self._tokenizer is None:
            raise RuntimeError("PythonCorpus: call prepare_data() and setup() first.")
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids, which may be below the argument if there is little text; known after `setup`."""
        if self._tokenizer is None:
            return self._vocab_size
        return self._tokenizer.get_vocab_size()

    def check_model(self) -> None:
        """Raise an error if the model of the run cannot read windows of this length."""
        check_length(self, "sequence_length", self.sequence_length)

    def prepare_data(self) -> None:
        self.check_model()
        self._folder = self._prepare(thorough=True)
        manifest = read_manifest(self._folder)
        text = f"{manifest['train_files']} files to train on, {manifest['val_files']} to validate on"
        left_out = []
        for key, reason in (("duplicates", "duplicates"), ("unreadable", "not UTF-8"), ("empty", "empty")):
            names = manifest[key]
            if names:
                left_out.append(f"{len(names)} {reason} (such as {names[0]})")
        if left_out:
            text += f"; left out {', '.join(left_out)}"
        rank_zero_info(f"PythonCorpus: {text}. Cache: {self._folder}")

    def example_prompt(self) -> tuple[str, bool]:
        """Return a prompt for a trained model, and whether it is a user's turn of a conversation."""
        return self.prompts[0], False

    def setup(self, stage: str | None = None) -> None:
        if self.train_windows is not None:
            return
        folder = self._folder or self._prepare(thorough=False)
        self._folder = folder
        tokenizer = token_cache.load_tokenizer(folder / "tokenizer.json")
        splits = ("train", "val") if self.val_fraction else ("train",)
        tokens = {split: token_cache.open_tokens(folder, split) for split in splits}
        for split, ids in tokens.items():
            if len(ids) <= self.sequence_length:
                raise ConfigurationError(
                    f"PythonCorpus: too little text: the {split} split has {len(ids)} tokens, and one window takes "
                    f"sequence_length + 1 = {self.sequence_length + 1}. Add text, shorten sequence_length or change "
                    f"val_fraction ({self.val_fraction})."
                )
        self._tokenizer = tokenizer
        if self.val_fraction:
            token_bytes = token_cache.bytes_of_tokens(tokenizer)
            self.val_windows = TokenWindows(tokens["val"], self.sequence_length, token_bytes)
        windows = TokenWindows(tokens["train"], self.sequence_length)
        if len(windows) < self.batch_size:
            allowed = f"at most the number of training windows, {len(windows)}"
            raise refusal("PythonCorpus", "batch_size", allowed, self.batch_size)
        self.train_windows = windows

    def train_dataloader(self) -> DataLoader:
        assert self.train_windows is not None
        return DataLoader(self.train_windows, self.batch_size, shuffle=True, drop_last=True, **loading(self))

    def val_dataloader(self) -> Any:
        if self.val_windows is None:
            return no_loaders(self)
        return DataLoader(self.val_windows, self.val_batch_size, **loading(self))

    def test_dataloader(self) -> object:
        """Return the loader of the validation windows: there is no third split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.prompts, batch_size=1, collate_fn=lambda texts: {"prompts": texts})  # type: ignore[arg-type]

    def _prepare(self, thorough: bool) -> Path:
        """Find or make the cache, and return its folder."""
        files = find_files(self.files.paths or [standard_library()], self.files.suffixes, self.files.exclude)
        texts = read_texts(files)
        if not texts.files:
            raise ConfigurationError(
                f"PythonCorpus: files.paths hold no text: {len(files)} files were found, all empty or not UTF-8 "
                f"(such as {files[0][1]})."
            )
        if self.tokenizer_file is None:
            given = None
        else:
            given = token_cache.load_tokenizer(self.tokenizer_file)
        settings = {
            "vocab_size": self._vocab_size if given is None else None,
            "tokenizer": None if given is None else hashlib.sha256(given.to_str().encode()).hexdigest(),
            "val_fraction": self.val_fraction,
            "seed": self.seed,
            "format": token_cache.FORMAT,
        }
        folder = cache_folder(self.cache_dir, "text", [settings, [(file.path, file.digest) for file in texts.files]])

        def build(target: Path) -> None:
            train, val = split_texts(texts.files, self.val_fraction, self.seed)
            tokenizer = given or token_cache.train_tokenizer(train, self._vocab_size)
            about: dict[str, object] = {
                **settings,
                "train_files": len(train),
                "val_files": len(val),
                "duplicates": texts.duplicates,
                "unreadable": texts.unreadable,
                "empty": texts.empty,
            }
            token_cache.write_token_cache(target, tokenizer, train, val, about)

        return prepared_folder(folder, build, lambda path: broken_seal(path, token_cache.FORMAT, thorough))
