"""Several LoRA adapters of one base: added from folders, switched, mixed by weights, or chosen for each row.

    y = W x + sum_i w_i s_i B_i A_i x,    w_i one number, or one for each row of the batch

The adapter that ``LoRA`` trains has the name ``default``. The others are frozen buffers ``lora_A_NAME`` [r, in] and
``lora_B_NAME`` [out, r] of the same layers, which checkpoints contain. A mixture corresponds to peft's
``add_weighted_adapter(combination_type="cat")``, and a choice for each row to its argument ``adapter_names``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.mechanisms.adapters.disabled import Switchable, disabled
from lit_efficient.mechanisms.adapters.low_rank import OWN, LowRank, scale_of, settings_of
from lit_efficient.mechanisms.adapters.peft_folder import adapter_in, read_adapter
from lit_efficient.mechanisms.adapters.targets import find_experts
from lit_efficient.surgery import match_modules

FIELDS = ("rank", "alpha", "variant", "targets", "patterns")  # settings of a frozen adapter
_PLAIN = ("lora", "rslora")


def check_fields(name: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Check a further adapter, and return its settings with the keys :data:`FIELDS`.

    Args:
        name: Name of the adapter.
        fields: Arguments of LoRA that describe the adapter, such as those of its folder.

    Raises:
        ConfigurationError: If the name is no identifier, or if ``bias``, ``modules_to_save``,
            ``trainable_token_indices`` or ``variant`` would change the base, which all adapters share.
    """
    if not name.isidentifier() or name == OWN:
        raise refusal("LoRA", "the name of an adapter beside", f"an identifier other than {OWN}", name)
    for key in ("bias", "modules_to_save", "trainable_token_indices", "variant"):
        if fields.get(key) and fields[key] not in ("none", *_PLAIN):
            raise ConfigurationError(
                f"LoRA: the adapter {name!r} has {key}={fields[key]!r}, which changes the base for all adapters. Merge "
                "this adapter into the base"
            )
    return {key: fields.get(key) for key in FIELDS}


