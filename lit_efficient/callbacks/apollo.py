"""APOLLO: scale gradients channel by channel, as Adam would scale them in a small random subspace.

    R = P G,  P [r, m] ~ N(0, 1/r), drawn anew every T steps;    s_j = |Adam(R)_j| / |R_j| for each column j
    W <- W - lr (scale G diag(s) + decay W), |G diag(s)| at most 1.01 times the one before;    G [m, n], m < n

Saves: AdamW's states of a matrix [m, n], m <= n: from 2 m n numbers to 2 r n + 1; APOLLO-Mini (r = 1): 2 n + 1
Costs: one product with the basis per step, and drawing the basis again; another learning rate, about 10 times AdamW's
Source: Zhu et al. (2024), https://arxiv.org/abs/2412.05270; the limit of growth: Chen et al. (2024), https://arxiv.org/abs/2410.01623
"""

from typing import Literal

from torch import nn
from torch.optim import Optimizer

from lit_efficient.declaration import Phase, Report
from lit_efficient.mechanisms.adapters.targets import ALL_LINEAR
from lit_efficient.mechanisms.low_rank import LowRankTechnique
from lit_efficient.optimizers.low_rank import rewrite
from lit_efficient.optimizers.low_rank_adamw import RandomDirections
from lit_efficient.traits import Trait


class APOLLO(LowRankTechnique):
    """Let the module's AdamW scale the gradients of matrices by factors that it learns in a random subspace.

    All weights train. APOLLO-Mini is ``rank: 1, granularity: tensor, scale: 11.3``. Other parameters are stepped as
    before, and so are matrices whose shorter side is not above ``rank``. Parameter groups and schedulers are kept.

    Args:
        rank: Dimensions of the subspace, at least 1 and below the shorter side of the largest target.
        update_every: Number of steps after which a new subspace is drawn, at least 1.
        scale: Factor of the update, above 0: 1 for a rank of a quarter of the shorter side, sqrt(128) for APOLLO-Mini.
        granularity: One factor per ``channel`` of the longer side, or one per ``tensor``.
        targets: ``all-linear`` (all linear layers except output heads, and stacks of experts), or patterns for the ends
            of dotted names. Patterns may also match embeddings and ``nn.Conv2d``, whose filters are rows.
        bits: 32: moments in the parameter's dtype, as in AdamW. 8: codes of bitsandbytes for all moments with at least
            4,096 elements, except those of embeddings.

    Raises:
        ConfigurationError: For an argument out of range, an optimizer other than AdamW, and targets that do not train.
        ConflictError: For sharded parameters.
    """

    phase = Phase.OPTIMIZER
    traits = frozenset({Trait.LOW_RANK})
    conflicts = {"LowBitOptimizer": "both choose the form of the moments: use APOLLO(bits=8)"}
    helps = {"memory": (13, "nearly all of the optimizer's states, at another rate")}

    def __init__(
        self,
        rank: int = 256,
        update_every: int = 200,
        scale: float = 1.0,
        granularity: Literal["channel", "tensor"] = "channel",
        targets: str | list[str] = ALL_LINEAR,
        bits: Literal[32, 8] = 32,
    ) -> None:
        super().__init__(rank, update_every, scale, targets, bits)
        self.granularity = granularity

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        subspace = RandomDirections(self.rank, self.update_every, self.scale, self.granularity == "tensor")
        return rewrite(optimizer, module, self.targets, subspace, self.bits, "APOLLO")
