"""A trained module from its checkpoint alone, without a trainer: techniques applied again, averaged weights chosen.

What a checkpoint records of techniques is enough to change a fresh network as the training run did; the weights then
fit it. Of a run with `EMA` or `CheckpointAverage` the average is what evaluation used, so it is what is taken.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lit_efficient.application import replay, technique_of
from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import CheckpointError, check_choice, refusal
from lit_efficient.files.records import rebuild
from lit_efficient.mechanisms.averages.shadow import ShadowWeights
from lit_efficient.surgery import memory_of

Weights = Literal["auto", "average", "raw"]
Asked = Literal["auto", "average", "raw", "ema"]
Module = TypeVar("Module", bound=nn.Module)


def restore(
    module: Module, path_or_checkpoint: str | os.PathLike[str] | Mapping[str, Any], weights: Weights = "auto"
) -> Module:
    """Give ``module`` the weights of a run with techniques, in place, and say which they are.

    ``load_from_checkpoint`` knows no techniques: it misses the layers that adapters have changed, and takes the raw
    weights of a run that was validated by their average.

        module = restore(MyModule(), "runs/mine/latest/best.ckpt")

    Args:
        module: as its class builds it, before any technique; one of Lightning builds its ``configure_model`` here.
        path_or_checkpoint: a checkpoint's file, which is verified as it is read, or its content.
        weights: the ``average`` of a run that kept one, the ``raw`` weights, or ``auto``: the average where there is
            one, which is what such a run validates.

    Returns:
        The same module, in eval mode, on the device where it was.

    Raises:
        CheckpointError: for a file that is damaged, an average that it does not hold, or tensors that do not fit.
        ConfigurationError: for a technique of somebody else's whose class is not imported.
    """
    check_choice("restore", "weights", weights, get_args(Weights))
    if not isinstance(module, nn.Module):
        raise refusal("restore", "module", "an instance, as MyModule()", module)
    checkpoint: Any = path_or_checkpoint
    if not isinstance(checkpoint, Mapping):
        checkpoint = read_checkpoint(checkpoint)
    if isinstance(module, LightningModule):
        module.configure_model()
        module.on_load_checkpoint(dict(checkpoint))
    held = take_weights(module, checkpoint, weights)
    rank_zero_info(f"restore: {type(module).__name__} has the weights {held!r} of the checkpoint")
    return module


def wanted_weights(owner: str, asked: Asked | None) -> Weights:
    """What exports are asked for: ``ema`` is the average, and None is ``auto``."""
    check_choice(owner, "weights", asked, get_args(Asked), null=True)
    return "average" if asked == "ema" else asked or "auto"


def take_weights(module: nn.Module, checkpoint: Mapping[str, Any], weights: Weights) -> str:
    """As `restore`, of a module that is built and whose ``on_load_checkpoint`` has been called.

    Returns:
        Which weights they are: ``raw``, or what the technique calls its average.
    """
    replay(module, checkpoint)
    state, held = weights_of(checkpoint, weights, module)
    try:
        module.load_state_dict(state, strict=getattr(module, "strict_loading", True))
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {' '.join(str(error).split())[:300]}") from error
    module.eval()
    return held


def weights_of(
    checkpoint: Mapping[str, Any], weights: Weights, module: nn.Module | None = None
) -> tuple[dict[str, Tensor], str]:
    """The tensors of a checkpoint, averaged ones in the place of raw ones where they are wanted, and which they are.

    Shards are placed like the parameters of the module that is about to load them, if there is one.

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
            average = without_heads(average, checkpoint) | dict(technique.buffers_for(state))
            technique.forget()  # each tensor goes as soon as it has the format of its weight
            for name in [*average]:
                tensor = average.pop(name)
                raw = state.get(name, tensor)
                state |= dict.fromkeys([name, *tied.get(memory_of(raw), ())], tensor.to(raw.dtype))
            return state, technique.label
    if weights == "average":
        raise CheckpointError(
            "the checkpoint holds no average of weights: the run had neither EMA nor CheckpointAverage"
        )
    return state, "raw"


def without_heads(average: Mapping[str, Tensor], checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """An average without what trained beside the network and is none of its weights, such as an alignment's heads."""
    aside = checkpoint.get("lit_efficient", {}).get("training_only", ())
    return {name: tensor for name, tensor in average.items() if name not in aside}


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
