"""Catalogue of techniques, read from the source files without importing them.

``python -m lit_efficient techniques`` must answer quickly. Therefore this module parses the files of
``lit_efficient.PUBLIC`` with :mod:`ast`, without torch and Lightning. Cards are made from the files alone, so that no
second list has to be maintained.

Other packages register techniques as entry points of :data:`GROUP`, for example ``Clamp = my_package.clamp:Clamp``.
They are listed from metadata and sources. A config that names one imports it, because installing a package that
registers techniques is a decision to trust it. A checkpoint never imports any.
"""

import ast
import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from lit_efficient import PUBLIC
from lit_efficient.errors import ConfigurationError
from lit_efficient.files import configs
from lit_efficient.traits import OF_LIGHTNING, Trait, conflict_of

PACKAGE = Path(__file__).parent
GROUP = "lit_efficient.techniques"

# Folder of a class -> its slot in the YAML.
SLOTS = {
    "callbacks": "trainer.callbacks",
    "precision": "trainer.plugins",
    "plugins": "trainer.plugins",
    "strategies": "trainer.strategy",
    "optimizers": "optimizer",
    "tasks": "model",
    "data": "data",
}
_TECHNIQUES = {
    "precision",
    "plugins",
    "strategies",
    "optimizers",
}  # a callback is a technique if its docstring has a line "Saves:"
# Purposes of techniques and their titles. A technique is listed under the first purpose that it names.
PURPOSES = {
    "memory": "less memory",
    "speed": "more speed",
    "quality": "better quality",
    "safety": "safety: nothing is lost, nothing goes wrong unnoticed",
}
_LABELS = ("Saves", "Costs", "Source")


@dataclass(frozen=True)
class Card:
    """Description of a class, as its file gives it.

    Args:
        name: Name of the class, which is also its short name in YAML.
        slot: Slot in the YAML, for example ``trainer.callbacks``.
        module: Module that defines the class.
        summary: First sentence of the module's docstring.
        facts: ``saves``, ``costs`` and ``source``, from the lines of the docstring that begin with these labels, and
            ``phase``; each may be an empty string. For each of :data:`PURPOSES` that the class serves, rank and reason.
        signature: Arguments of the constructor, as written.
        arguments: The ``Args:`` section of the class docstring.
        conflicts: Names of classes, and traits, that it excludes, each with the reason and the way out.
        traits: Names of its traits (:class:`lit_efficient.traits.Trait`), which may exclude other classes.
        is_technique: Whether it is a technique, unlike a task, a data module or a progress bar.
        distribution: Name and version of another package that registers the class; empty for this package.
    """

    name: str
    slot: str
    module: str
    summary: str
    facts: dict[str, str] = field(default_factory=dict)
    signature: str = ""
    arguments: str = ""
    conflicts: Mapping[str | Trait, str] = field(default_factory=dict)
    traits: frozenset[Trait] = frozenset()
    is_technique: bool = True
    distribution: str = ""

    @property
    def is_block(self) -> bool:
        """Return whether the class is a group of arguments for other classes, without a slot of its own."""
        return "block" in self.facts


def helping(cards: Iterable[Card], purpose: str) -> list[tuple[str, str]]:
    """Return names and reasons of techniques for a purpose, those that cost least first, without rank 0."""
    found = [(card.facts[purpose].partition(". "), card) for card in cards if purpose in card.facts]
    ranked = sorted(found, key=lambda entry: int(entry[0][0]))
    return [(card.name, reason) for (rank, _, reason), card in ranked if rank != "0"]


def overlay_of(card: Card) -> str:
    """Return the name of the config that adds the class to a run, or an empty string. Other packages' have none."""
    name = card.module.rpartition(".")[2]
    path = configs.known().get(name)
    if path and path.parent.name == "techniques" and card.module.startswith("lit_efficient."):
        return name
    return ""


def purpose_of(card: Card) -> str:
    """Return the first of :data:`PURPOSES` that a card names, or an empty string."""
    return next((name for name in card.facts if name in PURPOSES), "")


def arguments_of(card: Card) -> list[dict[str, str]]:
    """Return name, type, default and explanation of each argument. Texts that the file does not give are empty."""
    (function,) = ast.parse(f"def f({card.signature}): ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    named = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [
        *[None] * (len(named) - len(given.defaults)),
        *given.defaults,
        *given.kw_defaults,
    ]
    help_of = dict(re.findall(r"^(\w+): (.*(?:\n(?: .*)?)*)", card.arguments, re.MULTILINE))
    return [
        {
            "name": one.arg,
            "type": ast.unparse(one.annotation) if one.annotation else "",
            "default": ast.unparse(default) if default else "",
            "help": " ".join(help_of.get(one.arg, "").split()),
        }
        for one, default in zip([*named, *given.kwonlyargs], defaults)
    ]


