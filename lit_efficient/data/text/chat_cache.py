"""Cache of tokenised documents, named by the hash of everything that it was made from.

    key = hash(contents of all sources, tokenizer with its template, settings that matter, format of the files)

So a cache is never out of date: another content, tokenizer, template or setting gives another folder. The differences
from the newest cache of the same sources are logged. A damaged folder is refused. Documents are stored whole, and
another ``max_length`` cuts the same cache. Rows are held out by the hash of the content that must not occur on both
sides of the split: the whole text, or the prompt of a pair. The two documents of a pair are in separate files, under
the same number.
"""

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_efficient.data.text.chat_formats import MalformedRow
from lit_efficient.data.text.chat_tokenizer import add_new_tokens, fingerprint, train_chat_tokenizer
from lit_efficient.data.text.chat_tokens import ChatTokens, Encoded, SplitRow
from lit_efficient.data.text.document_store import FORMAT, DocumentWriter
from lit_efficient.data.text.in_processes import in_processes
from lit_efficient.data.text.pair_formats import Example
from lit_efficient.data.text.reading import Reader, RowCount
from lit_efficient.data.text.rendered import TextCount
from lit_efficient.data.text.rows import Source
from lit_efficient.data.text.text_files import unit_hash
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import MANIFEST, cache_folder, prepared_folder, read_manifest, seal
from lit_efficient.files.file_hashes import broken_seal
from lit_efficient.mechanisms.progress import Progress

SPLITS = ("train", "val")
# Rows that are tokenised together.
_CHUNK = 256


@dataclass
class Rows:
    """Numbers of rows and turns of a split, before documents are cut."""

    rows: int = 0  # all rows
    malformed: int = 0  # rows that were left out
    turns: int = 0  # turns of the other rows that contribute to the loss
    ended: int = 0  # turns of these whose end contributes, too


@dataclass(frozen=True)
class Split:
    """Choice of the rows that are held out."""

    threshold: float
    ranks: Sequence[float] = ()  # of all rows, NaN for a malformed one; empty if no row is held out


@dataclass(frozen=True)
class Recipe:
    """Sources, tokenizer and settings that decide the tokens of a cache."""

    owner: str  # name of the DataModule, for messages
    sources: dict[str, list[Source]]  # sources of "train", and of "val" unless rows are held out
    reader: Callable[[list[Source]], Reader]  # makes the reader of sources
    settings: dict[str, Any]  # settings of the reader, as JSON
    parts: tuple[str, ...]  # suffixes of the file names of a row's documents, one for each document
    columns: tuple[str, ...]  # names of the numbers that are stored with a row
    tokenizer: Any  # tokenizer as of `load_chat_tokenizer`; an int trains a tokenizer with so many ids
    encoding: dict[str, Any]  # arguments of `ChatTokens` after the tokenizer
    val_fraction: float  # share of the rows that is held out if there are no sources for validation
    seed: int  # seed of the choice of the rows held out
    encoder: Callable[..., Any] = ChatTokens  # makes the encoder of a tokenizer and ``encoding``
    further: Callable[[], dict[str, Any]] = dict  # makes further entries of the manifest, after the rows have been read

    @property
    def trains(self) -> bool:
        """True if the tokenizer is trained."""
        return isinstance(self.tokenizer, int)

    @cached_property
    def made_from(self) -> dict[str, Any]:
        """The recipe as JSON."""
        settings = {
            **self.settings,
            **self.encoding,
            "seed": self.seed,
            "val_fraction": None if "val" in self.sources else self.val_fraction,
            "vocab_size": self.tokenizer if self.trains else None,
        }
        about = {
            "sources": {split: [[s.name, s.digest] for s in listed] for split, listed in self.sources.items()},
            "entries": {split: [s.entry for s in listed] for split, listed in self.sources.items()},
            "tokenizer": "trained on these rows" if self.trains else fingerprint(self.tokenizer),
            "settings": settings,
            "format": FORMAT,
        }
        return dict(json.loads(json.dumps(about, default=_as_json)))

    def rank(self, row: Example) -> float:
        """Return a number in [0, 1) from the content that must not occur on both sides of the split."""
        return unit_hash(json.dumps([self.seed, *row.identity], sort_keys=True, default=str))

    def split(self) -> Split:
        """Return the split of the rows. Rows with a lower rank are held out: at least one, and never all.

        With a ``val_fraction`` of 0 no row is held out.
        """
        if "val" in self.sources or self.val_fraction == 0:
            return Split(0.0)
        ranks = array("d")
        seen = RowCount()
        for place, row in self.reader(self.sources["train"]):
            seen.rows += 1
            if isinstance(row, MalformedRow):
                seen.refuse(place, row)
            ranks.append(math.nan if isinstance(row, MalformedRow) else self.rank(row))
        different = sorted({rank for rank in ranks if not math.isnan(rank)})
        if len(different) < 2:
            message = f"{len(different)} different rows cannot be split into training and validation"
            if seen.malformed:  # the reason why there are so few
                message = f"{seen.described('train')}\nThe remaining {message}"
            raise ConfigurationError(
                f"{self.owner}: {message}. Set val, or val_fraction: 0 to train without validation."
            )
        # A threshold above the lowest rank holds out at least one row, and one that does not exceed the highest rank
        # leaves at least one row for training.
        return Split(min(max(self.val_fraction, different[1]), different[-1]), ranks)

    def split_rows(self, name: str, reader: Reader, split: Split) -> Iterator[SplitRow]:
        """Yield the rows of the sources ``name`` with their splits. A malformed row belongs to ``name``."""
        ranks = iter(split.ranks)
        for entry, (place, row) in reader.numbered():
            held_out = next(ranks, math.nan) < split.threshold
            yield SplitRow("val" if held_out else name, entry, place, row)


