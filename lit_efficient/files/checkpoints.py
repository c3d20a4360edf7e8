"""Checkpoints that can be trusted: written whole or not at all, checked before use, and never a way to run code.

    save:  temporary file beside the target -> flush, fsync -> os.replace -> fsync of the folder
    load:  CRC-32 of every record -> torch.load(weights_only=True) on the CPU

torch writes a checksum of every record and never compares it: a flipped bit in a tensor loads without a word.
"""

import contextlib
import io
import math
import os
import pickle
import pickletools
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from lit_efficient.errors import CheckpointError, ConfigurationError, is_out_of_memory
from lit_efficient.files.atomic_file import replacing
from lit_efficient.files.runs import LATEST, read_record, real, through_latest
from lit_efficient.files.tensors import load_tensors, save_tensors

_DTYPE = r"[?biufcmMOSUV]\d+"  # how numpy's pickles call a dtype, whose class torch asks for as well
_BUILT = r"but got <class '([\w.]+)'>"  # torch, of an object that an allowed function has made
# What a safe load takes without a question, of the operations by which a pickle can hold something else.
_PLAIN = r"collections OrderedDict|torch._utils _rebuild_(tensor_v2|parameter)|torch \w+Storage|_codecs encode"
_NOT_PLAIN = {"GLOBAL", "LONG4", "POP", "POP_MARK"}
_MOST_PARTS = 2_000_000


class DamagedError(CheckpointError):
    """The bytes are not those that were written: another checkpoint may be whole."""


def newest_in(path: str | os.PathLike[str]) -> Path:
    """The last checkpoint of a run's folder, or of the newest run in a folder; anything else as it is.

    Raises:
        CheckpointError: If the run has none.
    """
    place = local_file(path)
    if (place / LATEST).exists():
        place = real(place / LATEST)
    found = [file for file in place.glob("*.ckpt") if file.is_file()]
    if not found and read_record(place) is not None:
        raise CheckpointError(f"there is no checkpoint in {place}")
    return max(found, key=lambda file: (file.name == "last.ckpt", file.stat().st_mtime_ns), default=place)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint, a bare state dict or a ``.safetensors`` file as ``{"state_dict": ..., ...}``, on the CPU.

    Of a run's folder it is that of :func:`newest_in`. A checkpoint's tensors stay on disk until they are used.

    Raises:
        CheckpointError: If there is no such file, or it is damaged, or holds more than data.
        ConfigurationError: If it holds no weights.
    """
    source = newest_in(path)
    if source.suffix == ".safetensors":
        return {"state_dict": load_tensors(source)}
    checkpoint = load_verified(source, mapped=True)
    if isinstance(checkpoint, dict) and checkpoint and all(isinstance(value, Tensor) for value in checkpoint.values()):
        return {"state_dict": checkpoint}
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise ConfigurationError(f"{path} holds no weights: a checkpoint of Lightning has the key 'state_dict'")
    return checkpoint


def write(path: str | os.PathLike[str], checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint, or its weights alone if ``path`` ends in ``.safetensors``, whole or not at all."""
    if Path(path).suffix == ".safetensors":
        save_tensors(path, checkpoint["state_dict"])
    else:
        save_atomically(checkpoint, path)


def save_atomically(obj: object, path: str | os.PathLike[str]) -> None:
    """Write an object with ``torch.save`` so that the path holds either all of it or what it held before.

    Temporaries that killed processes left in the folder are removed on the way.

    Raises:
        CheckpointError: If it cannot be written, naming the file and the space; the previous file is as it was.
    """
    target, writer = local_file(path), _Writer()
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


def is_written(obj: object, path: str | os.PathLike[str]) -> bool:
    """Whether a file holds what ``torch.save`` would write of an object, byte for byte; it is read as far as it is."""
    try:
        with open(path, "rb") as file, _checksums():
            reader = _Comparison(file)
            torch.save(obj, cast(IO[bytes], reader))
            return reader.same and not file.read(1)
    except (OSError, RuntimeError):  # torch's writer, when it is to stop
        return False


