"""Sources of fits: plan, compare, tune and verify build the user's fit several times, each time in the same way.

    source = LiveFit(trainer, module, data)                                   copies of existing objects
    source = lit_efficient.cli.fits.ConfigFit(["-c", "language_model"])       from a config
    fit = source.make(Change(settings={"trainer.max_steps": 20}))
    fit.run()

A `Change` describes a variant of the fit. Settings have the names that they have in a config.
"""

import contextlib
import copy
import hashlib
import importlib.util
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from lit_efficient.declaration import techniques_of
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.internals.contents import attributes, contents, length
from lit_efficient.mechanisms.trials.batch_size import NAMES, paths_to, places_of, set_at, value_at
from lit_efficient.mechanisms.trials.probes import batch_size_of, resize
from lit_efficient.surgery import computed

# Settings of an existing trainer that can be changed, and the attributes that hold them.
_TRAINER_SETTINGS = {
    "max_steps": "fit_loop.epoch_loop.max_steps",
    "min_steps": "fit_loop.epoch_loop.min_steps",
    "max_epochs": "fit_loop.max_epochs",
    "accumulate_grad_batches": "accumulate_grad_batches",
    "gradient_clip_val": "gradient_clip_val",
    "gradient_clip_algorithm": "gradient_clip_algorithm",
    "limit_train_batches": "limit_train_batches",
    "limit_val_batches": "limit_val_batches",
    "num_sanity_val_steps": "num_sanity_val_steps",
    "val_check_interval": "val_check_interval",
    "check_val_every_n_epoch": "check_val_every_n_epoch",
    "log_every_n_steps": "log_every_n_steps",
}
_DESCRIBED_ITEMS = 100  # items of a list that its description includes


@dataclass(frozen=True)
class Change:
    """Differences of a variant from the unchanged fit.

    Args:
        name: Name of the variant.
        settings: New values by their names in a config, such as ``trainer.max_steps``, ``data.batch_size`` or
            ``model.lr``, or by the class of a technique of the fit, such as ``LoRA.rank``.
        overlays: Configs to lay over, as after ``-c``. Only a fit from a config accepts them.
        callbacks: Function that creates the callbacks to add.
        seed: Seed of the run, and of the initial weights if the source creates them anew; ``None`` changes nothing.
    """

    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    overlays: tuple[str, ...] = ()
    callbacks: Callable[[], list[Callback]] = list
    seed: int | None = None


AS_IT_IS = Change()


@dataclass
class Fit:
    """Parts of a fit that has not begun.

    Args:
        trainer: The trainer.
        module: The LightningModule.
        data: A DataModule, a training loader, or a pair of a training and a validation loader; ``None`` if the module
            has loaders.
        seed: Seed of the run.
        resumed: Checkpoint to resume from; ``None`` for a new run.
    """

    trainer: Any  # a Trainer; type checkers do not know its attribute ``callbacks``
    module: LightningModule
    data: Any = None
    seed: int = 0
    resumed: Path | None = None

    @property
    def datamodule(self) -> LightningDataModule | None:
        """The DataModule, or ``None`` if the data is no DataModule."""
        if hasattr(self.data, "prepare_data"):
            return self.data
        return None

    @property
    def loaders(self) -> tuple[Any, ...] | None:
        """The training loader and maybe a validation loader; ``None`` if the fit has no loaders."""
        if self.data is None or self.datamodule is not None:
            return None
        if isinstance(self.data, tuple):
            return self.data
        return (self.data,)

    def change(self, settings: Mapping[str, object]) -> None:
        """Set values by their names in a config.

        Raises:
            ConfigurationError: If a setting does not exist, or can no longer be changed.
        """
        for name, value in settings.items():
            _set(self, name, value)

    def run(self) -> None:
        """Train, with the same seed each time."""
        from lightning.pytorch import seed_everything

        # Data order and dropout follow from this seed.
        seed_everything(self.seed, verbose=False)
        if self.loaders is None:
            self.trainer.fit(self.module, datamodule=self.datamodule, ckpt_path=self.resumed)
        else:
            self.trainer.fit(self.module, *self.loaders, ckpt_path=self.resumed)


