"""Divergences of two distributions: by hand, at their limits, and chunk by chunk against whole logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lit_efficient import ConfigurationError
from lit_efficient.losses.chunked_distillation import (
    LiveTeacher,
    TopKTeacher,
    WeightedTeachers,
    chunked_distillation,
    chunked_losses,
)
from lit_efficient.losses.distillation import Divergence, distillation_divergence, log_probabilities, top_k_of
from lit_efficient.losses.distillation import coarse as seen_as

ALL = [
    Divergence(),
    Divergence("forward_kl", temperature=2.5),
    Divergence("reverse_kl", temperature=0.5, temperature_squared=False),
    Divergence("jsd", beta=0.2),
    Divergence("jsd", beta=0.9, normalized=False, temperature=3.0),
]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tensors(dtype: torch.dtype = torch.float64, tokens: int = 21) -> dict[str, torch.Tensor]:
    """A student with 3 rows of padding and a teacher with 1, of 10 tokens that both know."""
    drawn = {"student_hidden": draw(tokens, 4), "student_weight": draw(13, 4, seed=1)}
    drawn |= {"teacher_hidden": draw(tokens, 6, seed=2), "teacher_weight": draw(11, 6, seed=3)}
    return {name: tensor.to(dtype).requires_grad_("student" in name) for name, tensor in drawn.items()}


def mixed(parts: dict[str, torch.Tensor], labels: torch.Tensor, how: Divergence, weight: float) -> torch.Tensor:
    """The reference: whole logits, gradients by autograd."""
    student = parts["student_hidden"] @ parts["student_weight"].T
    teacher = parts["teacher_hidden"] @ parts["teacher_weight"].T
    entropy = F.cross_entropy(student, labels, reduction="none")
    return (1 - weight) * entropy + weight * distillation_divergence(student, teacher, how, vocab_size=10)


def test_both_directions_are_torchs_kl_div() -> None:
    student, teacher = draw(5, 7), draw(5, 7, seed=1)
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    forward = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(distillation_divergence(student, teacher), forward)
    backward = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(distillation_divergence(student, teacher, Divergence("reverse_kl")), backward)
    cold = F.kl_div((student / 3).log_softmax(-1), (teacher / 3).softmax(-1), reduction="none").sum(-1)
    torch.testing.assert_close(distillation_divergence(student, teacher, Divergence(temperature=3.0)), 9 * cold)


def test_jensen_shannon_is_two_kl_to_the_mixture() -> None:
    student, teacher = draw(5, 7), draw(5, 7, seed=1)
    p, q = teacher.softmax(-1), student.softmax(-1)
    m = 0.3 * p + 0.7 * q
    expected = 0.3 * (p * (p / m).log()).sum(-1) + 0.7 * (q * (q / m).log()).sum(-1)
    plain = distillation_divergence(student, teacher, Divergence("jsd", beta=0.3, normalized=False))
    torch.testing.assert_close(plain, expected)
    normalized = distillation_divergence(student, teacher, Divergence("jsd", beta=0.3))
    torch.testing.assert_close(normalized, expected / 0.21)


@pytest.mark.parametrize(("beta", "limit"), [(1e-6, "forward_kl"), (1 - 2**-20, "reverse_kl")])
def test_the_normalised_form_ends_in_the_two_kl_and_its_gradients_do_not_vanish(beta: float, limit: Any) -> None:
    """In float32, where the plain form times 1 / (beta (1 - beta)) would be rounding noise."""

    def gradient(how: Divergence) -> torch.Tensor:
        student = draw(5, 7, dtype=torch.float32).requires_grad_()
        distillation_divergence(student, draw(5, 7, seed=1, dtype=torch.float32), how).sum().backward()
        assert student.grad is not None
        return student.grad

    expected = gradient(Divergence(limit))
    torch.testing.assert_close(gradient(Divergence("jsd", beta=beta)), expected, rtol=2e-3, atol=1e-4)
    assert gradient(Divergence("jsd", beta=beta, normalized=False)).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("how", ALL)
def test_a_teacher_is_its_own_best_student_and_impossible_tokens_are_no_nan(how: Divergence) -> None:
    logits = draw(4, 9, dtype=torch.float32)
    assert distillation_divergence(logits, logits.clone(), how).abs().max() < 1e-5
    assert distillation_divergence(logits, logits.flip(1), how).min() > 0
    teacher = logits.clone()
    teacher[:, 3] = -torch.inf
    student = logits.flip(1).requires_grad_()
    value = distillation_divergence(student, teacher, how)
    assert value.isposinf().all() if how.kind == "reverse_kl" else value.isfinite().all()
    if how.kind != "reverse_kl":
        value.sum().backward()
        assert student.grad is not None
        assert student.grad.isfinite().all()


def test_temperature_squared_keeps_the_size_of_gradients() -> None:
    def size(temperature: float, squared: bool) -> float:
        student = draw(50, 7).requires_grad_()
        how = Divergence(temperature=temperature, temperature_squared=squared)
        distillation_divergence(student, draw(50, 7, seed=1), how).sum().backward()
        assert student.grad is not None
        return student.grad.norm().item()

    assert size(40.0, True) == pytest.approx(size(20.0, True), rel=0.05)
    assert size(40.0, False) == pytest.approx(size(20.0, False) / 4, rel=0.05)


@pytest.mark.parametrize("how", ALL)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_chunks_give_what_whole_logits_give(how: Divergence, dtype: torch.dtype, tolerance: float) -> None:
    labels = torch.arange(21) % 13
    for weight, upstream in ((0.4, torch.full((21,), 1 / 21)), (0.7, torch.linspace(-1, 1, 21))):
        dense, chunked = tensors(dtype), tensors(dtype)
        expected = mixed(dense, labels, how, weight)
        expected.backward(upstream.to(dtype))
        got = chunked_distillation(**chunked, labels=labels, divergence=how, weight=weight, vocab_size=10, chunk_size=4)
        got.loss.backward(upstream.to(dtype))
        scale = expected.abs().max().item()
        torch.testing.assert_close(got.loss, expected, rtol=tolerance, atol=tolerance * scale)
        torch.testing.assert_close((1 - weight) * got.cross_entropy + weight * got.divergence, got.loss.detach())
        for name in ("student_hidden", "student_weight"):
            wanted, found = dense[name].grad, chunked[name].grad
            assert wanted is not None
            torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("how", ALL)
def test_gradients_are_those_of_finite_differences(how: Divergence) -> None:
    parts = tensors(tokens=3)
    labels = torch.tensor([0, 4, 12])

    def losses(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        teacher = parts["teacher_hidden"], parts["teacher_weight"]
        return chunked_distillation(
            hidden, weight, *teacher, labels, divergence=how, weight=0.5, vocab_size=10, chunk_size=2
        ).loss

    assert torch.autograd.gradcheck(losses, (parts["student_hidden"], parts["student_weight"]))


@pytest.mark.parametrize("how", ALL)
def test_a_teacher_of_which_k_tokens_were_kept(how: Divergence) -> None:
    parts = tensors(tokens=9)
    teacher_logits = (parts["teacher_hidden"] @ parts["teacher_weight"].T)[:, :10]
    student_logits = parts["student_hidden"] @ parts["student_weight"].T
    whole = distillation_divergence(student_logits, teacher_logits, how)
    previous = torch.zeros(9, dtype=torch.float64)
    for k in (1, 4, 10):
        kept = top_k_of(teacher_logits, k, how.temperature)
        assert kept[1].shape == (9, k + (k < 10))
        torch.testing.assert_close(kept[1].exp().sum(1), torch.ones(9, dtype=torch.float64))
        log_q = seen_as(log_probabilities(student_logits, 10, how.temperature), *kept)
        coarse = how.measure(kept[1], log_q)[0] * how.factor
        assert (coarse <= whole + 1e-12).all()
        assert (coarse >= previous - 1e-12).all()
        previous = coarse.detach()
        trained = [parts["student_hidden"], parts["student_weight"]]
        wanted = torch.autograd.grad(coarse.sum(), trained, retain_graph=True)
        head = partial(F.linear, weight=parts["student_weight"])
        teacher = TopKTeacher(*kept, vocab_size=10)
        arguments = (head, parts["student_hidden"], [parts["student_weight"]], teacher, None)
        got = chunked_losses(*arguments, divergence=how, chunk_size=2)
        torch.testing.assert_close(got.loss, coarse)
        found = torch.autograd.grad(got.loss.sum(), trained)
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(previous, whole.detach())


@pytest.mark.parametrize("how", ALL)
def test_several_teachers_are_averaged_by_their_weights(how: Divergence) -> None:
    """Two live teachers, of which one has padding, and one with its most likely tokens, token by token."""
    parts = tensors()
    second = draw(21, 3, seed=5), draw(10, 3, seed=6)
    third = draw(21, 10, seed=7)
    ids, log_probs = top_k_of(third, 4, how.temperature)
    teachers = WeightedTeachers(
        [
            LiveTeacher(parts["teacher_hidden"], partial(F.linear, weight=parts["teacher_weight"]), 10),
            LiveTeacher(second[0], partial(F.linear, weight=second[1]), 10),
            TopKTeacher(ids, log_probs, 10),
        ],
        [3.0, 0.5, 1.5],
    )
    student = [parts["student_hidden"], parts["student_weight"]]
    head = partial(F.linear, weight=student[1])
    found = chunked_losses(head, student[0], student[1:], teachers, None, divergence=how, chunk_size=4)
    whole = [parts["teacher_hidden"] @ parts["teacher_weight"].T, second[0] @ second[1].T]
    expected = []
    for token in range(21):
        logits = student[0][token] @ student[1].T
        values = [distillation_divergence(logits, teacher[token], how, vocab_size=10) for teacher in whole]
        seen = seen_as(
            log_probabilities(logits[None], 10, how.temperature), ids[token : token + 1], log_probs[token : token + 1]
        )
        values.append(how.measure(log_probs[token : token + 1], seen)[0][0] * how.factor)
        expected.append((3 * values[0] + 0.5 * values[1] + 1.5 * values[2]) / 5)
    torch.testing.assert_close(found.divergence, torch.stack(expected).detach())
    ours = torch.autograd.grad(found.loss.sum(), student)
    for gradient, right in zip(ours, torch.autograd.grad(torch.stack(expected).sum(), student)):
        torch.testing.assert_close(gradient, right)


@pytest.mark.parametrize("upstream", [torch.ones(21), torch.linspace(0.5, 2, 21)])
def test_under_autocast_it_is_the_dense_loss_under_autocast(upstream: torch.Tensor) -> None:
    """Also where tokens are weighted afterwards: the second pass is made outside of the autocast's block."""
    labels, dense, chunked = torch.arange(21) % 13, tensors(torch.float32), tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = mixed(dense, labels, ALL[3], 0.5)
        got = chunked_distillation(**chunked, labels=labels, divergence=ALL[3], weight=0.5, vocab_size=10, chunk_size=4)
    assert got.loss.dtype == torch.float32
    expected.backward(upstream)
    got.loss.backward(upstream)
    torch.testing.assert_close(got.loss, expected, rtol=1e-2, atol=1e-2)
    for name in ("student_hidden", "student_weight"):
        wanted = dense[name].grad
        assert wanted is not None
        torch.testing.assert_close(chunked[name].grad, wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, list | tuple) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return output


