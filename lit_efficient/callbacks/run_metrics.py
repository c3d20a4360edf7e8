"""Run metrics: learning rates, gradient norm, throughput, memory and time spent waiting for data, in all loggers.

    lr                  learning rate; of several groups lr/NAME, or lr/INDEX if the groups have no names
    d                   step size that Prodigy or D-Adaptation has estimated, by which the rate is multiplied
    grad_norm           2-norm of all unscaled gradients before clipping; of several optimizers grad_norm/INDEX
    tokens_per_second   tokens of all processes, assuming that each has as many as this one, without padding and without
                        the time in validation; batches without input_ids give samples_per_second instead
    data_wait           share of that time in which the loop waited for its next batch
    peak_memory_gib     largest memory of tensors on the device so far; on a CPU largest memory of the process

Costs: in each logged step one fused norm over the gradients and one wait for the device; nothing in other steps
"""

from typing import ClassVar

from lit_efficient.mechanisms.run_figures import RunFigures


class RunMetrics(RunFigures):
    """Log learning rates, gradient norm, throughput, peak memory and time spent waiting, whenever the trainer logs.

    A metric that the module itself logs under the same name is not replaced. Rates are not logged if there is a
    ``LearningRateMonitor``. Strategies that join parameters (FSDP1, DeepSpeed) have no gradient norm. The command line
    adds this callback to every fit, unless there is a `ThroughputMeter`.
    """

    kind: ClassVar[type] = RunFigures  # the command line adds none if a callback of this class is there
