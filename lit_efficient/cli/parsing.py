"""The parser of configs: jsonargparse with safe imports, no null where none is allowed, and readable errors.

Importing what a config names runs it. So everything here is decided before a class is imported.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
import yaml
from jsonargparse import set_loader, set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from torch.optim.lr_scheduler import LRScheduler

from lit_efficient.catalog import registered
from lit_efficient.cli.names import ALLOWED_IMPORTS, elsewhere
from lit_efficient.cli.signatures import full_name, known_names
from lit_efficient.cli.tree import SPEC, leaf, load
from lit_efficient.errors import ConfigurationError, did_you_mean
from lit_efficient.internals.jsonargparse_parser import ChecksEmptyValues, options, prepare_arguments

PARSER_MODE = "lit_efficient"

# Arguments by which schedulers call the length of the run. Left unset they are the run's number of optimizer steps.
HORIZONS = ("total_steps", "T_max", "num_training_steps", "total_iters")
_KNOWN_BY_THE_RUN: dict[type, tuple[str, ...]] = {LRScheduler: HORIZONS, Logger: ("save_dir",)}
_IN_C = torch.nn.functional.gelu.__module__  # the module where torch defines some functions of torch.nn
_granted: set[str] = set()
# Lightning makes the calls that jsonargparse calls deprecated. No user can change them.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
set_loader(PARSER_MODE, load, (yaml.YAMLError,))


def set_import_policy(extra: Sequence[str] = ()) -> None:
    """Refuse to import what a config names, except from :data:`ALLOWED_IMPORTS` and ``extra``.

    What an earlier call in this process allowed is no longer allowed.

    Raises:
        ConfigurationError: If an entry is no dotted name, or cannot be allowed at all.
    """
    try:
        set_parsing_settings(
            config_read_mode_fsspec_enabled=False,  # no configs from URLs
            config_read_mode_urls_enabled=False,
            validate_subclass_spec_in_any=True,  # a class in an untyped argument is checked like any other
            instantiate_subclass_spec_in_any=False,
            import_path_denylist=["*", *_granted],
            import_path_allowlist=[*ALLOWED_IMPORTS, _IN_C, *extra, *_registered_classes()],
        )
    except ValueError as error:
        raise ConfigurationError(f"--allow-import: {error}") from error
    _granted.update(set(extra) - set(ALLOWED_IMPORTS))


def _registered_classes() -> list[str]:
    """Return the classes that installed packages register as techniques, and nothing else of these packages.

    Installing such a package is the decision to run it, as with a plugin of any program.
    """
    paths = [one.path for known in registered().values() for one in known]
    return [path for path in paths if all(part.isidentifier() for part in path.split("."))]


def help_option(word: str) -> str:
    """Return ``--optimizer.help=torch.optim.AdamW`` for ``--AdamW.help``; any other word as it is.

    Raises:
        ConfigurationError: If no class has the name.
    """
    found = re.fullmatch(r"--([A-Z]\w*)\.help", word)
    if found is None:
        name, equals, value = word.partition("=")
        if name.endswith(".help") and equals:
            return f"{name}={full_name(value)}"
        return word
    name = found[1]
    path = full_name(name)
    sections = {
        "torch.optim.": "optimizer",
        "torch.optim.lr_scheduler.": "lr_scheduler",
        "lightning.pytorch.callbacks.": "trainer.callbacks",
        "lightning.pytorch.loggers.": "trainer.logger",
        "lightning.pytorch.plugins.": "trainer.plugins",
        "lightning.pytorch.profilers.": "trainer.profiler",
        "lightning.pytorch.strategies.": "trainer.strategy",
    }
    section = sections.get(path.removesuffix(name))
    if section is None:
        raise ConfigurationError(f"--{name}.help: there is no class {name!r}{did_you_mean(name, known_names())}")
    return f"--{section}.help={path}"


# The ways in which jsonargparse says that an option does not exist.
_UNKNOWN_OPTION = re.compile(
    r"(?:(Group '(?P<group>.+)' )?does not accept option|unrecognized arguments:|Option) "
    r"'?(?:--)?(?P<name>[\w.+-]+)[^']*'?( is not accepted)?"
)
_UNLISTED = {"help", "config", "print_config", "print_shtab", "==SUPPRESS==", "subcommand"}


class Parser(ChecksEmptyValues, LightningArgumentParser):
    """The parser of the command line, of each subcommand and of each class that a config names."""

    described: type | None = None  # the class

    def add_class_arguments(self, theclass: type, *args: object, **kwargs: object) -> list[str]:
        """Add the arguments of a class. What the run knows, as the length of a schedule, may be left unset."""
        added = super().add_class_arguments(theclass, *args, **kwargs)
        self.described = theclass
        known = [name for kind, names in _KNOWN_BY_THE_RUN.items() if issubclass(theclass, kind) for name in names]
        prepare_arguments(self, known)
        return added

    def accepted(self) -> list[str]:
        """Return the dotted keys of the values that the parser takes."""
        keys = [option.key for option in options(self) if option.key not in _UNLISTED or option.hint]
        return [key for key in keys if not key.endswith(".help")]

    def check_keys(self, tree: Mapping[object, object], prefix: str = "") -> None:
        """Refuse unknown keys, and values where a mapping is expected.

        jsonargparse leaves out unknown keys without a value.
        """
        values = [option.key for option in options(self) if not option.is_section]
        for name, value in tree.items():
            key = f"{prefix}{name}".rstrip("+")
            if any(f"{key}.".startswith(f"{known}.") for known in (*values, "$schema")):
                continue
            if not any(known.startswith(f"{key}.") for known in values):
                self.error(f"Option '{key}' is not accepted")
            if isinstance(value, Mapping):
                self.check_keys(value, f"{key}.")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an error. That of an unknown option says what was probably meant."""
        unknown = _UNKNOWN_OPTION.search(message)
        if unknown and "(accepted" not in message:
            parser = getattr(ex, "subcommand_parser", None) or self
            message = parser.unknown_option(unknown["name"], unknown["group"])
        super().error(message, ex)

    def unknown_option(self, name: str, group: str | None) -> str:
        """Return the error of an unknown option, with the nearest one and the options beside it."""
        keys = self.accepted()
        if group and any(key.startswith(f"{group}.") for key in keys):
            name = f"{group}.{name}"
        level = name.rpartition(".")[0]
        while level and not any(f"{key}.".startswith(f"{level}.") for key in keys):
            level = level.rpartition(".")[0]
        below = [key[len(level) :].lstrip(".").partition(".")[0] for key in keys if key.startswith(level)]
        here = elsewhere(self.described.__name__ if self.described else "", leaf(name))
        if here:
            return f"no option {name!r}{here}"
        near = did_you_mean(name, keys)
        if not did_you_mean(leaf(name), [leaf(near.rpartition("'")[0])]):  # a common section is no resemblance
            first = name[len(level) :].lstrip(".").partition(".")[0]
            near = did_you_mean(first, [*below, *SPEC, *map(leaf, keys)])
        for key in keys:
            if key.endswith((f".{name}", f".{name.partition('.')[0]}")):  # the group in front of the key is missing
                near = f", did you mean {key!r}?"
                break
        return f"no option {name!r}{near} (accepted: {', '.join(dict.fromkeys(filter(None, below)))})"