def test_no_tensor_is_tokens_times_vocabulary() -> None:
    tokens, vocabulary, chunk = 96, 400, 8
    student, weight = draw(tokens, 4).requires_grad_(), draw(vocabulary, 4, seed=1).requires_grad_()
    teacher = draw(tokens, 5, seed=2), draw(vocabulary, 5, seed=3)
    labels = torch.arange(tokens)
    with Largest() as seen:
        losses = chunked_distillation(student, weight, *teacher, labels, weight=0.5, chunk_size=chunk)
        losses.loss.backward(torch.rand(tokens, dtype=torch.float64))  # unlike weights: the second pass, too
    assert chunk * vocabulary <= seen.elements < 2 * chunk * vocabulary
    live = LiveTeacher(teacher[0], partial(F.linear, weight=teacher[1]))
    with Largest() as seen:
        several = WeightedTeachers([live, live], [1.0, 2.0])
        chunked_losses(
            partial(F.linear, weight=weight), student, [weight], several, labels, chunk_size=chunk
        ).loss.sum().backward()
    assert chunk * vocabulary <= seen.elements < 2 * chunk * vocabulary
    with Largest() as seen:
        distillation_divergence(student @ weight.T, teacher[0] @ teacher[1].T)
    assert seen.elements == tokens * vocabulary


