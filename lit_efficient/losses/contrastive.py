"""InfoNCE: the text that belongs to an anchor is more similar to it than all other texts of the batch.

    s_ij = cos(a_i, c_j) / t,    c: the positives of all rows, then their negatives
    loss_i = -log softmax_j(s_ij)_i
    matryoshka: the sum of the losses of the first d numbers of the embeddings, for each size d

Costs: similarities of B anchors with all (1 + n) B texts.
Sources: InfoNCE https://arxiv.org/abs/1807.03748, Matryoshka https://arxiv.org/abs/2205.13147.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.errors import check_number


def similarities(embeddings: Tensor) -> Tensor:
    """Return the cosines between each anchor and all texts of the batch, ``[B, (1 + n) B]``, in float32 at least.

    Args:
        embeddings: ``[B, 2 + n, D]``: anchor, positive and n negatives of each row.
    """
    wide = F.normalize(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), dim=-1)
    texts = wide[:, 1:].transpose(0, 1).flatten(0, 1)  # the positives of all rows come first
    return wide[:, 0] @ texts.T


def info_nce(embeddings: Tensor, temperature: float, sizes: Sequence[int] | None = None) -> Tensor:
    """Return the losses ``[B]``.

    Args:
        embeddings: ``[B, 2 + n, D]``: anchor, positive and n negatives of each row.
        temperature: Temperature t, above 0.
        sizes: Sizes d whose losses are summed. ``None``: D alone.
    """
    check_number("info_nce", "temperature", temperature, above=0)
    labels = torch.arange(len(embeddings), device=embeddings.device)
    losses = []
    for size in sizes or (embeddings.shape[-1],):
        scores = similarities(embeddings[..., :size]) / temperature
        losses.append(F.cross_entropy(scores, labels, reduction="none"))
    return torch.stack(losses).sum(0)
