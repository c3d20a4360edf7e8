"""Cross-entropy of the next token, one loss for each token, so that any weighting can be applied afterwards.

    loss[b, t] = -log softmax(logits[b, t])[labels[b, t]]

Costs: all logits in float32, 4 B T V bytes, and as many for their gradient.
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import refusal

IGNORE = -100  # label of tokens that do not contribute to the loss


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood of each label, ``[B, T]`` float32, in nats; 0 where the label is `IGNORE`.

    Args:
        logits: ``[B, T, V]`` of any floating dtype. The loss is computed in float32.
        labels: ``[B, T]``, already shifted: ``labels[b, t]`` is the token that ``logits[b, t]`` predicts.
    """
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view_as(labels)


def sample_means(losses: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Average `token_losses` over the tokens that contribute to the loss.

    Args:
        losses: ``[B, T]``.
        labels: ``[B, T]``.

    Returns:
        The mean over all tokens of the batch ``[]``, and the mean over each sequence ``[B]``. The mean over no token
        is 0.
    """
    counts = (labels != IGNORE).sum(1)
    sums = losses.sum(1)
    return sums.sum() / counts.sum().clamp(min=1), sums / counts.clamp(min=1)


def targets_of(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the token that each position predicts, ``[B, T]``.

    Args:
        batch: Mapping with ``shift_labels`` ``[B, T]``, which are already shifted, or with ``labels`` ``[B, T]``,
            which are aligned with ``input_ids`` as in transformers. With ``labels``, the last position gets `IGNORE`.

    Raises:
        ConfigurationError: If the batch is no mapping or has neither entry.
    """
    if not isinstance(batch, Mapping) or not batch.keys() & {"labels", "shift_labels"}:
        given = [*batch] if isinstance(batch, Mapping) else type(batch)
        raise refusal("a language model", "a batch", "a mapping with input_ids and labels", given)
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
