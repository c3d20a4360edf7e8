"""Images of several sets as one data set, with common classes and captions."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from lit_efficient.data.images.aspect_buckets import Shape
from lit_efficient.data.images.caption_rules import CaptionRules
from lit_efficient.data.images.image_columns import Label
from lit_efficient.data.images.image_folder import FolderTable
from lit_efficient.data.images.image_set import ALPHA
from lit_efficient.data.images.image_store import StoredSet
from lit_efficient.data.images.image_view import ImageView
from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.mechanisms.order.keyed_batch_sampler import Key


class KeyedImageFiles:
    """Images of several sets, one set after the other, found by (index, variant).

    Args:
        sets: The sets.
        shapes: Height and width of each image as an item.
        view: Crops and flips of sets that have none of their own.
        seed: Seed of random crops.
        labels: Number of the class of each image, or None.
        captions: Captions of each image, or None.
    """

    def __init__(
        self,
        sets: Sequence[StoredSet],
        shapes: Sequence[Shape],
        view: ImageView,
        seed: int,
        labels: Sequence[int] | None,
        captions: Sequence[Sequence[str]] | None,
    ) -> None:
        self.sets = list(sets)
        self.shapes = shapes
        self.views = [one.about.view or view for one in sets]
        self.pixel_variants = max(view.variants for view in self.views)
        self.caption_variants = max(rules_of(one).variants for one in sets)
        self.seed = seed
        self.labels = labels
        self.captions = captions
        self.masked = any(one.about.mask is not None for one in sets)
        self._ends = np.cumsum([len(one) for one in sets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, key: Key) -> dict[str, Any]:
        index, variant = key
        variants = self.pixel_variants * self.caption_variants
        if not 0 <= variant < variants:
            raise refusal("ImageData", "the variant", f"at least 0 and below {variants}", variant)
        if not 0 <= index < len(self):
            raise IndexError(f"ImageData holds {len(self)} images; there is no number {index}")
        number = self._set_of(index)
        found = self.sets[number]
        view = self.views[number]
        row = index - (int(self._ends[number]) - len(found))
        shape = self.shapes[index]
        # A set with fewer variants repeats them.
        seen = (index, variant % self.pixel_variants % view.variants)
        item: dict[str, object] = {"index": index, "variant": variant}
        files = {name: (store.read(row), store.place(row)) for name, store in found.stores.items()}
        height, width = found.images.sizes[row].tolist()
        item |= view.sees(files, (height, width), shape, seen, self.seed, found.about.mask == ALPHA)
        if self.masked:
            item.setdefault("mask", torch.ones(1, *shape))
        if self.labels is not None:
            item["labels"] = self.labels[index]
        if self.captions is not None:
            item["captions"] = self.caption(index, variant // self.pixel_variants)
        return item

    def source_of(self, key: Key) -> tuple[str, bool]:
        """Return the path or row of the image of a key, and whether it is mirrored."""
        index, variant = key
        number = self._set_of(index)
        found, view = self.sets[number], self.views[number]
        row = index - (int(self._ends[number]) - len(found))
        return found.images.place(row), view.mirrors(variant % self.pixel_variants % view.variants)

    def caption(self, index: int, number: int) -> str:
        """Return a variant of the captions of an image."""
        assert self.captions is not None
        about = self.sets[self._set_of(index)]
        return rules_of(about).caption(self.captions[index], about.about.trigger, index, number, self.seed)

    def _set_of(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right"))


def rules_of(one: StoredSet) -> CaptionRules:
    """Return the rules for the captions of a set."""
    return one.about.caption_rules or CaptionRules()


def weights_of(sets: Sequence[StoredSet], shown: Sequence[int]) -> np.ndarray | None:
    """Return the weight of each image in the loss, [N], as `image_set` defines it; None if all are 1.

    Args:
        sets: The sets for training, which come first.
        shown: Indices of the images that an epoch shows.
    """
    own = [one.images.of_readable(one.images.table.weights) or [1.0] * len(one) for one in sets]
    weights = np.concatenate([one.about.weight * np.array(values) for one, values in zip(sets, own)])
    prior = np.concatenate([np.full(len(one), one.about.role == "prior") for one in sets])
    is_prior = prior[np.array(shown, dtype=np.int64)]
    for role in (True, False):
        count = int((is_prior == role).sum())
        if count:
            weights[prior == role] *= len(shown) / count
    return None if np.allclose(weights, 1.0) else weights


def drop_single_class(sets: Sequence[StoredSet]) -> None:
    """Remove the labels if all images are in one subfolder, as kohya's scripts have them: it is not a class."""
    tables = []
    labels: set[Label] = set()
    for one in sets:
        table = one.images.table
        if isinstance(table, FolderTable) and table.by_subfolder:
            tables.append(table)
            labels.update(table.labels or [])
    if len(labels) == 1:
        for table in tables:
            table.labels = None


