"""How the rows of an encoded data set are read: which field is what, and what its numbers mean.

latents = zero + scale * stored;    posterior: mean = zero + scale * stored, std = scale * stored width
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lit_efficient.data.latents.encoded_rows import Value
from lit_efficient.data.latents.latent_format import dequantize
from lit_efficient.errors import check_choice, check_number, refusal

Content = Literal["latents", "mean_logvar", "mean_std"]

_SMALLEST_VARIANCE = 1e-20
_COUNT_OF = {"uint8": 1, "int8": 1, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class EncodedFields:
    """Which field of a row is what; None: there is none.

    Args:
        latents: Latents, or the mean (and more) of their posterior, see ``content`` of `EncodedNumbers`.
        logvar: The posterior's log-variance, if it is a field of its own.
        label: The class, a number.
        caption: The caption.
        text: Embeddings of the caption's tokens [L, D].
        text_mask: Which of the tokens count [L].
        pooled: An embedding of the whole caption [P].
        features: A teacher's features, for ``HiddenAlignment(teacher=None)``.
    """

    latents: str = "latents"
    logvar: str | None = None
    label: str | None = "labels"
    caption: str | None = None
    text: str | None = None
    text_mask: str | None = None
    pooled: str | None = None
    features: str | None = None

    def asked(self) -> dict[str, str]:
        """Field by argument, of those that there are."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class EncodedNumbers:
    """What the stored numbers of latents mean.

    Args:
        scale: A latent is ``zero + scale * stored``; one number, or one a channel.
        zero: What a stored 0 stands for; one number, or one a channel.
        content: ``latents``; or ``mean_logvar`` or ``mean_std``: the second half of the channels tells the posterior's
            width. Scale and zero are the mean's; a width is multiplied by the scale.
        shape: Channels, height and width of what is stored, where it is stored flat.
        raw: Number format of fields that are bytes.
    """

    scale: float | list[float] = 1.0
    zero: float | list[float] = 0.0
    content: Content = "latents"
    shape: list[int] | None = None
    raw: Literal["uint8", "int8", "float16", "float32"] = "uint8"

    def __post_init__(self) -> None:
        check_choice("EncodedData", "numbers.content", self.content, get_args(Content))
        check_choice("EncodedData", "numbers.raw", self.raw, _COUNT_OF)
        if self.shape is not None and (
            not isinstance(self.shape, list | tuple)
            or len(self.shape) != 3
            or not all(isinstance(size, int) and size >= 1 for size in self.shape)
        ):
            raise refusal("EncodedData", "numbers.shape", "[c, h, w], all at least 1", self.shape)
        for name, value, above in (("numbers.scale", self.scale, 0.0), ("numbers.zero", self.zero, None)):
            for number in value if isinstance(value, list) and value else [value]:
                check_number("EncodedData", name, number, above=above)

    def read(self, value: Value, logvar: Value | None = None) -> dict[str, Tensor]:
        """A stored value as ``latents``, or ``mean`` and ``logvar``, [c, h, w] float32.

        Raises:
            ConfigurationError: If it is no array of three axes, or cannot be halved.
        """
        stored = self.array(value)
        while stored.ndim > 3 and stored.shape[0] == 1:  # a batch of one
            stored = stored[0]
        if self.shape is not None:
            if math.prod(self.shape) != stored.numel():
                allowed = f"of as many numbers as a row, {stored.numel()}"
                raise refusal("EncodedData", "numbers.shape", allowed, list(self.shape))
            stored = stored.reshape(self.shape)
        if stored.ndim != 3 or (self.content != "latents" and len(stored) % 2):
            even = "" if self.content == "latents" else " with c even"
            allowed = f"[c, h, w]{even}, by numbers.shape (such as [4, 32, 32]) where it is stored flat"
            raise refusal("EncodedData", f"the shape of {self.content}", allowed, list(stored.shape))
        width = None if logvar is None else self.array(logvar)
        if width is not None and width.numel() != stored.numel():
            allowed = f"of the latents' shape, {list(stored.shape)}"
            raise refusal("EncodedData", "fields.logvar", allowed, list(width.shape))
        width = None if width is None else width.reshape(stored.shape)
        if self.content != "latents":
            stored, width = stored.chunk(2)
        scale, zero = (self._a_channel(name, len(stored)) for name in ("scale", "zero"))
        mean = dequantize(stored, scale, zero)
        if width is None:
            return {"latents": mean}
        if self.content == "mean_std":
            width = width.square().clamp_min(_SMALLEST_VARIANCE).log()
        return {"mean": mean, "logvar": width + 2.0 * scale.log().view(-1, 1, 1)}

    def _a_channel(self, name: str, channels: int) -> Tensor:
        """``scale`` or ``zero`` of each channel."""
        value = torch.tensor(getattr(self, name), dtype=torch.float32)
        if value.numel() not in (1, channels):
            allowed = f"one number or {channels}, one a channel"
            raise refusal("EncodedData", f"numbers.{name}", allowed, value.tolist())
        return value.expand(channels)

    def array(self, value: Value) -> Tensor:
        """An array, or the bytes of one, as float32.

        Raises:
            ConfigurationError: If it is neither.
        """
        if isinstance(value, bytes) and len(value) % _COUNT_OF[self.raw] == 0:
            value = np.frombuffer(value, self.raw)
        if not isinstance(value, np.ndarray):
            given = value[:60] if isinstance(value, str | bytes) else value
            raise refusal("EncodedData", f"a field of {self.raw} numbers", "an array", given)
        return torch.from_numpy(value.astype(np.float32))


@dataclass(frozen=True)
class ChannelScaling:
    """Mean and standard deviation of each channel, where they are known.

    Args:
        mean: One number a channel.
        std: One number a channel, above 0.
    """

    mean: list[float]
    std: list[float]
