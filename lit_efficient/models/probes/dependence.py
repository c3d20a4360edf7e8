"""Tokens on which the logits of a language model depend, whatever the size of its weights.

    g[s] = d/de[s] of the sum over t of c[t] . logits[t]    e[s]: what token s looks up in tables; c[t]: fixed numbers

If no path leads from token s to the logits t, g[s] is exactly zero, because masks multiply by zero. A small weight on
the path makes g[s] small, but not zero. The difference of two runs cannot tell a small weight from rounding. Gradients
do not show discrete choices, such as a selection of tokens. Two runs do.

Costs: one forward and one backward pass, with the activations of the given rows and no gradients of weights
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lit_efficient.internals.torch_dispatch import no_dispatch_modes

_MOST = 1 << 27  # numbers in the gradients that are compared at the same time


@dataclass(frozen=True)
class Lookups:
    """Lookups of tokens in tables during one call of a network.

    Args:
        indices: Rows of trained tables that each token looks up, ``[B or 1, T, n]``, one tensor a lookup. Fixed tables
            hold rotations, whose differences matter alone.
        gradients: Largest absolute gradient for what each token looked up, ``[B, T]``; None if a gradient is not
            finite, or if the logits depend on no lookup.
    """

    indices: list[Tensor]
    gradients: Tensor | None


class _Recording(TorchFunctionMode):
    """Mode that records lookups, and makes their results leaves of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor, bool]] = []  # indices, results, and whether the table is trained

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is not F.embedding or not isinstance(result, Tensor):
            return result
        leaf = result.detach().requires_grad_()
        given = {**dict(zip(("input", "weight"), args)), **(kwargs or {})}
        self.found.append((given["input"], leaf, given["weight"].requires_grad))
        return leaf.clone()  # networks may scale what they looked up in place


def lookups(call: Callable[[], Tensor], shape: tuple[int, ...], chosen: Tensor | None = None) -> Lookups:
    """Return the lookups of a call, with the gradients of the logits of some tokens.

    Args:
        call: Function that calls the network and returns logits, of all tokens or of some.
        shape: Rows and tokens of the call, ``(B, T)``.
        chosen: True for the tokens whose logits are differentiated, in the shape of the logits without their last
            axis. None: all logits.
    """
    batch, length = shape
    with torch.enable_grad(), _Recording() as recording:
        logits = call()
        found = list(recording.found)
        leaves = [leaf for index, leaf, _ in found if index.numel() % (batch * length) == 0]
        gradients: tuple[Tensor | None, ...] = ()
        if leaves and logits.requires_grad:
            factors = _factors(logits)
            if chosen is not None:
                factors = factors * chosen[..., None]
            gradients = torch.autograd.grad((logits.float() * factors).sum(), leaves, allow_unused=True)
    indices = []
    for index, _, trained in found:
        if not trained:
            continue
        if index.numel() % (batch * length) == 0:
            indices.append(index.reshape(batch, length, -1))
        elif index.shape[-1:] == (length,) and index.numel() == length:  # positions, for all rows
            indices.append(index.reshape(1, length, 1))
    sizes = [_whole(g).detach().float().abs().reshape(batch, length, -1).amax(-1) for g in gradients if g is not None]
    if not sizes:
        return Lookups(indices, None)
    largest = torch.stack(sizes).amax(0)
    usable = bool(largest.isfinite().all()) and bool(largest.any())
    return Lookups(indices, largest if usable else None)


def gradient_difference(
    first: Callable[[], Tensor], second: Callable[[], Tensor], weights: Sequence[Tensor], least: float = 1e-4
) -> float:
    """Return the largest difference between the gradients of two calls for a weight, relative to its gradient.

    Args:
        first: Function that returns logits.
        second: Function that returns logits of the same shape.
        weights: Weights whose gradients are compared. Not all are held at the same time.
        least: Share of the largest gradient of all weights below which a gradient may be rounding. It is compared with
            this share.
    """
    sums = []
    with torch.enable_grad():
        for call in (first, second):
            logits = call().float()
            sums.append((logits * _factors(logits)).sum())
        if not all(value.requires_grad for value in sums):
            return 0.0
        sizes = []
        differences = []
        for part in _parts(weights):
            gradients = [
                torch.autograd.grad(value, part, retain_graph=True, allow_unused=True, materialize_grads=True)
                for value in sums
            ]
            for own, other in zip(*gradients, strict=True):
                sizes.append(_largest(torch.stack((own, other))))
                differences.append(_largest(own - other))
    if not sizes:
        return 0.0
    size = torch.stack(sizes)
    found = torch.stack(differences) / size.clamp(min=least * float(size.max()))
    return float(found.nan_to_num(0.0).max())  # zero or not finite throughout


def lookup_difference(packed: Lookups, alone: Lookups, share: float = 1.0) -> float:
    """Return the difference between the gradients of a document's tokens in a row and without the row's start.

    It is relative to the gradient of the token. Gradients below 1e-6 of the largest one may be rounding.

    Args:
        packed: Lookups of a row that ends with the document.
        alone: Lookups of the document.
        share: Share of the tokens whose difference is at most the returned one; 1: the largest difference.
    """
    if packed.gradients is None or alone.gradients is None:
        return 0.0
    own = packed.gradients[:, -alone.gradients.shape[1] :]
    size = torch.maximum(own, alone.gradients)
    differences = (own - alone.gradients).abs() / size.clamp(min=1e-6 * float(size.max()))
    # Without dispatch modes, because ChoicesByPlace changes the order into which quantile sorts.
    with no_dispatch_modes():
        return float(differences.quantile(share))


def _parts(weights: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the weights in lists of limited size."""
    part: list[Tensor] = []
    for weight in weights:
        if part and sum(p.numel() for p in part) + weight.numel() > _MOST:
            yield part
            part = []
        part.append(weight)
    if part:
        yield part


def _factors(logits: Tensor) -> Tensor:
    """Return numbers of both signs that do not repeat, so that sums over tokens or the vocabulary do not cancel."""
    return torch.arange(logits.numel(), device=logits.device).mul(2.4).sin().view_as(logits)


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value, of sharded tensors that in the shard of this process."""
    local: Tensor = tensor
    if hasattr(tensor, "to_local"):
        local = tensor.to_local()
    return local.detach().abs().amax().float()


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor
    if hasattr(tensor, "full_tensor"):
        whole = tensor.full_tensor()
    return whole