def load_verified(path: str | os.PathLike[str], verify: bool = True, mapped: bool = False) -> Any:
    """Load what ``torch.save`` wrote, after checking its checksums, tensors and primitives only, on the CPU.

    Args:
        path: A local file. URLs are refused.
        verify: Compare every record with its CRC-32 first. Without it a flipped bit in a tensor goes unnoticed.
        mapped: Leave tensors on disk until they are used.

    Raises:
        CheckpointError: If the file is missing, damaged, or needs classes to be imported; the message says which.
    """
    source = local_file(path)
    if source.is_dir():
        raise CheckpointError(f"{source} is a folder: a sharded checkpoint, which only its own strategy can load")
    try:
        # One handle for check and load: what was checked is what is loaded, whatever is renamed meanwhile.
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
    """What changes with a file's content, None of what is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def not_finite(tensors: Mapping[str, Any]) -> list[str]:
    """Names of floating tensors that hold NaN, or infinity beside numbers: a mask has but zeros beside -inf."""
    floats = {name: tensor for name, tensor in tensors.items() if is_floating(tensor)}
    return [name for name, tensor in floats.items() if not _finite_or_mask(tensor)]


def is_floating(tensor: object) -> bool:
    """Whether it is a plain tensor with floating numbers in it."""
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, torch.nn.Parameter):
        return False  # classes of quantised tensors hold integers
    return tensor.is_floating_point() and tensor.layout == torch.strided and tensor.numel() > 0


@torch.no_grad()
def _finite_or_mask(tensor: Tensor) -> bool:
    values = tensor.float() if tensor.itemsize == 1 else tensor  # torch has no extremes of float8
    least, most = map(float, torch.aminmax(values))
    if math.isfinite(least) and math.isfinite(most):
        return True
    return not math.isnan(most) and least != -most and not values[values.isfinite()].any()


def check_piece(data: bytes, where: str) -> Any:
    """What ``torch.save`` wrote into a part of a file: its checksums are checked, and it is tensors and primitives.

    Raises:
        CheckpointError: Naming ``where``.
    """
    file = io.BytesIO(data)
    _check_records(file, where)
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"refused to load {where}: {str(error).splitlines()[0][:200]}") from error
    except Exception as error:  # as in `load_verified`
        raise DamagedError(f"{where} is damaged ({str(error).splitlines()[0][:200]})") from error


def weights_alone(checkpoint: dict[str, Any], state_dict: dict[str, Any], kind: str) -> dict[str, Any]:
    """``checkpoint`` with other weights and without what only a resumed fit could use."""
    dropped = {"optimizer_states", "lr_schedulers", "callbacks", "MixedPrecision", "loops", "state_dict"}
    kept = {key: value for key, value in checkpoint.items() if key not in dropped}
    ours: dict[str, Any] = {**kept.get("lit_efficient", {}), "weights": kind}
    if "training_only" in ours:
        ours["training_only"] = dict.fromkeys(ours["training_only"])
    return kept | {"state_dict": state_dict, "lit_efficient": ours}


def missing_folder(name: str) -> str | None:
    """What to tell a user who named a folder of a model that is not there; None for what may be a name on a hub."""
    path = Path(name).expanduser()
    if path.is_dir() or (name.count("/") < 2 and not name.startswith((".", "/", "~"))):
        return None
    return (
        f"there is no folder {name} (looked for {path.absolute()}). One is made from a checkpoint of LanguageModeling "
        f"by: python -m lit_efficient export CKPT --format merged --output {name}"
    )


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


class _Comparison:
    """A file for ``torch.save`` that writes nothing, and ends at the first byte that is not in another file."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.same = True

    def write(self, data: bytes) -> int:
        self.same = self.same and self.file.read(len(data)) == data
        if not self.same:
            raise OSError("another content")
        return len(data)

    def flush(self) -> None:
        """Nothing waits."""


def local_file(path: str | os.PathLike[str]) -> Path:
    """The path of a file on a disk, by way of a run's ``latest``.

    Raises:
        CheckpointError: For a URL, a pipe, a device or a pointer of git lfs.
    """
    if "://" in os.fspath(path):
        raise CheckpointError(f"{os.fspath(path)} is a URL; checkpoints are only written to and read from local files")
    if (found := through_latest(Path(path))).exists() and not (found.is_file() or found.is_dir()):
        raise CheckpointError(f"{found} is a pipe or a device, and no file")
    if found.is_file() and found.stat().st_size < 1024 and found.read_bytes().startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{found} is a pointer of git lfs, and not the file: fetch it with git lfs pull")
    return found


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
    if all(re.fullmatch(_PLAIN, str(argument)) for kind, argument in _operations(temporary) if kind in _NOT_PLAIN):
        return  # a load, which tells for certain, takes longer than the save
    try:
        torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        warnings.warn(f"{target.name} will be refused when loaded. {_refused(temporary, error)}", stacklevel=3)


