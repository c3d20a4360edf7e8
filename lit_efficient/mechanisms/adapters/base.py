"""A frozen base: which parameters it has, checkpoints that leave it out, and the proof that it is still the same one.

A checkpoint keeps what trains, the buffers, and frozen tensors that have changed all the same. Loading it fills the
rest from the module itself, so that strict loading passes; loading a base checkpoint keeps the adapters, and starts
those that depend on the weight (DoRA, PiSSA) again. Digests of the base are in the checkpoint and compared on resume.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.declaration import held
from lit_efficient.errors import CheckpointError
from lit_efficient.internals.torch_layers import BatchNorm
from lit_efficient.internals.torch_modules import FollowsWeight
from lit_efficient.mechanisms.adapters.low_rank import LowRank, refresh_squared
from lit_efficient.mechanisms.adapters.peft_layers import peft_names
from lit_efficient.mechanisms.adapters.quantized import is_quantized
from lit_efficient.mechanisms.blocks.block_map import note_trained
from lit_efficient.surgery import is_sharded, parents

_MARK = "_lit_efficient_base"
FOLLOWS = "_lit_efficient_follows"  # on a network: the function that starts its adapters again, after other weights
_SAMPLES = 1024
ADDED: tuple[str, ...] = (  # last parts of adapters' names
    *("lora_A", "lora_B", "lora_A0", "lora_B0", "lora_magnitude", "ia3"),
    *("prefix_keys", "prefix_values", "prefix_embedding", "prompt_embeddings"),
    *("prefix_up", "prefix_up_bias", "prefix_out", "prefix_out_bias"),
)
_STACKED = ("lora_A_", "lora_B_")  # how they begin beside the stacked weights of experts


def is_added(name: str) -> bool:
    """Whether a parameter or buffer of this dotted name belongs to an adapter."""
    last = name.rpartition(".")[2]
    return last in ADDED or last.startswith(_STACKED)


def added_names(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Those of the names in a module that belong to adapters, ours or peft's."""
    names = list(names)
    return set(filter(is_added, names)) | peft_names(module, names)[0]


class FollowsBase:
    """Mix-in of a module whose adapter was made from frozen weights, and is made again when others are loaded."""

    def follow_base(self) -> None:
        """Start the adapter again from the weights that the module has now."""
        raise NotImplementedError


def freeze_base(module: nn.Module, trainable: Iterable[nn.Parameter], *, save_base: bool = False) -> None:
    """Freeze all parameters but ``trainable``, and let checkpoints leave the frozen ones out, unless ``save_base``.

    ``module`` is the root, whose ``state_dict`` goes into checkpoints.
    """
    note_trained(module)
    wanted = {id(parameter) for parameter in trainable}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(id(parameter) in wanted)
    hooked = _MARK in module.__dict__
    names = [name for name, parameter in module.named_parameters() if id(parameter) in wanted]
    module.__dict__[_MARK] = {"save": save_base, "trained": names, "digests": digests(module)}
    if not hooked:
        module.register_load_state_dict_pre_hook(_complete)
        module.register_load_state_dict_post_hook(_settle)


def has_frozen_base(module: nn.Module) -> bool:
    """Whether :func:`freeze_base` has decided what trains."""
    return _MARK in module.__dict__


def adapter_parameters(module: nn.Module) -> list[nn.Parameter]:
    """What :func:`freeze_base` left to train that belongs to adapters."""
    names = module.__dict__[_MARK]["trained"]
    added = added_names(module, names)
    return [module.get_parameter(name) for name in names if name in added]


def left_to_train(module: nn.Module) -> list[nn.Parameter]:
    """What :func:`freeze_base` did not freeze."""
    return [module.get_parameter(name) for name in module.__dict__[_MARK]["trained"]]


def trained_names(module: nn.Module) -> list[str]:
    """Names of what :func:`freeze_base` did not freeze; none where it decided nothing."""
    return list(module.__dict__.get(_MARK, {}).get("trained", ()))


def leaves_base_out(module: nn.Module) -> bool:
    """Whether the checkpoints of ``module`` go without its frozen weights."""
    return has_frozen_base(module) and not module.__dict__[_MARK]["save"]


def digests(module: nn.Module) -> dict[str, str]:
    """A digest of each frozen parameter by name, of up to 1024 of its values.

    Values are rounded to bfloat16 first: a base is the same in any precision.
    """
    frozen = ((name, p) for name, p in module.named_parameters() if not p.requires_grad and name not in held(module))
    return {name: _digest(p) for name, p in frozen if not (_is_shared(p) or p.is_meta)}


