"""``python -m lit_efficient new-technique NAME``: write the files of a new technique, with a test that passes.

In a checkout of this package these are the file, the test, the config and the line in the list of public names, else
``NAME.py`` and ``test_NAME.py`` for a package of your own. They clamp gradients, as an example to change.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from lit_efficient import PUBLIC
from lit_efficient.errors import ConfigurationError, refusal

_FILE = '''"""One sentence that says what NAME does.

    g  <-  min(max(g, -limit), limit)       before each optimizer step

Saves: what it is there for, such as memory, time, or steps to a loss
Costs: what it takes, such as one pass over the gradients per optimizer step
Source: Author (2026), https://arxiv.org/abs/0000.00000
"""

from collections.abc import Iterable
from typing import ClassVar

BASES


def FUNCTION(gradients: Iterable[Tensor], limit: float) -> None:
    """Clamp all elements of gradients of any shape to [-limit, limit], in place."""
    for gradient in gradients:
        values = gradient.values() if gradient.is_sparse else gradient
        values.clamp_(-limit, limit)


class NAME(GradientHooks, Technique):
    """Clamp the elements of all gradients, before each optimizer step.

    Args:
        limit: Largest magnitude of an element, above 0.

    Raises:
        ConfigurationError: If ``limit`` is not above 0.
    """

    phase = Phase.GRADIENT
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "the reason to use it, in a few words")}

    def __init__(self, limit: float) -> None:
        super().__init__()
        check_number("NAME", "limit", limit, above=0)
        self.limit = limit

    def describe(self, module: nn.Module) -> Report:
        return Report(f"elements of gradients are at most {self.limit:g}")

    def change_gradients(self, gradients: dict[Tensor, Tensor], optimizer: Optimizer, module: nn.Module) -> None:
        FUNCTION(gradients.values(), self.limit)
'''
_TEST = '''"""NAME: elements of gradients stay within the limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
IMPORTS

LIMIT = 2.0**-10


class Watched(HOME.NAME):
    """Record the largest gradients before and after the change."""

    before = after = 0.0

    def change_gradients(self, gradients: dict[Tensor, Tensor], *others: Any) -> None:
        self.before = max(self.before, *(float(gradient.abs().max()) for gradient in gradients.values()))
        super().change_gradients(gradients, *others)
        self.after = max(self.after, *(float(gradient.abs().max()) for gradient in gradients.values()))


Watched.__name__ = Watched.__qualname__ = "NAME"


def gradients_stay_within_the_limit(run: Run) -> None:
    """Some gradients were larger before, and none is afterwards."""
    technique = run.technique("NAME")
    assert technique.before > LIMIT
    assert 0 < technique.after <= LIMIT


CONTRACT


@pytest.mark.parametrize("sparse", [False, True])
def test_elements_are_clamped(sparse: bool) -> None:
    gradient = torch.tensor([[0.5, -2.0], [0.0, 1.0]])
    if sparse:
        gradient = gradient.to_sparse(1).coalesce()
    CALLED([gradient], 0.75)
    assert torch.equal(gradient.to_dense(), torch.tensor([[0.5, -0.75], [0.0, 0.75]]))


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="NAME: limit must be above 0"):
        HOME.NAME(limit=0)
'''
# The words of the templates, in a checkout of this package and elsewhere. FILE and NAME in them are replaced last.
_IN_CHECKOUT = {
    "BASES": """from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.gradients import GradientHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import check_number
from lit_efficient.technique import Technique""",
    "IMPORTS": """from torch import Tensor

import lit_efficient
from lit_efficient import ConfigurationError
from lit_efficient.callbacks.FILE import FUNCTION
from lit_efficient.testing import Run
from tests.contract.row import Row""",
    "HOME": "lit_efficient",
    "CALLED": "FUNCTION",
    "CONTRACT": "ROW = Row(lambda: Watched(LIMIT), gradients_stay_within_the_limit, lambda: Watched(1e30))",
}
_ELSEWHERE = {
    "BASES": """from lit_efficient import GradientHooks, Phase, Report, Technique
from lit_efficient.errors import check_number
from torch import Tensor, nn
from torch.optim import Optimizer""",
    "IMPORTS": """from lit_efficient import ConfigurationError
from lit_efficient.testing import Run, check_technique
from torch import Tensor

import FILE""",
    "HOME": "FILE",
    "CALLED": "FILE.FUNCTION",
    "CONTRACT": """def test_it_keeps_the_contract() -> None:
    check_technique(lambda: Watched(LIMIT), gradients_stay_within_the_limit, neutral=lambda: Watched(1e30))""",
}
_CONFIG = """# Overlay: one sentence that says what NAME does. Append it to any task:
#   python -m lit_efficient fit -c language_model -c FILE
trainer:
  callbacks+:
    - class_path: NAME
      init_args:
        limit: 0.01
"""
_LIST = Path("lit_efficient", "__init__.py")
_END_OF_GROUP = "    # other callbacks\n"


def run(argv: Sequence[str]) -> int:
    """Run ``new-technique``."""
    parser = argparse.ArgumentParser(
        "lit_efficient new-technique",
        description="Write the files of a new technique: in a checkout of lit_efficient the file, the test, the config "
        "and the line in the list of public names, elsewhere NAME.py and test_NAME.py for a package of your own. The "
        "test passes as it is written; CONTRIBUTING.md explains each part.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="name of the class, such as GradientCentralisation")
    name = parser.parse_args(argv).name
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name):
        raise refusal("new-technique", "NAME", "the name of a class, such as GradientCentralisation", name)
    if name in PUBLIC:
        raise refusal("new-technique", "NAME", "a name that lit_efficient does not have yet", name)
    file = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    in_checkout = _LIST.is_file() and Path("tests", "contract", "row.py").is_file()
    words = _IN_CHECKOUT if in_checkout else _ELSEWHERE
    words = {**words, "FUNCTION": f"apply_{file}", "FILE": file, "NAME": name}
    source, test = Path(f"{file}.py"), Path(f"test_{file}.py")
    texts = {source: _FILE, test: _TEST}
    if in_checkout:
        test = Path("tests", "callbacks", test)
        config = Path("configs", "techniques", f"{file}.yaml")
        texts = {Path("lit_efficient", "callbacks", source): _FILE, test: _TEST, config: _CONFIG}
    for path in texts:
        if path.exists():
            raise ConfigurationError(f"new-technique: {path} exists already: choose another NAME")
    for path, text in texts.items():
        for word, value in words.items():  # in this order: values hold later words
            text = text.replace(word, value)  # noqa: PLW2901
        path.write_text(text, encoding="utf-8")
        print(f"Wrote {path}")
    if in_checkout:
        listed = _LIST.read_text("utf-8")
        line = f'    "{name}": "callbacks.{file}",\n'
        _LIST.write_text(listed.replace(_END_OF_GROUP, line + _END_OF_GROUP), encoding="utf-8")
        print(
            f"Added a line to {_LIST}\n"
            "Next:\n"
            "  python -m tests.generated\n"
            f"  pytest -n 0 {test} tests/test_catalog.py tests/test_layers.py tests/test_names.py\n"
            f"  pytest -n 0 tests/configs/test_every_config.py tests/contract/test_alone.py -k {name}\n"
            "CONTRIBUTING.md explains each part, and what else there is to do."
        )
    else:
        print(f"Next:\n  pytest {test}")
    return 0
