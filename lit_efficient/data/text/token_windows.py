"""A map-style dataset of non-overlapping windows over a long array of token ids."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Window ``i`` holds the tokens ``[i T, (i + 1) T)`` as inputs and the same, one further, as labels.

    Args:
        tokens: ids ``[N]``, in memory or mapped; the last ``(N - 1) mod T`` are not used.
        length: T, tokens a window.
        token_bytes: bytes of text each id stands for, ``[V]``; if given, an item has ``num_bytes``, the number of bytes
            that its labels stand for, from which bits per byte are counted exactly.
    """

    def __init__(self, tokens: np.ndarray, length: int, token_bytes: np.ndarray | None = None) -> None:
        self.tokens = tokens
        self.length = length
        self.token_bytes = token_bytes

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """``input_ids`` and ``shift_labels`` ``[T]`` int64 and, if sizes are known, ``num_bytes`` ``[]`` int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        window = self.tokens[start : start + self.length + 1].astype(np.int64)
        ids = torch.from_numpy(window)
        item = {"input_ids": ids[:-1], "shift_labels": ids[1:]}
        if self.token_bytes is not None:
            item["num_bytes"] = torch.tensor(int(self.token_bytes[window[1:]].sum()))
        return item
