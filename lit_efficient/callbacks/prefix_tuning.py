"""Prefix tuning: train keys and values that precede each sequence in all layers of a frozen decoder.

    attention(q, [P_k; k], [P_v; v])    P_k, P_v [n, heads, head_dim] in each layer

Saves: gradients and optimizer states of the frozen weights: 2 n heads head_dim values train in each layer, and
    checkpoints hold only these
Costs: n more keys in each attention, also in inference, because a prefix cannot be merged; n positions of the context
Source: Li & Liang (2021), https://arxiv.org/abs/2101.00190; P-tuning v2: https://arxiv.org/abs/2110.07602

The initial prefix, and the small network that may compute it, are in :mod:`lit_efficient.mechanisms.adapters.prefix`.
"""

from typing import Any, ClassVar

from torch import nn

from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import check_number
from lit_efficient.mechanisms.adapters.base import freeze_base
from lit_efficient.mechanisms.adapters.prefix import add_prefix
from lit_efficient.mechanisms.adapters.virtual_tokens import VirtualTokens
from lit_efficient.surgery import count, match_modules
from lit_efficient.traits import Trait


class PrefixTuning(VirtualTokens):
    """Freeze a decoder and train keys and values that precede each sequence.

    Supported are the decoders of transformers with a key-value cache (Llama, Mistral, Qwen, Gemma, GPT-2) and this
    package's GPT. Masks and positions are given for real tokens only, as without the prefix, also in ``generate``. With
    a sliding window, tokens beyond the window do not attend to the prefix, as to any first tokens.

    Args:
        num_virtual_tokens: Length n of the prefix, at least 1. Initial tokens are repeated if they are fewer, and cut
            if they are more. ``None`` for the number of initial tokens.
        init: ``tokens`` starts from the keys and values that the frozen network computes for ``init_tokens`` or
            ``init_text``. ``random`` starts from random numbers, which is known to train worse and less reliably, most
            of all with little data.
        init_tokens: Ids of the initial tokens.
        init_text: Initial text, which should describe the task; needs ``tokenizer``.
        tokenizer: Path of a ``tokenizer.json``, or of a folder that contains one.
        projection: Width of a small network that computes the prefix during training (800 or 512 in the paper), which
            makes training less sensitive to the learning rate. ``None`` trains the prefix itself.
        modules_to_save: Patterns of modules that train in full, such as a new head, and are saved in checkpoints.
        save_base: If true, checkpoints also hold the frozen weights.
        seed: Seed of random numbers, which are the same on all ranks.

    Raises:
        ConfigurationError: If no initial tokens are given, if the module has no decoder that supports a prefix, and
            with gradient checkpointing.
        CheckpointError: When resuming with a base other than the one that the prefix was trained with.
    """

    phase = Phase.ADAPT
    traits = frozenset({Trait.ADAPTER, Trait.FREEZES_MATRICES, Trait.REFUSES_EARLY, Trait.VIRTUAL_TOKENS})
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_ROWS: "its virtual tokens come before whole rows",
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
        projection: int | None = None,
        modules_to_save: str | list[str] | None = None,
        save_base: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(num_virtual_tokens, init, init_tokens, init_text, tokenizer, save_base, seed)
        check_number("PrefixTuning", "projection", projection, least=1, whole=True, null=True)
        if isinstance(modules_to_save, str):
            modules_to_save = [modules_to_save]
        self.projection = projection
        self.modules_to_save = modules_to_save

    def transform(self, module: nn.Module) -> Report:
        saved: list[tuple[str, nn.Module]] = []
        if self.modules_to_save:
            saved = match_modules(module, self.modules_to_save, who="PrefixTuning: modules_to_save")
        name, decoder = self.find(module)
        length, tokens = self.start(decoder)
        decoder.virtual_tokens_of = type(self).__name__
        prefix = add_prefix(decoder, length, tokens, projection=self.projection or 0, seed=self.seed)
        trained = list(prefix.parameters())
        for _, part in saved:
            trained += part.parameters()
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
            f"({share:.2%}), {format_bytes(size)} in a checkpoint",
            modules=(name,),
            parameters=count(trained),
            bytes_saved=sum(p.nbytes for p in module.parameters() if not p.requires_grad),  # gradients
            details={
                "trainable_share": share,
                "adapter_bytes": size,
                "cache_bytes": 2 * layers * heads * length * width * prefix.prefix_keys.element_size(),
            },
        )
