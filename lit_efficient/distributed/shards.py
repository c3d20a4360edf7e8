"""Sharded checkpoints: checked before torch reads them, which unpickles whatever they hold.

    folder:  .metadata (pickled: what lies where) | *.distcp (pieces that torch.save wrote) | meta.pt (what is no shard)
             SHA256SUMS (what the command line adds: nothing else would tell of a changed place in .metadata)

Costs: one more read of the folder, and one when it is written.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_efficient.distributed.ranks import gather_objects
from lit_efficient.errors import CheckpointError
from lit_efficient.files.atomic_file import begin_folder, end_folder
from lit_efficient.files.checkpoints import DamagedError, check_piece, load_verified, local_file, read
from lit_efficient.files.runs import LATEST
from lit_efficient.files.sums import check_sums, sha256_of, write_sums
from lit_efficient.files.tensors import zeros_in_file
from lit_efficient.internals.torch_shards import shards_metadata
from lit_efficient.internals.wraps import inner_method, wrap_method

TIED = "tied"  # in meta.pt: names of weights that are other ones', which the shards hold under each name


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
        raise CheckpointError(f"refused to load {folder}/.metadata: {str(error) or type(error).__name__}") from error


def write_shards(strategy: Any, target: Path, write: Callable[[Path], object]) -> None:
    """Let all processes write what they hold into one folder, which appears whole, with the hashes of its files, or not
    at all; it is the first process's ``target``.
    """
    own = begin_folder(local_file(target)) if strategy.is_global_zero else target
    folder, target = map(Path, strategy.broadcast((str(own), str(target))))
    write(folder)
    strategy.barrier()
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    mine = names[strategy.global_rank :: strategy.world_size]
    sums = gather_objects([(name, sha256_of(folder / name)) for name in mine])
    if strategy.is_global_zero:
        write_sums(folder, dict(entry for one in sums for entry in one))
        end_folder(folder, local_file(target))
    strategy.barrier()


def check_everywhere(strategy: Any, path: Path, sums_alone: bool = False) -> None:
    """Check a checkpoint that all processes are about to read, in the first of them; of DeepSpeed's the sums alone.

    Raises:
        CheckpointError: In all of them, as of :func:`check_shards`, ``check_sums`` and ``load_verified``.
    """
    said = ""
    if strategy.is_global_zero:
        check = check_sums if sums_alone else check_shards if path.is_dir() else partial(load_verified, mapped=True)
        try:
            check(path)
        except CheckpointError as error:
            said = str(error)
    if said := strategy.broadcast(said):
        raise CheckpointError(said)


def kept_aside(path: Path) -> set[str]:
    """Keys of what a checkpoint, a file or a folder of shards, holds beside the weights: what trained beside them."""
    meta = path / "meta.pt" if path.is_dir() else path
    return set(load_verified(meta, verify=False, mapped=True).get("lit_efficient", {}).get("training_only", ()))


def read_checkpoint(path: str | os.PathLike[str], optimizers: bool = False) -> dict[str, Any]:
    """As :func:`lit_efficient.files.checkpoints.read`, of folders of shards, too: their tensors are put together, with
    ``optimizers`` those of the optimizers' states, too.
    """
    place = local_file(path)
    last = place / LATEST / "last.ckpt" if (place / LATEST).exists() else place / "last.ckpt"
    folder = next((one for one in (place, last) if (one / ".metadata").is_file() or is_deepspeeds(one)), None)
    if folder is None:
        return read(path)
    check_shards(folder)
    return read_shards(folder, optimizers, in_file=True)


def read_shards(folder: Path, optimizers: bool = True, in_file: bool = False) -> dict[str, Any]:
    """A checkpoint of Lightning from the folder that holds it in shards, which has been checked; in one process.

    The states of optimizers get the numbers that their parameters have in the groups, as in a checkpoint of one file.
    ``in_file``: tensors are in the pages of one, as an optimizer that goes on with them would not want its states.
    """
    metadata, pieces = read_metadata(folder), dict[str, list[Any]]()
    for index, place in metadata.storage_data.items():
        pieces.setdefault(index.fqn, []).append((place, index.offset))
    found = load_verified(folder / "meta.pt") if (folder / "meta.pt").exists() else {}
    held, tied, kinds = dict[str, Any](), found.pop(TIED, {}), dict[str, Any]()
    for key, kind in metadata.state_dict_metadata.items():
        path = metadata.planner_data[key]
        if path[-1] not in tied if path[0] == "state_dict" else optimizers:
            kinds[key] = kind
    wholes = {key: (kind.size, kind.properties.dtype) for key, kind in kinds.items() if hasattr(kind, "chunks")}
    tensors = dict(zip(wholes, zeros_in_file([*wholes.values()], folder.parent if in_file else None)))
    for key in kinds:
        inner, (*parts, last) = held, metadata.planner_data[key]
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = _filled(folder, key, pieces.get(key, ()), tensors.get(key))
    weights = held.pop("state_dict", {})
    found["state_dict"] = weights | {name: weights[first] for name, first in tied.items() if first in weights}
    if optimizers:
        found["optimizer_states"] = [_numbered(held[key]) for key in sorted(held)]
    return found


def _filled(folder: Path, key: str, pieces: Iterable[tuple[Any, Any]], whole: Tensor | None) -> Any:
    """``whole`` with all its pieces, or what else was saved under a key."""
    for place, offset in pieces:
        piece = _piece(folder / place.relative_path, place, key)
        if whole is None:
            return piece
        if type(piece) is not Tensor:
            raise CheckpointError(f"{folder}: {key} is a {type(piece).__name__}, which is not made whole here")
        whole[tuple(slice(at, at + size) for at, size in zip(offset or (), piece.shape))] = piece
        del piece  # before the next one is read
    return whole


def _piece(file: Path, place: Any, key: str) -> Any:
    with open(file, "rb") as opened:
        opened.seek(place.offset)
        return check_piece(opened.read(place.length), f"{file} ({key})")


def _numbered(optimizer: dict[str, Any]) -> dict[str, Any]:
    groups = [group for _, group in sorted(optimizer.get("param_groups", {}).items())]
    ids = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    state = {ids[name]: values for name, values in optimizer.get("state", {}).items()}
    return {"state": state, "param_groups": [{**g, "params": [ids[name] for name in g["params"]]} for g in groups]}


def states_in(folder: Path, optimizer: int) -> set[str]:
    """Names of the parameters that a folder holds states of the given optimizer for, and parts of their names."""
    prefix, found = f"optimizer_{optimizer}.state.", set()
    for key in read_metadata(folder).state_dict_metadata:
        parts = key.removeprefix(prefix).split(".") if key.startswith(prefix) else []
        found |= {".".join(parts[:n]) for n in range(1, len(parts))}
    return found


def sum_shards(strategy: Any) -> None:
    """Let a strategy that writes folders write the hashes of their files, too."""
    if not getattr(strategy, "writes_sums", False):
        wrap_method(strategy, "save_checkpoint", _save_checkpoint)


def _save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, *arguments: Any, **named: Any) -> None:
    inner_method(self, "save_checkpoint", _save_checkpoint)(checkpoint, filepath, *arguments, **named)
    folder = Path(self.broadcast(filepath))
    if folder.is_dir():
        self.barrier()
        if self.is_global_zero:
            write_sums(folder)


def is_deepspeeds(folder: Path) -> bool:
    """Whether it is a checkpoint of DeepSpeed's, which nothing here reads."""
    return not (folder / ".metadata").exists() and (folder / "latest").is_file()  # which a folder of runs has, too


def check_shards(folder: Path) -> None:
    """Compare every piece with its checksum, and see that it holds tensors and primitives only.

    Raises:
        CheckpointError: Naming the file, and what is wrong.
    """
    if is_deepspeeds(folder):
        raise CheckpointError(
            f"{folder} is a checkpoint of DeepSpeed, which unpickles it, and that can run code: turn it into one file "
            "with its zero_to_fp32.py, where you trust it"
        )
    check_sums(folder)
    if (folder / "meta.pt").exists():
        load_verified(folder / "meta.pt")
    for index, place in read_metadata(folder).storage_data.items():
        file = folder / place.relative_path
        if not file.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{folder} names {place.relative_path!r}, which does not lie in it")
        try:
            if not 0 <= place.offset <= place.offset + place.length <= file.stat().st_size:
                raise DamagedError(f"{file} ends before {index.fqn}")
            _piece(file, place, index.fqn)
        except OSError as error:
            raise DamagedError(f"cannot read {file}: {error.strerror or error}") from error
