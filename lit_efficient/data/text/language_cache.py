"""Sources -> tokenised documents in a cache that is named by the hash of everything it was made from.

    key = hash(contents of all sources, tokenizer with its template, settings that matter, format of the files)

So a cache cannot be stale: another content, tokenizer, template or setting is another folder, and what differs from the
last one of the same sources is said. A damaged folder is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_efficient.data.text import document_store
from lit_efficient.data.text.chat_formats import Document, Format, MalformedRow
from lit_efficient.data.text.chat_tokenizer import fingerprint, train_chat_tokenizer
from lit_efficient.data.text.chat_tokens import ChatTokens, OnUntrainedEnd, TrainOn
from lit_efficient.data.text.document_store import DocumentWriter
from lit_efficient.data.text.reading import Reader, check_malformed, in_chunks
from lit_efficient.data.text.rows import Source
from lit_efficient.data.text.text_files import unit_hash
from lit_efficient.data.text.truncation import Counts, Side, fit
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import cache_root, prepared_folder

_CHUNK = 256  # documents tokenised together


@dataclass(frozen=True)
class Recipe:
    """What decides the tokens that sources become, beside their content and the tokenizer.

    Args:
        format: as for :class:`~lit_efficient.data.text.reading.Reader`.
        columns: as for it.
        max_rows: as for it.
        train_on: as for :class:`~lit_efficient.data.text.chat_tokens.ChatTokens`.
        untrained_end: as for it.
        max_length: most tokens of a document.
        truncation: as ``side`` of :func:`~lit_efficient.data.text.truncation.fit`.
        vocab_size: of the tokenizer that is trained if none is given.
        val_fraction: share of the rows that is held out if there are no sources for validation.
        seed: another one holds out other rows.
    """

    format: Format | Literal["auto"]
    columns: tuple[tuple[str, str], ...]
    max_rows: int | None
    train_on: TrainOn
    untrained_end: OnUntrainedEnd
    max_length: int
    truncation: Side
    vocab_size: int | None
    val_fraction: float | None
    seed: int


def prepare(
    recipe: Recipe,
    sources: dict[str, list[Source]],
    tokenizer: Any | None,
    cache_dir: str | None,
    thorough: bool,
) -> Path:
    """Find or make the cache.

    Args:
        recipe: the settings.
        sources: those of "train", and of "val" unless rows are held out.
        tokenizer: what :func:`~lit_efficient.data.text.chat_tokenizer.load_chat_tokenizer` gave; None trains one.
        cache_dir: where caches are kept; None is :func:`~lit_efficient.files.cache.cache_root`.
        thorough: compare the contents of an existing cache with its hashes.

    Returns:
        The folder: documents of "train" and "val", the tokenizer, the manifest.
    """
    made_from = {
        "sources": {split: [[s.name, s.digest] for s in listed] for split, listed in sources.items()},
        "tokenizer": "trained on these rows" if tokenizer is None else fingerprint(tokenizer),
        "settings": asdict(recipe) | {"columns": dict(recipe.columns)},
        "format": document_store.FORMAT,
    }
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    folder = (Path(cache_dir).expanduser() if cache_dir else cache_root()) / "language" / key[:32]
    if not folder.exists() and (changed := _changes(folder.parent, made_from)):
        rank_zero_info(f"LanguageData: made anew, because {'; '.join(changed)} changed since {changed.folder}.")
    found = prepared_folder(
        folder,
        lambda target: _Builder(target, recipe, sources, tokenizer).build(made_from),
        lambda path: document_store.problem(path, thorough),
    )
    if document_store.read_manifest(found)["made_from"] != json.loads(json.dumps(made_from)):
        raise ConfigurationError(f"The cache {found} was made from other data or settings. Delete it and run again.")
    return found


class _Builder:
    def __init__(self, target: Path, recipe: Recipe, sources: dict[str, list[Source]], tokenizer: Any | None) -> None:
        self.target, self.recipe, self.sources, self.tokenizer = target, recipe, sources, tokenizer
        self.held_out_below = recipe.val_fraction or 0.0
        self.counts = {"train": Counts(), "val": Counts()}
        self.shown: dict[str, list[tuple[str, str]]] = {}
        self.formats: list[str] = []
        self.end_warning: str | None = None

    def build(self, made_from: dict[str, Any]) -> None:
        """Write everything into the empty target."""
        if "val" not in self.sources:
            self._hold_something_out()
        if self.tokenizer is None:
            texts = (
                text for split, _, document in self._documents("train") if split == "train" for text in _texts(document)
            )
            self.tokenizer = train_chat_tokenizer(texts, self.recipe.vocab_size or 0)
        encoder = ChatTokens(self.tokenizer, self.recipe.train_on, self.recipe.untrained_end)
        with DocumentWriter(self.target, "train") as train, DocumentWriter(self.target, "val") as val:
            for name in self.sources:
                self._write(name, encoder, {"train": train, "val": val})
        self.tokenizer.save_pretrained(str(self.target / "tokenizer"))
        # Of a stream only the validation rows are read here, and they may hold no turn.
        chats = any(count.turns for count in self.counts.values()) or "train" not in self.sources
        end = encoder.end_of_turn if chats and self.tokenizer.chat_template is not None else None
        about = {
            "made_from": made_from,
            "tokenizer_hash": fingerprint(self.tokenizer),
            "formats": self.formats,
            "counts": {split: counts.as_dict() for split, counts in self.counts.items()},
            "malformed": self.shown,
            "end_of_turn": end,
            "end_warning": self.end_warning,
        }
        document_store.seal(self.target, about)

    def _documents(self, name: str, reader: Reader | None = None) -> Iterator[tuple[str, str, Document]]:
        """Yield split, place and document."""
        for place, document in reader or self._reader(name):
            held_out = name == "val" or _unit_hash(self.recipe.seed, document) < self.held_out_below
            yield "val" if held_out else "train", place, document

    def _reader(self, name: str) -> Reader:
        return Reader(self.sources[name], self.recipe.format, dict(self.recipe.columns), self.recipe.max_rows)

    def _hold_something_out(self) -> None:
        """Few rows or a small fraction: the row with the smallest hash is for validation if none would be."""
        ranks = sorted({_unit_hash(self.recipe.seed, document) for _, document in self._reader("train")})
        if len(ranks) < 2:
            raise ConfigurationError(
                f"LanguageData: {len(ranks)} documents cannot be split into training and validation; give val."
            )
        self.held_out_below = min(max(self.held_out_below, ranks[1]), ranks[-1])

    def _write(self, name: str, encoder: ChatTokens, writers: dict[str, DocumentWriter]) -> None:
        reader = self._reader(name)
        self.formats += reader.formats
        for chunk in in_chunks(self._documents(name, reader), _CHUNK):
            if self.end_warning is None and any(document.messages for _, _, document in chunk):
                self.end_warning = encoder.check_end_of_turn()
            for (split, place, _), encoded in zip(chunk, encoder.encode([document for _, _, document in chunk])):
                counts = self.counts[split]
                counts.rows += 1
                if isinstance(encoded, MalformedRow):
                    reader.refuse(place, str(encoded))
                    continue
                counts.turns += encoded.turns
                counts.ended += encoded.ended
                for piece in fit(encoded, self.recipe.max_length, self.recipe.truncation, counts):
                    writers[split].add(piece)
        self.counts[name].rows += reader.rows - sum(self.counts[s].rows for s in self._splits_of(name))
        self.counts[name].malformed = reader.malformed
        self.shown[name] = reader.shown

    def _splits_of(self, name: str) -> list[str]:
        return [name] if "val" in self.sources else ["train", "val"]


def say(folder: Path, max_malformed: float) -> None:
    """Log what the cache holds and what was left out of it.

    Args:
        folder: the cache.
        max_malformed: share of malformed rows that is put up with.

    Raises:
        ConfigurationError: If more rows are malformed.
    """
    manifest = document_store.read_manifest(folder)
    for sentence in manifest["formats"]:
        rank_zero_info(f"LanguageData: {sentence}")
    splits = ("train", "val")
    for name, shown in manifest["malformed"].items():
        rows = [manifest["counts"][s]["rows"] for s in (splits if len(manifest["malformed"]) == 1 else (name,))]
        found = check_malformed(name, sum(rows), manifest["counts"][name]["malformed"], shown, max_malformed)
        if found:
            rank_zero_warn(f"LanguageData: {found}")
    if manifest["end_warning"]:
        rank_zero_warn(f"LanguageData: {manifest['end_warning']}: a model trained on it may never stop")
    for split in splits:
        if manifest["counts"][split]["rows"]:
            rank_zero_info(f"LanguageData: {split}: {summary(manifest['counts'][split])}")
    rank_zero_info(f"LanguageData: cache {folder}")


def summary(counts: dict[str, int]) -> str:
    """One line about a split."""
    parts = [f"{counts['documents']:,} documents of {counts['rows']:,} rows, {counts['tokens']:,} tokens"]
    parts.append(f"{counts['trained'] / max(counts['tokens'], 1):.1%} of them trained")
    if counts["truncated"]:
        share = counts["truncated"] / max(counts["rows"], 1)
        parts.append(f"{counts['truncated']:,} rows truncated ({share:.1%}), {counts['tokens_lost']:,} tokens lost")
    if counts["dropped"]:
        parts.append(f"{counts['dropped']:,} dropped with nothing left to learn")
    if counts["cut_into_pieces"]:
        parts.append(f"{counts['cut_into_pieces']:,} texts cut into pieces")
    if counts["turns"]:
        parts.append(f"end of turn trained in {counts['ended'] / counts['turns']:.1%} of {counts['turns']:,} turns")
    return "; ".join(parts)


class _Changes(list[str]):
    folder: Path


def _changes(root: Path, made_from: dict[str, Any]) -> _Changes | None:
    """What differs from the newest cache of the same sources; None if there is none."""
    names = {split: [name for name, _ in listed] for split, listed in made_from["sources"].items()}
    folders = sorted(root.glob(f"*/{document_store.MANIFEST}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for manifest in folders:
        try:
            old = document_store.read_manifest(manifest.parent)["made_from"]
            same = {split: [name for name, _ in listed] for split, listed in old["sources"].items()} == names
        except (OSError, ValueError, KeyError, TypeError):  # it will be refused by who opens it
            continue
        if same:
            found = _Changes(_differences(old, json.loads(json.dumps(made_from))))
            found.folder = manifest.parent
            return found
    return None


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for split, listed in new["sources"].items():
        yield from (name for (name, now), (_, then) in zip(listed, old["sources"][split]) if now != then)
    if old["tokenizer"] != new["tokenizer"]:
        yield "the tokenizer or its chat template"
    yield from (f"{name}" for name, value in new["settings"].items() if old["settings"].get(name) != value)
    if old["format"] != new["format"]:
        yield "the format of the cache"


def _texts(document: Document) -> Iterator[str]:
    if document.messages:
        yield from (message["content"] for message in document.messages)
    else:
        yield document.text


def _unit_hash(seed: int, document: Document) -> float:
    """A number in [0, 1) from the content, so that equal rows are never on both sides of a split."""
    content = json.dumps([seed, document.messages, document.text], sort_keys=True, default=str)
    return unit_hash(content)
