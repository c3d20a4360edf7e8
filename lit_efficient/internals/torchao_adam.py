"""torchao's Adam for quantised states of one's own making. Checked with torchao 0.18.

Import this module inside functions only: torchao takes seconds.
"""

from typing import Any

import torch
from torchao.optim.adam import _AdamBase, single_param_adam


class QuantisedAdam(_AdamBase):
    """``torchao.optim.adam._AdamBase`` without its loop over parameters."""

    def step_one(self, group: dict[str, Any], rate: Any, decay: float, *tensors: Any) -> None:
        """Step a parameter by its gradient, the number of the step and two moments: tensors, none of them a DTensor.

        torch compiles a step for each kind of arguments, and of two DTensors does not see that one holds codes.
        """
        compiled = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
        with torch._dynamo.utils.disable_cache_limit():
            compiled(*tensors, None, rate, *group["betas"], decay, group["eps"], self.is_adamw, False)
