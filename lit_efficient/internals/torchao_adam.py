"""torchao's Adam for quantised states of one's own making. Checked with torchao 0.18.

Import this module inside functions only: torchao takes seconds.
"""

from typing import Any

from torch import Tensor
from torchao.optim.adam import _AdamBase


class QuantisedAdam(_AdamBase):
    """``torchao.optim.adam._AdamBase`` that asks ``new_state`` for a state, there ``_new_buffer``."""

    def new_state(self, p: Tensor, signed: bool) -> Any:
        """Zeros of ``p``'s shape, for the first moment if ``signed``, else for the second."""
        raise NotImplementedError

    def _new_buffer(self, p: Tensor, signed: bool) -> Any:
        return self.new_state(p, signed)
