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


@leans_on("torch", "Tensor._post_accumulate_grad_hooks and _backward_hooks", "torch_tensors")
def test_hooks_of_a_gradient_are_seen():
    parameter = nn.Parameter(torch.ones(1))
    for register, seen in (
        (parameter.register_post_accumulate_grad_hook, torch_tensors.hooks_after_accumulation),
        (parameter.register_hook, torch_tensors.gradient_hooks),
    ):
        assert not seen(parameter)
        handle = register(print)
        assert seen(parameter)
        handle.remove()
        assert not seen(parameter)
