"""Reliable checkpoints: written completely or not at all, verified before use, and loaded without running code.

    save:  temporary file in the same folder -> flush, fsync -> os.replace -> fsync of the folder
    load:  CRC-32 of every record -> torch.load(weights_only=True) on the CPU

Saves: the run if a process is killed while writing, a disk is full or a bit flips (torch never reads its own CRCs), and
    the last good weights of a run that diverges
Costs: one more read of the file when loading, in pieces of 1 MB; an fsync and one pass over the weights when saving;
    a comparison with the previous checkpoint, up to the first difference
Source: torch.serialization's zip format, https://docs.pytorch.org/docs/stable/notes/serialization.html.
"""

import io
import os
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_efficient.distributed.shards import check_shards, read_shards
from lit_efficient.errors import CheckpointError, ChecksTypes, DivergedError, listed, refusal
from lit_efficient.files import remote
from lit_efficient.files.atomic_file import link_again, remove_whole
from lit_efficient.files.background import Jobs
from lit_efficient.files.checkpoints import (
    Checkpoint,
    DamagedError,
    is_floating,
    is_written,
    load_verified,
    local_file,
    not_finite,
    save_atomically,
    serialised,
    state_of,
)

_MAPPED = sys.platform != "win32"  # Windows cannot replace a file that is mapped into memory


