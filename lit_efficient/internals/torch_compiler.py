"""What torch's compiler has done, and settings that it reads when it compiles. Checked with torch 2.13."""

from typing import Any

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called: ``nn.Module._compiled_call_impl``."""
    return module._compiled_call_impl is not None


def swap_setting(name: str, value: Any) -> Any:
    """Set an entry of ``torch._functorch.config``; returns what it was."""
    from torch._functorch import config

    before = getattr(config, name)
    setattr(config, name, value)
    return before


def counts() -> tuple[int, int, int]:
    """``torch._dynamo.utils.counters``: graphs so far, functions that were to be compiled, and those that were."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], counters["frames"]["total"], counters["frames"]["ok"]


def runs_eagerly() -> bool:
    """Whether what is compiled runs as it would without: ``torch._dynamo.eval_frame._stance``."""
    from torch._dynamo import eval_frame

    return eval_frame._stance.stance in ("force_eager", "eager_on_recompile")
