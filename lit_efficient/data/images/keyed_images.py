"""Images of several stores as one data set, with common classes and captions."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from lit_efficient.data.images.aspect_buckets import Shape
from lit_efficient.data.images.image_columns import Label
from lit_efficient.data.images.image_folder import FolderTable
from lit_efficient.data.images.image_pixels import UnreadableImage
from lit_efficient.data.images.image_store import StoredImages
from lit_efficient.data.images.image_view import ImageView
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key


class KeyedImageFiles:
    """Images of several stores, one store after the other, found by (index, variant).

    Args:
        stores: The stores.
        shapes: Height and width of each image as an item.
        view: Crops and flips.
        seed: Seed of random crops.
        labels: Number of the class of each image, or None.
        captions: Caption of each image, or None.
    """

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
            raise IndexError(f"ImageData holds {len(self)} images; there is no number {index}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        store = self.stores[number]
        row = index - (int(self._ends[number]) - len(store))
        shape = self.shapes[index]
        try:
            images = self.view.look(store.read(row), shape, key, self.seed)
        except UnreadableImage as error:
            raise ConfigurationError(
                f"ImageData: {store.place(row)} cannot be read: {error}. Repair it, or leave out damaged images with "
                "skip_unreadable: true."
            ) from error
        height, width = store.sizes[row].tolist()
        item: dict[str, object] = {"images": images, "index": index, "variant": variant}
        item["sizes"] = self.view.sizes((height, width), shape, key, self.seed)
        if self.labels is not None:
            item["labels"] = self.labels[index]
        if self.captions is not None:
            item["captions"] = self.captions[index]
        return item


def drop_single_class(stores: Sequence[StoredImages]) -> None:
    """Remove the labels if all images are in one subfolder, as kohya's scripts have them: it is not a class."""
    tables = []
    labels: set[Label] = set()
    for store in stores:
        if isinstance(store.table, FolderTable) and store.table.by_subfolder:
            tables.append(store.table)
            labels.update(store.table.labels or [])
    if len(labels) == 1:
        for table in tables:
            table.labels = None


def repeats_of(stores: Sequence[StoredImages]) -> list[int]:
    """Return how often an epoch shows each image of the stores."""
    repeats: list[int] = []
    for store in stores:
        found = None
        if isinstance(store.table, FolderTable):
            found = store.of_readable(store.table.repeats)
        repeats += found or [1] * len(store)
    return repeats


def collected(stores: Sequence[StoredImages], kind: Literal["labels", "captions"]) -> list[Any] | None:
    """Return labels or captions of all stores; None if no store has them.

    Raises:
        ConfigurationError: If some stores have them and others do not.
    """
    values: list[object] = []
    having = []
    lacking = []
    for store in stores:
        found = store.of_readable(getattr(store.table, kind))
        if found is None:
            lacking.append(store.table.name)
        else:
            having.append(store.table.name)
            values += found
    if having and lacking:
        raise ConfigurationError(
            f"ImageData: {having[0]} has {kind}, {lacking[0]} has none. Add them, or set columns.{kind[:-1]}: null."
        )
    return values if having else None


def classes_of(stores: Mapping[str, Sequence[StoredImages]]) -> tuple[list[int] | None, list[str]]:
    """Return the number of the class of each image, and the names of the classes.

    Args:
        stores: Stores by part; the classes are those of "train".

    Raises:
        ConfigurationError: If labels are numbers and names, or a class occurs that is not trained on.
    """
    every = [store for listed in stores.values() for store in listed]
    labels = collected(every, "labels")
    if labels is None:
        return None, []
    trained = collected(stores["train"], "labels") or []
    declared = {tuple(store.table.label_names) for store in every if store.table.label_names}
    if len({type(label) for label in labels}) > 1 or len(declared) > 1:
        allowed = "all numbers or all names, with the same classes everywhere"
        raise refusal("ImageData", "labels", allowed, sorted({type(label).__name__ for label in labels}))
    number_of: dict[Label, int]
    if isinstance(labels[0], int):
        if declared:
            names = list(declared.pop())
        else:
            names = [str(number) for number in range(max(trained) + 1)]
        # Numbers are classes as they are, even if some of them never occur.
        number_of = {number: number for number in range(len(names))}
    else:
        names = sorted(set(trained))
        if all(name.isdigit() for name in names):
            # "10" comes after "9", so that class numbers in folder names keep their meaning.
            names.sort(key=int)
        number_of = {name: number for number, name in enumerate(names)}
    for label in labels:
        if label not in number_of:
            more = ", ..." if len(names) > 8 else ""
            raise ConfigurationError(
                f"ImageData: the label {label!r} is not among the {len(names)} classes that are trained on "
                f"({', '.join(names[:8])}{more})."
            )
    return [number_of[label] for label in labels], names
