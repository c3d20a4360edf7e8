"""Folder of image files. Labels and captions come from subfolders, metadata files or files beside the images.

    <class>/<image>                   labels, if all images are in subfolders
    metadata.jsonl or metadata.csv    ImageFolder of Hugging Face: file_name (relative to its folder) and columns
    <image>.txt or <image>.caption    captions, as kohya's scripts write them
    10_<concept>/<image>              repeats, as for kohya's scripts

A single subfolder, over all folders that are used together, is not a class.

    <image>-masklabel.png             masks of an `ImageSet`, as for OneTrainer; or in a folder of their own
    <image>-condlabel.png             its conditions
"""

import csv
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lit_efficient.data.images.image_columns import (
    AUTO,
    ImageColumns,
    Label,
    check_caption,
    check_label,
    check_weight,
    chosen_column,
)
from lit_efficient.data.images.image_set import ImageSet
from lit_efficient.errors import ConfigurationError, listed

_CAPTION_SUFFIXES = (".txt", ".caption")
_REPEATED = re.compile(r"(\d+)_(.*\S.*)")
_SURELY_REPEATED = re.compile(r"[1-9]\d*_.*\S.*")  # 0_cat and 01_cat are numbers of classes
ENDINGS = {"masklabel": "mask", "condlabel": "condition"}
"""Endings of the names of files beside the images, and what the files are."""
_METADATA = ("metadata.jsonl", "metadata.csv")


class FileTable:
    """Table of files; an `ImageTable` without labels and captions.

    Args:
        root: Folder of the files.
        files: The files.
    """

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        self.name = root.name
        self.image = ""
        self.labels: list[Label] | None = None
        self.label_names: list[str] | None = None
        self.captions: list[list[str]] | None = None
        self.weights: list[float] | None = None
        self.root = root
        self.files = list(files)
        self.note = f"{root}: {len(files)} images"

    def __len__(self) -> int:
        return len(self.files)

    def place(self, row: int) -> str:
        """Return the path of the file."""
        return str(self.files[row])

    def read(self, row: int) -> bytes:
        """Return the content of the file."""
        try:
            return self.files[row].read_bytes()
        except OSError as error:
            raise ConfigurationError(f"ImageData: {self.files[row]} cannot be read: {error}.") from error


