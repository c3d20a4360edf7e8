"""Restore a trained module from its checkpoint without a trainer: reapply the techniques and choose the weights.

A checkpoint records the techniques of its run and their arguments. They change a new network as the training run did,
so that the weights fit. If the run kept an average (`EMA`, `CheckpointAverage`), evaluation used the average, so the
average is the default.
"""

import os
from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lit_efficient.application.recorded import replay, technique_of
from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import CheckpointError, check_choice, refusal
from lit_efficient.files.checkpoints import Fields
from lit_efficient.files.records import rebuild
from lit_efficient.mechanisms.averages.shadow import ShadowWeights
from lit_efficient.surgery import memory_of

Weights = Literal["auto", "average", "raw"]
Asked = Literal["auto", "average", "raw", "ema"]
Module = TypeVar("Module", bound=nn.Module)


def restore(
    module: Module, path_or_checkpoint: str | os.PathLike[str] | Mapping[str, object], weights: Weights = "auto"
) -> Module:
    """Load the weights of a run with techniques into ``module``, in place, and log which weights they are.

    Lightning's ``load_from_checkpoint`` does not know techniques: it ignores the layers that adapters have changed, and
    loads the raw weights of a run whose average was validated.

        module = restore(MyModule(), "runs/mine/latest/best.ckpt")

    Args:
        module: A new module, to which no technique was applied. ``configure_model`` of a LightningModule is called.
        path_or_checkpoint: Path of a checkpoint, whose hashes are verified, or a loaded checkpoint.
        weights: ``average``, ``raw``, or ``auto``: the average if the run kept one, else the raw weights.

    Returns:
        The same module, in eval mode, on its device.

    Raises:
        CheckpointError: If the file is damaged, if it holds no average and one is wanted, or if tensors do not fit.
        ConfigurationError: If a technique of another package is needed and its class is not imported.
    """
    check_choice("restore", "weights", weights, get_args(Weights))
    if not isinstance(module, nn.Module):
        raise refusal("restore", "module", "an instance, as MyModule()", module)
    checkpoint = path_or_checkpoint
    if not isinstance(checkpoint, Mapping):
        checkpoint = read_checkpoint(checkpoint)
    if isinstance(module, LightningModule):
        module.configure_model()
        module.on_load_checkpoint(dict(checkpoint))
    held = take_weights(module, checkpoint, weights)
    rank_zero_info(f"restore: {type(module).__name__} has the weights {held!r} of the checkpoint")
    return module


def wanted_weights(owner: str, asked: Asked | None) -> Weights:
    """Return the weights that the argument of an export means: ``ema`` is the average, and None is ``auto``."""
    check_choice(owner, "weights", asked, get_args(Asked), null=True)
    if asked == "ema":
        return "average"
    return asked or "auto"


def take_weights(module: nn.Module, checkpoint: Mapping[str, object], weights: Weights) -> str:
    """Load weights as `restore` does, into a module whose ``on_load_checkpoint`` has been called already.

    Returns:
        ``raw``, or the label of the average.
    """
    replay(module, checkpoint)
    state, held = weights_of(checkpoint, weights, module)
    try:
        module.load_state_dict(state, strict=getattr(module, "strict_loading", True))
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {' '.join(str(error).split())[:300]}") from error
    module.eval()
    return held


def weights_of(checkpoint: Fields, weights: Weights, module: nn.Module | None = None) -> tuple[dict[str, Tensor], str]:
    """Return the state dict of a checkpoint, with averaged weights if they are wanted, and the label of the weights.

    Args:
        checkpoint: The checkpoint.
        weights: As for :func:`restore`.
        module: Module that will load the weights. Shards are placed like its parameters.

    Raises:
        CheckpointError: If the checkpoint does not hold the wanted weights.
    """
    state = dict(checkpoint["state_dict"])
    held = str(checkpoint.get("lit_efficient", {}).get("weights", "raw"))
    if held != "raw" and weights == "raw":
        raise CheckpointError(f"the checkpoint holds only the weights {held!r}, and no raw weights")
    if held != "raw" or weights == "raw":
        return state, held
    for technique in _shadows(checkpoint):
        average = technique.average(nn.Module() if module is None else module)
        if average:
            tied: dict[object, list[str]] = {}
            for name, tensor in state.items():
                tied.setdefault(memory_of(tensor), []).append(name)
            average = without_heads(average, checkpoint) | dict(technique.buffers_for(state))
            technique.forget()  # frees each averaged tensor as soon as it has been converted below
            for name in [*average]:
                tensor = average.pop(name)
                raw = state.get(name, tensor)
                state |= dict.fromkeys([name, *tied.get(memory_of(raw), ())], tensor.to(raw.dtype))
            return state, technique.label
    if weights == "average":
        raise CheckpointError(
            "the checkpoint holds no average of the weights: its run used no technique that keeps one, such as EMA"
        )
    return state, "raw"


def without_heads(average: Mapping[str, Tensor], checkpoint: Fields) -> dict[str, Tensor]:
    """Return an average without parameters that exist only for training, such as the heads of an alignment loss."""
    training_only = checkpoint.get("lit_efficient", {}).get("training_only", ())
    return {name: tensor for name, tensor in average.items() if name not in training_only}


def _shadows(checkpoint: Fields) -> list[ShadowWeights]:
    """Return the averaging techniques of a checkpoint's run, with their state."""
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
