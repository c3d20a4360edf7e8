"""Parquet files and WebDataset tars as one memory-mapped table, read by Hugging Face's `datasets`.

`datasets` copies them into one Arrow file when they are first opened. Then any row is read alone, in 0.1 ms. No code of
a data set is run, and nothing is unpickled.

Costs: disk space in the cache for a copy of the rows, and about 1 ms per sample of a tar; in each process a comparison
    of the copy with its hashes, about 1 s per GB
"""

import glob
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lit_efficient.errors import CheckpointError, ConfigurationError, check_installed
from lit_efficient.files.cache import cache_root
from lit_efficient.files.sums import NAME, check_sums, write_sums

if TYPE_CHECKING:
    from datasets import Dataset

_checked: set[Path] = set()  # copies that this process has compared with their hashes


def map_table(
    owner: str, layout: Literal["parquet", "webdataset"], files: Sequence[Path], cache_dir: str | None = None
) -> "Dataset":
    """Return all rows of some files as one table.

    Args:
        owner: Name of the caller, for messages.
        layout: Format of the files.
        files: The files, in the order of the rows.
        cache_dir: Cache folder for the copy, as for :func:`~lit_efficient.files.cache.cache_root`.

    Raises:
        ConfigurationError: If the files cannot be read or `datasets` is not installed.
        CheckpointError: If the copy is damaged.
    """
    check_installed(f"{owner}: {layout}", "datasets", "pyarrow")
    import datasets

    root = cache_root(cache_dir)
    names = [glob.escape(str(path.absolute())) for path in files]
    try:
        if layout == "webdataset":
            for path in files:
                _check_members(path)
        with _without_report():
            builder = datasets.load_dataset_builder(
                layout, data_files={"train": names}, cache_dir=str(root / "datasets")
            )
        folder = Path(builder.cache_dir)
        if folder not in _checked:  # before the copy is mapped: reading a damaged one may end the process
            check_sums(folder)
        with _bars_on_terminals():
            builder.download_and_prepare()
        if not (folder / NAME).exists():
            write_sums(folder)
        _checked.add(folder)
        return builder.as_dataset(split="train")
    except CheckpointError:
        raise
    except Exception as error:  # each reader of `datasets` raises its own errors
        raise ConfigurationError(
            f"{owner}: {files[0]}, or another of the {len(files)} files, cannot be read as {layout}: "
            f"{error.__cause__ or error}. If the files are whole, delete their copy in {root / 'datasets'}."
        ) from error


@contextmanager
def _without_report() -> Iterator[None]:
    """Context in which ``datasets`` does not report to a server that it reads files, which are local ones here."""
    import datasets

    reports = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = reports


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Context in which ``datasets`` shows progress bars only if the standard error is a terminal."""
    import datasets

    hidden = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if hidden:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if hidden:
            datasets.enable_progress_bars()


def _check_members(path: Path) -> None:
    """Raise an error if a tar has compressed or sparse files, which could unpack to any size in memory."""
    with tarfile.open(path) as archive:
        for member in archive:
            if member.issparse() or member.name.lower().endswith((".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")):
                raise ValueError(f"{member.name} in {path.name} is compressed or sparse; unpack it first")
