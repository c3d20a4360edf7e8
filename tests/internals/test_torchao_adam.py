import pytest
import torch

from tests.internals.leaning import leans_on


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own compiler
@leans_on("torchao", "torchao.optim.adam._AdamBase and single_param_adam", "torchao_adam")
@leans_on("torch", "torch._dynamo.utils.disable_cache_limit", "torchao_adam")
def test_steps_of_one_parameter_are_those_of_torch_s_adamw():
    from lit_efficient.internals.torchao_adam import QuantisedAdam

    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.arange(4.0)) for _ in range(2))
    common = {"block_size": 4, "bf16_stochastic_round": False, "is_adamw": True}
    plain = QuantisedAdam([ours], 0.1, (0.9, 0.99), 1e-8, 0.01, amsgrad=False, **common)
    adamw = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.99), weight_decay=0.01)
    moments = torch.zeros(4), torch.zeros(4)
    for step in range(1, 4):
        theirs.grad = torch.randn(4)
        done = torch.tensor(float(step))
        plain.step_one(plain.param_groups[0], torch.tensor(0.1), 0.01, ours.detach(), theirs.grad, done, *moments)
        adamw.step()
    assert torch.allclose(ours, theirs, atol=1e-6)
    assert not torch.allclose(ours, torch.arange(4.0), atol=0.05)