class SafeCheckpointIO(ChecksTypes, CheckpointIO):
    """CheckpointIO that writes atomically, verifies files when loading, and only loads tensors and primitives.

    A path may be a URL of fsspec, such as ``s3://bucket/run/last.ckpt``: the file is uploaded under a hidden name and
    then renamed. Two local checkpoints with the same content, such as the best and the last one of a step, are one file
    with two names. When a run resumes, tensors stay on disk until they are used, and processes share their pages.

    Sharding strategies write and read checkpoint folders themselves. Such folders can be loaded for a run on one
    device, and removed.

    Args:
        verify: Check the checksum of every record before loading.
        fallback: If a checkpoint is damaged, warn and load the newest other ``*.ckpt`` in its folder (by modification
            time) that is intact and contains optimizer states. Otherwise the error names that file. A missing file is
            always an error, because its name may be mistyped.
        finite: Raise an error instead of writing weights and optimizer states that are not finite, so that they do not
            replace good ones. Masks of -inf are allowed. Set it to false if buffers contain NaN on purpose.

    Raises:
        ConfigurationError: If an option is not a boolean.
    """

    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "safety": (2, "a kill, a full disk or a flipped bit loses no checkpoint")
    }

    def __init__(self, verify: bool = True, fallback: bool = False, finite: bool = True) -> None:
        self.verify = verify
        self.fallback = fallback
        self.finite = finite
        self.checked: tuple[int, ...] | None = None  # state (inode, size, time) of a file that has been verified
        self._written: tuple[Path, tuple[int, ...] | None] | None = None  # file that was written last, and its state
        self.jobs: Jobs | None = None  # thread that writes; None: the caller writes
        self._waiting: weakref.ref[io.BytesIO] | None = None  # content of the last job, until that is done
        # The standalone pytorch_lightning requires an instance of its own base class.
        if "lightning_fabric" in sys.modules:
            sys.modules["lightning_fabric.plugins"].CheckpointIO.register(type(self))

    def save_checkpoint(
        self, checkpoint: Checkpoint, path: str | os.PathLike[str], storage_options: object | None = None
    ) -> None:
        """Write a checkpoint completely or not at all.

        Raises:
            CheckpointError: If it cannot be written. The previous file does not change.
            DivergedError: If weights or optimizer states are not finite. The previous file does not change.
            ConfigurationError: If ``storage_options`` are given. File systems read theirs from the environment.
        """
        if storage_options is not None:
            raise refusal("SafeCheckpointIO", "storage_options", "null", storage_options)
        if self.finite:
            names = [*not_finite(checkpoint.get("state_dict", {})), *_states_not_finite(checkpoint)]
            if names:
                raise DivergedError(f"{path} is not written, because it has NaN or infinity in {listed(names)}")
        target = path if remote.is_remote(path) else local_file(path)
        if self.jobs is None:
            self._write(checkpoint, target)
            return
        content = None if self._waiting is None else self._waiting()
        if content is None or not is_written(checkpoint, content):
            self.jobs.wait()
            content = serialised(checkpoint)
            self._waiting = weakref.ref(content)
        self.jobs.submit(partial(self._write, content, target), path)

    def begin_background(self) -> None:
        """Write all checkpoints in a thread, from copies, until ``teardown``."""
        self.jobs = self.jobs or Jobs()

    def teardown(self) -> None:
        """Wait for the checkpoints that are being written, and raise the error of one that failed."""
        jobs, self.jobs = self.jobs, None
        if jobs is not None:
            jobs.wait()

    def _write(self, checkpoint: Checkpoint | io.BytesIO, target: str | os.PathLike[str]) -> None:
        if not isinstance(target, Path):
            save_atomically(checkpoint, target)
            return
        if not self._linked(checkpoint, target):
            save_atomically(checkpoint, target)
        self._written = target, state_of(target)

    def _linked(self, checkpoint: Checkpoint | io.BytesIO, target: Path) -> bool:
        """Make ``target`` a second name of the file that was written last, if that has the same content."""
        if self._written is None:
            return False
        previous, state = self._written
        if target == previous or state_of(previous) != state:
            return False
        return is_written(checkpoint, previous) and link_again(previous, target)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: bool | None = True
    ) -> Any:
        """Load a checkpoint on the CPU. With ``fallback``, load the last good one in its folder if it is damaged.

        Raises:
            CheckpointError: If the file is missing or cannot be used. For a damaged file it names the last good one.
            ConfigurationError: For ``weights_only=False`` or a ``map_location`` other than the CPU.
        """
        if weights_only is False:
            raise refusal("SafeCheckpointIO", "weights_only", "true or null (otherwise loading could run code)", False)
        if map_location is not None and str(map_location) != "cpu":
            raise refusal("SafeCheckpointIO", "map_location", "cpu or null", map_location)
        if remote.is_remote(path):
            with remote.downloaded(os.fspath(path)) as local:
                return self.load_checkpoint(local)
        folder = local_file(path)
        if folder.is_dir():  # written by a sharding strategy, which does not call this method to read it
            check_shards(folder)
            return read_shards(folder)
        try:
            verify = self.verify and (self.checked is None or state_of(path) != self.checked)
            return load_verified(path, verify, mapped=_MAPPED)
        except DamagedError as error:
            other = self.last_good(path)
            if other is None:
                raise CheckpointError(
                    f"{error}. No other *.ckpt in {Path(path).parent} is intact and resumable"
                ) from error
            if not self.fallback:
                raise CheckpointError(f"{error}. The last good checkpoint in its folder: {other}") from error
            rank_zero_warn(f"{error}. Continuing from the last good checkpoint in its folder: {other}")
            return load_verified(other, self.verify, mapped=_MAPPED)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, or a folder atomically, after the checkpoints that are being written."""
        if remote.is_remote(path):
            remove = partial(remote.remove, os.fspath(path))
        else:
            remove = partial(remove_whole, local_file(path))
        if self.jobs is None:
            remove()
        else:
            self.jobs.submit(remove, path, writes=False)

    def last_good(self, damaged: str | os.PathLike[str]) -> Path | None:
        """Return the newest other ``*.ckpt`` in the same folder that is intact and resumable, or ``None``."""
        files = [file for file in Path(damaged).parent.glob("*.ckpt") if file.is_file()]
        others = [file for file in files if not file.samefile(damaged)]
        for other in sorted(others, key=lambda file: file.stat().st_mtime_ns, reverse=True):
            try:
                checkpoint = load_verified(other, self.verify, mapped=True)
            except CheckpointError:
                continue
            if isinstance(checkpoint, dict) and "optimizer_states" in checkpoint:
                return other
        return None


def _states_not_finite(checkpoint: Checkpoint) -> list[str]:
    """Return the names of optimizer states with NaN or infinity. An infinite second moment stops a weight for good."""
    found: list[str] = []
    queue: deque[tuple[str, Any]] = deque([("optimizer", checkpoint.get("optimizer_states"))])
    while queue:
        name, value = queue.popleft()
        if isinstance(value, list | tuple):
            queue += [(f"{name} {position}", one) for position, one in enumerate(value)]
        elif isinstance(value, Mapping):
            queue += [(f"{name} {key}", one) for key, one in value.items()]
        elif is_floating(value) and not value.isfinite().all():
            found.append(name)
    return found
