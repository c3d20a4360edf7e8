"""Low-rank adapters beside a frozen weight: the formulas, and the layers that use them.

    lora, rslora   y = W x + s B A x,                        s = alpha / r, or alpha / sqrt(r) for rslora
    pissa          y = W x + s (B A - B0 A0) x,              s B0 A0 = the r largest singular parts of W
    dora           y = m (W + s B A) x / ||W + s B A||_row,  m starts as ||W||_row, the norm has no gradient
    qalora         y = W x + s B A P x,                      P sums x over the groups of an int4 weight, A [r, in / g]
    rounded        y = Q(W + s B A) x,                       Q rounds to the grid of an int4 weight, gradient as without

``A`` [r, in] and ``B`` [out, r] stand beside ``weight`` as ``lora_A`` and ``lora_B``; ``weight`` keeps name and value,
so PiSSA subtracts what it took instead of editing the weight. The sum starts as exactly ``W x`` for every variant.
``B A P`` is constant over each group of inputs: QA-LoRA merges into the zero points of the weight, which stays in int4.
``rounded`` trains what is left of the sum when it is an int4 weight again, so that it merges into the codes as it is.
Sources: LoRA https://arxiv.org/abs/2106.09685, rsLoRA https://arxiv.org/abs/2312.03732, PiSSA
https://arxiv.org/abs/2404.02948, DoRA https://arxiv.org/abs/2402.09353, QA-LoRA https://arxiv.org/abs/2309.14717.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_layers import padded
from lit_efficient.internals.torch_modules import FollowsWeight
from lit_efficient.mechanisms.adapters.experts import ReadsAdapted, seed_of
from lit_efficient.mechanisms.adapters.int4 import codes_on_grid, dequantize_groups
from lit_efficient.mechanisms.adapters.quantized import dequantize, is_conv1d, is_quantized
from lit_efficient.models.networks.expert_layers import GroupedLayer
from lit_efficient.surgery import home_of, mix_in

VARIANTS = ("lora", "rslora", "dora", "pissa", "qalora", "rounded")
OWN = "default"  # the name of the adapter that trains, where others stand beside it
ON_INT4 = ("qalora", "rounded")  # which merge into an int4 weight, and need one


def scale_of(variant: str, alpha: float, rank: int) -> float:
    """The factor ``s`` on ``B A``."""
    return alpha / math.sqrt(rank) if variant == "rslora" else alpha / rank


def dora_norm(weight: Tensor, a: Tensor, b: Tensor, scale: float, squared: Tensor | None = None) -> Tensor:
    """Row norms of ``W + s B A``, [out] in float32 at least, without ever forming ``B A``.

        ||w_i + s b_i A||^2 = ||w_i||^2 + 2 s b_i . (A w_i) + s^2 b_i (A A^T) b_i^T

    The largest temporary is [r, out]; the cost is one product of A with W.

    Args:
        weight: The frozen weight, [out, in].
        a: [r, in].
        b: [out, r].
        scale: ``s``.
        squared: ``||w_i||^2`` [out], where it is known already: it never changes.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    if squared is None:
        squared = weight.to(wide).square().sum(1)
    cross = (b * (weight @ a.to(weight.dtype).T).to(wide)).sum(1)
    own = ((b @ (a @ a.T)) * b).sum(1)
    return (squared + 2 * scale * cross + scale**2 * own).clamp_min(0).sqrt()


