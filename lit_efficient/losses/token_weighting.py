"""Weights of tokens for supervised fine-tuning, from the probabilities that the network itself computes.

    loss_t = -sg(w_t) log p(y_t)                 sg: without a gradient
    dft    w_t = p(y_t)
    eaft   w_t = (H_t / log K)^alpha             H_t: entropy of the K = 20 most likely tokens, normalised to sum to 1

DFT gives tokens that the network finds unlikely a small weight, which makes the gradient that of a policy whose reward
is 1 for each token of the data. EAFT gives a small weight to tokens where the network is certain, and so does not
change it where its certainty contradicts the data.

Costs: one more pass over the logits
Sources: DFT https://arxiv.org/abs/2508.05629, EAFT https://arxiv.org/abs/2601.02151. LLaMA-Factory divides H_t by 3 in
the place of log 20, and axolotl does not divide it.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_efficient.errors import check_choice, check_number

Kind = Literal["dft", "eaft"]
_TOP = 20  # tokens whose entropy counts


@dataclass(frozen=True)
class TokenWeighting:
    """Weights of tokens.

    Args:
        kind: ``dft`` or ``eaft``.
        alpha: Exponent of the entropy, above 0. Only for ``eaft``.
    """

    kind: Kind
    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_choice("TokenWeighting", "kind", self.kind, ("dft", "eaft"))
        check_number("TokenWeighting", "alpha", self.alpha, above=0)

    @torch.no_grad()
    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weight of each token, [...] in float32 at least.

        Args:
            logits: [..., V].
            labels: [...]. The weight of a token with a label below 0 has no meaning.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.kind == "dft":
            chosen = logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
            return (chosen - logits.logsumexp(-1)).exp()
        number = min(_TOP, logits.shape[-1])
        log_probs = logits.topk(number, -1).values.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        # Rounding may give a small number below 0, of which there is no power.
        return (entropy.clamp(min=0) / math.log(number)) ** self.alpha
