"""Prompt tuning: trainable embeddings before a sequence, and the tokens that are most similar to them.

    network([P; E(x)]),    P [n, dim], the same for all sequences

In a causal network the keys and values of the n virtual tokens do not depend on x. They are computed once for a batch,
with gradients, and precede each sequence as a prefix does (:mod:`lit_efficient.mechanisms.adapters.prefix`). The result
is the same function as with n additional embeddings in each row.
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

PROMPT = "prompt_tuning"  # name of the prompt as a child of the decoder


class PromptVectors(StaysFloat32, nn.Module):
    """Trainable embeddings of the virtual tokens.

    Args:
        embedded: Initial embeddings, [n, dim]. They are copied.
    """

    float32 = ("prompt_",)

    def __init__(self, embedded: Tensor) -> None:
        super().__init__()
        wide = torch.promote_types(embedded.dtype, torch.float32)
        self.prompt_embeddings = nn.Parameter(embedded.detach().to(wide).clone())


class PromptedDecoder(PrefixedDecoder):
    """Mix-in of a decoder whose prefix is computed from embeddings in each call."""

    prompt_tuning: PromptVectors

    def vectors(self, held: bool) -> tuple[Tensor, Tensor]:
        embedded = self.prompt_tuning.prompt_embeddings
        if held:
            nothing = embedded.new_empty(0, 0, len(embedded), 0)
            return nothing, nothing
        return computed_from(self, embedded)

    def follow_base(self) -> None:
        """Initialise the embeddings again from the same tokens, with the present weights."""
        if self.prefix_tokens:
            with torch.no_grad():
                self.prompt_tuning.prompt_embeddings.copy_(_embedded(self, self.prefix_tokens))


class PromptedTransformer(PromptedDecoder, PrefixedTransformer):
    """Mix-in of a transformers decoder with a prompt."""


class PromptedGPT(PromptedDecoder, PrefixedGPT):
    """Mix-in of this package's GPT with a prompt."""


def _embedded(decoder: Any, tokens: Sequence[int]) -> Tensor:
    table = embeddings(decoder)
    with torch.no_grad(), evaluating(table):
        return table(torch.tensor(list(tokens), device=table.weight.device))


def add_prompt(decoder: nn.Module, length: int, tokens: Sequence[int] = (), *, seed: int = 0) -> PromptVectors:
    """Add virtual tokens to a decoder, in place, as its child ``prompt_tuning``, and return them.

    Args:
        decoder: Decoder that ``find_decoder`` returned.
        length: Number n of virtual tokens.
        tokens: The n tokens from which they are initialised. If it is empty, tokens are drawn from the whole
            vocabulary.
        seed: Seed of the draw.

    Raises:
        ConfigurationError: If the decoder does not support virtual tokens.
    """
    table = embeddings(decoder).weight
    generator = torch.Generator("cpu").manual_seed(seed)
    start = tokens or torch.randint(len(table), (length,), generator=generator, device="cpu").tolist()
    vectors = PromptVectors(_embedded(decoder, start))
    computed_from(decoder, vectors.prompt_embeddings.detach())  # raises if the decoder does not support a prefix
    setattr(decoder, PROMPT, vectors)
    mix_in_prefix(decoder, PromptedGPT, PromptedTransformer, prefix_tokens=tuple(start), prefix_length=length)
    return vectors


def nearest_tokens(embedded: Tensor, table: Tensor) -> tuple[list[int], list[float]]:
    """Return the most similar token of each embedding, and the cosine similarity.

    Args:
        embedded: Embeddings, [n, dim].
        table: Embeddings of the vocabulary, [vocabulary, dim].

    Source: Lester et al. (2021), https://arxiv.org/abs/2104.08691, section 7.
    """
    cosines = F.normalize(embedded.float(), dim=-1) @ F.normalize(table.float(), dim=-1).T
    best = cosines.max(-1)
    return best.indices.tolist(), best.values.tolist()
