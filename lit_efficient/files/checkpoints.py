"""Checkpoints that are written whole or not at all, checked before use, and loaded without running code.

    save:  temporary file beside the target -> flush, fsync -> os.replace -> fsync of the folder
    load:  CRC-32 of every record -> torch.load(weights_only=True) on the CPU

torch writes a checksum of each record and never compares it, so it loads a tensor with a flipped bit silently.
"""

import contextlib
import io
import json
import math
import os
import pickle
import pickletools
import re
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from lit_efficient.errors import CheckpointError, ConfigurationError, is_out_of_memory
from lit_efficient.files.atomic_file import replacing
from lit_efficient.files.background import finish_writing
from lit_efficient.files.remote import downloaded, is_remote, upload
from lit_efficient.files.runs import LATEST, read_record, real, through_latest
from lit_efficient.files.sums import check_sums
from lit_efficient.files.tensors import load_tensors, save_tensors

Checkpoint: TypeAlias = dict[str, Any]
"""Content of a checkpoint, by key."""
Fields: TypeAlias = Mapping[str, Any]
"""Part of a checkpoint or of a configuration, as plain data."""

_DTYPE = r"[?biufcmMOSUV]\d+"  # name of a dtype in numpy's pickles; torch must allow the dtype's class, too
_BUILT = r"but got <class '([\w.]+)'>"  # in torch's message about an object that an allowed function created
# Names that a safe load always accepts, and the pickle operations that could hold other names.
_PLAIN = r"collections OrderedDict|torch._utils _rebuild_(tensor_v2|parameter)|torch \w+Storage|_codecs encode"
_NOT_PLAIN = {"GLOBAL", "LONG4", "POP", "POP_MARK"}
_PIECE = 2**24  # bytes that are compared or written at a time
_MOST_PARTS = 2_000_000  # objects in one checkpoint


class DamagedError(CheckpointError):
    """Raised if a file does not hold the bytes that were written; another checkpoint may be whole."""


def newest_in(path: str | os.PathLike[str]) -> Path:
    """Return the last checkpoint of a run's folder or of the newest run in a folder; return other paths unchanged.

    Raises:
        CheckpointError: If the run has no checkpoint.
    """
    finish_writing()
    place = local_file(path)
    if (place / LATEST).exists():
        place = real(place / LATEST)
    found = [file for file in place.glob("*.ckpt") if file.is_file()]
    if not found and read_record(place) is not None:
        raise CheckpointError(f"there is no checkpoint in {place}")
    return max(found, key=lambda file: (file.name == "last.ckpt", file.stat().st_mtime_ns), default=place)


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Return a checkpoint, a state dict or ``.safetensors`` files as ``{"state_dict": ..., ...}`` on the CPU.

    Args:
        path: A file, a folder as for :func:`newest_in`, or a model folder of transformers. A checkpoint's tensors stay
            on disk until they are used.

    Raises:
        CheckpointError: If there is no such file, or it is damaged or holds more than data.
        ConfigurationError: If it holds no weights.
    """
    source = newest_in(path)
    if source.suffix == ".safetensors":
        return {"state_dict": load_tensors(source)}
    if source.is_dir() and (source / "config.json").is_file():
        return {"state_dict": _tensors_of_model(source)}
    checkpoint = load_verified(source, mapped=True)
    if isinstance(checkpoint, dict) and checkpoint and all(isinstance(value, Tensor) for value in checkpoint.values()):
        return {"state_dict": checkpoint}
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise ConfigurationError(f"{path} holds no weights: a Lightning checkpoint has the key 'state_dict'")
    return checkpoint


def _tensors_of_model(folder: Path) -> dict[str, Tensor]:
    """Return the weights in a model folder of transformers, from one file or from all that its index names."""
    check_sums(folder, weights=False)
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    return {name: tensor for file in names for name, tensor in load_tensors(folder / file).items()}


def write(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically; if ``path`` ends in ``.safetensors``, write only its weights."""
    if Path(path).suffix == ".safetensors":
        save_tensors(path, checkpoint["state_dict"])
    else:
        save_atomically(checkpoint, path)


