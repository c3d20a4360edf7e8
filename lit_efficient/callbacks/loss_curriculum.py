"""Loss curriculum: train on the easiest samples of each batch first, and gradually on all of them.

    loss = mean of the k smallest sample losses,    k / B = start + (1 - start) * min(1, t / steps)

Saves: training steps if labels are noisy, because wrong and very hard samples are left out at first; none on clean data
Costs: the compute of the samples that are left out, because their losses must be known
Source: Kumar et al. (2010), https://papers.nips.cc/paper/3923; Bengio et al. (2009)
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.application.loss import LossHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import check_number
from lit_efficient.losses.selection import easiest
from lit_efficient.mechanisms.ramps import check_steps, ramped, steps_of
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class LossCurriculum(LossHooks, Technique):
    """Train only on the samples of each batch with the smallest losses, and on more of them in each step.

    Each process chooses among the samples of its own micro-batch. Sample weights of other techniques are multiplied
    with these.

    Args:
        start: Share of the samples that count at first, above 0 and at most 1.
        steps: Number of optimizer steps until all samples count, or a share of ``max_steps`` between 0 and 1.

    Raises:
        ConfigurationError: For an argument out of range, and for a share in a run without ``max_steps``. In the first
            step, if ``training_step`` returns no ``sample_loss`` [B].
    """

    counts_steps = True
    phase = Phase.LOSS
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_BATCH: "it chooses the easiest samples of a batch",
    }
    needs = ("steps",)
    conflicts: ClassVar[dict[str, str]] = {
        "SelectiveBackprop": "one selects the easy samples and the other the hard ones; keep one of them"
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "quality": (0, "wrong labels have less influence; changes the result")
    }

    def __init__(self, start: float = 0.5, steps: int | float = 0.5) -> None:
        super().__init__()
        check_number("LossCurriculum", "start", start, above=0, most=1)
        check_steps("LossCurriculum", "steps", steps)
        self.start = start
        self.steps = steps
        self._steps = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._steps = steps_of("LossCurriculum", "steps", self.steps, trainer)
        super().setup(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        return Report(f"the easiest {self.start:.0%} of each batch at first, the whole batch after {self._steps} steps")

    def sample_weights(self, output: Mapping[str, Any], module: nn.Module) -> Tensor:
        """Return the weights of the samples, [B]: 0 for samples that are not yet used."""
        step: Any = module.trainer.global_step  # type: ignore[union-attr]
        return easiest(output["sample_loss"].detach(), ramped(step, self.start, 1.0, self._steps))
