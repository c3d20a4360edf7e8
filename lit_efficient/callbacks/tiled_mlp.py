"""Tiled MLPs: feed-forward layers process a tile of tokens at a time, so that longer sequences fit into memory.

    y = [f(x_1), ..., f(x_n)],  tiles x_i of m tokens;    f(x_i) is recomputed in its backward pass

Saves: the intermediate activations of MLPs, also inside blocks that are recomputed, where they are most of the peak
Costs: one more forward pass of these layers; short tiles do not use the processor fully
Source: Bekman et al. (2025), Arctic Long Sequence Training, https://arxiv.org/abs/2506.13996

By default a tile has as many tokens as the layer has features. The memory of a tile is then at most that of a few of
the layer's matrices. Inside a recomputed block an MLP runs three times forward: in the block's forward pass, in its
recomputation, and in the recomputation of each tile.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import check_number
from lit_efficient.internals.torch_compiler import is_compiled
from lit_efficient.mechanisms.blocks.feed_forward import find_tokenwise
from lit_efficient.mechanisms.blocks.recomputation import recompute
from lit_efficient.models.networks.expert_layers import width_of
from lit_efficient.surgery import mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def tiled(function: Callable[[Tensor], Tensor], x: Tensor, tokens: int) -> Tensor:
    """Return ``function(x)``, computed on one tile of ``x`` after another.

    Args:
        function: Function that maps rows [n, D] to rows [n, E], each row independently.
        x: Tokens [..., D].
        tokens: Number of rows in a tile, at least 1. The last tile may have fewer.

    Returns:
        Tensor [..., E].
    """
    # One split, and not slices: each slice's gradient would be padded with zeros to all rows.
    tiles = x.flatten(0, -2).split(tokens)
    return torch.cat([function(tile) for tile in tiles]).unflatten(0, x.shape[:-1])


class _Tiled(nn.Module):
    """Mix-in of a module that maps each token independently."""

    _tile: int  # number of tokens in a tile
    _tiled: bool  # True once a training step had more tokens than a tile

    def forward(self, *args: object, **kwargs: object) -> Any:
        forward = super().forward
        inputs = [*args, *kwargs.values()]
        x = inputs[0] if len(inputs) == 1 else None
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[:-1].numel() <= self._tile:
            return forward(*args, **kwargs)
        keyword = next(
            iter(kwargs), None
        )  # only the name: checkpoints keep this function, and args would keep all of x

        def forward_tile(tile: Tensor) -> Tensor:
            if keyword is None:
                return forward(tile)
            return forward(**{keyword: tile})

        if not torch.is_grad_enabled():
            return tiled(forward_tile, x, self._tile)
        if not torch.compiler.is_compiling():
            self._tiled = True
        return tiled(partial(recompute, self, forward_tile), x, self._tile)


class TiledMLP(Technique):
    """Compute the MLPs of a network's blocks one tile of tokens at a time, forward and backward. Names stay the same.

    The modules are found by a test that each token is mapped independently. They are MLPs of any kind: gated or not,
    with adapters, quantised. With ``ActivationCheckpointing`` tiles allow longer sequences, because the MLP of one
    block then takes most of the memory. Without it tiles save the activations of all MLPs. Dropout inside an MLP draws
    its masks tile by tile.

    Args:
        tokens: Number of tokens in a tile, at least 1, counted over all rows of a batch. ``None``: the number of
            features of the layer. A batch with fewer tokens is computed in one piece.
        layers: ``auto`` finds the modules in the repeated blocks. Otherwise regular expressions for the ends of names.

    Raises:
        ConfigurationError: For an argument out of range, or if there are no such modules.
    """

    phase = Phase.RECOMPUTE
    traits = frozenset({Trait.REFUSES_EARLY, Trait.TRAINING_ONLY})
    conflicts: ClassVar[dict[str, str]] = {
        "MixtureOfExperts": "its experts replace the MLPs, and its balancing loss needs all tokens of a call; leave "
        "TiledMLP out. ActivationCheckpointing also recomputes experts",
    }
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {
        "memory": (6, "activations of MLPs in long sequences, for one more forward of them")
    }

    def __init__(self, tokens: int | None = None, layers: str | list[str] = "auto") -> None:
        super().__init__()
        check_number("TiledMLP", "tokens", tokens, least=1, whole=True, null=True)
        self.tokens = tokens
        self.layers = layers
        self._checked = False

    def transform(self, module: nn.Module) -> Report:
        found = find_tokenwise(module, self.layers, who="TiledMLP")
        largest = 0
        saved = 0
        for _, part, bytes_per_token in found:
            tile = self.tokens or width_of(part)
            mix_in(part, _Tiled, _tile=tile, _tiled=False)
            largest = max(largest, tile)
            saved += bytes_per_token
        return Report(
            f"{len(found)} modules compute {largest:,} tokens at a time and save {format_bytes(saved)} per token",
            modules=tuple(name for name, _, _ in found),
            details={"tokens": largest, "bytes_per_token_saved": saved},
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Warn after the first batch if no MLP was tiled."""
        if self._checked:
            return
        self._checked = True
        parts = [part for part in pl_module.modules() if isinstance(part, _Tiled)]
        compiled = any(is_compiled(part) for part in pl_module.modules())  # compiled code does not set ``_tiled``
        if parts and not compiled and not any(part._tiled for part in parts):
            largest = max(part._tile for part in parts)
            rank_zero_warn(
                f"TiledMLP: no MLP had more tokens in the first batch than a tile of {largest:,}, so no memory is "
                "saved. Set a smaller tokens, or leave TiledMLP out"
            )
