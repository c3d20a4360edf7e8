"""Errors for reads of gradients that are not in ``p.grad`` any more, which would otherwise be ignored silently."""

from collections.abc import Callable, Collection, Mapping
from inspect import currentframe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lit_efficient.errors import ConfigurationError
from lit_efficient.surgery import is_sharded

_READ: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]  # the function that reading ``p.grad`` calls


class LaterReads(TorchFunctionMode):
    """Mode that raises an error if ``p.grad`` of certain parameters is read between :meth:`start` and :meth:`stop`.

    Args:
        who: Name at the beginning of the error message.
        state: Clause for the error message that says where the gradient is: "... is read after ..., when {state}".
    """

    def __init__(self, who: str, state: str) -> None:
        super().__init__()
        self.who = who
        self.state = state
        self.gone: Collection[Tensor] = ()
        self.names: Mapping[Tensor, str] = {}
        self._active = False

    def start(self, gone: Collection[Tensor], names: Mapping[Tensor, str]) -> None:
        """Forbid reads of the gradients of the parameters ``gone``. ``names`` are used in the error message."""
        self.gone = gone
        self.names = names
        if not self._active:
            self._active = True
            self.__enter__()

    def stop(self) -> None:
        """Allow all reads again."""
        if self._active:
            self._active = False
            self.__exit__(None, None, None)

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if function == _READ and args[0] in self.gone:
            code = currentframe().f_back.f_code  # type: ignore[union-attr]  # exists in CPython
            raise ConfigurationError(
                f"{self.who}: {code.co_qualname} ({Path(code.co_filename).name}, line {code.co_firstlineno}) reads the "
                f"gradient of {self.names.get(args[0], 'a parameter')!r} after the backward pass, when {self.state}. "
                "Leave one of the two out, or read it in a hook of the parameter (register_hook)"
            )
        return function(*args, **(kwargs or {}))


def kept_by(zero_grad: Callable[[], object], gone: Collection[Tensor]) -> set[Tensor]:
    """Call a module's own ``zero_grad``, and return the parameters whose gradients it does not clear.

    Args:
        zero_grad: The function. Each parameter gets a temporary gradient of ones, which takes no memory.
        gone: Parameters whose gradients are not in ``p.grad``.
    """
    asked = [p for p in gone if p.grad is None and not is_sharded(p)]
    for p in asked:
        p.grad = p.detach().new_ones(()).expand(p.shape)
    try:
        zero_grad()
        return {p for p in asked if p.grad is not None and p.grad.any()}
    finally:
        for p in asked:
            p.grad = None
