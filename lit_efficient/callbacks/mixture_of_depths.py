"""Mixture of depths: every other block runs on a few tokens of each row, which a router chooses; the rest pass by.

    x_t <- x_t + g_t (block(x of the chosen)_t - x_t) of the ``capacity`` of a row with the largest r = w . rms(x),
    g = 2 sigmoid(r);    loss = loss + loss_weight * BCE(predictor(x_t), t was chosen),   mean over the blocks

Saves: the compute of the tokens that pass by: at a capacity of 1/8 in every other block, 7/16 of all blocks'
Costs: a router and a predictor a block; quality at equal steps (the paper spends the saved compute on more of them)
Source: Raposo et al. (2024), https://arxiv.org/abs/2404.02258

The largest of a row are known when the row is, and a model that generates has not read it yet: outside of training a
predictor decides, which sees a token alone and learns to say whether it would be chosen. So what is validated is what
generates, with a cache or without.
"""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.application.loss import LossHooks
from lit_efficient.application.optimizers import OptimizerHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.mechanisms.blocks.block_map import BlockMap, find_blocks, trained_blocks
from lit_efficient.mechanisms.blocks.residual import why_not_residual
from lit_efficient.mechanisms.side_terms import SideTerms, parts_of
from lit_efficient.models.libraries.teachers import width_of
from lit_efficient.models.networks.depth_routing import DepthRouted
from lit_efficient.models.networks.token_rows import rows_in
from lit_efficient.surgery import count, home_of, mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def first_guess(router: Tensor, capacity: float, own: bool = True) -> Tensor:
    """A predictor [D + 1] that would choose as the router [D] does, of tokens whose features are alike likely.

    Its logits are those scores r, of deviation |w|, less their quantile, at half of a logit for a deviation: few enough
    to be unlearned in some steps. One of zeros chooses no token, and a network would be validated without its blocks.
    Without weights of its ``own`` it is [1], what the router's scores have to be above: the quantile of |w| alone.
    """
    quantile = NormalDist().inv_cdf(1 - capacity) if capacity < 1 else -1 / router.norm()
    if not own:
        return -quantile * router.norm()[None]
    if capacity == 1:
        return torch.cat((torch.zeros_like(router), router.new_ones(1)))
    return torch.cat((router / router.norm(), router.new_full((1,), -quantile))) / 2


