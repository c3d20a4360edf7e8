"""Read weights from files safely and write files whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lit_efficient.errors import CheckpointError, ConfigurationError


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
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise ConfigurationError(f"{path} holds no weights: a checkpoint of Lightning has the key 'state_dict'")
    return checkpoint


def write(path: str | Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint, or its weights alone if ``path`` ends in ``.safetensors``."""
    if Path(path).suffix == ".safetensors":
        from safetensors.torch import save_file

        # It refuses tensors that share memory, and these may be tied.
        state = {name: tensor.clone().contiguous() for name, tensor in checkpoint["state_dict"].items()}
        write_whole(path, lambda temporary: save_file(state, temporary))
    else:
        write_whole(path, lambda temporary: torch.save(checkpoint, temporary))


def write_whole(path: str | Path, save: Callable[[Path], object]) -> None:
    """Let ``save`` write a temporary sibling, then move it to ``path``: a crash leaves the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def weights_alone(checkpoint: dict[str, Any], state_dict: dict[str, Any], kind: str) -> dict[str, Any]:
    """``checkpoint`` with other weights and without what only a resumed fit could use."""
    dropped = {"optimizer_states", "lr_schedulers", "callbacks", "MixedPrecision", "loops", "state_dict"}
    kept = {key: value for key, value in checkpoint.items() if key not in dropped}
    return kept | {"state_dict": state_dict, "lit_efficient": {**kept.get("lit_efficient", {}), "weights": kind}}
