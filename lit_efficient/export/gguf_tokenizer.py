"""The tokenizer in a GGUF file: tokens, merges or scores, special ids, the pre-tokenizer's name and the chat template.

llama.cpp knows two kinds. ``gpt2`` is a byte-level BPE, whose way of splitting texts has a name. ``llama`` is
SentencePiece's BPE: llama.cpp merges the pair with the best score first, so that the score is the rank of a merge.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.hugging_face import gguf_splits
from lit_efficient.models.libraries.gguf_file import digits_apart, read_tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_LOWEST = -1e6  # score of tokens that no merge makes
_SPLITS = ("llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o")
# Digits, contractions, marks, spaces, line ends and scripts, which ways of splitting treat differently.
PROBE = (
    "Hello World's I'VE it'S 7 42 1234 56789 3.14 ½ ²\n\n \n\t\t x  y   z \r\n!!! ... //path/to ==> foo_bar(1, 'a') "
    "camelCase HTTPServer ﬁ é e\u0301 नमस्ते ไทย 中文字 日本語テスト Ελλάδα Привет мир 🦙🦙 👩\u200d👩 <b> "
    "a--b 'quoted' \"x\" end  "
)


def write_tokenizer(writer: Any, folder: Path, rows: int, stop: Sequence[int]) -> None:
    """Write the keys of a tokenizer of transformers.

    Args:
        writer: ``gguf.GGUFWriter``.
        folder: Folder with the tokenizer's files and the model's configuration.
        rows: Number of rows of the embeddings.
        stop: Ids that end a turn.

    Raises:
        ConfigurationError: If llama.cpp cannot give the same ids.
    """
    import gguf
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in whole["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            raise ConfigurationError(
                f"export: llama.cpp has no tokens with lstrip, rstrip or single_word, as {token['content']!r} of the "
                "tokenizer is: use format merged"
            )
    is_bytes = _is_byte_level(whole)
    if whole["model"]["type"] != "BPE" or not (is_bytes or whole["model"].get("byte_fallback")):
        raise ConfigurationError(
            "export: format gguf writes byte-level BPE and SentencePiece's BPE with byte_fallback, and the tokenizer's "
            f"model is {whole['model']['type']}: use format merged"
        )
    tokens, types = _tokens(whole, rows)
    writer.add_tokenizer_model("gpt2" if is_bytes else "llama")
    writer.add_tokenizer_pre(pre_tokenizer(tokenizer, whole) if is_bytes else "default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if not is_bytes:
        writer.add_token_scores(_scores(whole, tokens))
        writer.add_add_space_prefix(_prefixes(tokenizer))
    special = gguf.SpecialVocab(folder, load_merges=is_bytes, n_vocab=rows)
    ids = tokenizer("a")["input_ids"]
    special.add_special_token = {
        "bos": bool(ids) and ids[0] == tokenizer.bos_token_id,
        "eos": bool(ids) and ids[-1] == tokenizer.eos_token_id,
    }
    special.add_to_gguf(writer, quiet=True)
    turns = [token for token in stop if token != special.special_token_ids.get("eos")]
    if turns:
        writer.add_eot_token_id(turns[0])


def pre_tokenizer(tokenizer: Any, whole: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a byte-level tokenizer splits texts into words.

    The candidates split :data:`PROBE`; the name of a tokenizer's class says nothing.

    Raises:
        ConfigurationError: If no candidate splits as the tokenizer does.
    """
    own = tokenizer.backend_tokenizer
    normalizer = (whole.get("normalizer") or {"type": None})["type"]
    pieces = own.pre_tokenizer.pre_tokenize_str(PROBE)
    for name, candidate in _candidates().items():
        if candidate.pre_tokenize_str(PROBE) == pieces and normalizer in (None, "NFC"):
            return name
    raise ConfigurationError(
        "export: the tokenizer splits texts in a way that format gguf has no name for (known: "
        f"{', '.join(_candidates())}): use format merged, and convert_hf_to_gguf.py of llama.cpp"
    )


def _candidates() -> dict[str, Any]:
    from tokenizers import Regex, pre_tokenizers

    found: dict[str, Any] = {"gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False), "smollm": digits_apart()}
    known = gguf_splits()
    for name in _SPLITS:
        if name in known:
            split = pre_tokenizers.Split(Regex(known[name]), behavior="isolated")
            bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            found[name] = pre_tokenizers.Sequence([split, bytes_alone])
    return found


def _is_byte_level(whole: Mapping[str, Any]) -> bool:
    pre = whole.get("pre_tokenizer") or {}
    return any(part.get("type") == "ByteLevel" for part in (pre, *pre.get("pretokenizers", ())))


def _tokens(whole: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return the token of each row and its type. Rows without a token are unused, and tokens without a row left out."""
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types = [_UNUSED] * rows
    unknown = whole["model"].get("unk_token")
    fallback = whole["model"].get("byte_fallback")
    for token, index in whole["model"]["vocab"].items():
        tokens[index] = token
        types[index] = _NORMAL
        if fallback and token == unknown:
            types[index] = _UNKNOWN
        elif fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[index] = _BYTE
    for added in whole["added_tokens"]:
        if added["id"] >= rows:
            continue
        tokens[added["id"]] = added["content"]
        if types[added["id"]] != _UNKNOWN:
            types[added["id"]] = _CONTROL if added["special"] else _USER
    if fallback:
        for index, kind in enumerate(types):
            if kind == _USER:  # llama.cpp looks for them in the text itself
                tokens[index] = tokens[index].replace("\u2581", " ")
    return tokens, types


def _scores(whole: Mapping[str, Any], tokens: Sequence[str]) -> list[float]:
    """Return the negative rank of the first merge that makes each token."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(whole["model"]["merges"]):
        ranks.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), rank)
    return [-float(ranks[token]) if token in ranks else _LOWEST for token in tokens]


def _prefixes(tokenizer: Any) -> bool:
    """Return whether a text begins with a space that is not in it."""
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"])
    return pieces[0].startswith("\u2581")


def tokenizer_of_base(base: str, folder: Path) -> None:
    """Write the tokenizer of a base model into a folder.

    Raises:
        ConfigurationError: If the base has none.
    """
    try:
        tokenizer = read_tokenizer(base)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            "export: format gguf needs the tokenizer, which neither the checkpoint nor the base has: train with "
            "LanguageModeling, or name a base with its tokenizer by --base"
        ) from error
    tokenizer.save_pretrained(folder)


def ids_of(folder: Path, rows: int) -> dict[str, list[int]]:
    """Return token ids below ``rows`` of texts by the tokenizer in a folder.

    llama.cpp does not normalise texts, so that these are normalised.
    """
    tokenizer = read_tokenizer(str(folder))
    special = [token.content for index, token in tokenizer.added_tokens_decoder.items() if index < rows]
    texts = [
        *PROBE.splitlines(),
        PROBE.replace("\r", ""),
        "a".join(["", *special, ""]),
        " ".join(special),
        "In 1984, 12 monkeys\n\tfoo(bar)",
    ]
    texts = [unicodedata.normalize("NFC", text) for text in texts]
    return {text: tokenizer(text)["input_ids"] for text in texts}
