"""Class names and keys of a config, checked before torch is imported.

A misspelt name is answered at once, with the nearest one. The check knows what the sources say. Whatever they leave
open, and the types of values, is left to jsonargparse.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from lit_efficient import PUBLIC
from lit_efficient.cli.arguments import Command
from lit_efficient.cli.signatures import (
    OPTIMIZERS,
    SHORT,
    Arguments,
    ClassSource,
    blocks_of,
    fields_of,
    find_class,
    known_names,
    method_keys,
    missing_module,
    module_source,
    names_in,
    signature,
    trainer_keys,
)
from lit_efficient.cli.tree import LISTS, SECTIONS, SLOTS, SPEC, Place, Table, as_list, class_name
from lit_efficient.cli.words import plain
from lit_efficient.errors import ConfigurationError, did_you_mean, install_line

# Packages whose classes a config may name. The package that defines an object counts like the one that it is found in:
# `lightning.pytorch.cli.os.system` is refused like `os.system`.
ALLOWED_IMPORTS = (
    "lit_efficient",
    "lightning.pytorch",
    "lightning.fabric.plugins",  # where Lightning defines the environments and checkpoint IOs that it re-exports
    "pytorch_lightning",
    "torch.optim",
    "torch.nn",
    "torchmetrics",
    *sorted({path.partition(".")[0] for path in OPTIMIZERS.values()}),
)
_OPTIONS = ("config", "print_config", "allow_import", "without", "help")  # they are no keys of a config
_PROFILERS = ("simple", "advanced", "pytorch", "xla")  # names that Lightning's Trainer takes, besides classes
_FLAGS = ("--print_config", "--help", "-h")


def elsewhere(owner: str, name: str) -> str:
    """Return the end of a sentence with the equivalent here of an option of another trainer, or an empty string.

    Args:
        owner: Name of the class that the option was given to.
        name: The option.
    """
    here = json.loads(Path(__file__).parent.with_name("names_elsewhere.json").read_text("utf-8"))
    found = here.get(f"{owner}.{name}", here.get(name, ""))
    if found.startswith("none, "):
        return f": it has no counterpart here{found.removeprefix('none')}"
    if found:
        return f": here it is {found}"
    return ""


def check_command(command: Command) -> None:
    """Check the names of a command line of ``fit``, ``validate``, ``test`` or ``predict``.

    Raises:
        ConfigurationError: For the first unknown name, with its place, the nearest name and the accepted ones.
    """
    subcommand = command.subcommand or "fit"
    accepted = ["seed_everything", *SECTIONS, *method_keys(subcommand)]
    nested = _arguments(command.tree)
    if subcommand != "fit":
        accepted = [key for key in accepted if key not in ("optimizer", "lr_scheduler")] + ["optimizer", "lr_scheduler"]
    trainer = trainer_keys()
    for word in command.rest:
        name = plain(word.partition("=")[0])
        if name not in _FLAGS and not name.endswith(".help"):
            key = name.removeprefix("--")
            near = did_you_mean(key, _OPTIONS)
            if near and not elsewhere("Trainer", key):
                raise _error(f"no option {key!r}{near}", None, accepted)
            raise _unknown(key, "", accepted, trainer, nested, None)
    _check_keys(command.tree, "", accepted, trainer, nested)
    section = command.tree.get("trainer")
    if isinstance(section, Table):
        _check_keys(section, "trainer.", trainer, accepted, nested)
    command.unlikely = check_classes(command.tree, knows_others=bool(command.packages))


def check_classes(tree: Table, knows_others: bool) -> set[str]:
    """Check the classes in a config and their arguments.

    Args:
        tree: The config.
        knows_others: True if classes of other packages may be named by their short names.

    Returns:
        Dataclasses that are not meant: where an argument takes one of several, the fields tell which one it is.

    Raises:
        ConfigurationError: As :func:`check_command` does.
    """
    checker = _Classes(knows_others)
    for slot in SECTIONS[1:]:
        checker.check_slot(tree.get(slot), slot, slot, tree.places.get(slot))
    trainer = tree.get("trainer")
    if not isinstance(trainer, Table):
        return checker.unlikely
    for key, value in trainer.items():
        name = str(key).rstrip("+")
        if name == "profiler" and isinstance(value, str):
            _check_profiler(value, trainer.places.get(key), knows_others)
        for item in as_list(value) if name in (*LISTS, "logger") else [value]:
            checker.check_slot(item, f"trainer.{name}", name, trainer.places.get(key))
    return checker.unlikely


def _check_profiler(value: str, place: Place | None, knows_others: bool) -> None:
    """Check a profiler that is given by name: one of Lightning's words, or a class."""
    classes = names_in(SHORT["profiler"])
    if value in (*_PROFILERS, "null", "") or class_name(value) in classes or "." in value:
        return
    if knows_others and not value.islower():  # it may be the short name of a class of the user's
        return
    near = did_you_mean(value, [*_PROFILERS, *classes])
    raise _error(f"trainer.profiler: there is no profiler {value!r}{near}", place, (*_PROFILERS, *classes))


