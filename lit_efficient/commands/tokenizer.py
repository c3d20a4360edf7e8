"""``python -m lit_efficient tokenizer --kind superbpe | bpe --output DIR``: train a tokenizer."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_efficient.errors import ConfigurationError, check_number


def run(argv: Sequence[str]) -> int:
    """Run ``tokenizer``."""
    parser = argparse.ArgumentParser(
        "lit_efficient tokenizer",
        description="Train a byte-level tokenizer on text and print its bytes per token. With superbpe the last tokens "
        "of the vocabulary may span several words; it is compared with plain BPE on held-out files.",
    )
    parser.add_argument("--kind", choices=("superbpe", "bpe"), default="superbpe")
    parser.add_argument(
        "--vocab_size", type=int, default=4096, help="size of the vocabulary, at least 257 (default: 4096)"
    )
    parser.add_argument("--output", required=True, help="new folder for AutoTokenizer.from_pretrained")
    parser.add_argument("--paths", nargs="+", help="folders and files of text (default: Python's standard library)")
    parser.add_argument(
        "--suffixes", nargs="+", default=[".py"], help="suffixes of files to read in folders (default: .py)"
    )
    parser.add_argument(
        "--transition", type=float, default=0.8, help="superbpe: share of the vocabulary that stays within words"
    )
    parser.add_argument("--max_words", type=int, default=4, help="superbpe: largest number of words in a token")
    parser.add_argument("--val_fraction", type=float, default=0.05, help="approximate share of held-out files")
    arguments = parser.parse_args(argv)
    output = Path(arguments.output)
    from lit_efficient.files.atomic_file import check_new_folder

    check_new_folder(output, "tokenizer")
    check_number("tokenizer", "vocab_size", arguments.vocab_size, least=257, whole=True)
    check_number("tokenizer", "val_fraction", arguments.val_fraction, least=0, below=1)
    from lit_efficient.data.text.superbpe import bytes_per_token, train_superbpe
    from lit_efficient.data.text.token_cache import train_tokenizer

    train, held_out = _texts(arguments)
    plain = train_tokenizer(train, arguments.vocab_size)
    chosen = plain
    figures = {"bpe": plain}
    if arguments.kind == "superbpe":
        chosen = train_superbpe(
            train, arguments.vocab_size, transition=arguments.transition, max_words=arguments.max_words
        )
        figures["superbpe"] = chosen
    _save(chosen, output)
    print(f"{output}: {arguments.kind}, {chosen.get_vocab_size()} ids, from {len(train)} texts")
    print(f"bytes per token on {len(held_out)} held-out texts:")
    for name, tokenizer in figures.items():
        print(f"  {name:<9} {bytes_per_token(tokenizer, held_out):.3f}  ({tokenizer.get_vocab_size()} ids)")
    return 0


def _texts(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    from lit_efficient.data.text.text_files import EXCLUDE, find_files, read_texts, split_texts, standard_library

    excluded = () if arguments.paths else EXCLUDE
    files = find_files(arguments.paths or [standard_library()], arguments.suffixes, excluded)
    read = read_texts(files)
    texts = read.files
    if read.duplicates or read.unreadable:
        print(f"left out {len(read.duplicates)} duplicates and {len(read.unreadable)} files that are not UTF-8")
    if not texts:
        raise ConfigurationError(
            f"tokenizer: --paths contain no text: all of {len(files)} files are empty or not UTF-8"
        )
    return split_texts(texts, arguments.val_fraction, 0)


def _save(tokenizer: object, output: Path) -> None:
    """Write ``tokenizer.json`` and the files that transformers needs, atomically."""
    from transformers import PreTrainedTokenizerFast

    from lit_efficient.data.text.token_cache import END_OF_TEXT
    from lit_efficient.files.atomic_file import write_folder

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    write_folder(output, fast.save_pretrained)
