"""Mixture of depths: a residual block that runs on a few tokens of each row, which its router chooses.

    r = w . rms(x),    g = 2 sigmoid(r)                      in float32, [B, T]
    x_t <- x_t + g_t (block(x of the chosen)_t - x_t)        for the chosen tokens t, in their order
    chosen: in training the tokens with the largest r of each row; otherwise by a predictor from each token alone

All other tokens pass the block unchanged. The block's arguments are cut to the chosen tokens along their dimensions of
tokens. A trial finds these dimensions: run on all tokens but the last, a causal block gives the same results as on all
tokens.
Source: Raposo et al. (2024), https://arxiv.org/abs/2404.02258. There g is r itself; here it starts near 1, so that a
trained block starts unchanged.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_modules import StaysFloat32
from lit_efficient.losses.selection import share_of
from lit_efficient.models.networks.gpt import KVCache, only_kept
from lit_efficient.models.networks.token_rows import row_of

Arguments: TypeAlias = dict[str, Any]  # arguments of a block, by name
Place: TypeAlias = tuple[str | int, ...]  # place of a tensor in the arguments: name, then indices of containers
Cache: TypeAlias = Any  # our `KVCache`, or a cache of transformers
_STARTS = "starts"  # argument of GPT's blocks that holds positions of tokens, [B, T]


def choose_tokens(scores: Tensor, count: int) -> Tensor:
    """Return the positions of the tokens with the largest scores of each row, ascending.

    Args:
        scores: [B, T].
        count: Number of tokens to choose, 1 to T.

    Returns:
        [B, count], int64.
    """
    return scores.topk(count, dim=1).indices.sort(dim=1).values


def run_chosen(
    block: Callable[[Tensor], Tensor], x: Tensor, gates: Tensor, positions: Tensor, kept: Tensor | None = None
) -> Tensor:
    """Return ``x``, with a block's gated residual added to the tokens at ``positions``.

    Args:
        block: Maps the chosen tokens [B, k, D] to their outputs [B, k, D], including the residual input.
        x: [B, T, D].
        gates: Factors of the residual, [B, T].
        positions: Positions of the chosen tokens, [B, k], without duplicates.
        kept: False for tokens that only fill up rows with fewer chosen tokens, [B, k] bool. ``None``: all are chosen.

    Returns:
        [B, T, D].

    Source: Raposo et al. (2024), https://arxiv.org/abs/2404.02258, equation 1.
    """
    index = positions[..., None].expand(-1, -1, x.shape[-1])
    part = x.gather(1, index)
    y = block(part)
    added = (gates.gather(1, positions)[..., None] * (y - part)).to(x.dtype)
    if kept is not None:
        added = torch.where(kept[..., None], added, 0)
    return x.scatter(1, index, part + added)


class DepthRouted(StaysFloat32):
    """Mix-in of a residual block that runs the block on the chosen tokens of each row."""

    float32 = ("depth_",)
    compares_tokens: ClassVar[bool] = True  # in training it chooses among all tokens of a row, also of other documents
    depth_router: nn.Parameter  # [D]
    depth_predictor: nn.Parameter  # [D + 1], weights and bias; [1]: a bias only, added to the router's scores
    depth_capacity: float
    depth_name: str
    depth_arguments: tuple[str, ...]  # names of the arguments of the block's own forward
    depth_tuple: bool | None  # whether the block returns a tuple; None before its first call
    token_rows: dict[str, object]  # padding mask of the batch, see `token_rows`
    depth_dims: dict[
        tuple[Place, int], tuple[int, ...]
    ]  # (place in the arguments, number of dimensions) -> dimensions of tokens
    training: bool
    side_terms: list[Tensor] | None = None  # predictor's loss in each call, while those of a step are collected

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output for all tokens, as a tensor or a tuple like the block's own."""
        run = super().forward  # type: ignore[misc]
        first, *others = self.depth_arguments
        named = dict(zip((first, *others), args, strict=False)) | kwargs
        x = named.pop(first)

        def block(tokens: Tensor, named: Arguments) -> Tensor:
            y = run(tokens, **named)
            self.depth_tuple = isinstance(y, tuple)
            if isinstance(y, tuple) and all(item is None for item in y[1:]):
                y = y[0]  # blocks of transformers return None for attention weights
            if not isinstance(y, Tensor) or y.shape != tokens.shape:
                raise _refusal(self, "it must return one tensor of its input's shape")
            return y

        y = self._routed(block, x, named)
        return (y,) if self.depth_tuple else y

    def _routed(self, block: Callable[..., Tensor], x: Tensor, named: Arguments) -> Tensor:
        scores, guess = self._scores(x)
        gates = 2 * scores.sigmoid()
        cache = next((key for key, value in named.items() if _is_cache(value)), None)
        past = 0
        if cache is not None:
            past = _length(named[cache], self)
        if self.training or cache is None:
            if past:
                raise _refusal(self, "in training it received keys and values of earlier tokens")
            named = {key: _without(value, key) for key, value in named.items()}
            self._learn_dims(block, x, named)
        if self.training:
            count = share_of(self.depth_capacity, x.shape[1])
            real = self._real(named, x)
            kept = None
            if real is None:
                positions = choose_tokens(scores.detach(), count)
                chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, positions, value=True)
            else:
                best = scores.detach().masked_fill(~real, -math.inf).argsort(1, descending=True)[:, :count]
                shares = self.depth_capacity * real.sum(1, keepdim=True).double() * (1 - 1e-12)  # as share_of
                taken = torch.arange(count, device=x.device) < shares.ceil().clamp_min(1)
                chosen = torch.zeros_like(real).scatter(1, best, taken)
                positions, kept = _first_chosen(chosen, count)
            weight = None
            if real is not None:  # the mean loss counts padding, which has the weight 0 here
                weight = real * (real.numel() / real.sum().clamp_min(1)).to(guess.dtype)
            # Computed also where no term is collected, so that a recomputed forward runs the same operations.
            term = F.binary_cross_entropy_with_logits(guess, chosen.to(guess.dtype), weight)[None]
            if self.side_terms is not None and torch.is_grad_enabled():
                self.side_terms.append(term)
            return run_chosen(
                lambda part: block(part, self._cut(named, x.shape[1], positions, kept)), x, gates, positions, kept
            )
        chosen = guess > 0
        if cache is not None:
            return self._cached(block, x, named, cache, gates, chosen)
        most = int(chosen.sum(1).max())
        if not most and self.depth_tuple is not None:
            return x
        positions, kept = _first_chosen(chosen, max(most, 1))
        return run_chosen(
            lambda part: block(part, self._cut(named, x.shape[1], positions, kept)), x, gates, positions, kept
        )

    def _real(self, named: Arguments, x: Tensor) -> Tensor | None:
        """Return which tokens are not padding, [B, T], or ``None`` if unknown.

        The block's own mask tells, on whose diagonal each token sees itself, or else the batch's mask.
        """
        length = x.shape[1]
        for key, value in named.items():
            if isinstance(value, Tensor) and self.depth_dims.get(((key,), value.ndim)) == (2, 3):
                own = value.diagonal(dim1=-2, dim2=-1)[:, 0]
                if own.dtype != torch.bool:
                    own = own > torch.finfo(own.dtype).min / 2
                return own.expand(len(x), length)
        mask = row_of(self, "attention_mask", x.shape[:-1])
        if mask is None:
            return None
        return mask != 0

    def _scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            normed = F.rms_norm(x.to(self.depth_router.dtype), x.shape[-1:])
            scores = normed @ self.depth_router
            if len(self.depth_predictor) == 1:
                return scores, scores + self.depth_predictor
            return scores, normed.detach() @ self.depth_predictor[:-1] + self.depth_predictor[-1]

    # The arguments of part of the tokens ---------------------------------------------------------------------------

    def _cut(self, named: Arguments, length: int, positions: Tensor, kept: Tensor | None = None) -> Arguments:
        def part_of(place: Place, value: Tensor) -> object:
            dims: tuple[int, ...] = ()
            if length in value.shape:
                dims = self.depth_dims.get((place, value.ndim), ())
            if dims == (-1,):  # the block does not read this argument
                return None
            if place == (_STARTS,) and dims:
                order = positions  # ascending, as searchsorted needs it
                if kept is not None:
                    order = torch.where(kept, positions, length)
                return torch.searchsorted(order, value.gather(1, positions))
            cut = functools.reduce(lambda part, dim: _take(part, dim, positions), dims, value)
            if len(dims) == 2 and kept is not None:
                cut = only_kept(cut, kept)
            return cut

        return {key: _map(part_of, value, (key,)) for key, value in named.items()}

    @torch.compiler.disable
    def _learn_dims(self, block: Callable[..., Tensor], x: Tensor, named: Arguments) -> None:
        """Find the dimensions of tokens of arguments that were not given before."""
        length = x.shape[1]
        leaves = [leaf for key, value in named.items() for leaf in _leaves(value, (key,))]
        leaves = [(place, v) for place, v in leaves if length in v.shape and (place, v.ndim) not in self.depth_dims]
        if length < 2 or (self.depth_dims and not leaves):
            return
        modes = [(part, part.training) for part in self.modules()]  # type: ignore[attr-defined]
        try:
            for part, _ in modes:
                part.training = False
            with torch.no_grad():
                self._learn(block, x.detach(), named, leaves)
        finally:
            for part, training in modes:
                part.training = training

    def _learn(
        self, block: Callable[..., Tensor], x: Tensor, named: Arguments, leaves: list[tuple[Place, Tensor]]
    ) -> None:
        length = x.shape[1]
        whole = _first(block, x, named)
        known: dict[tuple[Place, int], tuple[int, ...]] = {((), 0): ()}  # marks that the trial has been made
        options: list[list[tuple[int, ...]]] = []
        for place, value in leaves:
            if not value.is_floating_point() and value.dtype != torch.bool and place != (_STARTS,):
                other = {key: _map(_changed(place), item, (key,)) for key, item in named.items()}
                if not _same(functools.partial(_first, block, x, other), whole):
                    raise _refusal(
                        self, f"it reads {_named(place)}, whose values would be others for part of the tokens"
                    )
                options.append([(-1,)])
                continue
            dims = [i for i, size in enumerate(value.shape) if size == length and i]
            choices: list[tuple[int, ...]] = [*((dim,) for dim in dims), ()]
            if value.ndim == 4 and dims[-2:] == [2, 3]:
                choices.insert(0, (2, 3))  # a mask of queries and keys, which is the most probable
            options.append(choices)
        first = torch.arange(length - 1, device=x.device).repeat(len(x), 1)
        for choice in itertools.product(*options):
            tried = {(place, v.ndim): dims for (place, v), dims in zip(leaves, choice, strict=True)}
            before = self.depth_dims
            self.depth_dims = before | known | tried
            if _same(lambda: block(x[:, :-1], self._cut(named, length, first)), whole):
                self._check_order(block, x, named, whole)
                return
            self.depth_dims = before
        raise _refusal(self, "without the last token it computes other results for the first ones: it is not causal")

    def _check_order(self, block: Callable[..., Tensor], x: Tensor, named: Arguments, whole: Tensor) -> None:
        """Refuse a block in which the last token changes the others by less than the first comparison tolerates."""
        other = torch.cat((x[:, :-1], -x[:, -1:].roll(1, -1)), 1)
        if not _same(lambda: _first(block, other, named), whole, max(1e-3, 4 * torch.finfo(x.dtype).eps)):
            raise _refusal(self, "another last token changes what it computes for the first ones: it is not causal")

    # Generation ------------------------------------------------------------------------------------------------------

    def _cached(
        self, block: Callable[..., Tensor], x: Tensor, named: Arguments, cache: str, gates: Tensor, chosen: Tensor
    ) -> Tensor:
        """Run on all new tokens, so that the cache stays aligned, unless none was chosen; hide keys of tokens not
        chosen.
        """
        held = named[cache]
        kept = _kept_in(held, self)
        past = _length(held, self)
        length = x.shape[1]
        if kept is None and past:
            kept = chosen.new_ones(len(x), past)  # learned prefixes, which every query sees
        kept = chosen if kept is None else torch.cat((kept, chosen), 1)
        if past and self.depth_tuple is not None and not bool(chosen.any()):
            _append_nothing(held, self, length)
            _keep_in(held, self, kept)
            return x
        if isinstance(held, KVCache):
            held.kept = kept
        else:
            masks = [key for key, v in named.items() if isinstance(v, Tensor) and v.ndim == 4 and v.shape[2] == length]
            name = masks[0] if masks else "attention_mask"
            mask = named[name] if masks else None
            if mask is None:
                mask = torch.ones(length, past + length, dtype=torch.bool, device=x.device).tril(past)
            if mask.shape[-1] != past + length:
                raise _refusal(self, "its cache has a fixed size: use the dynamic cache")
            named = named | {name: only_kept(mask, kept)}
        y = block(x, named)
        _keep_in(held, self, kept)
        added = (gates[..., None] * (y - x)).to(x.dtype)
        return x + torch.where(chosen[..., None], added, 0)


