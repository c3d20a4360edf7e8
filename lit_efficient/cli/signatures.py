"""Constructor arguments and class names, read from source files without importing them.

Importing torch and Lightning takes seconds, and a misspelt name should be reported before that. Everything in this
module parses files with :mod:`ast`. Whatever the sources do not state plainly counts as unknown and is left to
jsonargparse, which imports the classes.
"""

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TypeAlias

from lit_efficient import PUBLIC
from lit_efficient.catalog import registered, source, third_party

# Modules whose classes a config may name without their package, by the key of the config that takes them.
SHORT = {
    "callbacks": "lightning.pytorch.callbacks",
    "logger": "lightning.pytorch.loggers",
    "plugins": "lightning.pytorch.plugins",
    "profiler": "lightning.pytorch.profilers",
    "strategy": "lightning.pytorch.strategies",
    "optimizer": "torch.optim",
    "lr_scheduler": "torch.optim.lr_scheduler",
}
ENVIRONMENTS = "lightning.pytorch.plugins.environments"  # plugins, too: SLURMEnvironment and others
# torch's class of this name has no `monitor`, which Lightning needs.
_ALIASES = {"ReduceLROnPlateau": "lightning.pytorch.cli.ReduceLROnPlateau"}
# Optimizers of other packages, which a config may name without their package.
OPTIMIZERS = {
    "CAME": "came_pytorch.CAME",
    "Prodigy": "prodigyopt.Prodigy",
    "DAdaptAdaGrad": "dadaptation.DAdaptAdaGrad",
    "DAdaptAdam": "dadaptation.DAdaptAdam",
    "DAdaptAdan": "dadaptation.DAdaptAdan",
    "DAdaptLion": "dadaptation.DAdaptLion",
    "DAdaptSGD": "dadaptation.DAdaptSGD",
    "SOAP": "pytorch_optimizer.SOAP",
}
_PLAIN = {"int", "float", "str", "bool", "None", "Path", "PathLike"}
_CONTAINERS = {"list", "List", "Sequence", "Iterable", "tuple", "Tuple"}
_UNIONS = {"Union", "Optional"}
_WITHOUT_ARGUMENTS = {"ABC", "Generic", "Protocol", "object"}  # bases
_DECORATORS = {"checks_types", "dataclass", "final", "runtime_checkable", "total_ordering"}  # they keep the constructor


@dataclass
class Source:
    """One module file.

    Args:
        name: Dotted name of the module.
        is_package: True for an ``__init__.py``, from which relative imports start.
    """

    name: str
    is_package: bool
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)  # local name -> dotted path
    values: dict[str, ast.expr] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)  # modules of `from x import *`

    def absolute(self, statement: ast.ImportFrom) -> str:
        """Return the dotted name of the module that a ``from`` statement imports from."""
        if not statement.level:
            return statement.module or ""
        parts = self.name.split(".")
        keep = len(parts) - statement.level + self.is_package
        return ".".join([*parts[:keep], *filter(None, [statement.module])])


@dataclass
class ClassSource:
    """A class definition and the module that holds it."""

    module: Source
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return self.node.name


Arguments: TypeAlias = dict[str, tuple[ast.expr | None, Source]]
"""Arguments by name, each with its annotation and the module where the annotation is written."""


@dataclass
class Signature:
    """Arguments that a constructor takes.

    ``is_open`` is true if the constructor may take arguments that the source does not name. Those of its bases are
    among ``arguments`` then.
    """

    arguments: Arguments
    is_open: bool = False


@functools.cache
def module_source(name: str) -> Source | None:
    """Parse a module's file. Return ``None`` for a module that has no Python file or cannot be parsed."""
    path = source(name)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    found = Source(name, path.name == "__init__.py")
    _read_statements(tree.body, found)
    return found


