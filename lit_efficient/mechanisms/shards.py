"""Sharded checkpoints: checked before torch reads them, which unpickles whatever they hold.

    folder:  .metadata (pickled: what lies where) | *.distcp (pieces that torch.save wrote) | meta.pt (what is no shard)

Costs: one more read of the folder.
"""

from pathlib import Path
from typing import Any

from lit_efficient.errors import CheckpointError
from lit_efficient.files.checkpoints import DamagedError, check_piece, load_verified
from lit_efficient.internals.torch_shards import shards_metadata


def read_metadata(folder: Path) -> Any:
    """What torch's ``FileSystemReader.read_metadata`` gives, from data alone.

    Raises:
        CheckpointError: If it is missing, damaged, or names classes that do not belong there.
    """
    try:
        found = shards_metadata(folder)
        for index, place in found.storage_data.items():  # what is read of it: a flipped bit may leave another object
            _ = (f"{index.fqn}", folder / place.relative_path, range(place.offset, place.offset + place.length))
        return found
    except Exception as error:  # unpickling damaged bytes may raise anything
        raise CheckpointError(f"refused to load {folder / '.metadata'}: {error or type(error).__name__}") from error


def check_shards(folder: Path) -> None:
    """Compare every piece with its checksum, and see that it holds tensors and primitives only.

    Raises:
        CheckpointError: Naming the file, and what is wrong.
    """
    if not (folder / ".metadata").exists() and (folder / "latest").exists():
        raise CheckpointError(
            f"{folder} is a checkpoint of DeepSpeed, which unpickles it, and that can run code: turn it into one file "
            "with its zero_to_fp32.py, where you trust it"
        )
    if (folder / "meta.pt").exists():
        load_verified(folder / "meta.pt")
    for index, place in read_metadata(folder).storage_data.items():
        file = folder / place.relative_path
        if not file.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{folder} names {place.relative_path!r}, which does not lie in it")
        try:
            if not 0 <= place.offset <= place.offset + place.length <= file.stat().st_size:
                raise DamagedError(f"{file} ends before {index.fqn}")
            with open(file, "rb") as opened:
                opened.seek(place.offset)
                check_piece(opened.read(place.length), f"{file} ({index.fqn})")
        except OSError as error:
            raise DamagedError(f"cannot read {file}: {error.strerror or error}") from error