def _first_chosen(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return positions [B, count] of the chosen tokens [B, T], ascending, followed by others, and which are chosen."""
    positions = chosen.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count].contiguous()
    return positions, chosen.gather(1, positions)


def _refusal(block: DepthRouted, why: str) -> ConfigurationError:
    return ConfigurationError(f"MixtureOfDepths: block {block.depth_name!r} cannot run on part of the tokens: {why}")


def _changed(place: Place) -> Callable[[Place, Tensor], Tensor]:
    return lambda at, value: value.flip(-1) + 1 if at == place else value


def _first(block: Callable[..., Tensor], x: Tensor, named: Arguments) -> Tensor:
    return block(x, named)[:, :-1]


def _same(run: Callable[[], Tensor], wanted: Tensor, tolerance: float = 2e-2) -> bool:
    try:
        found = run()
    except Exception:  # user code may raise anything for arguments that do not fit
        return False
    scale = float(wanted.float().abs().max())
    return found.shape == wanted.shape and torch.allclose(
        found.float(), wanted.float(), rtol=tolerance, atol=tolerance * scale
    )


def _take(value: Tensor, dim: int, positions: Tensor) -> Tensor:
    """Return the entries along ``dim`` (at least 1) at each row's own positions. The first dimension is the batch's, or
    1.
    """
    rows = len(positions)
    value = value.expand(rows, *value.shape[1:])
    index = positions.view(rows, *[1] * (dim - 1), -1, *[1] * (value.ndim - dim - 1))
    return value.gather(dim, index.expand(*value.shape[:dim], -1, *value.shape[dim + 1 :]))


def _leaves(value: object, place: Place) -> Iterator[tuple[Place, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, (*place, i))


def _map(function: Callable[[Place, Tensor], object], value: object, place: Place) -> object:
    if isinstance(value, Tensor):
        return function(place, value)
    if isinstance(value, list | tuple):
        return type(value)(_map(function, item, (*place, i)) for i, item in enumerate(value))
    return value


def _named(place: Place) -> str:
    return repr(".".join(map(str, place)))


# Caches: our own holds one block, transformers' holds all blocks -----------------------------------------------------


def _is_cache(value: object) -> bool:
    return isinstance(value, KVCache) or callable(getattr(value, "get_seq_length", None))


def _without(value: object, key: str) -> object:
    if _is_cache(value):
        return None
    if key == "use_cache":
        return False
    return value


def _layer(block: Any) -> int:
    found = [part.layer_idx for part in block.modules() if isinstance(getattr(part, "layer_idx", None), int)]
    if not found:
        raise _refusal(block, "no part has a layer_idx, which names its layer of the cache")
    return int(found[0])


def _length(cache: Cache, block: DepthRouted) -> int:
    if isinstance(cache, KVCache):
        return cache.length
    return int(cache.get_seq_length(_layer(block)))


def _kept_in(cache: Cache, block: DepthRouted) -> Tensor | None:
    if isinstance(cache, KVCache):
        return cache.kept
    kept, keys = getattr(cache, "kept_tokens", {}).get(_layer(block), (None, None))
    if kept is not None and cache.layers[_layer(block)].keys is not keys:
        raise _refusal(block, "its cache was reordered or cut, as beam search does")
    return kept


def _keep_in(cache: Cache, block: DepthRouted, kept: Tensor) -> None:
    if isinstance(cache, KVCache):
        cache.kept = kept
        return
    if not hasattr(cache, "kept_tokens"):
        cache.kept_tokens = {}
    cache.kept_tokens[_layer(block)] = (kept, cache.layers[_layer(block)].keys)


def _append_nothing(cache: Cache, block: DepthRouted, length: int) -> None:
    """Append keys that no query sees, so that the cache stays aligned with those of the other blocks."""
    if isinstance(cache, KVCache):
        cache.append(*cache.zeros(length))
        return
    layer = cache.layers[_layer(block)]
    zeros = (held.new_zeros(*held.shape[:2], length, held.shape[3]) for held in (layer.keys, layer.values))
    cache.update(*zeros, _layer(block))
