"""Base class of techniques that keep the moments of AdamW in a subspace of few dimensions."""

from lightning.pytorch import LightningModule, Trainer

from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.errors import ConflictError, check_choice, check_number
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.technique import Technique


class LowRankTechnique(OptimizerHooks, Technique):
    """Base of techniques that keep the moments of AdamW in a subspace. A subclass chooses the subspace.

    Args:
        rank: Dimensions of the subspace, at least 1.
        update_every: Number of steps after which a new subspace is chosen, at least 1.
        scale: Factor of the update, above 0.
        targets: Layers whose weights are projected: a pattern, several patterns or ``all-linear``.
        bits: Bits of the moments, 32 or 8.
    """

    alters = ("optimizer",)

    def __init__(self, rank: int, update_every: int, scale: float, targets: str | list[str], bits: int) -> None:
        super().__init__()
        who = type(self).__name__
        check_number(who, "rank", rank, least=1, whole=True)
        check_number(who, "update_every", update_every, least=1, whole=True)
        check_number(who, "scale", scale, above=0)
        check_choice(who, "bits", bits, (32, 8))
        self.rank = rank
        self.update_every = update_every
        self.scale = scale
        self.targets = targets
        self.bits = bits

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        traits = traits_of(trainer.strategy)
        if traits.shards:
            raise ConflictError(
                f"{type(self).__name__} projects the gradients of whole matrices, and with {traits.name} no process "
                "has one: use strategy='ddp', or LowBitOptimizer instead"
            )