def prepare(recipe: Recipe, kind: str, cache_dir: str | None, thorough: bool) -> Path:
    """Find or make a cache.

    Args:
        recipe: All that decides its content.
        kind: Name of the folder of such caches.
        cache_dir: Folder of all caches, or None.
        thorough: Compare the contents of an existing cache with its hashes.

    Returns:
        Folder with the documents of "train" and "val", the tokenizer and the manifest.
    """
    made_from = recipe.made_from
    folder = cache_folder(cache_dir, kind, made_from)
    if not folder.exists():
        # People wonder why a cache that exists is not used, so the reason is logged.
        changed = _changes(folder.parent, made_from)
        if changed:
            rank_zero_info(f"{recipe.owner}: making the cache again, because {changed}.")
    found = prepared_folder(
        folder, lambda target: _build(recipe, target), lambda path: broken_seal(path, FORMAT, thorough)
    )
    # The name of the folder is a part of a hash only, so the content is compared as well.
    if read_manifest(found)["made_from"] != made_from:
        raise ConfigurationError(f"The cache {found} was made from other data or settings. Delete it and run again.")
    return found


def _build(recipe: Recipe, target: Path) -> None:
    """Write all files of a cache into an empty folder."""
    split = recipe.split()
    tokenizer = recipe.tokenizer
    if recipe.trains:
        tokenizer = _trained_tokenizer(recipe, split)
        add_new_tokens(tokenizer, recipe.encoding["new_tokens"])
    encoder = recipe.encoder(tokenizer, **recipe.encoding)
    about: dict[str, Any] = {"made_from": recipe.made_from, "formats": [], "malformed": {}, "empty": {}}
    about["end_warning"] = None
    checked = False
    texts = TextCount()
    with _SplitWriter(target, recipe.parts, recipe.columns) as writer:
        for name, sources in recipe.sources.items():
            reader = recipe.reader(sources)
            about["formats"] += reader.formats
            seen = RowCount()
            chunks = _chunks(recipe.split_rows(name, reader, split))
            progress = Progress(f"tokenising {name}", "rows")
            for chunk, encoded in in_processes(encoder.encode_chunk, chunks):
                progress.update(len(chunk))
                if not checked and any(_has_messages(one.row) for one in chunk):
                    checked = True
                    about["end_warning"] = encoder.check_end_of_turn()
                for one, found in zip(chunk, encoded):
                    seen.rows += 1
                    if isinstance(found, MalformedRow):
                        seen.refuse(one.place, found)
                        writer.add(one, [])
                    else:
                        writer.add(one, found)
                        texts.add(one.place, found)
            progress.close()
            about["malformed"][name] = asdict(seen)
            about["empty"][name] = asdict(reader.empty)
            writer.counts[name].malformed = seen.malformed
    choices = recipe.encoding.get("choices")
    if not checked and choices is not None and choices.given:
        names = ", ".join(f"chat.{name}" for name in choices.given)
        raise ConfigurationError(f"{recipe.owner}: {names}: no row is a conversation, so this would change nothing.")
    tokenizer.save_pretrained(str(target / "tokenizer"))
    has_turns = any(count.turns for count in writer.counts.values())
    # With a stream for training only validation rows are read here, and these may hold no turn.
    chats = has_turns or "train" not in recipe.sources or len(recipe.parts) > 1
    about["left_out"] = dict(writer.left_out)
    about["counts"] = {split: asdict(count) for split, count in writer.counts.items()}
    about["texts"] = asdict(texts)
    # The documents of an entry are side by side, in the order of the entries.
    about["entries"] = {split: sorted(number.items()) for split, number in writer.entries.items()}
    about["end_of_turn"] = texts.end
    if chats and tokenizer.chat_template is not None:
        about["end_of_turn"] = encoder.end_of_turn
    seal(target, FORMAT, {**about, **recipe.further()})


