"""Merging of adapters into the weights of their layers. The network then computes the same without adapters.

    W <- m (W + s B A) / ||W + s B A||_row    (m and the norm for DoRA only)
    zero <- zero - s B A / scale              (QA-LoRA: the codes of the int4 weight do not change)
    code <- round((W + s B A) / scale + zero) (rounded: scales and zero points do not change)

Costs: none at inference; a merged adapter cannot be removed
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.application.checkpoints import forget_what_is_gone
from lit_efficient.internals.heap import give_back
from lit_efficient.internals.torch_modules import tensor_tables
from lit_efficient.mechanisms.adapters.added_rows import AddedRows, fold_added_rows
from lit_efficient.mechanisms.adapters.base import added_names
from lit_efficient.mechanisms.adapters.experts import LowRankExperts, fold_experts
from lit_efficient.mechanisms.adapters.ia3 import IA3Scaled, fold_ia3
from lit_efficient.mechanisms.adapters.int4 import shifted_zeros
from lit_efficient.mechanisms.adapters.low_rank import (
    LowRank,
    _LowRankConv1D,
    _LowRankEmbedding,
    adapted_matrix,
    rounded_codes,
)
from lit_efficient.mechanisms.adapters.peft_layers import networks, peft_names
from lit_efficient.mechanisms.adapters.peft_methods import merge_peft
from lit_efficient.mechanisms.adapters.quantized import (
    dequantize,
    float_name,
    is_bitsandbytes,
    is_quantized,
    is_stack,
    plain_layer,
)
from lit_efficient.mechanisms.adapters.stacked_codes import ReadsCodes, dequantize_stacks
from lit_efficient.mechanisms.adapters.targets import is_tied
from lit_efficient.mechanisms.adapters.trained_rows import TrainedRows, fold_rows
from lit_efficient.surgery import mix_in, mix_out


@torch.no_grad()
def merge_adapters(module: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Merge every adapter in ``module``, in place, and return the module.

    - A quantised layer becomes a float layer with the dequantised weight. bitsandbytes' layers without an adapter do so
      too.
    - Layers of QA-LoRA and ``rounded``, and int4 layers without an adapter, stay in int4. :func:`dequantize_layers`
      converts them to floats.
    - A weight that is tied to another layer's is copied first, because the adapter belongs to one of the layers.
    - Frozen parameters stay frozen.

    Args:
        module: A module, with or without adapters.
        dtype: Number format of the layers that were quantised. Each one is converted as soon as it is merged, to save
            memory. None keeps the adapter's format.
    """
    for network in networks(module):
        merge_peft(network)
    for name, part in _parts(module):
        coded = is_quantized(part)
        if isinstance(part, LowRank):
            _merge_low_rank(module, name, part)
        elif isinstance(part, LowRankExperts) and is_quantized(part):
            _replace(module, name, plain_layer(part, part.adapted("weight")))
        elif isinstance(part, LowRankExperts):
            fold_experts(part, dtype)
        elif isinstance(part, TrainedRows):
            fold_rows(part)
        elif isinstance(part, AddedRows):
            fold_added_rows(part)
        elif isinstance(part, IA3Scaled):
            if is_quantized(part):
                _dequantize_base(module, name, part)
            fold_ia3(module.get_submodule(name))
        elif is_bitsandbytes(part) and not is_stack(part):
            _replace(module, name, plain_layer(part, dequantize(part)))
        if isinstance(part, ReadsCodes):
            dequantize_stacks(part, dtype)
        merged = module.get_submodule(name)
        if coded and dtype is not None and not is_quantized(merged):
            merged.to(dtype)
            del part  # the last reference to the quantised layer, whose memory is then returned to the system
            give_back()
    _forget(module)
    return module


@torch.no_grad()
def dequantize_layers(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Replace each quantised layer that has no adapter by a float layer, in place, and return the module."""
    for name, part in _parts(module):
        if isinstance(part, ReadsCodes):
            dequantize_stacks(part, dtype)
        elif is_quantized(part) and not isinstance(part, LowRank | IA3Scaled):
            _replace(module, name, plain_layer(part, dequantize(part)).to(dtype))
    _forget(module)
    return module


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of a module by name, including the frozen ones, which its ``state_dict`` may leave out."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in tensors}


@torch.no_grad()
def without_adapters(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a module by the names that they have without adapters. Quantised weights become floats."""
    whole = whole_state(module)
    added = added_names(module, whole)
    moved = peft_names(module, whole)[1]
    state = {name: tensor for name, tensor in whole.items() if name not in added}
    part: Any
    for name, part in module.named_modules():
        if is_quantized(part):
            plain = plain_layer(part, dequantize(part))
            del state[f"{name}.weight"]
            state[float_name(name, part)] = (plain if is_stack(part) else plain.get_parameter("weight")).detach()
    return {moved.get(name, name): tensor for name, tensor in state.items()}


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules of a module by name. The caller may replace each one, which frees its memory."""
    for name in [name for name, _ in module.named_modules()]:
        with contextlib.suppress(AttributeError):  # the caller has replaced a module that contained this one
            yield name, module.get_submodule(name)


def _forget(module: nn.Module) -> None:
    """Remove the record of techniques and of quantisation that no longer apply to the module."""
    forget_what_is_gone(module)
    # transformers marks a network that it loaded in 4 or 8 bits, and would save the merged one as quantised.
    for part in module.modules():
        config = getattr(part, "config", None)
        if not any(map(is_quantized, part.modules())) and hasattr(config, "quantization_config"):
            del config.quantization_config  # type: ignore[union-attr]
            for mark in (
                "hf_quantizer",
                "is_quantized",
                "is_loaded_in_4bit",
                "is_loaded_in_8bit",
                "quantization_method",
            ):
                part.__dict__.pop(mark, None)


def _merge_low_rank(root: nn.Module, name: str, part: Any) -> None:
    if part.lora_variant == "qalora":
        delta = part.lora_scale * (part.lora_B @ part.lora_A)
        part.weight_zero.copy_(shifted_zeros(part.weight_scale, part.weight_zero, delta))
        _strip(part)
        return
    if part.lora_variant == "rounded":
        part.weight.copy_(rounded_codes(part))
        _strip(part)
        return
    matrix = adapted_matrix(part)
    if is_quantized(part):
        _replace(root, name, plain_layer(part, matrix.to(part.lora_A.dtype)))
        return
    if isinstance(part, _LowRankConv1D | _LowRankEmbedding):
        matrix = matrix.T
    weight = matrix.reshape(part.weight.shape).to(part.weight.dtype)
    if is_tied(root, part):  # the other layer has no such adapter and keeps the original weight
        part.weight = nn.Parameter(weight.contiguous(), requires_grad=part.weight.requires_grad)
    else:
        part.weight.copy_(weight)
    _strip(part)


def _strip(part: Any) -> None:
    parameters, buffers = tensor_tables(part)
    for added in [*parameters, *buffers, *part.__dict__]:
        if added.startswith("lora_"):
            delattr(part, added)
    mix_out(part, LowRank)


def _dequantize_base(root: nn.Module, name: str, part: Any) -> None:
    linear = plain_layer(part, dequantize(part).to(part.ia3.dtype))
    linear.ia3 = part.ia3
    mix_in(linear, IA3Scaled, ia3_side=part.ia3_side, ia3_first=part.ia3_first)
    _replace(root, name, linear)


def _replace(root: nn.Module, name: str, new: nn.Module) -> None:
    owner, _, last = name.rpartition(".")
    setattr(root.get_submodule(owner), last, new)
