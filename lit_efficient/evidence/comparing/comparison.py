"""Results of a comparison: figures of each variant of a fit, and their differences from the unchanged fit.

Times are compared round by round. In a round every variant runs once, one after the other. Losses are compared seed by
seed. Both runs of a seed have the same data, and the same initial weights for those parameters that both have.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lit_efficient.evidence.comparing.estimates import UNKNOWN, Estimate

BASELINE = "baseline"
TRAINING_LOSS = "training loss"
# Fields of a result that compare a variant with the baseline.
COMPARED = ("time", "loss", "loss_at_time", "steps_to_loss", "time_to_loss", "forgetting")
ESTIMATES = ("rate", *COMPARED)


@dataclass
class VariantResult:
    """Measurements of one variant.

    Args:
        name: Name of the variant.
        failed: Reason why there is no result; empty if there is one.
        time: Ratio of the median step time to the baseline's, over the rounds.
        rate: Tokens or samples a second, over the rounds. It has no p-value.
        unit: ``tokens`` or ``samples``.
        step_seconds: Median over the rounds of the median step time.
        peak: Bytes of tensors at the peak of a step; 0 if they cannot be observed.
        peak_ratio: Ratio of ``peak`` to the baseline's; NaN if one of the two is unknown.
        kinds: Bytes at the peak by kind of memory.
        planned: Peak that `plan` predicts, in bytes; ``None`` if it makes no prediction.
        checkpoint_bytes: Size of a checkpoint.
        trainable: Number of trainable parameters.
        final_loss: Metric at the end, mean over the seeds.
        loss: Difference of the metric from the baseline's after the same steps, over the seeds.
        loss_at_time: Difference of the metric after the same time, which is the shorter of both trainings.
        steps_to_loss: Steps until the metric is as low as the baseline's at its end, as a ratio to the baseline's
            steps; ``None`` if a seed does not get there.
        time_to_loss: The same ratio for seconds of training.
        forgotten: Increase of the loss on other held-out data over the training, mean over the seeds; NaN without
            such data.
        forgetting: Difference of ``forgotten`` from the baseline's; ``None`` without such data.
        curve: Step, seconds of training and metric; medians over the seeds.
        seeds: Number of runs whose losses are compared.
        rounds: Number of runs whose times are compared.
        remarks: Sentences on runs that failed, ended early or diverged.
    """

    name: str
    failed: str = ""
    time: Estimate = UNKNOWN
    rate: Estimate = UNKNOWN
    unit: str = ""
    step_seconds: float = math.nan
    peak: int = 0
    peak_ratio: float = math.nan
    kinds: dict[str, int] = field(default_factory=dict)
    planned: int | None = None
    checkpoint_bytes: int = 0
    trainable: int = 0
    final_loss: float = math.nan
    loss: Estimate = UNKNOWN
    loss_at_time: Estimate = UNKNOWN
    steps_to_loss: Estimate | None = None
    time_to_loss: Estimate | None = None
    forgotten: float = math.nan
    forgetting: Estimate | None = None
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    seeds: int = 0
    rounds: int = 0
    remarks: list[str] = field(default_factory=list)


@dataclass
class Comparison:
    """A fit and its variants.

    Args:
        command: Command that repeats the comparison.
        about: Versions, machine, date and settings. ``left_out`` holds the changes that were refused, with reasons.
        metric: The metric of ``loss``, of the validation or the training loss; lower is better.
        variants: The baseline, then the others.
    """

    command: str
    about: dict[str, Any]
    metric: str
    variants: list[VariantResult]

    def __getitem__(self, name: str) -> VariantResult:
        return next(one for one in self.variants if one.name == name)

    @property
    def done(self) -> list[VariantResult]:
        """The variants that did not fail."""
        return [each for each in self.variants if not each.failed]

    def as_dict(self) -> dict[str, Any]:
        """Return all results as data for JSON."""
        return asdict(self)
