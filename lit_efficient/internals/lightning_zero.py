"""Lightning's DeepSpeedStrategy, which shows the optimizer before DeepSpeed takes it.

By a private method: ``_init_optimizers``. Checked with lightning 2.6.6.
"""

from typing import Any

from lightning.pytorch.strategies import DeepSpeedStrategy


class ZeroBase(DeepSpeedStrategy):
    """Calls ``check_optimizer``."""

    def _init_optimizers(self) -> Any:
        found = super()._init_optimizers()
        self.check_optimizer(found[0])
        return found
