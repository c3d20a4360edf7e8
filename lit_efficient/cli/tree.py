"""A config as a tree: YAML is read once, overlays and options are merged into it, and every key knows its place.

The tree consists of :class:`Table` for a mapping, lists, and plain values. The rules of merging:

* a mapping is merged key by key; any other value replaces the earlier one;
* ``callbacks+: [EMA]`` appends to a list, ``callbacks-: [EMA]`` takes classes out of it;
* a class that cannot occur twice and is appended once more takes the new arguments in addition to its earlier ones;
* a class that replaces another class keeps the arguments that the new class takes, too;
* a mapping that describes another model than the earlier one replaces it.

Nothing is imported here for what a config names.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import yaml

from lit_efficient import PUBLIC
from lit_efficient.catalog import registered
from lit_efficient.cli.signatures import ENVIRONMENTS, SHORT, annotation_of, full_name, names_in, signature
from lit_efficient.errors import ConfigurationError, did_you_mean
from lit_efficient.internals.jsonargparse_parser import YAML_LOADER

SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler")
# Keys whose value, or whose items, may be the name of a class.
SLOTS = {"callbacks", "plugins", "strategy", "logger", "model", "data", "optimizer", "lr_scheduler"}
LISTS = {"callbacks", "plugins"}
SPEC = ("class_path", "init_args", "dict_kwargs")  # keys of a class and its arguments
_ARGUMENTS = ("init_args", "dict_kwargs")
_LIBRARIES = ("torch.", "lightning.")
MOST_LETTERS = 250_000  # in a file: more takes seconds to read
MOST_VALUES = 30_000  # in a config: aliases of aliases make billions out of a few lines
# Parts that the command line adds to every run that has none of the kind. Code of the command line names no others.
DEFAULTS = {
    "checkpoints": "SafeCheckpointIO",
    "signals": "SignalCheckpoint",
    "metrics": "RunMetrics",
    "divergence": "NonFiniteGuard",
    "ranks": "RankWatch",  # with several processes
    "bar": "ThroughputBar",
    "ScheduleFreeAdamW": "ScheduleFree",  # with an optimizer of that name
    "prefetch": "DevicePrefetcher",  # if a fit runs on a GPU
}
_ALWAYS = [DEFAULTS[key] for key in ("checkpoints", "signals", "metrics", "divergence")]
# This part is added after the trainer is built. A marker in the config keeps it out.
_LATE = DEFAULTS["prefetch"]
LEFT_OUT = "lit_efficient.cli.defaults.LeftOut"  # its import path
_PLUGIN_FOLDERS = ("plugins.", "precision.")
# Fields that say which model a mapping describes. With another value nothing of the earlier mapping applies.
_KINDS = ("model_type", "_class_name")
# Fields that say that a mapping describes a pretrained model, and not one of our own networks.
_PRETRAINED = {"name_or_path", "config_fields"}
_TEXT_OR_NULL = ("str | None", "None | str", "Optional[str]")
_NULL = ("", "~", "null", "Null", "NULL")
_HOW = "write class_path: {}, and its arguments below init_args"


class Place(NamedTuple):
    """Where a key is written."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"in {self.file}, line {self.line}"


class Table(dict[object, object]):
    """A mapping of a config.

    ``places`` has the place of each key. Keys that come from an option have none.
    """

    def __init__(self, values: Mapping[object, object] | None = None) -> None:
        super().__init__(values or {})
        self.places: dict[object, Place] = dict(values.places) if isinstance(values, Table) else {}

    def put(self, key: object, value: object, place: Place | None = None) -> None:
        """Set a value and its place."""
        self[key] = value
        if place is None:
            self.places.pop(key, None)
        else:
            self.places[key] = place

    @property
    def is_class(self) -> bool:
        """True if the mapping names a class."""
        return isinstance(self.get("class_path"), str)

    def copy(self) -> "Table":
        return Table(self)


class ConfigText(str):
    """Stands for a tree where jsonargparse takes a config as text; :func:`load` gives the tree back."""

    tree: Table

    def __new__(cls, tree: Table) -> "ConfigText":
        text = super().__new__(cls, "{all configs and options}")
        text.tree = tree
        return text


