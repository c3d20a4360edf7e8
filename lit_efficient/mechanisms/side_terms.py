"""Loss terms that modules compute during the forward pass, such as the balancing losses of routers.

A module with an attribute ``side_terms`` that is a list appends a vector to it in each call. The list exists only
during the forward pass, so a recomputation for the backward pass adds nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, ConflictError

_PATIENCE = 100  # steps without a call before an error: blocks may be skipped at random


class SideTerms:
    """Collector of the loss terms of all modules of one class.

    Args:
        who: Name of the technique, for errors.
        kind: Class of the modules.
        made: Function from what a module appended to the vector of its terms.
    """

    def __init__(self, who: str, kind: type, made: Callable[[Any], Tensor] = lambda term: term) -> None:
        self.who = who
        self.kind = kind
        self.made = made
        self._idle = 0  # consecutive steps in which no module was called

    @contextmanager
    def collecting(self, module: nn.Module) -> Iterator[None]:
        """Context in which the modules collect their terms. :meth:`mean` must be called inside."""
        parts = parts_of(module, self.kind)
        for part in parts:
            part.side_terms = []
        try:
            yield
        finally:
            for part in parts:
                del part.side_terms

    def mean(self, module: nn.Module) -> Tensor | None:
        """Return the mean of the collected vectors over the calls of each module, then over all modules called.

        The result is ``None`` if no module was called, because all their blocks were skipped at random, for example.

        Raises:
            ConfigurationError: If no module was called in 100 consecutive steps.
            ConflictError: If the terms have no gradient although the modules train. Reentrant activation checkpointing
                causes this.
        """
        called = [part for part in parts_of(module, self.kind) if part.side_terms]
        if not called:
            self._idle += 1
            if self._idle >= _PATIENCE:
                raise ConfigurationError(
                    f"{self.who}: {type(module).__name__}.training_step called none of the {self.kind.__name__} "
                    f"modules with gradients in {_PATIENCE} steps"
                )
            return None
        self._idle = 0
        means = []
        for part in called:
            terms = [self.made(term) for term in part.side_terms]
            means.append(torch.stack(terms).mean(0))
        mean = torch.stack(means).mean(0)
        if not mean.requires_grad and any(p.requires_grad for part in called for p in part.parameters()):
            raise ConflictError(
                f"{self.who}: its loss terms have no gradient, because reentrant activation checkpointing runs the "
                "forward pass without gradients. Use ActivationCheckpointing, or use_reentrant=False"
            )
        return mean


def parts_of(module: nn.Module, kind: type) -> list[Any]:
    """Return the modules of a class, in definition order."""
    return [part for part in module.modules() if isinstance(part, kind)]
