"""What the techniques share that train virtual tokens in front of a frozen decoder: their starts, and what is kept."""

from itertools import cycle, islice
from typing import Any

from torch import nn

from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.mechanisms.adapters.peft_format import model_placement
from lit_efficient.mechanisms.adapters.prefix import PrefixedDecoder, embeddings, find_decoder, read_tokens
from lit_efficient.mechanisms.adapters.technique import AdapterTechnique
from lit_efficient.models.networks.gpt import GPT


class VirtualTokens(AdapterTechnique):
    """The virtual tokens are all that trains; they start from real tokens, or from a draw."""

    needs = ("init_tokens",)
    keeps = "prefix"

    def __init__(
        self,
        num_virtual_tokens: int | None,
        init: str,
        init_tokens: list[int] | None,
        init_text: str | None,
        tokenizer: str | None,
        save_base: bool,
        seed: int,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        check_choice(who, "init", init, ("tokens", "random"))
        check_number(who, "num_virtual_tokens", num_virtual_tokens, least=1, whole=True, null=True)
        given = [name for name, v in (("init_tokens", init_tokens), ("init_text", init_text)) if v]
        if init == "tokens" and len(given) != 1:
            raise ConfigurationError(
                f"{who}: init='tokens' needs either init_tokens or init_text, got "
                f"{' and '.join(given) or 'neither'}. A random start is known to train worse; choose it by "
                "init='random' with num_virtual_tokens"
            )
        if init == "random" and (given or num_virtual_tokens is None):
            raise ConfigurationError(
                f"{who}: init='random' needs num_virtual_tokens and takes neither init_tokens nor init_text"
            )
        if bool(init_text) != (tokenizer is not None):
            raise ConfigurationError(f"{who}: init_text and tokenizer (a tokenizer.json, or its folder) go together")
        self.num_virtual_tokens = num_virtual_tokens
        self.init = init
        self.init_tokens = init_tokens
        self.init_text = init_text
        self.tokenizer = tokenizer
        self.save_base = save_base
        self.seed = seed
        self._text_tokens = read_tokens(init_text, tokenizer, who) if init_text and tokenizer else None

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments, a text as its tokens: a checkpoint must not need the tokenizer's folder."""
        arguments = super().arguments()
        if self._text_tokens is not None:
            arguments |= {"init_tokens": list(self._text_tokens), "init_text": None, "tokenizer": None}
        return arguments

    def find(self, module: nn.Module) -> tuple[str, Any]:
        """Name and decoder that the virtual tokens will stand in front of.

        Raises:
            ConfigurationError: If there is none, or it has some already.
        """
        name, decoder = find_decoder(module, type(self).__name__)
        if isinstance(decoder, PrefixedDecoder):
            raise ConfigurationError(f"{type(self).__name__}: {name!r} has a prefix already; build the module again")
        return name, decoder

    def start(self, decoder: Any) -> tuple[int, list[int]]:
        """How many virtual tokens there are, and what they start from: as many tokens, or none.

        Raises:
            ConfigurationError: If the decoder's embeddings have no values yet, or none for one of the tokens.
        """
        source = self._text_tokens or self.init_tokens or []
        length = self.num_virtual_tokens or len(source)
        table = embeddings(decoder).weight
        if isinstance(decoder, GPT) and length > decoder.config.max_length:
            allowed = f"at most max_length = {decoder.config.max_length}"
            raise refusal(type(self).__name__, "num_virtual_tokens", allowed, length)
        if source and not 0 <= min(source) <= max(source) < len(table):
            allowed = f"at least 0 and below the vocabulary's {len(table)}"
            raise refusal(type(self).__name__, "init_tokens", allowed, (min(source), max(source)))
        if table.device.type == "meta":
            message = "weights are on the meta device: give the base its weights first"
            raise ConfigurationError(f"{type(self).__name__}: {message}")
        return length, list(islice(cycle(source), length)) if source else []

    @classmethod
    def described(cls, decoder: nn.Module) -> dict[str, Any]:
        """What a reader must know of the decoder."""
        return {"transformers": not isinstance(decoder, GPT)}

    @classmethod
    def placement(cls, module: nn.Module) -> dict[str, Any]:
        name, decoder = find_decoder(module, cls.__name__)
        return {"decoder": name} | cls.described(decoder) | model_placement(module, [name])
