"""Sampling of the next token: repetition penalty, temperature, then filters in the order of transformers.

    z = z / r where z > 0, else z r,  for tokens that occurred before               (repetition penalty r)
    p = softmax(z / temperature) over the k most probable tokens                    (top-k)
      cut to the smallest set of most probable tokens whose probability reaches P   (top-p, nucleus)
      and to tokens with at least m times the highest probability                   (min-p)

Source: Keskar et al. (2019), https://arxiv.org/abs/1909.05858; Fan et al. (2018), https://arxiv.org/abs/1805.04833;
Holtzman et al. (2020), https://arxiv.org/abs/1904.09751; Nguyen et al. (2024), https://arxiv.org/abs/2407.01082.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_efficient.errors import check_number

UNIT = 2**40  # integer that represents a probability of 1; a power of two, so that multiplying float32 is exact


@dataclass(frozen=True)
class Sampling:
    """Parameters of sampling.

    Args:
        temperature: at least 0; 0 takes the most probable token, after the repetition penalty.
        top_p: draw among the most probable tokens that together have this probability, in (0, 1].
        top_k: draw among this many most probable tokens; 0 is all.
        min_p: draw among tokens with at least this share of the highest probability, in [0, 1].
        repetition_penalty: above 0; more than 1 makes tokens of the prompt and of the new text less probable.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def check(self, owner: str) -> None:
        """Raise a ConfigurationError in the name of ``owner`` for a value out of range."""
        check_number(owner, "temperature", self.temperature, least=0)
        check_number(owner, "top_p", self.top_p, above=0, most=1)
        check_number(owner, "top_k", self.top_k, least=0, whole=True)
        check_number(owner, "min_p", self.min_p, least=0, most=1)
        check_number(owner, "repetition_penalty", self.repetition_penalty, above=0)


def penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return logits ``[B, V]`` in which the tokens ``seen`` ``[B, T]`` are less probable."""
    logits = logits.float()
    before = logits.gather(-1, seen)
    return logits.scatter(-1, seen, torch.where(before > 0, before / penalty, before * penalty))


def remaining(logits: Tensor, how: Sampling) -> Tensor:
    """Return the log-probabilities ``[B, V]`` of the distribution that tokens are drawn from.

    Temperature and filters are applied to logits ``[B, V]``. Removed tokens have the log-probability -inf. At
    temperature 0 only the most probable token remains.
    """
    logits = logits.float()
    if how.temperature == 0:
        removed = torch.full_like(logits, -torch.inf)
        return removed.scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    scores = logits / how.temperature
    if how.top_k:
        least = scores.topk(min(how.top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if how.top_p < 1 or how.min_p > 0:
        probability = scores.softmax(-1)
        gone = probability < how.min_p * probability.amax(-1, keepdim=True)
        if how.top_p < 1:
            probability, token = probability.sort(dim=-1, descending=True, stable=True)
            # Sum the probabilities of all more probable tokens as integers: CUDA's cumsum of floats is not
            # deterministic.
            parts = (probability * UNIT).long()
            late = parts.cumsum(-1) - parts >= how.top_p * UNIT
            gone |= torch.empty_like(late).scatter(-1, token, late)
        scores = scores.masked_fill(gone, -torch.inf)
    return scores.log_softmax(-1)


def drawn(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return one token for each row, ``[B]``: the inverse of the cumulative distribution at a uniform number.

    The number decides alone, so a row's token does not depend on the other rows of a batch.

    Args:
        log_probs: ``[B, V]``.
        uniform: ``[B]`` int64 in [0, 2 ** 40), the number times 2 ** 40. Some devices have no float64.
    """
    below = (log_probs.exp() * UNIT).long().cumsum(-1)
    total = below[:, -1]
    # uniform * total / UNIT, in two halves of 20 bits, whose products fit 64 bits
    place = ((uniform >> 20) * total + ((uniform & (2**20 - 1)) * total >> 20)) >> 20
    found = torch.searchsorted(below, place[:, None], right=True)[:, 0]
    return found.clamp(max=log_probs.shape[-1] - 1)  # NaN has no place


def sample_token(
    logits: Tensor,
    temperature: float,
    top_p: float,
    generator: torch.Generator,
    top_k: int = 0,
    min_p: float = 0.0,
) -> Tensor:
    """Draw one token for each row, ``[B, 1]``.

    Args:
        logits: ``[B, V]``.
        temperature: divides the logits; 0 takes the most probable token.
        top_p: probability kept, in (0, 1]; the most probable token always stays.
        generator: the only source of randomness, on the device of ``logits``.
        top_k: number of tokens kept; 0 is all.
        min_p: smallest probability kept, as a share of the highest.
    """
    how = Sampling(temperature, top_p, top_k, min_p)
    how.check("sample_token")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    uniform = torch.randint(UNIT, (len(logits),), generator=generator, device=logits.device)
    return drawn(remaining(logits, how), uniform)[:, None]
