"""Stochastic rounding of bfloat16 weights: small updates are not lost, because rounding is correct on average.

    q = result of a float32 step,  a < q < b its bfloat16 neighbours:  P(p <- b) = (q - a) / (b - a),  so that E[p] = q

Saves: half of the bytes of weights, gradients and AdamW moments, which can be bfloat16: 8 bytes per parameter, not 16
Costs: noise in the last digit; float32 copies of a parameter, its gradient and its states during its step
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
    """Update bfloat16 parameters (``precision: bf16-true``) in float32, with any optimizer, and round them at random.

    Moments in bfloat16 are rounded in the same way. The seed and the number of the step decide each rounding, so a
    resumed run continues with the same random numbers, and all processes use the same ones. Parameters in float32,
    such as those of adapters, are updated as before.

    Args:
        seed: Seed of the rounding, at least 0.

    Raises:
        ConfigurationError: For an argument out of range, if no trainable parameter is bfloat16, or for an optimizer
            that joins all parameters into one.
    """

    phase = Phase.ROUND
    traits = frozenset({Trait.KEEPS_SMALL_UPDATES})
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "makes precision: bf16-true trainable: half the bytes of weights, gradients and states")
    }

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        check_number("StochasticRounding", "seed", seed, least=0, whole=True)
        self.seed = seed

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        kind = type(optimizer).__name__
        later = {module.get_parameter(name) for name in held(module)}
        count = step_in_float32(optimizer, compensated=False, seed=self.seed, later=later, who="StochasticRounding")
        return Report(f"{kind}: {count:,} bfloat16 parameters are rounded at random", parameters=count)
