"""Several LoRA adapters on one base: added from folders, switched, mixed by weights, or chosen row by row.

    y = W x + sum_i w_i s_i B_i A_i x,    w_i one number, or one for each row of the batch

The one that ``LoRA`` trains is ``default``; the others rest beside it, frozen, as buffers ``lora_A_NAME`` [r, in] and
``lora_B_NAME`` [out, r], which checkpoints keep. A mixture is peft's ``add_weighted_adapter(combination_type="cat")``,
rows are its ``adapter_names``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.mechanisms.adapters.low_rank import OWN, LowRank, scale_of
from lit_efficient.surgery import match_modules

FIELDS = ("rank", "alpha", "variant", "targets")  # of an adapter that rests
_PLAIN = ("lora", "rslora")


def check_fields(name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What must be known of an adapter that is added, of what its folder says.

    Raises:
        ConfigurationError: For a name that cannot be one of a tensor, and for what changes the base.
    """
    if not name.isidentifier() or name == OWN:
        raise refusal("LoRA", "the name of an adapter beside", f"an identifier other than {OWN}", name)
    odd = [key for key in ("bias", "modules_to_save") if fields.get(key) not in (None, "none")]
    if odd or fields["variant"] not in _PLAIN:
        what = f"{odd[0]}={fields[odd[0]]!r}" if odd else f"variant {fields['variant']!r}"
        raise ConfigurationError(f"LoRA: the adapter {name!r} has {what}, which changes the base for all: merge it")
    return {key: fields[key] for key in FIELDS}


@torch.no_grad()
def rest_beside(module: nn.Module, name: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> None:
    """Put an adapter beside those that are there.

    Args:
        module: What ``LoRA`` has adapted.
        name: Of the adapter.
        fields: Of :func:`check_fields`.
        tensors: By the names that they have here, without that of the model in front; ``None``: a checkpoint has them.

    Raises:
        ConfigurationError: If a layer has no adapter of LoRA's plain variants, or a tensor does not fit.
    """
    own = {at: part for at, part in module.named_modules() if isinstance(part, LowRank)}
    found = match_modules(module, fields["targets"], who=f"LoRA: the adapter {name!r}")
    scale = scale_of(fields["variant"], fields["alpha"], fields["rank"])
    for at, layer in found:
        part = own.get(at)
        if part is None or part.lora_variant not in _PLAIN:
            raise ConfigurationError(
                f"LoRA: the adapter {name!r} is for {at!r} ({type(layer).__name__}), too, which must have one of its "
                "own of variant lora or rslora: name that layer in targets"
            )
        for key, dim in (("lora_A", 0), ("lora_B", 1)):
            first: Tensor = getattr(part, key)
            shape = [fields["rank"] if i == dim else size for i, size in enumerate(first.shape)]
            given = None if tensors is None else _given(tensors, f"{at}.{key}")
            if given is not None and list(given.shape) != shape:
                raise refusal("LoRA", f"{at}.{key} of the adapter {name!r}", str(shape), list(given.shape))
            held = first.new_zeros(shape) if given is None else given.to(first).clone()
            part.register_buffer(f"{key}_{name}", held)
        part.lora_others = {**part.lora_others, name: scale}


def _given(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    return next(tensor for key, tensor in tensors.items() if name == key or name.endswith(f".{key}"))


def mix_adapters(module: nn.Module, active: Sequence[str] | Mapping[str, float]) -> None:
    """Let these adapters take part from now on, each times its weight, and no others; ``default`` is the trained one.

    Args:
        module: What ``LoRA`` has adapted, with or without others beside.
        active: Names, or weights by name. None at all leaves the base.

    Raises:
        ConfigurationError: For an unknown name, and a mixture with a variant whose update is no sum.
    """
    weights = dict(active) if isinstance(active, Mapping) else dict.fromkeys(active, 1.0)
    _set(module, None if weights == {OWN: 1.0} else weights)


@contextmanager
def adapters_by_row(module: nn.Module, names: Sequence[str | None]) -> Iterator[None]:
    """Run the body with one adapter for each row of the batch; ``None`` is the base alone.

    Raises:
        ConfigurationError: As :func:`mix_adapters`; in the body for layers whose inputs do not have so many rows.
    """
    device = next(module.parameters()).device
    chosen = sorted({name for name in names if name is not None})
    rows = {name: torch.tensor([float(one == name) for one in names], device=device) for name in chosen}
    before = [(part, part.lora_mix) for part in module.modules() if isinstance(part, LowRank)]
    try:
        _set(module, rows)
        yield
    finally:
        for part, mix in before:
            part.lora_mix = mix


def _set(module: nn.Module, weights: Mapping[str, Any] | None) -> None:
    parts = [part for part in module.modules() if isinstance(part, LowRank)]
    known = [OWN, *dict.fromkeys(name for part in parts for name in part.lora_others)]
    if not parts:
        raise ConfigurationError(f"LoRA: {type(module).__name__} has no adapters to choose from")
    if odd := [name for name in weights or () if name not in known]:
        raise refusal("LoRA", "the active adapters", f"among {', '.join(known)}", odd[0])
    if weights is not None and (odd := [part.lora_variant for part in parts if part.lora_variant not in _PLAIN]):
        raise ConfigurationError(f"LoRA: variant {odd[0]!r} is no sum of an adapter and a weight, and takes no others")
    for part in parts:
        own = (OWN, *part.lora_others)
        part.lora_mix = None if weights is None else {name: w for name, w in weights.items() if name in own}


def active_mix(module: nn.Module) -> dict[str, float] | None:
    """The weights that :func:`mix_adapters` has set, for a checkpoint; ``None``: the trained adapter alone."""
    found: dict[str, float] = {}
    mixes = [part.lora_mix for part in module.modules() if isinstance(part, LowRank)]
    if all(mix is None for mix in mixes):
        return None
    for mix in mixes:
        found |= {name: float(weight) for name, weight in (mix or {}).items()}
    return found
