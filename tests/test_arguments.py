"""No class takes more than ten arguments: what belongs together is a dataclass, which is a block in YAML."""

import ast
import re
from pathlib import Path

import lit_efficient

MOST = 10
# Data modules: their sources, sizes and loaders stay at the top of a config, where each of them is since the
# first release; only the rest is in groups. LoRA: ten say what an adapter is, flat as in peft's own configuration, and
# in each config and checkpoint that there is; `start_from` and `beside` name two different kinds of adapters that are
# there already, so that a block for them would take one name away and rename two for every user. MuonAdamW: each is a
# key of `param_groups`, which users give groups of their own, schedules write and checkpoints hold, as of all of
# torch's optimizers; a block would be one name in the constructor, and others in the groups.
EXEMPT = {"ChatDataModule", "EncodedData", "ImageData", "LanguageData", "PhotoCrops", "PreferenceData", "PythonCorpus"}
EXEMPT |= {"LoRA", "MuonAdamW"}
EXEMPT |= {"Card", "Measured", "Plan", "Trace", "VariantResult"}  # records, which nobody writes by hand


def arguments(node: ast.ClassDef) -> list[str]:
    """The names that the constructor of a class takes, as its own lines say."""
    inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    if inits:
        given = inits[0].args
        return [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)][1:]
    names = {ast.unparse(one).split("(")[0] for one in (*node.decorator_list, *node.bases)}
    if not names & {"dataclass", "NamedTuple"}:
        return []
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    given = [one for one in fields if not re.search(r"ClassVar|init=False", ast.unparse(one))]
    return [ast.unparse(one.target) for one in given]


def longer(source: str) -> set[str]:
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return {node.name for node in classes if len(arguments(node)) > MOST}


def test_no_class_takes_more_than_ten_arguments_but_these() -> None:
    package = Path(lit_efficient.__file__).parent
    found = [longer(path.read_text("utf-8")) for path in package.rglob("*.py")]
    assert set().union(*found) == EXEMPT


def test_what_is_counted() -> None:
    names = [f"a{i}" for i in range(MOST + 1)]
    fields = "".join(f"    {name}: int = 0\n" for name in names)
    assert longer(f"class A:\n    def __init__(self, {', '.join(names)}): ...") == {"A"}
    assert longer(f"class A:\n    def __init__(self, *, {', '.join(names[1:])}): ...") == set()
    assert longer(f"@dataclass(frozen=True)\nclass B:\n{fields}") == longer(f"class B(NamedTuple):\n{fields}") == {"B"}
    assert longer(f"class C:\n{fields}") == set()
    kept = "    b: int = field(default=0, init=False)\n"
    assert longer(f"@dataclass\nclass D:\n{kept * (MOST + 1)}") == set()
