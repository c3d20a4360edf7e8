"""A CometLogger whose experiment begins when it is first used.

Lightning begins the experiment of Comet in the logger's constructor, so a check or a refused run would leave an empty
one. Private names in use, of CometLogger: ``_create_experiment``, which the property ``experiment`` also calls where
there is none. Checked with lightning 2.6.6 and comet_ml 3.58.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.loggers import CometLogger


@contextmanager
def comet_begins_late() -> Iterator[None]:
    """Let no CometLogger that is made inside begin an experiment in its constructor."""
    own = CometLogger._create_experiment
    CometLogger._create_experiment = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        CometLogger._create_experiment = own  # type: ignore[method-assign]
