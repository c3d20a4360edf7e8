"""The chunked cross-entropy: the dense one's values and gradients, without a tensor of tokens times vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_efficient.errors import ConfigurationError
from lit_efficient.evidence.memory_kinds import KindMeter
from lit_efficient.internals.torch_as_cuda import as_cuda
from lit_efficient.losses.chunked_cross_entropy import (
    TokenLoss,
    chunk_size_of,
    chunked_cross_entropy,
    chunked_head_cross_entropy,
    is_expanded,
    takes_liger,
)
from lit_efficient.losses.token_weighting import TokenWeighting

N, H, V = 50, 12, 37
SETTINGS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.3},
    "ignore_index": {"ignore_index": 5},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 2.0, "logit_scale": 1.7},
    "dft": {"weighting": TokenWeighting("dft"), "softcap": 2.0, "label_smoothing": 0.2},
    "eaft": {"weighting": TokenWeighting("eaft", 1.5), "logit_scale": 1.7, "z_loss": 1e-2},
}


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def dense(hidden, weight, labels, bias=None, *, token_weights=None, reduction="mean", **terms):
    """The same loss by autograd over whole logits."""
    scale, cap = terms.get("logit_scale", 1.0), terms.get("softcap")
    ignore = terms.get("ignore_index", -100)
    logits = F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32)) * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    smoothing = terms.get("label_smoothing", 0.0)
    losses = F.cross_entropy(logits, labels, ignore_index=ignore, label_smoothing=smoothing, reduction="none")
    valid = labels != ignore
    losses = losses + terms.get("z_loss", 0.0) * logits.logsumexp(1).square() * valid
    if terms.get("weighting") is not None:
        losses = losses * terms["weighting"](logits, labels)
    weights = torch.ones_like(losses) if token_weights is None else token_weights
    losses = losses * weights
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (weights * valid).sum()


def tensors(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::7] = -100
    return make(N, H), make(V, H), labels, make(V) if bias else None


def gradients(loss, *parameters):
    return torch.autograd.grad(loss, [p for p in parameters if p is not None])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_equals_the_dense_loss_and_its_gradients(name, dtype, tolerance, weighted, reduction):
    hidden, weight, labels, bias = tensors(dtype)
    labels = labels.where(labels != -100, 5) if name == "ignore_index" else labels
    weights = torch.rand(N, dtype=dtype, generator=torch.Generator().manual_seed(1)) if weighted else None
    upstream = torch.linspace(0.5, 2, N, dtype=dtype) if reduction == "none" else torch.tensor(0.7, dtype=dtype)
    results = []
    for function, extra in ((dense, {}), (chunked_cross_entropy, {"chunk_size": 8})):
        loss = function(
            hidden, weight, labels, bias, token_weights=weights, reduction=reduction, **SETTINGS[name], **extra
        )
        results.append([loss, *gradients((loss * upstream).sum(), hidden, weight, bias)])
    for ours, theirs in zip(results[1], results[0]):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction):
    hidden, weight, labels, bias = tensors()
    settings = {**SETTINGS["all"], "chunk_size": 3, "reduction": reduction}
    small = (hidden[:5, :3], weight[:7, :3], bias[:7])
    inputs = [tensor.detach().clone().requires_grad_() for tensor in small]

    def function(h, w, b):
        return chunked_cross_entropy(h, w, labels[:5] % 7, b, **settings)

    assert torch.autograd.gradcheck(function, inputs, nondet_tol=1e-12)  # a second backward pass sums in another order


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_no_gradient_for_what_needs_none(frozen):
    hidden, weight, labels, bias = tensors()
    parts = {"hidden": hidden, "weight": weight, "bias": bias}
    parts[frozen] = parts[frozen].detach()
    loss = chunked_cross_entropy(parts["hidden"], parts["weight"], labels, parts["bias"])
    loss.backward()
    expected = gradients(dense(hidden, weight, labels, bias), hidden, weight, bias)
    for (name, tensor), gradient in zip(parts.items(), expected):
        if name == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, gradient)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_batch_without_labels_is_zero_not_nan(reduction):
    hidden, weight, labels, bias = tensors()
    loss = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100), bias, reduction=reduction)
    assert torch.equal(loss, torch.zeros_like(loss))
    loss.sum().backward()
    assert all(torch.equal(tensor.grad, torch.zeros_like(tensor)) for tensor in (hidden, weight, bias))


def test_shapes_with_leading_dimensions():
    hidden, weight, labels, _ = tensors()
    flat = chunked_cross_entropy(hidden, weight, labels, reduction="none")
    folded = chunked_cross_entropy(hidden.view(5, 10, H), weight, labels.view(5, 10), reduction="none")
    assert folded.shape == (5, 10)
    assert torch.equal(folded.flatten(), flat)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("train_head", [True, False])
def test_no_tensor_of_tokens_times_vocabulary(reduction, train_head):
    tokens, width, vocabulary, chunk = 256, 8, 512, 16
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=train_head)
    labels = torch.randint(0, vocabulary, (tokens,))
    with Largest() as whole:
        dense(hidden, weight, labels).backward()
    assert whole.numel == tokens * vocabulary
    with Largest() as ours:
        chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk, reduction=reduction).sum().backward()
    assert ours.numel == chunk * vocabulary
    with Largest() as evaluated, torch.no_grad():
        chunked_cross_entropy(hidden, weight, labels, chunk_size=chunk, reduction=reduction)
    assert evaluated.numel == chunk * vocabulary


def test_ignored_tokens_are_not_multiplied():
    """Only 4 of 64 tokens count: no product has more rows."""
    rows = []

    def head(x):
        rows.append(len(x))
        return x @ weight.T

    hidden, weight = torch.randn(64, H), torch.randn(V, H)
    labels = torch.full((64,), -100)
    labels[[3, 20, 21, 60]] = 1
    chunked_head_cross_entropy(head, hidden, labels, [])
    assert rows == [4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_losses_and_sums_are_in_float32(dtype):
    """The many chunks' weight gradients lose nothing to 16-bit sums: as near as one dense pass."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(40, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 40, (512,), generator=generator)
    twins = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = dense(*twins, labels)
    exact_gradients = gradients(exact, *twins)
    whole = gradients(dense(hidden, weight, labels), hidden, weight)
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=8)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=3e-3, atol=0)
    for ours, theirs, truth in zip(gradients(loss, hidden, weight), whole, exact_gradients):
        assert ours.dtype == dtype
        error, dense_error = ((g.double() - truth.double()).norm() for g in (ours, theirs))
        assert error <= 1.5 * dense_error


