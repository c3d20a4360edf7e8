"""Number formats of stored latents: rounding, and the statistics of their channels.

    int8:  x ~ zero + scale * q,  q in 0..255,  zero = min x,  scale = (max x - min x) / 255,  per channel of a shard
    E[z] = E[mean],  E[z^2] = E[mean^2 + exp(logvar)]    for z drawn from the posterior, so no draw is needed

float16 rounds a value above 6e-5 by at most 2^-11 of its size (a smaller value by 3e-8), bfloat16 by 2^-8, int8 by half
a scale. float32 keeps the output of the encoder. int8 keeps the mean of the posterior alone, like the published latents
of ImageNet, so the task cannot sample the posterior again.

Saves: a number of 4 bytes takes 2 in float16 and 1 in int8; int8 also drops the log-variance, an eighth in all
Costs: a rounding that is small compared with the width of the posterior; compare `reconstruction PSNR`
Source: https://github.com/cloneofsimo/imagenet.int8 (with one scale for all channels)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lit_efficient.internals.torch_tensors import widest_float

Format = Literal["posterior", "int8"]
StoredDtype = Literal["float32", "float16", "bfloat16"]
StoredCondition = Literal["pixels", "latents", "masked"]


def quantize(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise to one byte for each number, with a scale and a zero for each channel.

    Args:
        values: [R, c, h, w], finite.

    Returns:
        Codes [R, c, h, w] uint8, scale [c] and zero [c] float32. The values are ``zero + scale * codes`` to within half
        a scale. A constant channel is kept exactly.
    """
    flat = values.float().transpose(0, 1).flatten(1)  # [c, R h w]
    zero = flat.amin(1)
    scale = (flat.amax(1) - zero) / 255.0
    # The scale of a constant channel is 0. A divisor of 1 gives it the codes 0, and `zero` keeps its value.
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    steps = (values.float() - _per_channel(zero)) / _per_channel(divisor)
    return steps.round_().clamp_(0, 255).to(torch.uint8), scale, zero


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the values that `quantize` rounded, [..., c, h, w] float32."""
    return _per_channel(zero) + _per_channel(scale) * codes.float()


def encode_rows(
    mean: Tensor,
    logvar: Tensor | None,
    format: Format,
    dtype: StoredDtype,
    condition: Tensor | None = None,
    condition_logvar: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the tensors that store the latents of a shard, and those of their conditions in the same number format.

    Args:
        mean: Posterior means [R, c, h, w], as the autoencoder gives them.
        logvar: Their log-variances [R, c, h, w], or None for a deterministic encoder.
        format: ``int8`` keeps the mean alone.
        dtype: Number format of ``posterior``.
        condition: Posterior means of the conditions [R, c, h, w], if there are any.
        condition_logvar: Their log-variances.

    Returns:
        ``mean`` and ``logvar``; ``latents`` for a deterministic encoder; ``latents``, ``scale`` and ``zero`` for int8.
        ``condition_latents`` and ``condition_logvar`` of conditions; in int8 they have the scale of the images.
    """
    if format == "int8":
        codes, scale, zero = quantize(mean if condition is None else torch.cat([mean, condition]))
        stored = {"latents": codes[: len(mean)], "scale": scale, "zero": zero}
        if condition is not None:
            stored["condition_latents"] = codes[len(mean) :]
        return stored
    stored = {"latents": mean} if logvar is None else {"mean": mean, "logvar": logvar}
    if condition is not None:
        stored["condition_latents"] = condition
    if condition_logvar is not None:
        stored["condition_logvar"] = condition_logvar
    return {name: values.to(getattr(torch, dtype)) for name, values in stored.items()}


def encode_pixels(images: Tensor) -> Tensor:
    """Return 8-bit images in [-1, 1] as uint8, without a loss."""
    return ((images + 1.0) * 127.5).round().to(torch.uint8)


def decode_pixels(codes: Tensor) -> Tensor:
    """Return the images of `encode_pixels`, float32 in [-1, 1]."""
    return codes.float() / 127.5 - 1.0


def decode_row(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a stored row in float32: the latents of `encode_rows`, each [c, h, w]."""
    names = ("mean", "logvar", "latents", "condition_latents", "condition_logvar")
    if "scale" in row:
        return {name: dequantize(row[name], row["scale"], row["zero"]) for name in names if name in row}
    return {name: row[name].float() for name in names if name in row}


def normalize_item(item: Mapping[str, Any], mean: Tensor, std: Tensor) -> dict[str, object]:
    """Return an item whose latents [c, h, w] are normalised as by ``LatentCodec.normalize``, with mean and std [c]."""
    shift = _per_channel(mean)
    scale = _per_channel(std)
    changed = dict(item)
    for name in ("mean", "latents", "condition_latents"):
        if name in item:
            changed[name] = (item[name] - shift) / scale
    for name in ("logvar", "condition_logvar"):
        if name in item:
            changed[name] = item[name] - 2.0 * scale.log()
    return changed


@dataclass(frozen=True)
class Moments:
    """Sums over latents for each channel. The sums of parts add up to the sums of the whole."""

    count: int  # positions that were added
    total: tuple[float, ...]  # sum of the values of each channel
    squares: tuple[float, ...]  # sum of the squared values of each channel

    @classmethod
    def of(cls, mean: Tensor, logvar: Tensor | None = None) -> Moments:
        """Return the moments of posteriors [R, c, h, w], in expectation over samples."""
        # Sums over millions of positions lose digits in float32.
        mean = mean.to(widest_float(mean.device))
        squares = mean.square()
        if logvar is not None:
            squares = squares + logvar.to(mean.dtype).exp()
        return cls(mean[:, 0].numel(), _channel_sums(mean), _channel_sums(squares))

    @classmethod
    def join(cls, parts: Sequence[Moments]) -> Moments:
        """Return the moments of all parts together, added in their order."""
        totals = [sum(values) for values in zip(*(part.total for part in parts))]
        squares = [sum(values) for values in zip(*(part.squares for part in parts))]
        return cls(sum(part.count for part in parts), tuple(totals), tuple(squares))

    def mean_and_std(self) -> tuple[list[float], list[float]]:
        """Return mean and standard deviation of each channel."""
        mean = [total / self.count for total in self.total]
        variance = [square / self.count - value**2 for square, value in zip(self.squares, mean)]
        return mean, [max(value, 0.0) ** 0.5 for value in variance]


def _channel_sums(values: Tensor) -> tuple[float, ...]:
    return tuple(values.sum(dim=(0, 2, 3)).tolist())


def _per_channel(values: Tensor) -> Tensor:
    """Reshape one number for each channel [c] to [c, 1, 1]."""
    return values.view(-1, 1, 1)
