"""Traits that a technique declares, and the conflicts between traits. Standard library only.

A technique lists its traits in ``traits``. Code that several techniques share asks for a trait and never for a name, so
a technique that is not part of this package is treated like one that is. Two techniques with conflicting traits are
refused (:data:`CONFLICTS`). A new technique therefore changes no other technique's table.
"""

from collections.abc import Iterable, Mapping
from enum import Enum, auto


class Trait(Enum):
    """A fact about a technique or an optimizer."""

    # How the network is transformed.
    AFTER_SHARDING = auto()  # may transform a network whose parameters are DTensors already
    READS_NO_WEIGHTS = auto()  # the transform works before the weights are loaded
    REFUSES_EARLY = auto()  # the transform raises its errors on a copy on the meta device, too
    TRAINING_ONLY = auto()  # checkpoints hold the same weights with and without it: rebuilding a network leaves it out

    # What happens during the run.
    ACTS_AT_VALIDATION = auto()  # works after a validation only
    CHANGES_ACCUMULATION = auto()  # sets trainer.accumulate_grad_batches during the run
    DRAWS_WORK = auto()  # the amount of computation in a step is random
    LEAVES_TRACES = auto()  # writes files, logs or stops the run: trial steps that are undone run without it
    NEEDS_ALL_GRADIENTS = auto()  # reads all gradients of a step together
    READS_SCALED_GRADIENTS = auto()  # copes with gradients that a loss scaler has not unscaled
    RETAINS_GRAPH = auto()  # takes gradients before the backward pass: the graph is traversed twice
    SEEDS_BATCHES = auto()  # random numbers depend on the seed and the batch index, also after a resume
    TAKES_LESS_THAN_MEASURED = auto()  # a measured step is the worst case: later steps take less memory
    TRIES_STEPS = auto()  # runs training steps before the first one and undoes them

    # Limits, each declared with its reason in ``reasons``.
    NEEDS_WHOLE_BATCH = auto()  # the loss of a batch is not the mean of the losses of its micro-batches
    NEEDS_WHOLE_ROWS = auto()  # a row of tokens cannot be split between processes
    SEES_AHEAD = auto()  # in training, the output for a token depends on later tokens

    # What may exclude another technique.
    ADAPTER = auto()  # freezes the base and trains parameters that it adds, in float32
    AVERAGES_WHOLE_MODEL = auto()  # copies the whole model and averages it, frozen weights included
    CLIPS = auto()  # bounds the gradients
    FOLLOWS_PARAMETERS = auto()  # keeps names or identities of the network's parameters during the run
    FREEZES_MATRICES = auto()  # freezes the weight matrices of the network
    KEEPS_SMALL_UPDATES = auto()  # keeps updates that 16-bit weights would round away
    LOW_RANK = auto()  # keeps the optimizer's moments in a low-rank subspace
    MATCHES_FEATURES = auto()  # compares the network's features with those of a teacher
    NO_LOW_RANK_FORM = auto()  # an optimizer that LOW_RANK techniques cannot turn into theirs
    NO_SCHEDULE_FREE_FORM = auto()  # an optimizer that has no schedule-free variant
    PREPENDS_TOKENS = auto()  # puts virtual tokens before the input of the first block
    RECOMPUTES = auto()  # recomputes blocks in the backward pass
    REPLACES_PARAMETERS = auto()  # registers other parameters of the network during the run, under other names
    RETRAINS_BASE = auto()  # freezes layers, and adds them to the optimizer during the run
    SCHEDULE_FREE = auto()  # averages the weights inside the optimizer and swaps them for evaluation
    STEPS_IN_BACKWARD = auto()  # steps each parameter in the backward pass and frees its gradient
    SWAPS_WEIGHTS = auto()  # evaluates other weights than the trained ones
    VIRTUAL_TOKENS = auto()  # trains virtual tokens, whose keys and values go before those of the input


def has_trait(part: object, trait: Trait) -> bool:
    """Return whether ``part``, any callback or optimizer, declares ``trait``."""
    return trait in getattr(part, "traits", ())


def traits_of_class(names: Iterable[str], declared: frozenset[Trait]) -> frozenset[Trait]:
    """Return the declared traits, and those of :data:`OF_LIGHTNING` for the names of a class and its bases."""
    found = set(declared)
    for name in names:
        found |= OF_LIGHTNING.get(name, frozenset())
    return frozenset(found)


def conflict_of(one: str, ours: frozenset[Trait], other: str, theirs: frozenset[Trait]) -> str:
    """Return why the traits of two classes with these names exclude each other, or an empty string."""
    for (first, second), sentence in CONFLICTS.items():
        if first in ours and second in theirs:
            return sentence.format(first=one, second=other)
        if first in theirs and second in ours:
            return sentence.format(first=other, second=one)
    return ""


