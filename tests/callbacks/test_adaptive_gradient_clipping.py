"""AdaptiveGradientClipping: units are clipped as by a slow loop over them, right before the step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lit_efficient
from lit_efficient import ConfigurationError, ConflictError, LoRA, OptimizerInBackward, adaptive_clip
from lit_efficient.callbacks.adaptive_gradient_clipping import input_dims
from lit_efficient.mechanisms.averages.weights import whole
from lit_efficient.models.networks.grouped_linear import ExpertLinear
from lit_efficient.testing import Case, Run
from tests.contract.row import Row
from tests.support import Toy, assert_equal, data, trainer, weights
from tests.timm_models import import_timm

RATE = 0.1


class AdaptiveGradientClipping(lit_efficient.AdaptiveGradientClipping):
    """Looks at each unit before and after."""

    def __init__(self, clip_factor: float = 0.01, eps: float = 1e-3, skip: Any = ()) -> None:
        super().__init__(clip_factor, eps, skip)
        self.most, self.clipped = 0.0, 0

    def change_gradients(self, gradients: dict[Tensor, Tensor], *others: Any) -> None:
        before = {p: g.clone() for p, g in gradients.items()}
        super().change_gradients(gradients, *others)
        for p, gradient in gradients.items():
            rows = (t.flatten(0, 1) if self._dims.get(p) == (2,) else t for t in (p, before[p], gradient))  # of experts
            for w, old, new in zip(*map(units, rows), strict=True):
                limit = self.clip_factor * max(norm(w), self.eps)
                self.most = max(self.most, norm(new) / limit)
                self.clipped += norm(old) > 1.01 * limit


def units(tensor: Tensor) -> list[list[float]]:
    tensor = whole(tensor)
    rows = tensor.detach().double().flatten(1) if tensor.ndim > 1 else tensor.detach().double().reshape(1, -1)
    return rows.tolist()


def norm(numbers: list[float]) -> float:
    return math.sqrt(math.fsum(number * number for number in numbers))


def gradients_are_small_beside_their_units(run: Run) -> None:
    technique = run.technique("AdaptiveGradientClipping")
    assert technique.clipped > 0
    assert technique.most < 1.01


ROW = Row(
    lambda: AdaptiveGradientClipping(1e-3),
    gradients_are_small_beside_their_units,
    lambda: AdaptiveGradientClipping(1e30),
)


def slow(w: Tensor, g: Tensor, factor: float, eps: float) -> Tensor:
    """As timm's adaptive_clip_grad, unit by unit, in float64."""
    rows = []
    for weight, gradient in zip(units(w), units(g), strict=True):
        limit, size = factor * max(norm(weight), eps), norm(gradient)
        rows.append([number * (limit / size if size > limit else 1.0) for number in gradient])
    return torch.tensor(rows, dtype=torch.float64).view(g.shape)


@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (5, 3, 2), (4, 3, 2, 2)])
def test_equals_a_loop_over_units(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    w, g = torch.randn(shape), torch.randn(shape) * 0.02
    if w.ndim > 1:
        w[0], g[1] = 0, 0
    expected = slow(w, g, 0.01, 1e-3)
    adaptive_clip([(w, g)])
    torch.testing.assert_close(g.double(), expected, rtol=1e-6, atol=1e-12)


def test_equals_timm() -> None:
    timm = import_timm()
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 8, 3)
    for p in layer.parameters():
        p.grad = torch.randn_like(p) * 0.05
    pairs = [(p.detach(), p.grad.clone()) for p in layer.parameters() if p.grad is not None]
    adaptive_clip(pairs, 0.16)
    timm.utils.agc.adaptive_clip_grad(layer.parameters(), 0.16)
    for p, (_, ours) in zip(layer.parameters(), pairs, strict=True):
        torch.testing.assert_close(ours, p.grad, rtol=1e-6, atol=0)


