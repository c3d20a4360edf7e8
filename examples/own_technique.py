"""Your own technique in a few lines, tested by the whole contract: built in any order, copied, interrupted, resumed.

    python examples/own_technique.py

CONTRIBUTING.md describes how your package registers it, so that configs can name it.
"""

import torch
from torch import nn

from lit_efficient import ConfigurationError, Phase, Report, Technique
from lit_efficient.testing import Run, check_technique


def clamp_(module: nn.Module, limit: float) -> None:
    """Keep every trained weight within [-limit, limit], in place."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.clamp_(-limit, limit)


class WeightClamp(Technique):
    """Keep weights in a box after each optimizer step.

    Args:
        limit: Half the width of the box, above 0.
    """

    phase = Phase.CONSTRAIN

    def __init__(self, limit: float = 1.0) -> None:
        super().__init__()
        if limit <= 0:
            raise ConfigurationError(f"WeightClamp: limit is a number above 0, got {limit!r}")
        self.limit = limit

    def describe(self, module: nn.Module) -> Report:
        return Report(f"weights stay within {self.limit:g}")

    def after_step(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        clamp_(module, self.limit)


def stays_small(run: Run) -> None:
    assert all(float(p.detach().abs().max()) <= 0.05 + 1e-7 for p in run.module.parameters() if p.requires_grad)


def main() -> None:
    check_technique(lambda: WeightClamp(0.05), stays_small, neutral=lambda: WeightClamp(1e9))


if __name__ == "__main__":
    main()
    print("WeightClamp holds the contract")