class LowRank(FollowsWeight, ReadsAdapted):
    """What the adapted layers of all kinds share; mixed in front of the layer's own class."""

    float32 = ("lora_",)
    weight: Tensor
    bias: Tensor | None
    training: bool
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_A0: Tensor  # PiSSA's start
    lora_B0: Tensor
    lora_magnitude: nn.Parameter  # DoRA's m, [out]
    lora_squared: Tensor  # DoRA's ||w_i||^2, [out]
    lora_variant: str
    lora_scale: float
    lora_dropout: float
    lora_draw: str
    lora_others: Mapping[str, float] = {}  # scales of adapters that rest beside it
    lora_mix: Mapping[str, Any] | None = None  # how much of each takes part, a number or one a row; None: OWN alone
    lora_inside: bool = False  # the layer makes more than a product of its weight, as routers do that return choices

    @property
    def made_of_weight(self) -> tuple[str, ...]:
        """What DoRA and PiSSA start from the weight."""
        own = {"dora": ("lora_magnitude", "lora_squared"), "pissa": ("lora_A0", "lora_B0")}.get(self.lora_variant)
        return ("lora_A", "lora_B", *own) if own else ()

    def follow_weight(self) -> None:
        """Start again from the weight that the layer has now."""
        reset_low_rank(self)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's own output plus the adapter's part of it."""
        if self.lora_inside and not self.adapter_off:
            return self._read_sum(x, *args, **kwargs)
        y: Any = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if self.adapter_off:
            return y
        if not isinstance(y, Tensor):
            self.lora_inside = True
            return self._read_sum(x, *args, **kwargs)
        h = F.dropout(x, self.lora_dropout, self.training) if self.lora_dropout else x
        if self.lora_mix is not None:
            return self._plus_mixed(y, x, h)
        delta = self._low_rank(h, self.lora_A, self.lora_B)
        if self.lora_variant == "pissa":
            delta = delta - self._low_rank(h, self.lora_A0, self.lora_B0)
        delta = (self.lora_scale * delta).to(y.dtype)
        if self.lora_variant != "dora":
            return y + delta
        with torch.no_grad():
            a, b = self.lora_A.flatten(1), self.lora_B.flatten(1)
            norm = dora_norm(base_matrix(self), a, b, self.lora_scale, self.lora_squared)
        ratio = self._over_rows((self.lora_magnitude / norm).to(y.dtype))
        # Written as a correction, so that a ratio of one leaves y bit for bit as it was; with one product, which keeps
        # one output for the backward pass.
        own = y if self.bias is None else y - self._over_rows(self.bias.to(y.dtype))
        return y + (ratio * (own + delta) - own)

    def _plus_mixed(self, y: Tensor, x: Tensor, dropped: Tensor) -> Tensor:
        """``y`` and what the adapters of :attr:`lora_mix` add to it."""
        for name, weight in (self.lora_mix or {}).items():
            a, b, scale = self._factors(name)
            delta = scale * self._low_rank(dropped if name == OWN else x, a, b)
            if isinstance(weight, Tensor) and len(weight) != len(delta):
                raise ConfigurationError(
                    f"LoRA: {self.lora_draw.partition('/')[2]!r} got {list(x.shape)}, and adapters are chosen for "
                    f"{len(weight)} rows: it is called with other rows than the batch's"
                )
            factor = weight.view(-1, *[1] * (delta.ndim - 1)) if isinstance(weight, Tensor) else weight
            y = y + (factor * delta).to(y.dtype)
        return y

    def _factors(self, name: str) -> tuple[Tensor, Tensor, float]:
        if name == OWN:
            return self.lora_A, self.lora_B, self.lora_scale
        return getattr(self, f"lora_A_{name}"), getattr(self, f"lora_B_{name}"), self.lora_others[name]

    def _read_sum(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward on the sum of weight and adapter."""
        if self.lora_mix is not None:
            raise ConfigurationError(
                f"LoRA: {self.lora_draw.partition('/')[2]!r} returns more than a product of its weight, and takes its "
                "own adapter alone: leave the layer out of targets"
            )
        if self.lora_dropout or self.lora_variant not in ("lora", "rslora"):
            raise ConfigurationError(
                f"LoRA: {self.lora_draw.partition('/')[2]!r} returns more than a product of its weight, which takes "
                "variant lora or rslora without dropout: set these, or leave the layer out of targets"
            )
        delta = (self.lora_scale * (self.lora_B @ self.lora_A)).to(self.weight.dtype)
        with self.reading({"weight": self.weight + delta}):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError

    def _over_rows(self, values: Tensor) -> Tensor:
        return values


def _taken_by(a: Tensor, x: Tensor) -> Tensor:
    """``x`` in the format of ``a``; as it is under autocast, which narrows both again."""
    narrowed = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return x if narrowed else x.to(a.dtype)


class _LowRankLinear(LowRank):
    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.linear(_taken_by(a, x), a), b)


class _LowRankConv1D(_LowRankLinear):
    """GPT-2's linear layer, whose weight is [in, out]."""