def test_a_unit_is_what_one_output_sees_where_inputs_are_first_and_of_each_expert() -> None:
    """A layer that is written in two ways is clipped alike: as a linear one, as GPT-2's, and as one of two experts."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(5, 3)
    upwards = nn.ConvTranspose2d(3, 5, 2)
    experts = ExpertLinear(nn.Parameter(torch.randn(2, 5, 3)), None)
    turned = ExpertLinear(nn.Parameter(torch.randn(2, 3, 5)), None, transposed=True)
    net = nn.ModuleList([conv1d, upwards, experts, turned, kernels := nn.Conv1d(3, 5, 2, bias=False)])
    net.register_parameter("positions", nn.Parameter(torch.randn(1, 4, 5)))
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    technique = lit_efficient.AdaptiveGradientClipping(0.16)
    technique._dims = input_dims(net)
    layouts = {conv1d: lambda t: t.mT, upwards: lambda t: t.transpose(0, 1), experts: lambda t: t.flatten(0, 1)}
    layouts |= {turned: lambda t: t.mT.flatten(0, 1), kernels: lambda t: t}
    wanted = [slow(turn(part.weight), turn(part.weight.grad), 0.16, 1e-3) for part, turn in layouts.items()]
    technique.change_gradients({p: p.grad for p in net.parameters() if p.grad is not None}, *[None] * 2)
    for (part, turn), expected in zip(layouts.items(), wanted, strict=True):
        torch.testing.assert_close(turn(part.weight.grad).double(), expected, rtol=1e-5, atol=0)
    assert {*technique._dims} == {conv1d.weight, upwards.weight, experts.weight, turned.weight}  # a table is one unit


def test_sparse_gradients_are_clipped_by_their_rows_and_others_by_their_own_formats() -> None:
    table = nn.Embedding(4, 3, sparse=True)
    (table(torch.tensor([2, 0, 2])) ** 3).sum().backward()
    gradient = table.weight.grad.coalesce()
    expected = slow(table.weight, gradient.to_dense(), 0.01, 1e-3)
    low = (torch.full((2, 3), 300.0).half(), torch.full((2, 3), 300.0).half())  # whose squares overflow
    adaptive_clip([(table.weight.detach(), gradient), low])
    torch.testing.assert_close(gradient.to_dense().double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(low[1], torch.full((2, 3), 3.0).half())


class Plain(Toy):
    """SGD, whose steps show the gradients; with several optimizers, by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) or {"loss": torch.zeros(())}

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.SGD(self.net.parameters(), RATE)
        return [torch.optim.SGD(part.parameters(), RATE) for part in (self.net.stem, self.net.blocks, self.net.head)]


@pytest.mark.parametrize(("optimizers", "accumulate"), [(1, 1), (1, 2), (2, 1)])
def test_each_step_is_made_with_what_a_slow_loop_clips(optimizers: int, accumulate: int) -> None:
    skipped = r"head\.bias"
    case = Case(lambda: [], lambda run: None)
    clip = lit_efficient.AdaptiveGradientClipping(1e-3, skip=[skipped])
    run = case.fit([clip], Plain(optimizers=optimizers), accumulate_grad_batches=accumulate, saves=False)
    before = run.start
    for step in run.steps:
        if not all(torch.equal(before[name], w) for name, w in step.weights.items()):
            for name, w in before.items():
                g = step.gradients[name].double()
                expected = w - RATE * (g if name.endswith("head.bias") else slow(w, g, 1e-3, 1e-3))
                torch.testing.assert_close(step.weights[name].double(), expected, rtol=0, atol=1e-7)
        before = step.weights
    assert not torch.equal(run.start["net.head.weight"], before["net.head.weight"])


def test_a_step_in_the_backward_pass_is_clipped_alike() -> None:
    states = []
    for more in ([], [OptimizerInBackward()]):
        torch.manual_seed(0)
        trainer([lit_efficient.AdaptiveGradientClipping(1e-3), *more]).fit(module := Plain(), data(), data())
        states.append(weights(module))
    assert_equal(*states)


def test_beside_adapters_these_are_clipped_and_still_start_to_move() -> None:
    clip = AdaptiveGradientClipping(1e-3)
    run = Case(lambda: [], lambda run: None).fit([LoRA(rank=2), clip], Plain("configure_model"), saves=False)
    gradients_are_small_beside_their_units(run)
    moved = [name for name, w in run.start.items() if not torch.equal(w, run.steps[-1].weights[name])]
    assert moved
    assert all("lora" in name for name in moved)


class OwnClipping(Toy):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Of the module's own."""


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (Toy, {"gradient_clip_val": 1.0}, r"Trainer\(gradient_clip_val=1\) also clips gradients"),
        (OwnClipping, {}, r"OwnClipping\.configure_gradient_clipping also clips gradients"),
    ],
)
def test_what_clips_as_well_is_refused(module: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConflictError, match=message):
        trainer([lit_efficient.AdaptiveGradientClipping()], **arguments).fit(module(), data(), data())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_factor": 0}, "clip_factor must be above 0, got 0"),
        ({"eps": math.nan}, "eps must be above 0, got nan"),
        ({"skip": "head"}, "skip must be a list of texts, got 'head'"),
        ({"skip": ["("]}, r"skip: '\(' is no regular expression"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"AdaptiveGradientClipping: {message}"):
        lit_efficient.AdaptiveGradientClipping(**arguments)


def test_a_pattern_that_skips_nothing_raises() -> None:
    with pytest.raises(ConfigurationError, match="AdaptiveGradientClipping: skip: the pattern 'haed' matches none"):
        trainer([lit_efficient.AdaptiveGradientClipping(skip=["haed"])]).fit(Toy(), data(), data())
