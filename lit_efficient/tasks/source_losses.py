"""Loss of each source of a mixture of data sets, as the mean over the tokens of its rows.

loss_i = sum of nll over the rows of source i / tokens of these rows that contribute to the loss
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_efficient.losses.next_token import IGNORE


class SourceLosses(Metric):
    """Metric whose `compute` returns the loss of each source that had tokens, by name.

    Args:
        names: Names of the sources.
    """

    full_state_update = False
    higher_is_better = False
    sums: Tensor

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = list(names)
        # Nats and tokens of each source.
        self.add_state("sums", torch.zeros(len(names), 2), dist_reduce_fx="sum")

    def update(self, losses: Tensor, labels: Tensor, source: Tensor) -> None:
        """Add a batch.

        Args:
            losses: Negative log-likelihood of each token ``[B, T]`` in nats, 0 where the label is ignored.
            labels: ``[B, T]``.
            source: Number of the source of each row ``[B]``.
        """
        of_rows = torch.stack((losses.detach().float().sum(1), (labels != IGNORE).sum(1).float()), 1)
        self.sums = self.sums.index_add(0, source, of_rows)

    def compute(self) -> dict[str, Tensor]:
        return self.means(self.sums)

    def means(self, sums: Tensor) -> dict[str, Tensor]:
        """Return the loss of each source with tokens. ``sums``: nats and tokens ``[S, 2]``."""
        held = sums.cpu().tolist()
        return {name: sums[i, 0] / sums[i, 1] for i, name in enumerate(self.names) if held[i][1] > 0}
