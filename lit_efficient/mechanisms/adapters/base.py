"""Frozen base of adapters: freezing, checkpoints without the frozen weights, and a check that the base is the same.

A checkpoint contains the parameters that train, the buffers, and frozen tensors whose values have changed. Loading such
a checkpoint takes the missing tensors from the module itself, so that strict loading passes. Loading a checkpoint of
the base alone keeps the adapters, and initialises those that depend on the weight (DoRA, PiSSA) again. The checkpoint
contains digests of the base, which are compared on resume.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lit_efficient.declaration import held
from lit_efficient.errors import CheckpointError
from lit_efficient.internals.torch_modules import BatchNorm, FollowsWeight
from lit_efficient.internals.torch_shards import is_wrapper
from lit_efficient.mechanisms.adapters.low_rank import LowRank, refresh_squared
from lit_efficient.mechanisms.adapters.peft_layers import peft_names
from lit_efficient.mechanisms.adapters.quantized import is_quantized
from lit_efficient.mechanisms.adapters.trained_rows import frozen_new_rows
from lit_efficient.mechanisms.blocks.block_map import note_trained
from lit_efficient.surgery import is_sharded, parents

_MARK = "_lit_efficient_base"
# Attribute of a network: a function that initialises its adapters again after other weights have been loaded.
FOLLOWS = "_lit_efficient_follows"
_SAMPLES = 1024
ADDED_ROWS = "added_rows"  # rows of new tokens, which train with and without adapters
ADDED: tuple[str, ...] = (  # last components of the names of adapters' parameters
    *("lora_A", "lora_B", "lora_A0", "lora_B0", "lora_magnitude", "ia3"),
    *("prefix_keys", "prefix_values", "prefix_embedding", "prompt_embeddings"),
    *("prefix_up", "prefix_up_bias", "prefix_out", "prefix_out_bias", "trained_rows", ADDED_ROWS),
)
_STACKED = ("lora_A_", "lora_B_")  # prefixes of the adapters of stacked experts and of further adapters of a layer


def is_added(name: str) -> bool:
    """Return whether a parameter or buffer with this dotted name belongs to an adapter."""
    last = name.rpartition(".")[2]
    return last in ADDED or last.startswith(_STACKED)


def added_names(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names of a module's tensors that belong to adapters of this package or of peft."""
    names = list(names)
    return set(filter(is_added, names)) | peft_names(module, names)[0]


class FollowsBase:
    """Mix-in of a module whose adapter is computed from frozen weights, and again when other weights are loaded."""

    def follow_base(self) -> None:
        """Initialise the adapter again from the module's present weights."""
        raise NotImplementedError


def freeze_base(module: nn.Module, trainable: Iterable[nn.Parameter], *, save_base: bool = False) -> None:
    """Freeze all parameters except ``trainable`` and rows of new tokens; remove the frozen ones from checkpoints.

    Args:
        module: Root module, whose ``state_dict`` goes into checkpoints.
        trainable: The parameters that stay trainable.
        save_base: Keep the frozen parameters in checkpoints.
    """
    note_trained(module)
    trainable = list(trainable)
    trainable += [p for name, p in module.named_parameters() if name.rpartition(".")[2] == ADDED_ROWS]
    left = frozen_new_rows(module, trainable)
    if left:
        rank_zero_warn(f"the rows of {len(left)} new tokens, ids {left[0]} to {left[-1]}, stay at their initial values")
    wanted = {id(parameter) for parameter in trainable}
    for parameter in module.parameters():
        if parameter.is_floating_point():  # quantised codes are integers and cannot require a gradient
            parameter.requires_grad_(id(parameter) in wanted)
    hooked = _MARK in module.__dict__
    names = [name for name, parameter in module.named_parameters() if id(parameter) in wanted]
    module.__dict__[_MARK] = {"save": save_base, "trained": names, "digests": digests(module)}
    # A second technique of adapters changes the record, but the hooks must not run twice.
    if not hooked:
        module.register_load_state_dict_pre_hook(_complete)
        module.register_load_state_dict_post_hook(_settle)


