"""What a config's text says: YAML without duplicate or misspelt keys, with short class names written in full."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch
import yaml
from jsonargparse import get_loader
from lightning.pytorch import callbacks, loggers, plugins, profilers, strategies
from torch.optim import lr_scheduler

from lit_efficient import PUBLIC
from lit_efficient.catalog import third_party
from lit_efficient.cli.without import marked
from lit_efficient.errors import ConfigurationError, did_you_mean

# Keys whose value, or the items of whose value, may be a class name alone.
_SLOTS = {"callbacks", "plugins", "strategy", "logger", "model", "data", "optimizer", "lr_scheduler"}
LISTS = {"callbacks", "plugins"}
SPEC = ("class_path", "init_args", "dict_kwargs")
MOST_LETTERS = 250_000  # which take seconds to be read
MOST_VALUES = 30_000  # in a config; a few lines of aliases of aliases are billions
_NULL = ("", "~", "null", "Null", "NULL")
# torch has a class of the same name, without the `monitor` that Lightning needs.
_ALIASES = {"ReduceLROnPlateau": "lightning.pytorch.cli.ReduceLROnPlateau"}
# Other packages, once imported, have optimizers of the same names as torch's, and a short name would be ambiguous.
_ALIASES |= {name: f"torch.optim.{name}" for name, value in vars(torch.optim).items() if isinstance(value, type)}
# Their short names are resolved by Lightning.
_LIGHTNINGS = {name for part in (callbacks, loggers, plugins, profilers, strategies) for name in part.__all__}


def full_name(name: str) -> str:
    """Return the import path of a short class name: of ours, of torch's, or one that another package registers.

    Any other string is returned as it is, and so are the names of Lightning's classes.

    Raises:
        ConfigurationError: If two packages register the name.
    """
    if name in PUBLIC:
        return f"lit_efficient.{name}"
    theirs = None if name in _ALIASES or name in _LIGHTNINGS else third_party(name)
    return theirs.path if theirs else _ALIASES.get(name, name)


def help_of(name: str) -> str:
    """The option that prints the arguments of a class of torch or Lightning, ``--optimizer.help=torch.optim.AdamW``."""
    slots: dict[str, Sequence[str]] = {
        "optimizer": [one for one, value in vars(torch.optim).items() if isinstance(value, type)],
        "lr_scheduler": [*vars(lr_scheduler)],
        "trainer.callbacks": callbacks.__all__,
        "trainer.logger": loggers.__all__,
        "trainer.plugins": plugins.__all__,
        "trainer.profiler": profilers.__all__,
        "trainer.strategy": strategies.__all__,
    }
    slot = next((slot for slot, names in slots.items() if name in names), None)
    if slot is None:
        known = [*PUBLIC, *(one for names in slots.values() for one in names)]
        raise ConfigurationError(f"--{name}.help: there is no class {name!r}{did_you_mean(name, known)}")
    return f"--{slot}.help={full_name(name)}"


def strategy_class(name: str) -> str | dict[str, str]:
    """What the trainer takes for a class: a plain string would be one of Lightning's own short names, such as ddp."""
    full = full_name(name)
    return {"class_path": full} if name in PUBLIC or full.rpartition(".")[2] in strategies.__all__ else full


def expand_short_names(tree: Any, key: str = "") -> Any:
    """Write the short class names in a loaded config in full: those in ``class_path`` and in the slots."""
    if isinstance(tree, dict):
        named = {k: v for k, v in marked(tree).items() if k != "init_args" or v is not None or "class_path" not in tree}
        return {k: expand_short_names(value, str(k)) for k, value in named.items()}
    if isinstance(tree, list):
        return [expand_short_names(item, key) for item in tree]
    if isinstance(tree, str) and leaf(key) == "strategy":
        return strategy_class(tree)
    if isinstance(tree, str) and (leaf(key) in _SLOTS or leaf(key) == "class_path"):
        return full_name(tree)
    return tree


def leaf(key: str) -> str:
    """The last part of a dotted key."""
    return key.rstrip("+").split(".")[-1]


def slot_of(key: str) -> str:
    """The slot that a key or an option names, if it does."""
    return last if (last := leaf(key.removeprefix("--"))) in _SLOTS else ""


