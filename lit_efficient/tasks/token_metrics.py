"""Loss, perplexity and bits per byte of a language model, as means over all tokens of an epoch and all processes.

    loss = sum nll / tokens;    perplexity = exp(loss);    bits per byte = sum nll / (ln 2 * bytes of text)

Bits per byte does not depend on the tokenizer, so it compares models with different vocabularies. ``Perplexity`` of
torchmetrics computes the softmax of all logits again. This metric uses losses that are already known.
"""

import math

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_efficient.losses.next_token import IGNORE


class TokenMetrics(Metric):
    """Metric whose `compute` returns ``loss``, ``perplexity`` and, if bytes are known, ``bits_per_byte``."""

    full_state_update = False
    higher_is_better = False
    nats: Tensor
    tokens: Tensor
    num_bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("tokens", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("num_bytes", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, losses: Tensor, labels: Tensor, num_bytes: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            losses: Negative log-likelihood of each token ``[B, T]`` in nats, 0 where the label is ignored.
            labels: ``[B, T]``.
            num_bytes: Bytes of text of the labels ``[B]``, if they are known.
        """
        self.nats += losses.sum()
        self.tokens += (labels != IGNORE).sum()
        if num_bytes is not None:
            self.num_bytes += num_bytes.sum()

    def compute(self) -> dict[str, Tensor]:
        loss = self.nats / self.tokens
        figures = {"loss": loss, "perplexity": loss.exp()}
        if self.num_bytes > 0:
            figures["bits_per_byte"] = self.nats / (math.log(2) * self.num_bytes)
        return figures
