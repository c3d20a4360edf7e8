"""Trainable embeddings in front of a sequence, and the words that they come nearest to.

    network([P; E(x)]),    P [n, dim], the same for all sequences

A causal network computes for the n virtual tokens what does not depend on x: their keys and values. They are computed
once for a batch, with gradients, and stand in front of each sequence as a prefix does
(:mod:`lit_efficient.mechanisms.adapters.prefix`), which gives the same function as n more embeddings in each row.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.internals.torch_modules import StaysFloat32
from lit_efficient.mechanisms.adapters.prefix import (
    PrefixedDecoder,
    PrefixedGPT,
    PrefixedTransformer,
    computed_from,
    embeddings,
    mix_in_prefix,
)
from lit_efficient.models.probes.modes import evaluating

PROMPT = "prompt_tuning"  # the name under which the prompt stands in the decoder


class PromptVectors(StaysFloat32, nn.Module):
    """The virtual tokens.

    Args:
        embedded: What they start from, [n, dim]; copied.
    """

    float32 = ("prompt_",)

    def __init__(self, embedded: Tensor) -> None:
        super().__init__()
        wide = torch.promote_types(embedded.dtype, torch.float32)
        self.prompt_embeddings = nn.Parameter(embedded.detach().to(wide).clone())


class PromptedDecoder(PrefixedDecoder):
    """A prefix that is computed of embeddings in each call."""

    prompt_tuning: PromptVectors

    def vectors(self, held: bool) -> tuple[Tensor, Tensor]:
        embedded = self.prompt_tuning.prompt_embeddings
        if held:
            nothing = embedded.new_empty(0, 0, len(embedded), 0)
            return nothing, nothing
        return computed_from(self, embedded)

    def follow_base(self) -> None:
        """Start again from the same words, in other weights."""
        if self.prefix_tokens:
            with torch.no_grad():
                self.prompt_tuning.prompt_embeddings.copy_(_embedded(self, self.prefix_tokens))


class PromptedTransformer(PromptedDecoder, PrefixedTransformer):
    """A decoder of transformers."""


class PromptedGPT(PromptedDecoder, PrefixedGPT):
    """This package's GPT."""


def _embedded(decoder: Any, tokens: Sequence[int]) -> Tensor:
    table = embeddings(decoder)
    with torch.no_grad(), evaluating(table):
        return table(torch.tensor(list(tokens), device=table.weight.device))


def add_prompt(decoder: Any, length: int, tokens: Sequence[int] = (), *, seed: int = 0) -> PromptVectors:
    """Put virtual tokens in front of all sequences of a decoder, in place; they become the child ``prompt_tuning``.

    Args:
        decoder: What `find_decoder` gave.
        length: Number n of virtual tokens.
        tokens: The n words that they start from; none: words drawn from the whole vocabulary.
        seed: Of that draw.

    Raises:
        ConfigurationError: If the decoder cannot have virtual tokens.
    """
    table = embeddings(decoder).weight
    generator = torch.Generator("cpu").manual_seed(seed)
    start = tokens or torch.randint(len(table), (length,), generator=generator, device="cpu").tolist()
    vectors = PromptVectors(_embedded(decoder, start))
    computed_from(decoder, vectors.prompt_embeddings.detach())  # refuses what cannot have them
    setattr(decoder, PROMPT, vectors)
    mix_in_prefix(decoder, PromptedGPT, PromptedTransformer, prefix_tokens=tuple(start), prefix_length=length)
    return vectors


def nearest_tokens(embedded: Tensor, table: Tensor) -> tuple[list[int], list[float]]:
    """The word that each embedding comes nearest to, and the cosine between the two.

    Args:
        embedded: [n, dim].
        table: [vocabulary, dim].

    Source: Lester et al. (2021), https://arxiv.org/abs/2104.08691, section 7.
    """
    cosines = F.normalize(embedded.float(), dim=-1) @ F.normalize(table.float(), dim=-1).T
    best = cosines.max(-1)
    return best.indices.tolist(), best.values.tolist()
