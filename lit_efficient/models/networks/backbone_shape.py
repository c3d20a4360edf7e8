"""What a diffusion network takes: the latents that fit it, and the conditions that it needs."""

from dataclasses import dataclass

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.models.networks.class_token import ClassToken


@dataclass(frozen=True)
class Sides:
    """What height and width of a network's latents must be."""

    multiple: int = 1  # what they are multiples of
    largest: int | None = None  # the most that they are; None: no limit
    square: bool = False  # whether they are equal


@dataclass(frozen=True)
class BackboneShape:
    """A network's inputs."""

    name: str  # its class
    channels: int  # of the latents
    size: tuple[int, int] | None = None  # height and width of the latents that its configuration names, if it names any
    sides: Sides = Sides()  # what height and width must be
    num_classes: int = 0  # classes of the labels, without the one for "no label"; 0: it takes no labels
    text_width: int = 0  # features of text tokens; 0: it takes no text
    pooled_width: int = 0  # features of a pooled text; 0: it takes none
    masks_text: bool = True  # whether it can leave tokens of the text out
    learned_variance: bool = False  # whether it has a second half of output channels, which is not trained
    # what it denoises beside the latents
    class_token: ClassToken = ClassToken()  # noqa: RUF009 (frozen)

    @property
    def conditions(self) -> set[str]:
        """Names of the parts of a `Condition` that it takes."""
        widths = {"labels": self.num_classes, "text": self.text_width, "pooled": self.pooled_width}
        return {name for name, width in widths.items() if width}

    @property
    def takes_text(self) -> bool:
        """Whether it takes captions."""
        return bool(self.text_width or self.pooled_width)

    def check_latents(self, channels: int, height: int, width: int, who: str) -> None:
        """Refuse latents that do not fit, in the name of ``who``.

        Raises:
            ConfigurationError: That says which.
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
