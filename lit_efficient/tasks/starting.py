"""A trained language model from its checkpoint, and a task that starts from one's weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_efficient.errors import CheckpointError
from lit_efficient.files import read


def load_language_model(path: str, weights: Any = "auto") -> tuple[Any, str]:
    """The model of a checkpoint, ready to write.

    Args:
        path: a checkpoint of `LanguageModeling` or `Preference`.
        weights: ``auto``, ``average`` or ``raw``, see `lit_efficient.restore.restore`.

    Returns:
        The module, and which weights it has.

    Raises:
        CheckpointError: if the file cannot be read, or was not written by a language model.
    """
    from lit_efficient.restore import restore
    from lit_efficient.tasks.language_modeling import LanguageModeling
    from lit_efficient.tasks.preference import Preference

    checkpoint = read(path)
    if "language_modeling" not in checkpoint:
        raise CheckpointError(f"{path} is not a checkpoint of LanguageModeling")
    arguments = checkpoint["hyper_parameters"]
    # Adapters of a preference run stand beside the weights that it started from.
    model = Preference(**arguments) if "preference" in checkpoint else LanguageModeling(arguments["model"])
    model.on_load_checkpoint(checkpoint)
    return model, restore(model, checkpoint, weights)


def give_weights(trained: nn.Module, network: nn.Module, whence: str) -> None:
    """Give ``network`` the weights of a task's network, with its adapters merged.

    Args:
        trained: a `LanguageModeling`; its adapters are merged in place.
        network: of the same shape; changed in place.
        whence: who asks and where the weights are from, for the error.

    Raises:
        CheckpointError: If the shape is another.
    """
    from lit_efficient.adapters.merge import merge_adapters

    merged: Any = merge_adapters(trained)
    try:
        network.load_state_dict(merged.network.state_dict())
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{whence} does not fit the model here: {reason}") from error
