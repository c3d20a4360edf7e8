"""Draw the next token: temperature, then nucleus (top-p) sampling.

    p = softmax(logits / temperature), cut to the smallest set of likeliest tokens whose probability reaches top_p

Source: Holtzman et al. (2020), https://arxiv.org/abs/1904.09751.
"""

import torch
from torch import Tensor

from lit_efficient.errors import check_number

_UNIT = 2**40  # what a probability of 1 counts; a power of two, by which float32 is multiplied exactly


def check_sampling(owner: str, temperature: float, top_p: float) -> None:
    """Refuse sampling arguments that mean nothing, in the name of ``owner``."""
    check_number(owner, "temperature", temperature, least=0)
    check_number(owner, "top_p", top_p, above=0, most=1)


def sample_token(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """Draw one token for each row, ``[B, 1]``.

    Args:
        logits: ``[B, V]``.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: probability kept, in (0, 1]; the likeliest token always stays.
        generator: the only source of randomness, on the device of ``logits``.
    """
    check_sampling("sample_token", temperature, top_p)
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    probability, token = (logits.float() / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    # Of all likelier tokens, as integers: CUDA has no deterministic sum of floats along a row.
    parts = (probability * _UNIT).long()
    before = parts.cumsum(-1) - parts
    # multinomial normalises what is left
    choice = torch.multinomial(probability.masked_fill(before >= top_p * _UNIT, 0.0), 1, generator=generator)
    return token.gather(-1, choice)
