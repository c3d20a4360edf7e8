"""``--ckpt_path``: the checkpoint is checked before anything is built, and its config is compared with the run's."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lit_efficient.cli.defaults import default_part
from lit_efficient.cli.run_folder import checkpoints, finish_killed_run
from lit_efficient.cli.tree import flat
from lit_efficient.distributed.shards import check_shards
from lit_efficient.errors import CheckpointError, FinishedError
from lit_efficient.files.checkpoints import DamagedError, Fields, load_verified
from lit_efficient.files.remote import downloaded, is_remote
from lit_efficient.files.runs import LATEST, read_record, through_latest
from lit_efficient.internals.lightning_cli import CLASS_PATH

# Words for the newest checkpoint of the newest run, for `fit` alone: scripts that start a job again use them.
WORDS = {"last", "hpc"}
_SHARDED = (".metadata", "meta.pt", "latest")  # files in the folders of FSDP and DeepSpeed


def read(path: str, subcommand: str) -> dict[str, Any]:
    """Check and read the checkpoint of ``--ckpt_path``. Its tensors stay on disk.

    Args:
        path: A file or a folder of shards, local or a URL of fsspec.
        subcommand: The subcommand: ``fit`` needs the optimizer's state.

    Returns:
        The checkpoint. Of a folder of shards an empty dict.

    Raises:
        CheckpointError: If the file does not exist, contains more than data, or is damaged. The message names the last
            good checkpoint.
    """
    if is_remote(path):
        with downloaded(path) as local:
            return read(str(local), subcommand)
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


def check_unfinished(path: str, checkpoint: Fields, max_steps: int | None, max_epochs: int | None) -> None:
    """Raise FinishedError if a fit that is resumed from a checkpoint would end before its first step.

    What a run had left to do when it was killed after its last step is done first.

    Args:
        path: The checkpoint's file, for the message.
        checkpoint: The checkpoint, or the empty dict that :func:`read` returns for a folder of shards.
        max_steps: ``trainer.max_steps``; None or -1 for no limit.
        max_epochs: ``trainer.max_epochs``; None or -1 for no limit.
    """
    meta = through_latest(Path(path)) / "meta.pt"
    if not checkpoint and meta.is_file():
        checkpoint = load_verified(meta, verify=False, mapped=True)
    steps = int(checkpoint.get("global_step", 0))
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current", {})
    epochs = int(progress.get("processed", 0))
    for name, done, most in (("step", steps, max_steps), ("epoch", epochs, max_epochs)):
        if most is not None and 0 <= most <= done:
            last = finish_killed_run(path)
            raise FinishedError(
                f"nothing is left to do: {last} is at {name} {done}, and trainer.max_{name}s is {most}. "
                f"To train longer, raise trainer.max_{name}s"
            )


def precision_of(path: str, checkpoint: Fields) -> str | None:
    """Return the precision with which a checkpoint was trained; ``None`` if it does not say.

    Args:
        path: The checkpoint's file or folder of shards.
        checkpoint: As in :func:`check_unfinished`.
    """
    meta = through_latest(Path(path)) / "meta.pt"
    if not checkpoint and meta.is_file():
        checkpoint = load_verified(meta, verify=False, mapped=True)
    config = checkpoint.get("lit_efficient", {}).get("config")
    if config is None:
        return None
    return config.get("trainer", {}).get("precision") or "32-true"  # Lightning's default


def read_last(paths: Sequence[Path]) -> tuple[str | None, dict[str, object]]:
    """Read the first checkpoint that is not damaged.

    Args:
        paths: Checkpoints, newest first.

    Returns:
        Path and content; ``None`` and an empty dict if there is no checkpoint yet, or only damaged ones.

    Raises:
        CheckpointError: If all are refused, and one of them is not damaged: the run would begin anew in its place.
    """
    refused: CheckpointError | None = None
    for path in paths:
        try:
            if path.is_file():
                return str(path), load_verified(path, mapped=True)
            check_shards(path)
            return str(path), {}
        except CheckpointError as error:
            if not isinstance(error, DamagedError):
                refused = error
            then = "None is left" if path == paths[-1] else "Going on from the one before"
            rank_zero_warn(f"{error}. {then}")
    if refused is not None:
        raise refused
    return None, {}


def _last_good(damaged: Path) -> object:
    """Refuse a damaged checkpoint as the plugin that loads checkpoints does: with the last good one's name."""
    try:
        return default_part("checkpoints")().load_checkpoint(damaged)
    except CheckpointError as error:
        raise CheckpointError(f"ckpt_path: {error}") from error


