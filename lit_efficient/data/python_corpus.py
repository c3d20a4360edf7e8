"""Real text that every machine has: the sources of Python's standard library, or text of your own.

Files are split into training and validation by a hash of their path, so that nothing leaks; a byte-level BPE is trained
on the training files; the tokens lie in a memory-mapped cache named by the hash of everything they were made from.
About 400 files, 8 MB and 2.3 million tokens of the standard library take 13 CPU-seconds once, then none.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from lit_efficient.data.text import token_cache
from lit_efficient.data.text.arguments import CorpusFiles
from lit_efficient.data.text.chat_data import check_length
from lit_efficient.data.text.text_files import find_files, read_texts, split_texts, standard_library
from lit_efficient.data.text.token_windows import TokenWindows
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.files.cache import cache_folder, prepared_folder, read_manifest
from lit_efficient.files.file_hashes import broken_seal
from lit_efficient.mechanisms.order.keyed_batch_sampler import loading

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class PythonCorpus(LightningDataModule):
    """Windows of Python source, or of any text, as batches ``{"input_ids": [B, T], "shift_labels": [B, T]}``.

    Labels are already shifted by one. Validation batches also have ``num_bytes`` ``[B]``, the bytes of text that the
    labels of a window stand for. Testing uses the validation files: there is no third split. Prediction continues
    ``prompts``, as batches ``{"prompts": [text, ...]}``.

    Args:
        vocab_size: ids of the BPE, at least 257; a small text may have fewer pairs to merge and end below it.
        sequence_length: tokens a window, T.
        batch_size: windows a training batch, for each process.
        val_batch_size: windows a validation batch; None means ``batch_size``.
        num_workers: processes that load batches; 0 is right for memory-mapped tokens.
        pin_memory: whether batches for a CUDA device lie in pinned memory, from which they are copied beside its work.
        val_fraction: about this part of the files is for validation, in (0, 1); a single file is cut there instead.
        files: which files are read.
        tokenizer_file: a ``tokenizer.json`` to use (that of another run, to go on training on new text) instead of
            training one; ``vocab_size`` is then its own.
        prompts: texts that ``predict`` continues.
        cache_dir: where the tokens are kept; None is ``$LIT_EFFICIENT_CACHE``, else ``~/.cache/lit_efficient``.
        seed: another seed gives another split.
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
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
            check_number("PythonCorpus", name, value, least=1, whole=True)
        check_number("PythonCorpus", "val_batch_size", val_batch_size, least=1, whole=True, null=True)
        check_number("PythonCorpus", "num_workers", num_workers, least=0, whole=True)
        check_number("PythonCorpus", "val_fraction", val_fraction, above=0, below=1)
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
        """The tokenizer of these tokens; known after `setup`."""
        if self._tokenizer is None:
            raise RuntimeError("PythonCorpus: call prepare_data() and setup() first.")
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of ids, which a small text may keep below the one asked for; known after `setup`."""
        return self._vocab_size if self._tokenizer is None else self._tokenizer.get_vocab_size()

    def check_model(self) -> None:
        """Refuse windows that the run's model cannot read."""
        check_length(self, "sequence_length", self.sequence_length)

    def prepare_data(self) -> None:
        self.check_model()
        self._folder = self._prepare(thorough=True)
        manifest = read_manifest(self._folder)
        left_out = [
            f"{len(names)} {why} (such as {names[0]})"
            for why, names in (("duplicates", manifest["duplicates"]), ("not UTF-8", manifest["unreadable"]))
            if names
        ]
        rank_zero_info(
            f"PythonCorpus: {manifest['train_files']} files to train on, {manifest['val_files']} to validate on"
            + (f"; left out {', '.join(left_out)}" if left_out else "")
            + f". Cache: {self._folder}"
        )

    def setup(self, stage: str | None = None) -> None:
        if self.train_windows is not None:
            return
        folder = self._folder or self._prepare(thorough=False)
        self._folder = folder
        tokenizer = token_cache.load_tokenizer(folder / "tokenizer.json")
        sizes = token_cache.bytes_of_tokens(tokenizer)
        tokens = {split: token_cache.open_tokens(folder, split) for split in ("train", "val")}
        for split, ids in tokens.items():
            if len(ids) <= self.sequence_length:
                raise ConfigurationError(
                    f"PythonCorpus: too little text: the {split} split has {len(ids)} tokens, one window takes "
                    f"sequence_length + 1 = {self.sequence_length + 1}. Add text, shorten sequence_length or change "
                    f"val_fraction ({self.val_fraction})."
                )
        self._tokenizer = tokenizer
        self.val_windows = TokenWindows(tokens["val"], self.sequence_length, sizes)
        self.train_windows = TokenWindows(tokens["train"], self.sequence_length)
        if len(self.train_windows) < self.batch_size:
            windows, self.train_windows = len(self.train_windows), None
            allowed = f"at most the number of training windows, {windows}"
            raise refusal("PythonCorpus", "batch_size", allowed, self.batch_size)

    def train_dataloader(self) -> DataLoader:
        assert self.train_windows is not None
        return DataLoader(self.train_windows, self.batch_size, shuffle=True, drop_last=True, **loading(self))

    def val_dataloader(self) -> DataLoader:
        assert self.val_windows is not None
        return DataLoader(self.val_windows, self.val_batch_size, **loading(self))

    def test_dataloader(self) -> DataLoader:
        """The validation windows: there is no third split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.prompts, batch_size=1, collate_fn=lambda texts: {"prompts": texts})  # type: ignore[arg-type]

    def _prepare(self, thorough: bool) -> Path:
        files = find_files(self.files.paths or [standard_library()], self.files.suffixes, self.files.exclude)
        texts = read_texts(files)
        if not texts.files:
            raise ConfigurationError(
                f"PythonCorpus: files.paths hold no text: {len(files)} files were found, all empty or not UTF-8 "
                f"(such as {files[0][1]})."
            )
        given = None if self.tokenizer_file is None else token_cache.load_tokenizer(self.tokenizer_file)
        settings = {
            "vocab_size": self._vocab_size if given is None else None,
            "tokenizer": None if given is None else hashlib.sha256(given.to_str().encode()).hexdigest(),
            "val_fraction": self.val_fraction,
            "seed": self.seed,
            "format": token_cache.FORMAT,
        }
        folder = cache_folder(self.cache_dir, "text", [settings, [(f.path, f.digest) for f in texts.files]])

        def build(target: Path) -> None:
            train, val = split_texts(texts.files, self.val_fraction, self.seed)
            tokenizer = given or token_cache.train_tokenizer(train, self._vocab_size)
            about: dict[str, object] = {"train_files": len(train), "val_files": len(val)}
            about |= {"duplicates": texts.duplicates, "unreadable": texts.unreadable}
            token_cache.write_token_cache(target, tokenizer, train, val, settings | about)

        return prepared_folder(folder, build, lambda path: broken_seal(path, token_cache.FORMAT, thorough))
