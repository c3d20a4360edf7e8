"""The fit of a config, made anew as often as needed, and run or not; see :mod:`~.evidence.fits`."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from lit_efficient.cli.arguments import read_command
from lit_efficient.cli.command_line import LitEfficientCLI
from lit_efficient.cli.errors import readable_errors
from lit_efficient.cli.run_folder import place_loggers
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource, give_arguments
from lit_efficient.files import configs


class ConfigFit(FitSource):
    """Makes the fit of a command line, whose runs write below one folder.

    Args:
        argv: Words after ``fit``: ``["-c", "language_model", "--trainer.max_steps", "20"]``.
        root: Folder below which runs write. They write nothing elsewhere.
        device: Device on which parts are built: ``meta`` for weights that take no memory. ``None``: as ``fit`` does.

    Raises:
        ConfigurationError: From :meth:`make`, if the config does not fit the classes that it names.
    """

    def __init__(self, argv: Sequence[str], root: str | Path, device: str | None = None) -> None:
        self.argv = list(argv)
        self.root = Path(root)
        self.device = device

    def make(self, change: Change = AS_IT_IS) -> Fit:
        words = self._with_overlays(change)
        of_techniques = {}
        for name, value in change.settings.items():
            if name[:1].isupper():
                of_techniques[name] = value
            else:
                words.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
        if change.seed is not None:
            words.append(f"--seed_everything={change.seed}")
        parts = FitParts(words, self.root, self.device)
        trainer: Any = parts.trainer  # its type does not declare `callbacks`
        give_arguments(trainer, of_techniques)
        trainer.callbacks = [*change.callbacks(), *trainer.callbacks]
        return Fit(trainer, parts.model, parts.datamodule, parts.seed)

    def _with_overlays(self, change: Change) -> list[str]:
        return [*self.argv, *(word for overlay in change.overlays for word in ("-c", overlay))]

    def identity(self, change: Change = AS_IT_IS) -> str:
        words = self._with_overlays(change)
        texts = []
        for word in words:
            path = configs.located(word.partition("=")[2] if word.startswith("-") else word)
            if path.endswith((".yaml", ".yml")) and Path(path).is_file():
                texts.append(Path(path).read_text("utf-8"))
        return f"{words} {texts} {super().identity(replace(change, overlays=()))}"

    def packages(self) -> set[str]:
        return set(read_command(["fit", *self.argv]).packages)

    def without_weights(self) -> "ConfigFit":
        return ConfigFit(self.argv, self.root, "meta")

    def config(self) -> dict[str, Any]:
        """Return the config as plain data, with defaults. Nothing is built, and no device is needed."""
        return _ConfigAlone(self.argv, self.root, None).config_dump


class FitParts(LitEfficientCLI):
    """Builds the parts of a run, with all that the command line adds to them. The caller runs them.

    Args:
        words: Words after the subcommand.
        root: Folder below which runs write. ``None``: as the config says. No folder is made either way.
        device: Device on which parts are built. ``None``: as ``fit`` does.
        subcommand: The subcommand.
    """

    def __init__(self, words: Sequence[str], root: Path | None, device: str | None, subcommand: str = "fit") -> None:
        self._root = root
        self._device = device
        with readable_errors():
            super().__init__(args=[subcommand, *words], save_config_callback=None)

    @property
    def seed(self) -> int:
        """The seed of the config; 0 where it is true or false."""
        seed = self.part(self.config, "seed_everything")
        return seed if type(seed) is int else 0

    def _placed(self, written: Namespace) -> Namespace:
        config = written.clone()
        trainer = self.part(config, "trainer")
        if self._root is not None:
            trainer["default_root_dir"] = str(self._root)
        if trainer.get("logger") not in (None, True, False):  # it needs a folder, and writes nothing before a run
            place_loggers(trainer, Path(trainer["default_root_dir"]), None)
        return config

    def building(self) -> AbstractContextManager[None]:
        """Return a context in which the parts are built."""
        return nullcontext()

    def instantiate_classes(self) -> None:
        if self._device is None:
            super().instantiate_classes()
            return
        build = self.parser.instantiate_classes
        device = torch.device(self._device)

        def on_device(config: Namespace, **kwargs: object) -> Namespace:
            with device, self.building():
                return build(config, **kwargs)

        self.parser.instantiate_classes = on_device
        super().instantiate_classes()

    def run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


class _ConfigAlone(FitParts):
    """Parses a config, and builds nothing."""

    def before_instantiate_classes(self) -> None:
        self.dump_config()

    def instantiate_classes(self) -> None:
        """Build nothing."""
