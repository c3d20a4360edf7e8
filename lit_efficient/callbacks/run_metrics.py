"""What one asks of every run, in its loggers: rates, gradient norm, throughput, memory, time spent waiting for data.

    lr                  each group's: lr/NAME, or lr/INDEX where groups have no names and there are several
    grad_norm           2-norm of all gradients, unscaled, before clipping; grad_norm/INDEX of several optimizers
    tokens_per_second   of all processes, each taken to have as many as this one; padding is not counted, nor time in
                        validation; samples_per_second of what has no input_ids
    data_wait           share of that time in which the loop waited for its next batch
    peak_memory_gib     most that tensors took on the device so far; on a CPU most that the process took

Costs: one fused norm over the gradients and one wait for the device a logged step; none at those between.
"""

from typing import ClassVar

from lit_efficient.mechanisms.run_figures import RunFigures


class RunMetrics(RunFigures):
    """Logs learning rates, gradient norm, throughput, peak memory and time spent waiting, whenever the trainer logs.

    Names that the module logs itself stay the module's, and rates are left to a ``LearningRateMonitor``. Strategies
    that join parameters (FSDP1, DeepSpeed) have no gradient norm. The command line adds it to every fit, unless there
    is a `ThroughputMeter`.
    """

    kind: ClassVar[type] = RunFigures  # any of these takes its place
