"""Balancing loss of the routers of a language model of transformers: on by default, over real tokens only.

    loss = cross-entropy + coefficient * E sum_e f_e P_e        f: share of the choices, P: mean probability of expert e

The formula and the coefficient are those of the network's own class, which computes the term if it is called with
``output_router_logits``. transformers weighs tokens by the attention mask of the call. In a packed batch this is not a
mask of padding, so the mask of the term is replaced.

Source: Fedus et al. (2021), https://arxiv.org/abs/2101.03961, equation 4.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.distributed.row_slices import ROW_POSITIONS
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.hugging_face import balancing_module, balancing_over, records_routers
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.models.networks.document_attention import document_starts
from lit_efficient.surgery import expert_stacks

_ASKED = "output_router_logits"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # of a network, or of its config


class RouterBalance:
    """Balancing loss of one network.

    Args:
        owner: Name of the task, for messages.
        network: Causal language model of any library.
        wanted: ``output_router_logits`` of the user's configuration; None if it is not set.
        lacks: Reason why the task cannot add the term, or None.

    Raises:
        ConfigurationError: If the user asks for the term, and the network has none.
    """

    def __init__(self, owner: str, network: nn.Module, wanted: bool | None = None, lacks: str | None = None) -> None:
        self.coefficient = _coefficient(network)
        lacks = lacks or self._lacks(network)
        has_routers = records_routers(network) or any(True for _ in routers(network))
        self.is_on = has_routers and wanted is not False and lacks is None
        self.message: str | None = None
        """Sentence about a network of experts that is trained without the term, or None."""
        if not has_routers or lacks is None:
            return
        self.message = f"{owner}: {type(network).__name__} trains its routers without a balancing loss, because {lacks}"
        if wanted:
            raise ConfigurationError(
                f"{owner}: model.config_fields.{_ASKED}: true has no effect for {type(network).__name__}, because "
                f"{lacks}. Remove it"
            )

    def _lacks(self, network: nn.Module) -> str | None:
        """Return the reason why the network has no balancing loss, or None if it has one."""
        if balancing_module(network) is None or not records_routers(network):
            return "transformers computes none for this architecture"
        if not self.coefficient:
            return f"its configuration gives it the weight {self.coefficient or 0}"
        return None

    @contextmanager
    def computing(self, network: nn.Module, batch: Mapping[str, Tensor], targets: Tensor) -> Iterator[dict[str, bool]]:
        """Context for a call of the network, with further arguments of the call. In training they ask for the term.

        Args:
            network: The network.
            batch: The batch, as the task gets it.
            targets: Targets [B, T] of its tokens.
        """
        if not self.is_on or not torch.is_grad_enabled():
            yield unasked(network)
            return
        with balancing_over(network, real_tokens(batch, targets)):
            yield {_ASKED: True}

    def loss(self, output: object) -> Tensor | None:
        """Return the weighted term of a call in :meth:`computing`, or None without it."""
        term = getattr(output, "aux_loss", None)
        if not self.is_on or not isinstance(term, Tensor) or not torch.is_grad_enabled():
            return None
        assert self.coefficient is not None
        return self.coefficient * term


def unasked(network: nn.Module) -> dict[str, bool]:
    """Return arguments with which a call of the network does not compute the term, whatever its configuration says."""
    config = getattr(network, "config", None)
    asks = getattr(config, _ASKED, False) or getattr(_text_config(config), _ASKED, False)
    return {_ASKED: False} if asks else {}


def real_tokens(batch: Mapping[str, Tensor], targets: Tensor) -> Tensor | None:
    """Return True for the tokens of a batch that are no padding, [B, T], or None if all count.

    The padding of a packed row is its last document, if this has no targets. In a slice of a row the last document may
    go on in the next slice, so all tokens count.

    Example:
        >>> positions = torch.tensor([[0, 1, 2, 0, 1]])
        >>> real_tokens({"position_ids": positions}, torch.tensor([[5, 6, -100, -100, -100]]))
        tensor([[ True,  True,  True, False, False]])
    """
    if "attention_mask" in batch:
        return batch["attention_mask"].bool()
    if "position_ids" not in batch or ROW_POSITIONS in batch:
        return None
    starts = document_starts(batch["position_ids"])
    last = starts == starts[:, -1:]
    learned = (last & (targets != IGNORE)).any(dim=1, keepdim=True)
    return ~last | learned


def _coefficient(network: nn.Module) -> float | None:
    config = getattr(network, "config", None)
    for holder in (network, config, _text_config(config)):
        for name in _COEFFICIENTS:
            value = getattr(holder, name, None)
            if isinstance(value, int | float):
                return float(value)
    return None


def _text_config(config: Any) -> object:
    if hasattr(config, "get_text_config"):
        return config.get_text_config()
    return None


def routers(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of routers, which choose between experts.

    A router is a leaf module next to the experts whose weight is a matrix with one row for each expert.
    """
    # In a functional call, parameters are plain tensors.
    sizes = {name: getattr(part, keys[0]).shape[0] for name, part, keys in expert_stacks(root)}
    for name, module in root.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(part) for part in module}) == 1:
            sizes.setdefault(name, len(module))
    for name, experts in sizes.items():
        parent = name.rpartition(".")[0]
        for key, sibling in root.get_submodule(parent).named_children():
            weight = dict(sibling.named_parameters(recurse=False)).get("weight")
            if weight is None or list(sibling.children()):
                continue
            if weight.ndim == 2 and weight.shape[0] == experts and weight.is_floating_point():
                yield f"{parent}.{key}".lstrip("."), sibling