def save_atomically(obj: object, path: str | os.PathLike[str]) -> None:
    """Write an object with ``torch.save``; until it is complete the path keeps its previous content.

    Temporary files of killed processes in the folder are removed. ``obj`` may be the result of :func:`serialised`.

    Raises:
        CheckpointError: If the file cannot be written; the message names the file and the free space.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory() as place:
            local = Path(place, os.fspath(path).rpartition("/")[2])
            save_atomically(obj, local)
            upload(local, os.fspath(path))
        return
    target = local_file(path)
    writer = _Writer()
    try:
        with replacing(target) as file, _checksums():
            writer.file = file
            _put(obj, writer)
            file.flush()
            _warn_of_classes(Path(file.name), target)
    except (OSError, RuntimeError) as error:
        # After an OSError torch's writer raises a RuntimeError about file positions instead.
        cause = error if isinstance(error, OSError) else writer.error
        if cause is None:
            raise
        raise CheckpointError(_cannot_write(target, cause, writer.written)) from error


def serialised(obj: object) -> io.BytesIO:
    """Return the bytes that ``torch.save`` would write for an object, which may then change."""
    content = io.BytesIO()
    with _checksums():
        _put(obj, content)
    return content


def is_written(obj: object, path: str | os.PathLike[str] | io.BytesIO) -> bool:
    """Return whether a file holds exactly the bytes that ``torch.save`` would write for an object."""
    try:
        with _opened(path) as file, _checksums():
            reader = _Comparison(file)
            _put(obj, reader)
            return reader.same and not file.read(1)
    except (OSError, RuntimeError):  # raised at the first difference
        return False


def _opened(path: str | os.PathLike[str] | io.BytesIO) -> IO[bytes]:
    if isinstance(path, io.BytesIO):
        return io.BytesIO(path.getvalue())  # shares the bytes
    return open(path, "rb")


def _put(obj: object, file: "_Writer | _Comparison | io.BytesIO") -> None:
    if not isinstance(obj, io.BytesIO):
        torch.save(obj, cast(IO[bytes], file))
        return
    content = memoryview(obj.getvalue())
    for begin in range(0, len(content), _PIECE):
        file.write(content[begin : begin + _PIECE])


def load_verified(path: str | os.PathLike[str], verify: bool = True, mapped: bool = False) -> Any:
    """Return what ``torch.save`` wrote, on the CPU, after checking its checksums. Loads only tensors and plain data.

    Args:
        path: A file, local or of a file system of fsspec, such as s3://.
        verify: Compare each record with its CRC-32. Otherwise a flipped bit in a tensor goes unnoticed.
        mapped: Leave tensors on disk until they are used.

    Raises:
        CheckpointError: If the file is missing, damaged or needs other classes; the message names them.
    """
    finish_writing()
    if is_remote(path):
        with downloaded(os.fspath(path)) as local:
            return load_verified(local, verify, mapped)
    source = local_file(path)
    if source.is_dir():
        raise CheckpointError(f"{source} is a folder, and a file is needed here: it may be a sharded checkpoint")
    try:
        # The check and the load share one handle: another process may replace the file in between.
        with open(source, "rb") as file:
            if verify:
                _check_records(file, source)
                file.seek(0)
            return _load(file, source, mapped, verify)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {source}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {source}: {error.strerror or error}") from error


def state_of(path: str | os.PathLike[str]) -> tuple[int, ...] | None:
    """Return device, inode, size and modification time of a file, which change with its content; None if missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def not_finite(tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors with NaN or infinity. Masks, of zeros and infinities of one sign, do not count."""
    return [name for name, tensor in tensors.items() if is_floating(tensor) and not _finite_or_mask(tensor)]


def is_floating(tensor: object) -> bool:
    """Return whether an object is a plain floating-point tensor that is not empty."""
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, torch.nn.Parameter):
        return False  # quantised tensors are subclasses that hold integers
    return tensor.is_floating_point() and tensor.layout == torch.strided and tensor.numel() > 0


@torch.no_grad()
def _finite_or_mask(tensor: Tensor) -> bool:
    values = tensor.float() if tensor.itemsize == 1 else tensor  # aminmax does not support float8
    least, most = map(float, torch.aminmax(values))
    if math.isfinite(least) and math.isfinite(most):
        return True
    return not math.isnan(most) and least != -most and not values[values.isfinite()].any()


def check_piece(data: bytes, where: str) -> object:
    """Return what ``torch.save`` wrote into a part of a file, like :func:`load_verified`.

    Args:
        data: The bytes.
        where: Description of their place, for messages.

    Raises:
        CheckpointError: If they are damaged or hold more than data.
    """
    file = io.BytesIO(data)
    _check_records(file, where)
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"refused to load {where}: {str(error).splitlines()[0][:200]}") from error
    except Exception as error:  # torch reports damage by many types of errors
        raise DamagedError(f"{where} is damaged ({str(error).splitlines()[0][:200]})") from error


def weights_alone(checkpoint: Checkpoint, state_dict: dict[str, object], kind: str) -> Checkpoint:
    """Return a checkpoint without the states of training.

    Args:
        checkpoint: A whole checkpoint.
        state_dict: Weights for the result.
        kind: Kind of the weights, "raw" or the name of an average, which is noted in the result.
    """
    dropped = {"optimizer_states", "lr_schedulers", "callbacks", "MixedPrecision", "loops", "state_dict"}
    kept = {key: value for key, value in checkpoint.items() if key not in dropped}
    ours: dict[str, Any] = {**kept.get("lit_efficient", {}), "weights": kind}
    if "training_only" in ours:
        ours["training_only"] = dict.fromkeys(ours["training_only"])
    return kept | {"state_dict": state_dict, "lit_efficient": ours}


def missing_folder(name: str) -> str | None:
    """Return a message if ``name`` is a missing folder of a model; None if it exists or may be a name on a hub."""
    path = Path(name).expanduser()
    if path.is_dir() or (name.count("/") < 2 and not name.startswith((".", "/", "~"))):
        return None
    return (
        f"there is no folder {name} (looked for {path.absolute()}). To create it from a checkpoint of LanguageModeling "
        f"run: python -m lit_efficient export CKPT --format merged --output {name}"
    )


class _Writer:
    """File object for ``torch.save`` that keeps the error of a failed write, which torch's writer loses."""

    file: IO[bytes]

    def __init__(self) -> None:
        self.written = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            count = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.written += count
        return count

    def flush(self) -> None:
        self.file.flush()


class _Comparison:
    """File object for ``torch.save`` that compares with another file instead of writing, up to the first difference."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.same = True

    def write(self, data: bytes | memoryview) -> int:
        self.same = self.same and self.file.read(len(data)) == data
        if not self.same:
            raise OSError("another content")
        return len(data)

    def flush(self) -> None:
        """Do nothing: no data is buffered."""


def local_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a local file, with a run's ``latest`` resolved.

    Raises:
        CheckpointError: If the path is a URL, a pipe, a device or a pointer file of git lfs.
    """
    if is_remote(path):
        raise CheckpointError(f"{os.fspath(path)} is a URL, and a local file is needed here: download it first")
    found = through_latest(Path(os.fspath(path).removeprefix("file://")))
    if found.exists() and not (found.is_file() or found.is_dir()):
        raise CheckpointError(f"{found} is a pipe or a device, and no file")
    if found.is_file() and found.stat().st_size < 1024 and found.read_bytes().startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{found} is a pointer file of git lfs: fetch the content with git lfs pull")
    return found


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Have torch compute checksums even if other code switched them off, because loading compares them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _cannot_write(target: Path, error: OSError, written: int) -> str:
    existing = next(folder for folder in [target.parent, *target.parent.parents] if folder.exists())
    free = shutil.disk_usage(existing).free
    if target.exists():
        kept = "the previous file is unchanged"
    else:
        kept = "nothing was left behind"
    reason = error.strerror or str(error)
    return f"cannot write the checkpoint {target}: {reason} after {_size(written)} ({_size(free)} free); {kept}"


def _size(count: int) -> str:
    if count >= 2**30:
        return f"{count / 2**30:.1f} GB"
    return f"{count / 2**20:.1f} MB"


def _warn_of_classes(temporary: Path, target: Path) -> None:
    """Warn if a safe load will refuse the file that is being saved."""
    if all(re.fullmatch(_PLAIN, str(argument)) for kind, argument in _operations(temporary) if kind in _NOT_PLAIN):
        return  # the load below would take longer than the save
    try:
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        warnings.warn(f"{target.name} will be refused when loaded. {_refused(temporary, error)}", stacklevel=3)


def _refused(source: Path, error: Exception) -> str:
    """Return a message that names all classes that a safe load refuses, and the lines of Python that allow them."""
    names = _refused_classes(source, error)
    if not names:
        return f"It holds objects that a safe load refuses: {str(error).splitlines()[0][:200]}"
    modules = sorted({name.rpartition(".")[0] for name in names})
    # numpy 2 renamed the modules that numpy 1 wrote into pickles.
    found = [f'({n.replace(".core.", "._core.", 1)}, "{n}")' if n.startswith("numpy.core.") else n for n in names]
    return (
        f"It holds objects of {', '.join(names)}, not only tensors and primitives: keep them out of hyper-parameters "
        "(save_hyperparameters(ignore=[...])) and states, or, if you trust the file, allow them where your module is "
        f"defined:\n  import torch, {', '.join(modules)}".replace("numpy.core.", "numpy._core.")
        + f"\n  torch.serialization.add_safe_globals([{', '.join(found)}])"
    )


def _refused_classes(source: Path, error: Exception) -> list[str]:
    names = set(re.findall(_BUILT, str(error)))
    with contextlib.suppress(pickle.UnpicklingError, ValueError):  # raised for operations that torch does not know
        names |= set(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    words = [word for _, word in _operations(source) if isinstance(word, str)]
    if any(word in ("numpy", "numpy dtype") for word in words):
        kinds = {type(np.dtype(word)) for word in words if re.fullmatch(_DTYPE, word)}
        kinds -= set(torch.serialization.get_safe_globals())
        names |= {f"{kind.__module__}.{kind.__name__}" for kind in kinds}
    return sorted(names)


def _operations(source: Path) -> Iterator[tuple[str, object]]:
    """Return name and argument of each operation of the pickle inside a checkpoint."""
    with zipfile.ZipFile(source) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    return ((operation.name, argument) for operation, argument, _ in pickletools.genops(pickled))


def _check_records(file: IO[bytes], source: Path | str) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            if any(record.compress_type for record in archive.infolist()):
                raise zipfile.BadZipFile("torch does not compress, and a few compressed bytes could fill a disk")
            if any(record.external_attr & 0x10 for record in archive.infolist()):
                raise zipfile.BadZipFile("a record is marked as a folder, and torch reads nothing from folders")
            bad = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # zipfile reports damage by many types of errors
        raise DamagedError(f"the checkpoint {source} is damaged or truncated ({error})") from error
    if bad is not None:
        raise DamagedError(f"the checkpoint {source} is damaged: its record {bad} does not match its checksum")


def _load(file: IO[bytes], source: Path, mapped: bool, verified: bool) -> object:
    # torch opens a mapped file twice by its name. The name of the open handle always leads to the same file, even if
    # another process replaces the checkpoint in between. Without such names nothing is mapped.
    same = f"/proc/self/fd/{file.fileno()}"
    mapped = mapped and os.path.exists(same)
    try:
        loaded = torch.load(same if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:  # torch reports damage by many types of errors
        if "unable to mmap" in str(error):  # not supported by the file system, or out of address space
            file.seek(0)
            return _load(file, source, False, verified)
        if is_out_of_memory(error):
            raise
        if isinstance(error, pickle.UnpicklingError) and verified:  # the bytes are those that were written
            raise CheckpointError(f"refused to load {source}. {_refused(source, error)}") from error
        raise DamagedError(f"the checkpoint {source} is damaged ({str(error).splitlines()[0][:200]})") from error
    _check_size(loaded, source)
    return loaded


def _check_size(loaded: object, source: Path) -> None:
    """Raise an error for small files that are large in memory: lists that contain each other, expanded tensors."""
    parts = [loaded]
    left = _MOST_PARTS
    while parts:
        part = parts.pop()
        left -= 1
        if isinstance(part, Mapping):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, Tensor) and _is_expanded(part):
            left = -1
        if left < len(parts):
            raise CheckpointError(f"refused to load {source}: its content would grow without limit in memory")


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether a tensor has far more elements than its storage, which repeats them."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return False
    return tensor.numel() * tensor.itemsize > max(2**30, 64 * tensor.untyped_storage().nbytes())
