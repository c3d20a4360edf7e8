"""What a comparison has found: each variant of a fit beside the fit as it is.

Times are compared round by round: in a round every variant runs once, one after the other. Losses are compared seed by
seed: both runs have the same data, and begin with the same weights where these are the same.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from lit_efficient.evidence.comparing.estimates import UNKNOWN, Estimate

BASELINE = "baseline"
TRAINING_LOSS = "training loss"


@dataclass
class VariantResult:
    """What one variant costs and brings.

    Args:
        name: Its name.
        failed: Why there is nothing of it; else empty.
        time: Ratio of the median step's time to the baseline's, over the rounds.
        rate: Tokens or samples a second, over the rounds; no p.
        unit: ``tokens`` or ``samples``.
        step_seconds: The median step, median over the rounds.
        peak: Bytes of tensors at the peak of a step; 0 where they cannot be seen.
        peak_ratio: To the baseline's; NaN where one is unknown.
        kinds: Bytes at the peak by kind.
        planned: What `plan` predicts for the peak; ``None`` where it cannot.
        checkpoint_bytes: Of a checkpoint.
        trainable: Parameters that train.
        final_loss: The metric at the end, mean over the seeds.
        loss: Its difference to the baseline's after the same steps, over the seeds.
        loss_at_time: The difference after the same seconds: those of whichever of the two is done first.
        steps_to_loss: Steps until the metric is as low as the baseline's at its end, as a ratio to the baseline's;
            ``None`` where a seed does not come so far.
        time_to_loss: The same in seconds of training.
        forgotten: What the loss on other held-out data gains over the training, mean over the seeds; NaN where no such
            data was given.
        forgetting: Its difference to the baseline's; ``None`` where no such data was given.
        curve: Step, seconds of training and metric, the median over the seeds.
        seeds: Runs whose losses are compared.
        rounds: Runs whose times are compared.
        remarks: What no number tells: runs that failed where others did not, that ended early or diverged.
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
    """A fit as it is and its variants.

    Args:
        command: What made it, to be typed again.
        about: Versions, machine, date, what was compared and how often; ``left_out`` has what could not be.
        metric: What ``loss`` is: a metric of the validation, or the training loss; lower is better.
        variants: The baseline first.
    """

    command: str
    about: dict[str, Any]
    metric: str
    variants: list[VariantResult]

    def __getitem__(self, name: str) -> VariantResult:
        return next(one for one in self.variants if one.name == name)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)
