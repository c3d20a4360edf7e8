"""Sharded checkpoints, checked before torch reads them, since torch unpickles everything in them.

    folder:  .metadata (pickled: place of each piece) | *.distcp (pieces that torch.save wrote) | meta.pt (all else)
             SHA256SUMS (added by the command line; without it a changed place in .metadata would stay unnoticed)

Costs: one more read of the folder when it is read, and one when it is written
"""

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor, distributed, nn

from lit_efficient.distributed.ranks import await_ranks, gather_objects
from lit_efficient.errors import CheckpointError
from lit_efficient.files.atomic_file import begin_folder, end_folder
from lit_efficient.files.background import Jobs, finish_writing
from lit_efficient.files.checkpoints import DamagedError, check_piece, load_verified, local_file, read, serialised
from lit_efficient.files.remote import downloaded, is_remote, new_folder, point, upload_files
from lit_efficient.files.runs import LATEST
from lit_efficient.files.sums import check_sums, sha256_of, write_sums
from lit_efficient.files.tensors import zeros_in_file
from lit_efficient.internals.torch_shards import shards_metadata
from lit_efficient.internals.wraps import inner_method, temporarily, wrap_method
from lit_efficient.surgery import parents

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy, Strategy

Checkpoint: TypeAlias = dict[str, Any]
Place: TypeAlias = Any  # torch's record of where a piece is stored: relative_path, offset and length
TIED = "tied"  # key in meta.pt: name of a tied weight -> the name under which the shards hold it


def read_metadata(folder: Path) -> Any:
    """Return the result of torch's ``FileSystemReader.read_metadata``, read without running code in the file.

    Raises:
        CheckpointError: If it is missing, damaged, or names classes that do not belong in it.
    """
    try:
        found = shards_metadata(folder)
        for index, place in found.storage_data.items():  # use every field: a flipped bit may leave another type
            _ = (f"{index.fqn}", folder / place.relative_path, range(place.offset, place.offset + place.length))
        return found
    except Exception as error:  # unpickling damaged bytes may raise anything
        raise CheckpointError(f"refused to load {folder}/.metadata: {str(error) or type(error).__name__}") from error


def write_shards(
    strategy: "ParallelStrategy",
    target: str | os.PathLike[str],
    write: Callable[[Path], object],
    jobs: Jobs | None = None,
    group: Any = None,
) -> None:
    """Write a checkpoint folder from all processes. It appears complete, with the hashes of its files, or not at all.

    Args:
        strategy: The trainer's strategy.
        target: The folder, local or a URL of fsspec; the value of process 0 counts.
        write: Writes this process's part into a temporary folder.
        jobs: Thread that writes; ``None``: return when the folder is complete.
        group: Process group for the messages of that thread.
    """
    finish: Callable[[], None]
    if is_remote(target):
        url, folder_url = strategy.broadcast((str(target), new_folder(str(target))))
        finish = partial(_upload_shards, strategy, write, url, folder_url, group)
    else:
        own = Path(target)
        if strategy.is_global_zero:
            own = begin_folder(local_file(target))
        folder, final = map(Path, strategy.broadcast((str(own), str(target))))
        finish = partial(_fill_folder, strategy, write, folder, final, group)
    if jobs is None:
        finish()
    else:
        jobs.submit(finish, target)


def _fill_folder(
    strategy: "ParallelStrategy", write: Callable[[Path], object], folder: Path, target: Path, group: Any
) -> None:
    write(folder)
    await_ranks(group)  # for the files of all processes
    mine = _files(folder)[strategy.global_rank :: strategy.world_size]
    sums = gather_objects([(name, sha256_of(folder / name)) for name in mine], group)
    if strategy.is_global_zero:
        write_sums(folder, dict(entry for one in sums for entry in one))
        end_folder(folder, local_file(target))
    await_ranks(group)


def _upload_shards(
    strategy: "ParallelStrategy", write: Callable[[Path], object], url: str, folder_url: str, group: Any
) -> None:
    with tempfile.TemporaryDirectory() as place:  # of this process alone: others may run on other machines
        folder = Path(place)
        write(folder)
        sums = gather_objects([(name, sha256_of(folder / name)) for name in _files(folder)], group)
        if strategy.is_global_zero:
            write_sums(folder, dict(entry for one in sums for entry in one))
        upload_files(folder, folder_url)
    await_ranks(group)  # for the files of all processes
    if strategy.is_global_zero:
        point(url, folder_url)
    await_ranks(group)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@contextmanager