def read_cards(public: dict[str, str] = PUBLIC, package: Path = PACKAGE) -> list[Card]:
    """Read the card of every public class that goes into a slot of the YAML, sorted by slot and name.

    Args:
        public: Public names, each with the module that defines it, relative to the package.
        package: Folder of the package.

    Returns:
        One card for each class. Public functions, and classes outside the folders of slots, have none.
    """
    cards = []
    for name, module in public.items():
        path = package / Path(*module.split(".")).with_suffix(".py")
        if module.split(".")[0] in SLOTS and path.is_file():
            slot = SLOTS[module.split(".")[0]]
            card = _read_card(name, f"lit_efficient.{module}", slot, path)
            if card:
                cards.append(card)
    order = [*dict.fromkeys(SLOTS.values()), "lr_scheduler"]
    return sorted(cards, key=lambda card: (not card.is_technique, order.index(card.slot), card.name))


@functools.cache
def _read_card(name: str, module: str, slot: str, path: Path, distribution: str = "") -> Card | None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)
    if node is None:
        return None
    bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
    if any(base.endswith("LRScheduler") for base in bases):
        slot = "lr_scheduler"
    elif any(base.endswith("Data") for base in bases):  # a DataModule that runs a task, above the folder of data
        slot = "data"
    elif distribution and any(base.endswith("Optimizer") for base in bases):
        slot = "optimizer"
    docstring = (ast.get_docstring(tree) or ast.get_docstring(node) or "").replace("``", "`")
    attributes = _class_attributes(node)
    phase = ""
    if "phase" in attributes:
        phase = ast.unparse(attributes["phase"]).split(".")[-1].replace("None", "")
    if "helps" in attributes:
        helps = ast.literal_eval(attributes["helps"])
    else:
        helps = {}
    helps = {purpose: f"{rank}. {reason}" for purpose, (rank, reason) in helps.items()}
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        helps["block"] = ""  # not printed
    beside_its_owner = "block" in helps and [*PUBLIC.values()].count(module.removeprefix("lit_efficient.")) > 1
    return Card(
        name=name,
        slot=slot,
        module=module,
        summary=_first_paragraph(docstring),
        facts={label.lower(): _labelled(docstring, label) for label in _LABELS} | {"phase": phase} | helps,
        signature=_signature(node, tree),
        arguments=_arguments_section((ast.get_docstring(node) or "").replace("``", "`")),
        conflicts=_conflicts(attributes.get("conflicts")),
        traits=_traits(attributes.get("traits")),
        is_technique=not beside_its_owner
        and bool(
            distribution or "Technique" in bases or module.split(".")[1] in _TECHNIQUES or _labelled(docstring, "Saves")
        ),
        distribution=distribution,
    )


def _class_attributes(node: ast.ClassDef) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            found[statement.target.id] = statement.value
        elif isinstance(statement, ast.Assign):
            found.update({t.id: statement.value for t in statement.targets if isinstance(t, ast.Name)})
    return found


def _conflicts(value: ast.expr | None) -> dict[str | Trait, str]:
    """Return a dictionary as it is written, in which ``**Other.conflicts`` means those of another public class."""
    found: dict[str | Trait, str] = {}
    if isinstance(value, ast.Dict):
        for key, item in zip(value.keys, value.values):
            if key is not None:
                trait = _trait(key)
                found[ast.literal_eval(key) if trait is None else trait] = ast.literal_eval(item)
                continue
            name = ast.unparse(item).partition(".")[0]
            if name in PUBLIC:
                other = read_cards({name: PUBLIC[name]})
            else:
                other = []
            for card in other:
                found |= card.conflicts
    return found


def _traits(value: ast.expr | None) -> frozenset[Trait]:
    """Return the traits in an expression such as ``frozenset({Trait.ADAPTER})``."""
    if value is not None:
        found = [_trait(part) for part in ast.walk(value)]
    else:
        found = []
    return frozenset(trait for trait in found if trait is not None)


def _trait(value: ast.AST) -> Trait | None:
    if isinstance(value, ast.Attribute) and ast.unparse(value.value) == "Trait":
        return Trait.__members__.get(value.attr)
    return None


def _signature(node: ast.ClassDef, tree: ast.Module) -> str:
    """Return the arguments of a class's constructor, or of the constructor that it inherits in this package.

    Args:
        node: The class.
        tree: The file that defines the class.
    """
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is None:
        inherited = (_signature(*found) for found in map(functools.partial(_base, tree), node.bases) if found)
        return next(filter(None, inherited), "")
    given = copy.copy(init.args)
    given.args = given.args[1:]  # without self
    return ast.unparse(given)


def _base(tree: ast.Module, base: ast.expr) -> tuple[ast.ClassDef, ast.Module] | None:
    """Return the definition of a base class and its file; ``None`` for classes of other packages."""
    name = ast.unparse(base)
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and statement.name == name:
            return statement, tree
        if not isinstance(statement, ast.ImportFrom) or name not in [alias.name for alias in statement.names]:
            continue
        package, *parts = (statement.module or "").split(".")
        path = PACKAGE.joinpath(*parts).with_suffix(".py")
        if package == "lit_efficient" and path.is_file():
            return _base(ast.parse(path.read_text(encoding="utf-8")), base)
    return None