def load_yaml(text: str) -> Any:
    """Load YAML as jsonargparse does, but refuse duplicate and misspelt keys and know our short class names.

    Raises:
        yaml.YAMLError: If the text is no YAML, a mapping has a key twice or holds itself, or what names a class does
            not do so. The message names the lines.
    """
    if len(text) > MOST_LETTERS:
        raise yaml.YAMLError(f"it is {len(text):,} letters long: {MOST_LETTERS:,} at most")
    try:
        if re.search(r"[:?\[{-]", text):  # else it is a single value
            check_yaml(text)
        return expand_short_names(get_loader("yaml")(text))
    except ConfigurationError:
        raise
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as error:  # numbers of a million digits
        raise yaml.YAMLError(f"it holds what no config does: {error}") from error


def check_yaml(text: str, slot: str = "") -> None:
    """Raise what is wrong with a text that stands in a slot, or nowhere yet, as :func:`load_yaml` does."""
    _check_nodes(yaml.compose(text, Loader=yaml.SafeLoader), {}, (), slot)


def _check_nodes(node: yaml.Node | None, seen: dict[int, int], within: tuple[int, ...], slot: str = "") -> int:
    """Raise what is wrong with a node and those below it; ``slot``: in which it stands, and so may be a class.

    Returns:
        How many values it is, each alias as many as what it repeats.
    """
    if node is not None and id(node) in within:
        raise yaml.YAMLError(f"what begins in line {node.start_mark.line + 1} holds itself")
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return seen.get(id(node), 1)
    lines: dict[str, int] = {}
    size = 1
    for item in node.value:
        key, value = item if isinstance(node, yaml.MappingNode) else (None, item)
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        if isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"the key {name!r} stands twice: in line {lines[name]} and line {line}")
            lines[name] = line
        size += _check_nodes(value, seen, (*within, id(node)), slot_of(name) if key else slot)
    seen[id(node)] = size
    if size > MOST_VALUES:
        raise yaml.YAMLError(f"what begins in line {node.start_mark.line + 1} has more than {MOST_VALUES:,} values")
    if isinstance(node, yaml.MappingNode):
        _check_spec(lines, {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}, slot)
    return size


def _check_spec(lines: dict[str, int], values: dict[str, yaml.Node], slot: str) -> None:
    """Raise what is wrong with a class and its arguments, if a mapping is that, or nearly so."""
    of_class = slot or "init_args" in lines
    misspelt = [name for name in lines if of_class and did_you_mean(name, ["class_path"]) and name != "class_path"]
    misspelt += [name for name in lines if slot and name != "init_args" and get_close_matches(name, SPEC, 1, 0.88)]
    misspelt = [name for name in misspelt if name not in SPEC]
    how = "write class_path: {}, and its arguments below init_args"
    named = next((name for name in lines if slot and "class_path" not in lines and _is_class(name)), None)
    if named is not None:
        raise yaml.YAMLError(f"{named!r} in line {lines[named]} is a class, no argument: {how.format(named)}")
    if "class_path" in lines:
        misspelt = [name for name in lines if name not in SPEC]
        if values["class_path"].tag != "tag:yaml.org,2002:str":
            raise yaml.YAMLError(f"class_path in line {lines['class_path']} names no class")
    if misspelt:
        name, accepted = misspelt[0], ", ".join(SPEC)
        advice = did_you_mean(name, SPEC) or f": {how.format('NAME')}"
        raise yaml.YAMLError(f"no option {name!r} in line {lines[name]}{advice} (accepted: {accepted})")
    if slot in LISTS and lines and not lines.keys() & {*SPEC}:
        name, line = next(iter(lines.items()))
        raise yaml.YAMLError(f"{name!r} in line {line} of {slot} is of no class: {how.format('NAME')}")
    arguments, null = values.get("init_args"), _NULL if "class_path" in lines else ()
    if arguments is not None and not isinstance(arguments, yaml.MappingNode) and arguments.value not in null:
        raise yaml.YAMLError(f"init_args in line {lines['init_args']} is no mapping of names to values")


def _is_class(name: str) -> bool:
    known = name in _LIGHTNINGS or hasattr(lr_scheduler, name) or full_name(name) != name
    return known or ("." in name and name.rpartition(".")[2][:1].isupper())