def _refused(source: Path, error: Exception) -> str:
    """What a safe load does not take of a whole file: all classes at once, and the line that allows them."""
    names = _refused_classes(source, error)
    if not names:
        return f"It holds what a safe load does not take: {str(error).splitlines()[0][:200]}"
    modules = sorted({name.rpartition(".")[0] for name in names})
    # What numpy 1 wrote is found under another name today.
    found = [f'({n.replace(".core.", "._core.", 1)}, "{n}")' if n.startswith("numpy.core.") else n for n in names]
    return (
        f"It holds objects of {', '.join(names)}, not only tensors and primitives: keep them out of hyper-parameters "
        "(save_hyperparameters(ignore=[...])) and states, or, if you trust the file, allow them where your module is "
        f"defined:\n  import torch, {', '.join(modules)}".replace("numpy.core.", "numpy._core.")
        + f"\n  torch.serialization.add_safe_globals([{', '.join(found)}])"
    )


def _refused_classes(source: Path, error: Exception) -> list[str]:
    names = set(re.findall(_BUILT, str(error)))
    with contextlib.suppress(pickle.UnpicklingError, ValueError):  # at what a safe load does not take either
        names |= set(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    words = [word for _, word in _operations(source) if isinstance(word, str)]
    if any(word in ("numpy", "numpy dtype") for word in words):
        kinds = {type(np.dtype(word)) for word in words if re.fullmatch(_DTYPE, word)}
        kinds -= set(torch.serialization.get_safe_globals())
        names |= {f"{kind.__module__}.{kind.__name__}" for kind in kinds}
    return sorted(names)


def _operations(source: Path) -> Iterator[tuple[str, object]]:
    """Of the pickle that says how a checkpoint's tensors lie in it: each operation and its argument."""
    with zipfile.ZipFile(source) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    return ((operation.name, argument) for operation, argument, _ in pickletools.genops(pickled))


def _check_records(file: IO[bytes], source: Path | str) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            if any(record.compress_type for record in archive.infolist()):
                raise zipfile.BadZipFile("torch compresses nothing, and a few bytes could unpack to a full disk")
            if any(record.external_attr & 0x10 for record in archive.infolist()):
                raise zipfile.BadZipFile("a record is marked as a folder, of which torch reads nothing")
            bad = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # zipfile reports damage as BadZipFile, RuntimeError, EOFError, NotImplementedError, ...
        raise DamagedError(f"the checkpoint {source} is damaged or truncated ({error})") from error
    if bad is not None:
        raise DamagedError(f"the checkpoint {source} is damaged: its record {bad} does not match its checksum")


def _load(file: IO[bytes], source: Path, mapped: bool, verified: bool) -> Any:
    # torch opens a file that it maps twice, by name: a writer that replaces it in between would mix two checkpoints.
    same = f"/proc/self/fd/{file.fileno()}"  # where there is none, nothing is mapped
    mapped = mapped and os.path.exists(same)
    try:
        loaded = torch.load(same if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:  # torch reports damage as RuntimeError, UnpicklingError, EOFError, KeyError, ...
        if "unable to mmap" in str(error):  # by the file system, or for want of memory
            file.seek(0)
            return _load(file, source, False, verified)
        if is_out_of_memory(error):  # which says nothing of the file
            raise
        if isinstance(error, pickle.UnpicklingError) and verified:  # these are the bytes that were written
            raise CheckpointError(f"refused to load {source}. {_refused(source, error)}") from error
        raise DamagedError(f"the checkpoint {source} is damaged ({str(error).splitlines()[0][:200]})") from error
    _check_size(loaded, source)
    return loaded


def _check_size(loaded: object, source: Path) -> None:
    """Refuse what is small in a file and large in memory: lists that hold each other, tensors that repeat a number."""
    parts, left = [loaded], _MOST_PARTS
    while parts:
        part = parts.pop()
        left -= 1
        if isinstance(part, Mapping | list | tuple):
            parts += part.values() if isinstance(part, Mapping) else part
        elif type(part) in (Tensor, torch.nn.Parameter) and part.layout == torch.strided:  # type: ignore[attr-defined]
            count, held = part.numel() * part.itemsize, part.untyped_storage().nbytes()  # type: ignore[attr-defined]
            left = left if count <= max(2**30, 64 * held) else -1
        if left < len(parts):
            raise CheckpointError(f"refused to load {source}: what it holds would grow without end in memory")
