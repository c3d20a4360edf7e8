"""``--ckpt_path``: the file is checked before anything is built, and the config wins over what it was trained with."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lit_efficient.cli.run import default_part
from lit_efficient.errors import CheckpointError
from lit_efficient.files.checkpoints import DamagedError, load_verified
from lit_efficient.files.moved import translate
from lit_efficient.internals.lightning_cli import CLASS_PATH
from lit_efficient.mechanisms.shards import check_shards

# Words that Lightning resolves itself, for `fit` alone: the others have no training before them in this process.
_WORDS = {"last", "hpc"}
_SHARDED = (".metadata", "meta.pt", "latest")  # what FSDP's and DeepSpeed's folders hold


def read(path: str, subcommand: str) -> dict[str, Any]:
    """Check a checkpoint and read it; tensors stay on disk.

    Args:
        path: What the user gave as ``--ckpt_path``.
        subcommand: ``fit``, ``validate``, ``test`` or ``predict``.

    Returns:
        The checkpoint, or an empty dict for a sharded one and for the words that Lightning resolves.

    Raises:
        CheckpointError: If there is no such file, or it holds more than data, or is damaged (with the name of the last
            good one).
    """
    if path in _WORDS and subcommand == "fit":
        return {}
    file = Path(path)
    if file.is_dir():
        if any((file / name).exists() for name in _SHARDED):
            check_shards(file)
            return {}
        raise CheckpointError(f"ckpt_path: {path} is a folder, not a checkpoint.{_others(file)}")
    if not file.is_file():
        raise CheckpointError(f"ckpt_path: there is no file {path!r}.{_others(file.parent)}")
    try:
        checkpoint = load_verified(file, mapped=True)
    except DamagedError:
        checkpoint = _last_good(file)
    except CheckpointError as error:
        raise CheckpointError(f"ckpt_path: {error}") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointError(f"ckpt_path: {path} is no Lightning checkpoint: it has no 'state_dict'")
    return checkpoint


def _last_good(damaged: Path) -> Any:
    """Refuse it as the plugin does that would load it, with the name of the last good one."""
    try:
        return default_part("checkpoints")().load_checkpoint(damaged)
    except CheckpointError as error:
        raise CheckpointError(f"ckpt_path: {error}") from error


def _others(folder: Path) -> str:
    try:
        found = sorted(folder.rglob("*.ckpt"), key=os.path.getmtime, reverse=True)
    except OSError:
        return ""
    return f" The newest one there: {found[0]}" if found else ""


def differences(checkpoint: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """List where the arguments that a checkpoint was trained with differ from the config, which wins.

    Args:
        checkpoint: A Lightning checkpoint.
        config: The config of the subcommand, as plain data.

    Returns:
        One line a key: ``model.hidden: 64 in the checkpoint -> 32 in the config``.
    """
    lines = []
    for section, key in (("model", "hyper_parameters"), ("data", "datamodule_hyper_parameters")):
        ours = config.get(section) or {}
        given = {CLASS_PATH: ours.get("class_path"), **(ours.get("init_args") or {}), **(ours.get("dict_kwargs") or {})}
        name = str(ours.get("class_path")).rpartition(".")[2]
        now, then = _flat(given), _flat(translate(name, checkpoint.get(key) or {}))
        for name in then:
            if name in now and then[name] != now[name]:
                shown = "class_path" if name == CLASS_PATH else name
                lines.append(f"{section}.{shown}: {then[name]!r} in the checkpoint -> {now[name]!r} in the config")
    return lines


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def check_shapes(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another architecture while nothing has been touched yet.

    Only what both have can be compared: models built later, and adapters, add to the one or the other.

    Raises:
        CheckpointError: Naming the first tensors that differ.
    """
    saved, ours = checkpoint["state_dict"], module.state_dict()
    wrong = [name for name, tensor in ours.items() if name in saved and saved[name].shape != tensor.shape]
    if wrong:
        shown = [
            f"  {n}: {list(saved[n].shape)} in the checkpoint, {list(ours[n].shape)} in the model" for n in wrong[:3]
        ]
        raise CheckpointError("\n".join([f"the checkpoint is of another architecture ({len(wrong)} tensors):", *shown]))
    if ours and not any(name in saved for name in ours):
        raise CheckpointError(
            f"the checkpoint is of another model: it has none of the tensors of {type(module).__name__}; "
            f"it begins with {next(iter(saved), 'nothing')!r}, the model with {next(iter(ours))!r}"
        )
