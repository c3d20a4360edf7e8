"""Parquet files and WebDataset's tars as one table that is mapped into memory, by Hugging Face's `datasets`.

They are copied into one Arrow file when they are opened first; then any row is read alone, in 0.1 ms. No code of a data
set is run, and nothing is unpickled.

Costs: the copy, in the cache: as much disk as the rows take, and about 1 ms for a sample of a tar; in each process
    a comparison with its hashes, about 1 s a GB
"""

import glob
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lit_efficient.errors import CheckpointError, ConfigurationError, check_installed
from lit_efficient.files.cache import cache_root
from lit_efficient.files.sums import NAME, check_sums, write_sums

_checked: set[Path] = set()  # the copies that this process has compared with their hashes


def map_table(
    owner: str, layout: Literal["parquet", "webdataset"], files: Sequence[Path], cache_dir: str | None = None
) -> Any:
    """A `datasets.Dataset` of all rows of some files; ``cache_dir`` is where the copy is kept.

    Raises:
        ConfigurationError: If they cannot be read, or `datasets` is not installed.
        CheckpointError: If the copy is damaged.
    """
    check_installed(f"{owner}: {layout}", "datasets", "pyarrow")
    import datasets

    root = cache_root(cache_dir)
    names = [glob.escape(str(path.absolute())) for path in files]
    try:
        for path in files if layout == "webdataset" else ():
            _check_members(path)
        builder = datasets.load_dataset_builder(layout, data_files={"train": names}, cache_dir=str(root / "datasets"))
        folder = Path(builder.cache_dir)
        if folder not in _checked:  # before it is mapped: a process may end when it reads what is damaged
            check_sums(folder)
        builder.download_and_prepare()
        if not (folder / NAME).exists():
            write_sums(folder)
        _checked.add(folder)
        return builder.as_dataset(split="train")
    except CheckpointError:
        raise
    except Exception as error:  # of any of their readers
        raise ConfigurationError(
            f"{owner}: {files[0]}, or another of the {len(files)} files, cannot be read as {layout}: "
            f"{error.__cause__ or error}. If they are whole, delete their copy in {root / 'datasets'}."
        ) from error


def _check_members(path: Path) -> None:
    """Refuse files in a tar that would be unpacked into memory, however large they say that they are."""
    with tarfile.open(path) as archive:
        for member in archive:
            if member.issparse() or member.name.lower().endswith((".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")):
                raise ValueError(f"{member.name} in {path.name} is compressed or sparse; unpack it first")