def _read_statements(statements: list[ast.stmt], found: Source) -> None:
    for statement in statements:
        if isinstance(statement, ast.ClassDef):
            found.classes[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom):
            origin = found.absolute(statement)
            for alias in statement.names:
                if alias.name == "*":
                    found.stars.append(origin)
                else:
                    found.imports[alias.asname or alias.name] = f"{origin}.{alias.name}"
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                found.imports[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            found.values[statement.targets[0].id] = statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            found.values[statement.target.id] = statement.value
        elif isinstance(statement, ast.If | ast.Try):
            # Names under TYPE_CHECKING or behind a test for a package are still the names of annotations.
            _read_statements([*statement.body, *statement.orelse], found)


@functools.cache
def find_class(path: str) -> ClassSource | None:
    """Return the definition of the class at a dotted path, or ``None`` if the sources do not lead to one."""
    return _find_class(path, 0)


def _find_class(path: str, depth: int) -> ClassSource | None:
    module, _, name = path.rpartition(".")
    if not module or depth > 10:  # imports may go round in a circle
        return None
    if module == "lit_efficient" and name in PUBLIC:
        module = f"lit_efficient.{PUBLIC[name]}"
    found = module_source(module)
    if found is None:
        return None
    if name in found.classes:
        return ClassSource(found, found.classes[name])
    if name in found.imports:
        return _find_class(found.imports[name], depth + 1)
    for star in found.stars:
        definition = _find_class(f"{star}.{name}", depth + 1)
        if definition is not None:
            return definition
    return None


def names_in(module: str) -> list[str]:
    """Return the names of the classes that a module defines or imports from its own package.

    A name with a capital letter is taken for a class: only the module's own file is read.
    """
    found = module_source(module)
    if found is None:
        return []
    package = f"{module.partition('.')[0]}."
    names = [*found.classes, *(name for name, path in found.imports.items() if path.startswith(package))]
    for star in found.stars:
        names += names_in(star)
    return [name for name in names if name[:1].isupper()]


@functools.cache
def short_names() -> dict[str, str]:
    """Return the import path of every class of Lightning and torch that a config may name without its package."""
    found: dict[str, str] = {}
    for module in (*SHORT.values(), ENVIRONMENTS):
        for name in names_in(module):
            found.setdefault(name, f"{module}.{name}")
    return found | _ALIASES


def full_name(name: str) -> str:
    """Return the import path of a short class name. Any other string is returned unchanged.

    Raises:
        ConfigurationError: If two packages register the name.
    """
    if not name.isidentifier():
        return name
    if name in PUBLIC:
        return f"lit_efficient.{name}"
    if name in short_names():
        return short_names()[name]
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    other = third_party(name)
    return other.path if other else name


def known_names() -> list[str]:
    """Return the short class names that a config may use."""
    return [*(name for name in PUBLIC if name[:1].isupper()), *registered(), *short_names(), *OPTIMIZERS]


def missing_module(path: str) -> str:
    """Return the top-level package of an import path if it is not installed, or an empty string."""
    top = path.partition(".")[0]
    try:
        return "" if find_spec(top) else top
    except (ValueError, ImportError):  # a module without a specification
        return ""


@functools.cache
def signature(path: str) -> Signature | None:
    """Return what the constructor of a class takes, or ``None`` if the sources do not lead to the class."""
    definition = find_class(path)
    if definition is None:
        return None
    found = _signature(definition)
    lineage = {one.name for one in _lineage(definition) if one is not None}
    # The command line passes these itself.
    if "Optimizer" in lineage:
        found.arguments.pop("params", None)
    if "LRScheduler" in lineage or path in _ALIASES.values():
        found.arguments.pop("optimizer", None)
    return found


def is_dataclass(definition: ClassSource) -> bool:
    """Return whether a class is decorated as a dataclass."""
    return any("dataclass" in ast.unparse(decorator) for decorator in definition.node.decorator_list)


def _bases(definition: ClassSource) -> Iterator[ClassSource | None]:
    for base in definition.node.bases:
        node = base.value if isinstance(base, ast.Subscript) else base
        name = ast.unparse(node)
        if name.rpartition(".")[2] not in _WITHOUT_ARGUMENTS:
            yield _resolve(name, definition.module)


def _lineage(definition: ClassSource) -> list[ClassSource | None]:
    """Return a class and its bases in the order in which Python looks for a method; ``None`` is an unknown base."""
    found: list[ClassSource | None] = []
    for base in _bases(definition):
        found += [None] if base is None else _lineage(base)
    # Several classes may share a base: it comes after all of them.
    last = {None if one is None else (one.module.name, one.name): index for index, one in enumerate(found)}
    return [definition, *(one for index, one in enumerate(found) if index in last.values())]


def _resolve(name: str, module: Source) -> ClassSource | None:
    """Return the class that a name in a module stands for."""
    head, _, rest = name.partition(".")
    if not rest and name in module.classes:
        return ClassSource(module, module.classes[name])
    if head in module.imports:
        return find_class(".".join(filter(None, [module.imports[head], rest])))
    for star in module.stars:
        found = find_class(f"{star}.{name}")
        if found is not None:
            return found
    return None


def _signature(definition: ClassSource) -> Signature:
    return _of_lineage(_lineage(definition))


def _of_lineage(lineage: list[ClassSource | None]) -> Signature:
    """Return the first constructor in a lineage, with the arguments that it passes on to the classes behind it."""
    if not lineage:
        return Signature({})
    first = lineage[0]
    behind = lineage[1:]
    if first is None:
        return Signature(_of_lineage(behind).arguments, is_open=True)
    found: Signature | None = None
    for statement in first.node.body:  # the last one counts: earlier ones are overloads
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            found = _of_constructor(statement, first, behind)
    if found is None and is_dataclass(first):
        found = _fields(first, behind)
    if found is None:
        found = _of_lineage(behind)
    return Signature(found.arguments, found.is_open or _may_be_changed(first))


def _may_be_changed(definition: ClassSource) -> bool:
    """Return whether the constructor of a class may be another one than its body shows."""
    for decorator in definition.node.decorator_list:
        name = ast.unparse(decorator).partition("(")[0].rpartition(".")[2]
        if name not in _DECORATORS:
            return True
    for statement in definition.node.body:
        hidden = isinstance(statement, ast.If | ast.Try | ast.With | ast.Assign)
        if hidden and any(name in ast.unparse(statement) for name in ("def __init__(", "__init__ =")):
            return True
    return False


def _fields(definition: ClassSource, behind: list[ClassSource | None]) -> Signature:
    """Return the fields of a dataclass and of the dataclasses that it inherits from."""
    arguments: Arguments = {}
    for base in reversed(behind):
        if base is not None and is_dataclass(base):
            arguments |= _own_fields(base)
    return Signature(arguments | _own_fields(definition), is_open=None in behind)


def _own_fields(definition: ClassSource) -> Arguments:
    arguments: Arguments = {}
    for statement in definition.node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotation = ast.unparse(statement.annotation)
            if "ClassVar" not in annotation and "init=False" not in ast.unparse(statement):
                arguments[statement.target.id] = (statement.annotation, definition.module)
    return arguments


def _of_constructor(function: ast.FunctionDef, definition: ClassSource, behind: list[ClassSource | None]) -> Signature:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs][1:]
    arguments: Arguments = {one.arg: (one.annotation, definition.module) for one in named}
    if given.kwarg is None:
        return Signature(arguments)
    passed = _passed_to_base(function, given.kwarg.arg)
    base = _of_lineage(behind)
    if passed is None or base.is_open:
        return Signature(base.arguments | arguments, is_open=True)
    positional = [*base.arguments][: len([one for one in passed.args if not isinstance(one, ast.Starred)])]
    set_here = {*positional, *(word.arg for word in passed.keywords)}
    inherited = {name: entry for name, entry in base.arguments.items() if name not in set_here}
    return Signature(inherited | arguments)


