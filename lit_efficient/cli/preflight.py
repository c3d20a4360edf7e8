"""Checks before anything is built: folders, numbers, devices, secrets that were left out, W&B without a key."""

import math
import netrc
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from difflib import get_close_matches
from pathlib import Path
from pydoc import locate
from typing import Any
from urllib.parse import urlparse

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_efficient.cli.names import ALLOWED_IMPORTS
from lit_efficient.cli.secrets import HIDDEN, names_a_secret
from lit_efficient.cli.tree import DEFAULTS
from lit_efficient.errors import ConfigurationError, check_number, refusal

_FOLDERS = {"default_root_dir", "save_dir", "dirpath"}


def check_config(config: Mapping[str, object]) -> None:
    """Refuse a config that cannot work on this machine, whatever its devices are.

    Args:
        config: The config of a subcommand, as plain data.

    Raises:
        ConfigurationError: With key, value and what is allowed.
    """
    for key, value in leaves(config):
        name = key.rpartition(".")[2]
        if isinstance(value, float) and math.isnan(value):
            raise ConfigurationError(f"{key}: nan is no number")
        if name == "patience" and isinstance(value, int):  # EarlyStopping takes a number below 0 for 0
            check_number(key.removesuffix(".patience"), name, value, least=0)
        if isinstance(value, str):
            _check_text(key, name, value)
    if config.get("weights_only") is False:
        raise refusal("ckpt_path", "weights_only", "true or null (else loading could run code)", False)


def _check_text(key: str, name: str, value: str) -> None:
    if "\0" in value:
        raise refusal(key, "the text", "without the character 0", value)
    if f"://{HIDDEN}@" in value or (value == HIDDEN and names_a_secret(key)):
        raise ConfigurationError(
            f"{key}: {HIDDEN} stands where a run that saved this config left a secret out; give it once more"
        )
    if name in _FOLDERS and key.startswith("trainer."):
        if "$" in value and name != "save_dir":  # TensorBoardLogger expands it there
            raise refusal(key, "the folder", "written in full ($NAME is not replaced)", value)
        check_writable(key, Path(value))
    if name == "filename" and (Path(value).is_absolute() or ".." in Path(value).parts):
        raise refusal(key, "the name", "a name in its folder, which dirpath gives", value)
    if name == "class_path":
        check_checkpoint_io(key, value)


def check_numbers(config: Any) -> None:
    """Refuse numbers by which Lightning would divide or seed and fail, or that it would ignore.

    Args:
        config: The config of a subcommand; its keys may have dots.

    Raises:
        ConfigurationError: With key, range and value.
    """
    seed = config.get("seed_everything")
    if not isinstance(seed, bool):
        check_number("config", "seed_everything", seed, least=0, most=2**32 - 1, whole=True, null=True)
    for name, least in (
        ("accumulate_grad_batches", 1),
        ("check_val_every_n_epoch", 1),
        ("log_every_n_steps", 0),
        ("num_nodes", 1),
    ):
        check_number("trainer", name, config.get(f"trainer.{name}"), least=least, whole=True, null=True)
    interval = config.get("trainer.val_check_interval")
    if isinstance(interval, int | float):
        check_number("trainer", "val_check_interval", interval, above=0)
    longest = config.get("trainer.max_time")
    if isinstance(longest, str):
        try:
            Timer(longest)
        except MisconfigurationException:
            raise refusal("trainer", "max_time", "DD:HH:MM:SS, or days, hours, ... by name", longest) from None
    clip = config.get("trainer.gradient_clip_val")
    if isinstance(clip, int | float):  # below 0 Lightning clips nothing
        check_number("trainer", "gradient_clip_val", clip, least=0)


def check_monitors(callbacks: Iterable[Callback], scheduler: str | None, module: LightningModule) -> None:
    """Refuse a monitor that is nearly the name of a metric of the task: Lightning would notice after a validation.

    Nothing is refused if callbacks of other packages are there: they may log any name.

    Args:
        callbacks: Callbacks of the trainer.
        scheduler: Monitor of the scheduler, if any.
        module: The task.

    Raises:
        ConfigurationError: With the part that monitors it, and the name that was meant.
    """
    logged = vars(type(module)).get("logs", ())
    monitors: list[tuple[str, object]] = []
    for callback in callbacks:
        if not type(callback).__module__.startswith(("lit_efficient.", "lightning.", "pytorch_lightning.")):
            return
        monitors.append((type(callback).__name__, getattr(callback, "monitor", None)))
    for name, monitor in [*monitors, ("lr_scheduler", scheduler)]:
        if not isinstance(monitor, str) or monitor.startswith(tuple(logged)):
            continue
        near = get_close_matches(monitor, logged, 1, 0.85)
        if near:
            raise ConfigurationError(f"{name}: nobody logs the monitor {monitor!r}, did you mean {near[0]!r}?")


