"""How latents lie in a file: the numbers of a shard, what rounding they suffer, and the statistics of their channels.

    int8:  x ~ zero + scale * q,  q in 0..255,  zero = min x,  scale = (max x - min x) / 255,  each channel of a shard
    E[z] = E[mean],  E[z^2] = E[mean^2 + exp(logvar)]    for z drawn from the posterior, so no draw is needed

float16 rounds a value above 6e-5 by at most 2^-11 of its size (a smaller one by 3e-8), bfloat16 by 2^-8, int8 by half a
scale; float32 keeps what the encoder gave. int8 keeps the posterior's mean alone, as the encoded releases of ImageNet
do: nothing is left to resample.

Saves: a number of 4 bytes takes 2 in float16 and 1 in int8, which without the log-variance is an eighth in all
Costs: a rounding that is small beside the posterior's own width; measure `reconstruction PSNR` with and without
Source: https://github.com/cloneofsimo/imagenet.int8 (one scale for all channels there)
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


def quantize(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One byte a number, with a scale and a zero of its own for each channel.

    Args:
        values: [R, c, h, w], finite.

    Returns:
        Codes [R, c, h, w] uint8, scale [c] and zero [c] float32; the values are ``zero + scale * codes`` to within half
        a scale. A channel that is constant is kept exactly.
    """
    flat = values.float().transpose(0, 1).flatten(1)  # [c, R h w]
    zero = flat.amin(1)
    scale = (flat.amax(1) - zero) / 255.0
    steps = (values.float() - _channel(zero)) / _channel(torch.where(scale > 0, scale, torch.ones_like(scale)))
    return steps.round_().clamp_(0, 255).to(torch.uint8), scale, zero


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """What `quantize` kept: [..., c, h, w] float32."""
    return _channel(zero) + _channel(scale) * codes.float()


def encode_rows(mean: Tensor, logvar: Tensor | None, format: Format, dtype: StoredDtype) -> dict[str, Tensor]:
    """The tensors of a shard that hold its latents.

    Args:
        mean: Posterior means [R, c, h, w], as the autoencoder gives them.
        logvar: Their log-variances, or None for a deterministic encoder.
        format: ``int8`` keeps the mean alone.
        dtype: Number format of ``posterior``.

    Returns:
        ``mean`` and ``logvar``, or ``latents`` of a deterministic encoder, or ``latents``, ``scale`` and ``zero``.
    """
    if format == "int8":
        codes, scale, zero = quantize(mean)
        return {"latents": codes, "scale": scale, "zero": zero}
    kind: torch.dtype = getattr(torch, dtype)
    if logvar is None:
        return {"latents": mean.to(kind)}
    return {"mean": mean.to(kind), "logvar": logvar.to(kind)}


def decode_row(row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A stored row back in float32: ``mean`` and ``logvar``, or ``latents``, each [c, h, w]."""
    if "scale" in row:
        return {"latents": dequantize(row["latents"], row["scale"], row["zero"])}
    return {name: row[name].float() for name in ("mean", "logvar", "latents") if name in row}


def normalize_item(item: Mapping[str, Any], mean: Tensor, std: Tensor) -> dict[str, Any]:
    """An item with its latents [c, h, w] in units of the channels' statistics [c], as ``LatentCodec.normalize`` has
    them.
    """
    shift, scale = _channel(mean), _channel(std)
    changed = {name: (item[name] - shift) / scale for name in ("mean", "latents") if name in item}
    if "logvar" in item:
        changed["logvar"] = item["logvar"] - 2.0 * scale.log()
    return {**item, **changed}


@dataclass(frozen=True)
class Moments:
    """Sums over latents, by channel; sums of parts add up."""

    count: int  # positions that were added
    total: tuple[float, ...]  # sum of the values, one number a channel
    squares: tuple[float, ...]  # sum of their squares

    @classmethod
    def of(cls, mean: Tensor, logvar: Tensor | None = None) -> Moments:
        """Of posteriors [R, c, h, w], as if each were sampled without end."""
        mean = mean.to(widest_float(mean.device))
        squares = mean.square() if logvar is None else mean.square() + logvar.to(mean.dtype).exp()
        sums = [values.sum(dim=(0, 2, 3)).tolist() for values in (mean, squares)]
        return cls(mean[:, 0].numel(), tuple(sums[0]), tuple(sums[1]))

    @classmethod
    def join(cls, parts: Sequence[Moments]) -> Moments:
        """The sums of all parts, added in their order."""
        channels = len(parts[0].total)
        totals = [sum(part.total[i] for part in parts) for i in range(channels)]
        squares = [sum(part.squares[i] for part in parts) for i in range(channels)]
        return cls(sum(part.count for part in parts), tuple(totals), tuple(squares))

    def mean_and_std(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel."""
        mean = [total / self.count for total in self.total]
        variance = [square / self.count - value**2 for square, value in zip(self.squares, mean)]
        return mean, [max(value, 0.0) ** 0.5 for value in variance]


def _channel(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)