def test_autocast_multiplies_in_its_dtype_and_returns_the_weights_own():
    hidden, weight, labels, bias = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = dense(hidden, weight, labels, bias)
        ours = chunked_cross_entropy(hidden, weight, labels, bias, chunk_size=8)
        through = chunked_head_cross_entropy(
            lambda x: F.linear(x, weight, bias), hidden, labels, [weight, bias], chunk_size=8
        )
    expected = gradients(theirs, hidden, weight, bias)
    for loss in (ours, through):
        torch.testing.assert_close(loss, theirs, rtol=1e-2, atol=0)
        for gradient, dense_one in zip(gradients(loss, hidden, weight, bias), expected):
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(gradient, dense_one, rtol=0.05, atol=2e-3)
    exact = dense(hidden, weight, labels, bias)
    assert abs(ours - exact) > 1e-6  # it was not computed in float32


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_through_a_module_with_dropout_equals_autograd_on_the_same_masks(reduction):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(H, H), nn.Dropout(0.5), nn.Linear(H, V)).double()
    hidden, _, labels, _ = tensors()
    labels[0] = 3  # one chunk, so that the dense masks are those of one call
    labels = labels.clamp(min=0)
    upstream = torch.linspace(0.5, 2, N, dtype=torch.float64) if reduction == "none" else torch.tensor(1.0)
    parameters = list(head.parameters())
    torch.manual_seed(1)
    theirs = F.cross_entropy(head(hidden), labels, reduction=reduction)
    torch.manual_seed(1)
    ours = chunked_head_cross_entropy(head, hidden, labels, parameters, chunk_size=N, reduction=reduction)
    torch.rand(3)  # what is drawn in between does not matter
    expected = gradients((theirs * upstream).sum(), hidden, *parameters)
    for gradient, dense_one in zip(gradients((ours * upstream).sum(), hidden, *parameters), expected):
        torch.testing.assert_close(gradient, dense_one, rtol=1e-10, atol=1e-10)