def local_copy(strategy: "ParallelStrategy", path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the local path of a checkpoint in all processes. A remote one is copied once to each machine.

    Raises:
        CheckpointError: In all processes, if a copy fails.
    """
    where = os.fspath(strategy.broadcast(path))
    if not is_remote(where):
        yield Path(where)
        return
    with ExitStack() as copies:
        own: tuple[int, str, str] = (strategy.node_rank, "", "")
        if strategy.local_rank == 0:
            try:
                own = (strategy.node_rank, str(copies.enter_context(downloaded(where))), "")
            except CheckpointError as error:
                own = (strategy.node_rank, "", str(error))
        found = gather_objects(own)
        for _, _, problem in found:
            if problem:
                raise CheckpointError(problem)
        yield next(Path(local) for node, local, _ in found if local and node == strategy.node_rank)
        await_ranks()  # the copy is removed when all processes have read it


def staged(checkpoint: Checkpoint, group: Any, copy: bool = True) -> Callable[[Path], None]:
    """Return a function that writes the shards of this process into a folder, which may be its own.

    Args:
        checkpoint: The checkpoint. Its weights and optimizer states are taken out.
        group: Process group for the messages of the thread that writes.
        copy: Copy the state into host memory first, so that training can go on.
    """
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    state = {"state_dict": checkpoint.pop("state_dict")}
    state |= {f"optimizer_{i}": one for i, one in enumerate(checkpoint.pop("optimizer_states", []))}
    if copy:
        options = StagingOptions(False, False, False, False)  # neither pinned nor shared memory, and no second thread
        stager: Any = DefaultStager(options)
        state = stager.stage(state)
    rest = serialised(checkpoint)

    def write(folder: Path) -> None:
        save(state, checkpoint_id=folder, process_group=group)
        if distributed.get_rank() == 0:
            (folder / "meta.pt").write_bytes(rest.getvalue())

    return write


def check_everywhere(strategy: "ParallelStrategy", path: Path, sums_alone: bool = False) -> None:
    """Check, in process 0, a checkpoint that all processes are about to read.

    Args:
        strategy: The trainer's strategy.
        path: A file or a folder.
        sums_alone: Compare hashes only, for a checkpoint of DeepSpeed.

    Raises:
        CheckpointError: In all processes, as in :func:`check_shards`, ``check_sums`` and ``load_verified``.
    """
    finish_writing()
    problem = ""
    if strategy.is_global_zero:
        try:
            if sums_alone:
                check_sums(path)
            elif path.is_dir():
                check_shards(path)
            else:
                load_verified(path, mapped=True)
        except CheckpointError as error:
            problem = str(error)
    problem = strategy.broadcast(problem)
    if problem:
        raise CheckpointError(problem)


def training_only_keys(path: Path) -> set[str]:
    """Return the keys of a checkpoint's tensors that are needed in training only, such as projection heads."""
    meta = path
    if path.is_dir():
        meta = path / "meta.pt"
    return set(load_verified(meta, verify=False, mapped=True).get("lit_efficient", {}).get("training_only", ()))


def read_checkpoint(path: str | os.PathLike[str], optimizers: bool = False) -> Checkpoint:
    """Read a checkpoint as :func:`lit_efficient.files.checkpoints.read` does; a folder of shards is joined to whole
    tensors.

    Args:
        path: A file, a folder of shards, or a run's folder.
        optimizers: Whether to join the tensors of optimizer states as well.
    """
    finish_writing()
    if is_remote(path):
        with downloaded(os.fspath(path)) as local:
            return read_checkpoint(local, optimizers)
    place = local_file(path)
    if (place / LATEST).exists():
        last = place / LATEST / "last.ckpt"
    else:
        last = place / "last.ckpt"
    folder = next((one for one in (place, last) if (one / ".metadata").is_file() or is_deepspeeds(one)), None)
    if folder is None:
        return read(path)
    check_shards(folder)
    return read_shards(folder, optimizers, in_file=True)


def read_shards(folder: Path, optimizers: bool = True, in_file: bool = False) -> Checkpoint:
    """Return a checkpoint in Lightning's layout from a folder of shards that has been checked; in one process.

    Args:
        folder: The folder.
        optimizers: Whether to read optimizer states. Their parameters are numbered as in a checkpoint of one file.
        in_file: Whether to place tensors in the pages of a temporary file, which saves memory. An optimizer that
            continues training with them must not.
    """
    metadata = read_metadata(folder)
    pieces: dict[str, list[tuple[Place, Sequence[int] | None]]] = {}
    for index, place in metadata.storage_data.items():
        pieces.setdefault(index.fqn, []).append((place, index.offset))
    found: Checkpoint = {}
    if (folder / "meta.pt").exists():
        found = load_verified(folder / "meta.pt")
    tied = found.pop(TIED, {})
    kinds: dict[str, Any] = {}
    for key, kind in metadata.state_dict_metadata.items():
        path = metadata.planner_data[key]
        wanted = optimizers
        if path[0] == "state_dict":
            wanted = path[-1] not in tied
        if wanted:
            kinds[key] = kind
    wholes = {key: (kind.size, kind.properties.dtype) for key, kind in kinds.items() if hasattr(kind, "chunks")}
    tensors = dict(zip(wholes, zeros_in_file([*wholes.values()], folder.parent if in_file else None)))
    held: Checkpoint = {}
    for key in kinds:
        inner = held
        *parts, last = metadata.planner_data[key]
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = _filled(folder, key, pieces.get(key, ()), tensors.get(key))
    weights = held.pop("state_dict", {})
    found["state_dict"] = weights | {name: weights[first] for name, first in tied.items() if first in weights}
    if optimizers:
        found["optimizer_states"] = [_numbered(held[key]) for key in sorted(held)]
    return found


def _filled(folder: Path, key: str, pieces: Iterable[tuple[Place, Sequence[int] | None]], whole: Tensor | None) -> Any:
    """Return ``whole`` with all its pieces, or the object that was saved under a key if it is not a tensor."""
    for place, offset in pieces:
        piece = _piece(folder / place.relative_path, place, key)
        if whole is None:
            return piece
        if type(piece) is not Tensor:
            raise CheckpointError(f"{folder}: {key} is a {type(piece).__name__}, whose shards cannot be joined")
        whole[tuple(slice(at, at + size) for at, size in zip(offset or (), piece.shape))] = piece
        del piece  # frees its memory before the next piece is read
    return whole


def _piece(file: Path, place: Place, key: str) -> Any:
    with open(file, "rb") as opened:
        opened.seek(place.offset)
        return check_piece(opened.read(place.length), f"{file} ({key})")


def _numbered(optimizer: Checkpoint) -> Checkpoint:
    groups = [group for _, group in sorted(optimizer.get("param_groups", {}).items())]
    ids = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    state = {ids[name]: values for name, values in optimizer.get("state", {}).items()}
    return {"state": state, "param_groups": [{**g, "params": [ids[name] for name in g["params"]]} for g in groups]}


def states_in(folder: Path, optimizer: int) -> set[str]:
    """Return the names of parameters with states of the given optimizer in a folder, and all prefixes of these
    names.
    """
    prefix = f"optimizer_{optimizer}.state."
    found: set[str] = set()
    for key in read_metadata(folder).state_dict_metadata:
        if key.startswith(prefix):
            found.update(parents(key.removeprefix(prefix)))  # the last part is the name of the state
    return found


def sum_shards(strategy: "Strategy") -> None:
    """Make a strategy that writes folders write the hashes of their files, too."""
    if not getattr(strategy, "writes_sums", False):
        wrap_method(strategy, "save_checkpoint", _save_checkpoint)


def _save_checkpoint(
    self: "ParallelStrategy", checkpoint: Checkpoint, filepath: str, *arguments: object, **named: object
) -> None:
    inner_method(self, "save_checkpoint", _save_checkpoint)(checkpoint, filepath, *arguments, **named)
    folder = Path(self.broadcast(filepath))
    if folder.is_dir():
        self.barrier()
        if self.is_global_zero:
            write_sums(folder)


def is_deepspeeds(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of DeepSpeed, which is never read here."""
    # A folder of runs has an entry `latest`, too, but that is a folder.
    return not (folder / ".metadata").exists() and (folder / "latest").is_file()


def check_shards(folder: Path) -> None:
    """Compare every piece with its checksum, and check that it holds tensors and primitives only.

    Raises:
        CheckpointError: Naming the file and the problem.
    """
    if is_deepspeeds(folder):
        raise CheckpointError(
            f"{folder} is a checkpoint of DeepSpeed, whose loading unpickles it, which can run code: convert it into "
            "one file with its zero_to_fp32.py, if you trust it"
        )
    check_sums(folder)
    if (folder / "meta.pt").exists():
        load_verified(folder / "meta.pt")
    for index, place in read_metadata(folder).storage_data.items():
        file = folder / place.relative_path
        if not file.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(
                f"{folder}: its .metadata names the file {place.relative_path!r}, which is outside of the folder"
            )
        try:
            if not 0 <= place.offset <= place.offset + place.length <= file.stat().st_size:
                raise DamagedError(f"{file} ends before {index.fqn}")
            _piece(file, place, index.fqn)
        except OSError as error:
            raise DamagedError(f"cannot read {file}: {error.strerror or error}") from error


def checkpoint_keys(path: Path) -> set[str]:
    """Return the keys of the ``state_dict`` in a checked checkpoint, a file or a folder, without reading tensors."""
    if path.is_file():
        return set(load_verified(path, verify=False, mapped=True).get("state_dict", ()))
    return {places[1] for places in read_metadata(path).planner_data.values() if places[0] == "state_dict"}


def check_surplus(module: nn.Module, present: Collection[str], path: Path) -> None:
    """Refuse a checkpoint with tensors that ``module`` lacks, and that would be dropped unnoticed.

    Raises:
        CheckpointError: Naming the first of them.
    """
    surplus = sorted(set(present) - module.state_dict().keys())
    if surplus and module.strict_loading:
        raise CheckpointError(f"{path} holds {len(surplus)} tensors that the module lacks: {', '.join(surplus[:3])}")


@contextmanager
def asking_for(module: nn.Module, present: Collection[str]) -> Iterator[None]:
    """Make ``module`` request only these of its keys from a checkpoint in this context."""

    def leave_out(_: nn.Module, state: dict[str, object], *__: object) -> None:
        for key in state.keys() - present:
            del state[key]

    with module.register_state_dict_post_hook(leave_out), temporarily(module, strict_loading=False):
        yield
