"""Low-rank adapters of frozen weights: the formulas, and the layers that use them.

    lora, rslora   y = W x + s B A x,                        s = alpha / r, or alpha / sqrt(r) for rslora
    pissa, olora, corda, lora_ga
                   y = W x + s (B A - B0 A0) x,              A and B start as A0 and B0
    eva            y = W x + s B A x,                        A starts with the main directions of the inputs
    loftq          y = Q x + s B A x,                        B A starts as the main part of W - Q, with Q = rounded(W)
    lora_fa        y = W x + s B A x,                        A is frozen, dL/dB is multiplied by (A A^T)^-1 / s^2
    dora           y = m (W + s B A) x / ||W + s B A||_row,  m starts as ||W||_row, the norm has no gradient
    alora          y = W x + s B A x from the last invocation of a row on, else W x (see activated.py)
    qalora         y = W x + s B A P x,                      P sums x over the groups of an int4 weight, A [r, in / g]
    rounded        y = Q(W + s B A) x,                       Q rounds to the grid of an int4 weight, gradient as without

``A`` [r, in] and ``B`` [out, r] are parameters ``lora_A`` and ``lora_B`` of the layer. ``weight`` keeps its name and
value: PiSSA and its kin subtract the initial product from the output instead of changing the weight. Every variant but
LoftQ starts with exactly the output ``W x``. The initial values are in :mod:`lit_efficient.mechanisms.adapters.starts`.
``B A P`` is constant over each group of inputs, so QA-LoRA merges into the zero points of the weight, which stays in
int4. ``rounded`` computes with the sum rounded to int4, so that it merges into the codes without a further error.
Sources: LoRA https://arxiv.org/abs/2106.09685, rsLoRA https://arxiv.org/abs/2312.03732, DoRA
https://arxiv.org/abs/2402.09353, QA-LoRA https://arxiv.org/abs/2309.14717, LoRA-FA https://arxiv.org/abs/2308.03303.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_modules import FollowsWeight, padded
from lit_efficient.internals.torch_shards import is_sharded, is_wrapper
from lit_efficient.mechanisms.adapters import low_rank_product as products
from lit_efficient.mechanisms.adapters.activated import ACTIVATED, Invocation
from lit_efficient.mechanisms.adapters.experts import ReadsAdapted, seed_of
from lit_efficient.mechanisms.adapters.int4 import codes_on_grid, dequantize_groups
from lit_efficient.mechanisms.adapters.quantized import SOURCE, dequantize, is_conv1d, is_quantized
from lit_efficient.mechanisms.adapters.starts import (
    FROM_DATA,
    FROM_ROUNDING,
    FROM_WEIGHT,
    SUBTRACTED,
    Factors,
    context_factors,
    gradient_factors,
    orthonormal_factors,
    principal_directions,
    rounding_factors,
    singular_factors,
)
from lit_efficient.models.networks.grouped_linear import GroupedLayer
from lit_efficient.surgery import home_of, in_autocast_dtype, mix_in, name_pattern, unmixed

FIXED_A = "lora_fa"  # the variant that trains B alone
VARIANTS = ("lora", "rslora", "dora", *FROM_WEIGHT, *FROM_DATA, FROM_ROUNDING, FIXED_A, ACTIVATED, "qalora", "rounded")
_PLAIN = ("lora", "rslora", "eva", FROM_ROUNDING, FIXED_A)  # y = W x + s B A x
OWN = "default"  # name of the adapter that trains, if the layer has several
_BITS_PER_PARAMETER = 2.0
_IGNORED_LABEL = -100
ON_INT4 = ("qalora", "rounded")  # variants that merge into an int4 weight and require one


def scale_of(variant: str, alpha: float, rank: int) -> float:
    """Return the factor ``s`` of ``B A``."""
    if variant == "rslora":
        return alpha / math.sqrt(rank)
    return alpha / rank


def settings_of(
    name: str, rank: int, alpha: float, patterns: Mapping[str, Mapping[str, float]] | None
) -> tuple[int, float]:
    """Return the rank and the alpha of a layer.

    Args:
        name: Dotted name of the layer.
        rank: Rank of layers that no pattern matches.
        alpha: Alpha of these layers.
        patterns: ``rank`` and ``alpha``, or one of them, by regular expressions for the ends of names. The first one
            that matches counts.
    """
    for pattern, own in (patterns or {}).items():
        if name_pattern(pattern, "LoRA: patterns").fullmatch(name):
            rank = int(own.get("rank") or rank)
            alpha = own.get("alpha") or alpha
            break
    return rank, float(alpha)  # not a number of NumPy, because checkpoints contain it


def dora_norm(weight: Tensor, a: Tensor, b: Tensor, scale: float, squared: Tensor | None = None) -> Tensor:
    """Return the row norms of ``W + s B A``, [out] in float32 or wider, without computing ``B A``.

        ||w_i + s b_i A||^2 = ||w_i||^2 + 2 s b_i . (A w_i) + s^2 b_i (A A^T) b_i^T

    The largest temporary is [r, out]; the cost is one product of A with W.

    Args:
        weight: The frozen weight, [out, in].
        a: [r, in].
        b: [out, r].
        scale: ``s``.
        squared: ``||w_i||^2`` [out], which never changes. It is computed if it is None.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    a = a.to(wide)
    b = b.to(wide)
    if squared is None:
        squared = weight.to(wide).square().sum(1)
    cross = (b * (weight @ a.to(weight.dtype).T).to(wide)).sum(1)
    own = ((b @ (a @ a.T)) * b).sum(1)
    return (squared + 2 * scale * cross + scale**2 * own).clamp_min(0).sqrt()