class MixtureOfDepths(LossHooks, OptimizerHooks, CheckpointHooks, Technique):
    """Let every other block of a causal language model run on a part of each row's tokens.

    Attention in such a block is between the chosen tokens, at their own positions. Padding, of which the block's mask
    or the batch's ``attention_mask`` [B, T] tells, is not chosen; the share is of a row's other tokens. Works on blocks
    that are causal and return the tokens that they were given, changed: our GPT's, Llama's and their like.

    Args:
        capacity: Share of a row's tokens that a block runs on in training, above 0, at most 1.
        every: Which blocks: each ``every``-th, the first ones before it left whole.
        predict: What decides outside of training: ``predictor``, a layer of its own behind a stopped gradient, or
            ``router``, whose own scores the loss pulls to below and above a learned threshold.
        loss_weight: Weight of what teaches it, above 0.
        blocks: ``auto``, or regular expressions for the dotted names of blocks, all of which are then routed.
        seed: Of the routers' first weights.

    Raises:
        ConfigurationError: For an argument out of range, and without such blocks; in the first step for one that is not
            causal, or that reads numbers of tokens.
    """

    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.READS_NO_WEIGHTS})
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_BATCH: "what teaches its predictor is a mean over all tokens, learned or not",
        Trait.SEES_AHEAD: "the largest scores of a row are those of the whole row",
    }
    alters = ("weights",)
    conflicts: ClassVar[dict[str | Trait, str]] = {
        Trait.VIRTUAL_TOKENS: (
            "virtual tokens are in the cache of keys and values, and a block that trains on a part of the tokens has "
            "no cache: use LoRA or IA3"
        ),
        "TokenRouting": "both choose the tokens that a block runs on; keep one of them",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "speed": (0, "tokens pass by blocks: another network, at equal steps a weaker one")
    }

    def __init__(
        self,
        capacity: float = 0.125,
        every: int = 2,
        predict: str = "predictor",
        loss_weight: float = 0.01,
        blocks: str | list[str] = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_number("MixtureOfDepths", "capacity", capacity, above=0, most=1)
        check_number("MixtureOfDepths", "every", every, least=1, whole=True)
        check_choice("MixtureOfDepths", "predict", predict, ("predictor", "router"))
        check_number("MixtureOfDepths", "loss_weight", loss_weight, above=0)
        self.capacity = capacity
        self.every = every
        self.predict = predict
        self.loss_weight = loss_weight
        self.blocks = blocks
        self.seed = seed
        self._terms = SideTerms("MixtureOfDepths", DepthRouted)

    def transform(self, module: nn.Module) -> Report:
        found = find_blocks(module, self.blocks, who="MixtureOfDepths")
        found = trained_blocks(found) if self.blocks == "auto" else found
        chosen = found[self.every - 1 :: self.every] if self.blocks == "auto" else found
        if not chosen:
            raise refusal("MixtureOfDepths", "every", f"at most {len(found)}, the number of blocks", self.every)
        block_map = BlockMap(module)
        for name, block in chosen:
            if (why := why_not_residual(block_map, block)) is not None:
                raise ConfigurationError(f"MixtureOfDepths: block {name!r} cannot run on part of the tokens: {why}")
        before = count(module.parameters())
        for i, (name, block) in enumerate(chosen):
            width = width_of(module, name)
            if width is None:
                raise ConfigurationError(f"MixtureOfDepths: cannot tell the width of block {name!r}")
            self._route(block, name, width, torch.Generator().manual_seed(mix_seed(self.seed, i)))
        added = count(module.parameters()) - before
        return Report(
            f"{len(chosen)} of {len(found)} blocks run on {self.capacity:.1%} of the tokens; {added:,} parameters more",
            modules=tuple(name for name, _ in chosen),
            parameters=added,
            details={"share_of_blocks_compute": 1 - len(chosen) * (1 - self.capacity) / len(found)},
        )

    def _route(self, block: Any, name: str, width: int, generator: torch.Generator) -> None:
        home = min(block.parameters(), key=lambda p: p.ndim)  # a norm's or a bias, which nothing quantises
        dtype = torch.promote_types(home.dtype, torch.float32)
        drawn = torch.randn(width, generator=generator, device="cpu", dtype=torch.float32) * 0.02 / width**0.5
        block.register_parameter("depth_router", nn.Parameter(drawn.to(home_of(home), dtype)))
        guess = first_guess(drawn, self.capacity, self.predict == "predictor").to(home_of(home), dtype)
        block.register_parameter("depth_predictor", nn.Parameter(guess))
        names = tuple(inspect.signature(block.forward).parameters)
        state = {"depth_capacity": self.capacity, "depth_name": name, "depth_arguments": names}
        mix_in(block, DepthRouted, **state, depth_dims={}, depth_tuple=None, token_rows={})

    def prepare_parameters(self, module: nn.Module) -> None:
        for parameter in self.trains(module):  # beside adapters, too, which freeze all others
            parameter.requires_grad_(True)

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for part in parts_of(module, DepthRouted) for p in (part.depth_router, part.depth_predictor)]

    def watch_step(self, module: nn.Module, batch: Any) -> AbstractContextManager[None]:
        return self._terms.collecting(module)

    def on_train_batch_start(self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int) -> None:
        for part in parts_of(pl_module, DepthRouted):  # until the backward pass is over, which may recompute
            part.token_rows = rows_in(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        for part in parts_of(pl_module, DepthRouted):
            part.token_rows = {}

    def extra_loss(self, output: Any, module: nn.Module, batch: Any) -> Tensor | None:
        terms = self._terms.mean(module)
        return None if terms is None else self.loss_weight * terms[0]

    @classmethod
    def convert_export(cls, state: dict[str, Any], checkpoint: Mapping[str, Any], module: Any = None) -> None:
        """Routers are exported as they are, where the format can hold them."""

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        return bool(parts_of(module, DepthRouted))