@torch.no_grad()
def rest_beside(module: nn.Module, name: str, fields: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> None:
    """Add a frozen adapter to layers that have one.

    Args:
        module: Module that ``LoRA`` has adapted.
        name: Name of the adapter.
        fields: Settings that :func:`check_fields` returned.
        tensors: Factors, by their names in the adapted model. If it is None, a checkpoint will provide the values.

    Raises:
        ConfigurationError: If a layer has no adapter of variant lora or rslora, or a tensor has another shape.
    """
    own = {at: part for at, part in module.named_modules() if isinstance(part, LowRank)}
    stacks = find_experts(module, fields["targets"], who=f"LoRA: the adapter {name!r}")
    if stacks:
        raise ConfigurationError(
            f"LoRA: the adapter {name!r} adapts stacked experts ({stacks[0][0]!r}), which can have one adapter. Train "
            "on with start_from, or merge it into the base"
        )
    found = match_modules(module, fields["targets"], who=f"LoRA: the adapter {name!r}")
    for at, layer in found:
        rank, alpha = settings_of(at, fields["rank"], fields["alpha"], fields.get("patterns"))
        part = own.get(at)
        if part is None or part.lora_variant not in _PLAIN:
            raise ConfigurationError(
                f"LoRA: the adapter {name!r} also adapts {at!r} ({type(layer).__name__}), which has no adapter of "
                "variant lora or rslora that trains. Name that layer in targets"
            )
        for key, dim in (("lora_A", 0), ("lora_B", 1)):
            first: Tensor = getattr(part, key)
            shape = [rank if i == dim else size for i, size in enumerate(first.shape)]
            values = first.new_zeros(shape)
            if tensors is not None:
                given = _given(tensors, f"{at}.{key}")
                if list(given.shape) != shape:
                    raise refusal("LoRA", f"{at}.{key} of the adapter {name!r}", str(shape), list(given.shape))
                values.copy_(given)
            # A buffer, because checkpoints leave out frozen parameters and must contain this adapter.
            part.register_buffer(f"{key}_{name}", values)
        part.lora_others = {**part.lora_others, name: scale_of(fields["variant"], alpha, rank)}


def load_beside(module: nn.Module, name: str, folder: str, fields: Mapping[str, Any] | None = None) -> None:
    """Add the adapter of a folder, frozen, to a module that ``LoRA`` has adapted.

    Args:
        module: The module.
        name: Name of the adapter.
        folder: Folder or file, as in ``LoRA(start_from=...)``.
        fields: Settings that :func:`check_fields` returned, if the folder has been read for them.

    Raises:
        ConfigurationError: If the name is taken, or the adapter does not fit the module.
    """
    if name in adapter_names(module):
        raise refusal("LoRA", "the name of an adapter", f"another one than {', '.join(adapter_names(module))}", name)
    own = dict(check_fields(name, read_adapter(folder)[0]) if fields is None else fields)
    scale = scale_of(own["variant"], own["alpha"], own["rank"])
    own["targets"], tensors = adapter_in(folder, module, own["rank"], scale)
    rest_beside(module, name, own, tensors)


def adapter_names(module: nn.Module) -> list[str]:
    """Return the names of the adapters of a module: ``default``, if it has any, and those beside it."""
    parts = [part for part in module.modules() if isinstance(part, LowRank)]
    return list(dict.fromkeys(name for part in parts for name in (OWN, *part.lora_others)))


def _given(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    # A name in the file lacks the prefix that the model has inside the LightningModule.
    return next(tensor for key, tensor in tensors.items() if name == key or name.endswith(f".{key}"))


def mix_adapters(module: nn.Module, active: Sequence[str] | Mapping[str, float]) -> None:
    """Activate adapters with given weights, and deactivate all others.

    Args:
        module: Module that ``LoRA`` has adapted.
        active: Names of adapters, or their weights by name. ``default`` is the adapter that trains. If it is empty, the
            module computes the output of the base.

    Raises:
        ConfigurationError: If a name is unknown, if the variant does not support mixtures, and if ``default`` trains
            more than low-rank adapters of layers and does not have the weight 1.
    """
    if isinstance(active, Mapping):
        weights = dict(active)
    else:
        weights = dict.fromkeys(active, 1.0)
    if [*weights] == [OWN] and not isinstance(weights[OWN], Tensor) and weights[OWN] == 1:
        _set(module, None)
    else:
        _set(module, weights)


@contextmanager
def one_adapter(module: nn.Module, name: str | None) -> Iterator[None]:
    """Context in which one adapter is active. Errors as in :func:`mix_adapters`.

    Args:
        module: The module.
        name: Name of the adapter; None for the base alone, with any variant.
    """
    if name is not None:
        with _mixed(module, [name]):
            yield
        return
    _check_rest(module, only_whole=True)
    with disabled(module):
        yield


@contextmanager
def adapters_by_row(module: nn.Module, names: Sequence[str | None]) -> Iterator[None]:
    """Context in which each row of the batch uses one adapter.

    Args:
        module: Module that ``LoRA`` has adapted.
        names: Name of the adapter for each row; None for the base alone.

    Raises:
        ConfigurationError: As :func:`mix_adapters`. Layers raise it in the context if their inputs have another number
            of rows.
    """
    device = next(module.parameters()).device
    chosen = sorted({name for name in names if name is not None})
    rows = {name: torch.tensor([float(one == name) for one in names], device=device) for name in chosen}
    with _mixed(module, rows):
        yield


@contextmanager
def _mixed(module: nn.Module, active: Sequence[str] | Mapping[str, Any]) -> Iterator[None]:
    before = [(part, part.lora_mix) for part in module.modules() if isinstance(part, LowRank)]
    try:
        mix_adapters(module, active)
        yield
    finally:
        for part, mix in before:
            part.lora_mix = mix


def _set(module: nn.Module, weights: Mapping[str, float | Tensor] | None) -> None:
    parts = [part for part in module.modules() if isinstance(part, LowRank)]
    known = adapter_names(module)
    if not parts:
        raise ConfigurationError(f"LoRA: {type(module).__name__} has no adapters to choose from. Apply LoRA first")
    if weights is None:
        for part in parts:
            part.lora_mix = None
        return
    for name in weights:
        if name not in known:
            raise refusal("LoRA", "the active adapters", f"among {', '.join(known)}", name)
    for part in parts:
        if part.lora_variant not in _PLAIN:
            raise ConfigurationError(
                f"LoRA: variant {part.lora_variant!r} cannot be mixed with other adapters, because its output is not "
                "the base's output plus an update. Use variant lora or rslora"
            )
    if not bool(torch.as_tensor(weights.get(OWN, 0.0) == 1).all()):
        _check_rest(module)
    for part in parts:
        part.lora_mix = {name: share for name, share in weights.items() if name == OWN or name in part.lora_others}


def _check_rest(module: nn.Module, only_whole: bool = False) -> None:
    """Raise ConfigurationError if the trained adapter has parts that cannot be left out.

    Args:
        module: Module that ``LoRA`` has adapted.
        only_whole: Check only for parameters that train whole. Adapters of experts and rows of tokens can be disabled.
    """
    rest: set[str] = set()
    for part in module.modules():
        if isinstance(part, LowRank):
            rest.update(part.lora_trains)
        elif isinstance(part, Switchable) and not only_whole:
            rest.add("adapters of experts or of rows of tokens")
    if rest:
        raise ConfigurationError(
            f"LoRA: the trained adapter cannot be left out or weighted, because {' and '.join(sorted(rest))} change "
            f"the base for all adapters. Use {OWN!r}, or a model from before the training"
        )


def active_mix(module: nn.Module) -> dict[str, float] | None:
    """Return the weights that :func:`mix_adapters` has set, for a checkpoint, or None for the trained adapter alone."""
    found: dict[str, float] = {}
    mixes = [part.lora_mix for part in module.modules() if isinstance(part, LowRank)]
    if all(mix is None for mix in mixes):
        return None
    for mix in mixes:
        found |= {name: float(weight) for name, weight in (mix or {}).items()}
    return found