def check_checkpoint_io(key: str, name: str) -> None:
    """Refuse the CheckpointIO classes of Lightning: a config alone could let one unpickle a file.

    A class of the user's own is allowed. It needs ``--allow-import``.

    Raises:
        ConfigurationError: With the class.
    """
    found = locate(name)
    bases = {base.__name__: base for base in getattr(found, "__mro__", ())}
    module = f"{getattr(found, '__module__', '')}."
    trusted = any(module.startswith(f"{package}.") for package in ALLOWED_IMPORTS)
    ours = DEFAULTS["checkpoints"]
    if trusted and "CheckpointIO" in bases and ours not in bases:
        raise refusal(key, "the CheckpointIO", f"{ours} or a class of your own (others unpickle files)", name)


def leaves(tree: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each value of nested dicts and lists with its dotted key."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{prefix}.{index}")
    else:
        yield prefix, tree


def check_writable(key: str, folder: Path) -> None:
    """Write into a folder, or into the one that will be its parent, and leave nothing behind.

    Raises:
        ConfigurationError: With the folder and the system's message.
    """
    if "://" in str(folder):
        return
    path = folder.absolute()
    existing = next(place for place in (path, *path.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigurationError(f"{key}: cannot write to {folder} ({existing}: {error.strerror})") from error


def check_devices(accelerator: str, devices: int | str | list[int]) -> None:
    """Refuse more devices than there are. Accelerators other than CPU and CUDA are left to Lightning.

    Raises:
        ConfigurationError: With what the config asks for and what there is.
    """
    gpus = torch.cuda.device_count()
    mps = accelerator == "gpu" and torch.backends.mps.is_available()
    if accelerator in ("gpu", "cuda") and gpus == 0 and not mps:
        raise ConfigurationError(f"trainer.accelerator: {accelerator}, but torch finds no GPU here; allowed: auto, cpu")
    if isinstance(devices, int) and (devices == 0 or devices < -1):
        raise refusal("trainer", "devices", "auto, -1 (all), or a number above 0", devices)
    if accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available()):
        count = os.cpu_count() or 1
        kind = "CPU cores"
        pattern = r"\s*0*[1-9]\d*\s*"
        allowed = "auto, a number of processes above 0 on the CPU"
    elif accelerator in ("gpu", "cuda", "auto") and gpus:
        count = gpus
        kind = "GPUs"
        pattern = r"\[?\s*-?\d+(\s*,\s*\d+)*\s*,?\s*\]?"
        allowed = "auto, a number, or numbers with commas"
    else:
        return
    if devices != "auto" and not re.fullmatch(pattern, str(devices)):
        raise refusal("trainer", "devices", allowed, devices)
    wanted = _wanted(devices)
    if wanted is not None and wanted > count:
        raise ConfigurationError(f"trainer.devices: {devices} asks for {wanted}, but there are {count} {kind}")


def _wanted(devices: int | str | list[int]) -> int | None:
    """Return how many devices must exist; ``None`` for "auto", -1 and what Lightning refuses itself."""
    numbers = [int(number) for number in re.findall(r"-?\d+", str(devices))]
    if min(numbers, default=-1) < 0:
        return None
    are_indices = isinstance(devices, list) or "," in str(devices)
    if are_indices:
        return max(numbers) + 1
    return numbers[0]


def go_offline_without_key(config: Mapping[str, object], environment: MutableMapping[str, str] = os.environ) -> bool:
    """Run W&B offline if neither a mode nor a key is set; return whether the environment was changed."""
    paths = [str(value) for key, value in leaves(config.get("trainer") or {}) if key.endswith("class_path")]
    uses_wandb = any(path.endswith("WandbLogger") for path in paths)
    if not uses_wandb or "WANDB_MODE" in environment or _has_wandb_key(environment):
        return False
    environment["WANDB_MODE"] = "offline"
    return True


def _has_wandb_key(environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_API_KEY"):
        return True
    host = urlparse(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for file in (environment.get("NETRC"), os.path.expanduser("~/.netrc"), os.path.expanduser("~/_netrc")):
        try:
            if file and netrc.netrc(file).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):  # no file, or not in this format
            continue
    return False