def load(text: str) -> object:
    """Return the plain data of a :class:`ConfigText`, or of YAML.

    Raises:
        yaml.YAMLError: As :func:`read_text` does.
    """
    if isinstance(text, ConfigText):
        return plain_data(text.tree)
    # Part of a config that was checked as a whole. Of its keys nothing says whether they are arguments of a class.
    return plain_data(_merged(None, read_text(text, is_part=True), ""))


def plain_data(value: object) -> object:
    """Return a tree as dictionaries, lists and plain values."""
    if isinstance(value, Table):
        return {key: plain_data(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_data(item) for item in value]
    return value


def by_option(config: Any) -> Any:
    """Return a config with its values below the names of its options: ``callbacks.EMA.decay`` for a class in a list.

    A class has its arguments beside its ``class_path``. A second class of a kind is ``name#2``.
    """
    if isinstance(config, Mapping) and "class_path" in config:
        arguments = {key: value for key, value in config.items() if key not in SPEC}
        arguments |= {**(config.get("init_args") or {}), **(config.get("dict_kwargs") or {})}
        return {"class_path": config["class_path"], **by_option(arguments)}
    if isinstance(config, Mapping):
        return {str(key): by_option(value) for key, value in config.items()}
    if isinstance(config, list) and config and all(isinstance(one, Mapping) and "class_path" in one for one in config):
        names = numbered(class_name(one["class_path"]) for one in config)
        return {name: by_option(one) for name, one in zip(names, config)}
    if isinstance(config, tuple):
        return list(config)
    return config


def flat(config: Any) -> dict[str, Any]:
    """Return the values of a config by dotted key, as :func:`by_option` names them."""
    return _flat(by_option(config))


def _flat(named: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in named.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{name}": one for name, one in _flat(value).items()}
        else:
            found[key] = value
    return found


def numbered(names: Iterable[str]) -> list[str]:
    """Return names in which a second one of a kind is ``name#2``."""
    counts: Counter[str] = Counter()
    result = []
    for name in names:
        counts[name] += 1
        result.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return result


# Reading -------------------------------------------------------------------------------------------------------------


def read_text(text: str, file: str = "", slot: str = "", is_part: bool = False) -> object:
    """Read YAML.

    Args:
        text: The YAML.
        file: Name of the file, for places.
        slot: Key of :data:`SLOTS` that the text is the value of. A mapping there must be a class.
        is_part: True for the text of a part of a config, whose classes are checked already.

    Returns:
        The tree.

    Raises:
        yaml.YAMLError: If the text is no YAML, a mapping has a key twice or contains itself, or a class and its
            arguments are not written as such. The message names the lines.
    """
    if len(text) > MOST_LETTERS:
        raise yaml.YAMLError(f"it is too long: more than {MOST_LETTERS:,} letters")
    loader = YAML_LOADER(text)
    try:
        node = loader.get_single_node()
        _check_node(node, {}, (), slot, in_arguments=is_part)
        if node is None:
            return None
        return _value(node, loader, file, {})
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except yaml.YAMLError as error:
        if "maximum nesting depth" in str(error):  # in the words of the parser in C
            raise yaml.YAMLError("it is nested too deeply") from None
        raise
    except ConfigurationError:
        raise
    except ValueError as error:  # a number of a million digits
        raise yaml.YAMLError(f"it holds what no config does: {error}") from error
    finally:
        loader.dispose()


def _value(node: yaml.Node, loader: yaml.SafeLoader, file: str, made: dict[int, object]) -> object:
    """Return the tree of a node. An alias is the same object as its anchor."""
    if id(node) in made:
        return made[id(node)]
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        made[id(node)] = [_value(item, loader, file, made) for item in node.value]
    elif isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        loader.flatten_mapping(node)  # the keys of `<<`
        table = Table()
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | None):
                raise yaml.YAMLError(f"the key in line {key_node.start_mark.line + 1} is no plain value")
            table.put(key, _value(value_node, loader, file, made), Place(file, key_node.start_mark.line + 1))
        made[id(node)] = table
    else:
        made[id(node)] = loader.construct_object(node, deep=True)
    return made[id(node)]


def _check_node(
    node: yaml.Node | None, sizes: dict[int, int], parents: tuple[int, ...], slot: str = "", in_arguments: bool = False
) -> int:
    """Check a node and the nodes below it.

    Args:
        node: The node.
        sizes: Numbers of values of the nodes that are checked already.
        parents: Nodes that contain this one.
        slot: Key that the node is the value of.
        in_arguments: True below the arguments of a class, where ``callbacks`` and ``plugins`` are names like others.

    Returns:
        The number of values. An alias counts like what it repeats.
    """
    if node is not None and id(node) in parents:
        raise yaml.YAMLError(f"what begins in line {node.start_mark.line + 1} holds itself")
    if not isinstance(node, yaml.CollectionNode) or id(node) in sizes:
        return sizes.get(id(node), 1)
    size = 1
    if isinstance(node, yaml.MappingNode):
        keys: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if name in keys:
                    first = keys[name].start_mark.line + 1
                    raise yaml.YAMLError(f"the key {name!r} stands twice: in line {first} and line {line}")
                keys[name] = key
            if in_arguments and leaf(name) in LISTS:
                below = ""
            else:
                below = slot_of(name)
            size += _check_node(value, sizes, (*parents, id(node)), below, in_arguments or name in _ARGUMENTS)
        values = {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}
        _check_spec({name: key.start_mark.line + 1 for name, key in keys.items()}, values, slot)
    else:
        for item in node.value:
            size += _check_node(item, sizes, (*parents, id(node)), slot, in_arguments)
    sizes[id(node)] = size
    if size > MOST_VALUES:
        raise yaml.YAMLError(f"what begins in line {node.start_mark.line + 1} has more than {MOST_VALUES:,} values")
    return size


def _check_spec(lines: Mapping[str, int], values: Mapping[str, yaml.Node], slot: str) -> None:
    """Check a mapping that is a class with its arguments, or is probably meant to be one."""
    if slot and "class_path" not in lines:
        for name in lines:
            if _is_class_name(name):
                raise yaml.YAMLError(f"{name!r} in line {lines[name]} is a class, no argument: {_HOW.format(name)}")
    if "class_path" in lines and values["class_path"].tag != "tag:yaml.org,2002:str":
        raise yaml.YAMLError(f"class_path in line {lines['class_path']} names no class")
    for name in lines:
        if name not in SPEC and _is_meant_for_spec(name, lines, slot):
            advice = did_you_mean(name, SPEC) or f": {_HOW.format('NAME')}"
            raise yaml.YAMLError(f"no option {name!r} in line {lines[name]}{advice} (accepted: {', '.join(SPEC)})")
    if slot in LISTS and lines and not lines.keys() & {*SPEC}:
        name = next(iter(lines))
        raise yaml.YAMLError(f"{name!r} in line {lines[name]} of {slot} is of no class: {_HOW.format('NAME')}")
    arguments = values.get("init_args")
    is_null = isinstance(arguments, yaml.ScalarNode) and arguments.value in _NULL and "class_path" in lines and slot
    if not isinstance(arguments, yaml.MappingNode | None) and not is_null:
        owner = f" of {values['class_path'].value}" if "class_path" in values else ""
        raise yaml.YAMLError(f"init_args{owner} in line {lines['init_args']} is no mapping of names to values")


def _is_meant_for_spec(name: str, lines: Mapping[str, int], slot: str) -> bool:
    """Return whether a key is a misspelt key of :data:`SPEC`, or stands where only these may stand."""
    if "class_path" in lines:
        return True
    if (slot or "init_args" in lines) and did_you_mean(name, ["class_path"]):
        return True
    return bool(slot) and bool(get_close_matches(name, SPEC, 1, 0.88))


def _is_class_name(name: str) -> bool:
    if "." in name:
        return all(part.isidentifier() for part in name.split(".")) and class_name(name)[:1].isupper()
    return full_name(name) != name


def leaf(key: str) -> str:
    """Return the last part of a dotted key, without a ``+`` or ``-`` at its end."""
    return key.rstrip("+-").rpartition(".")[2]


def slot_of(key: str) -> str:
    """Return the key of :data:`SLOTS` that a dotted key ends with, or an empty string."""
    last = leaf(key)
    return last if last in SLOTS else ""


def class_name(path: object) -> str:
    """Return the last part of an import path."""
    return str(path).rpartition(".")[2]


def place_of(tree: Table, key: str, name: str) -> Place | None:
    """Return where a name is written.

    Args:
        tree: The config.
        key: Dotted key of the section that has the name.
        name: A key or a class in it.

    Returns:
        The place of the name. If several places have it, the place of the section, if that is in a file.
    """
    place: Place | None = None
    part: object = tree
    for step in key.split("."):
        if not isinstance(part, Table) or step not in part:
            break
        place = part.places.get(step, place)
        part = part[step]
    found = set(_places(part, name))
    if len(found) == 1:
        return found.pop()
    return place


def _places(tree: object, name: str) -> Iterator[Place]:
    if isinstance(tree, list):
        for item in tree:
            yield from _places(item, name)
    elif isinstance(tree, Table):
        for key, value in tree.items():
            place = tree.places.get(key)
            if place is not None and place.file and (key == name or class_name(value) == name):
                yield place
            yield from _places(value, name)


# Merging -------------------------------------------------------------------------------------------------------------


def merge(before: Table, now: Table) -> Table:
    """Merge a config on top of an earlier one.

    Args:
        before: The earlier config. It is not changed.
        now: The config on top of it.

    Returns:
        The result, in which short class names are written in full and lists have no ``+`` and ``-`` any more. A list
        without an earlier one keeps its ``+``, because the parser may have a default for it.

    Raises:
        ConfigurationError: If a list loses what it does not have.
    """
    return _merge(before, now, in_arguments=False)


def _merge(before: Table, now: Table, in_arguments: bool) -> Table:
    """Merge two mappings as :func:`merge` does. Among the arguments of a class no key is one of :data:`SLOTS`."""
    result = before.copy()
    appended: dict[str, Table] = {}
    for key, value in now.items():
        text = str(key)
        place = now.places.get(key)
        if text.endswith("+"):
            appended[text[:-1]] = now
        elif text.endswith("-") and leaf(text) in LISTS and not in_arguments:
            _take_out_of(result, text[:-1], value, now)
        else:
            result.put(key, _merged(result.get(key), value, leaf(text), in_arguments), place)
            result.pop(f"{text}+", None)  # of an earlier config: it is replaced, too
    for text in appended:  # after what is taken out
        items = _named(now[f"{text}+"], "" if in_arguments else leaf(text))
        target = text if text in result else f"{text}+"
        if leaf(text) in LISTS and not in_arguments:
            items = _appended(as_list(result.get(target)), as_list(items))
        elif target in result or not in_arguments:  # else it may be a key of a mapping, as "c++"
            earlier = result.get(target)
            # `logger: true` stands for Lightning's own logger, which a list replaces.
            items = [*as_list(None if isinstance(earlier, bool) else earlier), *as_list(items)]
        result.put(target, items, now.places.get(f"{text}+"))
    return result


def _appended(before: list[object], items: list[object]) -> list[object]:
    """Append items to a list of classes. An item that is there already moves to the end, and takes the new arguments.

    Options that follow an appended class are about the last item of the list.
    """
    kept = list(before)
    added: list[object] = []
    for item in items:
        same = _same(kept, item)
        if same is None:
            added.append(item)
            continue
        kept = [one for one in kept if one is not same]
        added.append(_merged_class(same, item) if isinstance(same, Table) and isinstance(item, Table) else item)
    return [*kept, *added]


def _same(items: list[object], item: object) -> object | None:
    """Return the item of a list that cannot be there together with ``item``, or ``None``.

    A class of this package, or one that is registered as a technique, can be in a trainer once. Any other can occur
    with different arguments.
    """
    path = _path(item)
    is_single = path.startswith("lit_efficient.") or path in _registered_paths()
    return next((one for one in items if one == item or (is_single and _path(one) == path)), None)


@functools.cache
def _registered_paths() -> set[str]:
    return {one.path for known in registered().values() for one in known}


def restated(before: Table, now: Table) -> list[str]:
    """Return the names of the classes that a config appends to a list of the trainer which has them already."""
    earlier = before.get("trainer")
    later = now.get("trainer")
    if not isinstance(earlier, Table) or not isinstance(later, Table):
        return []
    found = []
    for key in LISTS:
        removed = [class_name(name) for name in as_list(later.get(f"{key}-"))]
        there = [
            one for one in as_list(earlier.get(key, earlier.get(f"{key}+"))) if class_name(_path(one)) not in removed
        ]
        for item in as_list(_named(later.get(f"{key}+"), key)):
            if _same(there, item) is not None:
                found.append(class_name(_path(item)))
    return found


def as_list(value: object) -> list[object]:
    """Return the items of a list, the value alone, or no items for null."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


def _merged(before: object, now: object, key: str, in_arguments: bool = False) -> object:
    slot = "" if in_arguments else key
    now = _named(now, slot)
    if not isinstance(now, Table):
        return now
    before = _as_class(before, slot)
    inside = in_arguments or key in _ARGUMENTS
    if before is None:
        return _merge(Table(), now, inside)
    if "class_path" in before or "class_path" in now:
        return _merged_class(before, now)
    if any(kind in before and kind in now and before[kind] != now[kind] for kind in _KINDS):
        return _merge(Table(), now, inside)
    if now.keys() & _PRETRAINED and before and not before.keys() & _PRETRAINED:
        return _merge(Table(), now, inside)
    return _merge(before, now, inside)


def _merged_class(before: Table, now: Table) -> Table:
    """Merge a class and its arguments on top of an earlier class or its fields."""
    if not before.keys().isdisjoint(SPEC):
        earlier = before
    else:
        earlier = Table({"init_args": before})
    if now.keys().isdisjoint(SPEC):  # fields alone, of the class that is there
        if now.keys() & _PRETRAINED and not _arguments(earlier).keys() & _PRETRAINED:
            return _merge(Table(), now, in_arguments=True)
        return merge(earlier, Table({"init_args": now}))
    if now.is_class and earlier.get("class_path") != now["class_path"]:
        earlier = _kept_by(earlier, str(now["class_path"]))
    return merge(earlier, now)


def _arguments(spec: Table) -> Table:
    arguments = spec.get("init_args")
    if isinstance(arguments, Table):
        return arguments
    return Table()


def _kept_by(before: Table, path: str) -> Table:
    """Return the arguments of an earlier class that the class at ``path`` takes, too."""
    known = signature(path)
    kept = Table()
    earlier = _arguments(before)
    for name, value in earlier.items():
        # What a user's class takes by its ``**kwargs`` is left to the parser.
        may_take = known is None or (known.is_open and not path.startswith(_LIBRARIES))
        if may_take or (known is not None and name in known.arguments):
            kept.put(name, value, earlier.places.get(name))
    return Table({"class_path": path, "init_args": kept})


def _nested(arguments: Table) -> Table:
    """Write arguments with dots in their names, ``sizes.width: 3``, as mappings. No name of an argument has one."""
    result = arguments.copy()
    for key, value in arguments.items():
        first, dot, rest = str(key).partition(".")
        if dot and all(part.isidentifier() for part in str(key).rstrip("+").split(".")):
            del result[key]
            inner = _nested(Table({rest: value}))
            if key in arguments.places:
                inner.places = dict.fromkeys(inner, arguments.places[key])
            else:
                inner.places = {}
            result = _merge(result, Table({first: inner}), in_arguments=True)
    return result


def _named(value: object, key: str) -> object:
    """Write short class names in full, and a class without arguments in a slot as a mapping."""
    if isinstance(value, list):
        return [_merged(None, item, key) for item in value]
    if isinstance(value, Table) and value.is_class:
        value = value.copy()
        value["class_path"] = full_name(str(value["class_path"]))
        if value.get("init_args", value) is None:
            del value["init_args"]
    if isinstance(value, Table) and isinstance(value.get("init_args"), Table):
        value = value.copy()
        value.put("init_args", _nested(_arguments(value)), value.places.get("init_args"))
    if isinstance(value, str) and key in SLOTS and _is_class_name(value):
        return Table({"class_path": full_name(value)})
    return value


def _as_class(value: object, key: str) -> Table | None:
    """Return a value as a mapping, the name of a class as one without arguments, or ``None`` for any other value."""
    if isinstance(value, str) and key in SLOTS:
        return Table({"class_path": full_name(value)})
    if isinstance(value, Table):
        return value
    return None


# Taking out ----------------------------------------------------------------------------------------------------------


def _take_out_of(tree: Table, key: str, value: object, now: Table) -> None:
    """Take the classes of ``callbacks-: [EMA]`` out of a list of the tree."""
    place = now.places.get(f"{key}-")
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise _at(place, f"{key}- is no list of names of classes, as in [EMA, LoRA]")
    if key in now:
        raise _at(place, f"{key}- takes out of what earlier files give, and beside {key} there is none left")
    for name in names:
        try:
            take_out(tree, key, str(name))
        except ConfigurationError as error:
            head, *rest = str(error).splitlines()
            raise ConfigurationError("\n".join([head, *([f"  {place}"] if place else []), *rest])) from None


def _at(place: Place | None, message: str) -> ConfigurationError:
    return ConfigurationError(f"{place.file}: {message}" if place else message)


def take_out(trainer: Table, key: str, name: str) -> None:
    """Take a class out of a list of the trainer, in place.

    Args:
        trainer: The trainer's part of a config.
        key: ``callbacks`` or ``plugins``.
        name: The class, short or with its package.

    Raises:
        ConfigurationError: If the list does not have the class, or every run needs it.
    """
    target = key
    if key not in trainer and f"{key}+" in trainer:
        target = f"{key}+"
    items = as_list(trainer.get(target))
    package = name.partition(".")[0] if "." in name else ""
    wanted = class_name(name)
    kept: list[object] = []
    found: list[str] = []
    for item in items:
        path = _path(item)
        if class_name(path) == wanted and package in ("", path.partition(".")[0]):
            found.append(path)
        else:
            kept.append(item)
    if wanted in _ALWAYS and all(path.startswith("lit_efficient.") for path in found):
        raise ConfigurationError(f"trainer.{key}: every run has {wanted}: it cannot be taken out")
    if wanted == _LATE:
        kept.append(Table({"class_path": LEFT_OUT, "init_args": Table({"name": wanted})}))
    elif not found:
        there = list(dict.fromkeys(class_name(_path(item)) for item in items))
        raise ConfigurationError(
            f"trainer.{key}: there is no {name!r} to take out{did_you_mean(wanted, there)}\n"
            f"  accepted: {', '.join(there) or 'none'}"
        )
    trainer[target] = kept


def list_of(name: str) -> str:
    """Return which list of the trainer a class belongs to: ``callbacks`` or ``plugins``."""
    last = class_name(name)
    ours = PUBLIC.get(last, "").startswith(_PLUGIN_FOLDERS)
    if ours or last in [*names_in(SHORT["plugins"]), *names_in(ENVIRONMENTS)]:
        return "plugins"
    return "callbacks"


def _path(item: object) -> str:
    """Return the import path of an item: a mapping, a name, or an object that a script has made."""
    if isinstance(item, Mapping):
        return str(item.get("class_path", ""))
    if isinstance(item, str):
        return item
    return f"{type(item).__module__}.{type(item).__name__}"


# Options -------------------------------------------------------------------------------------------------------------


def set_option(tree: Table, name: str, text: str) -> Table:
    """Set the value of an option in a config: ``--optimizer.lr 0.1``.

    Below a class the arguments need no ``init_args``. Below a list the option is of its last item.

    Args:
        tree: The config. It is not changed.
        name: Dotted key, without the dashes. A ``+`` at its end appends to a list.
        text: The value as it was typed. The type of the argument decides later what it is.

    Returns:
        The config with the option.

    Raises:
        ConfigurationError: If a mapping or list in ``text`` is not written as in a file.
    """
    return _set(tree, name.split("."), text, name, 0)


class _Text(str):
    """Value of an option that is a text, even if it looks like a number."""


def _set(tree: Table, parts: Sequence[str], text: str, option: str, depth: int, in_arguments: bool = False) -> Table:
    key = parts[0]
    rest = parts[1:]
    if key == "class_path":
        return _merged_class(tree, Table({"class_path": full_name(text)}))
    if tree.is_class and key not in SPEC:
        annotation = annotation_of(str(tree["class_path"]), parts)
        if annotation == "str" or (annotation in _TEXT_OR_NULL and text not in _NULL[1:]):
            text = _Text(text)
        arguments = _set(_arguments(tree), parts, text, option, 0, in_arguments=True)
        if rest and annotation_of(str(tree["class_path"]), [key]).startswith(("list[", "List[")):
            item = arguments.get(key)  # the first one of an empty list
            arguments.put(key, item if isinstance(item, list) else [item])
        result = tree.copy()
        result.put("init_args", arguments)
        return result
    if not rest:
        slot = "" if in_arguments else slot_of(option)
        return _merge(tree, Table({key: _typed(text, option, depth, slot)}), in_arguments)
    result = tree.copy()
    earlier = tree.get(key)
    slot = "" if in_arguments else key
    inside = in_arguments or key in _ARGUMENTS
    if isinstance(earlier, list) and earlier:
        changed = _set(_as_class(earlier[-1], slot) or Table(), rest, text, option, depth + 1, inside)
        result.put(key, [*earlier[:-1], changed])
        return result
    if f"{key}+" in tree and key not in tree:  # a list that is appended to the parser's default
        return _set(tree, [f"{key}+", *rest], text, option, depth, in_arguments)
    if isinstance(earlier, str) and slot not in SLOTS:
        raise ConfigurationError(f"{option}: no option {rest[0]!r}: {earlier!r} is a name, without fields")
    below = 0 if key in (*SECTIONS, *SPEC) else depth + 1
    changed = _set(_as_class(earlier, slot) or Table(), rest, text, option, below, inside)
    result.put(key, changed)
    return result


def _typed(text: str, option: str, depth: int, slot: str) -> object:
    """Return the value of an option. ``slot`` is its key if the key is in :data:`SLOTS`, or else empty.

    An argument of a class gets the text: its type decides. A field below an argument, a mapping, a list and a class
    are read as YAML.
    """
    if isinstance(text, _Text):
        return str(text)
    if not depth and text[:1] not in ("{", "[") and not slot:
        return text
    if text[:1] == "{" and ":" not in text and text.strip("{ }"):  # a template, as "{epoch}"
        return text
    if slot and full_name(text) != text:
        return text
    try:
        return read_text(text, slot=slot)
    except yaml.MarkedYAMLError:
        return text
    except yaml.YAMLError as error:
        said = re.sub(r": in line 1 and line 1\b| in line 1\b", "", str(error))
        raise ConfigurationError(f"{option}: {said}") from error


def read_file(path: str, text: str | None = None) -> Table:
    """Read a config file.

    Args:
        path: The file.
        text: What is in it, if it is read already.

    Raises:
        ConfigurationError: If the file is no mapping in YAML, or cannot be read.
    """
    try:
        if text is None:
            with open(path, encoding="utf-8-sig") as file:
                text = file.read(MOST_LETTERS + 1)  # a device may have no end
        tree = read_text(text, path)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: it is no UTF-8 text: {error.reason}") from error
    except yaml.YAMLError as error:
        said, _, accepted = str(error).replace('"<unicode string>", ', "").partition(" (accepted: ")
        if not accepted:
            raise ConfigurationError(f"{path}: {said}") from error
        line = re.search(r" in (line \d+)", said)
        where = f"{path}, {line[1]}" if line else path
        raise ConfigurationError(f"{said}\n  in {where}\n  accepted: {accepted.rstrip(')')}") from error
    if not isinstance(tree, Table):
        raise ConfigurationError(f"this is no mapping of keys to values\n  in {path}")
    return tree
