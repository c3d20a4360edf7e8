"""Rows of encoded data sets as items of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_efficient.data.latents.encoded_fields import EncodedFields, EncodedNumbers
from lit_efficient.data.latents.encoded_rows import Value
from lit_efficient.data.latents.encoded_sources import EncodedSource
from lit_efficient.data.latents.latent_format import Moments, normalize_item
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key

MEASURED_ROWS = 4096


class EncodedRows:
    """Rows of one or several sources, one after the other, as items of a batch, by (row, 0)."""

    def __init__(self, sources: Sequence[EncodedSource], names: EncodedFields, numbers: EncodedNumbers) -> None:
        self.sources = list(sources)
        self.names = names
        self.numbers = numbers
        self.num_classes = 0  # 0: labels are not checked
        self.shape: tuple[int, ...] = tuple(next(iter(self._latents(self._row(0)).values())).shape)
        self.mean = torch.zeros(self.shape[0])
        self.std = torch.ones(self.shape[0])

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources)

    def __getitem__(self, key: Key) -> dict[str, Any]:
        row, variant = key
        stored = self._row(row)
        latents = self._latents(stored)
        for name, values in latents.items():
            if values.shape != self.shape:
                raise ConfigurationError(
                    f"EncodedData: {name} of row {row} has the shape {list(values.shape)}, those of row 0 "
                    f"{list(self.shape)}; a data set has one shape."
                )
        return {
            **normalize_item(latents, self.mean, self.std),
            **self._rest(row, stored),
            "index": row,
            "variant": variant,
        }

    def labels(self, rows: Sequence[int]) -> list[int]:
        """Labels of some rows."""
        assert self.names.label is not None
        return [_label(self._row(row, [self.names.label])[self.names.label], row) for row in rows]

    def measured(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel, of up to 4096 of the rows, evenly spaced."""
        count = min(len(rows), MEASURED_ROWS)
        parts = []
        for i in range(count):
            latents = self._latents(self._row(rows[i * len(rows) // count]))
            mean = latents["mean"] if "mean" in latents else latents["latents"]
            logvar = latents.get("logvar")
            parts.append(Moments.of(mean[None], None if logvar is None else logvar[None]))
        mean_std = Moments.join(parts).mean_and_std()
        return torch.tensor(mean_std[0]), torch.tensor(mean_std[1])

    def _row(self, row: int, asked: Sequence[str] | None = None) -> dict[str, Value]:
        start = 0
        for source in self.sources:
            if row - start < len(source):
                return source.read(row - start, list(self.names.asked().values()) if asked is None else asked)
            start += len(source)
        raise IndexError(row)

    def _latents(self, row: Mapping[str, Value]) -> dict[str, Tensor]:
        logvar = None if self.names.logvar is None else row[self.names.logvar]
        return self.numbers.read(row[self.names.latents], logvar)

    def _rest(self, row: int, stored: Mapping[str, Value]) -> dict[str, Any]:
        names = self.names
        item: dict[str, Any] = {}
        if names.label is not None:
            item["labels"] = label = _label(stored[names.label], row)
            if self.num_classes and not 0 <= label < self.num_classes:
                raise ConfigurationError(
                    f"EncodedData: the label of row {row} is {label}, num_classes {self.num_classes}."
                )
        if names.caption is not None:
            item["captions"] = str(stored[names.caption])
        for name in ("text", "pooled", "features"):
            if (field := getattr(names, name)) is not None:
                item[name] = self.numbers.array(stored[field])
        if names.text_mask is not None:
            item["text_mask"] = self.numbers.array(stored[names.text_mask]).bool()
        return item


def _label(value: Value, row: int) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"EncodedData: the label of row {row} is {value!r:.60}, no number.") from error
