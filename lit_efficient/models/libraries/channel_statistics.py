"""Mean and standard deviation of each channel of what arrives in pieces, as if it had come at once.

    n = a + b;    mean = mean_a + (mean_b - mean_a) b / n;    M = M_a + M_b + (mean_b - mean_a)^2 a b / n

with M the sum of squared distances from the mean, and the variance M / (n - 1). Sums are kept in float64: the result
does not depend on how the data is cut, to about 1e-15, and large means cost no digits of the variance.

Source: Chan, Golub and LeVeque (1979), http://i.stanford.edu/pub/cstr/reports/cs/tr/79/773/CS-TR-79-773.pdf.
"""

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_tensors import widest_float


class ChannelStatistics:
    """Running statistics of tensors [B, c, ...]; all have ``channels`` c, and any other shape."""

    def __init__(self, channels: int) -> None:
        self.count = 0  # elements of each channel
        self.mean = torch.zeros(channels, dtype=torch.float64)
        self._squares = torch.zeros(channels, dtype=torch.float64)

    def update(self, values: Tensor) -> None:
        """Add a piece [B, c, ...]."""
        wide = values.detach().to(widest_float(values.device))
        columns = wide.transpose(0, 1).flatten(1)  # [c, elements]
        added = columns.shape[1]
        if added == 0:
            return
        mean = columns.mean(1)
        squares = (columns - mean[:, None]).square().sum(1).cpu().double()
        delta = mean.cpu() - self.mean
        total = self.count + added
        self._squares += squares + delta.square() * (self.count * added / total)
        self.mean += delta * (added / total)
        self.count = total

    @property
    def std(self) -> Tensor:
        """Standard deviation [c], float64.

        Raises:
            ConfigurationError: Of fewer than two elements, and of a channel that is constant or not finite.
        """
        if self.count < 2:
            raise ConfigurationError(f"ChannelStatistics: at least two elements a channel are needed, got {self.count}")
        std = (self._squares / (self.count - 1)).sqrt()
        resolution = torch.finfo(torch.float32).eps * self.mean.abs()  # what is below it is rounding
        unusable = (~(std > resolution) | ~std.isfinite()).nonzero().flatten().tolist()
        if unusable:
            raise ConfigurationError(
                f"ChannelStatistics: channels {unusable} are constant or not finite (standard deviations "
                f"{std[unusable].tolist()}): they cannot be normalised"
            )
        return std