class FitSource(ABC):
    """Source of fits that are equal but for the requested changes."""

    @abstractmethod
    def make(self, change: Change = AS_IT_IS) -> Fit:
        """Return the parts of the fit with a change.

        Raises:
            ConfigurationError: If the fit cannot be changed in this way.
        """

    def without_weights(self) -> "FitSource":
        """Return a source of the same fit with its network on the meta device, if the source supports that."""
        return self

    def config(self) -> dict[str, Any]:
        """Return the config with its defaults as plain data; empty if there is no config."""
        return {}

    def code(self) -> str:
        """Return a hash of the source code of this package and of the user's packages that are not installed."""
        return sum_of_sources({"lit_efficient", *self.packages()})

    def packages(self) -> set[str]:
        """Return the names of modules or packages with the user's code."""
        return set()

    def identity(self, change: Change = AS_IT_IS) -> str:
        """Return a text that differs between different fits. A folder of results stores its hash."""
        callbacks = [_described(callback) for callback in change.callbacks()]
        return f"{type(self).__qualname__} {_described(self)} {change.settings} {change.overlays} {callbacks}"


class LiveFit(FitSource):
    """Source that makes deep copies of an existing trainer, module and data. The originals are not changed.

    Args:
        trainer: A trainer that is not fitting.
        module: The LightningModule.
        data: As in :class:`Fit`.
        seed: Seed of each run.
    """

    def __init__(self, trainer: Trainer, module: LightningModule | None, data: object = None, seed: int = 0) -> None:
        self.parts = Fit(trainer, module, data, seed)  # type: ignore[arg-type]

    def make(self, change: Change = AS_IT_IS, copying: AbstractContextManager[object] | None = None) -> Fit:
        """Return the parts of the fit with a change.

        Args:
            change: The change.
            copying: Context in which the trainer and the module, but not the data, are copied.
        """
        if change.overlays:
            raise ConfigurationError(
                f"{change.name or 'Change'}: overlays ({', '.join(change.overlays)}) are laid over a config, but this "
                "fit has none: give callbacks instead"
            )
        # Data is copied first and outside of ``copying``, so that the parts share one copy with real tensors.
        memo: dict[int, object] = {}
        copy.deepcopy(self.parts.data, memo)
        with copying or nullcontext():
            fit = copy.deepcopy(self.parts, memo | computed(self.parts.module))
        fit.trainer.callbacks = [*change.callbacks(), *fit.trainer.callbacks]  # Lightning keeps checkpoints last
        fit.change(give_arguments(fit.trainer, change.settings))
        if change.seed is not None:
            fit.seed = change.seed
        return fit

    def packages(self) -> set[str]:
        fit = self.parts
        # The code of a base class matters as well.
        parts = [*fit.trainer.callbacks, *fit.module.modules(), fit.data]
        return {kind.__module__ for part in parts for kind in type(part).__mro__}

    def identity(self, change: Change = AS_IT_IS) -> str:
        fit = self.parts
        names = ("accumulate_grad_batches", "gradient_clip_val", "limit_train_batches", "limit_val_batches")
        trainer = {name: getattr(fit.trainer, name, None) for name in names}
        weights = sum(float(p.detach().double().sum()) for p in fit.module.parameters() if p.device.type != "meta")
        parts = [_described(part) for part in (*fit.trainer.callbacks, fit.module, fit.data)]
        return f"{super().identity(change)} {fit.module} {weights} {trainer} {fit.trainer.precision} {parts}"


def sum_of_sources(modules: Collection[str]) -> str:
    """Return a hash of the source files of modules and their packages. Installed packages are left out.

    The versions of installed packages are recorded elsewhere. ``lit_efficient`` is always included.
    """
    files: set[Path] = set()
    for name in {module if module == "__main__" else module.partition(".")[0] for module in modules}:
        places = _places(name)
        if name == "lit_efficient" or not any(_installed(place) for place in places):
            for place in places:
                files |= {file for file in [place, *place.rglob("*.py")] if file.suffix == ".py" and file.is_file()}
    # The order of files must not depend on the file system.
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(path.as_posix().encode() + path.read_bytes())
    return total.hexdigest()


