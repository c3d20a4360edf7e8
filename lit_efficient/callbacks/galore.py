"""GaLore: keep AdamW's moments in the few directions in which a gradient is strongest, and train all weights.

    B <- first r singular vectors of G, every T steps;    step = Adam(B^T G);    W <- W - lr (scale B step + decay W)
        for G [m, n] with m < n; else G B and step B^T

Q-GaLore stores B in 4 bits, and doubles T for each matrix whose strongest direction stays. Its weights in INT8 are not
supported; ``precision: bf16-true`` with ``StochasticRounding`` trains weights in bfloat16.

Saves: AdamW's states of a matrix [m, n], m <= n: from 2 m n numbers to 2 r n + m r; with r = m / 4 from 8 to 3 bytes
Costs: two products with the basis per step, a decomposition every T steps; another learning rate, about 10 times
    AdamW's
Source: Zhao et al. (2024), https://arxiv.org/abs/2403.03507; Q-GaLore: Zhang et al. (2024),
    https://arxiv.org/abs/2407.08296
"""

from typing import Literal

from torch import nn
from torch.optim import Optimizer

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import check_choice, check_number
from lit_efficient.mechanisms.adapters.targets import ALL_LINEAR
from lit_efficient.mechanisms.low_rank import LowRankTechnique
from lit_efficient.optimizers.low_rank import rewrite
from lit_efficient.optimizers.low_rank_adamw import StrongestDirections
from lit_efficient.traits import Trait


class GaLore(LowRankTechnique):
    """Let the module's AdamW step matrices with gradients that are projected to a subspace of few dimensions.

    All weights train: nothing is frozen or added. Other parameters are stepped as before, and so are matrices whose
    shorter side is not above ``rank``: for them GaLore equals AdamW bit by bit. Parameter groups and schedulers are
    kept.

    Args:
        rank: Dimensions of the subspace, at least 1 and below the shorter side of the largest target.
        update_every: Number of steps after which a new subspace is chosen, at least 1.
        scale: Factor of the projected update, above 0. Weight decay is not scaled.
        targets: ``all-linear`` (all linear layers except output heads, and stacks of experts), or patterns for the ends
            of dotted names. Patterns may also match embeddings and ``nn.Conv2d``, whose filters are rows.
        bits: 32: moments in the parameter's dtype, as in AdamW. 8: codes of bitsandbytes for all moments with at least
            4,096 elements, except those of embeddings.
        exact: Decompose gradients exactly. Otherwise the decomposition is randomised, which takes a small part of the
            time and gives nearly the same directions. Its random numbers change no other random numbers of the run.
        basis_bits: 4 stores the basis of each matrix in 4 bits (Q-GaLore), 32 in the parameter's dtype.
        similarity: Double the number of steps between new subspaces for each matrix whose strongest direction stays: if
            the absolute cosine between successive choices is at least this on average over the last five (Q-GaLore,
            which uses 0.4). From 0 to 1; ``None`` for a fixed number.

    Raises:
        ConfigurationError: For an argument out of range, an optimizer other than AdamW, and targets that do not train.
        ConflictError: For sharded parameters.
    """

    phase = Phase.OPTIMIZER
    traits = frozenset({Trait.LOW_RANK})
    conflicts = {"LowBitOptimizer": "both choose the form of the moments: use GaLore(bits=8)"}
    helps = {"memory": (12, "most of the optimizer's states, at another rate")}

    def __init__(
        self,
        rank: int = 128,
        update_every: int = 200,
        scale: float = 0.25,
        targets: str | list[str] = ALL_LINEAR,
        bits: Literal[32, 8] = 32,
        exact: bool = False,
        basis_bits: Literal[32, 4] = 32,
        similarity: float | None = None,
    ) -> None:
        super().__init__(rank, update_every, scale, targets, bits)
        check_choice("GaLore", "basis_bits", basis_bits, (32, 4))
        check_number("GaLore", "similarity", similarity, least=0, most=1, null=True)
        self.exact = exact
        self.basis_bits = basis_bits
        self.similarity = similarity

    def rewrite_optimizer(self, optimizer: Optimizer, module: nn.Module) -> Report:
        method = (self.exact, self.basis_bits, self.similarity)
        subspace = StrongestDirections(self.rank, self.update_every, self.scale, *method)
        return rewrite(optimizer, module, self.targets, subspace, self.bits, "GaLore")