class FolderTable(FileTable):
    """Table of the image files in a folder, with labels and captions.

    Args:
        root: The folder.
        images: Its image files.
        columns: Names of the columns of metadata.
        about: The set to which the folder belongs.
        above: Folder of all splits, whose metadata file may list the images, too.
        others: Images of other splits that such a file may list.
    """

    def __init__(
        self,
        root: Path,
        images: list[Path],
        columns: ImageColumns,
        about: ImageSet,
        above: Path | None = None,
        others: Sequence[Path] = (),
    ) -> None:
        super().__init__(root, sorted(images, key=Path.as_posix))
        self.by_subfolder = False
        self.repeats: list[int] | None = None
        self._about = about
        metadata: list[Path] = []
        for folder in {root, *(image.parent for image in images)}:
            metadata += _metadata_of(folder)
        if above is not None:
            metadata += _metadata_of(above)
        if metadata:
            notes = [self._read_metadata(sorted(metadata), columns, others)]
        else:
            notes = self._read_names(columns)
        if self._names_repeats(columns):
            notes.append(self._read_repeats(columns))
        self.note = ", ".join([f"{root}: {len(self)} images", *notes])

    def _read_metadata(self, metadata: list[Path], columns: ImageColumns, others: Sequence[Path]) -> str:
        """Take labels and captions from metadata files, and leave out images that they do not list. Return a note."""
        where = " and ".join(str(file) for file in metadata)
        listed, names = self._listed_rows(metadata, where, others)
        label = chosen_column("label", columns.label, names, where)
        caption = chosen_column("caption", columns.caption, names, where)
        weight = chosen_column("weight", columns.weight, names, where)
        left_out = len(self.files) - len(listed)
        self.files = [path for path in self.files if path in listed]
        rows = [listed[path] for path in self.files]
        if label is not None:
            self.labels = [check_label(row.get(label), place, label) for place, row in rows]
        if caption is not None:
            self.captions = [check_caption(row.get(caption), place, caption) for place, row in rows]
        if weight is not None:
            self.weights = [check_weight(row.get(weight), place, weight) for place, row in rows]
        note = f"labels: {label or 'none'}, captions: {caption or 'none'} of {where}"
        if left_out:
            note += f"; {left_out} images that it does not list are left out"
        return note

    def _listed_rows(
        self, metadata: list[Path], where: str, others: Sequence[Path]
    ) -> tuple[dict[Path, tuple[str, Mapping[str, object]]], list[str]]:
        """Return place and row of each image that metadata files list, and the names of all columns."""
        elsewhere = {os.path.normpath(path) for path in others}
        here = {os.path.normpath(path): path for path in self.files}
        listed: dict[Path, tuple[str, Mapping[str, object]]] = {}
        columns: dict[str, None] = {}  # a set that keeps the order
        rows = []
        for file in metadata:
            for place, row in _metadata_rows(file):
                columns.update(dict.fromkeys(row))
                rows.append((place, file.parent, row))
        # Without this column no row could be matched with an image.
        if "file_name" not in columns:
            raise ConfigurationError(
                f"ImageData: {where} has no column file_name. Its columns are {', '.join(columns) or 'none'}."
            )
        for place, folder, row in rows:
            named = row.get("file_name")
            name = os.path.normpath(folder / str(named)) if named else ""
            # One metadata file above the splits lists the images of all of them.
            if name in elsewhere:
                continue
            if name not in here:
                raise ConfigurationError(f"ImageData: {place}: there is no image {named!r}.")
            if here[name] in listed:
                raise ConfigurationError(f"ImageData: {place}: the image {named!r} is listed twice. Remove one line.")
            listed[here[name]] = place, row
        if not listed:
            raise ConfigurationError(f"ImageData: {where} lists no image of {self.root}. Check the paths in file_name.")
        return listed, list(columns)

    def _read_names(self, columns: ImageColumns) -> list[str]:
        """Take labels from subfolders and captions from the files beside the images. Return notes for the log."""
        for kind in ("label", "caption", "weight"):
            wanted = getattr(columns, kind)
            if wanted not in (None, AUTO):
                raise ConfigurationError(
                    f"ImageData: columns.{kind} is {wanted!r}, but {self.root} holds no metadata.jsonl or "
                    "metadata.csv with columns."
                )
        notes: list[str] = []
        inside = [path.parts[len(self.root.parts) :] for path in self.files]
        if self._names_repeats(columns):
            if columns.caption is not None:
                concepts = [self._about.prompt or _repeated(parts[0])[1] for parts in inside]
                self.captions = [self._texts(found) for found in self._caption_files(concepts)]
            return notes
        if columns.label is not None and all(len(parts) > 1 for parts in inside):
            names = {parts[0] for parts in inside}
            self.labels = [parts[0] for parts in inside]
            self.by_subfolder = True
            count = len(names)
            notes.append(f"labels: its {count} subfolders" if count > 1 else "one subfolder")
        if columns.caption is not None:
            defaults = [] if self._about.prompt is None else [self._about.prompt] * len(self)
            captions = self._caption_files(defaults)
            if captions:
                self.captions = [self._texts(found) for found in captions]
                notes.append(self._note_of(captions))
        return notes

    def _texts(self, caption: Path | str) -> list[str]:
        """Return the captions in a file, or a given caption. Several lines become one, as in other trainers."""
        if isinstance(caption, str):
            return [caption]
        content = _text_of(caption)
        if self._about.caption_rules is not None and self._about.caption_rules.lines == "choose":
            # splitlines() would also split at U+2028 and others.
            lines = io.StringIO(content, newline=None)
            return [" ".join(line.split()) for line in lines if line.strip()] or [""]
        return [" ".join(content.split())]

    def _note_of(self, captions: Sequence[Path | str]) -> str:
        """Return a note on where captions come from."""
        files = [found for found in captions if isinstance(found, Path)]
        if not files:
            return f"captions: {self._about.prompt!r}"
        note = (
            f"captions: the {files[0].suffix} files {'beside them' if self._about.captions is None else 'of captions'}"
        )
        if len(files) < len(captions):
            note += f", and {self._about.prompt!r} for {len(captions) - len(files)} images"
        return note

    def _caption_files(self, defaults: Sequence[str]) -> list[Path | str]:
        """Return the caption file of each image, or its default; nothing if there are neither.

        Raises:
            ConfigurationError: If some images have a caption file, and others have neither.
        """
        folder = self._about.captions
        wanted = list(self.files)
        if folder is not None:
            if not Path(folder).expanduser().is_dir():
                raise ConfigurationError(f"ImageData: captions is {folder!r}, which is no folder.")
            wanted = [Path(folder).expanduser() / image.relative_to(self.root) for image in self.files]
        # Each folder is listed once, because a look at every possible file is slow on network disks.
        names_in = {where: set(os.listdir(where)) for where in {image.parent for image in wanted} if where.is_dir()}
        found: list[Path | str] = []
        missing = []
        for number, image in enumerate(wanted):
            names = names_in.get(image.parent, set())
            beside = [image.with_suffix(suffix) for suffix in _CAPTION_SUFFIXES if image.stem + suffix in names]
            files = [file for file in beside if file.is_file()]
            if files:
                found.append(files[0])
            elif defaults:
                found.append(defaults[number])
            else:
                missing.append(image)
        if (found or folder is not None) and missing:
            where = "beside them" if folder is None else f"in {folder}"
            raise ConfigurationError(
                f"ImageData: {len(missing)} of {len(self)} images have no caption {where}, the first is {missing[0]}. "
                "Write them (an empty file is an empty caption), give the set a prompt, or set columns.caption: null."
            )
        return found

    def _names_repeats(self, columns: ImageColumns) -> bool:
        """Return whether the names of the subfolders are repeats and concepts."""
        if columns.subfolders == "auto":
            inside = [path.relative_to(self.root).parts for path in self.files]
            return all(len(parts) > 1 and _SURELY_REPEATED.fullmatch(parts[0]) for parts in inside)
        return columns.subfolders == "repeats"

    def _read_repeats(self, columns: ImageColumns) -> str:
        """Take the repeats of each image from the name of its subfolder. Return a note for the log."""
        found = [_repeated(path.parts[len(self.root.parts)]) for path in self.files]
        self.repeats = [number for number, _ in found]
        times = [f"{number} times {concept}" for number, concept in sorted(set(found))]
        note = f"an epoch shows the images {listed(times, 8)}"
        if columns.subfolders == "auto":
            note += " (columns.subfolders: classes reads the names of the subfolders as labels)"
        return note


