"""Turn an optimizer into its low-bit twin: which class has which twin, which tensors take part, and what that saves.

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

from lit_efficient.errors import ConfigurationError, ConflictError, check_installed
from lit_efficient.internals.import_noise import silence_imports
from lit_efficient.optimizers.groups import decays
from lit_efficient.surgery import become, is_sharded, local

# The name of the twin and its moments, of torch's optimizers. Ours say it themselves, as ``low_bit_twin``.
_TWINS: dict[type[Optimizer], tuple[str, int]] = {
    torch.optim.AdamW: ("AdamW", 2),
    torch.optim.Adam: ("Adam", 2),
    torch.optim.SGD: ("SGD", 1),
    torch.optim.RMSprop: ("RMSprop", 1),
    torch.optim.Adagrad: ("Adagrad", 1),
}
_TORCHAO = ("AdamW", "Adam")
_BLOCKS: dict[int | str, int] = {4: 128}  # elements that share a scale in torchao; 256 for the others
# Settings that no twin has, and the value at which they change nothing. RMSprop has a momentum, too.
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
    """What :func:`to_low_bit` did."""

    backend: str  # ``bitsandbytes`` or ``torchao``
    low: int  # elements whose states are low-bit, in this process
    total: int  # elements of the parameters that train, in this process: frozen ones in the optimizer get no state
    state_bytes: int  # bytes that all states will take, scales and code tables included, step counters not
    full_bytes: int  # bytes that the states of the optimizer as it was would take


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
    """Turn ``optimizer``, which has not stepped yet, into its low-bit twin in place; groups and schedulers stay valid.

    Args:
        optimizer: AdamW, Adam, SGD with momentum, RMSprop or Adagrad of torch, or Lion of this package.
        bits: 8, 4 or ``"fp8"``; the latter two are torchao's, for AdamW and Adam.
        backend: ``"bitsandbytes"``, ``"torchao"``, or ``"auto"``: bitsandbytes for 8 bits on whole parameters.
        paged: Keep the states in memory that the GPU pages to the host (bitsandbytes on CUDA).
        min_size: Tensors with fewer elements keep unquantised states.
        keep_32bit: Parameters that keep unquantised states: float32 with bitsandbytes, of the parameter's type with
            torchao, as torch has them.
        decay_norm_and_bias: Whether tensors with fewer than two dimensions decay; their groups stay as they are.
        who: Name for errors.

    Raises:
        ConfigurationError: If the class or one of its settings has no twin, or no tensor would have low-bit states.
        ConflictError: If the backend cannot handle sharded parameters (DTensors).
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
    settings: dict[str, Any] = {"keep_32bit": keep_32bit, "min_size": min_size}
    settings["no_decay"] = set() if decay_norm_and_bias else {p for p in parameters if not decays(p)}
    sizes = {p: local(p).numel() for p in trained}
    if backend == "torchao":
        check_installed(who, "torchao")
        silence_imports()
        from lit_efficient.optimizers import low_bit_torchao as ao

        cls: Any = ao.AdamLowBit if twin_name == "Adam" else ao.AdamWLowBit
        settings["bits"] = bits
        low = {p for p in trained if ao.is_low(p, bits, min_size, p in keep_32bit)}
        state_bytes = sum(ao.state_bytes(p, bits, p in low) for p in trained)
    else:
        check_installed(who, "bitsandbytes")
        from lit_efficient.optimizers import low_bit_bitsandbytes as bnb

        cls = getattr(bnb, f"{twin_name}8bit")
        settings["paged"] = paged
        low = {p for p in trained if p not in keep_32bit and p.numel() >= min_size}
        state_bytes = sum(bnb.state_bytes(p, moments, p in low) for p in trained) + bnb.table_bytes(moments)
    if not low:
        kept = sum(p in keep_32bit for p in trained)
        largest = max((size for p, size in sizes.items() if p not in keep_32bit), default=0)
        block = _BLOCKS.get(bits, 256) if backend == "torchao" else 0
        way = f"write min_size: {largest}, or leave {who} out: states of so few elements are small"
        if largest < max(block, 2):
            way = f"leave {who} out: states of so few elements are small"
        elif largest >= min_size:
            way = f"torchao takes whole blocks of {block} elements: leave {who} out, or use backend: bitsandbytes"
        raise ConfigurationError(
            f"{who}: none of the {len(trained)} tensors that train would have {_label(bits)} states: of those that "
            f"are not kept ({kept} are) the largest has {largest} elements, and min_size is {min_size}; {way}"
        )
    if kind is torch.optim.Adagrad:
        optimizer.state.clear()  # torch makes its zeros before the first step
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])
    become(optimizer, cls, **settings)
    full_bytes = sum(moments * sizes[p] * p.element_size() for p in trained)
    return LowBitStates(backend, sum(sizes[p] for p in low), sum(sizes.values()), state_bytes, full_bytes)


def _label(bits: int | str) -> str:
    return f"{bits}-bit" if isinstance(bits, int) else bits


def _twin_of(optimizer: Optimizer, bits: int | str, who: str) -> tuple[str, int]:
    """The class that the twin imitates, and its moments. Subclasses may step otherwise: each class says its own."""
    kind = type(optimizer)
    twin: tuple[str, int] | None = vars(kind).get("low_bit_twin", _TWINS.get(kind))
    if twin is None:
        names = ", ".join(sorted(name for name, _ in _TWINS.values()))
        raise ConfigurationError(
            f"{who}: {kind.__name__} has no {_label(bits)} twin; allowed: {names}, and of this package "
            "FusedAdamW and Lion"
        )
    decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
    if kind is torch.optim.Adam and decoupled == {True}:
        return _TWINS[torch.optim.AdamW]
    if kind is torch.optim.Adam and decoupled != {False}:
        raise ConfigurationError(
            f"{who}: Adam with decoupled_weight_decay in some groups only has no {_label(bits)} twin"
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
    neutral = _NEUTRAL | ({"momentum": 0} if kind is torch.optim.RMSprop else {})
    for group in optimizer.param_groups:
        for key, value in neutral.items():
            if group.get(key, value) != value:
                raise ConfigurationError(
                    f"{who}: {name}({key}={group[key]}) has no low-bit twin; allowed: {key}={value}"
                )
        if kind is torch.optim.SGD and not group["momentum"]:
            raise ConfigurationError(
                f"{who}: SGD(momentum=0) has no state to save; give it a momentum, or leave this out"
            )
    if kind is torch.optim.Adagrad and any(float(state["step"]) for state in optimizer.state.values()):
        raise ConfigurationError(f"{who}: {name} has stepped already; its state would be lost")


def _check_torchao(optimizer: Optimizer, twin_name: str, bits: int | str, who: str) -> None:
    if twin_name not in _TORCHAO:
        raise ConfigurationError(
            f"{who}: torchao has no {_label(bits)} twin of {type(optimizer).__name__}; allowed: "
            f"{', '.join(sorted(_TORCHAO))}, and FusedAdamW of this package"
        )
    if any("base_momentum" in group for group in optimizer.param_groups):
        raise ConfigurationError(
            f"{who}: OneCycleLR and CyclicLR change the betas in every step, and torchao compiles its step again for "
            "each value: pass cycle_momentum=False to the scheduler, or use backend='bitsandbytes'"
        )
