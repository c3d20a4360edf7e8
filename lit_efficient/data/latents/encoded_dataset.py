"""Data set over encoded sources whose items are normalised latents with their labels, captions and features."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_efficient.data.latents.encoded_fields import EncodedFields, EncodedNumbers
from lit_efficient.data.latents.encoded_files import Value
from lit_efficient.data.latents.encoded_sources import EncodedSource
from lit_efficient.data.latents.latent_format import Moments, normalize_item
from lit_efficient.errors import ConfigurationError
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key

MEASURED_ROWS = 4096


class EncodedRows:
    """Items of one or several sources, one source after the other, found by the key (row, 0)."""

    def __init__(self, sources: Sequence[EncodedSource], names: EncodedFields, numbers: EncodedNumbers) -> None:
        self.sources = list(sources)
        self.names = names
        self.numbers = numbers
        self.num_classes = 0  # 0: labels are not checked
        latents = self._latents(self._row(0))
        self.shape: tuple[int, ...] = tuple(next(iter(latents.values())).shape)
        self.mean = torch.zeros(self.shape[0])
        self.std = torch.ones(self.shape[0])

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources)

    def __getitem__(self, key: Key) -> dict[str, Any]:
        row, variant = key
        stored = self._row(row)
        latents = self._latents(stored)
        # A batch stacks the items, so an odd shape is refused here, where its row can be named.
        for name, values in latents.items():
            if values.shape != self.shape:
                raise ConfigurationError(
                    f"EncodedData: {name} of row {row} has the shape {list(values.shape)}, but row 0 has "
                    f"{list(self.shape)}. All rows of a data set must have one shape."
                )
        item = normalize_item(latents, self.mean, self.std)
        self._add_conditions(item, row, stored)
        item["index"] = row
        item["variant"] = variant
        return item

    def labels(self, rows: Sequence[int]) -> list[int]:
        """Return the labels of some rows."""
        field = self.names.label
        assert field is not None
        return [_label(self._row(row, [field])[field], row) for row in rows]

    def measured(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of each channel [c], of up to 4096 evenly spaced rows."""
        count = min(len(rows), MEASURED_ROWS)
        parts = []
        # Evenly spaced rows, because files are often sorted by class.
        for i in range(count):
            latents = self._latents(self._row(rows[i * len(rows) // count]))
            batch = {name: values[None] for name, values in latents.items()}
            mean = batch["mean"] if "mean" in batch else batch["latents"]
            parts.append(Moments.of(mean, batch.get("logvar")))
        mean_std = Moments.join(parts).mean_and_std()
        return torch.tensor(mean_std[0]), torch.tensor(mean_std[1])

    def _row(self, row: int, fields: Sequence[str] | None = None) -> dict[str, Value]:
        """Return the stored fields of a row; by default all fields that the configuration names."""
        if fields is None:
            fields = list(self.names.named().values())
        start = 0
        for source in self.sources:
            if row - start < len(source):
                return source.read(row - start, fields)
            start += len(source)
        raise IndexError(row)

    def _latents(self, stored: Mapping[str, Value]) -> dict[str, Tensor]:
        logvar = None if self.names.logvar is None else stored[self.names.logvar]
        return self.numbers.read(stored[self.names.latents], logvar)

    def _add_conditions(self, item: dict[str, Any], row: int, stored: Mapping[str, Value]) -> None:
        """Add label, caption, embeddings and features to an item."""
        names = self.names
        if names.label is not None:
            label = _label(stored[names.label], row)
            if self.num_classes and not 0 <= label < self.num_classes:
                raise ConfigurationError(
                    f"EncodedData: the label of row {row} is {label}, num_classes {self.num_classes}. Labels are "
                    "numbers from 0 to num_classes - 1."
                )
            item["labels"] = label
        if names.caption is not None:
            item["captions"] = str(stored[names.caption])
        for name in ("text", "pooled", "features", "text_mask"):
            field = getattr(names, name)
            if field is not None:
                item[name] = self.numbers.array(stored[field])
        if "text_mask" in item:
            item["text_mask"] = item["text_mask"].bool()


def _label(value: Value, row: int) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"EncodedData: the label of row {row} is not a number: {value!r:.60}.") from error