class LowRank(FollowsWeight, ReadsAdapted):
    """Base of the mix-ins that add a low-rank adapter to a layer. The mix-in precedes the layer's own class."""

    float32 = ("lora_",)
    weight: Tensor
    bias: Tensor | None
    training: bool
    lora_A: nn.Parameter  # a buffer in LoRA-FA
    lora_B: nn.Parameter
    lora_A0: Tensor  # initial factors of the variants that subtract them
    lora_B0: Tensor
    lora_magnitude: nn.Parameter  # DoRA's m, [out]
    lora_squared: Tensor  # DoRA's ||w_i||^2, [out]
    lora_variant: str
    lora_alpha: float
    lora_rounds: int  # alternations of LoftQ
    lora_invocation: Invocation  # the positions on which aLoRA acts
    lora_scale: float
    lora_dropout: float
    lora_draw: str
    lora_others: Mapping[str, float] = {}  # scales of further, frozen adapters
    lora_trains: Sequence[str] = ()  # arguments of LoRA that let parameters of the base train, too
    # Share of each adapter in the output: one number, or a tensor with a number for each row. None: OWN alone.
    lora_mix: Mapping[str, float | Tensor] | None = None
    # The output is not a product with the weight: a router returns the experts that it chose.
    lora_inside: bool = False
    rounds_sum: bool  # the layer rounds its weight, and the adapter belongs to what is rounded

    @property
    def made_of_weight(self) -> tuple[str, ...]:
        """Names of the tensors that DoRA, PiSSA and OLoRA initialise from the weight."""
        if self.lora_variant == "dora":
            return ("lora_A", "lora_B", "lora_magnitude", "lora_squared")
        if self.lora_variant == FROM_ROUNDING:
            return ("lora_A", "lora_B")
        if self.lora_variant in FROM_WEIGHT:
            return ("lora_A", "lora_B", "lora_A0", "lora_B0")
        return ()

    def follow_weight(self) -> None:
        """Initialise the adapter again from the layer's present weight."""
        reset_low_rank(self)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's own output plus the adapter's contribution."""
        if (self.lora_inside or getattr(self, "rounds_sum", False)) and not self.adapter_off:
            return self._read_sum(x, *args, **kwargs)
        y: Any = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if self.adapter_off:
            return y
        if not isinstance(y, Tensor):
            self.lora_inside = True
            return self._read_sum(x, *args, **kwargs)
        h = x
        if self.lora_dropout:
            h = F.dropout(x, self.lora_dropout, self.training)
        if self.lora_mix is not None:
            return self._plus_mixed(y, x, h)
        if self.lora_variant == ACTIVATED:
            delta = self.lora_scale * self._low_rank(h, self.lora_A, self.lora_B)
            mask = self.lora_invocation.of(y, self._layer_name())
            return y + torch.where(mask, delta, 0).to(y.dtype)
        if self.lora_variant != "dora" and self.lora_variant not in SUBTRACTED:
            return self._plus(y, h, *_in_bfloat16(h, self.lora_A, self.lora_B))
        delta = self._low_rank(h, self.lora_A, self.lora_B)
        if self.lora_variant in SUBTRACTED:
            delta = delta - self._low_rank(h, self.lora_A0, self.lora_B0)
        delta = (self.lora_scale * delta).to(y.dtype)
        if self.lora_variant in SUBTRACTED:
            return y + delta
        # The norm is a constant for the gradient, which saves the memory of its graph (section 4.3 of the DoRA paper).
        with torch.no_grad():
            norm = dora_norm(
                base_matrix(self), self.lora_A.flatten(1), self.lora_B.flatten(1), self.lora_scale, self.lora_squared
            )
        ratio = self._over_rows((self.lora_magnitude / norm).to(y.dtype))
        # The formula is a correction to y, so that a ratio of one leaves y unchanged bit for bit. One product stores
        # one output for the backward pass.
        own = y
        if self.bias is not None:
            own = y - self._over_rows(self.bias.to(y.dtype))
        return y + (ratio * (own + delta) - own)

    def _plus_mixed(self, y: Tensor, x: Tensor, dropped: Tensor) -> Tensor:
        """Return ``y`` plus the contributions of the adapters in :attr:`lora_mix`."""
        for name, share in (self.lora_mix or {}).items():
            a, b, scale = self._factors(name)
            given = dropped if name == OWN else x  # dropout is for the adapter that trains
            delta = scale * self._low_rank(given, a, b)
            if isinstance(share, Tensor):
                if len(share) != len(delta):
                    raise ConfigurationError(
                        f"LoRA: {self._layer_name()!r} got an input of shape {list(x.shape)}, but the adapters are "
                        f"chosen for {len(share)} rows. Adapters are chosen for rows of the batch: leave the layer "
                        "out of targets, or mix the adapters by numbers"
                    )
                delta = share.view(-1, *[1] * (delta.ndim - 1)) * delta
            else:
                delta = share * delta
            y = y + delta.to(y.dtype)
        return y

    def _layer_name(self) -> str:
        return self.lora_draw.partition("/")[2]

    def _factors(self, name: str) -> tuple[Tensor, Tensor, float]:
        if name == OWN:
            return self.lora_A, self.lora_B, self.lora_scale
        return getattr(self, f"lora_A_{name}"), getattr(self, f"lora_B_{name}"), self.lora_others[name]

    def _read_sum(self, *args: object, **kwargs: object) -> object:
        """Run the layer's own forward with the sum of weight and adapter as its weight."""
        if self.lora_mix is not None:
            raise ConfigurationError(
                f"LoRA: {self._layer_name()!r} returns more than a product with its weight, so only the adapter that "
                "trains can be used there. Leave the layer out of targets"
            )
        if self.lora_dropout or self.lora_variant not in ("lora", "rslora"):
            raise ConfigurationError(
                f"LoRA: {self._layer_name()!r} rounds its weight, or returns more than a product with it, which "
                "requires variant lora or rslora without dropout. Set these, or leave the layer out of targets"
            )
        # Without autocast, so that training in mixed precision and merging give the same sum.
        with torch.autocast(self.weight.device.type, enabled=False):
            delta = (self.lora_scale * (self.lora_B @ self.lora_A)).to(self.weight.dtype)
        with self.reading({"weight": self.weight + delta}):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _plus(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return ``y + s B A x`` in the dtype of ``y``."""
        return y + (self.lora_scale * self._low_rank(x, a, b)).to(y.dtype)

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return ``B A x``."""
        raise NotImplementedError

    def _over_rows(self, values: Tensor) -> Tensor:
        return values


def taken_by(a: Tensor, x: Tensor) -> Tensor:
    """Return ``x`` with the dtype of ``a``. Under autocast, which casts both, only float64 is cast."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return x
    return x.to(a.dtype)


def _in_bfloat16(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 factors in bfloat16 if the input is: they are much smaller, and the optimizer keeps float32."""
    if x.dtype == torch.bfloat16 and a.dtype == b.dtype == torch.float32:
        return a.to(x.dtype), b.to(x.dtype)
    return a, b


class _LowRankLinear(LowRank):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return ``W x + s B A x``."""
        plain = self.lora_variant in _PLAIN and self.lora_mix is None and not args and not kwargs
        if not plain or self.lora_inside or getattr(self, "rounds_sum", False) or self.adapter_off:
            return super().forward(x, *args, **kwargs)
        layer: Any = self
        own: Any = unmixed(layer)
        known = own.forward is nn.Linear.forward or is_quantized(layer)
        if known and getattr(self, "quant_format", None) != "int8":  # whose output has the dtype of its input
            x = in_autocast_dtype(x)  # once for both products
        if not products.is_differentiated_here(x, self.lora_A):
            return super().forward(x)
        a, b = products.rounded(x.dtype, self.lora_A, self.lora_B)
        if self.lora_dropout and self.training:
            _, inner = products.inner_product(F.dropout(x, self.lora_dropout), self.lora_A, a, known)
        else:
            x, inner = products.inner_product(x, self.lora_A, a, known)
        y: Any = super(LowRank, self).forward(x)  # type: ignore[misc]
        if not isinstance(y, Tensor):
            self.lora_inside = True
            return self._read_sum(x)
        if is_wrapper(y) or is_sharded(y) or y.dtype != inner.dtype:
            return y + (self.lora_scale * F.linear(inner, self.lora_B.to(inner.dtype))).to(y.dtype)
        return products.add_outer_product(y, inner, self.lora_B, b, self.lora_scale, known)

    def _plus(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return ``y + s B A x``. The product with ``B`` scales and adds, without a pass over tensors as large as y."""
        inner = self._inner(x, a)
        if is_wrapper(y) or is_sharded(y) or inner.dtype != y.dtype:
            return y + (self.lora_scale * F.linear(inner, b)).to(y.dtype)
        rows = torch.addmm(y.reshape(-1, y.shape[-1]), inner.reshape(-1, inner.shape[-1]), b.mT, alpha=self.lora_scale)
        return rows.view_as(y)

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(self._inner(x, a), b)

    def _inner(self, x: Tensor, a: Tensor) -> Tensor:
        return F.linear(taken_by(a, x), a)


class _LowRankConv1D(_LowRankLinear):
    """Adapter of GPT-2's linear layer, whose weight is [in, out]."""


class _LowRankGroups(_LowRankLinear):
    """QA-LoRA adapter of an int4 layer. Its input are the sums over the groups of inputs that share a scale.

    See :mod:`lit_efficient.mechanisms.adapters.int4` for the groups.
    """

    group_size: int

    def _inner(self, x: Tensor, a: Tensor) -> Tensor:
        sums = x.unflatten(-1, (-1, self.group_size)).sum(-1, dtype=a.dtype)
        return super()._inner(sums, a)


class _LowRankRounded(_LowRankLinear):
    """Adapter of an int4 layer that computes with the int4 weight into which the adapter will be merged.

    The idea is that of L4Q (https://arxiv.org/abs/2402.04902), applied to a base that is already rounded.
    """

    weight_scale: Tensor
    weight_zero: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with the rounded sum. The gradient ignores the rounding (straight-through estimator)."""
        if self.adapter_off:
            return super(LowRank, self).forward(x)  # type: ignore[misc]
        delta = self.lora_scale * (self.lora_B @ self.lora_A)
        with torch.no_grad():
            rounded = dequantize_groups(rounded_codes(self), self.weight_scale, self.weight_zero)
        weight = rounded + (delta - delta.detach())
        x = in_autocast_dtype(x)
        bias = None
        if self.bias is not None:
            bias = self.bias.to(x.dtype)
        return F.linear(x, weight.to(x.dtype), bias)


@torch.no_grad()
def rounded_codes(layer: Any) -> Tensor:
    """Return the int4 codes of the sum of an int4 weight and its adapter.

    Autocast is disabled, so that training in mixed precision and merging give the same codes.
    """
    with torch.autocast(layer.weight.device.type, enabled=False):
        return codes_on_grid(adapted_matrix(layer), layer.weight_scale, layer.weight_zero)


class _LowRankConv2d(LowRank):
    stride: tuple[int, int]
    padding: str | tuple[int, int]
    dilation: tuple[int, int]
    padding_mode: str

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        x = taken_by(a, x)
        if self.padding_mode == "zeros":
            x = F.conv2d(x, a, None, self.stride, self.padding, self.dilation)
        else:
            x = padded(self, x)
            x = F.conv2d(x, a, None, self.stride, 0, self.dilation)
        return F.conv2d(x, b)

    def _over_rows(self, values: Tensor) -> Tensor:
        return values.view(-1, 1, 1)


class _LowRankEmbedding(LowRank):
    """Adapter of an embedding: ``A`` is [r, tokens] and ``B`` [width, r].

    The input consists of token ids, so dropout is not applied.
    """

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super(LowRank, self).forward(x)  # type: ignore[misc]
        if self.adapter_off:
            return y
        if self.lora_mix is not None:
            return self._plus_mixed(y, x, x)
        rows = self._low_rank(x, self.lora_A, self.lora_B)
        return y + (self.lora_scale * rows).to(y.dtype)

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        # Gemma's embeddings scale the rows that they look up. The adapter is part of the table and scaled as well.
        return getattr(self, "embed_scale", 1.0) * (F.embedding(x, a.T, self.padding_idx) @ b.T)


def kind_of(module: nn.Module) -> str | None:
    """Return the kind of a layer: ``linear``, ``conv1d`` (GPT-2's), ``conv2d`` or ``embedding``.

    Return None for modules that cannot be adapted. ``nn.MultiheadAttention.out_proj`` is one of them, because the
    attention reads its weight and never calls its ``forward``.
    """
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear | GroupedLayer):
        return None
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Conv2d) and module.groups == 1:
        return "conv2d"
    if isinstance(module, nn.Embedding) and module.max_norm is None:
        return "embedding"
    if is_conv1d(module):
        return "conv1d"
    return None


_RETURNS: dict[type, bool] = {}  # result of the trial of each class


def returns_rows(layer: nn.Module) -> bool:
    """Return whether a linear layer maps ``[N, in]`` to ``[N, out]``, found by a trial if its class is not PyTorch's.

    Routers that derive from ``nn.Linear`` may return several tensors, as Llama 4's do.
    """
    kind: Any = unmixed(layer)
    if not isinstance(layer, nn.Linear) or kind is nn.Linear or is_quantized(layer):
        return True
    if kind not in _RETURNS:
        _RETURNS[kind] = True  # a layer that cannot be tried is adapted
        with torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
            y = kind.forward(layer, layer.weight.new_zeros(2, layer.in_features))
            _RETURNS[kind] = isinstance(y, Tensor) and y.shape == (2, layer.out_features)
    return _RETURNS[kind]


_MIXINS: dict[str, type[LowRank]] = {
    "linear": _LowRankLinear,
    "conv1d": _LowRankConv1D,
    "conv2d": _LowRankConv2d,
    "embedding": _LowRankEmbedding,
}


def base_matrix(module: Any) -> Tensor:
    """Return the frozen weight of an adapted layer as a matrix [out, in].

    The result is a view of the weight if possible. A quantised weight is dequantised.
    """
    weight: Tensor
    if is_quantized(module):
        weight = dequantize(module)
    else:
        weight = module.weight.detach()
    if is_wrapper(weight):  # of another library, as torchao's
        weight = weight.dequantize()
    if isinstance(module, _LowRankConv1D | _LowRankEmbedding):
        return weight.T
    return weight.flatten(1)


def merged_matrix(weight: Tensor, added: Mapping[str, Tensor], scale: float) -> Tensor:
    """Return the sum of a weight and its adapter, [out, in] in float32 or wider.

    Args:
        weight: The frozen weight, [out, in].
        added: The adapter's tensors: ``lora_A`` and ``lora_B``, and also ``lora_A0`` and ``lora_B0`` (if the initial
            product is subtracted) or ``lora_magnitude`` (DoRA). If ``lora_A`` has fewer columns than the weight
            (QA-LoRA), each column belongs to a group of inputs.
        scale: ``s``.
    """
    wide = torch.promote_types(added["lora_A"].dtype, torch.float32)
    flat = {key: tensor.detach().to(wide) for key, tensor in added.items()}
    delta = flat["lora_B"].flatten(1) @ flat["lora_A"].flatten(1)
    if "lora_A0" in flat:
        delta = delta - flat["lora_B0"].flatten(1) @ flat["lora_A0"].flatten(1)
    if delta.shape[1] != weight.shape[1]:
        delta = delta.repeat_interleave(weight.shape[1] // delta.shape[1], dim=1)
    weight = delta.mul_(scale).add_(weight.to(wide))
    if "lora_magnitude" in flat:
        weight = weight * (flat["lora_magnitude"] / weight.norm(dim=1))[:, None]
    return weight


def adapted_matrix(module: Any) -> Tensor:
    """Return the sum of an adapted layer's weight and its active adapters, as :func:`merged_matrix` computes it.

    Raises:
        ConfigurationError: If the adapters are chosen for each row of the batch.
    """
    tensors = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
    if module.lora_variant == ACTIVATED:
        raise ConfigurationError(
            f"LoRA: variant={ACTIVATED!r} acts on a part of the tokens and cannot be merged into weights. Use format "
            "peft"
        )
    if module.lora_mix is None:
        added = {key: tensor for key, tensor in tensors.items() if key.startswith("lora_")}
        return merged_matrix(base_matrix(module), added, module.lora_scale)
    weight = base_matrix(module)
    for name, share in module.lora_mix.items():
        if isinstance(share, Tensor):
            raise ConfigurationError(
                "LoRA: adapters that are chosen for each row of the batch cannot be merged into one weight. Choose one "
                "mixture for all rows first"
            )
        a, b, scale = module._factors(name)
        weight = merged_matrix(weight, {"lora_A": a, "lora_B": b}, share * scale)
    return weight


def add_low_rank(
    module: Any,
    name: str,
    *,
    rank: int,
    alpha: float,
    variant: str = "lora",
    dropout: float = 0.0,
    seed: int = 0,
    rounds: int = 1,
) -> None:
    """Add an adapter to a layer, in place. The layer's output does not change, except with LoftQ.

    Args:
        module: A layer for which :func:`kind_of` returns a kind.
        name: Dotted name of the layer. The initial values depend on it and on ``seed`` only, so that all ranks draw the
            same values.
        rank: ``r``.
        alpha: Numerator of the scale.
        variant: One of :data:`VARIANTS`. Embeddings support ``lora`` and ``rslora``. ``qalora`` and ``rounded`` require
            an int4 layer.
        dropout: Probability of dropout on the adapter's input.
        seed: Seed of the initial values.
        rounds: Number of alternations of LoftQ.
    """
    kind = kind_of(module)
    assert kind is not None
    weight = module.weight
    # Adapters of a narrower base are float32, because usual learning rates are too small to change a bfloat16 weight.
    dtype = torch.float32
    if weight.is_floating_point():
        dtype = torch.promote_types(weight.dtype, torch.float32)
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    if kind == "conv2d":
        shape_a = (rank, *weight.shape[1:])
        shape_b = (weight.shape[0], rank, 1, 1)
    elif kind == "linear":
        inputs = module.in_features
        if variant == "qalora":
            inputs //= module.group_size
        shape_a = (rank, inputs)
        shape_b = (module.out_features, rank)
    else:  # the weight is [in, out]
        shape_a = (rank, weight.shape[0])
        shape_b = (weight.shape[1], rank)
    device = home_of(weight)
    a = torch.empty(shape_a, dtype=dtype, device=device)
    if variant == FIXED_A:
        module.register_buffer("lora_A", a)
    else:
        module.lora_A = nn.Parameter(a)
    module.lora_B = nn.Parameter(torch.empty(shape_b, dtype=dtype, device=device))
    if variant in SUBTRACTED:
        module.register_buffer("lora_A0", torch.empty_like(module.lora_A.data))
        module.register_buffer("lora_B0", torch.empty_like(module.lora_B.data))
    if variant == "dora":
        rows = torch.empty(shape_b[0], dtype=dtype, device=device)
        module.lora_magnitude = nn.Parameter(rows)
        module.register_buffer("lora_squared", rows.clone(), persistent=False)
    mix_in(
        module,
        {"qalora": _LowRankGroups, "rounded": _LowRankRounded}.get(variant, _MIXINS[kind]),
        lora_variant=variant,
        lora_alpha=alpha,
        lora_rounds=rounds,
        lora_scale=scale_of(variant, alpha, rank),
        lora_dropout=dropout,
        lora_draw=f"{seed}/{name}",
    )
    # DoRA, PiSSA and OLoRA need the weight's values. If it is still on the meta device, they start when it is read.
    if not (weight.is_meta and module.made_of_weight):
        reset_low_rank(module)


@torch.no_grad()
def reset_low_rank(module: Any) -> None:
    """Initialise the adapter again from the layer's present weight. The output then equals that of the weight alone."""
    generator = torch.Generator().manual_seed(seed_of(module.lora_draw))
    a = module.lora_A
    b = module.lora_B
    # Each token uses only its own column of A. peft therefore starts embeddings with A = 0 instead of B = 0.
    if isinstance(module, _LowRankEmbedding):
        a.zero_()
        b.copy_(torch.randn(b.shape, generator=generator, device="cpu", dtype=torch.float32))
    elif module.lora_variant == "pissa":
        start_from(module, singular_factors(base_matrix(module).to(a.dtype), len(a), module.lora_scale))
    elif module.lora_variant == FROM_ROUNDING:
        _start_from_rounding(module)
    elif module.lora_variant == "olora":
        start_from(module, orthonormal_factors(base_matrix(module).to(a.dtype), len(a)))
    else:
        # Kaiming initialisation with a = sqrt(5), as in the paper's code.
        inputs = a[0].numel()
        if module.lora_variant == "qalora":  # each column of A belongs to a group of inputs
            inputs *= module.group_size
        bound = 1 / math.sqrt(inputs)
        a.copy_((torch.rand(a.shape, generator=generator, device="cpu", dtype=torch.float32) * 2 - 1) * bound)
        b.zero_()
        if module.lora_variant in SUBTRACTED:  # until the data is seen
            start_from(module, (a, b))
    if module.lora_variant == "dora":
        refresh_squared(module)
        module.lora_magnitude.copy_(module.lora_squared.sqrt())


def _start_from_rounding(module: Any) -> None:
    source = module.__dict__.pop(SOURCE, None)
    if source is None:
        raise ConfigurationError(
            f"LoRA: variant={FROM_ROUNDING!r} starts when a weight is rounded, but the weight of "
            f"{module._layer_name()!r} is already rounded, or was loaded later. Load the base's weights first, and let "
            "QuantizeBase(keep_source=True) round them"
        )

    def rounded(matrix: Tensor) -> Tensor:
        weight = matrix.T if is_conv1d(module) else matrix
        module.load_state_dict({"weight": weight.to(source.dtype)}, strict=False)
        return dequantize(module).to(matrix.dtype)

    weight = source.to(module.lora_A.device, module.lora_A.dtype)
    start_from(module, rounding_factors(weight, rounded, len(module.lora_A), module.lora_scale, module.lora_rounds))


@torch.no_grad()
def start_from(module: Any, factors: Factors) -> None:
    """Set the initial factors of an adapter. The layer's output stays that of the weight alone.

    Args:
        module: The adapted layer.
        factors: A [r, in] and B [out, r], flattened. B must be zero for variants that subtract nothing.
    """
    a, b = factors
    module.lora_A.copy_(a.view_as(module.lora_A))
    module.lora_B.copy_(b.view_as(module.lora_B))
    if module.lora_variant in SUBTRACTED:
        module.lora_A0.copy_(module.lora_A)
        module.lora_B0.copy_(module.lora_B)


def contributes(module: Any) -> bool:
    """Return whether an adapter of a variant that starts from data has been started, or trained."""
    if module.lora_variant in SUBTRACTED:
        return bool(module.lora_B0.any())
    return bool(module.lora_B.any())


@torch.no_grad()
def start_from_data(module: Any, total: Tensor, samples: Tensor) -> None:
    """Set the initial factors of an adapter of variant ``eva``, ``corda`` or ``lora_ga`` from sums over batches.

    Args:
        module: The adapted layer.
        total: The layer's sum in :class:`~lit_efficient.mechanisms.adapters.starts.Statistics`.
        samples: The number of samples in it.
    """
    rank = len(module.lora_A)
    if module.lora_variant == "eva":
        start_from(module, (principal_directions(total, rank), torch.zeros_like(module.lora_B)))
    elif module.lora_variant == "corda":
        start_from(module, context_factors(base_matrix(module).float(), total / samples, rank, module.lora_scale))
    else:
        start_from(module, gradient_factors(total, rank))


@torch.no_grad()
def refresh_squared(module: Any) -> None:
    """Compute DoRA's ``||w_i||^2`` from the layer's present weight."""
    wide = module.lora_squared.dtype
    module.lora_squared.copy_(base_matrix(module).to(wide).square().sum(1))


def rank_for(tokens: int, parameters_a_rank: int) -> int:
    """Return the smallest rank whose adapters can store the information of a data set, by a rule of thumb.

        bits of the adapters = 2 r sum(in + out);    bits of the data = tokens that contribute to the loss in an epoch

    Networks were measured to store two bits of facts in a parameter, and text has about one bit to learn in a token. An
    adapter with fewer bits learns more slowly than full training once it is full.
    Sources: Schulman and Thinking Machines Lab (2025), https://thinkingmachines.ai/blog/lora; for the two bits:
    Allen-Zhu and Li (2024), https://arxiv.org/abs/2404.05405.

    Args:
        tokens: Number of tokens that contribute to the loss in an epoch.
        parameters_a_rank: Sum of inputs and outputs of the adapted layers.

    Example:
        >>> rank_for(10_000_000, 500_000)
        10
    """
    return max(1, math.ceil(tokens / (_BITS_PER_PARAMETER * parameters_a_rank)))


def learned_tokens(batch: object) -> int | None:
    """Return the number of labels that contribute to the loss, or None if the batch does not consist of tokens."""
    if not isinstance(batch, Mapping):
        return None
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
        return None
    if "shift_labels" not in batch:
        labels = labels[:, 1:]  # the first token is not predicted
    return int((labels != _IGNORED_LABEL).sum())


def capacity_line(tokens: int, parameters: int, rank: int) -> str:
    """Return a sentence that compares the information in the tokens of a run with the capacity of the adapters.

    Args:
        tokens: Number of different tokens of the run that contribute to the loss: those of an epoch, or fewer in a
            shorter run.
        parameters: Number of parameters of the adapters.
        rank: Rank of the adapters.
    """
    need = rank_for(tokens, max(1, parameters // rank))
    verdict = f"rank {rank} is large enough for the data"
    if need > rank:
        verdict = f"rank {rank} is small, and the loss falls more slowly than with a rank of about {need}"
    return (
        f"{verdict}. The adapters have {parameters:,} parameters, and the run trains on about {tokens:,} different "
        f"tokens (estimated from the first batch). By a rule of thumb, one parameter is enough for "
        f"{_BITS_PER_PARAMETER:g} tokens"
    )