# Traits of Lightning's own callbacks, by the name of the class: it exists in two namespaces.
OF_LIGHTNING: Mapping[str, frozenset[Trait]] = {
    "GradientAccumulationScheduler": frozenset({Trait.CHANGES_ACCUMULATION}),
    "BaseFinetuning": frozenset({Trait.RETRAINS_BASE}),
    "ModelPruning": frozenset({Trait.REPLACES_PARAMETERS}),
    "StochasticWeightAveraging": frozenset({Trait.AVERAGES_WHOLE_MODEL, Trait.SWAPS_WEIGHTS}),
    "WeightAveraging": frozenset({Trait.AVERAGES_WHOLE_MODEL, Trait.SWAPS_WEIGHTS}),
}

# Two traits that exclude each other -> the reason and the way out. ``{first}`` and ``{second}`` are the classes with
# the first and the second trait. A pair of classes that has a reason of its own, in ``conflicts`` of either class,
# keeps that reason.
CONFLICTS: Mapping[tuple[Trait, Trait], str] = {
    (Trait.ADAPTER, Trait.ADAPTER): "each freezes all parameters except its own: keep one of them",
    (Trait.ADAPTER, Trait.AVERAGES_WHOLE_MODEL): (
        "{second} copies the model apart from the techniques, and averages the frozen base, too: use EMA"
    ),
    (Trait.ADAPTER, Trait.RETRAINS_BASE): (
        "{first} freezes the base, and {second} trains it again during the run: keep one of them"
    ),
    (Trait.ADAPTER, Trait.KEEPS_SMALL_UPDATES): (
        "{first} trains float32 parameters, which lose no update: leave {second} out"
    ),
    (Trait.CHANGES_ACCUMULATION, Trait.CHANGES_ACCUMULATION): "both set accumulate_grad_batches: keep one of them",
    (Trait.CLIPS, Trait.CLIPS): "both clip gradients, so that neither limit holds: keep one of them",
    (Trait.FREEZES_MATRICES, Trait.LOW_RANK): (
        "{first} freezes the matrices whose gradients {second} projects: leave one of them out"
    ),
    (Trait.FOLLOWS_PARAMETERS, Trait.REPLACES_PARAMETERS): (
        "{second} puts other parameters in the place of the network's during the run, and {first} would go on with the "
        "old ones: leave one of them out, or prune after training"
    ),
    (Trait.FREEZES_MATRICES, Trait.RETRAINS_BASE): (
        "{first} freezes matrices that {second} would train during the run: keep one of them"
    ),
    (Trait.KEEPS_SMALL_UPDATES, Trait.KEEPS_SMALL_UPDATES): (
        "both keep the updates that rounding would lose: keep one of them"
    ),
    (Trait.LOW_RANK, Trait.NO_LOW_RANK_FORM): (
        "{second} has no low-rank form: use AdamW or FusedAdamW, or leave {first} out"
    ),
    (Trait.LOW_RANK, Trait.LOW_RANK): "both choose the subspace of the optimizer's moments: keep one of them",
    (Trait.MATCHES_FEATURES, Trait.AVERAGES_WHOLE_MODEL): (
        "{second} copies the model apart from the techniques, and averages the heads of {first}, too: use EMA"
    ),
    (Trait.MATCHES_FEATURES, Trait.PREPENDS_TOKENS): (
        "layers also run on the virtual tokens of {second}, which the teacher does not see: use PrefixTuning"
    ),
    (Trait.NEEDS_ALL_GRADIENTS, Trait.STEPS_IN_BACKWARD): (
        "{first} needs all gradients of a step together, and {second} frees each of them in the backward pass: leave "
        "one of them out"
    ),
    (Trait.RECOMPUTES, Trait.VIRTUAL_TOKENS): (
        "a block that {first} recomputes finds a cache that already has its keys, or no cache: save memory with a "
        "smaller batch and accumulate_grad_batches, or use LoRA"
    ),
    (Trait.SCHEDULE_FREE, Trait.KEEPS_SMALL_UPDATES): (
        "the average of the weights that {first} keeps would be rounded to bfloat16: use precision: bf16-mixed"
    ),
    (Trait.SCHEDULE_FREE, Trait.LOW_RANK): "both turn AdamW into another optimizer: leave one of them out",
    (Trait.SCHEDULE_FREE, Trait.REPLACES_PARAMETERS): (
        "{first} ends with the average of the weights, which is not pruned as {second} prunes the last ones: leave one "
        "of them out, or prune after training"
    ),
    (Trait.SCHEDULE_FREE, Trait.SWAPS_WEIGHTS): (
        "both average the weights and swap them for validation: keep one of them"
    ),
    (Trait.SWAPS_WEIGHTS, Trait.SWAPS_WEIGHTS): "both swap the weights for evaluation: keep one of them",
}
