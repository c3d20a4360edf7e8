"""GaLore: AdamW's moments in the few directions in which a gradient is strongest, for training all weights.

    B <- first r singular vectors of G, every T steps;    step = Adam(B^T G);    W <- W - lr (scale B step + decay W)
        for G [m, n] with m < n; else G B and step B^T

Saves: AdamW's states of a matrix [m, n], m <= n: from 2 m n numbers to 2 r n + m r; with r = m / 4 from 8 to 3 bytes
Costs: two products with the basis a step, a decomposition every T steps, and a rate of its own, about 10 times AdamW's
Source: Zhao et al. (2024), https://arxiv.org/abs/2403.03507
"""

from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import check_choice, check_number
from lit_efficient.mechanisms.adapters.targets import ALL_LINEAR
from lit_efficient.optimizers.low_rank import check_whole, rewrite
from lit_efficient.optimizers.low_rank_adamw import StrongestDirections
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class GaLore(OptimizerHooks, Technique):
    """Let the AdamW that the module returns see the gradients of matrices in a subspace of few dimensions.

    Weights train in full: nothing is frozen or added. What is no target is stepped as before, and so is a matrix whose
    shorter side is not above ``rank``: there GaLore is AdamW, bit by bit. Groups and schedulers are kept.

    Args:
        rank: Dimensions of the subspace, at least 1 and at most the shorter side of the largest target.
        update_every: Steps after which the subspace is chosen anew, at least 1.
        scale: Of the projected update, above 0; weight decay has the rate's size.
        targets: ``all-linear`` (linear layers but output heads, and experts' stacks), or patterns for the ends of
            dotted names, which may also match embeddings and ``nn.Conv2d``, whose filters are rows.
        bits: 32: moments of the parameter's type, as AdamW has them; 8: codes by bitsandbytes for all moments of at
            least 4,096 elements but those of embeddings.
        exact: Decompose gradients exactly; else randomised, by draws that the run's others do not depend on, which
            takes a small part of the time and gives nearly the same directions.

    Raises:
        ConfigurationError: For an argument out of range, an optimizer that is no AdamW, and targets that do not train.
        ConflictError: For sharded parameters.
    """

    phase = Phase.OPTIMIZER
    traits = frozenset({Trait.LOW_RANK})
    alters = ("optimizer",)
    conflicts: ClassVar[dict[str, str]] = {
        "LowBitOptimizer": "both decide what the moments are: use GaLore(bits=8)",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"memory": (12, "most of the optimizer's states, at another rate")}

    def __init__(
        self,
        rank: int = 128,
        update_every: int = 200,
        scale: float = 0.25,
        targets: str | list[str] = ALL_LINEAR,
        bits: Literal[32, 8] = 32,
        exact: bool = False,
    ) -> None:
        super().__init__()
        check_number("GaLore", "rank", rank, least=1, whole=True)
        check_number("GaLore", "update_every", update_every, least=1, whole=True)
        check_number("GaLore", "scale", scale, above=0)
        check_choice("GaLore", "bits", bits, (32, 8))
        self.rank = rank
        self.update_every = update_every
        self.scale = scale
        self.targets = targets
        self.bits = bits
        self.exact = exact

    def check(self, trainer: Any, module: Any) -> None:
        check_whole(trainer, "GaLore")

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        subspace = StrongestDirections(self.rank, self.update_every, self.scale, self.exact)
        return rewrite(optimizer, module, self.targets, subspace, self.bits, "GaLore")
