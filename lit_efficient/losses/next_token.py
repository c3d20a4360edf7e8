"""Cross-entropy of the next token, kept apart for each token so that any weighting can follow.

    loss[b, t] = -log softmax(logits[b, t])[labels[b, t]]

Holds all logits in float32: 4 B T V bytes, and as many for their gradient.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import refusal

IGNORE = -100  # a label that counts for nothing


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of each label, ``[B, T]`` float32, in nats; 0 where the label is `IGNORE`.

    Args:
        logits: ``[B, T, V]``, any floating type; the loss is computed in float32.
        labels: ``[B, T]``, already shifted: ``labels[b, t]`` follows what ``logits[b, t]`` has seen.
    """
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view_as(labels)


def sample_means(losses: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Means of `token_losses` over the tokens that count.

    Args:
        losses: ``[B, T]``.
        labels: ``[B, T]``.

    Returns:
        The mean over all tokens of the batch ``[]``, and over those of each sequence ``[B]`` (0 for one without any).
    """
    counts = (labels != IGNORE).sum(1)
    sums = losses.sum(1)
    return sums.sum() / counts.sum().clamp(min=1), sums / counts.clamp(min=1)


def targets_of(batch: Mapping[str, Tensor]) -> Tensor:
    """What each position is to predict, ``[B, T]``; the last position of ``labels`` predicts nothing.

    Args:
        batch: with ``shift_labels`` ``[B, T]``, already shifted, or else ``labels`` ``[B, T]`` that stand under their
            own token, as transformers has them.
    """
    if not isinstance(batch, Mapping) or not batch.keys() & {"labels", "shift_labels"}:
        given = [*batch] if isinstance(batch, Mapping) else type(batch)
        raise refusal("a language model", "a batch", "a mapping with input_ids and labels", given)
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
