"""Imports only point down: a test reads the imports between the files of the package from their sources."""

import ast
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path

import pytest

from lit_efficient import PUBLIC
from lit_efficient.catalog import PACKAGE, SLOTS

# From top to bottom. Folders on one line do not import each other; files of one folder may.
LAYERS = (
    ("__main__",),
    ("testing", "commands"),
    ("cli",),
    ("evidence",),
    ("export",),
    ("tasks",),
    ("callbacks", "precision", "strategies", "plugins"),
    ("data",),
    ("optimizers",),
    ("mechanisms",),
    ("technique",),
    ("application",),
    ("declaration", "protocol", "catalog"),
    ("models",),
    ("distributed",),
    ("losses",),
    ("surgery",),
    ("files", "internals"),
    ("errors", "traits"),
    ("__init__",),
)
DEPTH = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}
ALONE = ("callbacks", "precision", "strategies", "plugins")  # no file of these imports another
PLAIN = ("models", "losses", "surgery", "files")  # these do not import Lightning
LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
NAME = "lit_efficient"


def violations(package: Path, public: dict[str, str]) -> list[str]:
    """Return the violations of the import rules in a package, one sentence each."""
    trees = {module_of(path, package): ast.parse(path.read_text("utf-8")) for path in package.rglob("*.py")}
    found = {module: set(imported(tree, trees, public)) for module, tree in trees.items()}
    edges = {module: {other for other in others if other in trees} for module, others in found.items()}
    optimizers = {module for name, module in public.items() if module.startswith("optimizers.") and name[0].isupper()}
    problems = [f"{module} has no layer" for module in trees if top(module) not in DEPTH]
    for module, others in edges.items():
        for other in sorted(others - {module}):
            importing = DEPTH.get(top(module), 0)
            imported_ = DEPTH.get(top(other), 0)
            if imported_ < importing or (imported_ == importing and top(module) != top(other)):
                problems.append(f"{module} imports {other}, which is not in a layer below")
            elif top(module) == top(other) and top(module) in ALONE:
                problems.append(f"{module} imports {other}: code that both need belongs into mechanisms")
            elif module in optimizers and other in optimizers:
                problems.append(f"{module} imports {other}, another optimizer")
            elif is_shelf(module) and top(other) == "data" and not is_shelf(other):
                problems.append(f"{module} imports {other}, a DataModule above it")
    problems += [f"imports form a circle: {', '.join(circle)}" for circle in circles(edges)]
    with_lightning = {module for module, others in found.items() if any(top(o) in LIGHTNING for o in others)}
    for module in trees:
        reached = with_lightning & ({module} | reachable(module, edges))
        if top(module) in PLAIN and reached:
            problems.append(f"{module} needs Lightning, by {', '.join(sorted(reached))}")
    return problems


def module_of(path: Path, package: Path) -> str:
    """Return the dotted name of a file: ``callbacks/ema.py`` is ``callbacks.ema``, and an ``__init__`` has its folder's
    name.
    """
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def top(module: str) -> str:
    return module.partition(".")[0]


def is_shelf(module: str) -> bool:
    return module.startswith("data.") and module.count(".") > 1


def imported(
    tree: ast.AST, known: Collection[str] = (), public: Mapping[str, str] = {}, functions: bool = True
) -> Iterator[str]:
    """Yield the modules that a file imports: modules of the package by their place in it, others by their name.

    Args:
        tree: Syntax tree of the file.
        known: Modules of the package.
        public: Public names of the package, and the modules that hold them.
        functions: Whether imports inside of functions count.
    """
    for name in named(tree, functions):
        if name != NAME and not name.startswith(f"{NAME}."):
            yield name
            continue
        inside = name.removeprefix(NAME).removeprefix(".") or "__init__"
        inside = public.get(inside, inside)
        while inside not in known and "." in inside:  # a function or class of a module
            inside = inside.rpartition(".")[0]
        yield inside if inside in known else "__init__"


def named(tree: ast.AST, functions: bool = True) -> Iterator[str]:
    """Yield the full names of a file's imports, without those that only type checkers see."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            nodes += node.orelse
            continue
        if isinstance(node, ast.FunctionDef) and not functions:
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "the package is imported by its name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == NAME:
            yield f"{NAME}.{node.attr}"  # lit_efficient.EMA imports its module
        elif isinstance(node, ast.Call) and "import_module" in (getattr(node.func, n, "") for n in ("id", "attr")):
            yield from (argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant))


def reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    """Return all modules that a module imports directly or indirectly; itself only if it is part of a circle."""
    found: set[str] = set()
    new = edges[start]
    while new:
        found |= new
        new = set().union(*(edges[module] for module in new)) - found
    return found


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules of which each imports all others, directly or indirectly."""
    reach = {module: reachable(module, edges) for module in edges}
    return [list(c) for c in {tuple(sorted(o for o in r if m in reach[o])) for m, r in reach.items() if m in r}]


