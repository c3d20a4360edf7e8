"""What a training step will take, before any weights are made: memory by kind, FLOPs, parameters, techniques.

    peak = max over a steady step of the sum of all living storages

The step is traced without values (:mod:`~.traced_step`), so that a network of any size is planned in the memory of its
description. The batch is the largest that the data's samples make, where the data is there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_efficient.errors import ConfigurationError, check_choice
from lit_efficient.evidence.few_blocks import FewBlocks
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource, LiveFit
from lit_efficient.evidence.memory_kinds import BLOCK, KINDS, Moment
from lit_efficient.evidence.planning.deep_networks import FEW, MANY, MORE, deepened
from lit_efficient.evidence.planning.planned_batch import batch_of
from lit_efficient.evidence.planning.traced_step import trace
from lit_efficient.internals.torch_fake import FakeCopyMode, FakeTensorMode
from lit_efficient.mechanisms.metering import count_batch, samples_of

AS_CUDA = (
    "Of CUDA's kernels are known RMSNorm's, which keeps its input alone, attention within documents, the chunks of a "
    "loss, and what autocast widens to float32; the others are taken to keep what the CPU's keep, without scratch, and "
    "states are taken to stay there."
)


@dataclass(frozen=True)
class Plan:
    """What one optimizer step takes on one device, from the second step on.

    Args:
        peak: The most bytes that live on the device at a time, the allocator's margin included.
        kinds: What they are, by kind (:data:`~.memory_kinds.KINDS`).
        resident: Bytes by kind between steps.
        host: Bytes in CPU memory, where that is not the device.
        timeline: One step, in at most some hundred points.
        parameters: Number of elements of the network's parameters.
        trainable: Those that are stepped.
        flops: Operations of the step, with what is computed twice.
        techniques: Names in the order in which they act, and what each touches.
        batch: Samples of a batch.
        unit: ``tokens`` or ``samples``.
        amount: How many a step has.
        notes: What was assumed or is not covered.
        at_most: Why a real step may take less; empty: it takes as much.
        at_least: Why it may take more.
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


def plan(source: FitSource | Any, change: Change = AS_IT_IS, *, device: str | None = None) -> Plan:
    """Say what a fit will take, without its weights.

    Args:
        source: Makes the fit: of a config, or :class:`~.fits.LiveFit` of a trainer, a module and data that exist.
        change: What it has that the fit as it is has not.
        device: ``cpu`` or ``cuda``: whose allocator rounds; ``None``: the trainer's.

    Raises:
        ConfigurationError: What the fit itself would refuse.
    """
    if device is not None:
        check_choice("plan", "device", device, ("cpu", "cuda"))
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def make(few: FewBlocks) -> Fit:
        made = source.make(change, FakeCopyMode(mode)) if isinstance(source, LiveFit) else source.make(change)
        made.trainer.callbacks = [few, *made.trainer.callbacks]
        return made

    few = FewBlocks(MORE, only_above=MANY)
    fit = make(few)
    if fit.trainer.world_size > 1:
        raise ConfigurationError(
            f"plan: this fit has {fit.trainer.world_size} processes, and one is traced: set trainer.devices to 1"
        )
    own = fit.trainer.strategy.root_device.type
    device = device or own
    notes: list[str] = []
    other = device if device != own else None
    if (device, own) == ("cuda", "cpu"):
        notes.append(AS_CUDA)
    elif other:
        notes.append(f"Kernels of {device} are taken to keep what those of {own} keep; states are taken to stay there.")
    batch, batches = batch_of(fit, notes)
    accumulated = fit.trainer.accumulate_grad_batches
    block = 1 if device == "cpu" else BLOCK
    traced = trace(fit, lambda: make(few), batch, batches, mode, block, other)
    if few.before:
        fewer = FewBlocks(FEW, only_above=MANY)
        shallow = make(fewer)
        shallow.data = fit.data
        traced = deepened(trace(shallow, lambda: make(fewer), batch, batches, mode, block, other), traced, few.before)
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
    )
