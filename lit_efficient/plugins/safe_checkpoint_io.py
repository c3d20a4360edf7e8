"""Checkpoints that can be trusted: written whole or not at all, checked before use, and never a way to run code.

    save:  temporary file beside the target -> flush, fsync -> os.replace -> fsync of the folder
    load:  CRC-32 of every record -> torch.load(weights_only=True) on the CPU -> else the newest good file beside it

Saves: the run, when a process is killed while writing, a disk fills up or a bit flips (torch never reads its own CRCs).
Costs: one more read of the file when loading, in pieces of 1 MB; an fsync when saving.
Source: torch.serialization's zip format, https://docs.pytorch.org/docs/stable/notes/serialization.html.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.atomic_file import remove_whole, replacing

_REFUSAL = r"(?:Unsupported global: GLOBAL|unsupported GLOBAL|Unsupported class|instantiate unsupported class) (\S+)"


class _DamagedError(CheckpointError):
    """The bytes are not those that were written: another checkpoint may be whole."""


def save_atomically(obj: object, path: str | os.PathLike[str]) -> None:
    """Write an object with ``torch.save`` so that the path holds either all of it or what it held before.

    Temporaries that killed processes left in the folder are removed on the way.

    Args:
        obj: What to save.
        path: Where to, on a local or mounted file system. Missing folders are made.

    Raises:
        CheckpointError: If it cannot be written, naming the file and the space; the previous file is as it was.
    """
    target, writer = _local(path), _Writer()
    try:
        with replacing(target) as file, _checksums():
            writer.file = file
            torch.save(obj, cast(IO[bytes], writer))
            file.flush()
            _warn_of_classes(Path(file.name), target)
    except (OSError, RuntimeError) as error:
        # torch's writer, interrupted by an OSError, raises a RuntimeError about positions instead.
        cause = error if isinstance(error, OSError) else writer.error
        if cause is None:
            raise
        raise CheckpointError(_cannot_write(target, cause, writer.written)) from error


def load_verified(path: str | os.PathLike[str], verify: bool = True) -> Any:
    """Load what ``torch.save`` wrote, after checking its checksums, tensors and primitives only, on the CPU.

    Args:
        path: A local file. URLs are refused.
        verify: Compare every record with its CRC-32 first. Without it a flipped bit in a tensor goes unnoticed.

    Raises:
        CheckpointError: If the file is missing, damaged, or needs classes to be imported; the message says which.
    """
    source = _local(path)
    if source.is_dir():
        raise CheckpointError(
            f"{source} is a folder: a sharded checkpoint, which only the strategy that wrote it can load"
        )
    try:
        # One handle for check and load: what was checked is what is loaded, whatever is renamed meanwhile.
        with open(source, "rb") as file:
            if verify:
                _check_records(file, source)
                file.seek(0)
            return _load(file, source)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {source}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {source}: {error.strerror or error}") from error


class SafeCheckpointIO(CheckpointIO):
    """Writes checkpoints atomically, checks them when loading, loads tensors and primitives only, and never from a URL.

    Folders, which sharding strategies write and read themselves, are only removed here.

    Args:
        verify: Check every record's checksum before loading.
        fallback: If a checkpoint is damaged, load the newest other ``*.ckpt`` of its folder (by modification time) that
            is whole and holds optimizer states, and warn. A missing file is always an error: a name may be mistyped.

    Raises:
        ConfigurationError: If an option is not a boolean.
    """

    def __init__(self, verify: bool = True, fallback: bool = True) -> None:
        for name, value in (("verify", verify), ("fallback", fallback)):
            if not isinstance(value, bool):
                raise ConfigurationError(f"SafeCheckpointIO: {name} must be true or false, got {value!r}")
        self.verify = verify
        self.fallback = fallback
        # The standalone pytorch_lightning brings a base class of its own and asks for it with isinstance.
        if "lightning_fabric" in sys.modules:
            sys.modules["lightning_fabric.plugins"].CheckpointIO.register(type(self))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint whole or not at all.

        Raises:
            CheckpointError: If it cannot be written; the previous file is as it was.
            ConfigurationError: If ``storage_options`` are given: there is only the local file system.
        """
        if storage_options is not None:
            raise ConfigurationError(f"SafeCheckpointIO: storage_options must be null, got {storage_options!r}")
        save_atomically(checkpoint, path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: bool | None = True
    ) -> Any:
        """Load a checkpoint on the CPU, or the last good one beside it if it is damaged.

        Raises:
            CheckpointError: If the file is missing or cannot be used, and no other can.
            ConfigurationError: If classes are allowed (``weights_only=False``) or another location is asked for.
        """
        if weights_only is False:
            raise ConfigurationError(
                "SafeCheckpointIO: weights_only must be true or null, got False: loading could run code"
            )
        if map_location is not None and str(map_location) != "cpu":
            raise ConfigurationError(f"SafeCheckpointIO: map_location must be 'cpu' or null, got {map_location!r}")
        try:
            return load_verified(path, self.verify)
        except _DamagedError as error:
            if not self.fallback:
                raise
            return self._last_good(Path(path), error)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, or a folder such that nobody ever finds half of it."""
        remove_whole(_local(path))

    def _last_good(self, damaged: Path, reason: CheckpointError) -> Any:
        others = [other for other in damaged.parent.glob("*.ckpt") if other.is_file() and not other.samefile(damaged)]
        for other in sorted(others, key=lambda file: file.stat().st_mtime_ns, reverse=True):
            try:
                checkpoint = load_verified(other, self.verify)
            except CheckpointError:
                continue
            if isinstance(checkpoint, dict) and "optimizer_states" in checkpoint:
                where = f"epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}"
                rank_zero_warn(f"{reason}. Going on from the last good checkpoint beside it: {other} ({where})")
                return checkpoint
        raise CheckpointError(f"{reason}. No other *.ckpt in {damaged.parent} is whole and resumable") from reason


class _Writer:
    """A file for ``torch.save`` that remembers what went wrong: torch's own writer loses it."""

    file: IO[bytes]

    def __init__(self) -> None:
        self.written = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            count = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.written += count
        return count

    def flush(self) -> None:
        self.file.flush()


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise CheckpointError(f"{os.fspath(path)} is a URL; checkpoints are only written to and read from local files")
    return Path(path)


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Have torch compute CRCs even where somebody switched them off: loading needs them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _cannot_write(target: Path, error: OSError, written: int) -> str:
    existing = next(folder for folder in [target.parent, *target.parent.parents] if folder.exists())
    free = shutil.disk_usage(existing).free
    kept = "the previous file is unchanged" if target.exists() else "nothing was left behind"
    reason = error.strerror or str(error)
    return f"cannot write the checkpoint {target}: {reason} after {_size(written)} ({_size(free)} free); {kept}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GB" if count >= 2**30 else f"{count / 2**20:.1f} MB"


