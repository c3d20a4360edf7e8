import torch
from torch import nn

from lit_efficient.internals import torch_tensors
from tests.internals.leaning import leans_on


@leans_on("torch", "Tensor._version and _base", "torch_tensors")
def test_writes_are_counted_and_what_is_viewed_is_known():
    parameter = nn.Parameter(torch.ones(2, 2))
    before = torch_tensors.version(parameter)
    with torch.no_grad():
        parameter.T.add_(1)
    assert torch_tensors.version(parameter.detach()) == before + 1
    parameter.data = torch.zeros(2, 2)
    assert torch_tensors.version(parameter) == before + 1
    assert torch_tensors.viewed(parameter.T) is parameter
    assert torch_tensors.viewed(parameter) is None


@leans_on("torch", "Tensor._post_accumulate_grad_hooks", "torch_tensors")
def test_hooks_after_accumulation_are_seen():
    parameter = nn.Parameter(torch.ones(1))
    assert not torch_tensors.hooks_after_accumulation(parameter)
    handle = parameter.register_post_accumulate_grad_hook(print)
    assert torch_tensors.hooks_after_accumulation(parameter)
    handle.remove()
    assert not torch_tensors.hooks_after_accumulation(parameter)
