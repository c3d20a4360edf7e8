"""Prompt tuning: train embeddings of virtual tokens that stand before every sequence of a frozen decoder.

    network([P; E(x)]),    P [n, dim]

Saves: gradients and optimizer states of all but n dim values; checkpoints hold these alone
Costs: n positions of the context, for good, and one row of n tokens more in each step; less capacity than a prefix in
    every layer: the paper finds it as good as full tuning from ten billion parameters on
Source: Lester et al. (2021), https://arxiv.org/abs/2104.08691

How n embeddings become keys and values: :mod:`lit_efficient.mechanisms.adapters.prompt`.
"""

from typing import Any, ClassVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConflictError
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.mechanisms.adapters.base import freeze_base
from lit_efficient.mechanisms.adapters.prefix import embeddings, find_decoder, tokenizer_at
from lit_efficient.mechanisms.adapters.prompt import add_prompt, nearest_tokens
from lit_efficient.mechanisms.adapters.virtual_tokens import VirtualTokens
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.surgery import count
from lit_efficient.traits import Trait


class PromptTuning(VirtualTokens):
    """Freeze a decoder and train the embeddings of virtual tokens that stand before every sequence.

    Works on the decoders of transformers with a key-value cache and on this package's GPT. Callers go on giving masks
    and positions of real tokens alone, also in ``generate``. When the fit ends, it says which words the virtual tokens
    come nearest to.

    Args:
        num_virtual_tokens: Number n of virtual tokens, at least 1; ``None``: as many as the words that they start from.
            Fewer words are repeated, more are cut.
        init: ``tokens``: start from the embeddings of ``init_tokens`` or ``init_text``; ``random``: of words drawn from
            the whole vocabulary.
        init_tokens: Token numbers to start from.
        init_text: Text to start from, best about the task; needs ``tokenizer``.
        tokenizer: A ``tokenizer.json``, or a folder that has one.
        save_base: Whether checkpoints hold the frozen weights, too.
        seed: Of the draw, which is the same on all ranks.

    Raises:
        ConfigurationError: Without a start or a decoder that can have a prefix, and with gradient checkpointing.
        ConflictError: Under FSDP and tensor parallelism.
        CheckpointError: When resuming beside another base than the embeddings were trained with.
    """

    phase = Phase.ADAPT
    traits = frozenset(
        {Trait.ADAPTER, Trait.FREEZES_MATRICES, Trait.PREPENDS_TOKENS, Trait.REFUSES_EARLY, Trait.VIRTUAL_TOKENS}
    )
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_ROWS: "its virtual tokens come before whole rows",
    }
    conflicts: ClassVar[dict[str, str]] = {
        "BlockSwap": "blocks run on the virtual tokens, too, so that they are not called in turn; use PrefixTuning",
        "StochasticDepth": "a block that is dropped computes no keys for the virtual tokens; use PrefixTuning",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "gradients and states of all but a few embeddings: another training")
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

    def check(self, trainer: Any, module: Any) -> None:
        traits = traits_of(trainer.strategy)
        if traits.shards and not traits.is_zero:
            raise ConflictError(
                f"PromptTuning cannot be combined with {traits.name}: the virtual tokens' keys are computed outside "
                "the network's forward pass, where no weights are gathered; use strategy='ddp', or PrefixTuning"
            )

    def transform(self, module: nn.Module) -> Report:
        name, decoder = self.find(module)
        length, tokens = self.start(decoder)
        decoder.virtual_tokens_of = type(self).__name__
        prompt = add_prompt(decoder, length, tokens, seed=self.seed)
        freeze_base(module, [prompt.prompt_embeddings], save_base=self.save_base)
        trained, every = count([prompt.prompt_embeddings]), count(module.parameters())
        return Report(
            f"{length} virtual tokens, from {'words drawn' if self.init == 'random' else 'words'}: {trained:,} "
            f"parameters train ({trained / every:.2%})",
            modules=(name,),
            parameters=trained,
            bytes_saved=sum(p.nbytes for p in module.parameters() if not p.requires_grad),  # gradients never made
            details={"trainable_share": trained / every},
        )

    def nearest(self, module: nn.Module) -> list[str] | list[int]:
        """The words that the virtual tokens come nearest to by their cosine; token numbers without a tokenizer."""
        decoder: Any = find_decoder(module, "PromptTuning")[1]
        tokens, _ = nearest_tokens(
            decoder.prompt_tuning.prompt_embeddings.detach(), embeddings(decoder).weight.detach()
        )
        words = getattr(module, "tokenizer_state", None) and getattr(module, "tokenizer", None)
        if words is None and self.tokenizer is not None:
            words = tokenizer_at(self.tokenizer, "PromptTuning")
        return [words.decode([token]) for token in tokens] if words is not None else tokens

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Say which words it has come to."""
        if all(p.numel() for p in pl_module.parameters()):  # DeepSpeed's third stage leaves nothing in them
            words = ", ".join(repr(word) for word in self.nearest(pl_module))
            rank_zero_info(f"PromptTuning: the virtual tokens come nearest to {words}")

    @classmethod
    def described(cls, decoder: Any) -> dict[str, Any]:
        place = super().described(decoder) | {"prompt": True}
        if not isinstance(decoder, GPT):
            text = decoder.config.get_text_config()
            place |= {"layers": text.num_hidden_layers, "heads": text.num_attention_heads}
        return place
