"""Gradients that are not where their readers look: whoever reads one would take it for none, and change nothing."""

from collections.abc import Callable, Collection, Mapping
from inspect import currentframe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lit_efficient.errors import ConfigurationError
from lit_efficient.surgery import is_sharded

_READ: Any = torch.Tensor.grad.__get__  # type: ignore[union-attr]  # what reading ``p.grad`` calls


class LaterReads(TorchFunctionMode):
    """Refuses to read ``p.grad`` of parameters whose gradients are gone, from :meth:`start` to :meth:`stop`.

    Args:
        who: Name for errors.
        where: What has become of the gradients, to be read after "the gradient of 'x' after the backward pass, when".
    """

    def __init__(self, who: str, where: str) -> None:
        super().__init__()
        self.who, self.where = who, where
        self.gone: Collection[Tensor] = ()
        self.names: Mapping[Tensor, str] = {}
        self._active = False

    def start(self, gone: Collection[Tensor], names: Mapping[Tensor, str]) -> None:
        """Refuse to read those of the parameters ``gone``; ``names`` are for the error."""
        self.gone, self.names = gone, names
        if not self._active:
            self._active = True
            self.__enter__()

    def stop(self) -> None:
        """Let everybody read again."""
        if self._active:
            self._active = False
            self.__exit__(None, None, None)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == _READ and args[0] in self.gone:
            code = currentframe().f_back.f_code  # type: ignore[union-attr]  # CPython's has one
            raise ConfigurationError(
                f"{self.who}: {code.co_qualname} ({Path(code.co_filename).name}, line {code.co_firstlineno}) reads the "
                f"gradient of {self.names.get(args[0], 'a parameter')!r} after the backward pass, when {self.where}. "
                "Leave one of the two out, or read it in a hook of the parameter (register_hook)"
            )
        return function(*args, **(kwargs or {}))


def kept_by(zero_grad: Callable[[], Any], gone: Collection[Tensor]) -> set[Tensor]:
    """Of parameters whose gradients are gone those that a module's own ``zero_grad``, which is called, leaves theirs.

    Each is given a gradient of ones meanwhile, which takes no memory.
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
