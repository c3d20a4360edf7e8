"""Convert AdamW into GaLore or APOLLO in place: select the projected parameters, and compute the memory saved.

    bytes of state of a matrix [m, n], m <= n:  AdamW 2 m n b;  GaLore (2 r n + m r) b;  APOLLO 2 r n b    (b = 4)
        rank r = m / 4, m = n:  8 -> 3 bytes a parameter with GaLore, 2 with APOLLO;  8 bits: 1.5 with GaLore

Source: Zhao et al. (2024), https://arxiv.org/abs/2403.03507; Zhu et al. (2024), https://arxiv.org/abs/2412.05270
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_efficient.application.optimizers import optimized_by
from lit_efficient.declaration import Report, format_bytes, held
from lit_efficient.errors import ConfigurationError, ConflictError, NoEffectError, check_installed
from lit_efficient.internals.import_noise import silence_imports
from lit_efficient.internals.torch_shards import is_wrapper
from lit_efficient.mechanisms.adapters.targets import ALL_LINEAR, WITH_EXPERTS, find_experts, find_targets
from lit_efficient.optimizers.low_rank_adamw import LowRankAdamW, Subspace, as_matrices
from lit_efficient.surgery import become, is_sharded

_SMALLEST_LOW = 4096  # moments with fewer elements keep 32 bits, as in bitsandbytes


@dataclass(frozen=True)
class LowRankStates:
    """Result of :func:`to_low_rank`, for the tensors in this process."""

    projected: tuple[Tensor, ...]  # parameters with moments in a subspace, including those that are still frozen
    total: int  # elements of all parameters that train
    state_bytes: int  # bytes of all states, without step counters and single numbers
    full_bytes: int  # bytes of the states without conversion


def to_low_rank(
    optimizer: Optimizer,
    matrices: Iterable[Tensor],
    subspace: Subspace,
    bits: int = 32,
    *,
    keep_32bit: Set[Tensor] = frozenset(),
    trains_later: Set[Tensor] = frozenset(),
    who: str = "to_low_rank",
) -> LowRankStates:
    """Convert AdamW into its low-rank form in place, before its first step. Groups and schedulers stay valid.

    Args:
        optimizer: AdamW, FusedAdamW, or Adam without coupled weight decay.
        matrices: Parameters to project: matrices, stacks [E, m, n] or filters. Parameters that the optimizer does not
            hold are ignored.
        subspace: ``StrongestDirections`` (GaLore) or ``RandomDirections`` (APOLLO) of ``optimizers.low_rank_adamw``.
        bits: 32, or 8 for moments with at least 4,096 elements (bitsandbytes).
        keep_32bit: Parameters whose moments keep 32 bits.
        trains_later: Frozen parameters that will train later. They count as trained.
        who: Name at the beginning of error messages.

    Raises:
        ConfigurationError: For another optimizer, or a setting that has no low-rank form.
        NoEffectError: For a rank that is not below the full rank of any target, or if the states would grow.
        ConflictError: For sharded parameters (DTensors).
    """
    rank = subspace.rank
    _check(optimizer, who)
    every = _held_by(optimizer)
    stepped = [p for p in every if p.requires_grad or p in trains_later]
    wanted = [p for p in matrices if p in every]  # also frozen ones, which may be unfrozen by hand later
    longest = max((_sides(p)[0] for p in wanted), default=rank)
    if wanted and rank >= longest:
        raise NoEffectError(f"{who}: rank must be below {longest}, the full rank of its largest target, got {rank}")
    projected = [p for p in wanted if rank < _sides(p)[0]]
    chosen = set(projected)
    moments = {p: p.numel() // _sides(p)[0] * rank if p in chosen else p.numel() for p in every}
    low_bit = {p for p in every if bits == 8 and p not in keep_32bit and moments[p] >= _SMALLEST_LOW}
    if bits == 8:
        check_installed(who, "bitsandbytes")
        silence_imports()  # the first step imports it
        if not low_bit:
            raise NoEffectError(
                f"{who}: bits must be 32, because no moments have {_SMALLEST_LOW:,} elements, got {bits}"
            )
    state_bytes = 0
    for p in stepped:
        count = moments[p]
        if p in low_bit:
            state_bytes += 2 * (count + 4 * -(-count // 256))
        else:
            state_bytes += 2 * count * p.element_size()
        if p in chosen:
            short, long = _sides(p)
            state_bytes += subspace.basis_bytes(p.numel() // (short * long), short, p.element_size())
    full_bytes = sum(2 * p.numel() * p.element_size() for p in stepped)
    total = sum(p.numel() for p in stepped)
    if state_bytes > full_bytes:
        raise NoEffectError(
            f"{who}: states of {type(optimizer).__name__} would take {state_bytes:,} bytes with their bases instead of "
            f"{full_bytes:,}: choose a smaller rank, or leave {who} out"
        )
    if projected or low_bit:
        fused = all(group.get("fused") for group in optimizer.param_groups)
        become(optimizer, LowRankAdamW, matrices=projected, subspace=subspace, low_bit=low_bit, fused=fused)
    return LowRankStates(tuple(projected), total, state_bytes, full_bytes)


def rewrite(
    optimizer: Optimizer, module: nn.Module, targets: str | list[str], subspace: Subspace, bits: int, who: str
) -> Report:
    """Convert an optimizer of a module with :func:`to_low_rank`. An optimizer that holds no target does not change.

    Args:
        optimizer: The optimizer.
        module: The module.
        targets: Layers whose weights are projected: a pattern, several patterns or ``all-linear``.
        subspace: The subspace.
        bits: 32 or 8.
        who: Name of the technique.

    Returns:
        Report of the conversion.

    Raises:
        ConfigurationError: If no layer matches, or none of the matching layers trains.
    """
    experts = find_experts(module, WITH_EXPERTS if targets == ALL_LINEAR else targets, who=who)
    names = [f"{name}.weight" for name, _ in find_targets(module, targets, who=who)]
    names += [f"{name}.{key}".lstrip(".") for name, _, keys in experts for key in keys]
    later = {module.get_parameter(name) for name in held(module)}
    # A parametrized layer computes its weight from parameters of other names, which keep full rank.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found = {parameters[name]: name for name in names if name in parameters}
    trained: dict[Tensor, str] = {p: name for p, name in found.items() if p.requires_grad or p in later}
    if not trained:
        raise ConfigurationError(
            f"{who}: none of the {len(found)} matrices that targets={targets!r} names trains: unfreeze them, name "
            f"others, or leave {who} out, because it saves nothing for frozen weights"
        )
    kind = type(optimizer).__name__
    ids = {id(p) for p in trained}
    if not any(p in trained for p in _held_by(optimizer)):
        elsewhere = bool(optimized_by(module) & ids)
        return Report(f"{kind}: holds none of the targets and does not change", modules=(), idle=elsewhere)
    tables: set[Tensor] = set()
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            tables.update(part.parameters(recurse=False))
    done = to_low_rank(optimizer, found, subspace, bits, keep_32bit=tables, trains_later=later, who=who)
    each = done.state_bytes / done.total
    projected = [p for p in done.projected if p in trained]
    count = sum(p in trained for p in _held_by(optimizer))
    saved = done.full_bytes - done.state_bytes
    summary = f"{kind}: {len(projected)} of {count} matrices in {subspace.rank} dimensions"
    if count > len(projected):
        summary += f", {count - len(projected)} of full rank stepped as before"
    return Report(
        f"{summary}; {each:.2f} instead of {done.full_bytes / done.total:.2f} bytes of state a parameter, "
        f"{format_bytes(saved)} saved",
        modules=tuple(trained[p].rpartition(".")[0] for p in projected),
        parameters=sum(p.numel() for p in projected),
        bytes_saved=saved,
        details={"state_bytes": done.state_bytes, "state_bytes_per_parameter": round(each, 4), "rank": subspace.rank},
    )


def _held_by(optimizer: Optimizer) -> dict[Tensor, None]:
    """Return the parameters of an optimizer in their order, as the keys of a dict."""
    return dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])


def _sides(p: Tensor) -> tuple[int, int]:
    """Return the shorter and the longer side of a matrix, or of the matrices in a stack."""
    m, n = as_matrices(p).shape[-2:]
    return min(m, n), max(m, n)


def _check(optimizer: Optimizer, who: str) -> None:
    kind = type(optimizer)
    is_adamw = vars(kind).get("low_bit_twin", ("", 0))[0] == "AdamW" or kind in (torch.optim.AdamW, torch.optim.Adam)
    if not is_adamw:
        raise ConfigurationError(f"{who}: {kind.__name__} has no low-rank form; allowed: AdamW, FusedAdamW, Adam")
    for group in optimizer.param_groups:
        if kind is torch.optim.Adam and group["weight_decay"] and not group["decoupled_weight_decay"]:
            raise ConfigurationError(
                f"{who}: Adam(weight_decay=...) adds decay to the gradient: use AdamW, as the paper"
            )
        for flag in ("amsgrad", "maximize"):
            if group.get(flag):
                raise ConfigurationError(f"{who}: {kind.__name__}({flag}=True) has no low-rank form; leave {flag} out")
        for p in filter(_cannot_be_stepped, group["params"]):
            raise ConfigurationError(
                f"{who}: weights of the class {type(p).__name__} lack operations of AdamW. Q-GaLore's INT8 weights are "
                "not supported: leave the weights in floats, or use precision: bf16-true with StochasticRounding"
            )
        if any(map(is_sharded, group["params"])):
            raise ConflictError(
                f"{who} projects whole gradients, but these parameters are sharded (DTensors): use "
                "strategy='ddp', or LowBitOptimizer instead"
            )


def _cannot_be_stepped(p: Tensor) -> bool:
    """Return whether a parameter that trains is a tensor of another library that cannot be multiplied in place."""
    if not p.requires_grad or not is_wrapper(p):
        return False
    try:
        p.detach().clone().mul_(1)
    except NotImplementedError:
        return True
    return False
