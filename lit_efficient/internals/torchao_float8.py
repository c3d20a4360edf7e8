"""Matrix products in float8: ``torchao.float8.float8_linear``, which is private.

Import this module inside functions only, because importing torchao takes seconds. Checked with torchao 0.18.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torchao.float8 import Float8LinearConfig
from torchao.float8.config import ScalingType
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole

_MULTIPLE = 16  # float8 hardware needs sums over a multiple of this length


def settings_of(recipe: str, emulate: bool) -> tuple[object, ...]:
    """Return the settings of :func:`float8_product`: torchao's config, and two configs of products.

    Args:
        recipe: Name of torchao's recipe; ``mxfp8`` or ``mxfp8_with_gw_hp``.
        emulate: Compute with float32 units, on hardware without float8.

    Returns:
        The config, and the configs of products without and with padding. For MXFP8 the product alone.
    """
    if recipe.startswith("mxfp8"):
        from lit_efficient.internals.torchao_mx import BlockProduct

        return (BlockProduct(emulate, recipe.endswith("gw_hp")),)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    padded = dataclasses.replace(config, pad_inner_dim=True)
    plain, wide = (Float8Linear(1, 1, config=one, device="meta").linear_mm_config for one in (config, padded))
    return config, plain, wide


def float8_product(x: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> Tensor:
    """Return ``x W^T`` with both operands rounded to float8. Its gradients are computed in float8 too.

    The gradient of the weight sums over all rows of ``x``, whose number is padded if necessary. For a frozen weight no
    gradient is computed, and ``x`` is not saved.

    Args:
        x: [..., in].
        weight: [out, in].
        settings: Result of :func:`settings_of`.

    Returns:
        [..., out].
    """
    if len(settings) == 1:
        in_blocks: Tensor = settings[0](x, weight)
        return in_blocks
    config, plain, padded = settings
    products = padded if (x.numel() // x.shape[-1]) % _MULTIPLE else plain
    product = _FrozenProduct
    if weight.requires_grad:
        product = matmul_with_hp_or_float8_args
    return product.apply(x, weight.t(), products, config)


@torch.compiler.allow_in_graph
class _FrozenProduct(torch.autograd.Function):
    """``matmul_with_hp_or_float8_args`` without the gradient of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_t: Tensor, products: Any, config: Any) -> Tensor:
        ctx.save_for_backward(weight_t)
        ctx.products = products
        ctx.config = config
        rows = _narrowed(
            x.reshape(-1, x.shape[-1]), config.cast_config_input, -1, products, GemmInputRole.INPUT, config
        )
        weight = _narrowed(weight_t, config.cast_config_weight, 0, products, GemmInputRole.WEIGHT, config)
        return torch.mm(rows, weight).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (weight_t,) = ctx.saved_tensors
        config = ctx.config
        products = ctx.products
        flat = gradient.reshape(-1, gradient.shape[-1])
        rows = _narrowed(flat, config.cast_config_grad_output, -1, products, GemmInputRole.GRAD_OUTPUT, config)
        how = config.cast_config_weight_for_grad_input
        weight = _narrowed(weight_t, how, -1, products, GemmInputRole.WEIGHT, config)
        return torch.mm(rows, weight.t()).reshape(*gradient.shape[:-1], -1), None, None, None


def _narrowed(x: Tensor, how: Any, dim: int, products: object, role: object, config: Any) -> Any:
    if how.scaling_type is ScalingType.DISABLED:
        return x
    return hp_tensor_to_float8_dynamic(
        x,
        how.target_dtype,
        products,
        gemm_input_role=role,
        scaling_granularity=how.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(dim, how.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
