import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lit_efficient.internals.torch_dispatch import (
    HigherOrderOperator,
    changes_arguments,
    compared_axis,
    fakes_are_made,
    has_values,
    operator_of,
    recomputes,
    running_node,
    truncated_draws,
)
from lit_efficient.internals.torch_fake import FakeTensorMode
from tests.internals.leaning import leans_on


@leans_on("torch", "torch.utils._python_dispatch", "torch_dispatch")
def test_a_mode_sees_every_operator_the_backward_pass_included():
    from lit_efficient.internals.torch_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

    class Names(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen = (*self.seen, str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Names() as names:
        x.exp().sum().backward()
    assert {"aten.exp.default", "aten.sum.default", "aten.mul.Tensor"} <= {*names.seen}
    assert not is_traceable_wrapper_subclass(x)
    assert hasattr(DTensor, "__tensor_flatten__")  # by which such a subclass is known


@leans_on("torch", "torch.utils._python_dispatch._disable_current_modes", "torch_dispatch")
def test_modes_can_be_left_out():
    from lit_efficient.internals.torch_dispatch import TorchDispatchMode, no_dispatch_modes

    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise RuntimeError("seen")

    with Refuses(), no_dispatch_modes():
        assert torch.ones(2).sum() == 2


@leans_on("torch", "UntypedStorage._cdata", "torch_dispatch")
def test_views_share_a_storage_and_copies_do_not():
    from lit_efficient.internals.torch_dispatch import storage_id

    x = torch.ones(4)
    assert storage_id(x.untyped_storage()) == storage_id(x[1:].untyped_storage()) == storage_id(x.untyped_storage())
    other = x.clone()
    assert storage_id(x.untyped_storage()) != storage_id(other.untyped_storage())


@leans_on("torch", "torch._C._autograd._top_saved_tensors_default_hooks", "torch_dispatch")
def test_the_hooks_in_force_are_those_of_the_innermost_context():
    from lit_efficient.internals.torch_dispatch import saving_hooks

    def pack(tensor):
        return tensor

    def unpack(packed):
        return packed

    assert saving_hooks() is None
    with saved_tensors_hooks(lambda t: t, lambda t: t), saved_tensors_hooks(pack, unpack):
        assert saving_hooks() == (pack, unpack)
    assert saving_hooks() is None


@leans_on("torch", "torch._C._current_graph_task_id", "torch_dispatch")
def test_a_backward_pass_is_noticed_from_within():
    from lit_efficient.internals.torch_dispatch import backward_runs

    seen = [backward_runs()]
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(backward_runs()))
    x.sum().backward()
    assert [*seen, backward_runs()] == [False, True, False]


@leans_on("torch", "torch._C._current_autograd_node", "torch_dispatch")
@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_anew_is_told_from_a_backward_pass(reentrant):
    said = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            said.append(recomputes(None))
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            said.append(recomputes(None))
            return gradient * 2

    x = torch.ones(3, requires_grad=True)
    checkpoint(lambda x: Own.apply(x.sin()).cos(), x, use_reentrant=reentrant).sum().backward()
    assert said == [False, True, False]
    y = Own.apply(x).square().sum()
    torch.autograd.grad(y, x, create_graph=True)
    assert said[3:] == [False, False]


@leans_on("torch", "torch._C._current_autograd_node and Node._sequence_nr", "torch_dispatch")
def test_the_node_that_runs_has_a_name_and_a_number_of_its_own():
    seen = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(running_node())
            return gradient * 2

    assert running_node() is None
    x = torch.ones(3, requires_grad=True)
    Own.apply(Own.apply(x)).sum().backward()
    assert [name for name, _ in seen] == ["OwnBackward", "OwnBackward"]
    assert seen[0][1] > seen[1][1]  # the last one of the forward pass runs first


@leans_on("torch", "torch._ops.HigherOrderOperator", "torch_dispatch")
def test_operators_of_a_higher_order_are_told():
    assert isinstance(torch.ops.higher_order.cond, HigherOrderOperator)
    assert not isinstance(torch.ops.aten.mm.default, HigherOrderOperator)


@leans_on("torch", "OpOverload._overloadpacket and _schema", "torch_dispatch")
def test_an_operator_has_a_packet_and_a_name():
    assert operator_of(torch.ops.aten.mm.default) == (torch.ops.aten.mm, "aten::mm")
    assert operator_of(torch.ops.higher_order.cond) == (torch.ops.higher_order.cond, "cond")


@leans_on("torch", "torch.autograd.Variable._execution_engine.queue_callback", "torch_dispatch")
def test_a_function_is_called_when_the_backward_pass_is_over():
    from lit_efficient.internals.torch_dispatch import after_backward

    done = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: after_backward(lambda: done.append(x.grad is not None)))
    x.exp().sum().backward()
    assert done == [True]


@leans_on("torch", "OpOverload._schema.is_mutable", "torch_dispatch")
def test_operators_that_write_into_their_arguments_are_known():
    assert changes_arguments(torch.ops.aten.normal_.default)
    assert not changes_arguments(torch.ops.aten.add.Tensor)
    assert changes_arguments(torch.nn.init.normal_)  # a function may


@leans_on("torch", "torch._ops.OpOverload._schema", "torch_dispatch")
def test_the_axis_of_a_comparison_is_known():
    x = torch.ones(2, 3)
    assert compared_axis(torch.ops.aten.topk.default, (x, 2), {}) == -1
    assert compared_axis(torch.ops.aten.topk.default, (x, 2, 0), {}) == 0
    assert compared_axis(torch.ops.aten.sort.stable, (x,), {"dim": 1}) == 1
    assert compared_axis(torch.ops.aten.argmax.default, (x,), {}) is None
    assert compared_axis(torch.ops.aten.mm.default, (x, x), {}) is None
    assert compared_axis(torch.ops.higher_order.cond, (), {}) is None


@leans_on("torch", "torch.nn.init._no_grad_trunc_normal_", "torch_dispatch")
def test_truncated_draws_are_done_otherwise():
    asked = []
    with truncated_draws(
        lambda draw: lambda tensor, *args, **kwargs: asked.append(args) or draw(tensor, *args, **kwargs)
    ):
        torch.nn.init.trunc_normal_(torch.empty(2, 2), std=0.5)
    assert [args[1] for args in asked] == [0.5]
    torch.nn.init.trunc_normal_(torch.empty(2, 2))
    assert len(asked) == 1


@leans_on("torch", "torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey", "torch_dispatch")
def test_fakes_are_known_while_they_are_made():
    assert not fakes_are_made()
    with FakeTensorMode():
        assert fakes_are_made()


@leans_on("torch", "torch._subclasses.fake_tensor.FakeTensor", "torch_dispatch")
def test_fakes_and_tensors_on_meta_have_no_values():
    with FakeTensorMode():
        assert not has_values(torch.ones(2))
    assert not has_values(torch.ones(2, device="meta"))
    assert has_values(torch.ones(2))
    assert not has_values(torch.zeros(()).expand(3, 4))  # as `check` puts them in the place of weights
    assert has_values(torch.zeros(()))
    assert has_values(torch.ones(3, 1).expand(3, 4))