def noting_digests(module: nn.Module) -> Callable[[str, Tensor, torch.dtype], None]:
    """Take the digest of each frozen parameter from its whole tensor, when it is read, for :func:`freeze_base`."""
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad} - held(module)

    def note(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        if name in frozen and has_frozen_base(module):
            module.__dict__[_MARK]["digests"][name] = _digest(tensor, dtype)

    return note


def _all_digests(module: nn.Module) -> dict[str, str]:
    """:func:`digests`, and of parameters that have been sharded since, those of before."""
    now, named = digests(module), dict(module.named_parameters())
    earlier: dict[str, str] = module.__dict__[_MARK]["digests"] if has_frozen_base(module) else {}
    return {name: d for name, d in earlier.items() if name in named and _is_shared(named[name])} | now


def _is_shared(p: Tensor) -> bool:
    """Whether processes hold shards of it; DeepSpeed's third stage leaves nothing in the parameter itself."""
    return is_sharded(p) or not p.numel()


def _digest(tensor: Tensor, dtype: torch.dtype | None = None) -> str:
    values = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLES)].to(dtype or tensor.dtype)
    if values.is_floating_point():
        values = values.to(torch.bfloat16).view(torch.int16)
    content = repr(tuple(tensor.shape)).encode() + values.cpu().contiguous().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def trim(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Take the frozen base out of ``checkpoint`` and put its digests in.

    Layers of BatchNorm stay whole: their statistics change, and peft saves modules, not buffers.
    """
    mark = module.__dict__.get(_MARK)
    if mark is None:
        return
    # What trains after all was frozen when the base was: a new head, before a later technique says that it trains.
    trains = held(module) | {name for name, p in module.named_parameters() if p.requires_grad}
    checkpoint["lit_efficient"]["base"] = {name: d for name, d in mark["digests"].items() if name not in trains}
    if mark["save"]:
        return
    now = digests(module)
    changed = {name for name, digest in now.items() if digest != mark["digests"].get(name, digest)}
    norms = {name for name, part in module.named_modules() if isinstance(part, BatchNorm)}
    dropped = {key for key in frozen_keys(module, checkpoint["state_dict"]) if key.rpartition(".")[0] not in norms}
    dropped -= changed
    checkpoint["state_dict"] = {key: value for key, value in checkpoint["state_dict"].items() if key not in dropped}


def check(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose adapters were trained beside other weights than the module has.

    Raises:
        CheckpointError: Naming the first parameters that differ.
    """
    saved: Mapping[str, str] = checkpoint.get("lit_efficient", {}).get("base", {})
    # A strategy that shards has loaded the weights by itself: they must be the base's own, in the file or not.
    present = checkpoint.get("state_dict", {})
    now = _all_digests(module)
    other = [name for name, digest in saved.items() if name not in present and now.get(name, digest) != digest]
    if other:
        raise CheckpointError(
            f"the checkpoint's adapters were trained beside another base: {len(other)} of {len(saved)} frozen tensors "
            f"differ, first {', '.join(map(repr, other[:3]))}. Build the module with the weights it was trained with "
            "(before techniques act, in __init__, setup or configure_model), or train with save_base=True"
        )


def frozen_keys(module: nn.Module, keys: Iterable[str]) -> set[str]:
    """Those of the keys of a ``state_dict`` that belong to frozen parameters, quantisation constants included."""
    later = {id(module.get_parameter(name)) for name in held(module)}  # frozen for now: they belong to what trains
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, p in named if not p.requires_grad and id(p) not in later}
    frozen -= peft_names(module, frozen)[0]  # of several adapters some may rest
    quantized = {name for name, part in module.named_modules(remove_duplicate=False) if is_quantized(part)}
    found = set()
    for key in keys:
        owner, _, last = key.rpartition(".")
        constant = owner in quantized and last in ("SCB", "weight_format")
        around = {owner, *parents(owner)} & quantized
        if key in frozen or constant or any(key.startswith(f"{name}.weight.") for name in around):
            found.add(key)
    return found


def _complete(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading: what a checkpoint of either kind leaves out is taken from the module itself."""
    own = module.state_dict()
    added = added_names(module, own)
    for key, plain in peft_names(module, own)[1].items():  # a checkpoint of the base alone has its own names
        if prefix + plain in state_dict:
            state_dict.setdefault(prefix + key, state_dict.pop(prefix + plain))
    given = {key[len(prefix) :] for key in state_dict if key.startswith(prefix)}
    missing = (frozen_keys(module, own) if added & given else added) - given
    if given & own.keys():
        state_dict.update({prefix + key: own[key] for key in missing})
    module.__dict__[_MARK]["fresh"] = not added & given


def _settle(module: nn.Module, incompatible: Any) -> None:
    """After loading: what depends on the base follows it."""
    mark = module.__dict__[_MARK]
    now = _all_digests(module)
    changed, mark["digests"] = now != mark["digests"], now
    fresh = mark.pop("fresh", False)
    for part in list(module.modules()) if changed else ():
        if fresh and FOLLOWS in part.__dict__:
            part.__dict__[FOLLOWS](part)
        if isinstance(part, FollowsBase) and fresh:
            part.follow_base()
        if fresh and isinstance(part, FollowsWeight) and part.made_of_weight:
            part.follow_weight()
        elif isinstance(part, LowRank) and part.lora_variant == "dora":
            refresh_squared(part)
