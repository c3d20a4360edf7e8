"""Checkpoints that can be trusted: written whole or not at all, checked before use, and never a way to run code.

    save:  temporary file beside the target -> flush, fsync -> os.replace -> fsync of the folder
    load:  CRC-32 of every record -> torch.load(weights_only=True) on the CPU

Saves: the run, when a process is killed while writing, a disk fills up or a bit flips (torch never reads its own CRCs),
and the last good weights of one that diverges.
Costs: one more read of the file when loading, in pieces of 1 MB; an fsync and one pass over the weights when saving.
    A checkpoint that begins as the one before is compared with it as far as they agree.
Source: torch.serialization's zip format, https://docs.pytorch.org/docs/stable/notes/serialization.html.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_efficient.distributed.shards import check_shards, read_shards
from lit_efficient.errors import CheckpointError, DivergedError, listed, refusal
from lit_efficient.files.atomic_file import link_again, remove_whole
from lit_efficient.files.checkpoints import (
    DamagedError,
    is_floating,
    is_written,
    load_verified,
    local_file,
    not_finite,
    save_atomically,
    state_of,
)

_MAPPED = sys.platform != "win32"  # where a file cannot be replaced while somebody reads it


class SafeCheckpointIO(CheckpointIO):
    """Writes checkpoints atomically, checks them when loading, loads tensors and primitives only, and never from a URL.

    Two checkpoints of the same content, such as a best and a last one of the same step, are one file with two names. A
    resume leaves tensors on disk until they are used, and reads none twice for two processes.

    Folders, which sharding strategies write and read themselves, are read whole for a run on one device, and removed.

    Args:
        verify: Check every record's checksum before loading.
        fallback: If a checkpoint is damaged, load the newest other ``*.ckpt`` of its folder (by modification time) that
            is whole and holds optimizer states, and warn. Without it the error names that one. A missing file is always
            an error: a name may be mistyped.
        finite: Refuse to write weights and optimizers' states that are not finite, so that they replace none that are.
            A mask of -inf may be among the weights; buffers that hold NaN on purpose need false.

    Raises:
        ConfigurationError: If an option is not a boolean.
    """

    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "safety": (2, "a kill, a full disk or a flipped bit loses no checkpoint")
    }

    def __init__(self, verify: bool = True, fallback: bool = False, finite: bool = True) -> None:
        for name, value in (("verify", verify), ("fallback", fallback), ("finite", finite)):
            if not isinstance(value, bool):
                raise refusal("SafeCheckpointIO", name, "true or false", value)
        self.verify = verify
        self.fallback = fallback
        self.finite = finite
        self.checked: tuple[int, ...] | None = None  # the state of a file whose checksums are known to be right
        self._written: tuple[Path, tuple[int, ...] | None] | None = None  # what was written last, and its state
        # The standalone pytorch_lightning brings a base class of its own and asks for it with isinstance.
        if "lightning_fabric" in sys.modules:
            sys.modules["lightning_fabric.plugins"].CheckpointIO.register(type(self))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint whole or not at all.

        Raises:
            CheckpointError: If it cannot be written; the previous file is as it was.
            DivergedError: If weights or optimizers' states are not finite; the previous file is as it was.
            ConfigurationError: If ``storage_options`` are given: there is only the local file system.
        """
        if storage_options is not None:
            raise refusal("SafeCheckpointIO", "storage_options", "null", storage_options)
        names = [*not_finite(checkpoint.get("state_dict", {})), *_states_not_finite(checkpoint)] if self.finite else []
        if names:
            raise DivergedError(f"{path} is not written: it is not finite in {listed(names)}")
        target, before = local_file(path), self._written
        if before is None or target == before[0] or state_of(before[0]) != before[1] or (
            not is_written(checkpoint, before[0]) or not link_again(before[0], target)
        ):  # fmt: skip
            save_atomically(checkpoint, target)
        self._written = target, state_of(target)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = "cpu", weights_only: bool | None = True
    ) -> Any:
        """Load a checkpoint on the CPU; with ``fallback`` the last good one beside it if it is damaged.

        Raises:
            CheckpointError: If the file is missing or cannot be used; of a damaged one it names the last good one.
            ConfigurationError: If classes are allowed (``weights_only=False``) or another location is asked for.
        """
        if weights_only is False:
            raise refusal("SafeCheckpointIO", "weights_only", "true or null (else loading could run code)", False)
        if map_location is not None and str(map_location) != "cpu":
            raise refusal("SafeCheckpointIO", "map_location", "cpu or null", map_location)
        folder = local_file(path)
        if folder.is_dir():  # which a strategy that shards has written; its own reading comes past here
            check_shards(folder)
            return read_shards(folder)
        try:
            verify = self.verify and (self.checked is None or state_of(path) != self.checked)
            return load_verified(path, verify, mapped=_MAPPED)
        except DamagedError as error:
            other = self.last_good(path)
            if other is None:
                raise CheckpointError(
                    f"{error}. No other *.ckpt in {Path(path).parent} is whole and resumable"
                ) from error
            if not self.fallback:
                raise CheckpointError(f"{error}. The last good one beside it: {other}") from error
            rank_zero_warn(f"{error}. Going on from the last good checkpoint beside it: {other}")
            return load_verified(other, self.verify, mapped=_MAPPED)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a file, or a folder such that nobody ever finds half of it."""
        remove_whole(local_file(path))

    def last_good(self, damaged: str | os.PathLike[str]) -> Path | None:
        """The newest other ``*.ckpt`` beside a checkpoint, by modification time, that is whole and resumable."""
        beside = [file for file in Path(damaged).parent.glob("*.ckpt") if file.is_file()]
        others = [file for file in beside if not file.samefile(damaged)]
        for other in sorted(others, key=lambda file: file.stat().st_mtime_ns, reverse=True):
            try:
                checkpoint = load_verified(other, self.verify, mapped=True)
            except CheckpointError:
                continue
            if isinstance(checkpoint, dict) and "optimizer_states" in checkpoint:
                return other
        return None


def _states_not_finite(checkpoint: dict[str, Any]) -> list[str]:
    """Names of optimizers' tensors that hold NaN or infinity: a weight whose second moment is infinite stands still."""
    named: list[tuple[str, Any]] = [("optimizer", checkpoint.get("optimizer_states"))]
    for name, value in named:  # which grows: optimizers keep numbers, lists and mappings, of tensors and of all at once
        inner = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        named += [(f"{name} {key}", one) for key, one in (inner.items() if isinstance(inner, Mapping) else ())]
    return [name for name, value in named if is_floating(value) and not value.isfinite().all()]