def test_a_head_with_dropout_is_seen_twice_with_one_mask_and_a_frozen_one_gets_nothing() -> None:
    hidden, weight = draw(6, 4).requires_grad_(), draw(9, 4, seed=1).requires_grad_()
    teacher = LiveTeacher(draw(6, 4, seed=2), partial(F.linear, weight=draw(9, 4, seed=3)))

    def head(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.linear(x, weight), 0.5)

    def gradients(upstream: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(3)
        losses = chunked_losses(head, hidden, [weight], teacher, None, chunk_size=2).loss
        return torch.autograd.grad((losses * upstream).sum(), [hidden, weight])

    alike, first = gradients(torch.ones(6)), torch.tensor([1.0, 0, 0, 0, 0, 0])
    parts = [gradients(first.roll(i)) for i in range(6)]
    for i in range(2):
        torch.testing.assert_close(alike[i], sum(part[i] for part in parts))
    frozen = weight.detach()
    losses = chunked_losses(partial(F.linear, weight=frozen), hidden, [frozen], teacher, None, chunk_size=2).loss
    (gradient,) = torch.autograd.grad((losses * torch.arange(6)).sum(), [hidden])
    assert gradient[0].abs().max() == 0
    assert gradient[1:].abs().amin() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "kl"}, "kind must be one of forward_kl, reverse_kl, jsd, got 'kl'"),
        ({"kind": "jsd", "beta": 0.0}, "beta must be above 0 and below 1, got 0.0"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
    ],
)
def test_bad_settings_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Divergence(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"vocab_size": 12},
            "at least 1 and at most 11 for a student with 13 rows and a teacher with 11, got 12",
        ),
        ({"chunk_size": 0}, "chunk_size must be a whole number of at least 1, got 0"),
        ({"weight": 1.5}, "weight must be at least 0 and at most 1, got 1.5"),
        ({"weight": 0.5, "labels": None}, "weight must be 1 without labels"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        chunked_distillation(**tensors(), **{"labels": torch.arange(21) % 13, **arguments})
