"""Small encoders and decoders of transformers in folders, with tokenizers that write special tokens, and rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WORDS = ("red green blue one two three cat dog bird runs sleeps eats the a in on " * 3).split()
SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # without dropout
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**SIZES, **STILL},
    "roberta": {**SIZES, **STILL, "max_position_embeddings": 66},
    "distilbert": {
        "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 64,
        "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0,
    },
    "modernbert": {**SIZES, "global_attn_every_n_layers": 2, "local_attention": 8},
    "electra": {**SIZES, **STILL, "embedding_size": 16},
    "deberta-v2": {**SIZES, **STILL},
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2, "classifier_dropout": 0.0},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "classifier_dropout": 0.0},
    "gpt2": {
        "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "classifier_dropout": 0.0,
    },
}  # fmt: skip
FAMILIES = ENCODERS | DECODERS
LEAKING: dict[str, dict[str, Any]] = {  # outputs depend on padding, on the right at least
    "xlnet": {
        "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "dropout": 0.0, "summary_last_dropout": 0.0,
    },
    "fnet": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "hidden_dropout_prob": 0.0},
}  # fmt: skip


def tokenizer(family: str) -> Any:
    """Word pieces that begin and end with special tokens for an encoder; without any for a decoder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import BertTokenizer, PreTrainedTokenizerFast

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*WORDS}), *"abcdefghijklmnopqrstuvwxyz"]
    pieces += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    if family in ("bert", "electra"):
        return BertTokenizer(vocab=vocabulary)
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]"}
    if family not in DECODERS:
        ends = [("[CLS]", 2), ("[SEP]", 3)]
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
        )
        special |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    else:
        del special["pad_token"]  # as in GPT-2: the data pads with the token that ends a text
        special["eos_token"] = "[SEP]"
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **special)


def saved(folder: Path, family: str, seed: int = 0) -> str:
    """A body of random weights in a folder with its tokenizer, as a pretrained one would be; without a head."""
    from transformers import AutoConfig, AutoModel

    path = folder / family
    if not path.exists():
        read = tokenizer(family)
        ends = {"pad_token_id": read.pad_token_id, "bos_token_id": None, "eos_token_id": 3}
        config = AutoConfig.for_model(family, **{**ends, "vocab_size": len(read), **(FAMILIES | LEAKING)[family]})
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        AutoModel.from_config(config).save_pretrained(path)
        torch.set_rng_state(state)
        read.save_pretrained(path)
    return str(path)


def sentence(number: int, length: int = 0) -> str:
    return " ".join(WORDS[(number * 7 + 3 * i) % 16] for i in range(length or 2 + number % 5))


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def labelled(labels: str, count: int = 24, pairs: bool = False) -> list[dict[str, Any]]:
    """Rows whose label can be learned from the words."""
    rows: list[dict[str, Any]] = []
    for i in range(count):
        words = sentence(i).split()
        first = WORDS.index(words[0])
        if labels == "tags":
            rows.append({"tokens": [*words, "catdog"], "tags": ["AB"[WORDS.index(w) % 2] for w in words] + ["C"]})
            continue
        row: dict[str, Any] = {"text": " ".join(words), "label": ["x", "y", "z"][first % 3]}
        if labels == "classes":
            row["label"] = [name for k, name in enumerate("xyz") if first % (k + 2) == 0]
        if labels == "number":
            row["label"] = first / 8 - 1
        if pairs:
            row["text_pair"] = sentence(i + 1)
        rows.append(row)
    return rows
