"""Draw the next token: what was said before made less likely, temperature, then filters in the order of transformers.

    z = z / r where z > 0, else z r,  for tokens that were there before          (repetition penalty r)
    p = softmax(z / temperature) over the k likeliest                            (top-k)
      cut to the smallest set of likeliest tokens whose probability reaches P    (top-p, nucleus)
      and to those at least m times as likely as the likeliest                   (min-p)

Source: Keskar et al. (2019), https://arxiv.org/abs/1909.05858; Fan et al. (2018), https://arxiv.org/abs/1805.04833;
Holtzman et al. (2020), https://arxiv.org/abs/1904.09751; Nguyen et al. (2024), https://arxiv.org/abs/2407.01082.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_efficient.errors import check_number

_UNIT = 2**40  # what a probability of 1 counts; a power of two, by which float32 is multiplied exactly


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: at least 0; 0 takes the likeliest token, of which only the repetition penalty has a say.
        top_p: draw among the likeliest tokens that together have this probability, in (0, 1].
        top_k: draw among this many likeliest tokens; 0 is all.
        min_p: draw among tokens at least this many times as likely as the likeliest, in [0, 1].
        repetition_penalty: above 0; more than 1 makes tokens of the prompt and of what was written less likely.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def check(self, owner: str) -> None:
        """Refuse what means nothing, in the name of ``owner``."""
        check_number(owner, "temperature", self.temperature, least=0)
        check_number(owner, "top_p", self.top_p, above=0, most=1)
        check_number(owner, "top_k", self.top_k, least=0, whole=True)
        check_number(owner, "min_p", self.min_p, least=0, most=1)
        check_number(owner, "repetition_penalty", self.repetition_penalty, above=0)


def penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits ``[B, V]`` in which the tokens ``seen`` ``[B, T]`` are less likely."""
    logits = logits.float()
    before = logits.gather(-1, seen)
    return logits.scatter(-1, seen, torch.where(before > 0, before / penalty, before * penalty))


def probabilities(
    logits: Tensor, temperature: float, top_p: float, top_k: int = 0, min_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """What is left by the filters, not yet normalised, likeliest first, and which tokens these are: both ``[B, V]``."""
    scores = logits.float() / temperature
    if top_k:
        least = scores.topk(min(top_k, scores.shape[-1])).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    probability, token = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
    gone = probability < min_p * probability[..., :1]
    if top_p < 1:
        # Of all likelier tokens, as integers: CUDA has no deterministic sum of floats along a row.
        parts = (probability * _UNIT).long()
        gone |= parts.cumsum(-1) - parts >= top_p * _UNIT
    return probability.masked_fill(gone, 0.0), token


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
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: probability kept, in (0, 1]; the likeliest token always stays.
        generator: the only source of randomness, on the device of ``logits``.
        top_k: tokens kept; 0 is all.
        min_p: smallest probability kept, as a share of the greatest.
    """
    Sampling(temperature, top_p, top_k, min_p).check("sample_token")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    probability, token = probabilities(logits, temperature, top_p, top_k, min_p)
    # multinomial normalises what is left
    return token.gather(-1, torch.multinomial(probability, 1, generator=generator))
