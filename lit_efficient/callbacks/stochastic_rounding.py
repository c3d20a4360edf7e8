"""Stochastic rounding of bfloat16 weights: an update too small for them is done in full, as often as its share.

    p <- one of the two bfloat16 neighbours a < q < b of what a float32 step gives:  P(b) = (q - a) / (b - a),  E[p] = q

Saves: float32 weights and moments: bfloat16 ones, 8 bytes a parameter with gradients and AdamW, not 16, still learn
Costs: noise of the last digit; while a parameter is stepped, it, its gradient and its states in float32
Source: Gupta et al. (2015), https://arxiv.org/abs/1502.02551; Zamirai et al. (2020), https://arxiv.org/abs/2010.06192
"""

from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report, held
from lit_efficient.errors import check_number
from lit_efficient.optimizers.float32_step import DrawsByStep, round_stochastically, step_in_float32
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

__all__ = ["StochasticRounding", "round_stochastically"]


class StochasticRounding(OptimizerHooks, DrawsByStep, Technique):
    """Step bfloat16 parameters (``precision: bf16-true``) in float32, with any optimizer, and round them by chance.

    Moments that are stored in bfloat16 are rounded so, too. The draws follow from seed and step: a resumed run goes on
    with the same ones, and processes agree. Adapters and whatever else is float32 steps as before.

    Args:
        seed: Of the draws, at least 0.

    Raises:
        ConfigurationError: For an argument out of range; if no parameter that trains is bfloat16; for an optimizer that
            treats all parameters as one.
    """

    phase = Phase.ROUND
    traits = frozenset({Trait.KEEPS_SMALL_UPDATES})
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "lets precision: bf16-true, half of all bytes of weights, gradients and states, learn")
    }

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        check_number("StochasticRounding", "seed", seed, least=0, whole=True)
        self.seed = seed

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        kind = type(optimizer).__name__
        later = {module.get_parameter(name) for name in held(module)}
        count = step_in_float32(optimizer, compensated=False, seed=self.seed, later=later, who="StochasticRounding")
        return Report(f"{kind}: {count:,} bfloat16 parameters are rounded by chance", parameters=count)