def test_through_a_module_chunk_by_chunk():
    hidden, weight, labels, bias = tensors()
    terms = TokenLoss(label_smoothing=0.1, z_loss=1e-2, softcap=3.0)
    loss = chunked_head_cross_entropy(
        lambda x: F.linear(x, weight, bias), hidden, labels, [weight, bias], terms, chunk_size=8
    )
    direct = chunked_cross_entropy(
        hidden, weight, labels, bias, label_smoothing=0.1, z_loss=1e-2, softcap=3.0, chunk_size=8
    )
    for a, b in zip(gradients(loss, hidden, weight, bias), gradients(direct, hidden, weight, bias)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_large_logits_do_not_overflow():
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]])
    loss = chunked_cross_entropy(hidden, weight, torch.tensor([0, 1]), reduction="none")
    assert torch.equal(loss, torch.tensor([0.0, 2e4]))
    loss.sum().backward()
    assert torch.equal(hidden.grad, torch.tensor([[0.0], [2.0]]))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has none yet")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_agrees_with_torchs_own(smoothing):
    hidden, weight, labels, bias = tensors()
    theirs = F.linear_cross_entropy(hidden, weight, labels, linear_bias=bias, label_smoothing=smoothing)
    ours = chunked_cross_entropy(hidden, weight, labels, bias, label_smoothing=smoothing, chunk_size=8)
    for a, b in zip([ours, *gradients(ours, hidden, weight)], [theirs, *gradients(theirs, hidden, weight)]):
        torch.testing.assert_close(a, b)


def test_refuses_a_second_derivative():
    hidden, weight, labels, _ = tensors()
    loss = chunked_cross_entropy(hidden, weight, labels)
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        torch.autograd.grad(loss, hidden, create_graph=True)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "matmul")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tokens_that_are_all_wanted_alike_cost_no_second_pass(device, request):
    if device == "cuda":
        request.getfixturevalue("as_on_a_gpu")
    hidden, weight, labels, _ = tensors()
    with Products() as products:
        losses = chunked_cross_entropy(hidden, weight, labels, reduction="none")
        first = products.count
        assert first
        products.count = 0
        losses[labels != -100].sum().backward()  # of the others nothing is wanted, and there is nothing
        assert products.count == 0
        chunked_cross_entropy(hidden, weight, labels, reduction="none").mean().backward()
        assert products.count == first
        losses = chunked_cross_entropy(hidden, weight, labels, reduction="none")
        products.count = 0
        losses[:9].sum().backward()
        assert products.count


