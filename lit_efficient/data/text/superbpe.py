"""SuperBPE: a vocabulary whose last tokens span several words, so that a text has fewer tokens.

    stage 1: BPE within words up to  transition * vocab_size;    stage 2: more merges, across spaces, within a line

Saves: tokens, and with them compute, for the same text and the same vocabulary; bytes a token are printed for both.
Costs: training once, in Python: about a minute for 8 MB of text; embeddings of long tokens are seen more rarely.
Source: Liu et al. (2025), https://arxiv.org/abs/2503.13423. Here a token stays within a line and ``max_words`` words.
"""

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from lit_efficient.data.text.token_cache import END_OF_TEXT, train_tokenizer
from lit_efficient.errors import check_number

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Pair = tuple[int, int]
# Line breaks belong to the line that follows, like its indentation.
_LINE = r"\n+[^\n]*|[^\n]+"
# Characters of text (or a little more) that the second stage holds in memory.
_MOST = 32_000_000
# Spelling of a space in byte-level vocabularies.
_SPACE = "Ġ"


def train_superbpe(
    texts: Sequence[str], vocab_size: int, *, transition: float = 0.8, max_words: int = 4
) -> "Tokenizer":
    """Train both stages. The first ids of the tokenizer are those of plain BPE.

    Args:
        texts: Training texts.
        vocab_size: Number of ids, at least 257. With little text the tokenizer may have fewer ids.
        transition: Share of the vocabulary that plain BPE makes, in (0, 1]. 1 is plain BPE.
        max_words: Largest number of words that a token may span, at least 1.

    Raises:
        ConfigurationError: If an argument is out of its range.
    """
    check_number("train_superbpe", "vocab_size", vocab_size, least=257, whole=True)
    check_number("train_superbpe", "transition", transition, above=0, most=1)
    check_number("train_superbpe", "max_words", max_words, least=1, whole=True)
    first = train_tokenizer(texts, max(257, round(transition * vocab_size)))
    lines = _lines(texts)
    line_tokenizer = _across_words(first, [])
    encoded = [encoding.ids for encoding in line_tokenizer.encode_batch_fast(list(lines))]
    spelling = {index: token for token, index in first.get_vocab().items()}
    merges = continue_merges(
        encoded, list(lines.values()), spelling, vocab_size, lambda token: words_in(token) <= max_words
    )
    return _across_words(first, merges)


def continue_merges(
    sequences: Iterable[Sequence[int]],
    counts: Sequence[int],
    spelling: dict[int, str],
    vocab_size: int,
    allowed: Callable[[str], bool],
) -> list[tuple[str, str]]:
    """Continue byte-pair encoding: merge the most frequent neighbours until the vocabulary is full.

    A merge changes only the places of its pair, so the work grows with the number of changed places. Nothing is merged
    across two sequences.

    Args:
        sequences: Ids of each sequence.
        counts: Number of times that each sequence occurs.
        spelling: String of each id. The strings of new ids are added.
        vocab_size: Number of ids at the end.
        allowed: Return whether a string may be a token.

    Returns:
        The merged pairs, as strings, in order. Of equally frequent pairs the one with smaller ids comes first.
    """
    symbol, before, after, weight = _linked(sequences, counts)
    frequency: Counter[Pair] = Counter()
    places: defaultdict[Pair, list[int]] = defaultdict(list)
    for position, following in enumerate(after):
        if following >= 0:
            pair = (symbol[position], symbol[following])
            frequency[pair] += weight[position]
            places[pair].append(position)
    heap = [(-count, pair) for pair, count in frequency.items()]
    heapq.heapify(heap)
    ids = {token: index for index, token in spelling.items()}
    merges: list[tuple[str, str]] = []

    def changed(pair: Pair, by: int) -> None:
        frequency[pair] += by
        if by > 0:
            heapq.heappush(heap, (-frequency[pair], pair))

    while heap and len(spelling) < vocab_size:
        count, pair = heapq.heappop(heap)
        # An old entry; a pair that became more frequent has a newer entry.
        if -count != frequency[pair]:
            if 1 < frequency[pair] < -count:
                heapq.heappush(heap, (-frequency[pair], pair))
            continue
        token = spelling[pair[0]] + spelling[pair[1]]
        if -count < 2 or not allowed(token):
            continue
        new = ids.setdefault(token, len(spelling))
        spelling[new] = token
        merges.append((spelling[pair[0]], spelling[pair[1]]))
        # Sorted, so that "aaa" is merged from the left, as the tokenizer does.
        for position in sorted(places.pop(pair)):
            following = after[position]
            if following < 0 or (symbol[position], symbol[following]) != pair:
                # Another merge has changed this place.
                continue
            left = before[position]
            right = after[following]
            times = weight[position]
            symbol[position] = new
            symbol[following] = -1
            after[position] = right
            after[following] = -1
            if right >= 0:
                before[right] = position
                changed((pair[1], symbol[right]), -times)
                changed((new, symbol[right]), times)
                places[new, symbol[right]].append(position)
            if left >= 0:
                changed((symbol[left], pair[0]), -times)
                changed((symbol[left], new), times)
                places[symbol[left], new].append(left)
        frequency[pair] = 0
    return merges


def words_in(token: str) -> int:
    """Return the number of words, separated by spaces, that a byte-level token spans."""
    return len([part for part in token.split(_SPACE) if part])


def bytes_per_token(tokenizer: "Tokenizer", texts: Sequence[str]) -> float:
    """Return the mean number of bytes of ``texts`` that a token stands for."""
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(list(texts)))
    return sum(len(text.encode()) for text in texts) / tokens


def _linked(
    sequences: Iterable[Sequence[int]], counts: Sequence[int]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return all sequences as one linked list: symbol, position before and after (-1: none), and count, by position."""
    symbol: list[int] = []
    before: list[int] = []
    after: list[int] = []
    weight: list[int] = []
    for sequence, count in zip(sequences, counts, strict=True):
        start = len(symbol)
        length = len(sequence)
        symbol += sequence
        before += [-1, *range(start, start + length - 1)][:length]
        after += [*range(start + 1, start + length), -1][:length]
        weight += [count] * length
    return symbol, before, after, weight


def _lines(texts: Sequence[str]) -> Counter[str]:
    """Return the lines of the first texts, with their numbers."""
    lines: Counter[str] = Counter()
    used = 0
    for text in texts:
        lines.update(re.findall(_LINE, text))
        used += len(text)
        if used >= _MOST:
            break
    return lines


def _across_words(first: "Tokenizer", merges: Sequence[tuple[str, str]]) -> "Tokenizer":
    """Return a tokenizer with more merges that splits text into lines instead of words."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    state = json.loads(first.to_str())
    vocabulary = state["model"]["vocab"]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    state["model"]["merges"] += [list(pair) for pair in merges]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    lines = pre_tokenizers.Split(Regex(_LINE), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.ByteLevel(False, use_regex=False)])
    assert tokenizer.token_to_id(END_OF_TEXT) is not None
    return tokenizer
