"""Read weights from files safely and write files whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.files.atomic_file import replacing


def read(path: str | Path) -> dict[str, Any]:
    """A checkpoint or a ``.safetensors`` file as ``{"state_dict": ..., ...}``, on the CPU; nothing in it is executed.

    Raises:
        CheckpointError: If there is no such file, or it cannot be read safely.
        ConfigurationError: If it holds no weights.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return {"state_dict": load_file(path)}
        _verify(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise ConfigurationError(f"{path} holds no weights: a checkpoint of Lightning has the key 'state_dict'")
    return checkpoint


def missing_folder(name: str) -> str | None:
    """What to tell a user who named a folder of a model that is not there; None for what may be a name on a hub."""
    path = Path(name).expanduser()
    if path.is_dir() or (name.count("/") < 2 and not name.startswith((".", "/", "~"))):
        return None
    return (
        f"there is no folder {name} (looked for {path.absolute()}). One is made from a checkpoint of LanguageModeling "
        f"by: python -m lit_efficient export CKPT --format merged --output {name}"
    )


def check_new_folder(folder: Path, who: str) -> None:
    """Refuse, in the name of ``who``, to write over what is there.

    Raises:
        ConfigurationError: If ``folder`` is a file, or holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{who}: output must be a new or empty folder, got {str(folder)!r}")


def write_folder(target: Path, write: Callable[[Path], object]) -> Path:
    """Let ``write`` fill a temporary folder beside ``target``, and move it there when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(temporary)
        if target.exists():
            target.rmdir()
        os.replace(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    target.chmod(0o755)
    return target


def write(path: str | Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint, or its weights alone if ``path`` ends in ``.safetensors``, whole or not at all."""
    if Path(path).suffix == ".safetensors":
        from safetensors.torch import save_file

        # It refuses tensors that share memory, and these may be tied.
        state = {name: tensor.clone().contiguous() for name, tensor in checkpoint["state_dict"].items()}
        with replacing(Path(path)) as file:
            save_file(state, file.name)  # it opens the same file by itself
    else:
        with replacing(Path(path)) as file:
            torch.save(checkpoint, file)


def _verify(path: Path) -> None:
    """Compare each record with its checksum: torch does not, and a flipped bit would load without a word."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"its record {damaged} does not match its checksum")


def weights_alone(checkpoint: dict[str, Any], state_dict: dict[str, Any], kind: str) -> dict[str, Any]:
    """``checkpoint`` with other weights and without what only a resumed fit could use."""
    dropped = {"optimizer_states", "lr_schedulers", "callbacks", "MixedPrecision", "loops", "state_dict"}
    kept = {key: value for key, value in checkpoint.items() if key not in dropped}
    ours: dict[str, Any] = {**kept.get("lit_efficient", {}), "weights": kind}
    if "training_only" in ours:
        ours["training_only"] = dict.fromkeys(ours["training_only"])
    return kept | {"state_dict": state_dict, "lit_efficient": ours}
