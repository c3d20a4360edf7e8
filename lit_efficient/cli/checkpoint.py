"""``--ckpt_path``: the file is checked before anything is built, and the config wins over what it was trained with."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_efficient.cli.run import default_part
from lit_efficient.cli.run_folder import checkpoints
from lit_efficient.distributed.shards import check_shards
from lit_efficient.errors import CheckpointError
from lit_efficient.files.checkpoints import DamagedError, load_verified
from lit_efficient.files.runs import LATEST, read_record, through_latest
from lit_efficient.internals.lightning_cli import CLASS_PATH

# Words that mean the newest checkpoint of the newest run, for `fit` alone: scripts that start a job again say them.
WORDS = {"last", "hpc"}
_SHARDED = (".metadata", "meta.pt", "latest")  # what FSDP's and DeepSpeed's folders hold


def read(path: str, subcommand: str) -> dict[str, Any]:
    """Check the checkpoint of a ``--ckpt_path`` and read it; tensors stay on disk. A sharded one is an empty dict.

    Raises:
        CheckpointError: If there is no such file, or it holds more than data, or is damaged (with the name of the last
            good one).
    """
    file = through_latest(Path(path))
    if file.is_dir():
        if any((file / name).exists() for name in _SHARDED) and read_record(through_latest(file / LATEST)) is None:
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
    if subcommand == "fit" and "optimizer_states" not in checkpoint:
        raise CheckpointError(
            f"ckpt_path: {path} holds weights alone; a fit goes on from a checkpoint that holds the optimizer's state, "
            f"too.{_others(file.parent, resumable=True)}"
        )
    return checkpoint


def read_last(paths: Sequence[Path]) -> tuple[str | None, dict[str, Any]]:
    """The first checkpoint that is whole, newest first, with its path; none if there is none yet, or only damaged ones.

    Raises:
        CheckpointError: If there is none, and one is refused that is not damaged: a run in its place would begin anew.
    """
    refused: CheckpointError | None = None
    for path in paths:
        try:
            if path.is_file():
                return str(path), load_verified(path, mapped=True)
            check_shards(path)
            return str(path), {}
        except CheckpointError as error:
            refused = refused if isinstance(error, DamagedError) else error
            rank_zero_warn(f"{error}. {'None is left' if path == paths[-1] else 'Going on from the one before'}")
    if refused is not None:
        raise refused
    return None, {}


def _last_good(damaged: Path) -> Any:
    """Refuse it as the plugin does that would load it, with the name of the last good one."""
    try:
        return default_part("checkpoints")().load_checkpoint(damaged)
    except CheckpointError as error:
        raise CheckpointError(f"ckpt_path: {error}") from error


def _others(folder: Path, resumable: bool = False) -> str:
    """The newest checkpoint of a folder, or of the newest run in it; nothing below is searched."""
    for place in (folder, through_latest(folder / LATEST)):
        found = [path for path in place.glob("*.ckpt") if path.is_file()]
        if resumable:
            found = [path for _, _, path in checkpoints(place)]
        if found:
            newest = found[0] if resumable else max(found, key=os.path.getmtime)
            return f" The newest one there: {newest}"
    return ""


_LENGTH = tuple(f"trainer.{limit}_{unit}" for limit in ("max", "min") for unit in ("steps", "epochs", "time"))
_SHOWN = 12
_ABSENT = type("Absent", (), {"__repr__": lambda _: "nothing"})()  # null is a value


def differences(checkpoint: Mapping[str, Any], config: Mapping[str, Any], fits: bool) -> dict[str, tuple[Any, Any]]:
    """The keys of the config that a checkpoint was trained with otherwise: ``{key: (then, now)}``.

    ``fits``: all of it matters; validation and its like have model and data alone.
    """
    saved = checkpoint.get("lit_efficient", {}).get("config")
    then: dict[str, Any] = dict(saved or {})
    if saved is None:
        for section, key in (("model", "hyper_parameters"), ("data", "datamodule_hyper_parameters")):
            held, name = dict(checkpoint.get(key) or {}), str((config.get(section) or {}).get("class_path"))
            path = {"class_path": held.pop(CLASS_PATH)} if CLASS_PATH in held else {}
            then[section] = {"class_path": name, **path, "init_args": held}
    sections = [key for key in {**config, **then} if key not in ("config", "ckpt_path")] if fits else ["model", "data"]
    before, now = ({key: tree.get(key) for key in sections} for tree in (then, config))
    old, new = flat(before), flat(now)
    keys = [key for key in {**old, **new} if saved is not None or (key in old and key in new)]
    found = {key: (old.get(key, _ABSENT), new.get(key, _ABSENT)) for key in keys}
    return {key: (was, value) for key, (was, value) in found.items() if was != value}


def is_another_run(changed: Collection[str]) -> bool:
    """Whether more has changed than how long to train."""
    return any(key not in _LENGTH for key in changed)


def changes_said(path: str, changed: Mapping[str, tuple[Any, Any]], kept: Mapping[str, str]) -> str:
    """What has changed since the checkpoint, one line a key; ``kept``: keys without effect, and the reason."""
    lines = [
        f"{key}: {then!r} in the checkpoint -> {now!r} in the config{f', but {kept[key]}' if key in kept else ''}"
        for key, (then, now) in changed.items()
    ]
    if len(lines) > _SHOWN:
        lines[_SHOWN - 1 :] = [f"and {len(lines) - _SHOWN + 1} more"]
    return "\n  ".join([f"{path} was trained with other settings; the config wins:", *lines])


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Every value of a config by its dotted key; a class in a list goes by its name: ``callbacks.EMA.decay``."""
    if isinstance(tree, Mapping) and "class_path" in tree:
        arguments = {**(tree.get("init_args") or {}), **(tree.get("dict_kwargs") or {})}
        return {f"{prefix}.class_path": tree["class_path"], **flat(arguments, prefix)}
    found: dict[str, Any] = {}
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            found |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list) and tree and all(isinstance(item, Mapping) and "class_path" in item for item in tree):
        for name, item in zip(numbered(str(item["class_path"]).rpartition(".")[2] for item in tree), tree):
            found |= flat(item, f"{prefix}.{name}")
    else:
        found[prefix] = list(tree) if isinstance(tree, tuple) else tree
    return found


def numbered(names: Iterable[str]) -> list[str]:
    """The names, the second of a kind as ``name#2``."""
    counts: Counter[str] = Counter()
    result = []
    for name in names:
        counts[name] += 1
        result.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return result


def check_optimizer(checkpoint: Mapping[str, Any]) -> None:
    """Refuse, for a fit without techniques, states that those of the checkpoint have given another shape.

    Raises:
        ConfigurationError: Naming the technique.
    """
    from lit_efficient.application.checkpoints import compare_techniques

    kept = (checkpoint.get("lit_efficient") or {}).get("techniques", ())
    if checkpoint.get("optimizer_states"):
        compare_techniques([one for one in kept if [*one["alters"]] == ["optimizer"]], [], fitting=True)


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