class _LowRankGroups(_LowRankLinear):
    """An int4 layer whose adapter sees sums of groups of inputs: :mod:`lit_efficient.mechanisms.adapters.int4`."""

    group_size: int

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return super()._low_rank(x.unflatten(-1, (-1, self.group_size)).sum(-1, dtype=a.dtype), a, b)


class _LowRankRounded(_LowRankLinear):
    """An int4 layer that computes with the int4 weight that its adapter merges into.

    The idea of L4Q (https://arxiv.org/abs/2402.04902), for a base that is rounded already.
    """

    weight_scale: Tensor
    weight_zero: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The product with the rounded sum; the gradient passes the rounding as if it were not there."""
        if self.adapter_off:
            return super(LowRank, self).forward(x)  # type: ignore[misc]
        delta = self.lora_scale * (self.lora_B @ self.lora_A)
        with torch.no_grad():
            rounded = dequantize_groups(rounded_codes(self), self.weight_scale, self.weight_zero)
        weight = rounded + (delta - delta.detach())
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = self.bias if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, weight.to(x.dtype), bias)


@torch.no_grad()
def rounded_codes(layer: Any) -> Tensor:
    """The int4 codes of the sum of an int4 weight and its adapter, the same ones under autocast."""
    with torch.autocast(layer.weight.device.type, enabled=False):
        return codes_on_grid(adapted_matrix(layer), layer.weight_scale, layer.weight_zero)


class _LowRankConv2d(LowRank):
    stride: Any
    padding: Any
    dilation: Any
    padding_mode: str

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        x = _taken_by(a, x)
        if self.padding_mode == "zeros":
            x = F.conv2d(x, a, None, self.stride, self.padding, self.dilation)
        else:
            x = padded(self, x)
            x = F.conv2d(x, a, None, self.stride, 0, self.dilation)
        return F.conv2d(x, b)

    def _over_rows(self, values: Tensor) -> Tensor:
        return values.view(-1, 1, 1)


class _LowRankEmbedding(LowRank):
    """``A`` is [r, tokens] and ``B`` [width, r]; dropout would act on token numbers, so there is none."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super(LowRank, self).forward(x)  # type: ignore[misc]
        if self.adapter_off:
            return y
        if self.lora_mix is not None:
            return self._plus_mixed(y, x, x)
        rows = self._low_rank(x, self.lora_A, self.lora_B)
        return y + (self.lora_scale * rows).to(y.dtype)

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        # Gemma's tables multiply what they look up: the adapter changes the table, not the product.
        return getattr(self, "embed_scale", 1.0) * (F.embedding(x, a.T, self.padding_idx) @ b.T)


def kind_of(module: nn.Module) -> str | None:
    """``linear``, ``conv1d`` (GPT-2's), ``conv2d`` or ``embedding``; ``None`` for what cannot be adapted.

    ``nn.MultiheadAttention.out_proj`` cannot: its weight is read, its ``forward`` never called.
    """
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear | GroupedLayer):
        return None
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Conv2d):
        return "conv2d" if module.groups == 1 else None
    if isinstance(module, nn.Embedding):
        return "embedding" if module.max_norm is None else None
    return "conv1d" if is_conv1d(module) else None


_MIXINS: dict[str, type[LowRank]] = {
    "linear": _LowRankLinear,
    "conv1d": _LowRankConv1D,
    "conv2d": _LowRankConv2d,
    "embedding": _LowRankEmbedding,
}


def base_matrix(module: Any) -> Tensor:
    """The frozen weight as [out, in] (a view where it can be), dequantised where it is quantised."""
    weight: Tensor = dequantize(module) if is_quantized(module) else module.weight.detach()
    if isinstance(module, _LowRankConv1D | _LowRankEmbedding):
        return weight.T
    return weight.flatten(1)


