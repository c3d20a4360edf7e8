import warnings

import pytest
import torch
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, SequentialLR

from lit_efficient.internals import torch_optimizers
from tests.internals.leaning import leans_on


def optimizer():
    return SGD(nn.Linear(1, 1).parameters(), lr=0.5)


@leans_on("torch", "_optimizer_step_pre_hooks and its kin", "torch_optimizers")
def test_all_hooks_that_can_be_registered_are_named():
    sgd = optimizer()
    registers = [name for name in dir(Optimizer) if name.startswith("register_")]
    for name in registers:
        getattr(sgd, name)(print)
    holders = {name for name, value in vars(sgd).items() if name.endswith("_hooks") and print in value.values()}
    assert holders == {*torch_optimizers.HOOKS}
    assert len(holders) == len(registers)


@leans_on("torch", "_last_lr", "torch_optimizers")
def test_a_scheduler_keeps_its_last_rates_as_attribute_and_in_its_state():
    scheduler = LambdaLR(optimizer(), lambda _: 0.5)
    assert getattr(scheduler, torch_optimizers.LAST_RATES) == [0.25]
    assert scheduler.state_dict()[torch_optimizers.LAST_RATES] == [0.25]


@leans_on("torch", "_schedulers", "torch_optimizers")
def test_schedulers_of_schedulers_are_found():
    sgd = optimizer()
    parts = [LambdaLR(sgd, lambda _: 1.0) for _ in range(2)]
    for outer in (ChainedScheduler(parts, sgd), SequentialLR(sgd, parts, [1])):
        assert list(vars(outer)[torch_optimizers.INNER_SCHEDULERS]) == parts


@leans_on("torch", "torch.utils._foreach_utils._get_fused_kernels_supported_devices", "torch_optimizers")
def test_the_devices_with_fused_kernels_are_known():
    assert {"cpu", "cuda"} <= {*torch_optimizers.fused_devices()}
    AdamW(nn.Linear(1, 1).parameters(), fused=True)


@leans_on("torch", "_step_supports_amp_scaling", "torch_optimizers")
def test_a_fused_optimizer_that_leaves_unscaling_may_be_clipped():
    adamw = AdamW(nn.Linear(1, 1).parameters(), fused=True)
    assert _optimizer_handles_unscaling(adamw)
    assert torch_optimizers.unscales(adamw)
    torch_optimizers.leave_unscaling(adamw)
    assert not _optimizer_handles_unscaling(adamw)
    assert not torch_optimizers.unscales(adamw)


@leans_on("torch", "_wrapped_by_lr_sched", "torch_optimizers")
def test_a_scheduler_marks_the_step_that_it_counts_and_believes_the_mark():
    sgd = optimizer()
    assert not torch_optimizers.is_counted(sgd.step)
    LambdaLR(sgd, lambda _: 1.0)
    assert torch_optimizers.is_counted(sgd.step)

    ours = optimizer()
    ours.step = step = lambda: None
    torch_optimizers.mark_counted(step)
    LambdaLR(ours, lambda _: 1.0)
    assert ours.step is step  # not wrapped once more


