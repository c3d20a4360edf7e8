"""Start a task from the weights of a language model that this package has trained."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_efficient.errors import CheckpointError
from lit_efficient.files import read


def load_start(path: str, network: nn.Module, who: str) -> dict[str, Any] | None:
    """Give ``network`` the weights of a checkpoint: of a run's average if it has one, with adapters merged.

    Args:
        path: a checkpoint of `LanguageModeling` or a task derived from it.
        network: of the same shape; changed in place.
        who: the task that asks, for errors.

    Returns:
        The tokenizer of the checkpoint, packed; None if it has none.

    Raises:
        CheckpointError: If it is no such checkpoint, or one of another shape.
    """
    from lit_efficient.adapters.merge import merge_adapters
    from lit_efficient.restore import restore
    from lit_efficient.tasks.language_modeling import LanguageModeling

    checkpoint = read(path)
    if "language_modeling" not in checkpoint:
        raise CheckpointError(f"{who}: start_from {path} is not a checkpoint of LanguageModeling")
    start = LanguageModeling(checkpoint["hyper_parameters"]["model"])
    start.on_load_checkpoint(checkpoint)
    restore(start, checkpoint, "auto")
    merged: Any = merge_adapters(start)
    try:
        network.load_state_dict(merged.network.state_dict())
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{who}: start_from {path} does not fit the model here: {reason}") from error
    return start.tokenizer_state
