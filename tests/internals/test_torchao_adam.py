import pytest
import torch
from torch import nn

from tests.internals.leaning import leans_on


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own compiler
@leans_on("torchao", "torchao.optim.adam._AdamBase and _new_buffer", "torchao_adam")
def test_states_of_one_s_own_making_step_as_torch_s_adamw():
    from lit_efficient.internals.torchao_adam import QuantisedAdam

    class Plain(QuantisedAdam):
        asked = ()

        def new_state(self, p, signed):
            self.asked = (*self.asked, signed)
            return torch.zeros_like(p)

    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(4)), nn.Parameter(torch.zeros(4))
    theirs.data.copy_(ours.data)
    common = {"block_size": 4, "bf16_stochastic_round": False, "is_adamw": True}
    plain = Plain([ours], 0.1, (0.9, 0.99), 1e-8, 0.01, amsgrad=False, **common)
    adamw = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.99), weight_decay=0.01)
    for _ in range(3):
        gradient = torch.randn(4)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        plain.step()
        adamw.step()
    assert plain.asked == (True, False)
    assert torch.allclose(ours, theirs, atol=1e-6)
