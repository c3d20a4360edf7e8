"""Tests of SuperBPE: the second stage is byte-pair encoding, spans words within its limits, and saves tokens."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lit_efficient import ConfigurationError
from lit_efficient.__main__ import main
from lit_efficient.data.text.superbpe import bytes_per_token, continue_merges, train_superbpe, words_in
from lit_efficient.data.text.text_files import standard_library
from lit_efficient.data.text.token_cache import train_tokenizer


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [path.read_text("utf-8") for path in sorted(standard_library().glob("[a-d]*.py"))[:25]]


def _naive(sequences: list[list[int]], counts: list[int], spelling: dict[int, str], size: int) -> list[Any]:
    """Return the same merges by counting all pairs again for each merge."""
    sequences, spelling = [list(s) for s in sequences], dict(spelling)
    merges: list[tuple[str, str]] = []
    while len(spelling) < size:
        pairs: Counter[Any] = Counter()
        for sequence, count in zip(sequences, counts):
            for pair in itertools.pairwise(sequence):
                pairs[pair] += count
        # A run of one symbol overlaps itself; counting all neighbours is what both do.
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            break
        new = len(spelling)
        spelling[new] = spelling[best[0]] + spelling[best[1]]
        merges.append((spelling[best[0]], spelling[best[1]]))
        for sequence in sequences:
            i = 0
            while i < len(sequence) - 1:
                if (sequence[i], sequence[i + 1]) == best:
                    sequence[i : i + 2] = [new]
                i += 1
    return merges


def test_merging_in_place_equals_counting_everything_anew() -> None:
    words = ["banana", "bandana", "anna", "abracadabra", "cabana", "aaaa"]
    spelling = dict(enumerate(sorted(set("".join(words)))))
    ids = {letter: index for index, letter in spelling.items()}
    sequences = [[ids[letter] for letter in word] for word in words]
    counts = [5, 3, 2, 7, 4, 1]
    expected = _naive(sequences, counts, spelling, 20)
    assert continue_merges(sequences, counts, dict(spelling), 20, lambda token: True) == expected
    assert len(expected) == 20 - len(spelling)


@pytest.mark.turns(6, family="slow")
def test_it_takes_fewer_tokens_at_the_same_vocabulary_and_loses_no_text(texts: list[str]) -> None:
    train, held_out = texts[:-4], texts[-4:]
    plain, wide = train_tokenizer(train, 800), train_superbpe(train, 800)
    assert plain.get_vocab_size() == wide.get_vocab_size() == 800
    # 1.03 of Python 3.11's library, 1.01 of 3.13's
    assert bytes_per_token(wide, held_out) > 1.005 * bytes_per_token(plain, held_out)
    strange = "Zażółć\tgęślą\r\n\n\n  jaźń 🙂 <|endoftext|>"
    wide.encode_special_tokens = True
    for text in (*held_out, strange, ""):
        assert wide.decode(wide.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.turns(6, family="slow")
def test_its_first_ids_are_plain_bpe_and_the_rest_span_words(texts: list[str]) -> None:
    wide, plain = train_superbpe(texts, 700, transition=0.8, max_words=2), train_tokenizer(texts, 560)
    assert {token: index for token, index in wide.get_vocab().items() if index < 560} == plain.get_vocab()
    added = [token for token, index in wide.get_vocab().items() if index >= 560]
    assert max(map(words_in, added)) == 2
    assert sum(words_in(token) == 2 for token in added) >= 15
    assert not any("Ċ" in token.lstrip("Ċ") for token in added)  # a line break only begins a token
    assert train_superbpe(texts[:3], 300, transition=1.0).get_vocab() == train_tokenizer(texts[:3], 300).get_vocab()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 256}, "vocab_size must be a whole number of at least 257, got 256"),
        ({"transition": 0.0}, "transition must be above 0 and at most 1, got 0.0"),
        ({"max_words": 0}, "max_words must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train_superbpe(["a b"], **({"vocab_size": 300} | options))


def test_the_command_saves_for_transformers_and_prints_both(
    tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    source = tmp_path / "source"
    source.mkdir()
    for index, text in enumerate(texts):
        (source / f"{index}.py").write_text(text)
    arguments = ["tokenizer", "--vocab_size", "600", "--output", str(tmp_path / "out"), "--paths", str(source)]
    assert main([*arguments, "--val_fraction", "0.2"]) == 0
    printed = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]}
    assert float(printed["superbpe"]) > float(printed["bpe"]) > 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.decode(tokenizer(texts[0])["input_ids"]) == texts[0]
    assert main(arguments) == 2
    assert "output must be a new or empty folder" in capsys.readouterr().err