def _places(name: str) -> list[Path]:
    """Return the folders of a package, or the file of a module; a path that does not exist for built-in modules."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if spec is None:
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
    folders = getattr(spec, "submodule_search_locations", None)
    if folders:
        return [Path(folder) for folder in folders]
    return [Path(getattr(module, "__file__", None) or getattr(spec, "origin", None) or "")]


def _installed(path: Path) -> bool:
    library = Path(sysconfig.get_path("stdlib"))
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or path.is_relative_to(library)


def _described(part: object, depth: int = 4) -> str:
    """Describe a part by its class and its attributes, down to ``depth``, with the same text in every process."""
    if isinstance(part, str | int | float | bool | None | torch.dtype):
        return repr(part)
    if isinstance(part, torch.Tensor):
        # A sum distinguishes tensors well enough, and a meta tensor has no values.
        total = 0.0
        if part.device.type != "meta":
            total = part.detach().double().sum().item()
        return f"{tuple(part.shape)} {total}"
    if callable(part) and hasattr(part, "__qualname__"):
        return f"{part.__module__}.{part.__qualname__}"
    if depth == 0:
        return type(part).__qualname__
    if isinstance(part, Mapping):
        return str({repr(name): _described(value, depth - 1) for name, value in part.items()})
    if isinstance(part, list | tuple | set | frozenset):
        texts = [_described(one, depth - 1) for one in contents(part, _DESCRIBED_ITEMS)]
        if isinstance(part, set | frozenset):
            texts.sort()
        return f"{length(part)} {texts}"
    if isinstance(part, partial):
        return _described([part.func, part.args, part.keywords], depth)
    # The weights of modules are part of the identity already, and a trainer refers to everything.
    left_out: set[str] = set()
    if isinstance(part, torch.nn.Module):
        left_out.update(vars(torch.nn.Module()))
    found = {}
    for name, value in attributes(part).items():
        is_trainer = name.lstrip("_") == "trainer"
        if name not in left_out and not is_trainer and not isinstance(value, torch.nn.Module):
            found[name] = _described(value, depth - 1)
    return f"{type(part).__qualname__}{found}"


def nested(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return settings with dotted names as nested mappings, as in a config."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *parents, last = name.split(".")
        leaf = tree
        for parent in parents:
            leaf = leaf.setdefault(parent, {})
        leaf[last] = value
    return tree


def give_arguments(trainer: Trainer, settings: Mapping[str, object]) -> dict[str, object]:
    """Construct techniques again with the settings that name an argument (``LoRA.rank``), and return the others.

    Raises:
        ConfigurationError: If the trainer has no such technique, or the technique has no such argument or refuses the
            value.
    """
    parts = {type(part).__name__: part for part in techniques_of(trainer)}
    others = {}
    for name, value in settings.items():
        if not name[:1].isupper():
            others[name] = value
            continue
        owner, _, argument = name.partition(".")
        part = parts.get(owner)
        if part is None:
            raise ConfigurationError(f"{name}: the fit has no technique {owner} (it has: {', '.join(parts) or 'none'})")
        known = part.arguments()
        if argument not in known:
            raise ConfigurationError(f"{name}: there is no such argument (accepted: {', '.join(known)})")
        # Constructing again checks the value like the original construction.
        arguments = {one: getattr(part, one) for one in known}
        part.__init__(**{**arguments, argument: value})  # type: ignore[misc]
    return others


def batch_setting(fit: Fit, name: str = "auto") -> tuple[str, int] | None:
    """Return the setting of the training batch size and its value; ``None`` if it is not found.

    Args:
        fit: The fit.
        name: Name of the setting. ``auto`` looks for the usual names in a loader, the DataModule and the module.

    Raises:
        ConfigurationError: If the setting does not exist, or its value is no batch size.
    """
    if fit.loaders is not None:
        loader = fit.loaders[0]
        size = None
        if isinstance(loader, DataLoader):
            size = batch_size_of(loader)
        if size is None:
            return None
        return "data.batch_size", size
    parts = {"data": fit.datamodule, "model": fit.module}
    wanted = [name]
    if name == "auto":
        wanted = [f"{part}.{path}" for one in NAMES for part, owner in parts.items() for path in paths_to(owner, one)]
    # An attribute of the DataModule has priority over one of the module.
    for one in wanted:
        part, _, key = one.partition(".")
        places = places_of(parts.get(part), key)
        if key and places:
            value = value_at(places[0])
            check_number("Fit", one, value, least=1, whole=True)
            return one, value
    if name == "auto":
        return None
    raise refusal("Fit", "the setting of the batch size", "an attribute of data or model, as in data.batch_size", name)


def _set(fit: Fit, name: str, value: Any) -> None:
    part, _, key = name.partition(".")
    if name == "data.batch_size" and fit.loaders is not None:
        train, *others = fit.loaders
        fit.data = (resize(train, value), *others)
        return
    owner = {"trainer": fit.trainer, "model": fit.module, "data": fit.data}.get(part)
    path: str | None = key
    if part == "trainer":
        path = _TRAINER_SETTINGS.get(key)
    if owner is None or path is None:
        raise ConfigurationError(
            f"{name}: an existing fit cannot be changed in this way. Settings of `trainer` that can be changed: "
            f"{', '.join(_TRAINER_SETTINGS)}. Make the fit from a config, or write a FitSource of your own"
        )
    places = places_of(owner, path)
    if not places:
        raise ConfigurationError(f"{name}: {type(owner).__name__} has no attribute {path}")
    set_at(places, value)
