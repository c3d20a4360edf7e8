import torch
from torch import nn

from lit_efficient.internals import torch_tensors
from tests.internals.leaning import leans_on


@leans_on("torch", "Tensor._post_accumulate_grad_hooks", "torch_tensors")
def test_hooks_after_accumulation_are_seen():
    parameter = nn.Parameter(torch.ones(1))
    assert not torch_tensors.hooks_after_accumulation(parameter)
    handle = parameter.register_post_accumulate_grad_hook(print)
    assert torch_tensors.hooks_after_accumulation(parameter)
    handle.remove()
    assert not torch_tensors.hooks_after_accumulation(parameter)