def has_frozen_base(module: nn.Module) -> bool:
    """Return whether :func:`freeze_base` has been called with the module."""
    return _MARK in module.__dict__


def adapter_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of adapters that :func:`freeze_base` did not freeze."""
    names = trained_names(module)
    added = added_names(module, names)
    return [module.get_parameter(name) for name in names if name in added]


def left_to_train(module: nn.Module) -> list[nn.Parameter]:
    """Return all parameters that :func:`freeze_base` did not freeze."""
    return [module.get_parameter(name) for name in trained_names(module)]


def trained_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters that :func:`freeze_base` did not freeze.

    The list is empty if :func:`freeze_base` has not been called.
    """
    return list(module.__dict__.get(_MARK, {}).get("trained", ()))


def leaves_base_out(module: nn.Module) -> bool:
    """Return whether checkpoints of ``module`` are saved without its frozen weights."""
    return has_frozen_base(module) and not module.__dict__[_MARK]["save"]


def digests(module: nn.Module) -> dict[str, str]:
    """Return a digest of each frozen parameter by name. The digest covers about 1024 of its values.

    Values are rounded to bfloat16 first, so that a base has the same digests in every precision. Sharded parameters and
    those on the meta device have no digest.
    """
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad or name in held(module) or parameter.is_meta or _is_shared(parameter):
            continue
        found[name] = _digest(parameter)
    return found


