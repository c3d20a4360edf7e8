"""Kahan summation of bfloat16 weights: what rounding takes off an update is kept, and given back in the next step.

    q = step(p + c) in float32;    p <- bfloat16(q);    c <- q - p, in bfloat16

Saves: float32 weights and moments: 10 bytes a parameter with gradients and AdamW instead of 16, as exact as 16 bits are
Costs: 2 bytes a parameter; while a parameter is stepped, it, its gradient and its states in float32
Source: Kahan (1965), https://doi.org/10.1145/363707.363723; Zamirai et al. (2020), https://arxiv.org/abs/2010.06192
"""

from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report, held
from lit_efficient.errors import check_number
from lit_efficient.optimizers.float32_step import DrawsByStep, step_in_float32
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class KahanSummation(OptimizerHooks, DrawsByStep, Technique):
    """Step bfloat16 parameters (``precision: bf16-true``) in float32, with any optimizer, and keep what rounding loses.

    Weight and compensation together have 16 bits or more. Compensations, and moments that are stored in bfloat16, are
    rounded up or down by chance, by draws that follow from seed and step, so that nothing gets lost there either.
    Adapters and whatever else is float32 steps as before.

    Args:
        seed: Of the draws, at least 0.

    Raises:
        ConfigurationError: For an argument out of range; if no parameter that trains is bfloat16; for an optimizer that
            treats all parameters as one.
    """

    phase = Phase.ROUND
    traits = frozenset({Trait.KEEPS_SMALL_UPDATES})
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "lets precision: bf16-true learn in small steps, for 2 bytes a parameter")
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
            f"{kind}: {count:,} bfloat16 parameters are compensated, {2 * count / 2**20:.1f} MiB",
            parameters=count,
            details={"compensation_bytes": 2 * count},
        )
