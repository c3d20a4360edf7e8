"""Adafactor: the second moment of a matrix as a row and a column, and no first moment.

    v_ij ~ r_i c_j / sum(r);    state of an m x n matrix: m + n values

Saves: nearly all of AdamW's 8 bytes a parameter
Costs: some quality at equal steps; a learning rate of its own, 1e-2, which each tensor's RMS multiplies
Source: Shazeer and Stern (2018), https://arxiv.org/abs/1804.04235; implementation: torch.optim.Adafactor
"""

from typing import Any, ClassVar

import torch

from lit_efficient.optimizers.groups import parameter_groups


class GroupedAdafactor(torch.optim.Adafactor):
    """torch's Adafactor, whose decay can leave norms and biases out.

    Args:
        params: Parameters or groups.
        lr: Learning rate, multiplied by max(eps2, RMS of the tensor).
        beta2_decay: Exponent of the second moment's decay, at most 0.
        d: Clipping threshold of an update's RMS, at least 1.
        weight_decay: Decoupled weight decay.
        decay_norm_and_bias: Whether tensors with fewer than two dimensions decay as well.
    """

    helps: ClassVar[dict[str, tuple[int, str]]] = {"memory": (0, "nearly all of the optimizer's states")}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        d: float = 1.0,
        weight_decay: float = 0.0,
        decay_norm_and_bias: bool = True,
    ) -> None:
        groups = parameter_groups(params, weight_decay, decay_norm_and_bias)
        super().__init__(groups, lr=lr, beta2_decay=beta2_decay, d=d, weight_decay=weight_decay)
