"""What every ``step`` of an optimizer begins with, and how one is put around that of a class."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adam import adam

from lit_efficient.internals.torch_optimizers import mark_counted, mark_stepped


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Run the closure, which computes gradients, inside a ``step`` that runs without; ``None`` without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradient(group: dict[str, Any]) -> list[Tensor]:
    """The tensors of a group that a step moves."""
    return [p for p in group["params"] if p.grad is not None]


def adamw(
    optimizer: Optimizer, group: dict[str, Any], parameters: list[Tensor], decays: bool = True, fused: bool = False
) -> None:
    """Step some parameters of a group by torch's AdamW."""
    for p in parameters:
        if not optimizer.state[p]:
            steps = torch.zeros((), device=p.device if fused else "cpu", dtype=torch.float32)
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.state[p] |= {"step": steps, **moments}
    states = [optimizer.state[p] for p in parameters]
    if parameters:
        adam(
            parameters,
            [p.grad for p in parameters],  # type: ignore[misc]
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=fused or None,
            has_complex=any(map(torch.is_complex, parameters)),
            decoupled_weight_decay=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"] if decays else 0.0,
            eps=group["eps"],
            maximize=False,
        )


def pieces(parameters: list[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """The parameters in lists of at most so many bytes, at least one in each."""
    piece: list[Tensor] = []
    size = 0
    for p in parameters:
        if piece and size + p.nbytes > piece_bytes:
            yield piece
            piece, size = [], 0
        piece.append(p)
        size += p.nbytes
    if piece:
        yield piece


def unhooked(kind: type[Optimizer]) -> Callable[..., Any]:
    """The step of a class without the hooks, which are in the function that torch puts around each class's step."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def with_step(
    kind: type[Optimizer], mark: type[Optimizer], step: Callable[..., Any], **methods: Any
) -> type[Optimizer]:
    """A class that derives from ``kind`` and ``mark``, with the name of ``kind`` and this step, hooks around it."""
    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    return type(kind.__name__, (kind, mark), {"step": hooked, "__module__": kind.__module__, **methods})


def change_class(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Make ``optimizer`` one of ``kind``, which derives from its class and has a step of its own.

    A scheduler may have set a counted step on the instance, which calls the old class's: the new one goes inside.
    """
    optimizer.__class__ = kind
    if "step" in optimizer.__dict__:
        optimizer.__dict__["step"] = functools.partial(_counted_step, optimizer)
        mark_counted(optimizer.__dict__["step"])


def _counted_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    mark_stepped(optimizer)
    return type(optimizer).step(optimizer, *args, **kwargs)