def test_a_second_backward_pass_adds_the_same_gradient():
    hidden, weight, labels, _ = tensors()
    loss = chunked_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(weight.grad, 2 * once, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be a whole number of at least 1 or null, got 0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, got 1.0"),
        ({"z_loss": -1.0}, "z_loss must be at least 0, got -1.0"),
        ({"softcap": 0.0}, "softcap must be above 0 or null, got 0.0"),
        ({"reduction": "max"}, "reduction must be one of mean, sum, none, got 'max'"),
        ({"token_weights": torch.ones(3)}, r"token_weights must be \[50\] .* got \[3\]"),
        ({"token_weights": torch.ones(N, requires_grad=True)}, "constants"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, r"labels must be \[50\]"),
        ({"weight": torch.zeros(V, 3)}, r"weight must be \[V, 12\]"),
    ],
)
def test_refuses_bad_arguments(arguments, message):
    hidden, weight, labels, _ = tensors()
    with pytest.raises(ConfigurationError, match=message):
        chunked_cross_entropy(**{"hidden": hidden, "weight": weight, "labels": labels, **arguments})


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens go through the head."""
    monkeypatch.setattr("lit_efficient.losses.chunked_cross_entropy.computes_ignored", lambda device: True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["plain", "ignore_index", "all"])
def test_on_a_gpu_ignored_tokens_are_computed_and_count_for_nothing(name, weighted, reduction):
    test_equals_the_dense_loss_and_its_gradients(name, torch.float64, 1e-10, weighted, reduction)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_on_a_gpu_ignored_tokens_are_left_out_where_their_number_is_known(reduction):
    """Whatever it is that the host knows, a bound or the number itself; not even once on the way."""
    hidden, weight, labels, bias = tensors()
    count = int((labels != -100).sum())
    weights = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    upstream = torch.linspace(0.5, 2, N, dtype=torch.float64) if reduction == "none" else torch.tensor(0.7)
    how = {"token_weights": weights, "reduction": reduction, **SETTINGS["all"]}
    expected = dense(hidden, weight, labels, bias, **how)
    theirs = gradients((expected * upstream).sum(), hidden, weight, bias)
    for known in (count, count + 3, N + 9):
        loss = chunked_cross_entropy(hidden, weight, labels, bias, chunk_size=8, learned=known, **how)
        torch.testing.assert_close(loss, expected)
        for ours, other in zip(gradients((loss * upstream).sum(), hidden, weight, bias), theirs):
            torch.testing.assert_close(ours, other)
    seen = []
    head = nn.Linear(H, V, dtype=torch.float64)
    head.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    chunked_head_cross_entropy(head, hidden, labels, list(head.parameters()), chunk_size=8, learned=count)
    assert sum(seen) == count < N
    few = chunked_cross_entropy(hidden, weight, labels, bias, learned=count - 1, **how)
    assert bool(few.isnan().all()), "labels that nobody has learned must not pass unseen"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_on_a_gpu_ignored_tokens_may_be_anything():
    hidden, weight, labels = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([1, -100, 3, -100, 2, 8])
    hidden[labels == -100] = torch.nan
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_size=4)
    loss.backward()
    kept = labels != -100
    expected = F.cross_entropy(hidden.detach()[kept] @ weight.detach().T, labels[kept])
    torch.testing.assert_close(loss.detach(), expected)
    assert bool(weight.grad.isfinite().all())
    assert bool((hidden.grad[~kept] == 0).all())


def test_what_comes_from_a_sum_is_known_to_be_alike():
    losses = torch.randn(12, requires_grad=True)
    seen = []
    losses.register_hook(lambda gradient: seen.append(is_expanded(gradient)))
    for reduced in (
        losses.view(3, 4).sum(1).sum() / 5,
        (losses * torch.arange(12)).sum(),
        losses.view(3, 4).sum(1).square().sum(),
    ):
        reduced.backward()
    assert seen == [True, False, False]


def test_a_gpu_has_fewer_and_larger_chunks():
    cuda = torch.device("cuda")
    assert chunk_size_of(torch.device("cpu"), 128_256, 8192, trains=True) == 256
    assert chunk_size_of(cuda, 128_256, 8192, trains=True) == 2048
    assert chunk_size_of(cuda, 32_000, 8192, trains=True) == 8192
    assert chunk_size_of(cuda, 10**8, 8192, trains=True) == 256
    assert chunk_size_of(cuda, 50, 0, trains=True) == 1
    assert chunk_size_of(cuda, 128_256, 8192, trains=False) == 512  # a frozen head has no gradient to add to


@pytest.mark.parametrize(("vocabulary", "width"), [(32_000, 512), (16_384, 1024)])
def test_on_a_cpu_the_peak_is_at_most_a_fifth_above_the_gradients(vocabulary, width):
    hidden = torch.zeros(256, width, requires_grad=True)
    weight = torch.zeros(vocabulary, width, requires_grad=True)
    with KindMeter() as meter:
        chunked_cross_entropy(hidden, weight, torch.zeros(256, dtype=torch.long))
    floor = 4 * (vocabulary + 256) * width
    assert floor < meter.step().peak <= 1.2 * floor


def test_chunks_on_a_cpu_are_small_for_narrow_heads_with_many_logits():
    cpu = torch.device("cpu")
    assert chunk_size_of(cpu, 128_256, 2048, trains=True, width=512) == 64
    assert chunk_size_of(cpu, 128_256, 2048, trains=True, width=1024) == 128
    assert chunk_size_of(cpu, 128_256, 2048, trains=True, width=4096) == 256
    assert chunk_size_of(cpu, 128_256, 2048, trains=False, width=512) == 256
    assert chunk_size_of(cpu, 2048, 1024, trains=True, width=128) == 256  # 2 MiB of logits need no smaller chunks


def test_of_a_chunk_live_its_product_and_its_numbers_alone():
    """In bfloat16 2 bytes a logit, and 4 in float32; its gradient takes the product's place."""
    rows, vocabulary = 64, 2048
    hidden = torch.ones(4 * rows, 2, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(vocabulary, 2, dtype=torch.bfloat16, requires_grad=True)
    with KindMeter() as meter:
        chunked_cross_entropy(hidden, weight, torch.zeros(4 * rows, dtype=torch.long), chunk_size=rows)
    logits = rows * vocabulary
    assert 6 * logits <= meter.step().peak < 7 * logits


def test_a_plan_for_cuda_takes_a_gpu_s_chunks(monkeypatch):
    cpu = torch.device("cpu")
    for there in (True, False):
        monkeypatch.setattr("lit_efficient.losses.liger_cross_entropy.installed", lambda there=there: there)
        with as_cuda():
            assert chunk_size_of(cpu, 128_256, 8192, trains=True) == 2048
            assert takes_liger("auto", cpu, torch.bfloat16, TokenLoss()) is there
        assert not takes_liger("auto", cpu, torch.bfloat16, TokenLoss())
