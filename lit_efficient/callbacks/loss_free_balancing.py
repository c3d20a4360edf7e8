"""Loss-free balancing: a bias of each router evens out the load of experts, without a loss that disturbs the others.

    chosen = top-k of s + b;    b_e <- b_e + bias_rate * sign(mean load - load_e) after each step

Saves: the balancing loss, whose gradient competes with that of the task; experts of even load use a device well
Costs: the count of choices in each step; a buffer of one number for each expert
Source: Wang et al. (2024), https://arxiv.org/abs/2408.15664; DeepSeek-V3, https://arxiv.org/abs/2412.19437

The bias decides which experts are chosen. The weights of the chosen experts are computed from the scores s without it,
by the router's own code. DeepSeek-V3, GLM-4.5 and others have such a bias, which transformers does not change in
training. Routers of other models (Mixtral, Qwen3-MoE, GPT-OSS) get one. The bias follows the choices and not the
gradients, so it also changes in a step that a gradient scaler skips, as in Megatron.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_number, listed
from lit_efficient.mechanisms.expert_loads import BalancesLoads
from lit_efficient.mechanisms.router_balance import routers
from lit_efficient.mechanisms.side_terms import SideTerms
from lit_efficient.models.networks.biased_router import OWN_BIASES, BiasedRouter, KeepsBias, chooses_once
from lit_efficient.models.networks.token_rows import pass_rows
from lit_efficient.surgery import home_of, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_ADDED = "router_bias"


class LossFreeBalancing(BalancesLoads, CheckpointHooks, Technique):
    """Balance the experts of a network by a bias of the choice, which follows the load of all processes.

    For networks of transformers whose experts are stacked. The experts of ``MixtureOfExperts`` have the argument
    ``bias_rate`` instead. Loads leave out padding, which is read from the ``attention_mask`` [B, T] of the network's
    call or of the batch. ``LanguageModeling`` also adds the balancing loss of the network, unless
    ``model.config_fields.output_router_logits`` is false.

    A network without a bias of its own can be exported as ``safetensors`` only, because its class has no place for it.

    Args:
        bias_rate: Change of the bias in each step, above 0, in units of the scores: probabilities for most networks,
            logits for GPT-OSS.

    Raises:
        ConfigurationError: For an argument out of range; without routers next to stacked experts; and for a router
            that does not choose by one ``topk``.
    """

    counts_steps = True
    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.READS_NO_WEIGHTS})
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_BATCH: "it balances the experts over a batch",
    }
    conflicts: ClassVar[dict[str, str]] = {
        "MixtureOfExperts": "its experts have a bias of their own: set its bias_rate, and leave LossFreeBalancing out"
    }
    alters = ("weights",)
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "even load of experts without a loss term")}

    def __init__(self, bias_rate: float = 0.001) -> None:
        super().__init__()
        check_number("LossFreeBalancing", "bias_rate", bias_rate, above=0)
        self.bias_rate = bias_rate
        self._terms = SideTerms("LossFreeBalancing", BiasedRouter)

    def transform(self, module: nn.Module) -> Report:
        found = [*routers(module)]
        if not found:
            raise ConfigurationError(
                f"LossFreeBalancing: {type(module).__name__} has no routers next to stacked experts. For experts of "
                "MixtureOfExperts set its bias_rate"
            )
        places = {name: _own_bias(module, name, router) for name, router in found}
        strange = [name for name, router in found if places[name] is None and not chooses_once(router)]
        if strange:
            raise ConfigurationError(
                f"LossFreeBalancing: {listed(strange)} ({type(module.get_submodule(strange[0])).__name__}) have no "
                "bias, and do not choose experts by one topk over the scores of all: leave LossFreeBalancing out"
            )
        for name, router in found:
            holder, key = places[name] or (router, _ADDED)
            bias = torch.zeros(len(router.weight), device=home_of(router.weight))  # type: ignore[arg-type]
            if places[name] is not None:
                bias = getattr(holder, key).float()
                mix_in(holder, KeepsBias)
            holder.register_buffer(key, bias)
            mix_in(router, BiasedRouter, router_bias_at=key, router_load=None, token_rows={})
        pass_rows(module, found)
        added = sum(place is None for place in places.values())
        return Report(
            f"{len(found)} routers choose by a bias that follows the load of their experts; {added} had none",
            modules=tuple(places),
            details={"biases_added": added},
        )

    def biases(self, module: nn.Module) -> list[tuple[Any, Tensor]]:
        found = []
        for name, router in module.named_modules():
            if isinstance(router, BiasedRouter):
                around = module.get_submodule(name.rpartition(".")[0])
                holder = router if hasattr(router, router.router_bias_at) else around
                found.append((router, getattr(holder, router.router_bias_at)))
        return found

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        return any(isinstance(part, BiasedRouter) for part in module.modules())

    @classmethod
    def convert_export(cls, state: dict[str, object], checkpoint: Mapping[str, object], module: object = None) -> None:
        """Export the biases under their names, if the format supports them."""

    @classmethod
    def fits(cls, checkpoint: Mapping[str, Any], format: str) -> bool:
        """Return whether the biases are the network's own, and the format holds all of its weights."""
        return format == "merged" and not any(key.endswith(f".{_ADDED}") for key in checkpoint["state_dict"])


def _own_bias(root: nn.Module, name: str, router: Any) -> tuple[Any, str] | None:
    """Return the module and name of a network's own bias of the choice, which is a buffer [E]."""
    for holder in (router, root.get_submodule(name.rpartition(".")[0])):
        for key, buffer in holder.named_buffers(recurse=False):
            if key in OWN_BIASES and buffer.shape == (len(router.weight),):
                return holder, key
    return None
