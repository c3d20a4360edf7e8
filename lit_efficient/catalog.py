"""The list of techniques, read from the source files without importing them.

``python -m lit_efficient techniques`` must answer in a blink, so this module parses the files that
``lit_efficient.PUBLIC`` names with :mod:`ast`: no torch, no Lightning. What a card says is what the file says; there is
no second list to keep up.
"""

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lit_efficient import PUBLIC

PACKAGE = Path(__file__).parent

# A folder is a slot of the YAML.
SLOTS = {
    "callbacks": "trainer.callbacks",
    "precision": "trainer.plugins",
    "plugins": "trainer.plugins",
    "strategies": "trainer.strategy",
    "optimizers": "optimizer",
    "tasks": "model",
    "data": "data",
}
_TECHNIQUES = {"precision", "plugins", "strategies", "optimizers"}  # a callback is one if it says what it saves
_LABELS = ("Saves", "Costs", "Source")


@dataclass(frozen=True)
class Card:
    """What one file says about its class.

    Args:
        name: Name of the class, which is also its short name in YAML.
        slot: Where it goes in the YAML, for example ``trainer.callbacks``.
        module: Module that holds it.
        summary: First sentence of the module's docstring.
        saves: The docstring's ``Saves:`` line, or an empty string.
        costs: The docstring's ``Costs:`` line, or an empty string.
        source: The docstring's ``Source:`` line, or an empty string.
        signature: Arguments of the constructor, as written.
        arguments: The ``Args:`` section of the class docstring.
        phase: Name of the phase in which it is applied, or an empty string.
        conflicts: Classes that it excludes, each with the reason and the way out.
        requires: Classes that it needs, each with the reason.
        is_technique: Whether it saves something, unlike a task, a data module or a progress bar.
    """

    name: str
    slot: str
    module: str
    summary: str
    saves: str = ""
    costs: str = ""
    source: str = ""
    signature: str = ""
    arguments: str = ""
    phase: str = ""
    conflicts: dict[str, str] = field(default_factory=dict)
    requires: dict[str, str] = field(default_factory=dict)
    is_technique: bool = True


def read_cards(public: dict[str, str] = PUBLIC, package: Path = PACKAGE) -> list[Card]:
    """Read the card of every public class that goes into a slot of the YAML, sorted by slot and name.

    Args:
        public: Public names, each with the module (relative to the package) that holds it.
        package: Folder of the package.

    Returns:
        One card a class. Public functions and classes outside the slot folders have none.
    """
    cards = []
    for name, module in public.items():
        path = package / Path(*module.split(".")).with_suffix(".py")
        if module.split(".")[0] in SLOTS and path.is_file():
            card = _read_card(name, module, ast.parse(path.read_text(encoding="utf-8")))
            if card:
                cards.append(card)
    order = [*dict.fromkeys(SLOTS.values()), "lr_scheduler"]
    return sorted(cards, key=lambda card: (not card.is_technique, order.index(card.slot), card.name))


def _read_card(name: str, module: str, tree: ast.Module) -> Card | None:
    node = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)
    if node is None:
        return None
    folder = module.split(".", maxsplit=1)[0]
    bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
    is_scheduler = any(base.endswith("LRScheduler") for base in bases)
    docstring = (ast.get_docstring(tree) or ast.get_docstring(node) or "").replace("``", "`")
    attributes = _class_attributes(node)
    return Card(
        name=name,
        slot="lr_scheduler" if is_scheduler else SLOTS[folder],
        module=f"lit_efficient.{module}",
        summary=_first_paragraph(docstring),
        **{label.lower(): _labelled(docstring, label) for label in _LABELS},
        signature=_signature(node),
        arguments=_arguments_section((ast.get_docstring(node) or "").replace("``", "`")),
        phase=ast.unparse(attributes["phase"]).split(".")[-1].replace("None", "") if "phase" in attributes else "",
        conflicts=_literal_dict(attributes.get("conflicts")),
        requires=_literal_dict(attributes.get("requires")),
        is_technique="Technique" in bases or folder in _TECHNIQUES or bool(_labelled(docstring, "Saves")),
    )


def _class_attributes(node: ast.ClassDef) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            found[statement.target.id] = statement.value
        elif isinstance(statement, ast.Assign):
            found.update({t.id: statement.value for t in statement.targets if isinstance(t, ast.Name)})
    return found


def _literal_dict(value: ast.expr | None) -> dict[str, str]:
    return dict(ast.literal_eval(value)) if value is not None else {}


def _signature(node: ast.ClassDef) -> str:
    init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if init is None:
        return ""
    init.args.args = init.args.args[1:]  # without self
    return ast.unparse(init.args)


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
    """Return what two classes have to do with each other, whichever of the two declares it.

    Returns:
        ``(name, name) -> "conflicts: reason"`` or ``"requires: reason"``; pairs that simply go together are not listed.
    """
    found: dict[tuple[str, str], str] = {}
    for card in cards:
        for other, reason in card.conflicts.items():
            found.setdefault((other, card.name) if (other, card.name) in found else (card.name, other), reason)
    conflicts = {pair: f"conflicts: {reason}" for pair, reason in found.items()}
    requires = {(c.name, other): f"requires: {reason}" for c in cards for other, reason in c.requires.items()}
    return {**requires, **conflicts}
