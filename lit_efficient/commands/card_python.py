"""Lines of Python on a technique's card, derived from its source. Uses only the standard library."""

import ast

from lit_efficient import PUBLIC
from lit_efficient.catalog import Card, source

# Modules whose classes are bases of all techniques.
_CONTRACT = ("lit_efficient.declaration", "lit_efficient.technique", "lit_efficient.application")
_IN_RUNS = {"prepare_parameters", "sample_weights", "extra_loss", "after_step"}  # methods that only a trainer calls


def python_lines(card: Card) -> list[str]:
    """Return the lines that use a technique in Python; required arguments appear as variables.

    ``apply`` is shown for techniques that do all of their work on the network, and ``restore`` for techniques whose
    checkpoints ``load_from_checkpoint`` cannot load, such as adapters and averages.
    """
    key = card.slot.rpartition(".")[2]
    path = source(card.module)
    if path is None or key not in ("callbacks", "plugins", "strategy", "optimizer", "lr_scheduler"):
        return []
    defined = _defined(card.name, ast.parse(path.read_text(encoding="utf-8")))
    applies = "transform" in defined and not defined.keys() & _IN_RUNS
    restores = "average" in defined or "weights" in _texts(defined.get("alters"))
    needed = dict.fromkeys([*_without_default(card.signature), *_texts(defined.get("needs"))])
    part = f"{card.name}({', '.join(f'{name}={name}' for name in needed)})"
    ours = [] if card.distribution else [card.name]  # names to import from lit_efficient
    if card.distribution:
        lines = [f"from {card.module} import {card.name}"]
    else:
        lines = []
    if key == "optimizer":
        uses = [f"optimizer = {card.name}(module.parameters())  # returned by configure_optimizers"]
    elif key == "lr_scheduler":
        uses = [f"lr_scheduler = {part}  # returned by configure_optimizers with the interval 'step'"]
    elif applies:
        uses = [f"apply(module, [{part}])  # or in a run: Trainer({key}=[{part}])"]
        ours.append("apply")
    else:
        lines.insert(0, "from lightning.pytorch import Trainer")
        uses = [f"trainer = Trainer({key}={part})" if key == "strategy" else f"trainer = Trainer({key}=[{part}])"]
    if restores:
        uses.append('module = restore(new_module, "best.ckpt")  # new_module: a new instance of your class')
        ours.append("restore")
    if ours:
        lines.append(f"from lit_efficient import {', '.join(ours)}")
    return lines + uses


def _defined(name: str, tree: ast.Module) -> dict[str, ast.expr]:
    """Return attributes and methods that a class and its bases define, without the bases of all techniques."""
    node = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)
    if node is None:  # the class is imported
        return _defined_elsewhere(name, tree)
    found: dict[str, ast.expr] = {}
    for base in reversed([ast.unparse(base).split(".")[-1] for base in node.bases]):
        if base != name:
            found |= _defined(base, tree)
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            found[statement.name] = ast.Name(statement.name)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            found[statement.target.id] = statement.value
        elif isinstance(statement, ast.Assign):
            found |= {target.id: statement.value for target in statement.targets if isinstance(target, ast.Name)}
    return found


def _defined_elsewhere(name: str, tree: ast.Module) -> dict[str, ast.expr]:
    for statement in tree.body:
        if not isinstance(statement, ast.ImportFrom) or name not in {alias.name for alias in statement.names}:
            continue
        module = statement.module or ""
        if module == "lit_efficient" and name in PUBLIC:
            module = f"lit_efficient.{PUBLIC[name]}"
        if module.startswith("lit_efficient.") and not module.startswith(_CONTRACT):
            path = source(module)
            if path is not None:
                return _defined(name, ast.parse(path.read_text(encoding="utf-8")))
    return {}


def _texts(value: ast.expr | None) -> list[str]:
    """Return the texts in a tuple literal; the value of other expressions is unknown."""
    return [part.value for part in getattr(value, "elts", ()) if isinstance(getattr(part, "value", None), str)]


def _without_default(signature: str) -> list[str]:
    (function,) = ast.parse(f"def f({signature}): ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    named = [one for one, default in zip(given.kwonlyargs, given.kw_defaults) if default is None]
    return [one.arg for one in (*given.args[: len(given.args) - len(given.defaults)], *named)]