@leans_on("torch", "_opt_called", "torch_optimizers")
def test_a_scheduler_complains_unless_the_optimizer_has_stepped():
    def second_step(mark):
        sgd = optimizer()
        scheduler = LambdaLR(sgd, lambda _: 1.0)
        if mark:
            torch_optimizers.mark_stepped(sgd)
        scheduler.step()

    with pytest.warns(UserWarning, match="before `optimizer.step"):
        second_step(mark=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second_step(mark=True)


@leans_on("torch", "_optimizer_step_pre_hooks and _optimizer_step_post_hooks", "torch_optimizers")
def test_a_step_without_hooks_leaves_them_registered():
    sgd, seen = optimizer(), []
    sgd.register_step_pre_hook(lambda *_: seen.append("before"))
    sgd.register_step_post_hook(lambda *_: seen.append("after"))
    with torch_optimizers.without_step_hooks(sgd):
        sgd.step()
    assert not seen
    sgd.step()
    assert seen == ["before", "after"]


@leans_on("torch", "torch.optim._muon._zeropower_via_newtonschulz", "torch_optimizers")
@leans_on("torch", "torch.optim._muon._adjust_lr", "torch_optimizers")
def test_the_step_of_muon_is_made_of_these_two():
    torch.manual_seed(0)
    theirs = nn.Linear(4, 6, bias=False)
    ours = theirs.weight.detach().clone()
    theirs.weight.grad = gradient = torch.randn_like(ours)
    rule = "match_rms_adamw"
    torch.optim.Muon(theirs.parameters(), lr=0.1, weight_decay=0.0, momentum=0.9, adjust_lr_fn=rule).step()
    buffer = gradient * (1 - 0.9)
    update = torch_optimizers.orthogonalised(gradient.lerp(buffer, 0.9), (3.4445, -4.775, 2.0315), 5, 1e-7)
    rate = torch_optimizers.muon_rate(0.1, rule, ours.shape)
    torch.testing.assert_close(ours.add(update, alpha=-rate), theirs.weight.detach())


def pair():
    return [torch.tensor([1.0, -2.0]), torch.tensor([[3.0]])]


def same(tensors, numbers):
    assert [tensor.flatten().tolist() for tensor in tensors] == numbers


@leans_on("torch", "torch._foreach_add_", "torch_optimizers")
def test_add():
    tensors = pair()
    torch_optimizers.foreach_add_(tensors, pair(), alpha=2)
    same(tensors, [[3.0, -6.0], [9.0]])


@leans_on("torch", "torch._foreach_copy_", "torch_optimizers")
def test_copy_into_another_format():
    tensors = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1, 1)]
    torch_optimizers.foreach_copy_(tensors, pair())
    same(tensors, [[1.0, -2.0], [3.0]])


@leans_on("torch", "torch._foreach_lerp", "torch_optimizers")
def test_lerp_anew():
    same(torch_optimizers.foreach_lerp(pair(), [torch.zeros(2), torch.zeros(1, 1)], weight=0.5), [[0.5, -1.0], [1.5]])


@leans_on("torch", "torch._foreach_lerp_", "torch_optimizers")
def test_lerp_in_place():
    tensors = pair()
    torch_optimizers.foreach_lerp_(tensors, [torch.zeros(2), torch.zeros(1, 1)], 0.5)
    same(tensors, [[0.5, -1.0], [1.5]])


@leans_on("torch", "torch._foreach_mul_", "torch_optimizers")
def test_multiply():
    tensors = pair()
    torch_optimizers.foreach_mul_(tensors, 2.0)
    same(tensors, [[2.0, -4.0], [6.0]])


@leans_on("torch", "torch._foreach_sign_", "torch_optimizers")
def test_sign():
    tensors = pair()
    torch_optimizers.foreach_sign_(tensors)
    same(tensors, [[1.0, -1.0], [1.0]])


@leans_on("torch", "torch._foreach_addcmul_", "torch_optimizers")
def test_add_a_product():
    tensors = pair()
    torch_optimizers.foreach_addcmul_(tensors, pair(), pair(), value=0.5)
    same(tensors, [[1.5, 0.0], [7.5]])


@leans_on("torch", "torch._foreach_div", "torch_optimizers")
def test_divide_anew():
    same(torch_optimizers.foreach_div(pair(), pair()), [[1.0, 1.0], [1.0]])


@leans_on("torch", "torch._foreach_div_", "torch_optimizers")
def test_divide_in_place():
    tensors = pair()
    torch_optimizers.foreach_div_(tensors, 2.0)
    same(tensors, [[0.5, -1.0], [1.5]])


@leans_on("torch", "torch._foreach_sqrt", "torch_optimizers")
def test_square_root():
    same(torch_optimizers.foreach_sqrt([torch.tensor([4.0, 0.0]), torch.tensor([9.0])]), [[2.0, 0.0], [3.0]])


@leans_on("torch", "torch._foreach_norm", "torch_optimizers")
def test_norms_in_another_format():
    norms = torch_optimizers.foreach_norm([torch.tensor([300.0, 400.0], dtype=torch.float16)], 2.0, dtype=torch.float32)
    assert [(norm.item(), norm.dtype) for norm in norms] == [(500.0, torch.float32)]
