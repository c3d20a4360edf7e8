"""Convert an optimizer into its low-bit twin: select the class and the parameters, and compute the memory saved.

    state bytes per parameter of AdamW: 8 (two float32 moments)  ->  2 (b / 8 + 4 / B)
        = 2.03 with b = 8, B = 256;  1.06 with b = 4, B = 128;  fp8 as 8 bits

Source: Dettmers et al. (2021), https://arxiv.org/abs/2110.02861; Li et al. (2023), https://arxiv.org/abs/2309.01507
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lit_efficient.errors import ConfigurationError, ConflictError, NoEffectError, check_installed
from lit_efficient.internals.import_noise import silence_imports
from lit_efficient.optimizers.groups import decays
from lit_efficient.surgery import become, is_sharded, local

# Low-bit class, and number of moments, for optimizers of torch. Optimizers of this package have `low_bit_twin` instead.
_TWINS: dict[type[Optimizer], tuple[str, int]] = {
    torch.optim.AdamW: ("AdamW", 2),
    torch.optim.Adam: ("Adam", 2),
    torch.optim.SGD: ("SGD", 1),
    torch.optim.RMSprop: ("RMSprop", 1),
    torch.optim.Adagrad: ("Adagrad", 1),
}
_TORCHAO = ("AdamW", "Adam")
# Settings that no twin supports, with the value at which they have no effect. RMSprop also has a momentum.
_NEUTRAL: dict[str, Any] = {
    "amsgrad": False,
    "maximize": False,
    "nesterov": False,
    "dampening": 0,
    "centered": False,
    "initial_accumulator_value": 0,
}


@dataclass(frozen=True)
class LowBitStates:
    """Result of :func:`to_low_bit`, for the tensors in this process."""

    backend: str  # ``bitsandbytes`` or ``torchao``
    low: int  # elements of the parameters with low-bit states
    total: int  # elements of the parameters that train; frozen parameters get no state
    state_bytes: int  # bytes of all states, with scales and code tables, without step counters
    full_bytes: int  # bytes of the states without conversion


def to_low_bit(
    optimizer: Optimizer,
    bits: int | str = 8,
    backend: str = "auto",
    *,
    paged: bool = False,
    min_size: int = 4096,
    keep_32bit: Set[Tensor] = frozenset(),
    decay_norm_and_bias: bool = True,
    who: str = "to_low_bit",
) -> LowBitStates:
    """Convert ``optimizer`` into its low-bit twin in place, before its first step. Groups and schedulers stay valid.

    Args:
        optimizer: AdamW, Adam, SGD with momentum, RMSprop or Adagrad of torch, or FusedAdamW or Lion of this package.
        bits: 8, 4 or ``"fp8"``. The latter two need torchao and AdamW or Adam.
        backend: ``"bitsandbytes"``, ``"torchao"`` or ``"auto"``: bitsandbytes for 8 bits on parameters that are not
            sharded, otherwise torchao.
        paged: Keep the states in memory that the GPU driver can page out to the host (bitsandbytes on CUDA).
        min_size: Tensors with fewer elements keep unquantised states.
        keep_32bit: Parameters that keep unquantised states: float32 with bitsandbytes, and the dtype of the parameter
            with torchao.
        decay_norm_and_bias: Apply weight decay to tensors with fewer than two dimensions. Their groups do not change.
        who: Name at the beginning of error messages.

    Raises:
        ConfigurationError: If the class or one of its settings has no twin.
        NoEffectError: If no tensor would have low-bit states, or they would save nothing.
        ConflictError: If the backend does not support sharded parameters (DTensors).
    """
    kind = type(optimizer)
    twin_name, moments = _twin_of(optimizer, bits, who)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [p for p in parameters if p.requires_grad]
    backend = _backend_for(parameters, bits, backend, who)
    _check_settings(optimizer, kind, who)
    if backend == "torchao":
        _check_torchao(optimizer, twin_name, bits, who)
    if paged and any(p.device.type != "cuda" for p in parameters):
        raise ConfigurationError(f"{who}: paged=True needs parameters on a CUDA device: its pages are the GPU driver's")
    settings: dict[str, object] = {"keep_32bit": keep_32bit, "min_size": min_size, "no_decay": set()}
    if not decay_norm_and_bias:
        settings["no_decay"] = {p for p in parameters if not decays(p)}
    check_installed(who, backend)
    silence_imports()
    if backend == "torchao":
        from lit_efficient.optimizers import low_bit_torchao as ao

        cls = ao.AdamLowBit if twin_name == "Adam" else ao.AdamWLowBit
        settings["bits"] = bits
        block = ao.BLOCKS[bits]
        low = {p for p in trained if ao.is_low(p, bits, min_size, p in keep_32bit)}
        state_bytes = sum(ao.state_bytes(p, bits, p in low) for p in trained)
    else:
        from lit_efficient.optimizers import low_bit_bitsandbytes as bnb

        cls = getattr(bnb, f"{twin_name}8bit")
        settings["paged"] = paged
        block = 1
        low = {p for p in trained if p not in keep_32bit and p.numel() >= min_size}
        state_bytes = sum(bnb.state_bytes(p, moments, p in low) for p in trained) + bnb.table_bytes(moments)
    if not low:
        raise _nothing_low(trained, keep_32bit, bits, min_size, block, who)
    full_bytes = sum(moments * local(p).numel() * p.element_size() for p in trained)
    if state_bytes >= full_bytes:
        raise NoEffectError(
            f"{who}: {_label(bits)} states of {kind.__name__} would take {state_bytes:,} bytes with their tables "
            f"instead of {full_bytes:,}: leave {who} out"
        )
    if kind is torch.optim.Adagrad:
        optimizer.state.clear()  # torch creates the states in the constructor
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])
    become(optimizer, cls, **settings)
    return LowBitStates(
        backend,
        low=sum(local(p).numel() for p in low),
        total=sum(local(p).numel() for p in trained),
        state_bytes=state_bytes,
        full_bytes=full_bytes,
    )


def _nothing_low(
    trained: list[Tensor], keep_32bit: Set[Tensor], bits: int | str, min_size: int, block: int, who: str
) -> NoEffectError:
    """Return the error for parameters none of which gets low-bit states."""
    sizes = [local(p).numel() for p in trained if p not in keep_32bit]
    if not sizes:
        return NoEffectError(
            f"{who}: none of the {len(trained)} tensors that train would have {_label(bits)} states: all of them "
            f"belong to layers that keep_32bit names; write keep_32bit: [], or leave {who} out"
        )
    largest = max(sizes)
    if largest < max(block, 2):
        way_out = f"leave {who} out: states of so few elements are small"
    elif largest >= min_size:
        way_out = f"torchao needs multiples of {block} elements: leave {who} out, or use backend: bitsandbytes"
    else:
        way_out = f"write min_size: {largest}, or leave {who} out: states of so few elements are small"
    kept = len(trained) - len(sizes)
    return NoEffectError(
        f"{who}: none of the {len(trained)} tensors that train would have {_label(bits)} states: {kept} keep 32 bits, "
        f"the largest of the others has {largest} elements, and min_size is {min_size}; {way_out}"
    )


def _label(bits: int | str) -> str:
    return f"{bits}-bit" if isinstance(bits, int) else bits


def _twin_of(optimizer: Optimizer, bits: int | str, who: str) -> tuple[str, int]:
    """Return the low-bit class and the number of moments of an optimizer.

    Subclasses do not inherit a twin, because their step may differ.
    """
    kind = type(optimizer)
    twin: tuple[str, int] | None = vars(kind).get("low_bit_twin", _TWINS.get(kind))
    if twin is None:
        names = ", ".join(sorted(name for name, _ in _TWINS.values()))
        raise ConfigurationError(
            f"{who}: {kind.__name__} has no {_label(bits)} twin; allowed: {names}, and FusedAdamW and Lion of this "
            "package"
        )
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
    if kind is torch.optim.Adam and decoupled == {True}:
        return _TWINS[torch.optim.AdamW]
    if kind is torch.optim.Adam and decoupled != {False}:
        raise ConfigurationError(
            f"{who}: Adam has no {_label(bits)} twin if only some groups set decoupled_weight_decay"
        )
    return twin


def _backend_for(parameters: list[Tensor], bits: int | str, backend: str, who: str) -> str:
    sharded = any(map(is_sharded, parameters))
    if backend == "auto":
        backend = "torchao" if sharded or bits != 8 else "bitsandbytes"
    if backend == "bitsandbytes" and bits != 8:
        raise ConfigurationError(f"{who}: bitsandbytes has 8-bit states only, got bits={bits!r}: use backend='torchao'")
    if backend == "bitsandbytes" and sharded:
        raise ConflictError(
            f"{who}: bitsandbytes cannot resume the states of sharded parameters (DTensors): use backend='torchao'"
        )
    if backend == "torchao" and sharded and bits == 4:
        raise ConflictError(f"{who}: torchao's 4-bit states cannot be sharded (DTensors): use bits=8 or bits='fp8'")
    return backend


def _check_settings(optimizer: Optimizer, kind: type[Optimizer], who: str) -> None:
    name = kind.__name__
    neutral = dict(_NEUTRAL)
    if kind is torch.optim.RMSprop:
        neutral["momentum"] = 0
    for group in optimizer.param_groups:
        for key, value in neutral.items():
            if group.get(key, value) != value:
                raise ConfigurationError(
                    f"{who}: {name}({key}={group[key]}) has no low-bit twin; allowed: {key}={value}"
                )
        if kind is torch.optim.SGD and not group["momentum"]:
            raise ConfigurationError(f"{who}: SGD(momentum=0) has no state; set a momentum, or leave {who} out")
    if kind is torch.optim.Adagrad and any(float(state["step"]) for state in optimizer.state.values()):
        raise ConfigurationError(f"{who}: {name} has stepped already, and its state would be lost")


def _check_torchao(optimizer: Optimizer, twin_name: str, bits: int | str, who: str) -> None:
    if twin_name not in _TORCHAO:
        raise ConfigurationError(
            f"{who}: torchao has no {_label(bits)} twin of {type(optimizer).__name__}; allowed: "
            f"{', '.join(sorted(_TORCHAO))}, and FusedAdamW of this package"
        )
    if any("base_momentum" in group for group in optimizer.param_groups):
        raise ConfigurationError(
            f"{who}: OneCycleLR and CyclicLR change the betas in every step, and torchao recompiles its step for each "
            "value: pass cycle_momentum=False to the scheduler, or use backend='bitsandbytes'"
        )
