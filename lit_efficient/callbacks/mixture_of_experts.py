"""Mixture of experts: each feed-forward module becomes many experts, and a router sends each token to a few of them.

    y = sum_e g_e FFN_e(x) over the top_k experts e of softmax(W x),    sum_e g_e = 1
    shared: (y + sum_s FFN_s(x)) / (1 + S)
    loss = loss + balance_loss * E sum_e f_e P_e + z_loss * mean (log sum_e exp (W x)_e)^2,   means over the layers
    bias_rate: b_e <- b_e +- bias_rate, and experts are chosen by softmax(W x) + b

Saves: compute per parameter: ``experts`` times as many feed-forward weights need only ``top_k`` times the operations
Costs: memory of all experts with gradients and states; sorting of tokens; more memory than a dense network that needs
    the same compute
Source: Shazeer et al. (2017), https://arxiv.org/abs/1701.06538; upcycling: Komatsuzaki et al. (2022),
    https://arxiv.org/abs/2212.05055; balance: Fedus et al. (2021), https://arxiv.org/abs/2101.03961; without a loss:
    Wang et al. (2024), https://arxiv.org/abs/2408.15664; z: Zoph et al. (2022), https://arxiv.org/abs/2202.08906

All experts start as copies of the dense module, and the weights g_e of a token sum to 1. The network therefore computes
the same as the dense one at first, whatever the router chooses. No token is dropped: tokens are sorted by expert, and
each layer is one grouped matrix product.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import check_number, must_fit
from lit_efficient.mechanisms.blocks.feed_forward import find_feed_forwards
from lit_efficient.mechanisms.expert_loads import BalancesLoads
from lit_efficient.mechanisms.side_terms import SideTerms, parts_of
from lit_efficient.models.networks.expert_layers import ExpertMixture, add_mixture, router_losses
from lit_efficient.models.networks.token_rows import pass_rows
from lit_efficient.surgery import call_layers, count
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class MixtureOfExperts(BalancesLoads, OptimizerHooks, CheckpointHooks, Technique):
    """Turn the feed-forward modules of a network into mixtures of experts that compute the same at first.

    Feed-forward modules are modules of linear layers, within the blocks, that map each token separately. Their weights
    keep their names and get one entry for each expert: [experts + shared, out, in]. The router's weight is added as
    ``router_weight``, in float32 under any precision. Checkpoints of the dense network can be loaded. Losses and loads
    leave out padding, which is read from the ``attention_mask`` [B, T] of the network's call or of the batch.

    ``LoRA(targets="all-linear+experts")`` adapts the experts, while the routers train in full.

    Args:
        experts: Number of experts from which the router chooses, at least 2.
        top_k: Number of experts for each token, from 1 to ``experts``.
        shared: Number of further experts, which process all tokens.
        balance_loss: Weight of the load-balance loss; 0 for none.
        z_loss: Weight of the router's z-loss; 0 for none.
        bias_rate: Change of the routing bias in each step, which balances the load without a loss. The paper uses
            0.001, with ``balance_loss=0``. 0 for none.
        layers: ``auto``, or regular expressions for the ends of the names of feed-forward modules.
        seed: Seed of the routers' initial weights.

    Raises:
        ConfigurationError: For an argument out of range, and if the network has no feed-forward modules.
    """

    counts_steps = True
    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.READS_NO_WEIGHTS})
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_BATCH: (
            "it balances the experts over a batch, and its losses are means over all tokens, also ignored ones"
        ),
    }
    alters = ("weights",)
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "quality": (0, "more parameters for the same compute; changes the network")
    }

    def __init__(
        self,
        experts: int = 8,
        top_k: int = 2,
        shared: int = 0,
        balance_loss: float = 0.01,
        z_loss: float = 0.001,
        bias_rate: float = 0.0,
        layers: str | list[str] = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_number("MixtureOfExperts", "experts", experts, least=2, most=2**16, whole=True)
        check_number("MixtureOfExperts", "top_k", top_k, least=1, most=experts, whole=True)
        check_number("MixtureOfExperts", "shared", shared, least=0, whole=True)
        for name, value in (("balance_loss", balance_loss), ("z_loss", z_loss), ("bias_rate", bias_rate)):
            check_number("MixtureOfExperts", name, value, least=0)
        self.experts = experts
        self.top_k = top_k
        self.shared = shared
        self.balance_loss = balance_loss
        self.z_loss = z_loss
        self.bias_rate = bias_rate
        self.layers = layers
        self.seed = seed
        self._terms = SideTerms("MixtureOfExperts", ExpertMixture, router_losses)

    def transform(self, module: nn.Module) -> Report:
        found = find_feed_forwards(module, self.layers, who="MixtureOfExperts")
        before = count(module.parameters())
        for i, (_, part) in enumerate(found):
            generator = torch.Generator().manual_seed(mix_seed(self.seed, i))
            balanced = self.bias_rate > 0
            with must_fit("MixtureOfExperts", f"experts={self.experts} with shared={self.shared}", "number"):
                add_mixture(part, self.experts, self.top_k, self.shared, balanced=balanced, generator=generator)
        pass_rows(module, found)
        call_layers(module)
        after = count(module.parameters())
        held = count(p for _, part in found for name, p in part.named_parameters() if name != "router_weight")
        total = self.experts + self.shared
        active = after - held * (self.experts - self.top_k) // total
        shared = f" and {self.shared} shared" if self.shared else ""
        return Report(
            f"{len(found)} feed-forward modules with {self.experts} experts{shared}, {self.top_k} per token: {after:,} "
            f"parameters, was {before:,}; {active:,} are used for each token",
            modules=tuple(name for name, _ in found),
            parameters=held,
            details={"parameters_active": active, "parameters_before": before},
        )

    def prepare_parameters(self, module: nn.Module) -> None:
        for part in parts_of(module, ExpertMixture):  # adapters have frozen them
            part.router_weight.requires_grad_(True)

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        return [part.router_weight for part in parts_of(module, ExpertMixture)]

    def extra_loss(self, output: object, module: nn.Module, batch: object) -> Tensor | None:
        terms = self._terms.mean(module)
        if terms is None or not (self.balance_loss or self.z_loss):
            return None
        return self.balance_loss * terms[0] + self.z_loss * terms[1]

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        return bool(parts_of(module, ExpertMixture))

    @classmethod
    def convert_export(cls, state: dict[str, object], checkpoint: Mapping[str, object], module: object = None) -> None:
        """Export experts unchanged, if the format supports them."""
