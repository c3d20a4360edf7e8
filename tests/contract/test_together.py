"""What holds for as many techniques as go together, in any order, and for a few of them that are compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lit_efficient.declaration import in_order
from lit_efficient.testing import (
    CHECKS,
    HOOKS,
    assert_equal,
    check_acts,
    check_arguments,
    check_cleans_up,
    check_neutral,
    check_resumes,
    check_stages,
    data,
)
from tests import processes
from tests.contract.table import COMPILED, TOGETHER, case, make_all
from tests.support import trainer

CHECKS_OF_MANY = [check for check in CHECKS if check not in (check_arguments, check_neutral, check_cleans_up)]


# What each technique alone and each group of several is put through every time, too.
ALSO_ALONE = [pytest.mark.turns(4, family="of many")]


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(
            check,
            id=check.__name__,
            marks=ALSO_ALONE if check in (check_acts, check_resumes, check_stages) else (),
        )
        for check in CHECKS_OF_MANY
    ],
)
def test_many_together_keep_the_contract(check: Any) -> None:
    check(case(*TOGETHER))


@pytest.mark.turns(4)
@pytest.mark.parametrize("hooks", [HOOKS[i::4] for i in range(4)])
def test_many_together_clean_up_after_an_exception(hooks: tuple[str, ...]) -> None:
    # The fits after the exception train the same network further. LRFinder may then find no clear fall of the loss and
    # refuse, which depends on the processor.
    others = [name for name in TOGETHER if name != "LRFinder"]
    check_cleans_up(case(*others), hooks)


@pytest.mark.turns(4, family="compiled")
def test_a_few_are_compiled_and_stay_so() -> None:
    """Also after a search for the batch size, whose trials are not compiled."""
    check_resumes(case(*COMPILED))


@pytest.mark.turns(4, family="of many")
def test_the_order_of_the_list_never_matters() -> None:
    """In the reversed list every two of them stand the other way round."""
    one = case(*TOGETHER)
    first, *others = (one.fit(arrange(one.make()), saves=False).state() for arrange in (list, _reversed, _rotated))
    for other in others:
        assert_equal(first, other)
    phases = [technique.phase or 0 for technique in in_order(_reversed(one.make()))]
    assert phases == sorted(phases)


def _reversed(items: Any) -> list[Any]:
    return [*reversed(items)]


def _rotated(items: Any) -> list[Any]:
    return [*items[len(items) // 2 :], *items[: len(items) // 2]]


@pytest.mark.turns(4, family="resumed")
def test_a_fresh_process_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    one = case(*TOGETHER)
    whole = one.fit_in(tmp_path, one.make(), max_epochs=2)
    torch.save(whole.state(), tmp_path / "whole.pt")
    log = tmp_path / "log"
    assert processes.run(_go_on, tmp_path, log=log) == 0, log.read_text()


def _go_on(folder: Path) -> None:
    torch.set_num_threads(1)
    one = case(*TOGETHER)
    run = one.fit(one.make(), ckpt_path=folder / "0.ckpt", max_epochs=2)
    assert_equal(torch.load(folder / "whole.pt", weights_only=True), run.state())


@pytest.mark.turns(6, family="slow")
def test_reports_reach_the_loggers_and_are_printed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger, one = CSVLogger(tmp_path), case(*TOGETHER)
    with caplog.at_level("INFO"):
        trainer(make_all(*TOGETHER), logger=logger, **one.trainer).fit(one.toy(), data(), data())
    text = (Path(logger.log_dir) / "hparams.yaml").read_text()
    for name in TOGETHER:
        assert f"techniques/{name}/summary" in text
        assert sum(f"\n  {name}" in record.getMessage() for record in caplog.records) == 1
