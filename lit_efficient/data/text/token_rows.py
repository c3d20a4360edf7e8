"""Rows of tokens: ids that somebody has made with the tokenizer of the model, and the tokens among them with loss.

    input_ids        the ids, without padding or with padding at the ends
    attention_mask   0 for padding, which is taken off
    labels           the id itself, or -100 for a token without loss; not shifted, as in transformers
    loss_mask        1 for a token with loss; also named assistant_masks (transformers) or completion_mask (TRL)

A token contributes to the loss if all columns that a row has say so. Without these columns all tokens do. Nothing is
added to the ids.
"""

from collections.abc import Sequence
from typing import Any

from lit_efficient.data.text.chat_formats import LOSS_MASKS, Document, MalformedRow, Row, check_keys
from lit_efficient.losses.next_token import IGNORE


def read_tokens(row: Row) -> Document:
    """Return the document of a row of tokens.

    Raises:
        MalformedRow: If a column is no list of whole numbers, the columns contradict each other, or the row holds
            several documents.
    """
    check_keys(row, ["input_ids"])
    ids = _numbers(row, "input_ids")
    trained = [True] * len(ids)
    if row.get("labels") is not None:
        trained = _with_labels(ids, _numbers(row, "labels", len(ids)))
    for name in LOSS_MASKS:
        if row.get(name) is not None:
            mask = _mask(row, name, len(ids))
            trained = [both and bool(one) for both, one in zip(trained, mask)]
    first = 0
    end = len(ids)
    if row.get("attention_mask") is not None:
        real = _mask(row, "attention_mask", len(ids))
        if 1 not in real:
            raise MalformedRow("attention_mask is 0 for all tokens")
        first = real.index(1)
        end = len(real) - real[::-1].index(1)
        if 0 in real[first:end]:
            raise MalformedRow("attention_mask is 0 between tokens, and padding is at the ends of a row")
    if first == end:
        raise MalformedRow("input_ids is empty")
    if row.get("position_ids") is not None:
        _check_one_document(_numbers(row, "position_ids", len(ids))[first:end])
    return Document(ids=tuple(ids[first:end]), trained=tuple(trained[first:end]))


def _with_labels(ids: Sequence[int], labels: Sequence[int]) -> list[bool]:
    """Return which labels are not ignored."""
    for index, (token, label) in enumerate(zip(ids, labels)):
        if label in (IGNORE, token):
            continue
        if labels[index : index + 1] == ids[index + 1 : index + 2]:
            raise MalformedRow(f"labels[{index}] is the next token: labels must be those of input_ids, not shifted")
        raise MalformedRow(f"labels[{index}] is {label}, neither input_ids[{index}] = {token} nor {IGNORE}")
    return [label != IGNORE for label in labels]


def _check_one_document(positions: Sequence[int]) -> None:
    for index in range(1, len(positions)):
        if positions[index] <= positions[index - 1]:
            raise MalformedRow(
                f"position_ids start again at token {index}: give each document of a packed row as a row"
            )


def _mask(row: Row, name: str, length: int) -> list[int]:
    mask = _numbers(row, name, length)
    wrong = next((value for value in mask if value not in (0, 1)), None)
    if wrong is not None:
        raise MalformedRow(f"{name} holds {wrong}, which must be 0 or 1")
    return mask


def _numbers(row: Row, name: str, length: int | None = None) -> list[int]:
    values: Any = row[name]
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise MalformedRow(f"{name} is no list of whole numbers")
    if length is not None and len(values) != length:
        raise MalformedRow(f"{name} has {len(values)} entries, and input_ids {length}")
    return values
