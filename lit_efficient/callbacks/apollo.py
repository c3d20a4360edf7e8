"""APOLLO: gradients scaled channel by channel, as Adam would scale them in a small random subspace.

    R = P G,  P [r, m] ~ N(0, 1/r), drawn anew every T steps;    s_j = |Adam(R)_j| / |R_j| for each column j
    W <- W - lr (scale G diag(s) + decay W), |G diag(s)| at most 1.01 times that of the step before;    G [m, n], m < n

Saves: AdamW's states of a matrix [m, n], m <= n: from 2 m n numbers to 2 r n + 1; APOLLO-Mini (r = 1): 2 n + 1
Costs: one product with the basis a step, which is drawn again in each; a rate of its own, about 10 times AdamW's
Source: Zhu et al. (2024), https://arxiv.org/abs/2412.05270; the limit of growth: Chen et al. (2024), https://arxiv.org/abs/2410.01623
"""

from typing import Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import check_choice, check_number
from lit_efficient.mechanisms.adapters.targets import ALL_LINEAR
from lit_efficient.optimizers.low_rank import check_whole, rewrite
from lit_efficient.optimizers.low_rank_adamw import RandomDirections
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class APOLLO(OptimizerHooks, Technique):
    """Let the AdamW that the module returns scale the gradients of matrices by what it learns in a random subspace.

    Weights train in full. APOLLO-Mini is ``rank: 1, granularity: tensor, scale: 11.3``. What is no target is stepped as
    before, and so is a matrix whose shorter side is not above ``rank``. Groups and schedulers are kept.

    Args:
        rank: Dimensions of the subspace, at least 1 and at most the shorter side of the largest target.
        update_every: Steps after which the subspace is drawn anew, at least 1.
        scale: Of the update, above 0: 1 for a rank of a quarter of the shorter side, sqrt(128) for APOLLO-Mini.
        granularity: One scale a ``channel`` of the longer side, or one a ``tensor``.
        targets: ``all-linear`` (linear layers but output heads, and experts' stacks), or patterns for the ends of
            dotted names, which may also match embeddings and ``nn.Conv2d``, whose filters are rows.
        bits: 32: moments of the parameter's type, as AdamW has them; 8: codes by bitsandbytes for all moments of at
            least 4,096 elements but those of embeddings.

    Raises:
        ConfigurationError: For an argument out of range, an optimizer that is no AdamW, and targets that do not train.
        ConflictError: For sharded parameters.
    """

    phase = Phase.OPTIMIZER
    traits = frozenset({Trait.LOW_RANK})
    alters = ("optimizer",)
    conflicts: ClassVar[dict[str, str]] = {
        "LowBitOptimizer": "both decide what the moments are: use APOLLO(bits=8)",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (13, "nearly all of the optimizer's states, at another rate")
    }

    def __init__(
        self,
        rank: int = 256,
        update_every: int = 200,
        scale: float = 1.0,
        granularity: Literal["channel", "tensor"] = "channel",
        targets: str | list[str] = ALL_LINEAR,
        bits: Literal[32, 8] = 32,
    ) -> None:
        super().__init__()
        check_number("APOLLO", "rank", rank, least=1, whole=True)
        check_number("APOLLO", "update_every", update_every, least=1, whole=True)
        check_number("APOLLO", "scale", scale, above=0)
        check_choice("APOLLO", "bits", bits, (32, 8))
        check_choice("APOLLO", "granularity", granularity, ("channel", "tensor"))
        self.rank = rank
        self.update_every = update_every
        self.scale = scale
        self.granularity = granularity
        self.targets = targets
        self.bits = bits

    def check(self, trainer: Any, module: Any) -> None:
        check_whole(trainer, "APOLLO")

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        subspace = RandomDirections(self.rank, self.update_every, self.scale, self.granularity == "tensor")
        return rewrite(optimizer, module, self.targets, subspace, self.bits, "APOLLO")
