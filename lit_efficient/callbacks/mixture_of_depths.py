"""Mixture of depths: in every other block a router chooses a few tokens of each row, and the others skip the block.

    x_t <- x_t + g_t (block(x of the chosen)_t - x_t) for the ``capacity`` of a row with the largest r = w . rms(x),
    g = 2 sigmoid(r);    loss = loss + loss_weight * BCE(predictor(x_t), t was chosen),   mean over the blocks

Saves: the compute of tokens that skip blocks: 7/16 of the blocks' compute for a capacity of 1/8 in every other block
Costs: a router and a predictor for each block; quality at equal steps (the paper uses the saved compute for more steps)
Source: Raposo et al. (2024), https://arxiv.org/abs/2404.02258

The largest scores of a row depend on all of its tokens, but a model that generates does not know later tokens. Outside
of training, a predictor therefore decides from each token alone. It learns to predict whether the token would be
chosen. Validation and generation, with a cache or without, compute the same function.
"""

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from statistics import NormalDist
from typing import ClassVar

import torch
from lightning.pytorch import Trainer
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
    """Return initial weights of a predictor that chooses about the same tokens as the router.

    The scores r have the standard deviation |w| for features that are normally distributed. The predictor's logits are
    the scores minus their quantile, scaled to half a logit per standard deviation, which some training steps can
    change. A predictor of zeros would choose no token, so that the network would be validated without its blocks.

    Args:
        router: Weights of the router, [D].
        capacity: Share of the tokens that are chosen.
        own: Whether the predictor has weights of its own. Otherwise it is only a threshold for the router's scores.

    Returns:
        Weights and bias of the predictor, [D + 1], or without ``own`` the negative threshold, [1].
    """
    if capacity < 1:
        quantile = NormalDist().inv_cdf(1 - capacity)
    else:
        quantile = -1 / router.norm()
    if not own:
        return -quantile * router.norm()[None]
    if capacity == 1:
        return torch.cat((torch.zeros_like(router), router.new_ones(1)))
    return torch.cat((router / router.norm(), router.new_full((1,), -quantile))) / 2


class MixtureOfDepths(LossHooks, OptimizerHooks, CheckpointHooks, Technique):
    """Run every other block of a causal language model only on a part of each row's tokens.

    In such a block, attention is between the chosen tokens, at their original positions. Padding is never chosen: it is
    read from the block's mask or from the ``attention_mask`` [B, T] of the batch, and the share refers to the other
    tokens of the row. Blocks must be causal and return the changed tokens, as in this package's GPT and in Llama.

    Args:
        capacity: Share of a row's tokens on which a block runs in training, above 0 and at most 1.
        every: Distance of routed blocks: each ``every``-th block is routed, starting with block number ``every``.
        predict: What decides outside of training: ``predictor``, a separate layer whose gradient does not reach the
            network, or ``router``, whose own scores are trained to be below or above a learned threshold.
        loss_weight: Weight of the loss that trains this decision, above 0.
        blocks: ``auto``, or regular expressions for the dotted names of blocks, all of which are then routed.
        seed: Seed of the routers' initial weights.

    Raises:
        ConfigurationError: For an argument out of range, and if no block can be routed. In the first step, for a block
            that is not causal or that depends on the number of tokens.
    """

    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.READS_NO_WEIGHTS})
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_BATCH: "the loss of its predictor is a mean over all tokens, also ignored ones",
        Trait.SEES_AHEAD: "it compares the scores of all tokens of a row, also later ones",
    }
    alters = ("weights",)
    conflicts: ClassVar[dict[str | Trait, str]] = {
        Trait.VIRTUAL_TOKENS: (
            "virtual tokens are in the cache of keys and values, but a block that trains on a part of the tokens has "
            "no cache; use LoRA or IA3"
        ),
        "TokenRouting": "both choose the tokens on which a block runs; keep one of them",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "speed": (0, "most tokens skip some blocks; changes the network, which is weaker at equal steps")
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
        chosen = found
        if self.blocks == "auto":
            found = trained_blocks(found)
            chosen = found[self.every - 1 :: self.every]
        if not chosen:
            raise refusal("MixtureOfDepths", "every", f"at most {len(found)}, the number of blocks", self.every)
        block_map = BlockMap(module)
        for name, block in chosen:
            reason = why_not_residual(block_map, block)
            if reason is not None:
                raise ConfigurationError(f"MixtureOfDepths: block {name!r} cannot run on part of the tokens: {reason}")
        before = count(module.parameters())
        for i, (name, block) in enumerate(chosen):
            width = width_of(module, name)
            if width is None:
                raise ConfigurationError(
                    f"MixtureOfDepths: the width of block {name!r} is unknown. Name other blocks in blocks=[...]"
                )
            self._route(block, name, width, torch.Generator().manual_seed(mix_seed(self.seed, i)))
        added = count(module.parameters()) - before
        return Report(
            f"{len(chosen)} of {len(found)} blocks run on {self.capacity:.1%} of the tokens; {added:,} more parameters",
            modules=tuple(name for name, _ in chosen),
            parameters=added,
            details={"share_of_blocks_compute": 1 - len(chosen) * (1 - self.capacity) / len(found)},
        )

    def _route(self, block: nn.Module, name: str, width: int, generator: torch.Generator) -> None:
        home = min(block.parameters(), key=lambda p: p.ndim)  # a norm's weight or a bias, which is never quantised
        dtype = torch.promote_types(home.dtype, torch.float32)
        drawn = torch.randn(width, generator=generator, device="cpu", dtype=torch.float32) * 0.02 / width**0.5
        block.register_parameter("depth_router", nn.Parameter(drawn.to(home_of(home), dtype)))
        guess = first_guess(drawn, self.capacity, self.predict == "predictor").to(home_of(home), dtype)
        block.register_parameter("depth_predictor", nn.Parameter(guess))
        mix_in(
            block,
            DepthRouted,
            depth_capacity=self.capacity,
            depth_name=name,
            depth_arguments=tuple(inspect.signature(block.forward).parameters),
            depth_dims={},
            depth_tuple=None,
            token_rows={},
        )

    def prepare_parameters(self, module: nn.Module) -> None:
        for parameter in self.trains(module):  # adapters have frozen them
            parameter.requires_grad_(True)

    def trains(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for part in parts_of(module, DepthRouted) for p in (part.depth_router, part.depth_predictor)]

    def watch_step(self, module: nn.Module, batch: object) -> AbstractContextManager[None]:
        return self._terms.collecting(module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: nn.Module, batch: object, batch_idx: int) -> None:
        for part in parts_of(pl_module, DepthRouted):  # kept until the backward pass ends, which may recompute blocks
            part.token_rows = rows_in(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: nn.Module, outputs: object, batch: object, batch_idx: int
    ) -> None:
        for part in parts_of(pl_module, DepthRouted):
            part.token_rows = {}

    def extra_loss(self, output: object, module: nn.Module, batch: object) -> Tensor | None:
        terms = self._terms.mean(module)
        if terms is None:
            return None
        return self.loss_weight * terms[0]

    @classmethod
    def convert_export(cls, state: dict[str, object], checkpoint: Mapping[str, object], module: object = None) -> None:
        """Export routers unchanged, if the format supports them."""

    @classmethod
    def is_in(cls, module: nn.Module) -> bool:
        return bool(parts_of(module, DepthRouted))
