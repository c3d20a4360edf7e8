"""What can be known to fail before anything is built: folders, devices, secrets in the config, W&B without a key."""

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

from lit_efficient.cli.parsing import ALLOWED_IMPORTS
from lit_efficient.cli.run import DEFAULTS
from lit_efficient.errors import ConfigurationError, check_number, refusal

_FOLDERS = {"default_root_dir", "save_dir", "dirpath"}
_SECRET = re.compile(
    r"(^|_)(api_?key|passw(or)?d|pwd|passphrase|credentials?|secret(_access)?(_key)?|(private|access|account)_key|"
    r"^token|(access|api|auth|bearer|csrf|git(hub|lab)|hf|id|refresh|session|wandb)_token)$"
)
# Where a password or a signature stands in a URL, and how tokens of the common services and private keys begin.
_SECRET_VALUE = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY|"
    r"://\S+[?&][\w-]*(?i:token|api_?key|sig|signature|secret|password)=[^&\s]|"
    r"\b(hf_|gh[opusr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{16,}"
)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse a config that cannot work on this machine, or should not be written to disk.

    Args:
        config: The config of a subcommand, as plain data.

    Raises:
        ConfigurationError: Naming key, value and what is allowed.
    """
    for key, value in leaves(config):
        name = key.split(".")[-1]
        if isinstance(value, str) and value and (_names_a_secret(key) or _SECRET_VALUE.search(value)):
            raise ConfigurationError(
                f"{key}: secrets do not belong in a config, which is saved and logged with the run; "
                "give it in the environment variable that its library reads"
            )
        if name in _FOLDERS and key.startswith("trainer.") and isinstance(value, str):
            check_writable(key, Path(value))
        if name == "filename" and isinstance(value, str) and (Path(value).is_absolute() or ".." in Path(value).parts):
            raise refusal(key, "the name", "a name in its folder, which dirpath gives", value)
        if name == "class_path" and isinstance(value, str):
            check_checkpoint_io(key, value)
    if config.get("weights_only") is False:
        raise refusal("ckpt_path", "weights_only", "true or null (else loading could run code)", False)
    trainer = config.get("trainer") or {}
    check_devices(trainer.get("accelerator", "auto"), trainer.get("devices", "auto"))


def _names_a_secret(key: str) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key.rsplit(".", maxsplit=1)[-1]).lower().replace("-", "_")
    return bool(_SECRET.search(snake))


def redacted(words: Iterable[str]) -> list[str]:
    """A command line with ``***`` in the place of secrets."""
    shown: list[str] = []
    hides = False  # the word is the value of an option before it
    for word in words:
        name, equals, value = word.partition("=")
        secret = name.startswith("-") and _names_a_secret(name.lstrip("-"))
        holds = any(map(_names_a_secret, re.findall(r"([\w-]+)[\"']?\s*:", word)))  # as a mapping does
        if hides or holds or _SECRET_VALUE.search(word) or (secret and value):
            named = equals and not hides and name.startswith("-") and not _SECRET_VALUE.search(name)
            shown.append(f"{name}=***" if named else "***")
        else:
            shown.append(word)
        hides = secret and not equals
    return shown


def check_numbers(config: Any) -> None:
    """Refuse numbers on which Lightning fails while it divides by them or seeds with them.

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
    if isinstance(interval, int | float):
        check_number("trainer", "val_check_interval", interval, above=0)


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
    if (
        accelerator in ("gpu", "cuda")
        and gpus == 0
        and not (accelerator == "gpu" and torch.backends.mps.is_available())
    ):
        raise ConfigurationError(f"trainer.accelerator: {accelerator}, but torch finds no GPU here; allowed: auto, cpu")
    if accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available()):
        count, kind = os.cpu_count() or 1, "CPU cores"
    elif accelerator in ("gpu", "cuda", "auto") and gpus:
        count, kind = gpus, "GPUs"
    else:
        return
    if isinstance(devices, str) and devices != "auto" and not re.fullmatch(r"\s*-?\d+(\s*,\s*\d+)*\s*,?\s*", devices):
        raise refusal("trainer", "devices", "auto, a number, or numbers with commas", devices)
    wanted = _requested(devices)
    if wanted is not None and wanted > count:
        raise ConfigurationError(f"trainer.devices: {devices} asks for {wanted}, but there are {count} {kind}")


def _requested(devices: int | str | list[int]) -> int | None:
    """How many devices must exist; ``None`` for "auto", -1 and what Lightning will refuse by itself."""
    if isinstance(devices, str):
        numbers = [int(part) for part in devices.split(",") if part.strip().isdigit()]
        if not numbers:
            return None
        return max(numbers) + 1 if "," in devices else numbers[0]
    if isinstance(devices, list):
        return max(devices, default=-1) + 1
    return devices if devices >= 0 else None


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