def _first_paragraph(docstring: str) -> str:
    return " ".join(docstring.strip().split("\n\n")[0].split())


def _labelled(docstring: str, label: str) -> str:
    """Return the text after ``label:``, which goes on until the next label, an indented formula or an empty line."""
    words: list[str] = []
    inside = False
    for line in docstring.splitlines():
        starts = next((other for other in _LABELS if line.startswith(f"{other}:")), None)
        if starts or not line.strip():
            inside = starts == label
        if inside:
            words += line.removeprefix(f"{label}:").split()
    return " ".join(words)


def _arguments_section(docstring: str) -> str:
    lines = docstring.splitlines()
    if "Args:" not in lines:
        return ""
    start = lines.index("Args:") + 1
    stop = next((i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith(" ")), len(lines))
    return inspect.cleandoc("\n" + "\n".join(lines[start:stop]))


def pairs(cards: Iterable[Card]) -> dict[tuple[str, str], str]:
    """Return the pairs of classes that exclude each other, by name or by their traits.

    Returns:
        ``(name, name) -> "conflicts: reason"`` or ``"conflicts if Name(argument=...): reason"``.
    """
    cards = list(cards)
    conflicts: dict[tuple[str, str], str] = {}
    for card in cards:
        for key, reason in card.conflicts.items():
            if isinstance(key, Trait):
                continue
            other = key.partition("(")[0]
            pair = (card.name, other)
            if (other, card.name) in conflicts:
                pair = (other, card.name)
            always = key == other and not conflicts.get(pair, "").startswith("conflicts:")
            if always or pair not in conflicts:
                conflicts[pair] = f"conflicts: {reason}" if key == other else f"conflicts if {key}: {reason}"
    known = {card.name: card.traits for card in cards}
    for name, traits in OF_LIGHTNING.items():
        known.setdefault(name, traits)
    for card in cards:
        for other, traits in known.items():
            pair = (card.name, other)
            if (other, card.name) in conflicts:
                pair = (other, card.name)
            if other == card.name or conflicts.get(pair, "").startswith("conflicts:"):
                continue
            reason = next((text for key, text in card.conflicts.items() if key in traits), "")
            reason = reason or conflict_of(card.name, card.traits, other, traits)
            if reason:
                conflicts[pair] = f"conflicts: {reason}"
    return conflicts


# Techniques of other packages ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registered:
    """Entry point of another package.

    Args:
        path: Import path of the class, for example ``my_package.clamp.Clamp``.
        owner: Name and version of the package.
    """

    path: str
    owner: str


@functools.cache
def registered() -> dict[str, tuple[Registered, ...]]:
    """Return the registered techniques of installed packages by name, from metadata alone."""
    found: dict[str, tuple[Registered, ...]] = {}
    for point in entry_points(group=GROUP):
        if point.dist:
            owner = f"{point.dist.name} {point.dist.version}"
        else:
            owner = "an unknown package"
        found[point.name] = (*found.get(point.name, ()), Registered(point.value.replace(":", "."), owner))
    return found


def third_party(name: str) -> Registered | None:
    """Return the registered technique of another package with this name, unless it is a name of ours.

    Raises:
        ConfigurationError: If two packages register the name, or if it is not the name of the class.
    """
    known = registered().get(name, ())
    if name in PUBLIC or not known:
        return None
    owners = " and ".join(one.owner for one in known)
    if len(known) > 1:
        raise ConfigurationError(f"{name} is registered by {owners}: uninstall one, or write the class's import path")
    *module, last = known[0].path.split(".")
    if last != name or not module or not all(part.isidentifier() for part in (*module, last)):
        raise ConfigurationError(
            f"{owners} registers {known[0].path} as {name!r}: write my_package.module:{name}, as conflicts "
            "and checkpoints go by the name of the class"
        )
    return known[0]


def read_third_party() -> tuple[list[Card], list[str]]:
    """Return the cards of other packages' techniques, and a sentence for each name that cannot be used."""
    cards, refused = [], []
    for name, known in sorted(registered().items()):
        try:
            one = third_party(name)
        except ConfigurationError as error:
            refused.append(str(error))
            continue
        if one is None:
            refused.append(f"{name} of {' and '.join(one.owner for one in known)} is not used: the name is ours")
            continue
        module, slot, card = one.path.rpartition(".")[0], SLOTS["callbacks"], None
        with contextlib.suppress(
            OSError, SyntaxError, ValueError
        ):  # a technique whose source cannot be read is still listed
            path = source(module)
            card = None
            if path:
                card = _read_card(name, module, slot, path, one.owner)
        cards.append(card or Card(name, slot, module, summary="", distribution=one.owner))
    return cards, refused


def source(module: str) -> Path | None:
    """Return the file of a module, without importing the module; only its top-level package is searched for."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    if spec is None:
        return None
    places = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
    if not rest and spec.origin:
        files = [Path(spec.origin)]
    return next((file for file in files if file.is_file()), None)