def _warn_of_classes(temporary: Path, target: Path) -> None:
    """Say it now, and not when it is needed, if a safe load will refuse the file."""
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(temporary)
    if unsafe:
        rank_zero_warn(f"{target.name} will be refused when loaded. {_classes_message(', '.join(sorted(unsafe)))}")


def _classes_message(names: str) -> str:
    return (
        f"It holds objects of {names}, not only tensors and primitives: keep them out of hyper-parameters"
        " (save_hyperparameters(ignore=[...])) and states, or allow them with torch.serialization.add_safe_globals"
    )


def _check_records(file: IO[bytes], source: Path) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # zipfile reports damage as BadZipFile, RuntimeError, EOFError, NotImplementedError, ...
        raise _DamagedError(f"the checkpoint {source} is damaged or truncated ({error})") from error
    if bad is not None:
        raise _DamagedError(f"the checkpoint {source} is damaged: its record {bad} does not match its checksum")


def _load(file: IO[bytes], source: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch reports damage as RuntimeError, UnpicklingError, EOFError, KeyError, ...
        found = re.search(_REFUSAL, str(error))
        if found is not None:
            name = found.group(1).strip("`'\"")
            raise CheckpointError(
                f"refused to load {source}. {_classes_message(name)} if you trust the file"
            ) from error
        raise _DamagedError(f"the checkpoint {source} is damaged ({str(error).splitlines()[0][:200]})") from error
