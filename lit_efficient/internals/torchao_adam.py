"""Base class of Adam with quantised states: ``torchao.optim.adam``. Checked with torchao 0.18.

Import this module inside functions only, because importing torchao takes seconds.
"""

from typing import Any

import torch
from torchao.optim.adam import _AdamBase, single_param_adam


class QuantisedAdam(_AdamBase):
    """``torchao.optim.adam._AdamBase`` with a method that steps one parameter."""

    def step_one(self, group: dict[str, Any], rate: Any, decay: float, *tensors: object) -> None:
        """Step one parameter.

        Args:
            group: Parameter group with ``betas`` and ``eps``.
            rate: Learning rate, a tensor.
            decay: Weight decay.
            *tensors: Parameter, gradient, number of the step and both moments. None may be a DTensor: the compiled
                step would not distinguish DTensors with quantised content.
        """
        compiled = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
        with torch._dynamo.utils.disable_cache_limit():
            compiled(*tensors, None, rate, *group["betas"], decay, group["eps"], self.is_adamw, False)
