"""Rows -> tokenised documents in a cache that is named by the hash of everything it was made from.

    key = hash(contents of all sources, tokenizer with its template, settings that matter, format of the files)

So a cache cannot be stale: another content, tokenizer, template or setting is another folder, and what differs from the
last one of the same sources is said. A damaged folder is refused. Documents are stored whole: another ``max_length``
cuts the same cache. Rows are held out by the hash of what must not stand on both sides of the split: of a text all of
it, of a pair its prompt. The two documents of a pair lie in files of their own, under the same number.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_efficient.data.text.chat_formats import Document, MalformedRow
from lit_efficient.data.text.chat_tokenizer import fingerprint, train_chat_tokenizer
from lit_efficient.data.text.chat_tokens import ChatTokens, Encoded, OnUntrainedEnd
from lit_efficient.data.text.document_store import FORMAT, DocumentWriter
from lit_efficient.data.text.in_processes import in_processes
from lit_efficient.data.text.reading import SHOWN, Example, Reader, in_chunks
from lit_efficient.data.text.rows import Source
from lit_efficient.data.text.text_files import unit_hash
from lit_efficient.data.text.turn_spans import TrainOn
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import MANIFEST, cache_folder, prepared_folder, read_manifest, seal
from lit_efficient.files.file_hashes import broken_seal

SPLITS = ("train", "val")
_CHUNK = 256  # rows tokenised together


@dataclass
class Rows:
    """How many rows a split has, before any is cut: all, those left out, and the turns of the others."""

    rows: int = 0
    malformed: int = 0
    turns: int = 0
    ended: int = 0


@dataclass(frozen=True)
class Recipe:
    """What decides the tokens that rows become."""

    owner: str  # the datamodule, for what is said
    sources: dict[str, list[Source]]  # those of "train", and of "val" unless rows are held out
    reader: Callable[[list[Source]], Reader]  # reads sources
    settings: dict[str, Any]  # what the reader depends on, JSON-able
    parts: tuple[str, ...]  # what the names of the files of a row's documents end with, one for each
    # what :func:`~lit_efficient.data.text.chat_tokenizer.load_chat_tokenizer` gave; a number trains one of so many ids
    tokenizer: Any
    train_on: TrainOn  # as for :class:`~lit_efficient.data.text.chat_tokens.ChatTokens`
    untrained_end: OnUntrainedEnd  # as for it
    val_fraction: float  # share of the rows that is held out if there are no sources for validation
    seed: int  # another one holds out other rows

    @property
    def trains(self) -> bool:
        """Whether the tokenizer is trained."""
        return isinstance(self.tokenizer, int)

    def made_from(self) -> dict[str, Any]:
        """All of it as JSON has it."""
        settings = {**self.settings, "train_on": self.train_on, "untrained_end": self.untrained_end, "seed": self.seed}
        settings["val_fraction"] = None if "val" in self.sources else self.val_fraction
        settings["vocab_size"] = self.tokenizer if self.trains else None
        about = {
            "sources": {split: [[s.name, s.digest] for s in listed] for split, listed in self.sources.items()},
            "tokenizer": "trained on these rows" if self.trains else fingerprint(self.tokenizer),
            "settings": settings,
            "format": FORMAT,
        }
        return dict(json.loads(json.dumps(about)))

    def rank(self, row: Example) -> float:
        """A number in [0, 1) from what must not stand on both sides of the split."""
        return unit_hash(json.dumps([self.seed, *row.identity], sort_keys=True, default=str))

    def threshold(self) -> float:
        """Rows that rank below it are held out: at least one, and not all, however few rows or small a fraction."""
        if "val" in self.sources:
            return 0.0
        ranks = sorted({self.rank(row) for _, row in self.reader(self.sources["train"])})
        if len(ranks) < 2:
            raise ConfigurationError(
                f"{self.owner}: {len(ranks)} different rows cannot be split into training and validation; give val."
            )
        return min(max(self.val_fraction, ranks[1]), ranks[-1])


def prepare(recipe: Recipe, kind: str, cache_dir: str | None, thorough: bool) -> Path:
    """Find or make the cache; return its folder: documents of "train" and "val", the tokenizer, the manifest.

    ``thorough``: the contents of an existing cache are compared with its hashes.
    """
    made_from = recipe.made_from()
    folder = cache_folder(cache_dir, kind, made_from)
    if not folder.exists() and (changed := _changes(folder.parent, made_from)):
        rank_zero_info(f"{recipe.owner}: made again, because {changed}.")
    found = prepared_folder(
        folder, lambda target: _build(recipe, target), lambda path: broken_seal(path, FORMAT, thorough)
    )
    if read_manifest(found)["made_from"] != made_from:
        raise ConfigurationError(f"The cache {found} was made from other data or settings. Delete it and run again.")
    return found


def _build(recipe: Recipe, target: Path) -> None:
    """Write everything into the empty target."""
    held_out_below = recipe.threshold()

    def rows(name: str, reader: Reader) -> Iterator[tuple[str, str, Example]]:
        for place, row in reader:
            held_out = name == "val" or recipe.rank(row) < held_out_below
            yield "val" if held_out else "train", place, row

    tokenizer = recipe.tokenizer
    if recipe.trains:
        read = rows("train", recipe.reader(recipe.sources["train"]))
        texts = (text for split, _, row in read if split == "train" for text in row.texts())
        tokenizer = train_chat_tokenizer(texts, tokenizer)
    encoder = ChatTokens(tokenizer, recipe.train_on, recipe.untrained_end)
    counts = {split: Rows() for split in SPLITS}
    about: dict[str, Any] = {"made_from": recipe.made_from(), "formats": [], "malformed": {}, "end_warning": None}
    lacking: Counter[str] = Counter()
    checked = False
    with ExitStack() as stack:
        writers = {
            split: [stack.enter_context(DocumentWriter(target, f"{split}{part}")) for part in recipe.parts]
            for split in SPLITS
        }
        for name, sources in recipe.sources.items():
            reader = recipe.reader(sources)
            about["formats"] += reader.formats
            chunks = _Chunks(rows(name, reader), reader)
            for documents, encoded in in_processes(encoder.encode, chunks):
                if not checked and any(document.messages for document in documents):
                    checked, about["end_warning"] = True, encoder.check_end_of_turn()
                chunk = chunks.next()
                for (split, place, _), found in zip(chunk, zip(*[iter(encoded)] * len(recipe.parts))):
                    counts[split].rows += 1
                    bad = next((one for one in found if isinstance(one, MalformedRow)), None)
                    if bad is not None:
                        chunks.refuse(place, str(bad))
                        continue
                    for one, writer in zip(found, writers[split]):
                        assert isinstance(one, Encoded)
                        lacking.update(one.left_out)
                        counts[split].turns += one.turns
                        counts[split].ended += one.ended
                        writer.add(one)
            malformed = reader.malformed + chunks.refused
            about["malformed"][name] = {"rows": reader.rows, "malformed": malformed, "shown": chunks.shown()}
            splits = [name] if "val" in recipe.sources else SPLITS
            counts[name].rows += reader.rows - sum(counts[split].rows for split in splits)  # malformed when read
            counts[name].malformed = malformed
    tokenizer.save_pretrained(str(target / "tokenizer"))
    # Of a stream only the validation rows are read here, and they may hold no turn.
    chats = any(count.turns for count in counts.values()) or "train" not in recipe.sources or len(recipe.parts) > 1
    about["left_out"] = dict(lacking)
    about["counts"] = {split: asdict(count) for split, count in counts.items()}
    about["end_of_turn"] = encoder.end_of_turn if chats and tokenizer.chat_template is not None else None
    seal(target, FORMAT, about)


class _Chunks:
    """Rows in chunks, of which the documents are read ahead, and an account of malformed ones in the rows' order."""

    def __init__(self, rows: Iterator[tuple[str, str, Example]], reader: Reader) -> None:
        self._rows, self._reader = rows, reader
        self._read: deque[tuple[list[tuple[str, str, Example]], int]] = deque()  # and how many were shown by then
        self._shown: list[tuple[str, str]] = []
        self._taken = 0
        self.refused = 0

    def __iter__(self) -> Iterator[list[Document]]:
        for chunk in in_chunks(self._rows, _CHUNK):
            self._read.append((chunk, len(self._reader.shown)))
            yield [document for _, _, row in chunk for document in row.documents]

    def next(self) -> list[tuple[str, str, Example]]:
        """The rows of the chunk whose turn it is."""
        chunk, shown = self._read.popleft()
        self._shown += self._reader.shown[self._taken : shown]
        self._taken = shown
        return chunk

    def refuse(self, place: str, reason: str) -> None:
        """Count a row of this chunk that turned out to be malformed when it was tokenised."""
        self.refused += 1
        self._shown.append((place, reason))

    def shown(self) -> list[tuple[str, str]]:
        """The first malformed rows, after the last chunk."""
        return [*self._shown, *self._reader.shown[self._taken :]][:SHOWN]


def _changes(root: Path, made_from: dict[str, Any]) -> str | None:
    """What differs from the newest cache of the same sources, as the rest of a sentence; None if there is none."""

    def names(made: dict[str, Any]) -> dict[str, list[str]]:
        return {split: [name for name, _ in listed] for split, listed in made["sources"].items()}

    manifests = sorted(root.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for manifest in manifests:
        try:
            old = read_manifest(manifest.parent)["made_from"]
            same = names(old) == names(made_from)
        except (OSError, ValueError, KeyError, TypeError):  # it will be refused by who opens it
            continue
        if same:
            return f"{'; '.join(_differences(old, made_from))} changed since {manifest.parent}"
    return None


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for split, listed in new["sources"].items():
        yield from (name for (name, now), (_, then) in zip(listed, old["sources"][split]) if now != then)
    if old["tokenizer"] != new["tokenizer"]:
        yield "the tokenizer or its chat template"
    yield from (name for name, value in new["settings"].items() if old["settings"].get(name) != value)
    if old["format"] != new["format"]:
        yield "the format of the cache"
