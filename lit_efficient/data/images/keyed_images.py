"""Images of several stores under one numbering, with their classes and captions put together."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from lit_efficient.data.images.aspect_buckets import Shape
from lit_efficient.data.images.image_folder import FolderTable
from lit_efficient.data.images.image_pixels import UnreadableImage
from lit_efficient.data.images.image_store import StoredImages
from lit_efficient.data.images.image_view import ImageView
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key


class KeyedImageFiles:
    """Images of several stores under one numbering, by (index, variant); the seed is that of random crops."""

    def __init__(
        self,
        stores: Sequence[StoredImages],
        shapes: Sequence[Shape],
        view: ImageView,
        seed: int,
        labels: Sequence[int] | None,
        captions: Sequence[str] | None,
    ) -> None:
        self.stores = list(stores)
        self.shapes = shapes
        self.view = view
        self.seed = seed
        self.labels = labels
        self.captions = captions
        self._ends = np.cumsum([len(store) for store in stores])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, key: Key) -> dict[str, Any]:
        index, variant = key
        if not 0 <= variant < self.view.variants:
            raise refusal("ImageData", "the variant", f"at least 0 and below {self.view.variants}", variant)
        if not 0 <= index < len(self):
            raise IndexError(f"ImageData holds {len(self)} images, there is no number {index}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        store, at = self.stores[number], index - (int(self._ends[number - 1]) if number else 0)
        try:
            images = self.view.look(store.read(at), self.shapes[index], key, self.seed)
            height, width = store.sizes[at].tolist()
        except UnreadableImage as error:
            raise ConfigurationError(
                f"ImageData: {store.place(at)} cannot be read: {error}. Mend it, or leave out what is damaged with "
                "skip_unreadable: true."
            ) from error
        item: dict[str, Any] = {"images": images, "index": index, "variant": variant}
        item["sizes"] = self.view.sizes((height, width), self.shapes[index], key, self.seed)
        if self.labels is not None:
            item["labels"] = self.labels[index]
        if self.captions is not None:
            item["captions"] = self.captions[index]
        return item


def forget_lone_class(stores: list[StoredImages]) -> None:
    """All images in one subfolder, as kohya's scripts have them: that is no class."""
    tables = [store.table for store in stores if isinstance(store.table, FolderTable) and store.table.by_subfolder]
    if len({label for table in tables for label in table.labels or []}) == 1:
        for table in tables:
            table.labels = None


def together(stores: list[StoredImages], kind: Literal["labels", "captions"]) -> list[Any] | None:
    """Labels or captions of all stores; None if none has them.

    Raises:
        ConfigurationError: If some have and others have not.
    """
    found = {store.table.name: store.of_readable(getattr(store.table, kind)) for store in stores}
    lacking = [name for name, values in found.items() if values is None]
    if len(lacking) == len(found):
        return None
    if lacking:
        having = next(name for name, values in found.items() if values is not None)
        raise ConfigurationError(
            f"ImageData: {having} has {kind}, {lacking[0]} has none. Add them, or set columns.{kind[:-1]}: null."
        )
    return [value for store in stores for value in store.of_readable(getattr(store.table, kind)) or []]


def classes_of(stores: dict[str, list[StoredImages]]) -> tuple[list[int] | None, list[str]]:
    """Number of each image's class, and the classes' names.

    Raises:
        ConfigurationError: If numbers and names are mixed, or a class is met that is not trained on.
    """
    every = [store for listed in stores.values() for store in listed]
    labels = together(every, "labels")
    if labels is None:
        return None, []
    trained = [label for store in stores["train"] for label in store.of_readable(store.table.labels) or []]
    declared = {tuple(store.table.label_names) for store in every if store.table.label_names}
    if len({type(label) for label in labels}) > 1 or len(declared) > 1:
        allowed = "all numbers or all names, of the same classes everywhere"
        raise refusal("ImageData", "labels", allowed, sorted({type(label).__name__ for label in labels}))
    if isinstance(labels[0], int):
        names = list(declared.pop()) if declared else [str(number) for number in range(max(trained) + 1)]
        number_of: dict[Any, int] = {number: number for number in range(len(names))}
    else:
        names = sorted(set(trained), key=(int if all(name.isdigit() for name in trained) else str))
        number_of = {name: number for number, name in enumerate(names)}
    strange = next((label for label in labels if label not in number_of), None)
    if strange is not None:
        raise ConfigurationError(
            f"ImageData: the label {strange!r} is not among the {len(names)} classes that are trained on "
            f"({', '.join(names[:8])}{', ...' if len(names) > 8 else ''})."
        )
    return [number_of[label] for label in labels], names
