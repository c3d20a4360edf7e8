"""Tiled MLPs: the feed-forward layers of a network compute a tile of tokens at a time, so that rows can be longer.

    y = [f(x_1), ..., f(x_n)],  tiles x_i of m tokens;    f(x_i) is computed again when its gradient is

Saves: what MLPs keep between their matrices, in blocks that are recomputed as wholes, too: there it is most of the peak
Costs: one more forward of these layers; short tiles leave a processor idle
Source: Bekman et al. (2025), Arctic Long Sequence Training, https://arxiv.org/abs/2506.13996

A tile is as long as the layer is wide by default: what a tile takes is then no more than a few of the layer's matrices.
Beside recomputed blocks an MLP runs three times forward: in the block's first and second pass, and in its tile's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import check_number
from lit_efficient.internals.torch_compiler import is_compiled
from lit_efficient.mechanisms.blocks.feed_forward import find_tokenwise
from lit_efficient.mechanisms.blocks.recomputation import recompute
from lit_efficient.mechanisms.trials.memory import format_bytes
from lit_efficient.models.networks.expert_layers import width_of
from lit_efficient.surgery import mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def tiled(function: Callable[[Tensor], Tensor], x: Tensor, tokens: int) -> Tensor:
    """``function(x)`` of tiles of ``x`` [..., D], one after the other.

    Args:
        function: Maps rows [n, D] to rows [n, E], each by itself.
        x: Any shape of tokens; their order plays no part.
        tokens: Rows of a tile, at least 1; the last tile may have fewer.
    """
    pieces = x.flatten(0, -2).split(tokens)  # a node of its own: no tile's gradient is padded to all rows
    return torch.cat([function(piece) for piece in pieces]).unflatten(0, x.shape[:-1])


class _Tiled(nn.Module):
    """Mix-in of a module that maps each token by itself."""

    _tile: int  # tokens
    _tiled: bool  # whether a training step had more tokens than a tile

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        given = [*args, *kwargs.values()]
        x = given[0] if len(given) == 1 else None
        if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[:-1].numel() <= self._tile:
            return forward(*args, **kwargs)
        one = forward if args else lambda piece: forward(**dict.fromkeys(kwargs, piece))
        if not torch.is_grad_enabled():
            return tiled(one, x, self._tile)
        if not torch.compiler.is_compiling():
            self._tiled = True
        return tiled(partial(recompute, self, one), x, self._tile)


class TiledMLP(Technique):
    """Compute the MLPs of a network's blocks a tile of tokens at a time, forward and backward; names stay.

    What maps each token by itself is asked of the modules: MLPs of transformers, gated or not, under adapters and
    quantised. Beside ``ActivationCheckpointing`` it is what makes rows longer, where the MLP of one block is most of
    what is there at a time; where activations of all blocks are kept, it spares those of the MLPs. Dropout within an
    MLP draws tile by tile.

    Args:
        tokens: Tokens of a tile, at least 1, counted over the rows of a batch; ``None``: as many as the layer has
            features. A batch of fewer is computed at once.
        layers: ``auto`` finds the modules in the repeated blocks; otherwise regular expressions for the ends of names.

    Raises:
        ConfigurationError: For an argument out of range, and without such modules.
    """

    phase = Phase.RECOMPUTE
    traits = frozenset({Trait.REFUSES_EARLY, Trait.TRAINING_ONLY})
    conflicts: ClassVar[dict[str, str]] = {
        "MixtureOfExperts": "its losses are of all tokens of a layer's call, and its experts take the MLPs' places; "
        "leave TiledMLP out, ActivationCheckpointing recomputes experts, too",
    }
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"memory": (6, "what MLPs keep of long rows, for a forward of them")}

    def __init__(self, tokens: int | None = None, layers: str | list[str] = "auto") -> None:
        super().__init__()
        check_number("TiledMLP", "tokens", tokens, least=1, whole=True, null=True)
        self.tokens = tokens
        self.layers = layers
        self._looked = False

    def transform(self, module: nn.Module) -> Report:
        found = find_tokenwise(module, self.layers, who="TiledMLP")
        sizes = []
        for _, part, _ in found:
            sizes.append(self.tokens or width_of(part))
            mix_in(part, _Tiled, _tile=sizes[-1], _tiled=False)
        kept = sum(bytes_ for _, _, bytes_ in found)
        return Report(
            f"{len(found)} modules compute {max(sizes):,} tokens at a time and keep {format_bytes(kept)} a token less",
            modules=tuple(name for name, _, _ in found),
            details={"tokens": max(sizes), "bytes_per_token_saved": kept},
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._looked:
            return
        self._looked = True
        parts = [part for part in pl_module.modules() if isinstance(part, _Tiled)]
        compiled = any(is_compiled(part) for part in pl_module.modules())  # such code sets no attribute
        if parts and not compiled and not any(part._tiled for part in parts):
            rank_zero_warn(
                f"TiledMLP: no MLP had more tokens in the first batch than a tile of {max(p._tile for p in parts):,}: "
                "nothing is spared; a smaller `tokens`, or leave it out"
            )
