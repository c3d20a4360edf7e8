"""Prompt tuning: train embeddings of virtual tokens that precede each sequence of a frozen decoder.

    network([P; E(x)]),    P [n, dim]

Saves: gradients and optimizer states of the frozen weights: only n dim values train, and checkpoints hold only these
Costs: n positions of the context, also in inference; a forward pass of one more row with n tokens in each step; less
    capacity than a prefix in each layer: in the paper it matches full tuning only for networks of at least ten billion
    parameters
Source: Lester et al. (2021), https://arxiv.org/abs/2104.08691

The code that turns the n embeddings into keys and values is in :mod:`lit_efficient.mechanisms.adapters.prompt`.
"""

from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConflictError, diagnostic
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.mechanisms.adapters.base import freeze_base
from lit_efficient.mechanisms.adapters.prefix import embeddings, find_decoder, tokenizer_at
from lit_efficient.mechanisms.adapters.prompt import add_prompt, nearest_tokens
from lit_efficient.mechanisms.adapters.virtual_tokens import VirtualTokens
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.surgery import count
from lit_efficient.traits import Trait


class PromptTuning(VirtualTokens):
    """Freeze a decoder and train the embeddings of virtual tokens that precede each sequence.

    Supported are the decoders of transformers with a key-value cache and this package's GPT. Masks and positions are
    given for real tokens only, as without the prompt, also in ``generate``. At the end of the fit, the tokens that are
    most similar to the virtual tokens are logged.

    Args:
        num_virtual_tokens: Number n of virtual tokens, at least 1. Initial tokens are repeated if they are fewer, and
            cut if they are more. ``None`` for the number of initial tokens.
        init: ``tokens`` starts from the embeddings of ``init_tokens`` or ``init_text``. ``random`` starts from the
            embeddings of random tokens of the vocabulary.
        init_tokens: Ids of the initial tokens.
        init_text: Initial text, which should describe the task; needs ``tokenizer``.
        tokenizer: Path of a ``tokenizer.json``, or of a folder that contains one.
        save_base: If true, checkpoints also hold the frozen weights.
        seed: Seed of the random tokens, which are the same on all ranks.

    Raises:
        ConfigurationError: If no initial tokens are given, if the module has no decoder that supports a prefix, and
            with gradient checkpointing.
        ConflictError: With FSDP and tensor parallelism.
        CheckpointError: When resuming with a base other than the one that the embeddings were trained with.
    """

    phase = Phase.ADAPT
    traits = frozenset(
        {Trait.ADAPTER, Trait.FREEZES_MATRICES, Trait.PREPENDS_TOKENS, Trait.REFUSES_EARLY, Trait.VIRTUAL_TOKENS}
    )
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_ROWS: "its virtual tokens come before whole rows",
    }
    conflicts: ClassVar[dict[str, str]] = {
        "BlockSwap": "blocks also run on the virtual tokens, so that their order of calls changes; use PrefixTuning",
        "StochasticDepth": "a dropped block computes no keys for the virtual tokens; use PrefixTuning",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "frozen weights need no gradients or optimizer states; changes the result")
    }

    def __init__(
        self,
        num_virtual_tokens: int | None = None,
        init: str = "tokens",
        init_tokens: list[int] | None = None,
        init_text: str | None = None,
        tokenizer: str | None = None,
        save_base: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(num_virtual_tokens, init, init_tokens, init_text, tokenizer, save_base, seed)

    def check(self, trainer: Any, module: nn.Module) -> None:
        traits = traits_of(trainer.strategy)
        if traits.shards and not traits.is_zero:
            raise ConflictError(
                f"PromptTuning cannot be combined with {traits.name}: the keys of the virtual tokens are computed "
                "outside of the network's forward pass, where weights are not gathered. Use strategy='ddp', or "
                "PrefixTuning"
            )

    def transform(self, module: nn.Module) -> Report:
        name, decoder = self.find(module)
        length, tokens = self.start(decoder)
        decoder.virtual_tokens_of = type(self).__name__
        prompt = add_prompt(decoder, length, tokens, seed=self.seed)
        freeze_base(module, [prompt.prompt_embeddings], save_base=self.save_base)
        trained = count([prompt.prompt_embeddings])
        share = trained / count(module.parameters())
        start = "random tokens" if self.init == "random" else "real tokens"
        return Report(
            f"{length} virtual tokens, from {start}: {trained:,} parameters train ({share:.2%})",
            modules=(name,),
            parameters=trained,
            bytes_saved=sum(p.nbytes for p in module.parameters() if not p.requires_grad),  # gradients
            details={"trainable_share": share},
        )

    def nearest(self, module: nn.Module) -> list[str] | list[int]:
        """Return the tokens whose embeddings have the largest cosine with those of the virtual tokens.

        Returns:
            One decoded token for each virtual token, or token ids if there is no tokenizer.
        """
        decoder: Any = find_decoder(module, "PromptTuning")[1]
        tokens, _ = nearest_tokens(
            decoder.prompt_tuning.prompt_embeddings.detach(), embeddings(decoder).weight.detach()
        )
        # The tokenizer of a language model may be read only if it has a state.
        tokenizer = getattr(module, "tokenizer_state", None) and getattr(module, "tokenizer", None)
        if tokenizer is None and self.tokenizer is not None:
            tokenizer = tokenizer_at(self.tokenizer, "PromptTuning")
        if tokenizer is None:
            return tokens
        return [tokenizer.decode([token]) for token in tokens]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the tokens that are most similar to the virtual tokens."""
        if all(p.numel() for p in pl_module.parameters()):  # with DeepSpeed's stage 3 the parameters are empty
            with diagnostic("PromptTuning", "the virtual tokens"):
                words = ", ".join(repr(word) for word in self.nearest(pl_module))
                rank_zero_info(f"PromptTuning: the tokens most similar to the virtual tokens are {words}")

    @classmethod
    def described(cls, decoder: Any) -> dict[str, Any]:
        place = super().described(decoder) | {"prompt": True}
        if not isinstance(decoder, GPT):
            text = decoder.config.get_text_config()
            place |= {"layers": text.num_hidden_layers, "heads": text.num_attention_heads}
        return place
