"""Predict the cost of a training step without weights: memory by kind, FLOPs, parameters, techniques.

    peak = max over a steady step of the sum of all allocated storages

The step is traced without values (:mod:`~.traced_step`), so that planning a network of any size takes little memory.
The batch consists of the largest samples of the data, if the data is available.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lit_efficient.errors import ConfigurationError, NoEffectError, check_choice
from lit_efficient.evidence.few_blocks import FewBlocks
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource, LiveFit
from lit_efficient.evidence.memory_kinds import BLOCK, KINDS, Moment
from lit_efficient.evidence.planning.deep_networks import FEW, MANY, MORE, deepened
from lit_efficient.evidence.planning.planned_batch import batch_of
from lit_efficient.evidence.planning.traced_step import Traced, trace
from lit_efficient.internals.torch_fake import FakeCopyMode, FakeTensorMode
from lit_efficient.mechanisms.metering import count_batch, samples_of

AS_CUDA = (
    "CUDA is simulated: RMSNorm keeps only its input, attention within documents, the chunks of a loss and values that "
    "autocast widens to float32 are as on CUDA. Other kernels are assumed to keep the same tensors as those of the "
    "CPU, without scratch memory, and states are assumed to stay on the device."
)


@dataclass(frozen=True)
class Plan:
    """Cost of one optimizer step on one device, from the second step on.

    Args:
        peak: Most bytes allocated on the device at a time, including the allocator's rounding.
        kinds: The peak by kind (:data:`~.memory_kinds.KINDS`).
        resident: Bytes between steps by kind.
        host: Bytes in CPU memory, if the device is another one.
        timeline: One step in at most some hundred points.
        parameters: Number of parameters. Quantised codes count as the weights that they encode.
        trainable: Number of parameters that an optimizer updates.
        flops: Operations of the step, including recomputation.
        techniques: Name and report of each technique, in the order in which they act.
        batch: Samples in a batch.
        unit: ``tokens`` or ``samples``.
        amount: Number of units in a step.
        notes: Assumptions, and what the plan does not cover.
        at_most: Reason why a real step may need less; empty if it needs as much.
        at_least: Reason why a real step may need more; empty if it needs no more.
        accumulated: Batches in an optimizer step.
        reported: Part of the network that the reports of ``techniques`` describe; empty if they describe all of it.
    """

    peak: int
    kinds: Mapping[str, int]
    resident: Mapping[str, int]
    host: int
    timeline: tuple[Moment, ...]
    parameters: int
    trainable: int
    flops: int
    techniques: tuple[tuple[str, str], ...]
    batch: int
    unit: str
    amount: int
    notes: tuple[str, ...]
    at_most: str = ""
    at_least: str = ""
    accumulated: int = 1
    reported: str = ""


def plan(source: FitSource, change: Change = AS_IT_IS, *, device: str | None = None) -> Plan:
    """Predict the cost of a training step of a fit, without its weights.

    Args:
        source: Makes the fit: from a config, or as a :class:`~.fits.LiveFit` from a trainer, a module and data.
        change: Change of the fit.
        device: ``cpu`` or ``cuda``, whose kernels and allocator are assumed; ``None`` takes the trainer's device.

    Raises:
        ConfigurationError: If the fit itself would be refused, has several processes, or cannot be traced.
    """
    if device is not None:
        check_choice("plan", "device", device, ("cpu", "cuda"))
    # Real tensors of data and of callbacks appear next to fake ones.
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def make(few: FewBlocks) -> Fit:
        if isinstance(source, LiveFit):
            made = source.make(change, FakeCopyMode(mode))
        else:
            made = source.make(change)
        made.trainer.callbacks = [few, *made.trainer.callbacks]
        return made

    # Tracing takes time proportional to the number of blocks.
    few = FewBlocks(MORE, only_above=MANY)
    fit = make(few)
    if fit.trainer.world_size > 1:
        raise ConfigurationError(
            f"plan: this fit has {fit.trainer.world_size} processes, but only one can be traced: set trainer.devices "
            "to 1"
        )
    own = fit.trainer.strategy.root_device.type
    device = device or own
    simulated = None
    if device != own:
        simulated = device
    notes: list[str] = []
    if (device, own) == ("cuda", "cpu"):
        notes.append(AS_CUDA)
    elif simulated:
        notes.append(
            f"Kernels of {device} are assumed to keep the same tensors as those of {own}, and states to stay on the "
            "device."
        )
    batch, batches = batch_of(fit, notes, mode)
    accumulated = int(fit.trainer.accumulate_grad_batches)  # a trace reduces it
    block = BLOCK
    if device == "cpu":
        block = 1

    def traced_with(few: FewBlocks, fit: Fit) -> Traced:
        return trace(fit, lambda: make(few), batch, batches, mode, block, simulated)

    extrapolated: Traced | None = None
    try:
        traced = traced_with(few, fit)
        # The first trace shows whether blocks were removed.
        if few.before:
            fewer = FewBlocks(FEW, only_above=MANY)
            shallow = make(fewer)
            shallow.data = fit.data  # which is prepared already
            extrapolated = deepened(traced_with(fewer, shallow), traced, few.before)
    except NoEffectError:
        # A technique may save nothing on so few blocks, and much on all of them.
        if not few.before:
            raise
    if extrapolated is not None:
        traced = extrapolated
    elif few.before:
        few = FewBlocks(MORE, only_above=few.before)
        whole = make(few)
        whole.data = fit.data
        traced = traced_with(few, whole)
    amount, unit = count_batch(batch)
    memory = traced.memory
    return Plan(
        peak=memory.peak,
        kinds={kind: memory.kinds.get(kind, 0) for kind in KINDS},
        resident={kind: memory.resident.get(kind, 0) for kind in KINDS},
        host=memory.host,
        timeline=memory.timeline,
        parameters=traced.parameters,
        trainable=traced.trainable,
        flops=traced.flops,
        techniques=traced.techniques,
        batch=samples_of(batch),
        unit=unit,
        amount=amount * accumulated,
        notes=(*notes, *traced.notes),
        at_most=traced.at_most,
        at_least=traced.at_least,
        accumulated=accumulated,
        reported=traced.reported,
    )
