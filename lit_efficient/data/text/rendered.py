"""Texts that hold a chat template already, as `apply_chat_template` writes it, and texts that only spell its tokens.

A text with "<|im_start|>" is either a rendered conversation, in which this is a control token, or a text about chat
templates, in which it is not. Decoded, both look the same. The user decides (``chat.rendered``). Without a decision the
texts are tokenised as texts, and `TextCount` reports how many of them hold control tokens.
"""

from dataclasses import dataclass, field

from lit_efficient.data.text.chat_tokens import Encoded
from lit_efficient.errors import ConfigurationError


@dataclass
class TextCount:
    """Number of texts, of those with control tokens, and of each special token that ends a rendered text."""

    texts: int = 0
    controlled: int = 0
    place: str = ""  # the first text with a control token
    control: str = ""  # its control token
    ends: dict[int, int] = field(default_factory=dict)

    def add(self, place: str, documents: list[Encoded]) -> None:
        """Count the documents of a row."""
        for document in documents:
            self.texts += document.is_text
            if document.control:
                self.controlled += 1
                if not self.control:
                    self.place = place
                    self.control = document.control
            if document.end is not None:
                self.ends[document.end] = self.ends.get(document.end, 0) + 1

    @property
    def end(self) -> int | None:
        """Special token that ends most rendered texts."""
        return max(self.ends, key=self.ends.__getitem__, default=None)

    def check(self, owner: str, rendered: bool | None, most: float) -> str | None:
        """Return a warning about control tokens in texts, or None.

        Args:
            owner: Name of the DataModule.
            rendered: Choice of the user. None: no choice.
            most: Largest share of texts with control tokens without a choice.

        Raises:
            ConfigurationError: If the share is larger, or if no text has a control token although ``rendered`` is true.
        """
        if rendered:
            if not self.controlled:
                raise ConfigurationError(
                    f"{owner}: chat.rendered is true, but none of the {self.texts} texts holds a control token of the "
                    "tokenizer. The texts may be rendered for another tokenizer, or they are conversations, which are "
                    "rendered here: set chat.rendered to false."
                )
            return None
        if rendered is False or not self.controlled:
            return None
        message = (
            f"{self.controlled} of {self.texts} texts hold control tokens of the tokenizer, first "
            f"{self.control!r} at {self.place}, which are tokenised as text and not as control tokens. Set "
            "chat.rendered to true if the texts hold the chat template already, or to false if they only write about "
            "such tokens."
        )
        if self.controlled > most * self.texts:
            raise ConfigurationError(
                f"{owner}: {message} (rows.max_malformed allows {most:.2%} of texts without a choice.)"
            )
        return message
