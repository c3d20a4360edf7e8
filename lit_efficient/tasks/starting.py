"""A task that starts from the weights of a trained language model."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_efficient.errors import CheckpointError


def give_weights(trained: nn.Module, network: nn.Module, whence: str) -> None:
    """Give ``network`` the weights of a task's network, with its adapters merged.

    Args:
        trained: a `LanguageModeling`; its adapters are merged in place.
        network: of the same shape; changed in place.
        whence: who asks and where the weights are from, for the error.

    Raises:
        CheckpointError: If the shape is another.
    """
    from lit_efficient.mechanisms.adapters.merge import merge_adapters

    merged: Any = merge_adapters(trained)
    try:
        network.load_state_dict(merged.network.state_dict())
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{whence} does not fit the model here: {reason}") from error
