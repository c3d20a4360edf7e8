"""What can be known to fail before anything is built: folders, devices, secrets left out, W&B without a key."""

import difflib
import math
import netrc
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from pydoc import locate
from typing import Any
from urllib.parse import urlparse

import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_efficient.cli.parsing import ALLOWED_IMPORTS
from lit_efficient.cli.run import DEFAULTS
from lit_efficient.cli.secrets import HIDDEN, names_a_secret
from lit_efficient.errors import ConfigurationError, check_number, refusal

_FOLDERS = {"default_root_dir", "save_dir", "dirpath"}


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a config that cannot work on this machine, whatever its devices are.

    Args:
        config: The config of a subcommand, as plain data.

    Raises:
        ConfigurationError: Naming key, value and what is allowed.
    """
    for key, value in leaves(config):
        name = key.split(".")[-1]
        if isinstance(value, float) and math.isnan(value):
            raise ConfigurationError(f"{key}: nan is no number")
        if isinstance(value, str) and "\0" in value:
            raise refusal(key, "the text", "without the character 0", value)
        if isinstance(value, str) and (f"://{HIDDEN}@" in value or (value == HIDDEN and names_a_secret(key))):
            raise ConfigurationError(
                f"{key}: {HIDDEN} stands where a run that saved this config left a secret out; give it once more"
            )
        if name in _FOLDERS and key.startswith("trainer.") and isinstance(value, str):
            if "$" in value and name != "save_dir":  # there TensorBoardLogger replaces it
                raise refusal(key, "the folder", "written in full ($NAME is not replaced)", value)
            check_writable(key, Path(value))
        if name == "filename" and isinstance(value, str) and (Path(value).is_absolute() or ".." in Path(value).parts):
            raise refusal(key, "the name", "a name in its folder, which dirpath gives", value)
        if name == "class_path" and isinstance(value, str):
            check_checkpoint_io(key, value)
        if name == "patience" and isinstance(value, int):  # of EarlyStopping, which takes a number below 0 for 0
            check_number(key.removesuffix(".patience"), name, value, least=0)
    if config.get("weights_only") is False:
        raise refusal("ckpt_path", "weights_only", "true or null (else loading could run code)", False)


def check_numbers(config: Any) -> None:
    """Refuse numbers on which Lightning fails while it divides by them or seeds with them, or that it passes over.

    Args:
        config: The config of a subcommand; its keys may have dots.

    Raises:
        ConfigurationError: Naming key, range and value.
    """
    seed = config.get("seed_everything")
    if not isinstance(seed, bool):
        check_number("config", "seed_everything", seed, least=0, most=2**32 - 1, whole=True, null=True)
    steps, interval = (config.get(f"trainer.{name}") for name in ("accumulate_grad_batches", "val_check_interval"))
    check_number("trainer", "accumulate_grad_batches", steps, least=1, whole=True, null=True)
    for name, least in (("check_val_every_n_epoch", 1), ("log_every_n_steps", 0), ("num_nodes", 1)):
        check_number("trainer", name, config.get(f"trainer.{name}"), least=least, whole=True, null=True)
    if isinstance(interval, int | float):
        check_number("trainer", "val_check_interval", interval, above=0)
    if isinstance(most := config.get("trainer.max_time"), str):
        try:
            Timer(most)
        except MisconfigurationException:
            raise refusal("trainer", "max_time", "DD:HH:MM:SS, or days, hours, ... by name", most) from None
    if isinstance(clip := config.get("trainer.gradient_clip_val"), int | float):  # below 0 Lightning clips nothing
        check_number("trainer", "gradient_clip_val", clip, least=0)


def check_monitors(callbacks: Iterable[Any], scheduler: str | None, module: Any) -> None:
    """Refuse a monitor that is nearly the name of what a task logs: Lightning knows it after the first validation.

    What anybody else's code logs is not known; beside it nothing is refused.

    Raises:
        ConfigurationError: Naming who monitors it, and the name that was meant.
    """
    logged, ours = vars(type(module)).get("logs", ()), ("lit_efficient.", "lightning.", "pytorch_lightning.")
    followed = [(type(one).__name__, getattr(one, "monitor", None)) for one in callbacks]
    if not all(type(one).__module__.startswith(ours) for one in callbacks):
        return
    for name, monitor in [*followed, ("lr_scheduler", scheduler)]:
        if not isinstance(monitor, str) or monitor.startswith(tuple(logged)):
            continue
        if near := difflib.get_close_matches(monitor, logged, 1, 0.85):
            raise ConfigurationError(f"{name}: nobody logs the monitor {monitor!r}, did you mean {near[0]!r}?")


def check_checkpoint_io(key: str, name: str) -> None:
    """Refuse the readers of checkpoints that come with Lightning: a config alone could have one unpickle a file.

    One of the user's own stands, which needs ``--allow-import``, and so does any in Python.

    Raises:
        ConfigurationError: Naming the class.
    """
    cls = locate(name)
    bases = {base.__name__: base for base in getattr(cls, "__mro__", ())}
    trusted = any(f"{getattr(cls, '__module__', '')}.".startswith(f"{package}.") for package in ALLOWED_IMPORTS)
    if trusted and "CheckpointIO" in bases and (ours := DEFAULTS["checkpoints"]) not in bases:
        raise refusal(key, "the CheckpointIO", f"{ours} or a class of your own (others unpickle files)", name)


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
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
    """Try to write into a folder, or into what will be its parent, and leave nothing behind.

    Raises:
        ConfigurationError: Naming the folder and what the system says.
    """
    if "://" in str(folder):
        return
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigurationError(f"{key}: cannot write to {folder} ({existing}: {error.strerror})") from error


def check_devices(accelerator: str, devices: int | str | list[int]) -> None:
    """Refuse more devices than there are. Accelerators other than CPU and CUDA are left to Lightning.

    Raises:
        ConfigurationError: Naming what was asked for and what there is.
    """
    gpus = torch.cuda.device_count()
    mps = accelerator == "gpu" and torch.backends.mps.is_available()
    if accelerator in ("gpu", "cuda") and gpus == 0 and not mps:
        raise ConfigurationError(f"trainer.accelerator: {accelerator}, but torch finds no GPU here; allowed: auto, cpu")
    if isinstance(devices, int) and (devices == 0 or devices < -1):
        raise refusal("trainer", "devices", "auto, -1 (all), or a number above 0", devices)
    if accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available()):
        count, kind = os.cpu_count() or 1, "CPU cores"
    elif accelerator in ("gpu", "cuda", "auto") and gpus:
        count, kind = gpus, "GPUs"
    else:
        return
    several, allowed = r"\[?\s*-?\d+(\s*,\s*\d+)*\s*,?\s*\]?", "auto, a number, or numbers with commas"
    if kind == "CPU cores":
        several, allowed = r"\s*0*[1-9]\d*\s*", "auto, a number of processes above 0 on the CPU"
    if devices != "auto" and not re.fullmatch(several, str(devices)):
        raise refusal("trainer", "devices", allowed, devices)
    wanted = _requested(devices)
    if wanted is not None and wanted > count:
        raise ConfigurationError(f"trainer.devices: {devices} asks for {wanted}, but there are {count} {kind}")


def _requested(devices: int | str | list[int]) -> int | None:
    """How many devices must exist; ``None`` for "auto", -1 and what Lightning will refuse by itself."""
    numbers = [int(number) for number in re.findall(r"-?\d+", str(devices))]
    if min(numbers, default=-1) < 0:
        return None
    return max(numbers) + 1 if isinstance(devices, list) or "," in str(devices) else numbers[0]


def go_offline_without_key(config: Mapping[str, Any], environment: MutableMapping[str, str] = os.environ) -> bool:
    """Run W&B offline if nobody said how and there is no key; return whether the environment was changed."""
    classes = [value for key, value in leaves(config.get("trainer") or {}) if key.endswith("class_path")]
    uses_wandb = any(str(name).endswith("WandbLogger") for name in classes)
    if not uses_wandb or "WANDB_MODE" in environment or _has_wandb_key(environment):
        return False
    environment["WANDB_MODE"] = "offline"
    return True


def _has_wandb_key(environment: Mapping[str, str]) -> bool:
    if environment.get("WANDB_API_KEY"):
        return True
    host = urlparse(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    files = [environment.get("NETRC"), os.path.expanduser("~/.netrc"), os.path.expanduser("~/_netrc")]
    for file in filter(None, files):
        try:
            if netrc.netrc(file).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