def repeats_of(sets: Sequence[StoredSet]) -> list[int]:
    """Return how often an epoch shows each image of the sets."""
    repeats: list[int] = []
    for one in sets:
        table = one.images.table
        found = None
        if isinstance(table, FolderTable):
            found = one.images.of_readable(table.repeats)
        repeats += [one.about.repeats * number for number in found or [1] * len(one)]
    return repeats


def collected(sets: Sequence[StoredSet], kind: Literal["labels", "captions"]) -> list[Any] | None:
    """Return labels or captions of all sets; None if no set has them.

    Raises:
        ConfigurationError: If some sets have them and others do not.
    """
    values: list[object] = []
    having = []
    lacking = []
    for one in sets:
        table = one.images.table
        found = one.images.of_readable(getattr(table, kind))
        if kind == "captions":
            found = _prompted(found, one)
        if found is None:
            lacking.append(table.name)
        else:
            having.append(table.name)
            values += found
    if having and lacking:
        way_out = ", give the set a prompt" if kind == "captions" else ""
        raise ConfigurationError(
            f"ImageData: {having[0]} has {kind}, {lacking[0]} has none. Add them{way_out}, or set "
            f"columns.{kind[:-1]}: null."
        )
    return values if having else None


def _prompted(captions: list[list[str]] | None, one: StoredSet) -> list[list[str]] | None:
    """Return captions; if there are none, the prompt of their set, or nothing but its trigger."""
    prompt = one.about.prompt
    if prompt is None and one.about.trigger is not None:
        prompt = ""
    if captions is None and prompt is not None:
        captions = [[prompt] for _ in range(len(one))]
    most = max(map(len, captions or [[]]))
    if most > rules_of(one).variants:
        raise ConfigurationError(
            f"ImageData: images of {one.about.images} have up to {most} captions, of which caption_rules.variants = "
            f"{rules_of(one).variants} would show no more. Set caption_rules.variants to at least {most}."
        )
    return captions


def classes_of(
    sets: Mapping[str, Sequence[StoredSet]], streamed: int | None = None
) -> tuple[list[int] | None, list[str]]:
    """Return the number of the class of each image, and the names of the classes.

    Args:
        sets: Sets by part; the classes are those of "train".
        streamed: Number of classes if "train" is streamed.

    Raises:
        ConfigurationError: If labels are numbers and names, or a class occurs that is not trained on.
    """
    every = [one for listed in sets.values() for one in listed]
    if streamed == 0:
        return None, []
    labels = collected(every, "labels")
    if labels is None:
        return None, [str(number) for number in range(streamed or 0)]
    trained = collected(sets["train"], "labels") or []
    declared = {tuple(names) for one in every if (names := one.images.table.label_names)}
    if len({type(label) for label in labels}) > 1 or len(declared) > 1:
        allowed = "all numbers or all names, with the same classes everywhere"
        raise refusal("ImageData", "labels", allowed, sorted({type(label).__name__ for label in labels}))
    number_of: dict[Label, int]
    if isinstance(labels[0], int):
        if declared:
            names = list(declared.pop())
        elif streamed:
            names = [str(number) for number in range(streamed)]
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
