"""What lightning_comet relies on in Lightning. The real package is tried by tests/cli/test_loggers.py."""

import pytest
from lightning.pytorch.loggers import CometLogger

from lit_efficient.internals.lightning_comet import comet_begins_late
from tests.internals.leaning import leans_on


class Counted(CometLogger):
    """A logger without Comet's package, whose experiment is the number of those begun."""

    def __init__(self) -> None:
        self._experiment = None


@leans_on("lightning", "CometLogger._create_experiment", "lightning_comet")
def test_an_experiment_begins_when_it_is_used_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def create(self: Counted) -> None:
        begun.append(self)
        self._experiment = len(begun)

    monkeypatch.setattr(CometLogger, "_create_experiment", create)
    logger = Counted()
    with comet_begins_late():
        logger._create_experiment()
    assert begun == []
    assert logger.experiment == logger.experiment == 1