def noting_digests(module: nn.Module) -> Callable[[str, Tensor, torch.dtype], None]:
    """Return a function that records the digest of a frozen parameter when its weight is read from a file.

    The parameter itself may hold only a shard of the tensor. The digests are those that :func:`freeze_base` stores.
    """
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad} - held(module)

    def note(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if name in frozen and has_frozen_base(module):
            module.__dict__[_MARK]["digests"][name] = _digest(tensor, dtype)

    return note


def _all_digests(module: nn.Module) -> dict[str, str]:
    """Return :func:`digests`, and the stored digests of parameters that are sharded now."""
    found: dict[str, str] = {}
    if has_frozen_base(module):
        named = dict(module.named_parameters())
        for name, digest in module.__dict__[_MARK]["digests"].items():
            if name in named and _is_shared(named[name]):
                found[name] = digest
    return found | digests(module)


def _is_shared(parameter: Tensor) -> bool:
    """Return whether each process holds a shard of a parameter."""
    return is_sharded(parameter) or not parameter.numel()  # DeepSpeed's stage 3 leaves an empty tensor


def _digest(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    if is_wrapper(tensor):  # a quantised weight of another library: its codes and scales are plain tensors
        inner, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return "-".join(_digest(getattr(tensor, name)) for name in inner)
    stride = max(1, tensor.numel() // _SAMPLES)
    values = tensor.detach().reshape(-1)[::stride].to(dtype or tensor.dtype)
    if values.is_floating_point():
        values = values.to(torch.bfloat16).view(torch.int16)
    content = repr(tuple(tensor.shape)).encode() + values.cpu().contiguous().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def trim(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Remove the frozen base from ``checkpoint``, in place, and add its digests.

    All tensors of BatchNorm layers stay, because their statistics change and peft saves modules instead of buffers.
    """
    mark = module.__dict__.get(_MARK)
    if mark is None:
        return
    # A parameter can be trained although it was frozen with the base, such as a new head that a later technique trains.
    trains = held(module) | {name for name, p in module.named_parameters() if p.requires_grad}
    checkpoint["lit_efficient"]["base"] = {name: d for name, d in mark["digests"].items() if name not in trains}
    if mark["save"]:
        return
    now = digests(module)
    changed = {name for name, digest in now.items() if digest != mark["digests"].get(name, digest)}
    norms = {name for name, part in module.named_modules() if isinstance(part, BatchNorm)}
    aside = checkpoint["lit_efficient"].get("training_only", {})
    frozen = frozen_keys(module, [*checkpoint["state_dict"], *aside])
    dropped = {key for key in frozen if key.rpartition(".")[0] not in norms} - changed
    checkpoint["state_dict"] = {key: value for key, value in checkpoint["state_dict"].items() if key not in dropped}
    for key in dropped & set(aside):
        del aside[key]


def check(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Check that the adapters in a checkpoint were trained with the frozen weights that the module has.

    Raises:
        CheckpointError: If frozen weights differ. The message names the first ones.
    """
    saved: Mapping[str, str] = checkpoint.get("lit_efficient", {}).get("base", {})
    # Frozen weights in the file replace those of the module. A strategy that shards has loaded them itself and passes
    # no state dict, so that all of them are compared.
    present = checkpoint.get("state_dict", {})
    now = _all_digests(module)
    names = {name for name, _ in module.named_parameters()}
    other = [
        name
        for name, digest in saved.items()
        if name not in present and (now.get(name, digest) != digest or _holds_codes_of(name, names))
    ]
    if other:
        raise CheckpointError(
            f"the checkpoint's adapters were trained with other frozen weights: {len(other)} of {len(saved)} frozen "
            f"tensors differ, first {', '.join(map(repr, other[:3]))}. Build the module with the weights that it was "
            "trained with, in __init__, setup or configure_model, before techniques are applied, or train with "
            "save_base=True"
        )


def _holds_codes_of(name: str, names: set[str]) -> bool:
    """Return whether a stack of experts is quantised either in the checkpoint or in the module, but not in both."""
    return name not in names and bool({f"{name}.weight", name.removesuffix(".weight")} & names)


def frozen_keys(module: nn.Module, keys: Iterable[str]) -> set[str]:
    """Return the keys of a ``state_dict`` that belong to frozen parameters, including their quantisation constants."""
    later = {id(module.get_parameter(name)) for name in held(module)}  # parameters that are frozen only for a while
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, p in named if not p.requires_grad and id(p) not in later}
    frozen -= peft_names(module, frozen)[0]  # peft freezes the adapters that are not active
    quantized = {name for name, part in module.named_modules(remove_duplicate=False) if is_quantized(part)}
    found = set()
    for key in keys:
        owner, _, last = key.rpartition(".")
        constant = owner in quantized and last in ("SCB", "weight_format")
        around = {owner, *parents(owner)} & quantized
        if key in frozen or constant or any(key.startswith(f"{name}.weight.") for name in around):
            found.add(key)
    return found


def _complete(module: nn.Module, state_dict: dict[str, object], prefix: str, *_: object) -> None:
    """Pre-hook of loading that adds the module's own tensors for those missing from the checkpoint.

    The checkpoint contains either the adapters without the base, or the base without adapters.
    """
    own = module.state_dict()
    added = added_names(module, own)
    for key, plain in peft_names(module, own)[1].items():  # peft renames the base's parameters
        if prefix + plain in state_dict:
            state_dict.setdefault(prefix + key, state_dict.pop(prefix + plain))
    given = {key[len(prefix) :] for key in state_dict if key.startswith(prefix)}
    has_adapters = bool(added & given)
    optional = frozen_keys(module, own) if has_adapters else added
    if given & own.keys():
        state_dict.update({prefix + key: own[key] for key in optional - given})
    module.__dict__[_MARK]["fresh"] = not has_adapters


def _settle(module: nn.Module, incompatible: object) -> None:
    """Post-hook of loading that recomputes adapters which depend on the base, if the base has changed."""
    mark = module.__dict__[_MARK]
    now = _all_digests(module)
    changed = now != mark["digests"]
    mark["digests"] = now
    fresh = mark.pop("fresh", False)  # the checkpoint contained no adapters
    if not changed:
        return
    for part in list(module.modules()):
        if fresh and FOLLOWS in part.__dict__:
            part.__dict__[FOLLOWS](part)
        if fresh and isinstance(part, FollowsBase):
            part.follow_base()
        if fresh and isinstance(part, FollowsWeight) and part.made_of_weight:
            part.follow_weight()
        elif isinstance(part, LowRank) and part.lora_variant == "dora":
            refresh_squared(part)
