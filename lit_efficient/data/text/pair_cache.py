"""Preference data -> tokenised pairs in a cache that is named by the hash of everything it was made from.

    train.chosen.*, train.rejected.*, val.chosen.*, val.rejected.*    document i of each side is one pair
    trained[t] = the token belongs to the last answer, its end of turn included

Pairs are held out by their prompt, so that no prompt is on both sides of the split.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lit_efficient.data.text import document_store
from lit_efficient.data.text.chat_formats import MalformedRow
from lit_efficient.data.text.chat_tokenizer import fingerprint, train_chat_tokenizer
from lit_efficient.data.text.chat_tokens import ChatTokens, Encoded, OnUntrainedEnd
from lit_efficient.data.text.document_store import Documents, DocumentWriter
from lit_efficient.data.text.pair_formats import Pair, PairFormat, StringsAs, read_pair, recognise_pairs
from lit_efficient.data.text.reading import Reader, in_chunks
from lit_efficient.data.text.rows import Source
from lit_efficient.data.text.text_files import unit_hash
from lit_efficient.errors import ConfigurationError
from lit_efficient.files.cache import cache_root, prepared_folder

TooLong = Literal["drop", "left"]
_CHUNK = 128


@dataclass(frozen=True)
class PairRecipe:
    """What decides the tokens that sources become, beside their content and the tokenizer."""

    columns: tuple[tuple[str, str], ...]
    strings_as: StringsAs
    max_rows: int | None
    untrained_end: OnUntrainedEnd
    max_length: int
    too_long: TooLong
    vocab_size: int | None
    val_fraction: float | None
    seed: int


class PairReader(Reader):
    """Reads pairs, with an account of every row that is none; as :class:`~lit_efficient.data.text.reading.Reader` does.

    Args:
        sources: what to read.
        strings_as: as for :func:`~lit_efficient.data.text.pair_formats.read_pair`.
        columns: own names of keys.
        max_rows: read at most so many rows of each source.
    """

    def __init__(
        self,
        sources: list[Source],
        strings_as: StringsAs = "text",
        columns: Mapping[str, str] | None = None,
        max_rows: int | None = None,
    ) -> None:
        self._strings_as: StringsAs = strings_as
        super().__init__(sources, "auto", columns, max_rows)

    def __iter__(self) -> Iterator[tuple[str, Pair]]:  # type: ignore[override]
        yield from super().__iter__()  # type: ignore[misc]

    def _format(self, source: Source, kind: Any) -> tuple[Any, str]:
        if source.is_text:
            raise ConfigurationError(
                f"PreferenceData: {source.name} is a text; pairs come as .jsonl, .json or .parquet."
            )
        return recognise_pairs(self._first_rows(source), source.name)

    def _read(self, row: Mapping[str, Any], kind: PairFormat) -> Any:  # type: ignore[override]
        return read_pair(row, kind, self._strings_as)


def fit_pair(pair: tuple[Encoded, Encoded], max_length: int, too_long: TooLong) -> tuple[Encoded, Encoded] | None:
    """Make a pair fit, without touching an answer.

    Args:
        pair: chosen and rejected.
        max_length: most tokens of each.
        too_long: ``left`` cuts the same number of tokens off the beginning of both, so that they go on having the same
            prompt; ``drop`` leaves the pair out.

    Returns:
        The pair; None if it is left out, also because ``left`` would have to cut into an answer.
    """
    excess = max(len(one.ids) for one in pair) - max_length
    if excess <= 0:
        return pair
    # One token before the first that is learned has to stay: it predicts it.
    if too_long == "drop" or excess >= min(int(np.flatnonzero(one.trained)[0]) for one in pair):
        return None
    chosen, rejected = (
        replace(one, ids=one.ids[excess:], trained=one.trained[excess:], num_bytes=one.num_bytes[excess:])
        for one in pair
    )
    return chosen, rejected


def prepare_pairs(
    recipe: PairRecipe, sources: dict[str, list[Source]], tokenizer: Any | None, cache_dir: str | None, thorough: bool
) -> Path:
    """Find or make the cache.

    Args:
        recipe: the settings.
        sources: those of "train", and of "val" unless pairs are held out.
        tokenizer: what :func:`~lit_efficient.data.text.chat_tokenizer.load_chat_tokenizer` gave; None trains one.
        cache_dir: where caches are kept; None is :func:`~lit_efficient.files.cache.cache_root`.
        thorough: compare the contents of an existing cache with its hashes.
    """
    made_from = {
        "sources": {split: [[s.name, s.digest] for s in listed] for split, listed in sources.items()},
        "tokenizer": "trained on these pairs" if tokenizer is None else fingerprint(tokenizer),
        "settings": asdict(recipe) | {"columns": dict(recipe.columns)},
        "format": document_store.FORMAT,
    }
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    folder = (Path(cache_dir).expanduser() if cache_dir else cache_root()) / "preference" / key[:32]
    return prepared_folder(
        folder,
        lambda target: _build(target, recipe, sources, tokenizer, made_from),
        lambda path: document_store.problem(path, thorough),
    )


def _build(
    target: Path,
    recipe: PairRecipe,
    sources: dict[str, list[Source]],
    tokenizer: Any | None,
    made_from: dict[str, Any],
) -> None:
    def reader(name: str) -> PairReader:
        return PairReader(sources[name], recipe.strings_as, dict(recipe.columns), recipe.max_rows)

    held_below = 0.0 if "val" in sources else _threshold(reader("train"), recipe)
    if tokenizer is None:
        pairs = (pair for _, pair in reader("train") if _unit_hash(recipe.seed, pair) >= held_below)
        tokenizer = train_chat_tokenizer((text for pair in pairs for text in pair.texts()), recipe.vocab_size or 0)
    encoder = ChatTokens(tokenizer, "completion", recipe.untrained_end)
    about: dict[str, Any] = {"made_from": made_from, "formats": [], "malformed": {}, "end_warning": None}
    counts = {split: dict.fromkeys(("pairs", "left_out", "cut", "tokens", "trained"), 0) for split in ("train", "val")}
    with ExitStack() as stack:
        writers = {
            (split, side): stack.enter_context(DocumentWriter(target, f"{split}.{side}"))
            for split in counts
            for side in ("chosen", "rejected")
        }
        for name in sources:
            rows = reader(name)
            about["formats"] += rows.formats
            for chunk in in_chunks(iter(rows), _CHUNK):
                if about["end_warning"] is None and any(pair.chosen.messages for _, pair in chunk):
                    about["end_warning"] = encoder.check_end_of_turn()
                encoded = encoder.encode([side for _, pair in chunk for side in (pair.chosen, pair.rejected)])
                for (place, pair), chosen, rejected in zip(chunk, encoded[::2], encoded[1::2]):
                    held = name == "val" or _unit_hash(recipe.seed, pair) < held_below
                    split = "val" if held else "train"
                    bad = next((side for side in (chosen, rejected) if isinstance(side, MalformedRow)), None)
                    if bad is not None:
                        rows.refuse(place, str(bad))
                        continue
                    assert isinstance(chosen, Encoded)
                    assert isinstance(rejected, Encoded)
                    kept = fit_pair((chosen, rejected), recipe.max_length, recipe.too_long)
                    _count(counts[split], (chosen, rejected), kept)
                    for side, one in zip(("chosen", "rejected"), kept or ()):
                        writers[split, side].add(one)
            about["malformed"][name] = {"rows": rows.rows, "malformed": rows.malformed, "shown": rows.shown}
    tokenizer.save_pretrained(str(target / "tokenizer"))
    chat = tokenizer.chat_template is not None
    about |= {"counts": counts, "end_of_turn": encoder.end_of_turn if chat else None}
    document_store.seal(target, about)


def _count(counts: dict[str, int], pair: tuple[Encoded, Encoded], kept: tuple[Encoded, Encoded] | None) -> None:
    counts["pairs"] += kept is not None
    counts["left_out"] += kept is None
    counts["cut"] += kept is not None and kept is not pair
    for one in kept or ():
        counts["tokens"] += len(one.ids)
        counts["trained"] += int(one.trained[1:].sum())


def _threshold(rows: PairReader, recipe: PairRecipe) -> float:
    """Prompts whose hash is below it are held out: at least one, and not all."""
    ranks = sorted({_unit_hash(recipe.seed, pair) for _, pair in rows})
    if len(ranks) < 2:
        raise ConfigurationError(
            f"PreferenceData: {len(ranks)} prompts cannot be split into training and validation; give val."
        )
    return min(max(recipe.val_fraction or 0.0, ranks[1]), ranks[-1])


def _unit_hash(seed: int, pair: Pair) -> float:
    content = json.dumps([seed, pair.prompt], sort_keys=True, default=str)
    return unit_hash(content)


class PairRows:
    """The pairs of a split: item i is chosen and rejected, each as ids and labels ``[n]``.

    Args:
        folder: what :func:`prepare_pairs` made.
        split: name of the split.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.chosen = Documents(folder, f"{split}.chosen")
        self.rejected = Documents(folder, f"{split}.rejected")

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        return self.chosen[index], self.rejected[index]
