"""Private names of dependencies stand in internals/ alone, and each of them there has a test."""

import ast
import importlib
import textwrap
from pathlib import Path

import pytest

import lit_efficient
from tests.internals.private_names import Names, foreign

ROOT = Path(lit_efficient.__file__).parent
INTERNALS = ROOT / "internals"


@pytest.fixture(scope="module")
def sources():
    return {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


@pytest.fixture(scope="module")
def package(sources):
    names = Names()
    for path, tree in sources.items():
        if path.parent != INTERNALS:
            names.read(tree)
    return names


def test_private_names_of_dependencies_stand_in_internals_alone(sources, package):
    found = [
        f"{path.relative_to(ROOT.parent)}:{line}: {name} belongs to a dependency: put it in lit_efficient/internals/"
        for path, tree in sources.items()
        if path.parent != INTERNALS
        for line, name in foreign(tree, package)
    ]
    assert not found, "\n".join(found)


def test_each_private_name_in_internals_has_a_test_that_names_it(sources):
    held = {}
    for path in Path(__file__).parent.glob("test_*.py"):
        for test in vars(importlib.import_module(f"tests.internals.{path.stem}")).values():
            name, module = getattr(test, "leans_on", ("", ""))
            held[module] = f"{held.get(module, '')} {name}"
    missing = [
        f"lit_efficient/internals/{path.name}:{line}: no test leans_on {name}"
        for path, tree in sources.items()
        if path.parent == INTERNALS
        for line, name in foreign(tree, _alone(tree))
        if name not in held.get(path.stem, "")
    ]
    assert not missing, "\n".join(missing)


def _alone(tree):
    names = Names()
    names.read(tree)
    return names


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch.utils._pytree import tree_map", "_pytree"),
        ("from torch.nn.modules.batchnorm import _BatchNorm", "_BatchNorm"),
        ("import torch._dynamo.utils", "_dynamo"),
        ("torch._foreach_add_(a, b)", "_foreach_add_"),
        ("trainer.fit_loop._should_accumulate()", "_should_accumulate"),
        ("optimizer._opt_called = True", "_opt_called"),
        ("trainer._unheard_of", "_unheard_of"),
        ('getattr(strategy, "_save_distributed_checkpoint", True)', "_save_distributed_checkpoint"),
        ('vars(loader)["_iterator"] = None', "_iterator"),
        ('type(launcher).__name__ == "_MultiProcessingLauncher"', "_MultiProcessingLauncher"),
        ('ALLOWED = ("torch._C._nn",)', "_nn"),
        ("model.from_pretrained(_from_auto=True)", "_from_auto"),
        ("class A(nn.Linear):\n    def f(self):\n        return self._parameters", "_parameters"),
        ("class A(nn.Module): pass\nclass B(A):\n    def _apply(self, fn): pass", "_apply"),
        ("class A(DataLoader[int]):\n    _index_sampler = property(lambda self: super()._index_sampler)", None),
        ("class A:\n    def f(self):\n        super()._unheard_of()", "_unheard_of"),
        ("class A(AdamW):\n    def __init__(self):\n        self._step_supports_amp_scaling = False", None),
    ],
)
def test_private_names_are_found(source, name):
    tree = ast.parse(textwrap.dedent(source))
    found = [name for _, name in foreign(tree, _alone(tree))]
    assert found
    assert name is None or name in found


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def __init__(self):\n        self._parameters = {}",
        "class A(Callback):\n    def _mine(self): pass\nA()._mine()",
        "mix_in(block, A, _rate=0.5)\nblock._rate",
        "from lit_efficient.mechanisms.adapters.low_rank import _Mine",
        "os._exit(1)",
        'fields["_class_name"]',
        'name.removesuffix("_heads")',
        'def f(name):\n    """trainer._data_connector"""\n    return f"{name}_scale"',
        "module.__dict__, _, __all__ = 1, 2, 3",
    ],
)
def test_own_names_are_left_alone(source):
    tree = ast.parse(source)
    assert not [*foreign(tree, _alone(tree))]