def merged_matrix(weight: Tensor, added: Mapping[str, Tensor], scale: float) -> Tensor:
    """What a weight [out, in] and its adapter amount to: [out, in], in float32 at least.

    ``added`` has ``lora_A`` and ``lora_B``, with ``lora_A0`` and ``lora_B0`` (PiSSA) or ``lora_magnitude`` (DoRA). An
    ``A`` with fewer columns than the weight (QA-LoRA) has one for each group of inputs.
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
    """:func:`merged_matrix` of an adapted layer."""
    tensors = dict([*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)])
    if module.lora_mix is None:
        added = {key: tensor for key, tensor in tensors.items() if key.startswith("lora_")}
        return merged_matrix(base_matrix(module), added, module.lora_scale)
    weight = base_matrix(module)
    for name, share in module.lora_mix.items():
        if isinstance(share, Tensor):
            raise ConfigurationError("LoRA: adapters that are chosen row by row cannot be merged into one weight")
        a, b, scale = module._factors(name)
        weight = merged_matrix(weight, {"lora_A": a, "lora_B": b}, share * scale)
    return weight


def add_low_rank(
    module: Any, name: str, *, rank: int, alpha: float, variant: str = "lora", dropout: float = 0.0, seed: int = 0
) -> None:
    """Put an adapter beside a layer's weight, in place; the output stays what it was.

    Args:
        module: A layer that :func:`kind_of` knows.
        name: Its dotted name: with ``seed`` it decides the draw, alike on all ranks.
        rank: ``r``.
        alpha: Numerator of the scale.
        variant: ``lora``, ``rslora``, ``dora``, ``pissa``, ``qalora`` or ``rounded``; embeddings know the first two,
            and the last two are for int4 layers.
        dropout: On the adapter's input.
        seed: Of the draw.
    """
    kind = kind_of(module)
    assert kind is not None
    weight = module.weight
    # Adapters are float32 beside a narrower base: at usual rates a bfloat16 weight would never move.
    dtype = torch.promote_types(weight.dtype, torch.float32) if weight.is_floating_point() else torch.float32
    shape_a: tuple[int, ...]
    if kind == "conv2d":
        shape_a, shape_b = (rank, *weight.shape[1:]), (weight.shape[0], rank, 1, 1)
    elif kind == "linear":
        inputs = module.in_features // (module.group_size if variant == "qalora" else 1)
        shape_a, shape_b = (rank, inputs), (module.out_features, rank)  # type: ignore[assignment]
    else:  # the weight is [in, out]
        shape_a, shape_b = (rank, weight.shape[0]), (weight.shape[1], rank)  # type: ignore[assignment]
    device = home_of(weight)
    module.lora_A = nn.Parameter(torch.empty(shape_a, dtype=dtype, device=device))
    module.lora_B = nn.Parameter(torch.empty(shape_b, dtype=dtype, device=device))
    if variant == "pissa":
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
        lora_scale=scale_of(variant, alpha, rank),
        lora_dropout=dropout,
        lora_draw=f"{seed}/{name}",
    )
    if not (weight.is_meta and module.made_of_weight):  # else when the weight is read
        reset_low_rank(module)


@torch.no_grad()
def reset_low_rank(module: Any) -> None:
    """Start the adapter again from the weight that the layer has now, which its output then equals."""
    generator = torch.Generator().manual_seed(seed_of(module.lora_draw))
    a, b = module.lora_A, module.lora_B
    if isinstance(module, _LowRankEmbedding):  # a row of A is met once a token: start with zeros there, as peft does
        a.zero_()
        b.copy_(torch.randn(b.shape, generator=generator, device="cpu", dtype=torch.float32))
    elif module.lora_variant == "pissa":
        rank = a.shape[0]
        u, s, vh = torch.linalg.svd(base_matrix(module).to(a.dtype), full_matrices=False)
        root = (s[:rank] / module.lora_scale).sqrt()
        a.copy_((root[:, None] * vh[:rank]).view_as(a))
        b.copy_((u[:, :rank] * root).view_as(b))
        module.lora_A0.copy_(a)
        module.lora_B0.copy_(b)
    else:
        # Kaiming with a = sqrt(5), as the paper's code does; a column of QA-LoRA's A stands for a group of inputs.
        inputs = a[0].numel() * (module.group_size if module.lora_variant == "qalora" else 1)
        bound = 1 / math.sqrt(inputs)
        a.copy_((torch.rand(a.shape, generator=generator, device="cpu", dtype=torch.float32) * 2 - 1) * bound)
        b.zero_()
    if module.lora_variant == "dora":
        refresh_squared(module)
        module.lora_magnitude.copy_(module.lora_squared.sqrt())


@torch.no_grad()
def refresh_squared(module: Any) -> None:
    """Compute DoRA's ``||w_i||^2`` from the weight that the layer has now."""
    wide = module.lora_squared.dtype
    module.lora_squared.copy_(base_matrix(module).to(wide).square().sum(1))