def _repeated(name: str) -> tuple[int, str]:
    """Return the repeats and the concept that the name of a subfolder states."""
    matched = _REPEATED.fullmatch(name)
    if matched is None or not int(matched[1]):
        raise ConfigurationError(
            f"ImageData: {name} is not named like 10_cat, with repeats of at least 1. Rename it, or set "
            "columns.subfolders: classes."
        )
    return int(matched[1]), matched[2].strip()


def files_in(folder: Path) -> list[Path]:
    """Return all files below a folder that are not hidden, sorted.

    Links to folders are followed, except links to a folder that contains them.
    """
    found = []
    # Real paths of a folder and of the folders above it.
    parents_of = {os.fspath(folder): {os.path.realpath(folder)}}
    for here, below, names in os.walk(folder, followlinks=True):
        parents = parents_of.pop(here)
        followed = []
        for name in below:
            inside = os.path.join(here, name)
            real = os.path.realpath(inside)
            if not name.startswith(".") and not (os.path.islink(inside) and real in parents):
                parents_of[inside] = {*parents, real}
                followed.append(name)
        below[:] = followed
        found += [Path(here, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _metadata_of(folder: Path) -> list[Path]:
    found = [folder / name for name in _METADATA if (folder / name).is_file()]
    if len(found) > 1:
        raise ConfigurationError(f"ImageData: {folder} holds {' and '.join(_METADATA)}. Remove one of them.")
    return found


def _metadata_rows(file: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield place and content of each row."""
    text = _text_of(file)
    if file.suffix == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""))
        for row in reader:
            yield f"{file}, line {reader.line_num}", row
        return
    # splitlines() would also split at U+2028 and others.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            parsed = json.loads(line)
        except ValueError as error:
            raise ConfigurationError(f"ImageData: {place} is no JSON: {error}.") from error
        if not isinstance(parsed, dict):
            raise ConfigurationError(f"ImageData: {place} is no JSON object.")
        yield place, parsed


def _text_of(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")  # keeps the ends of lines
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"ImageData: {file} cannot be read as UTF-8 text: {error}.") from error


def companions(table: FolderTable, kind: str, named: str, suffixes: Sequence[str]) -> FileTable:
    """Return the mask or the condition of each image.

    Args:
        table: The images.
        kind: ``mask`` or ``condition``, for errors.
        named: Folder, or ending of the files beside the images: ``masklabel`` or ``condlabel``.
        suffixes: Suffixes of images.

    Raises:
        ConfigurationError: If there is no such folder, or an image has none or several.
    """
    beside = named in ENDINGS
    folder = table.root if beside else Path(named).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(
            f"ImageData: {kind} is {named!r}, which is no folder (looked for {folder.absolute()}), nor "
            f"{' or '.join(ENDINGS)}."
        )
    found: dict[str, list[Path]] = {}
    for file in files_in(folder):
        if file.suffix.lower() in suffixes:
            found.setdefault(file.relative_to(folder).with_suffix("").as_posix(), []).append(file)
    files = []
    missing = []
    for image in table.files:
        name = image.relative_to(table.root).with_suffix("").as_posix()
        fitting = found.get(f"{name}-{named}" if beside else name, [])
        if len(fitting) > 1:
            raise ConfigurationError(
                f"ImageData: {image} has several files as its {kind}: {listed(list(map(str, fitting)))}."
            )
        if fitting:
            files.append(fitting[0])
        else:
            missing.append(image)
    if missing:
        raise ConfigurationError(
            f"ImageData: {len(missing)} of {len(table)} images have no {kind} in {folder}, the first is {missing[0]}. "
            f"Add them under the names of the images, or set {kind}: null."
        )
    return FileTable(folder, files)


def is_label(file: Path) -> bool:
    """Return whether a file is a mask or a condition beside an image, by its name."""
    return file.stem.endswith(tuple(f"-{ending}" for ending in ENDINGS))
