"""A trained module from its checkpoint alone, without a trainer: techniques applied again, averaged weights chosen.

What a checkpoint records of techniques is enough to change a fresh network as the training run did; the weights then
fit it. Of a run with `EMA` or `CheckpointAverage` the average is what evaluation used, so it is what is taken.
"""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from lit_efficient.application import replay, technique_of
from lit_efficient.errors import CheckpointError
from lit_efficient.files.records import rebuild
from lit_efficient.mechanisms.averages.shadow import ShadowWeights
from lit_efficient.surgery import memory_of


def restore(module: nn.Module, checkpoint: Mapping[str, Any], weights: Literal["auto", "average", "raw"]) -> str:
    """Give ``module`` what a checkpoint holds, in place, and put it into eval mode.

    Args:
        module: as it was built before techniques changed it; its ``on_load_checkpoint`` has been called.
        checkpoint: a Lightning checkpoint.
        weights: ``average`` of a run that kept one, the ``raw`` weights, or ``auto``: the average where there is one.

    Returns:
        Which weights they are: ``raw``, or what the technique calls its average.

    Raises:
        CheckpointError: for an average that the checkpoint does not hold, or tensors that do not fit.
    """
    replay(module, checkpoint)
    state, held = weights_of(checkpoint, weights, module)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {' '.join(str(error).split())[:300]}") from error
    module.eval()
    return held


def weights_of(
    checkpoint: Mapping[str, Any], weights: Literal["auto", "average", "raw"], module: nn.Module | None = None
) -> tuple[dict[str, Tensor], str]:
    """The tensors of a checkpoint, averaged ones in the place of raw ones where they are wanted, and which they are.

    Args:
        checkpoint: a Lightning checkpoint.
        weights: as for :func:`restore`.
        module: what is about to load them, if there is one; shards are placed like its parameters.

    Raises:
        CheckpointError: for an average that the checkpoint does not hold.
    """
    state = dict(checkpoint["state_dict"])
    held = str(checkpoint.get("lit_efficient", {}).get("weights", "raw"))
    if held != "raw" and weights == "raw":
        raise CheckpointError(f"the checkpoint holds the weights {held!r} alone, and no raw ones")
    if held != "raw" or weights == "raw":
        return state, held
    for technique in _shadows(checkpoint):
        average = technique.average(nn.Module() if module is None else module)
        if average:
            tied: dict[object, list[str]] = {}
            for name, tensor in state.items():
                tied.setdefault(memory_of(tensor), []).append(name)
            for name, tensor in (dict(average) | dict(technique.buffers_for(state))).items():
                raw = state.get(name, tensor)
                state |= dict.fromkeys([name, *tied.get(memory_of(raw), ())], tensor.to(raw.dtype))
            return state, technique.label
    if weights == "average":
        raise CheckpointError(
            "the checkpoint holds no average of weights: the run had neither EMA nor CheckpointAverage"
        )
    return state, "raw"


def _shadows(checkpoint: Mapping[str, Any]) -> list[ShadowWeights]:
    """The averaging techniques of the run, with their state."""
    found = []
    for record in checkpoint.get("lit_efficient", {}).get("techniques", ()):
        cls = technique_of(record)
        if cls is None or not issubclass(cls, ShadowWeights):
            continue
        technique = rebuild(cls, record["arguments"])
        state = checkpoint.get("callbacks", {}).get(technique.state_key)
        if state:
            technique.load_state_dict(state)
            found.append(technique)
    return found
