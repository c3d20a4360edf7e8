"""Kahan summation of bfloat16 weights: store the rounding error of each update and add it in the next step.

    q = step(p + c) in float32;    p <- bfloat16(q);    c <- q - p, in bfloat16

Saves: float32 weights and moments: 10 instead of 16 bytes for each parameter with its gradient and AdamW's states
Costs: 2 bytes for each parameter; while a parameter is stepped, float32 copies of it, its gradient and its states
Source: Kahan (1965), https://doi.org/10.1145/363707.363723; Zamirai et al. (2020), https://arxiv.org/abs/2010.06192
"""

from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report, format_bytes, held
from lit_efficient.errors import check_number
from lit_efficient.optimizers.float32_step import DrawsByStep, step_in_float32
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class KahanSummation(OptimizerHooks, DrawsByStep, Technique):
    """Step bfloat16 parameters (``precision: bf16-true``) in float32, with any optimizer, and keep rounding errors.

    Weight and compensation together have a significand of 16 bits or more. Compensations, and moments that are stored
    in bfloat16, are rounded stochastically, so that their rounding errors have mean zero. The random numbers depend
    only on seed and step. Parameters in float32, such as adapters, are stepped as without the technique.

    Args:
        seed: Seed of the stochastic rounding, at least 0.

    Raises:
        ConfigurationError: For an argument out of range, if no trained parameter is bfloat16, and for an optimizer that
            treats all parameters as one tensor.
    """

    phase = Phase.ROUND
    traits = frozenset({Trait.KEEPS_SMALL_UPDATES})
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "small updates are not lost with precision: bf16-true, for 2 bytes per parameter")
    }

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        check_number("KahanSummation", "seed", seed, least=0, whole=True)
        self.seed = seed

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        kind = type(optimizer).__name__
        later = {module.get_parameter(name) for name in held(module)}
        count = step_in_float32(optimizer, compensated=True, seed=self.seed, later=later, who="KahanSummation")
        return Report(
            f"{kind}: {count:,} bfloat16 parameters are compensated, {format_bytes(2 * count)}",
            parameters=count,
            details={"compensation_bytes": 2 * count},
        )
