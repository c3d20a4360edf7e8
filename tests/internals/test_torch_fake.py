import torch
from torch import nn

from tests.internals.leaning import leans_on


@leans_on("torch", "torch._subclasses.fake_tensor", "torch_fake")
def test_fakes_have_shapes_and_raise_where_they_are_read():
    from lit_efficient.internals.torch_fake import DataDependentOutputException, FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2, 3) @ torch.ones(3, 4)
        assert fake.shape == (2, 4)
        try:
            fake.sum().item()
        except DataDependentOutputException:
            return
    raise AssertionError("a fake has been read")


@leans_on("torch", "torch._guards.detect_fake_mode", "torch_fake")
def test_whether_tensors_are_fakes_is_known_before_one_is_made():
    from lit_efficient.internals.torch_fake import FakeTensorMode, detect_fake_mode

    with FakeTensorMode() as mode:
        assert detect_fake_mode() is mode
    assert detect_fake_mode() is None


@leans_on("torch", "torch._C._swap_tensor_impl", "torch_fake")
def test_a_module_of_fakes_moves_although_its_weights_are_referred_to():
    import weakref

    from lit_efficient.internals.torch_fake import FakeTensorMode, like_real_ones

    with FakeTensorMode() as mode:
        layer = nn.Linear(4, 2)
        reference = weakref.ref(layer.weight)
        with like_real_ones(), mode:
            layer.to(torch.bfloat16)
        assert layer.weight.dtype == torch.bfloat16
        assert reference() is layer.weight


@leans_on("torch", "torch.Tensor._make_subclass", "torch_fake")
def test_a_fake_may_be_a_parameter_of_another_class():
    from lit_efficient.internals.torch_fake import FakeTensorMode, like_real_ones

    class Own(nn.Parameter):
        pass

    with FakeTensorMode() as mode, like_real_ones(), mode:
        own = torch.Tensor._make_subclass(Own, torch.ones(2), False)
    assert isinstance(own, Own)


def test_an_unknown_value_is_read_as_zero_inside_of_the_mode():
    from lit_efficient.internals.torch_fake import FakeTensorMode, like_real_ones

    known = torch.arange(1000)
    with FakeTensorMode(), like_real_ones():
        fake = torch.empty(1000, dtype=torch.int16)
        assert not fake.numpy().any()
        assert fake.tolist() == [0] * 1000
        fake.known = known
        assert fake.numpy().tolist() == fake.tolist() == [*range(1000)]