def _as_json(value: Any) -> Any:
    """Return an argument of `ChatTokens` as JSON."""
    return value.digest if hasattr(value, "digest") else asdict(value)


class _SplitWriter:
    """Writes the documents of rows into the files of their splits, and counts them."""

    def __init__(self, target: Path, parts: tuple[str, ...], columns: tuple[str, ...]) -> None:
        self.counts = {split: Rows() for split in SPLITS}
        self.entries: dict[str, Counter[int]] = {split: Counter() for split in SPLITS}
        self.left_out: Counter[str] = Counter()
        self._files = ExitStack()
        self._writers: dict[str, list[DocumentWriter]] = {}
        self._numbers: dict[str, list[IO[bytes]]] = {}
        for split in SPLITS:
            names = [f"{split}{part}" for part in parts]
            self._writers[split] = [self._files.enter_context(DocumentWriter(target, name)) for name in names]
            paths = [target / f"{split}.{name}.bin" for name in columns]
            self._numbers[split] = [self._files.enter_context(path.open("wb")) for path in paths]

    def add(self, row: SplitRow, documents: list[Encoded]) -> None:
        """Write and count the documents of a row. A malformed row has none."""
        count = self.counts[row.split]
        count.rows += 1
        self.entries[row.split][row.entry] += bool(documents)
        # The two documents of a pair get the same number in their files.
        for document, writer in zip(documents, self._writers[row.split]):
            self.left_out.update(document.left_out)
            count.turns += document.turns
            count.ended += document.ended
            writer.add(document)
        if documents:
            assert not isinstance(row.row, MalformedRow)
            for number, file in zip(row.row.numbers, self._numbers[row.split]):
                file.write(np.float64(number).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()


def _trained_tokenizer(recipe: Recipe, split: Split) -> Any:
    """Train a tokenizer on the training rows."""

    def texts() -> Iterator[str]:
        for part, _, _, row in recipe.split_rows("train", recipe.reader(recipe.sources["train"]), split):
            if part != "train" or isinstance(row, MalformedRow):
                continue
            if any(document.ids for document in row.documents):
                raise ConfigurationError(f"{recipe.owner}: rows of input_ids need the tokenizer that has made the ids.")
            yield from row.texts()

    return train_chat_tokenizer(texts(), recipe.tokenizer)


def _chunks(rows: Iterator[SplitRow]) -> Iterator[list[SplitRow]]:
    while True:
        chunk = list(islice(rows, _CHUNK))
        if not chunk:
            return
        yield chunk


def _has_messages(row: Example | MalformedRow) -> bool:
    return not isinstance(row, MalformedRow) and any(document.messages for document in row.documents)


def _changes(root: Path, made_from: dict[str, Any]) -> str | None:
    """Return the differences from the newest cache of the same sources, as a clause; None if there is no such cache."""
    manifests = sorted(root.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for manifest in manifests:
        try:
            old = read_manifest(manifest.parent)["made_from"]
            same = _source_names(old) == _source_names(made_from)
        except (OSError, ValueError, KeyError, TypeError):  # a damaged cache is refused when it is opened
            continue
        if same:
            return f"{'; '.join(_differences(old, made_from))} changed since {manifest.parent}"
    return None


def _source_names(made_from: dict[str, Any]) -> dict[str, list[str]]:
    return {split: [name for name, _ in listed] for split, listed in made_from["sources"].items()}


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    if old["format"] != new["format"]:
        yield "the format of the cache"
        return  # another format may have other entries
    for split, sources in new["sources"].items():
        for (name, digest), (_, old_digest) in zip(sources, old["sources"][split]):
            if digest != old_digest:
                yield name
    if old["entries"] != new["entries"]:
        yield "the sources that belong together"
    if old["tokenizer"] != new["tokenizer"]:
        yield "the tokenizer or its chat template"
    for name, value in new["settings"].items():
        if old["settings"].get(name) != value:
            yield name
