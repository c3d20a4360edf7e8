"""Variants of the captions of an image: several captions, shuffled tags, and empty captions.

    caption variant c of an image with n captions = caption c mod n, with its tags in an order of their own
    variant 0                                     = the first caption as it is, which validation uses alone
    the last floor(dropout * variants + u)        = empty; u in [0, 1) is drawn for each image

All draws depend on (seed, index, c) alone, so that embeddings of the captions can be cached, and all processes and
resumed runs see the same captions.

Source: ``shuffle_caption``, ``keep_tokens`` and ``caption_dropout_rate`` of https://github.com/kohya-ss/sd-scripts
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lit_efficient.errors import check_choice, check_number, checks_types, refusal
from lit_efficient.mechanisms.order.resumable_sampler import mix_seed


@checks_types
@dataclass(frozen=True)
class CaptionRules:
    """Variants of captions.

    Args:
        variants: Number of variants of the captions of an image. An epoch shows one of them. A cache holds the
            embedding of each different caption.
        shuffle: Shuffle the tags of all variants but the first.
        keep: Number of tags at the beginning that keep their place.
        separator: Text between tags.
        dropout: Share of the variants with an empty caption, also without the trigger.
        lines: ``join`` makes one caption of all lines of a .txt file, ``choose`` makes each line a caption.
    """

    variants: int = 1
    shuffle: bool = False
    keep: int = 0
    separator: str = ","
    dropout: float = 0.0
    lines: Literal["join", "choose"] = "join"

    def __post_init__(self) -> None:
        check_number("ImageData", "caption_rules.variants", self.variants, least=1, whole=True)
        check_number("ImageData", "caption_rules.keep", self.keep, least=0, whole=True)
        check_number("ImageData", "caption_rules.dropout", self.dropout, least=0, below=1)
        check_choice("ImageData", "caption_rules.lines", self.lines, ("join", "choose"))
        if not self.separator:
            raise refusal("ImageData", "caption_rules.separator", "a text that is not empty", self.separator)
        varied = self.shuffle or self.dropout > 0 or self.lines == "choose"
        if varied and self.variants == 1:
            allowed = "at least 2 for shuffle, dropout or lines: choose"
            raise refusal("ImageData", "caption_rules.variants", allowed, self.variants)
        if self.keep and not self.shuffle:
            raise refusal("ImageData", "caption_rules.keep", "0 without shuffle", self.keep)
        if self.dropout * self.variants > self.variants - 1:
            allowed = (
                f"at most {1 - 1 / self.variants:g} with {self.variants} variants, the first of which is not empty"
            )
            raise refusal("ImageData", "caption_rules.dropout", allowed, self.dropout)

    def caption(self, captions: Sequence[str], trigger: str | None, index: int, number: int, seed: int) -> str:
        """Return a variant of the captions of an image.

        Args:
            captions: Captions of the image, at least one.
            trigger: Word in front of the caption, or None.
            index: Number of the image.
            number: Number of the variant.
            seed: Seed of all draws.
        """
        number %= self.variants
        if number >= self.variants - self._empty(index, seed):
            return ""
        text = captions[number % len(captions)]
        if self.shuffle and number:
            tags = [tag.strip() for tag in text.split(self.separator)]
            rest = tags[self.keep :]
            random.Random(mix_seed(seed, index, number)).shuffle(rest)  # noqa: S311
            text = f"{self.separator} ".join(tags[: self.keep] + rest)
        if trigger is None:
            return text
        return f"{trigger}{self.separator} {text}" if text else trigger

    def _empty(self, index: int, seed: int) -> int:
        """Return the number of empty variants of an image."""
        if not self.dropout:
            return 0
        draw = random.Random(mix_seed(seed, index)).random()  # noqa: S311
        return min(math.floor(self.dropout * self.variants + draw), self.variants - 1)
