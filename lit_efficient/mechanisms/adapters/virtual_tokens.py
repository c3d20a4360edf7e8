"""Base class of the techniques that train virtual tokens before the sequences of a frozen decoder."""

from itertools import cycle, islice
from typing import Any

from torch import nn

from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.mechanisms.adapters.peft_folder import model_placement
from lit_efficient.mechanisms.adapters.prefix import PrefixedDecoder, embeddings, find_decoder, read_tokens
from lit_efficient.mechanisms.adapters.technique import AdapterTechnique
from lit_efficient.models.networks.gpt import GPT


class VirtualTokens(AdapterTechnique):
    """Technique that trains only virtual tokens, which are initialised from tokens or at random."""

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
        ids = "a list of ids of tokens"
        if any(type(i) is not int or i < 0 for i in init_tokens or ()):
            raise refusal(who, "init_tokens", ids, init_tokens)
        given = []
        if init_tokens:
            given.append("init_tokens")
        if init_text:
            given.append("init_text")
        if init == "tokens" and len(given) != 1:
            raise ConfigurationError(
                f"{who}: init='tokens' needs either init_tokens or init_text, got "
                f"{' and '.join(given) or 'neither'}. For a random initialisation, which usually trains worse, set "
                "init='random' and num_virtual_tokens"
            )
        if init == "random" and (given or num_virtual_tokens is None):
            raise ConfigurationError(
                f"{who}: init='random' needs num_virtual_tokens and takes neither init_tokens nor init_text"
            )
        if bool(init_text) != (tokenizer is not None):
            raise ConfigurationError(
                f"{who}: init_text and tokenizer (a tokenizer.json, or its folder) go together. Give both or neither"
            )
        self.num_virtual_tokens = num_virtual_tokens
        self.init = init
        self.init_tokens = init_tokens
        self.init_text = init_text
        self.tokenizer = tokenizer
        self.save_base = save_base
        self.seed = seed
        self._text_tokens: list[int] | None = None
        if init_text and tokenizer:
            self._text_tokens = read_tokens(init_text, tokenizer, who)

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments, with the tokens of a text, so that a resume needs no tokenizer."""
        arguments = super().arguments()
        if self._text_tokens is not None:
            arguments |= {"init_tokens": list(self._text_tokens), "init_text": None, "tokenizer": None}
        return arguments

    def find(self, module: nn.Module) -> tuple[str, Any]:
        """Return the name and the decoder that gets the virtual tokens.

        Raises:
            ConfigurationError: If there is no decoder, or it has virtual tokens already.
        """
        name, decoder = find_decoder(module, type(self).__name__)
        if isinstance(decoder, PrefixedDecoder):
            raise ConfigurationError(f"{type(self).__name__}: {name!r} has a prefix already. Build the module again")
        return name, decoder

    def start(self, decoder: nn.Module) -> tuple[int, list[int]]:
        """Return the number of virtual tokens, and as many tokens for their initialisation, or none if it is random.

        Raises:
            ConfigurationError: If the number exceeds the decoder's positions, a token is not in the vocabulary, or the
                weights are on the meta device.
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
            raise ConfigurationError(
                f"{type(self).__name__}: weights are on the meta device. Load the weights of the base first"
            )
        return length, list(islice(cycle(source), length))

    @classmethod
    def described(cls, decoder: nn.Module) -> dict[str, Any]:
        """Return properties of the decoder that an export needs."""
        return {"transformers": not isinstance(decoder, GPT)}

    @classmethod
    def placement(cls, module: nn.Module) -> dict[str, Any]:
        name, decoder = find_decoder(module, cls.__name__)
        return {"decoder": name} | cls.described(decoder) | model_placement(module, [name])