def _others(folder: Path, resumable: bool = False) -> str:
    """Return a hint to the newest checkpoint of a folder, or of the newest run in it."""
    for place in (folder, through_latest(folder / LATEST)):
        found = [path for path in place.glob("*.ckpt") if path.is_file()]
        if resumable:
            found = [path for _, _, path in checkpoints(place)]
        if found:
            if not resumable:
                newest = max(found, key=os.path.getmtime)
            else:
                newest = found[0]
            return f" The newest one there: {newest}"
    return ""


_LENGTH = tuple(f"trainer.{limit}_{unit}" for limit in ("max", "min") for unit in ("steps", "epochs", "time"))
_SHOWN = 12
_ABSENT = type("Absent", (), {"__repr__": lambda _: "nothing"})()  # null is a value


def differences(checkpoint: Fields, config: Fields, fits: bool) -> dict[str, tuple[Any, Any]]:
    """Return the keys of a config that had other values when a checkpoint was trained.

    Args:
        checkpoint: The checkpoint.
        config: The config of this run, as plain data.
        fits: True for a fit. Evaluations use model and data alone.

    Returns:
        ``{key: (then, now)}``
    """
    saved = checkpoint.get("lit_efficient", {}).get("config")
    if saved is None:
        then = _config_of_parts(checkpoint, config)
    else:
        then = dict(saved)
    sections = ["model", "data"]
    if fits:
        sections = [key for key in {**config, **then} if key not in ("config", "ckpt_path")]
    old = flat({key: then.get(key) for key in sections})
    new = flat({key: config.get(key) for key in sections})
    found = {}
    for key in {**old, **new}:
        in_both = key in old and key in new
        was = old.get(key, _ABSENT)
        value = new.get(key, _ABSENT)
        if was != value and (saved is not None or in_both):
            found[key] = (was, value)
    return found


def _config_of_parts(checkpoint: Fields, config: Fields) -> dict[str, Any]:
    """Return what a checkpoint of another program says of its config: the arguments of module and data."""
    then = {}
    for section, key in (("model", "hyper_parameters"), ("data", "datamodule_hyper_parameters")):
        arguments = dict(checkpoint.get(key) or {})
        name = str((config.get(section) or {}).get("class_path"))
        then[section] = {"class_path": arguments.pop(CLASS_PATH, name), "init_args": arguments}
    return then


def is_another_run(changed: Collection[str]) -> bool:
    """Return whether more has changed than the length of the training."""
    return any(key not in _LENGTH for key in changed)


def changes_said(path: str, changed: Mapping[str, tuple[object, object]], kept: Mapping[str, str]) -> str:
    """Return the message about the keys that changed since the checkpoint.

    Args:
        path: The checkpoint.
        changed: The keys, as :func:`differences` returns them.
        kept: Keys that have no effect, each with the reason.
    """
    lines = []
    for key, (then, now) in changed.items():
        reason = f", but {kept[key]}" if key in kept else ""
        lines.append(f"{key}: {then!r} in the checkpoint -> {now!r} in the config{reason}")
    if len(lines) > _SHOWN:
        lines[_SHOWN - 1 :] = [f"and {len(lines) - _SHOWN + 1} more"]
    return "\n  ".join([f"{path} was trained with other settings; the config wins:", *lines])


def check_optimizer(checkpoint: Fields) -> None:
    """Refuse optimizer states whose shape a technique of the checkpoint's run changed, in a fit without techniques.

    Raises:
        ConfigurationError: With the technique.
    """
    from lit_efficient.application.checkpoints import compare_techniques

    kept = (checkpoint.get("lit_efficient") or {}).get("techniques", ())
    if checkpoint.get("optimizer_states"):
        compare_techniques([one for one in kept if [*one["alters"]] == ["optimizer"]], [], fitting=True)


def check_shapes(module: nn.Module, checkpoint: Fields) -> None:
    """Refuse a checkpoint of another architecture before anything of the run is changed.

    Only tensors that both have are compared: models built later, and adapters, add to one of the two.

    Raises:
        CheckpointError: With the first tensors that differ.
    """
    saved = checkpoint["state_dict"]
    ours = module.state_dict()
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
