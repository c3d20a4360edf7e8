"""Mixture of experts: many copies of each feed-forward module, of which a router gives each token a few.

    y = sum_e g_e FFN_e(x) over the top_k experts e of softmax(W x),    sum_e g_e = 1
    shared: (y + sum_s FFN_s(x)) / (1 + S)
    loss = loss + balance_loss * E sum_e f_e P_e + z_loss * mean (log sum_e exp (W x)_e)^2,   means over the layers
    bias_rate: b_e <- b_e +- bias_rate, and the choice is that of softmax(W x) + b

Saves: compute a parameter: ``experts`` times the feed-forward weights at ``top_k`` times their operations
Costs: memory for all experts, their gradients and states; sorting; a dense network of the same compute is smaller
Source: Shazeer et al. (2017), https://arxiv.org/abs/1701.06538; upcycling: Komatsuzaki et al. (2022),
    https://arxiv.org/abs/2212.05055; balance: Fedus et al. (2021), https://arxiv.org/abs/2101.03961; without a loss:
    Wang et al. (2024), https://arxiv.org/abs/2408.15664; z: Zoph et al. (2022), https://arxiv.org/abs/2202.08906

All experts start as the dense module, and the weights of those that a token passes sum to 1: the network starts as the
dense one, whatever is chosen. Nothing is dropped: tokens are sorted by expert, and each layer is one grouped product.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.application.loss import LossHooks
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import check_number
from lit_efficient.mechanisms.blocks.feed_forward import find_feed_forwards
from lit_efficient.mechanisms.side_terms import SideTerms, parts_of
from lit_efficient.models.networks.expert_layers import ExpertMixture, add_mixture, balanced_bias, router_losses
from lit_efficient.models.networks.token_rows import pass_rows, rows_in
from lit_efficient.surgery import call_layers, count
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


class MixtureOfExperts(LossHooks, OptimizerHooks, CheckpointHooks, Technique):
    """Turn the feed-forward modules of a network into mixtures of experts, which start as what they were.

    They are found by what they do: modules of linear layers in the blocks that map each token by itself. The weights
    keep their names and have one entry for each expert: [experts + shared, out, in]. The router, in float32 whatever
    the precision is, stands beside them as ``router_weight``. A checkpoint of the dense network loads. Losses and loads
    are of tokens that the ``attention_mask`` [B, T] of the network's call, or of the batch, does not call padding.

    ``LoRA(targets="all-linear+experts")`` adapts the experts; the routers train beside it.

    Args:
        experts: Experts that the router chooses from, at least 2.
        top_k: Experts a token, 1 to ``experts``.
        shared: Further experts, which all tokens pass.
        balance_loss: Weight of the load-balance loss, 0 for none.
        z_loss: Weight of the router's z-loss, 0 for none.
        bias_rate: By how much the bias of the choice moves after each step, for a balance without a loss (0.001 in the
            paper, with ``balance_loss=0``); 0 for none.
        layers: ``auto``, or regular expressions for the ends of the names of feed-forward modules.
        seed: Of the routers' first weights.

    Raises:
        ConfigurationError: For an argument out of range, and without such modules.
    """

    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.READS_NO_WEIGHTS})
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_BATCH: (
            "the balance of its experts is that of a batch, and its losses are means over all tokens, learned or not"
        ),
    }
    alters = ("weights",)
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "quality": (0, "more parameters at the same compute: another network")
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
        self.experts, self.top_k, self.shared = experts, top_k, shared
        self.balance_loss, self.z_loss, self.bias_rate = balance_loss, z_loss, bias_rate
        self.layers = layers
        self.seed = seed
        self._steps = 0
        self._terms = SideTerms("MixtureOfExperts", ExpertMixture, router_losses)

    def transform(self, module: nn.Module) -> Report:
        found = find_feed_forwards(module, self.layers, who="MixtureOfExperts")
        before = count(module.parameters())
        for i, (_, part) in enumerate(found):
            generator = torch.Generator().manual_seed(mix_seed(self.seed, i))
            balanced = self.bias_rate > 0
            add_mixture(part, self.experts, self.top_k, self.shared, balanced=balanced, generator=generator)
        pass_rows(module, found)
        call_layers(module)
        after = count(module.parameters())
        held = count(p for _, part in found for name, p in part.named_parameters() if name != "router_weight")
        total, used = self.experts + self.shared, self.top_k + self.shared
        active = after - held * (total - used) // total
        shared = f" and {self.shared} shared" if self.shared else ""
        return Report(
            f"{len(found)} feed-forward modules with {self.experts} experts{shared}, {self.top_k} a token: {after:,} "
            f"parameters, was {before:,}; {active:,} work on a token",
            modules=tuple(name for name, _ in found),
            parameters=held,
            details={"parameters_active": active, "parameters_before": before},
        )

    def prepare_parameters(self, module: nn.Module) -> None:
        for part in parts_of(module, ExpertMixture):  # beside adapters, too, which freeze all others
            part.router_weight.requires_grad_(True)

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        return [part.router_weight for part in parts_of(module, ExpertMixture)]

    @contextmanager
    def watch_step(self, module: nn.Module, batch: Any) -> Iterator[None]:
        parts, rows = parts_of(module, ExpertMixture), rows_in(batch)
        for part in parts:
            part.token_rows = rows
        try:
            with self._terms.collecting(module):
                yield
        finally:
            for part in parts:
                part.token_rows = {}

    def extra_loss(self, output: Any, module: nn.Module, batch: Any) -> Tensor | None:
        terms = self._terms.mean(module)
        if terms is None or not (self.balance_loss or self.z_loss):
            return None
        return self.balance_loss * terms[0] + self.z_loss * terms[1]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step
        for part in parts_of(pl_module, ExpertMixture):
            part.router_load = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.bias_rate or trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        parts = [part for part in parts_of(pl_module, ExpertMixture) if part.router_load is not None]
        if not parts:
            return
        loads = trainer.strategy.reduce(torch.stack([part.router_load for part in parts]), reduce_op="sum")
        for part, load in zip(parts, loads, strict=True):
            part.router_bias.copy_(balanced_bias(part.router_bias, load, self.bias_rate))
            part.router_load = None

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        return bool(parts_of(module, ExpertMixture))

    @classmethod
    def convert_export(cls, state: dict[str, Any], checkpoint: Mapping[str, Any], module: Any = None) -> None:
        """Experts are exported as they are, where the format can hold them."""
