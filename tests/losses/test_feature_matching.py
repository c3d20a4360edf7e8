"""The losses against numbers computed by hand, and against finite differences."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from lit_efficient.errors import ConfigurationError
from lit_efficient.losses.feature_matching import (
    cosine_loss,
    distance_matrix_loss,
    gradient_cosine,
    gradient_ratio,
    l2_loss,
    marginal_cosine_loss,
    match_tokens,
    repa_loss,
    resize_tokens,
    spatial_norm,
    vf_loss,
)

STUDENT = torch.tensor([[[1.0, 0.0], [1.0, 1.0]]])  # cosines with the teacher: 0.6 and 1
TEACHER = torch.tensor([[[3.0, 4.0], [2.0, 2.0]]])


def test_losses_of_tokens_by_hand():
    assert cosine_loss(STUDENT, TEACHER).item() == pytest.approx(0.2)
    assert repa_loss(STUDENT, TEACHER).item() == pytest.approx(-0.8)
    assert l2_loss(STUDENT, TEACHER).item() == pytest.approx((4 + 16 + 1 + 1) / 4)
    first = torch.tensor([[1, 0]])
    assert cosine_loss(STUDENT, TEACHER, first).item() == pytest.approx(0.4)
    assert l2_loss(STUDENT, TEACHER, first).item() == pytest.approx(10.0)


def test_vf_loss_by_hand():
    # cos(z_1, z_2) = 1 / sqrt(2), cos(f_1, f_2) = 7 / (5 sqrt(2)); the diagonals agree
    difference = (7 / 5 - 1) / math.sqrt(2)
    assert distance_matrix_loss(STUDENT, TEACHER, 0.1).item() == pytest.approx(2 * (difference - 0.1) / 4)
    assert distance_matrix_loss(STUDENT, TEACHER, 0.3).item() == 0.0  # within the margin
    assert marginal_cosine_loss(STUDENT, TEACHER, 0.1).item() == pytest.approx((0.3 + 0.0) / 2)
    narrow = torch.tensor([[[1.0], [-1.0]]])  # latents of another width
    expected = 2 * (1 + 7 / (5 * math.sqrt(2)) - 0.25) / 4 + 0.15
    assert vf_loss(narrow, STUDENT, TEACHER, 0.25, 0.1).item() == pytest.approx(expected)


def test_gradients_are_right_and_none_goes_to_the_teacher():
    generator = torch.Generator().manual_seed(0)
    z, p, t = (torch.randn(2, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    for loss in (cosine_loss, l2_loss, repa_loss, lambda a, b: vf_loss(a, a, b, 0.01, 0.01)):
        assert gradcheck(lambda x, loss=loss: loss(x, t), z.requires_grad_())
    teacher = t.clone().requires_grad_()
    for value in (cosine_loss(p, t), l2_loss(p, t)):
        assert not value.requires_grad
    total = cosine_loss(z, teacher) + l2_loss(z, teacher) + repa_loss(z, teacher) + vf_loss(z, z, teacher)
    total.backward()
    assert teacher.grad is None
    assert z.grad is not None


def test_a_coarser_teacher_is_interpolated_on_the_grid_and_a_finer_one_averaged():
    coarse = torch.arange(4.0).reshape(1, 1, 2, 2)  # a map
    student = torch.zeros(1, 16, 5)
    ours, theirs = match_tokens(student, coarse)
    assert ours.shape == (1, 16, 5)
    # 4 positions a row of 2: 0, 1/4, 3/4, 1 along the columns, twice that along the rows
    steps = torch.tensor([0.0, 0.25, 0.75, 1.0])
    torch.testing.assert_close(theirs.reshape(4, 4), steps[None] + 2 * steps[:, None])
    fine = torch.arange(16.0).reshape(1, 16, 1)  # tokens, row by row
    _, averaged = match_tokens(torch.zeros(1, 5, 1, 1), fine)
    assert averaged.item() == pytest.approx(7.5)
    same = torch.randn(1, 16, 3)
    assert match_tokens(student, same, "grid")[1] is same


def test_sequences_are_interpolated_along_themselves():
    torch.testing.assert_close(
        resize_tokens(torch.tensor([[[0.0], [4.0]]]), (2,), (4,)).flatten(), torch.tensor([0.0, 1.0, 3.0, 4.0])
    )
    ours, theirs = match_tokens(torch.zeros(2, 4, 3), torch.ones(2, 7))  # one vector for all four
    assert torch.equal(theirs, torch.ones(2, 4, 7))
    assert ours.shape == (2, 4, 3)
    nine = torch.arange(9.0).reshape(1, 9, 1)  # three by three, if it were a map
    assert torch.equal(match_tokens(torch.zeros(1, 4, 1), nine)[1], resize_tokens(nine, (9,), (4,)))
    image = torch.zeros(1, 5, 2, 2)
    assert torch.equal(match_tokens(image, nine, "sequence")[1], resize_tokens(nine, (9,), (4,)))


def test_features_that_cannot_be_matched():
    with pytest.raises(ConfigurationError, match="the teacher's 17 tokens do not fill a square"):
        match_tokens(torch.zeros(1, 16, 2), torch.zeros(1, 17, 2), "grid")
    with pytest.raises(ConfigurationError, match="same batch size, got 2 and 3"):
        match_tokens(torch.zeros(2, 4, 2), torch.zeros(3, 4, 2))
    with pytest.raises(ConfigurationError, match="must be tokens"):
        match_tokens(torch.zeros(2), torch.zeros(2))


def test_the_adaptive_weight_equals_the_ratio_of_the_gradients():
    w = torch.tensor([3.0, 4.0], requires_grad=True)
    loss, extra = w.square().sum(), 0.5 * w.sum()  # gradients (6, 8) and (0.5, 0.5)
    ratio = gradient_ratio(loss, extra, w)
    assert ratio.item() == pytest.approx(10 / math.sqrt(0.5), rel=1e-4)
    assert not ratio.requires_grad
    assert w.grad is None
    (loss + ratio * extra).backward()  # the graph is still there
    loss = w.square().sum()
    assert gradient_ratio(loss, loss * 0, w, limit=7.0).item() == 7.0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_spatial_norm_by_hand(share):
    tokens = torch.tensor([[[1.0, 10.0], [3.0, 30.0]]])  # means 2 and 20, deviations sqrt(2) and 10 sqrt(2)
    expected = torch.tensor([[1 - 2 * share, 1 - 2 * share], [3 - 2 * share, 3 - 2 * share]]) / math.sqrt(2)
    torch.testing.assert_close(spatial_norm(tokens, share)[0], expected)


def test_the_cosine_of_gradients_leaves_the_graph():
    w = torch.tensor([3.0, 4.0], requires_grad=True)
    loss, extra = w.square().sum(), (w * torch.tensor([1.0, 0.0])).square().sum()  # gradients (6, 8) and (6, 0)
    cosine = gradient_cosine(loss, extra, [w])
    assert cosine.item() == pytest.approx(0.6)
    assert not cosine.requires_grad
    assert w.grad is None
    (loss + extra).backward()  # the graph is still there
    assert torch.equal(w.grad, torch.tensor([12.0, 8.0]))
    other = torch.ones(2, requires_grad=True).sum()
    assert gradient_cosine(w.square().sum(), other, [w]).item() == 0.0
