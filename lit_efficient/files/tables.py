"""Parquet files and WebDataset's tars as one table that is mapped into memory, by Hugging Face's `datasets`.

They are copied into one Arrow file when they are opened first; then any row is read alone, in 0.1 ms. No code of a data
set is run, and nothing is unpickled.

Costs: the copy, in the cache: as much disk as the rows take, and about 1 ms for a sample of a tar
"""

import glob
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lit_efficient.errors import ConfigurationError, check_installed
from lit_efficient.files.cache import cache_root


def map_table(
    owner: str, layout: Literal["parquet", "webdataset"], files: Sequence[Path], cache_dir: str | None = None
) -> Any:
    """A `datasets.Dataset` of all rows.

    Args:
        owner: Who asks, for errors.
        layout: What the files are.
        files: The files, in order.
        cache_dir: Where the copy is kept. Default: LIT_EFFICIENT_CACHE, else ~/.cache/lit_efficient.

    Raises:
        ConfigurationError: If they cannot be read, or `datasets` is not installed.
    """
    check_installed(f"{owner}: {layout}", "datasets", "pyarrow")
    import datasets
    import pyarrow

    root = cache_root(cache_dir)
    names = [glob.escape(str(path.absolute())) for path in files]
    errors = (datasets.exceptions.DatasetsError, pyarrow.ArrowException, tarfile.TarError, ValueError, OSError)
    try:
        return datasets.load_dataset(
            layout, data_files={"train": names}, split="train", cache_dir=str(root / "datasets")
        )
    except errors as error:
        raise ConfigurationError(
            f"{owner}: {files[0]}, or another of the {len(files)} files, cannot be read as {layout}: "
            f"{error.__cause__ or error}."
        ) from error
