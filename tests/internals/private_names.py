"""Which names in a source are private names of somebody else's.

A name is private if it begins with one underscore. It is ours if some file of the package defines it, and still not
ours where the object at hand is somebody else's, or of a class of ours that inherits the name.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

# Keys of files that other packages write and document; they are no attributes.
FILE_KEYS = {"_class_name", "_type"}  # of a diffusers config.json, of a column in datasets' JSON
_ENDS = {"startswith", "endswith", "removeprefix", "removesuffix"}  # they take parts of names
_DOTTED = re.compile(r"(?:torch|torchao|lightning|pytorch_lightning|jsonargparse|transformers|diffusers|peft)(\.\w+)+")


def is_private(name: str) -> bool:
    return len(name) > 1 and name.startswith("_") and not name.startswith("__") and name.isidentifier()


@cache
def inherited() -> dict[str, set[str]]:
    """Private names of the classes that ours derive from and of the objects that we meet, by the class's name."""
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
    from torch import nn
    from torch.optim import lr_scheduler
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    parameter = nn.Parameter(torch.ones(1))
    adamw = torch.optim.AdamW([parameter], fused=True)
    schedule = lr_scheduler.LambdaLR(adamw, lambda _: 1.0)
    parameter.grad = torch.ones(1)
    adamw.step()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", enable_model_summary=False, **quiet)
    loops = [trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop]
    objects = [nn.Module(), nn.Linear(1, 1), nn.Conv2d(1, 1, 1), nn.ModuleDict(), nn.ModuleList(), nn.Sequential()]
    objects += [parameter, parameter.detach(), parameter.untyped_storage(), torch.Generator()]
    objects += [adamw, torch.optim.SGD([parameter]), schedule, lr_scheduler.ChainedScheduler([schedule]), adamw.step]
    objects += [DataLoader([1]), DistributedSampler([1], 1, 0), trainer, *loops, trainer.strategy]
    objects += [pl.LightningModule(), pl.LightningDataModule(), pl.Callback(), LightningArgumentParser()]
    names = {type(thing).__name__: {name for name in dir(thing) if is_private(name)} for thing in objects}
    kinds = (LightningCLI, Dataset, torch.optim.Optimizer, pl.callbacks.ModelCheckpoint, pl.plugins.CheckpointIO)
    return names | {kind.__name__: {name for name in dir(kind) if is_private(name)} for kind in kinds}


@cache
def everybody() -> set[str]:
    """All of them."""
    return set().union(*inherited().values())


@dataclass
class Names:
    """What a package defines itself."""

    own: set[str] = field(default_factory=set)
    bases: dict[str, set[str]] = field(default_factory=dict)  # of its classes, by name

    def read(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.own.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                self.own.add(node.attr)
            elif isinstance(node, ast.Dict):
                self.own |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
            elif isinstance(node, ast.Call) and _called(node) == "mix_in":
                self.own |= {keyword.arg for keyword in node.keywords if keyword.arg}
            if isinstance(node, ast.ClassDef):
                self.bases.setdefault(node.name, set()).update(filter(None, map(_last, node.bases)))

    def inherited_by(self, kind: str) -> set[str]:
        seen, stack = set(), [kind]
        while stack:
            if (name := stack.pop()) not in seen:
                seen.add(name)
                stack += self.bases.get(name, ())
        return {private for name in seen for private in inherited().get(name, ())}


def foreign(tree: ast.AST, package: Names) -> Iterator[tuple[int, str]]:
    """Line and name of each private name of somebody else's."""
    everybody_s = everybody()
    nodes = [*ast.walk(tree)]
    inside = {}  # node -> what the class around it inherits
    for kind in (node for node in nodes if isinstance(node, ast.ClassDef)):
        inside |= dict.fromkeys(ast.walk(kind), package.inherited_by(kind.name))
    texts = set(_texts(nodes))
    for node in nodes:
        theirs = inside.get(node, ())
        if isinstance(node, ast.Import):
            found = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            ours = node.level or (node.module or "").partition(".")[0] == "lit_efficient"
            found = [] if ours else [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if isinstance(node.value, ast.Name) and node.value.id in sys.stdlib_module_names:
                found = []
            elif _is_self(node.value):
                found = [node.attr] if node.attr in theirs or node.attr not in package.own else []
            else:
                found = [node.attr] if node.attr in everybody_s or node.attr not in package.own else []
        elif isinstance(node, ast.FunctionDef):
            found = [node.name] if node.name in theirs else []
        elif isinstance(node, ast.Call) and _called(node) != "mix_in":
            found = [keyword.arg or "" for keyword in node.keywords if keyword.arg not in package.own]
        elif node in texts and is_private(node.value):
            known = node.value in package.own or node.value in FILE_KEYS or node.value.startswith("_lit_efficient")
            found = [node.value] if node.value in everybody_s or not known else []
        elif node in texts and _DOTTED.fullmatch(node.value):
            found = node.value.split(".")
        else:
            continue
        yield from ((node.lineno, name) for name in found if is_private(name))


def _texts(nodes: list[ast.AST]) -> Iterator[ast.Constant]:
    """Strings that may be names: no documentation, no part of an f-string, no end of a name."""
    left_out = set()
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            left_out |= {*ast.walk(node)}
        elif isinstance(node, ast.Expr) or (isinstance(node, ast.Call) and _called(node) in _ENDS):
            left_out |= {part for part in ast.iter_child_nodes(node) if isinstance(part, ast.Constant)}
    strings = (node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    yield from (node for node in strings if node not in left_out)


def _is_self(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id in ("self", "cls")) or (
        isinstance(node, ast.Call) and _called(node) == "super"
    )


def _called(node: ast.Call) -> str:
    return _last(node.func) or ""


def _last(node: ast.AST) -> str | None:
    """The last part of a dotted name, without what stands in brackets."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
