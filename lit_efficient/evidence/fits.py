"""A fit that can be made anew: plan, compare, tune and verify all make the user's fit several times, each time alike.

    source = LiveFit(trainer, module, data)                                   in Python: copies of what is there
    source = lit_efficient.cli.fits.ConfigFit(["-c", "language_model"])       of a config
    fit = source.make(Change(settings={"trainer.max_steps": 20}))
    fit.run()

A `Change` is what one variant has that the fit as it is has not. Settings go by the names that they have in a config.
"""

import contextlib
import copy
import hashlib
import importlib.util
import itertools
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
from torch.utils.data import DataLoader

from lit_efficient.declaration import techniques_of
from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.mechanisms.trials.batch_size import NAMES, places_of, set_at, value_at
from lit_efficient.mechanisms.trials.probes import batch_size_of, resize

# What a trainer that exists takes, and where it keeps it.
_OF_TRAINER = {
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

_MOST_DESCRIBED = 100  # of a long list, by which it differs from another


@dataclass(frozen=True)
class Change:
    """What a variant of a fit has that the fit as it is has not.

    Args:
        name: How people call it.
        settings: New values by their names in a config: ``trainer.max_steps``, ``data.batch_size``, ``model.lr``; or by
            the class of a technique that it has: ``LoRA.rank``.
        overlays: Configs to lay over, as after ``-c``; only a fit that comes from a config takes them.
        callbacks: Makes the callbacks that are added.
        seed: What random numbers begin with, those of the weights, too, where these are made anew; ``None``: as it is.
    """

    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    overlays: tuple[str, ...] = ()
    callbacks: Callable[[], list[Any]] = list
    seed: int | None = None


AS_IT_IS = Change()


@dataclass
class Fit:
    """The parts of a fit that has not begun.

    Args:
        trainer: The trainer.
        module: The LightningModule.
        data: A DataModule, a loader to train on, a pair of one to train and one to validate on, or ``None`` where the
            module has them.
        seed: What the random numbers of its run begin with.
        resumed: The checkpoint that it goes on from, ``None`` for a new one.
    """

    trainer: Any
    module: Any
    data: Any = None
    seed: int = 0
    resumed: Any = None

    @property
    def datamodule(self) -> Any:
        """The DataModule, ``None`` where there is none."""
        return self.data if hasattr(self.data, "prepare_data") else None

    def change(self, settings: Mapping[str, Any]) -> None:
        """Set what goes by these names in a config.

        Raises:
            ConfigurationError: If one cannot be set any more, or is none of the part's.
        """
        for name, value in settings.items():
            _set(self, name, value)

    def run(self) -> None:
        """Train, from the same random numbers each time."""
        from lightning.pytorch import seed_everything

        seed_everything(self.seed, verbose=False)
        if self.datamodule is not None or self.data is None:
            self.trainer.fit(self.module, datamodule=self.datamodule, ckpt_path=self.resumed)
        else:
            loaders = self.data if isinstance(self.data, tuple) else (self.data,)
            self.trainer.fit(self.module, *loaders, ckpt_path=self.resumed)


class FitSource(ABC):
    """Makes a fit, as often as it is asked to."""

    @abstractmethod
    def make(self, change: Change = AS_IT_IS) -> Fit:
        """The parts of the fit with a change.

        Raises:
            ConfigurationError: If it cannot be changed so.
        """

    def without_weights(self) -> "FitSource":
        """The same fit with its network on the meta device, where it can be made so."""
        return self

    def config(self) -> dict[str, Any]:
        """The config as plain data, with defaults; empty where there is none."""
        return {}

    def code(self) -> str:
        """A sum of the sources that it runs: of this package, and of the user's own where they are not installed."""
        return sum_of_sources({"lit_efficient", *self.packages()})

    def packages(self) -> set[str]:
        """The modules, or packages, of the user's own code."""
        return set()

    def identity(self, change: Change = AS_IT_IS) -> str:
        """A text that is another one for another fit, by which a folder of results knows whose it is."""
        return f"{type(self).__qualname__} {_described(self)} {change.settings} {change.overlays} {_each(change)}"


class LiveFit(FitSource):
    """Makes deep copies of a trainer, a module and data that exist, which are left as they are.

    Args:
        trainer: The trainer; it has fitted nothing yet, or its fit is over.
        module: The LightningModule.
        data: As in :class:`Fit`.
        seed: What the random numbers of each run begin with.
    """

    def __init__(self, trainer: Any, module: Any, data: Any = None, seed: int = 0) -> None:
        self.parts = Fit(trainer, module, data, seed)

    def make(self, change: Change = AS_IT_IS, copying: AbstractContextManager[Any] | None = None) -> Fit:
        """The parts of the fit with a change; the trainer and the module, but not the data, are copied under
        ``copying``.
        """
        if change.overlays:
            raise ConfigurationError(
                f"{change.name or 'Change'}: overlays ({', '.join(change.overlays)}) are laid over a config, and this "
                "fit has none: give callbacks"
            )
        memo: dict[int, Any] = {}
        copy.deepcopy(self.parts.data, memo)
        with copying or nullcontext():
            fit = copy.deepcopy(self.parts, memo)
        callbacks = change.callbacks()
        fit.trainer.callbacks = [*callbacks, *fit.trainer.callbacks]  # as checkpoints come last
        fit.change(give_arguments(fit.trainer, change.settings))
        fit.seed = fit.seed if change.seed is None else change.seed
        return fit

    def packages(self) -> set[str]:
        fit = self.parts
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
    """A sum of the texts of modules, of packages as wholes; of installed ones other than this their versions say it."""
    files: set[Path] = set()
    for name in {module if module == "__main__" else module.partition(".")[0] for module in modules}:
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        with contextlib.suppress(ImportError, ValueError):
            spec = spec or importlib.util.find_spec(name)
        folders = list(map(Path, getattr(spec, "submodule_search_locations", None) or ()))
        places = folders or [Path(getattr(module, "__file__", None) or getattr(spec, "origin", None) or "")]
        for place in places if name == "lit_efficient" or not any(map(_installed, places)) else ():
            files |= {file for file in [place, *place.rglob("*.py")] if file.suffix == ".py" and file.is_file()}
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(path.as_posix().encode() + path.read_bytes())
    return total.hexdigest()


def _installed(path: Path) -> bool:
    library = Path(sysconfig.get_path("stdlib"))
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or path.is_relative_to(library)


def _each(change: Change) -> list[str]:
    return [_described(callback) for callback in change.callbacks()]


def _described(part: Any, depth: int = 4) -> str:
    """A part by its class and its attributes, as far down as people set them, the same in every process."""
    if isinstance(part, str | int | float | bool | None | torch.dtype):
        return repr(part)
    if isinstance(part, torch.Tensor):
        return f"{tuple(part.shape)} {0 if part.device.type == 'meta' else part.detach().double().sum().item()}"
    if callable(part) and hasattr(part, "__qualname__"):
        return f"{part.__module__}.{part.__qualname__}"
    if depth == 0:
        return type(part).__qualname__
    if isinstance(part, Mapping):
        return str({repr(name): _described(value, depth - 1) for name, value in part.items()})
    if isinstance(part, list | tuple | set | frozenset):
        texts = [_described(one, depth - 1) for one in itertools.islice(part, _MOST_DESCRIBED)]
        return f"{len(part)} {sorted(texts) if isinstance(part, set | frozenset) else texts}"
    if isinstance(part, partial):
        return _described([part.func, part.args, part.keywords], depth)
    base = vars(torch.nn.Module()) if isinstance(part, torch.nn.Module) else {}  # weights are summed up elsewhere
    named = getattr(part, "__dict__", {}).items()
    own = {name: value for name, value in named if name not in base and name.lstrip("_") != "trainer"}
    found = {
        name: _described(value, depth - 1) for name, value in own.items() if not isinstance(value, torch.nn.Module)
    }
    return f"{type(part).__qualname__}{found}"


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, by their names in a config, as the mappings that it has for them."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *parents, last = name.split(".")
        leaf = tree
        for parent in parents:
            leaf = leaf.setdefault(parent, {})
        leaf[last] = value
    return tree


def give_arguments(trainer: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make techniques anew with those settings that name one (``LoRA.rank``), and return the others.

    Raises:
        ConfigurationError: If the trainer has no such technique, it takes no such argument, or refuses the value.
    """
    given = {name: value for name, value in settings.items() if name[:1].isupper()}
    parts = {type(part).__name__: part for part in techniques_of(trainer)} if given else {}
    for name, value in given.items():
        owner, _, argument = name.partition(".")
        part = parts.get(owner)
        if part is None or argument not in (known := part.arguments()):
            accepted = ", ".join(known) if part is not None else f"of {', '.join(parts) or 'no technique'}"
            raise ConfigurationError(f"{name}: there is no such argument (accepted: {accepted})")
        part.__init__(**{**{one: getattr(part, one) for one in known}, argument: value})  # type: ignore[misc]
    return {name: value for name, value in settings.items() if name not in given}


def batch_setting(fit: Fit, name: str = "auto") -> tuple[str, int] | None:
    """The setting that holds the size of the training batches, and what it is; ``None`` where none is found.

    ``auto`` looks for the usual ones: of a loader, the DataModule or the module.

    Raises:
        ConfigurationError: If there is no such setting, or it is no size.
    """
    if fit.data is not None and fit.datamodule is None:
        loader = (fit.data if isinstance(fit.data, tuple) else (fit.data,))[0]
        size = batch_size_of(loader) if isinstance(loader, DataLoader) else None
        return None if size is None else ("data.batch_size", size)
    parts = {"data": fit.datamodule, "model": fit.module}
    wanted = [f"{part}.{one}" for one in NAMES for part in parts] if name == "auto" else [name]
    for one in wanted:
        part, _, key = one.partition(".")
        places = places_of(parts.get(part), key) if key else []
        if places:
            value = value_at(places[0])
            check_number("Fit", one, value, least=1, whole=True)
            return one, value
    if name == "auto":
        return None
    raise refusal("Fit", "the setting of the batch size", "an attribute of data or model, as in data.batch_size", name)


def _set(fit: Fit, name: str, value: Any) -> None:
    part, _, key = name.partition(".")
    if name == "data.batch_size" and fit.data is not None and fit.datamodule is None:
        train, *others = fit.data if isinstance(fit.data, tuple) else (fit.data,)
        fit.data = (resize(train, value), *others)
        return
    owner = {"trainer": fit.trainer, "model": fit.module, "data": fit.data}.get(part)
    path = _OF_TRAINER.get(key) if part == "trainer" else key
    if owner is None or path is None:
        raise ConfigurationError(
            f"{name}: a trainer that exists cannot be given it; of `trainer` it takes {', '.join(_OF_TRAINER)}. "
            "Make the fit from a config, or write a FitSource of your own"
        )
    places = places_of(owner, path)
    if not places:
        raise ConfigurationError(f"{name}: {type(owner).__name__} has no {path}")
    set_at(places, value)