def _arguments(tree: Table) -> dict[str, str]:
    """Return the arguments of the classes of ``model`` and ``data``, with their full names."""
    found: dict[str, str] = {}
    for slot in ("data", "model"):
        spec = tree.get(slot)
        known = None
        if isinstance(spec, Table) and spec.is_class:
            known = signature(str(spec["class_path"]))
        if known is not None:
            found |= {name: f"{slot}.{name}" for name in known.arguments}
    return found


def _check_keys(table: Table, prefix: str, accepted: list[str], others: list[str], nested: Mapping[str, str]) -> None:
    for key in table:
        name = str(key).removesuffix("+")
        if name not in accepted and not (name == "$schema" and not prefix):
            raise _unknown(name, prefix, accepted, others, nested, table.places.get(key))


def _unknown(
    name: str,
    prefix: str,
    accepted: list[str],
    others: list[str],
    nested: Mapping[str, str],
    place: Place | None,
) -> ConfigurationError:
    """Return the error of a key at the top of a config or of the trainer."""
    known = elsewhere("Trainer", name.rpartition(".")[2])
    head, dot, rest = name.partition(".")
    if head in nested and head not in others and not known:
        return _error(f"no option '{prefix}{name}', did you mean '{nested[head]}{dot}{rest}'?", place)
    near = did_you_mean(head, accepted)
    if near and dot:  # the section is misspelt, and the key in it is not
        near = near.replace("'?", f".{rest}'?")
    elif near:
        near = near.replace("'", f"'{prefix}", 1)
    else:
        near = did_you_mean(name, others)
        if near and not prefix:
            near = near.replace("'", "'trainer.", 1)
    if known and not (dot and near):
        return _error(f"no option '{prefix}{name}'{known}", place)
    return _error(f"no option '{prefix}{name}'{near}", place, accepted)


def _error(message: str, place: Place | None, accepted: Collection[str] = ()) -> ConfigurationError:
    lines = [message]
    if place is not None and place.file:
        lines.append(f"  {place}")
    if accepted:
        lines.append(f"  accepted: {', '.join(accepted)}")
    return ConfigurationError("\n".join(lines))


