"""The fit of a config, to be made anew as often as one likes, and to be run or not; see :mod:`~.evidence.fits`."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lit_efficient.cli import LitEfficientCLI
from lit_efficient.cli.errors import explained
from lit_efficient.cli.parsing import split_arguments
from lit_efficient.cli.run_folder import place_loggers
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource, give_arguments
from lit_efficient.files import configs


class ConfigFit(FitSource):
    """Makes the fit of a command line, whose runs write below one folder.

    Args:
        argv: As after ``fit``: ``["-c", "language_model", "--trainer.max_steps", "20"]``.
        root: Folder below which runs write; nothing else of theirs is written.
        device: What parts are built on: ``meta`` for weights that take no memory. ``None``: as ``fit`` does.

    Raises:
        ConfigurationError: From :meth:`make`, if the config does not fit the classes that it names.
    """

    def __init__(self, argv: Sequence[str], root: str | Path, device: str | None = None) -> None:
        self.argv, self.root, self.device = list(argv), Path(root), device

    def make(self, change: Change = AS_IT_IS) -> Fit:
        words = [*self.argv, *(word for overlay in change.overlays for word in ("-c", overlay))]
        own = {name: value for name, value in change.settings.items() if name[:1].isupper()}  # of a technique
        words += [f"--{name}={_word(value)}" for name, value in change.settings.items() if name not in own]
        words += [] if change.seed is None else [f"--seed_everything={change.seed}"]
        parts = FitParts(words, self.root, self.device)
        trainer: Any = parts.trainer
        give_arguments(trainer, own)
        trainer.callbacks = [*change.callbacks(), *trainer.callbacks]
        return Fit(trainer, parts.model, parts.datamodule, parts.seed)

    def identity(self, change: Change = AS_IT_IS) -> str:
        words = [*self.argv, *(word for overlay in change.overlays for word in ("-c", overlay))]
        given = [word.partition("=")[2] if word.startswith("-") else word for word in words]  # --config=FILE
        paths = [path for path in map(configs.located, given) if path.endswith((".yaml", ".yml"))]
        texts = [Path(path).read_text("utf-8") for path in paths if Path(path).is_file()]
        return f"{words} {texts} {super().identity(replace(change, overlays=()))}"

    def packages(self) -> set[str]:
        return set(split_arguments(self.argv)[1])

    def without_weights(self) -> "ConfigFit":
        return ConfigFit(self.argv, self.root, "meta")

    def config(self) -> dict[str, Any]:
        """The config as plain data, with defaults; nothing is built, and no device is asked for."""
        return _Read(self.argv, self.root, None).config_dump


class FitParts(LitEfficientCLI):
    """Builds the parts of a run, with all that the command line adds to them, and leaves it to the caller to run it.

    Args:
        words: As after the subcommand.
        root: Folder below which runs write; ``None``: what the config says, and no folder is made either way.
        device: What parts are built on; ``None``: as ``fit`` does.
    """

    def __init__(self, words: Sequence[str], root: Path | None, device: str | None, subcommand: str = "fit") -> None:
        self._root, self._device = root, device
        argv = [subcommand, *words]
        with explained(argv):
            super().__init__(args=argv, save_config_callback=None)

    @property
    def seed(self) -> int:
        """What the config seeds with; 0 where it says true or false."""
        seed = self.part(self.config, "seed_everything")
        return seed if type(seed) is int else 0

    def _placed(self, written: Namespace) -> Namespace:
        config = written.clone()
        if self._root is not None:
            self.part(config, "trainer")["default_root_dir"] = str(self._root)
        trainer = self.part(config, "trainer")
        if trainer.get("logger") not in (None, True, False):  # which want a folder, and write nothing before a run
            place_loggers(trainer, Path(trainer["default_root_dir"]), None)
        return config

    def building(self) -> AbstractContextManager[Any]:
        """A context in which the parts are built."""
        return nullcontext()

    def instantiate_classes(self) -> None:
        if self._device is None:
            return super().instantiate_classes()
        import torch

        build = self.parser.instantiate_classes

        def on_device(config: Any, **kwargs: Any) -> Any:
            with torch.device(str(self._device)), self.building():
                return build(config, **kwargs)

        self.parser.instantiate_classes = on_device
        super().instantiate_classes()

    def run_subcommand(self, subcommand: str) -> None:
        """Nothing runs."""


class _Read(FitParts):
    """Parses a config, and builds nothing."""

    def before_instantiate_classes(self) -> None:
        self.dump_config()

    def instantiate_classes(self) -> None:
        """Nothing is built."""


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
