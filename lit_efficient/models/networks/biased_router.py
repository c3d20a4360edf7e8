"""Routers of other libraries with a bias that only the choice of experts sees, and with counts of the choices.

    chosen = top-k of s + b        s: the scores that the router compares, b: bias [E]
    the router's own code computes the weights of the chosen experts from s, as without the bias

Source: Wang et al. (2024), https://arxiv.org/abs/2408.15664.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lit_efficient.internals.torch_modules import StaysFloat32
from lit_efficient.models.networks.expert_layers import choice_counts

OWN_BIASES = ("e_score_correction_bias", "expert_bias")  # names of such a bias in networks of transformers
_TOP_K = (torch.topk, Tensor.topk)


class BiasedChoice(TorchFunctionMode):
    """Mode in which ``topk`` over [..., E] chooses by the scores plus a bias [E], and returns scores without it."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = bias
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _TOP_K or args[0].shape[-1] != len(self.bias):
            return func(*args, **kwargs)
        self.calls += 1
        scores, *how = args
        wide = torch.promote_types(scores.dtype, torch.float32)
        chosen = func(scores.detach().to(wide) + self.bias, *how, **kwargs).indices
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class KeepsBias(StaysFloat32):
    """Mix-in of a module that holds a bias of the choice. In 16 bits it would not change by small steps."""

    float32 = ("router_bias", *OWN_BIASES)


class BiasedRouter(KeepsBias):
    """Mix-in of a router that returns the chosen experts [..., k] among its outputs. It counts them in training."""

    weight: nn.Parameter  # [E, D]
    router_bias: Tensor  # [E], unless the network has a bias of its own
    router_bias_at: str  # name of the bias, in the router or in the module around it
    router_load: Tensor | None  # [E], number of choices since the last step
    training: bool
    side_terms: list[Any] | None = None  # a list while the choices of a step count
    token_rows: dict[str, object]  # padding mask of the batch, see `token_rows`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the router's own outputs, for the experts that are best with the bias."""
        if self.router_bias_at == "router_bias":
            with BiasedChoice(self.router_bias):
                outputs = super().forward(*args, **kwargs)  # type: ignore[misc]
        else:
            outputs = super().forward(*args, **kwargs)  # type: ignore[misc]
        if self.side_terms is not None and self.training and torch.is_grad_enabled():
            self._count(chosen_in(outputs))
        return outputs

    def _count(self, chosen: Tensor) -> None:
        mask = self.token_rows.get("attention_mask")
        real = None
        if isinstance(mask, Tensor) and mask.numel() * chosen.shape[-1] == chosen.numel():
            real = mask.flatten() != 0
        now = choice_counts(chosen, len(self.weight), real)
        if self.router_load is not None:
            now = self.router_load.to(now.device) + now
        self.router_load = now


def chosen_in(outputs: Any) -> Tensor:
    """Return the chosen experts among the outputs of a router: the only tensor of integers."""
    (found,) = [part for part in outputs if isinstance(part, Tensor) and not part.is_floating_point()]
    return found


@torch.no_grad()
def chooses_once(router: Any) -> bool:
    """Return whether a router chooses by one ``topk`` over the scores of all experts, and returns its indices.

    The router is called with zeros. On the meta device nothing is computed.
    """
    weight = router.weight
    mode = BiasedChoice(torch.zeros(len(weight), device=weight.device))
    with mode:
        try:
            outputs = router(weight.new_zeros(1, 2, weight.shape[1]))
        except TypeError:  # it needs further arguments
            return False
    integers = [part for part in outputs if isinstance(part, Tensor) and not part.is_floating_point()]
    return mode.calls == 1 and len(integers) == 1
