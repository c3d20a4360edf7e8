"""Meaning of the fields of an encoded data set, and of the numbers in them.

latents = zero + scale * stored;    posterior: mean = zero + scale * stored, std = scale * stored width
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lit_efficient.data.latents.encoded_files import Value
from lit_efficient.data.latents.latent_format import dequantize
from lit_efficient.errors import check_choice, check_number, checks_types, refusal

Content = Literal["latents", "mean_logvar", "mean_std"]

_SMALLEST_VARIANCE = 1e-20
_BYTES_PER_NUMBER = {"uint8": 1, "int8": 1, "float16": 2, "float32": 4}


@checks_types
@dataclass(frozen=True)
class EncodedFields:
    """Names of the fields of a row. null: the data set has no such field.

    Args:
        latents: Latents, or the mean of their posterior (see ``content`` of `EncodedNumbers`).
        logvar: Log-variance of the posterior, if it is a separate field.
        label: Class, as a number.
        caption: Caption.
        text: Embeddings of the tokens of the caption [L, D].
        text_mask: Mask of the tokens that count [L].
        pooled: Embedding of the whole caption [P].
        features: Features of a teacher, for ``HiddenAlignment(teacher=None)``.
    """

    latents: str = "latents"
    logvar: str | None = None
    label: str | None = "labels"
    caption: str | None = None
    text: str | None = None
    text_mask: str | None = None
    pooled: str | None = None
    features: str | None = None

    def named(self) -> dict[str, str]:
        """Return the fields that are not None, by argument."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@checks_types
@dataclass(frozen=True)
class EncodedNumbers:
    """Meaning of the stored numbers of latents.

    Args:
        scale: A latent is ``zero + scale * stored``. One number, or one number for each channel.
        zero: Latent that a stored 0 stands for. One number, or one number for each channel.
        content: ``latents``, or a posterior: with ``mean_logvar`` or ``mean_std`` the second half of the channels holds
            its log-variance or standard deviation. The mean is ``zero + scale * stored``; the standard deviation is
            multiplied by the scale.
        shape: Channels, height and width of a row, if the rows are stored flat.
        raw: Number format of fields that are bytes.
    """

    scale: float | list[float] = 1.0
    zero: float | list[float] = 0.0
    content: Content = "latents"
    shape: list[int] | None = None
    raw: Literal["uint8", "int8", "float16", "float32"] = "uint8"

    def __post_init__(self) -> None:
        check_choice("EncodedData", "numbers.content", self.content, get_args(Content))
        check_choice("EncodedData", "numbers.raw", self.raw, _BYTES_PER_NUMBER)
        if self.shape is not None and not _is_shape(self.shape):
            raise refusal("EncodedData", "numbers.shape", "[c, h, w], all at least 1", self.shape)
        for number in _as_list(self.scale):
            check_number("EncodedData", "numbers.scale", number, above=0.0)
        for number in _as_list(self.zero):
            check_number("EncodedData", "numbers.zero", number)

    def read(self, value: Value, logvar: Value | None = None) -> dict[str, Tensor]:
        """Return a stored value as ``latents``, or as ``mean`` and ``logvar``, [c, h, w] float32.

        Raises:
            ConfigurationError: If the value has not three axes, or its channels cannot be halved.
        """
        stored = self.array(value)
        while stored.ndim > 3 and stored.shape[0] == 1:  # a batch with one row
            stored = stored[0]
        if self.shape is not None:
            if math.prod(self.shape) != stored.numel():
                allowed = f"a shape with as many numbers as a row, {stored.numel()}"
                raise refusal("EncodedData", "numbers.shape", allowed, list(self.shape))
            stored = stored.reshape(self.shape)
        halved = self.content != "latents"
        if stored.ndim != 3 or (halved and len(stored) % 2):
            allowed = "[c, h, w] with c even" if halved else "[c, h, w]"
            allowed += ", set by numbers.shape (such as [4, 32, 32]) if the rows are stored flat"
            raise refusal("EncodedData", f"the shape of {self.content}", allowed, list(stored.shape))
        width = None
        if logvar is not None:
            width = self.array(logvar)
            if width.numel() != stored.numel():
                allowed = f"of the latents' shape, {list(stored.shape)}"
                raise refusal("EncodedData", "fields.logvar", allowed, list(width.shape))
            width = width.reshape(stored.shape)
        if halved:
            stored, width = stored.chunk(2)
        scale = self._per_channel("scale", len(stored))
        mean = dequantize(stored, scale, self._per_channel("zero", len(stored)))
        if width is None:
            return {"latents": mean}
        if self.content == "mean_std":
            width = width.square().clamp_min(_SMALLEST_VARIANCE).log()
        return {"mean": mean, "logvar": width + 2.0 * scale.log().view(-1, 1, 1)}

    def _per_channel(self, name: str, channels: int) -> Tensor:
        """Return ``scale`` or ``zero`` of each channel, [channels] float32."""
        value = torch.tensor(getattr(self, name), dtype=torch.float32)
        if value.numel() not in (1, channels):
            allowed = f"one number or {channels}, one for each channel"
            raise refusal("EncodedData", f"numbers.{name}", allowed, value.tolist())
        return value.expand(channels)

    def array(self, value: Value) -> Tensor:
        """Return an array, or the bytes of an array, as a float32 tensor.

        Raises:
            ConfigurationError: If the value is neither.
        """
        if isinstance(value, bytes) and len(value) % _BYTES_PER_NUMBER[self.raw] == 0:
            value = np.frombuffer(value, self.raw)
        if not isinstance(value, np.ndarray):
            given = value[:60] if isinstance(value, str | bytes) else value
            raise refusal("EncodedData", f"a field of {self.raw} numbers", "an array", given)
        return torch.from_numpy(value.astype(np.float32))


def _as_list(value: float | list[float]) -> list[float]:
    # An empty list is returned inside a list, so that the check of numbers refuses it.
    if isinstance(value, list) and value:
        return value
    return [value]  # type: ignore[list-item]


def _is_shape(shape: object) -> bool:
    """Return whether ``shape`` holds three whole numbers of at least 1."""
    if not isinstance(shape, list | tuple) or len(shape) != 3:
        return False
    return all(isinstance(size, int) and size >= 1 for size in shape)


@checks_types
@dataclass(frozen=True)
class ChannelScaling:
    """Known mean and standard deviation of each channel.

    Args:
        mean: One number for each channel.
        std: One number above 0 for each channel.
    """

    mean: list[float]
    std: list[float]