class _Classes:
    """Checks classes and their arguments; see :func:`check_classes`."""

    def __init__(self, knows_others: bool) -> None:
        self.knows_others = knows_others
        self.unlikely: set[str] = set()

    def check_slot(self, value: object, slot: str, name: str, place: Place | None) -> None:
        """Check the value of a key that takes a class.

        Args:
            value: The value.
            slot: Dotted key.
            name: Last part of the key.
            place: Where the key is written.
        """
        if isinstance(value, str):
            # Strategies have names that are no classes, as `ddp`: none of them begins with a capital letter.
            if name in LISTS or name in SECTIONS or (name in SLOTS and value[:1].isupper()):
                self._check_class(value, slot, place)
        elif isinstance(value, Table):
            self._check_spec(value, slot, "")

    def _check_spec(self, spec: Table, slot: str, inner: str) -> None:
        """Check a class and its arguments; ``inner`` are the arguments on the way from the slot to the class."""
        if not spec.is_class:
            return
        path = str(spec["class_path"])
        self._check_class(path, slot, spec.places.get("class_path"))
        known = signature(path)
        arguments = spec.get("init_args")
        if known is None or not isinstance(arguments, Table):
            return
        name = class_name(path)
        head = f"{slot}: {name}{inner}"
        if not known.is_open:
            _check_arguments(arguments, known.arguments, head, name)
        self._check_values(arguments, known.arguments, slot, inner, head, "")

    def _check_values(self, given: Table, accepted: Arguments, slot: str, inner: str, head: str, group: str) -> None:
        """Check the values of arguments: classes, and fields of dataclasses.

        Args:
            given: Arguments by name.
            accepted: What is accepted there.
            slot: Key of the config that has the class.
            inner: Arguments on the way from the slot.
            head: Beginning of a message.
            group: Argument of the class named in ``head`` whose fields these are, with a dot at its end.
        """
        for key, value in given.items():
            name = str(key).removesuffix("+")
            for item in as_list(value):
                if isinstance(item, Table) and item.is_class:
                    self._check_spec(item, slot, f"{inner}.{name}")
            annotation, module = accepted.get(name, (None, None))
            if not isinstance(value, Table) or module is None or not value.keys().isdisjoint(SPEC):
                continue
            blocks = blocks_of(annotation, module) or []
            best = _best_block(blocks, value)
            fields = fields_of(best) if best else None
            if best is None or fields is None:
                continue
            if len(blocks) == 1:
                _check_arguments(value, fields, head, best.name, f"{group}{name}.")
                self._check_values(value, fields, slot, f"{inner}.{name}", head, f"{group}{name}.")
            else:
                head_of_block = f"{slot}: {best.name}{inner}.{name}"
                _check_arguments(value, fields, head_of_block, best.name)
                self._check_values(value, fields, slot, f"{inner}.{name}", head_of_block, "")
                self.unlikely |= {block.name for block in blocks if block.name != best.name}

    def _check_class(self, path: str, where: str, place: Place | None) -> None:
        """Check that a class exists, as far as the sources tell."""
        module, _, name = path.rpartition(".")
        if not all(part.isidentifier() for part in path.split(".")):
            near = did_you_mean(path.partition("(")[0], known_names())
            hub = " (a model's name on a hub is the value of name_or_path)"
            raise _error(f"{where}: {path!r} is no class{hub if '/' in path else near}", place)
        if not module:
            near = did_you_mean(path, known_names())
            if near and not self.knows_others:
                raise _error(f"{where}: there is no class {path!r}{near}", place)
            return
        top = missing_module(path)
        if top:
            near = did_you_mean(top, {allowed.partition(".")[0] for allowed in ALLOWED_IMPORTS})
            if path in OPTIMIZERS.values():
                near = f": {install_line(top.replace('_', '-'))}"
            raise _error(f"{where}: {name}: there is no module {top!r}{near}", place)
        trusted = f"{module}.".startswith(("lit_efficient.", "lightning.pytorch.", "torch.optim."))
        source = module_source(module) if trusted else None
        if source is None or find_class(path) is not None or name in source.values:
            return
        if module == "lit_efficient":
            known = [one for one in PUBLIC if one[:1].isupper()]
        else:
            known = names_in(module)
        near = did_you_mean(name, known)
        if near and name not in known and name not in source.imports:
            raise _error(f"{where}: {name}: there is no {name!r} in {module}{near}", place)


def _check_arguments(given: Table, accepted: Arguments, head: str, owner: str, group: str = "") -> None:
    """Check the names of arguments of a class, or of the fields of one of its arguments."""
    for key in given:
        name = str(key).removesuffix("+")
        if name in accepted:
            continue
        here = elsewhere(owner, name)
        near = here or _grouped(name, accepted) or did_you_mean(name, [*accepted, *SPEC]).replace("'", f"'{group}", 1)
        raise _error(f"{head}: no option '{group}{name}'{near}", given.places.get(key), () if here else accepted)


def _grouped(name: str, accepted: Arguments) -> str:
    """Return the suggestion for a field that was given without its group: ``max_rows`` for ``rows.max_rows``."""
    for argument, (annotation, module) in accepted.items():
        for block in blocks_of(annotation, module) or []:
            if name in (fields_of(block) or {}):
                return f", did you mean '{argument}.{name}'?"
    return ""


def _best_block(blocks: list[ClassSource], value: Mapping[object, object]) -> ClassSource | None:
    """Return the dataclass that takes most of the keys of a mapping."""
    best: ClassSource | None = None
    most = (-1, False, False)
    first = str(next(iter(value), ""))
    for block in blocks:
        fields = fields_of(block)
        if fields is None:
            return None
        # Of two that take as many keys, it is the one that takes the first key, or a similar one.
        fit = (sum(str(key) in fields for key in value), first in fields, bool(did_you_mean(first, fields)))
        if fit > most:
            best = block
            most = fit
    return best
