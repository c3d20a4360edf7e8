"""Row 1: SIGKILL while a fit writes its checkpoints on a file system of fsspec. No server is needed.

``local`` is a folder behind a URL: uploads may be torn, and a rename is atomic. ``objects`` is a folder that behaves as
an object store does: an object appears whole, a rename copies and then removes, and empty folders do not exist.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from benchmarks.trust_rows import Piece, kills
from benchmarks.trust_rows.kills import Killed, KilledRank

_ASYNC = [{"class_path": "AsyncCheckpoint"}]
_LAST = {"every_n_train_steps": 1, "save_top_k": 0, "save_last": True, "enable_version_counter": False}


class Objects(LocalFileSystem):
    """Local folders with the behaviour of an object store."""

    protocol: ClassVar[Any] = "objects"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).replace("objects://", "local://"))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing."""

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:  # type: ignore[override]
        """Copy a file to a place that nobody sees, then give it its name."""
        os.makedirs(os.path.dirname(rpath), exist_ok=True)
        unseen = os.path.abspath(f"../object-{os.getpid()}")
        shutil.copyfile(lpath, unseen)
        os.replace(unseen, rpath)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        """Copy, then remove."""
        self.put_file(path1, path2)
        self.rm(path1)

    def ls(self, path: str, detail: bool = False, **options: Any) -> list[Any]:
        """Return the entries of a folder that has some."""
        found = [entry for entry in super().ls(path, True, **options) if _holds_files(entry)]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [entry["name"] for entry in found]


def _holds_files(entry: dict[str, Any]) -> bool:
    return entry["type"] != "directory" or any(files for _, _, files in os.walk(entry["name"]))


def _register() -> None:
    fsspec.register_implementation("objects", Objects, clobber=True)


def _command(*words: str) -> None:
    _register()
    kills._command(*words)


def _resume(protocol: str) -> None:
    _command(*kills._FIT, "--ckpt_path", f"{protocol}://{os.getcwd()}/remote/last.ckpt")


def _prepare(protocol: str, extra: Sequence[Any], trainer: dict[str, Any], folder: Path) -> None:
    saver = {**_LAST, "dirpath": f"{protocol}://{folder}/remote"}
    trainer = {**trainer, "default_root_dir": str(folder.with_name("runs")), "logger": False}
    kills._config(saver, [{"class_path": "EMA"}, *extra], trainer, folder)


def _last_of(protocol: str, folder: Path) -> dict[str, Any]:
    """Return the content of the checkpoint, without the progress of loops.

    A fit that goes on from its last step ends the epoch and saves once more; one that was not killed does not.
    """
    from lit_efficient.distributed.shards import read_checkpoint

    _register()
    kept = kills.kept_of(read_checkpoint(f"{protocol}://{folder}/remote/last.ckpt", optimizers=True))
    callbacks = {key: state for key, state in kept["callbacks"].items() if not key.startswith("ExactResume")}
    assert len(callbacks) < len(kept["callbacks"])
    return {**kept, "callbacks": callbacks, "loops": {}, "epoch": None}


def _whole(protocol: str, folder: Path, result: Any) -> str:
    """Return the error of a checkpoint that a kill left and that cannot be read."""
    from lit_efficient.errors import CheckpointError

    try:
        _last_of(protocol, folder)
    except CheckpointError as error:
        return str(error)
    return ""


def _fit(protocol: str, later: bool = False, shards: bool = False, victim: int | None = None) -> Killed:
    trainer = {"strategy": kills._SHARDS, "devices": 1 if victim is None else 2} if shards else {}
    fit = Killed(
        partial(_prepare, protocol, _ASYNC if later else (), trainer),
        partial(_command, *kills._FIT),
        partial(_resume, protocol),
        partial(_last_of, protocol),
        since=r"os\.rename .*remote/last\.ckpt$",
        shm=True,
        intact=partial(_whole, protocol),
    )
    if victim is None:
        return fit
    own = {field.name: getattr(fit, field.name) for field in fields(fit)}
    if victim:  # it uploads pieces alone: by its third the first checkpoint is whole
        own |= {"since": r"remote/last\.ckpt\..*\.distcp$", "times": 3}
    return KilledRank(**own, victim=victim)


_PROMISE = "the checkpoint there is whole, a resumed fit ends bit-identical, and no other files stay"
PIECES: tuple[Piece, ...] = (
    kills.piece(
        "kill-remote",
        f"A fit that saves each step on a file system of fsspec, also asynchronously, is killed: {_PROMISE}",
        {
            f"{protocol}{'-async' * later}": partial(_fit, protocol, later)
            for protocol in ("local", "objects")
            for later in (False, True)
        },
        {"before": 8, "within": 6, "time": 4},
    ),
    kills.piece(
        "kill-remote-shards",
        "The same of a fit whose checkpoints are folders of shards, in one process and in two of which one is killed",
        {
            "local": partial(_fit, "local", shards=True),
            "objects-async": partial(_fit, "objects", True, True),
            "objects-first": partial(_fit, "objects", shards=True, victim=0),
            "local-second": partial(_fit, "local", shards=True, victim=1),
        },
        {"before": 5, "within": 4, "time": 3},
        in_ci=0,
    ),
)
