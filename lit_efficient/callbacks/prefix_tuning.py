"""Prefix tuning: train keys and values that stand before every sequence, in every layer of a frozen decoder.

    attention(q, [P_k; k], [P_v; v])    P_k, P_v [n, heads, head_dim] a layer

Saves: gradients and optimizer states of all but 2 n heads head_dim values a layer; checkpoints hold these alone
Costs: n more keys in each attention, for good: it cannot be merged; n positions of the context
Source: Li & Liang (2021), https://arxiv.org/abs/2101.00190; P-tuning v2: https://arxiv.org/abs/2110.07602

What the prefix starts from, and the small network that may make it:
:mod:`lit_efficient.mechanisms.adapters.prefix`.
"""

from typing import Any, ClassVar

from torch import nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import check_number
from lit_efficient.mechanisms.adapters.base import freeze_base
from lit_efficient.mechanisms.adapters.prefix import add_prefix
from lit_efficient.mechanisms.adapters.virtual_tokens import VirtualTokens
from lit_efficient.surgery import count, match_modules
from lit_efficient.traits import Trait


class PrefixTuning(VirtualTokens):
    """Freeze a decoder and train keys and values that stand before every sequence.

    Works on the decoders of transformers with a key-value cache (Llama, Mistral, Qwen, Gemma, GPT-2) and on this
    package's GPT. Callers go on giving masks and positions of real tokens alone, also in ``generate``. Behind a sliding
    window the prefix is out of sight, as any first token is.

    Args:
        num_virtual_tokens: Length n of the prefix, at least 1; ``None``: as many as the tokens that it starts from.
            Fewer tokens are repeated, more are cut.
        init: ``tokens``: start from the keys and values that the frozen network computes for ``init_tokens`` or
            ``init_text``. ``random`` is known to train worse and less reliably, most of all with little data.
        init_tokens: Token numbers to start from.
        init_text: Text to start from, best about the task; needs ``tokenizer``.
        tokenizer: A ``tokenizer.json``, or a folder that has one.
        projection: Width of a small network that makes the prefix while it trains (Li & Liang: 800 or 512), for
            training that is less sensitive to the rate; ``None``: the prefix itself is trained.
        modules_to_save: Patterns of modules that train in full (a new head) and go into checkpoints.
        save_base: Whether checkpoints hold the frozen weights, too.
        seed: Of random numbers, which are the same on all ranks.

    Raises:
        ConfigurationError: Without a start or a decoder that can have a prefix, and with gradient checkpointing.
        CheckpointError: When resuming beside another base than the prefix was trained with.
    """

    phase = Phase.ADAPT
    traits = frozenset({Trait.ADAPTER, Trait.FREEZES_MATRICES, Trait.REFUSES_EARLY, Trait.VIRTUAL_TOKENS})
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_ROWS: "its virtual tokens come before whole rows",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (0, "gradients and states of all but keys and values: another training")
    }

    def __init__(
        self,
        num_virtual_tokens: int | None = None,
        init: str = "tokens",
        init_tokens: list[int] | None = None,
        init_text: str | None = None,
        tokenizer: str | None = None,
        projection: int | None = None,
        modules_to_save: list[str] | None = None,
        save_base: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(num_virtual_tokens, init, init_tokens, init_text, tokenizer, save_base, seed)
        check_number("PrefixTuning", "projection", projection, least=1, whole=True, null=True)
        self.projection = projection
        self.modules_to_save = modules_to_save

    def transform(self, module: nn.Module) -> Report:
        saved = (
            match_modules(module, self.modules_to_save, who="PrefixTuning: modules_to_save")
            if self.modules_to_save
            else []
        )
        name, decoder = self.find(module)
        length, tokens = self.start(decoder)
        decoder.virtual_tokens_of = type(self).__name__
        prefix = add_prefix(decoder, length, tokens, projection=self.projection or 0, seed=self.seed)
        trained = list(prefix.parameters()) + [p for _, part in saved for p in part.parameters()]
        freeze_base(module, trained, save_base=self.save_base)
        return self._report(module, name, prefix, length)

    def _report(self, module: nn.Module, name: str, prefix: Any, length: int) -> Report:
        trained = {id(p): p for p in module.parameters() if p.requires_grad}.values()
        share = count(trained) / count(module.parameters())
        size = sum(p.nbytes for p in trained)
        layers, heads, _, width = prefix.prefix_keys.shape
        start = "random numbers" if self.init == "random" else "real tokens"
        return Report(
            f"{length} virtual tokens in {layers} layers, from {start}: {count(trained):,} parameters train "
            f"({share:.2%}), {size / 2**20:.2f} MiB in a checkpoint",
            modules=(name,),
            parameters=count(trained),
            bytes_saved=sum(p.nbytes for p in module.parameters() if not p.requires_grad),  # gradients never made
            details={
                "trainable_share": share,
                "adapter_bytes": size,
                "cache_bytes": 2 * layers * heads * length * width * prefix.prefix_keys.element_size(),
            },
        )