def _passed_to_base(function: ast.FunctionDef, keywords: str) -> ast.Call | None:
    """Return the call of ``super().__init__`` that gets the ``**keywords`` of a constructor.

    ``None`` if the keywords are used in any other way: they may be arguments of anything.
    """
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == keywords]
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
            spread = [word for word in call.keywords if word.arg is None and ast.unparse(word.value) == keywords]
            if spread and len(uses) == 1:
                return call
    return None


# Annotations ---------------------------------------------------------------------------------------------------------


def blocks_of(annotation: ast.expr | None, module: Source) -> list[ClassSource] | None:
    """Return the dataclasses that an annotation allows beside plain values.

    ``None`` if the annotation allows anything else that a mapping could be: a dictionary, another class, any value.
    """
    if annotation is None:
        return None
    if isinstance(annotation, ast.Constant):
        if isinstance(annotation.value, str):
            try:
                return blocks_of(ast.parse(annotation.value, mode="eval").body, module)
            except SyntaxError:  # the text is no type
                return None
        return []  # None
    if isinstance(annotation, ast.BinOp):
        return _joined([annotation.left, annotation.right], module)
    if isinstance(annotation, ast.Subscript):
        outer = ast.unparse(annotation.value).rpartition(".")[2]
        if isinstance(annotation.slice, ast.Tuple):
            inner = annotation.slice.elts
        else:
            inner = [annotation.slice]
        if outer == "Literal" or outer in _CONTAINERS:
            return []  # no mapping by itself
        if outer in _UNIONS:
            return _joined(inner, module)
        return None
    name = ast.unparse(annotation)
    if name.rpartition(".")[2] in _PLAIN:
        return []
    definition = _resolve(name, module)
    if definition is not None:
        if is_dataclass(definition):
            return [definition]
        return None
    if name in module.values:
        return blocks_of(module.values[name], module)
    return None


def _joined(parts: list[ast.expr], module: Source) -> list[ClassSource] | None:
    found: list[ClassSource] = []
    for part in parts:
        blocks = blocks_of(part, module)
        if blocks is None:
            return None
        found += blocks
    return found


def fields_of(definition: ClassSource) -> Arguments | None:
    """Return the fields of a dataclass, or ``None`` if it may take others."""
    found = _signature(definition)
    if found.is_open:
        return None
    return found.arguments


def annotation_of(path: str, parts: Sequence[str]) -> str:
    """Return the annotation of an argument of a class, or of a field of dataclasses below it.

    Args:
        path: Import path of the class.
        parts: Name of the argument, and of the fields on the way.

    Returns:
        The annotation as it is written, or an empty string if the sources do not lead to one.
    """
    known = signature(path)
    accepted: Arguments = known.arguments if known else {}
    for part in parts[:-1]:
        annotation, module = accepted.get(part, (None, None))
        accepted = {}
        if module:
            for block in blocks_of(annotation, module) or []:
                accepted |= fields_of(block) or {}
    annotation, _ = accepted.get(parts[-1], (None, None))
    if annotation:
        return ast.unparse(annotation)
    return ""


def trainer_keys() -> list[str]:
    """Return the arguments of Lightning's trainer."""
    found = signature("lightning.pytorch.Trainer")
    return [*found.arguments] if found else []


def method_keys(subcommand: str) -> list[str]:
    """Return the options that a subcommand has of the trainer's method of that name: ``ckpt_path`` and others."""
    trainer = find_class("lightning.pytorch.Trainer")
    if trainer:
        for statement in trainer.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == subcommand:
                names = [argument.arg for argument in statement.args.args[1:]]
                return [name for name in names if name not in ("model", "datamodule") and "dataloaders" not in name]
    return []
