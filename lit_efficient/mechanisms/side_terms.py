"""Terms of the loss that modules compute on the way, such as routers: collected in a step, averaged over the calls.

A module with an attribute ``side_terms`` appends a vector to it in each call, while it is a list. What is recomputed
for the backward pass comes later, and is not collected again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, ConflictError

_PATIENCE = 100  # steps: blocks may be skipped at random


class SideTerms:
    """The terms of all modules of a class; ``made`` makes the vector of what was appended, if it is not that."""

    def __init__(self, who: str, kind: type, made: Callable[[Any], Tensor] = lambda term: term) -> None:
        self.who, self.kind, self.made = who, kind, made
        self._idle = 0  # steps in a row in which none was called

    @contextmanager
    def collecting(self, module: nn.Module) -> Iterator[None]:
        """Let the modules append to lists of their own, which are gone afterwards."""
        parts = parts_of(module, self.kind)
        for part in parts:
            part.side_terms = []
        try:
            yield
        finally:
            for part in parts:
                del part.side_terms

    def mean(self, module: nn.Module) -> Tensor | None:
        """The mean of the collected vectors, over the calls of each module, then over all that were called.

        ``None`` where none was, as if all their blocks were skipped at random.

        Raises:
            ConfigurationError: If none was called in a hundred steps.
            ConflictError: If they have no gradient though what made them trains, as under reentrant checkpointing.
        """
        parts = [part for part in parts_of(module, self.kind) if part.side_terms]
        self._idle = 0 if parts else self._idle + 1
        if self._idle >= _PATIENCE:
            raise ConfigurationError(
                f"{self.who}: in {_PATIENCE} steps {type(module).__name__}.training_step ran none of its modules with "
                "gradients"
            )
        if not parts:
            return None
        terms = torch.stack([torch.stack([*map(self.made, part.side_terms)]).mean(0) for part in parts]).mean(0)
        if not terms.requires_grad and any(p.requires_grad for part in parts for p in part.parameters()):
            raise ConflictError(
                f"{self.who}: its losses have no gradient: activation checkpointing that is reentrant runs the forward "
                "without one; use ActivationCheckpointing, or use_reentrant=False"
            )
        return terms


def parts_of(module: nn.Module, kind: type) -> list[Any]:
    """The modules of a class, in definition order."""
    return [part for part in module.modules() if isinstance(part, kind)]
