import importlib
import sys

import pytest
from lightning.pytorch.profilers import SimpleProfiler

from lit_efficient import EMA
from lit_efficient.internals.lightning_hooks import NoProfiler, skip_empty_hooks
from tests.internals import toy_fit

HOOKS = {"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"}


@pytest.mark.parametrize("namespace", toy_fit.NAMESPACES)
@pytest.mark.parametrize("skips", [True, False])
def test_empty_hooks_of_a_step_are_not_called(namespace, skips):
    called, seen = [], []
    hooks = {"on_before_backward": lambda *_: seen.append("own hook")}
    made = toy_fit.trainer(namespace, hooks, limit_val_batches=0)
    made.callbacks += [EMA(), importlib.import_module(namespace).callbacks.ModelSummary()]
    if skips:
        skip_empty_hooks(made)

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.endswith("callbacks/callback.py"):
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        made.fit(toy_fit.module(namespace), toy_fit.rows(), toy_fit.rows(1))
    finally:
        sys.setprofile(None)
    assert seen == ["own hook"] * 4
    # The watcher's class is in no package of ours or Lightning's, so its empty hooks stay: three of the four in a step.
    assert sum(name in HOOKS for name in called) == (3 if skips else 11) * 4


def test_a_profiler_of_the_user_stays():
    made = toy_fit.trainer("lightning.pytorch", profiler=SimpleProfiler())
    skip_empty_hooks(made)
    assert type(made.profiler) is SimpleProfiler
    made = toy_fit.trainer("lightning.pytorch")
    skip_empty_hooks(made)
    assert type(made.profiler) is NoProfiler