def test_imports_only_point_down() -> None:
    assert violations(PACKAGE, PUBLIC) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"files/a.py": "from lit_efficient.models import b", "models/b.py": ""}, "files.a imports models.b, which"),
        ({"models/a.py": "def f():\n    import lit_efficient.tasks.b", "tasks/b.py": ""}, "models.a imports tasks.b"),
        ({"models/a.py": "from lit_efficient.tasks.b import f", "tasks/b.py": ""}, "models.a imports tasks.b, which"),
        ({"models/a.py": "from lit_efficient import EMA", "callbacks/ema.py": ""}, "models.a imports callbacks.ema"),
        ({"models/a.py": "lit_efficient.EMA()", "callbacks/ema.py": ""}, "models.a imports callbacks.ema, which"),
        ({"models/a.py": "import_module('lit_efficient.cli')", "cli/__init__.py": ""}, "models.a imports cli, which"),
        ({"files/a.py": "from lit_efficient.internals import b", "internals/b.py": ""}, "files.a imports internals.b,"),
        (
            {
                "data/a.py": "import lit_efficient.data.b",
                "data/b.py": "def f():\n    from lit_efficient.data.c import g",
                "data/c.py": "from lit_efficient.data import a",
                "data/d.py": "import lit_efficient.data.a",
            },
            "circle: data.a, data.b, data.c",
        ),
        ({"callbacks/a.py": "import lit_efficient.callbacks.ema", "callbacks/ema.py": ""}, "belongs into mechanisms"),
        ({"callbacks/a.py": "import lit_efficient.plugins.b", "plugins/b.py": ""}, "callbacks.a imports plugins.b"),
        ({"optimizers/lion.py": "from lit_efficient import AdamB", "optimizers/adam_b.py": ""}, "another optimizer"),
        ({"data/text/a.py": "import lit_efficient.data.b", "data/b.py": ""}, "data.b, a DataModule above it"),
        (
            {"models/a.py": "def f():\n    from lightning.pytorch import Callback"},
            "models.a needs Lightning, by models.a",
        ),
        (
            {"losses/a.py": "import lit_efficient.internals.b", "internals/b.py": "import lightning"},
            "losses.a needs Lightning, by internals.b",
        ),
        ({"helpers.py": ""}, "helpers has no layer"),
    ],
)
def test_what_points_elsewhere_is_found(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    public = {"EMA": "callbacks.ema", "Lion": "optimizers.lion", "AdamB": "optimizers.adam_b"}
    (found,) = violations(tmp_path, public)
    assert message in found


def test_what_points_down_or_is_for_type_checkers_is_not_found(tmp_path: Path) -> None:
    for name, source in {
        "__init__.py": "",
        "errors.py": "",
        "models/a.py": "import torch\nfrom lit_efficient.errors import E\nfrom lit_efficient.models.b import f",
        "models/b.py": "if TYPE_CHECKING:\n    from lit_efficient.tasks.c import C\nelse:\n    C = None",
        "tasks/c.py": "from lit_efficient import __version__\nfrom lit_efficient.models import a, b\nimport lightning",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    assert violations(tmp_path, {}) == []


@pytest.mark.parametrize(("name", "most"), [("EMA", 15), ("LoRA", 49)])
def test_a_technique_needs_few_files(name: str, most: int) -> None:
    """Count the files with statements that are loaded together with the file of a technique."""
    trees = {module_of(path, PACKAGE): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    edges = {module: {*imported(tree, trees, PUBLIC, functions=False)} & {*trees} for module, tree in trees.items()}
    files = sorted(reachable(PUBLIC[name], edges) - {"__init__"})
    assert len(files) <= most, files


def by_hand(source: str) -> set[str]:
    """Return the functions with which a file reads or writes tensors without :mod:`lit_efficient.files`."""
    if not re.search(r"safetensors|torch.*\b(load|save)\b", source):
        return set()
    tree = ast.parse(source)
    found = [*imported(tree)]
    names = {name for name in found if name in ("torch.load", "torch.save") or top(name) == "safetensors"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("load", "save") and isinstance(node.value, ast.Name):
            names |= {f"torch.{node.attr}"} if node.value.id == "torch" else set()
    return names


def test_files_are_read_and_written_in_one_place() -> None:
    """Check that only ``files/`` calls ``torch.load``, ``torch.save`` and safetensors, because it compares
    checksums.
    """
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "files"]
    assert {str(path): found for path in files if (found := by_hand(path.read_text("utf-8")))} == {}
    for source in ("torch.load(f)", "def f():\n    from torch import save", "from safetensors.torch import load_file"):
        assert by_hand(source), source


def test_the_root_is_the_contract() -> None:
    files = sorted(path.stem for path in PACKAGE.glob("*.py"))
    assert len(files) <= 10, files


def test_the_class_of_a_slot_is_found_by_its_name() -> None:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import Callback, LightningDataModule, LightningModule
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import Strategy
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    for_yaml = (
        Callback, LightningDataModule, LightningModule, CheckpointIO, Precision, Strategy, Optimizer, LRScheduler
    )  # fmt: skip
    seen = set()
    for name, module in PUBLIC.items():
        value = getattr(import_module(f"{NAME}.{module}"), name)
        if top(module) in SLOTS and inspect.isclass(value) and issubclass(value, for_yaml):
            folder, *_, file = module.split(".")
            assert file.replace("_", "") == name.lower(), f"{name} is in {module}"
            assert module == f"{folder}.{file}", f"{name} is in a folder of the slot {folder}"
            seen.add(folder)
    assert seen >= {"callbacks", "plugins", "optimizers", "tasks", "data"}
