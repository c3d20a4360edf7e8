"""Inputs of a diffusion network: the latents that fit it, and the conditions that it needs."""

from dataclasses import dataclass
from typing import Literal

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.models.networks.class_token import ClassToken

ImageKind = Literal["controlnet", "inpaint", "sequence"]


@dataclass(frozen=True)
class Sides:
    """Restrictions on height and width of a network's latents."""

    multiple: int = 1  # both must be multiples of this number
    largest: int | None = None  # upper limit of both; None: no limit
    square: bool = False  # both must be equal


@dataclass(frozen=True)
class BackboneShape:
    """Sizes of a network's inputs."""

    name: str  # name of the network's class
    channels: int  # channels of the latents
    size: tuple[int, int] | None = None  # height and width of the latents in its configuration, if that names them
    sides: Sides = Sides()  # restrictions on height and width
    num_classes: int = 0  # number of classes, without the one for "no label"; 0: no labels
    text_width: int = 0  # features of text tokens; 0: no text
    pooled_width: int = 0  # features of a pooled text embedding; 0: none
    masks_text: bool = True  # whether it takes a mask of text tokens
    keeps_norms: bool = False  # whether guidance keeps the norm of the conditional prediction in each token
    learned_variance: bool = False  # whether a second half of the output channels predicts variances, which are ignored
    images: tuple[ImageKind, ...] = ()  # kinds of image conditions that it can take
    token_times: bool = False  # whether it takes a time for each token, [B, N], in the place of times [B]
    image_channels: int = 0  # channels of its input after those of the latents, for an image condition
    # token that it denoises beside the latents
    class_token: ClassToken = ClassToken()  # noqa: RUF009 (frozen)

    @property
    def conditions(self) -> set[str]:
        """Return the names of the parts of a `Condition` that the network takes."""
        widths = {"labels": self.num_classes, "text": self.text_width, "pooled": self.pooled_width}
        return {name for name, width in widths.items() if width}

    @property
    def takes_text(self) -> bool:
        """Return whether the network takes captions."""
        return bool(self.text_width or self.pooled_width)

    def check_latents(self, channels: int, height: int, width: int, who: str) -> None:
        """Refuse latents that do not fit the network.

        Args:
            channels: Channels of the latents.
            height: Their height.
            width: Their width.
            who: Name of the caller, for the error.

        Raises:
            ConfigurationError: Naming what does not fit.
        """
        found = (channels, height, width)
        if channels != self.channels:
            ours = (self.channels, *(self.size or ("any", "any")))
            expected = f"({', '.join(map(str, ours))})"
            raise ConfigurationError(
                f"{who}: the backbone is for latents {expected}; the data's are {found}: their channels must agree."
            )
        sides = self.sides
        if height % sides.multiple or width % sides.multiple:
            allowed = f"multiples of {sides.multiple} for {self.name}"
            raise refusal(who, "height and width of the data's latents", allowed, (height, width))
        if sides.largest is not None and max(height, width) > sides.largest:
            allowed = f"at most {sides.largest} for this {self.name}"
            raise refusal(who, "height and width of the data's latents", allowed, (height, width))
        if sides.square and height != width:
            raise ConfigurationError(f"{who}: {self.name} takes square latents only; the data's are {found}.")
