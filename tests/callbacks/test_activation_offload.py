"""ActivationOffload: what blocks save is off the device but for two blocks', gradients equal plain ones bit by bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lit_efficient
from lit_efficient import ActivationCheckpointing, Compile, ConfigurationError, LoRA, QuantizeBase
from lit_efficient.application import apply
from lit_efficient.mechanisms.blocks.offloading import Offload
from lit_efficient.mechanisms.blocks.side_copies import SideCopies
from lit_efficient.mechanisms.trials.memory import collected
from lit_efficient.testing import Run
from tests.callbacks.test_activation_checkpointing import Dropping, Spectral
from tests.callbacks.test_stochastic_depth_families import FAMILIES
from tests.contract.effects import training
from tests.contract.row import Row
from tests.cuda.fake_cuda import fake_cuda
from tests.cuda.resident import Resident
from tests.support import WIDTH, Net, Toy, assert_equal, data, trainer

ROWS = 64
X = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)


class ActivationOffload(lit_efficient.ActivationOffload):
    """Copies on the CPU, too, where it saves nothing: its gradients must equal plain ones anywhere."""

    def check(self, trainer: Any, module: Any) -> None:
        """Refuse nothing."""


def leaves_the_device(run: Run) -> None:
    """What the first block keeps is gone once the next ones have run, and its gradients come all the same."""
    blocks = [part for part in run.module.modules() if hasattr(part, "_offload")]
    held: list[weakref.ref[Any]] = []
    hooks = [
        part.register_forward_hook(lambda _, __, y: held.append(weakref.ref(y.untyped_storage())))
        for part in blocks[0].modules()
        if getattr(part, "out_features", 0) >= 2 * WIDTH
    ]
    assert blocks
    assert hooks
    before = blocks[0]._offload.tensors
    with collected(), training(run) as x:
        loss = run.module._sample_loss((x,)).mean()
    assert not any(storage() is not None for storage in held)
    if held and not any(getattr(block, "_recomputes", False) for block in blocks):
        assert blocks[0]._offload.tensors > before
    if not any(getattr(block, "_recomputes", False) for block in blocks):  # what they drew was drawn in the run
        loss.backward()
        run.module.zero_grad()
    for hook in hooks:
        hook.remove()


ROW = Row(
    lambda: ActivationOffload(min_bytes=64),
    leaves_the_device,
    lambda: ActivationOffload(min_bytes=1),
    changes=False,
)


def gradients(net: nn.Module, call: Callable[[nn.Module], Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    loss = call(net.train()).float().square().sum()
    loss.backward()
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {"gradients": found, "buffers": dict(net.named_buffers()), "random": torch.rand(1)}


def pair(make: Callable[[], nn.Module], *techniques: Any) -> tuple[nn.Module, nn.Module]:
    nets = []
    for more in ([], [ActivationOffload(min_bytes=1)]):
        torch.manual_seed(0)
        nets.append(make())
        apply(nets[-1], [*techniques, *more])
    return nets[0], nets[1]


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ["GPT", "Llama", "DiTTransformer2DModel", "timm ResNet"])
def test_gradients_are_those_of_the_plain_network(name: str) -> None:
    plain, ours = pair(FAMILIES[name].make)
    assert_equal(*(gradients(net, FAMILIES[name].call) for net in (plain, ours)))
    assert list(plain.state_dict()) == list(ours.state_dict())
    assert next(part._offload for part in ours.modules() if hasattr(part, "_offload")).bytes


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize(
    "techniques",
    [
        lambda: [],
        lambda: [ActivationCheckpointing(every=2)],
        lambda: [ActivationCheckpointing(save=["matmul"])],
        lambda: [QuantizeBase(), LoRA(rank=2, variant="dora")],
        lambda: [QuantizeBase("int4", group_size=16), ActivationCheckpointing(), LoRA(rank=2)],
        lambda: [Compile(backend="aot_eager")],
        lambda: [Compile(backend="aot_eager"), ActivationCheckpointing()],
    ],
)
@pytest.mark.parametrize("make", [Dropping, Spectral])
def test_beside_others_gradients_are_theirs(make: Any, techniques: Any) -> None:
    kinds = [type(technique) for technique in techniques()]
    if make is Spectral and (QuantizeBase in kinds or Compile in kinds):
        return
    nets = []
    for more in ([], [ActivationOffload(min_bytes=1)]):
        torch.manual_seed(0)
        nets.append(make())
        apply(nets[-1], [*techniques(), *more])
    assert_equal(*(gradients(net, lambda net: net(X)) for net in nets))
    assert next(part._offload for part in nets[1].modules() if hasattr(part, "_offload")).bytes


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_tensors_of_two_blocks_are_on_the_device_at_any_moment(recomputed: bool) -> None:
    peaks = {}
    for depth, offloads in itertools.product((2, 8), (False, True)):
        with fake_cuda():
            net, x = Net(depth=depth).cuda(), X.cuda()
            apply(net, [ActivationCheckpointing()] * recomputed + [ActivationOffload(min_bytes=1)] * offloads)
            for p in net.parameters():
                p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            with Resident([*net.parameters(), x]) as resident:
                before = resident.start()
                loss = net(x).square().sum()
                forward = resident.peak - before
                resident.start()
                loss.backward()
                peaks[depth, offloads] = forward, resident.peak - before
    for plain, ours in zip(*[zip(peaks[2, offloads], peaks[8, offloads]) for offloads in (False, True)]):
        assert plain[0] < plain[1]
        assert ours[0] == ours[1] <= plain[0]


def saving(offload: Offload, parts: int) -> Tensor:
    """A loss behind as many calls."""
    x = torch.linspace(-1, 1, 64, requires_grad=True)
    for _ in range(parts):
        with offload.call():
            x = x.exp().sin()
    return x.sum()


def test_what_is_saved_twice_is_copied_once_and_a_graph_can_be_used_twice() -> None:
    offload = Offload(1)
    x = torch.linspace(-0.1, 0.1, 64).requires_grad_()

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            with offload.call():
                y = x.exp()
                x = (y * y.view(8, 8).flatten()[:64]).sin() - (y.tanh() * y.detach().expand(2, 64)[0]).sin()
        return x.sum()

    loss = function(x)
    assert offload.tensors == 3 * 4  # of which two are saved several times
    slopes = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
    (curve,) = torch.autograd.grad(function(x), x, create_graph=True)
    second = torch.autograd.grad(curve.sum(), x)[0]
    offload.min_bytes = 2**40
    before = offload.bytes
    (plain,) = torch.autograd.grad(function(x), x, create_graph=True)
    assert offload.bytes == before
    assert_equal(slopes, [plain.detach()] * 2)
    assert torch.equal(second, torch.autograd.grad(plain.sum(), x)[0])


def test_what_changes_in_place_before_it_is_copied_is_refused_as_torch_does() -> None:
    x = torch.linspace(-1, 1, 64, requires_grad=True)
    for later in (0, 1, 2):
        offload = Offload(1)
        with offload.call():
            y = x.exp()
        for _ in range(later):  # blocks that run before it is changed
            with offload.call():
                x.sin()
        expected = y.detach().clone()
        y.add_(1)
        if later:
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
            continue
        for call in (contextlib.nullcontext, offload.call):  # while the copy may still run, and when it has to be done
            with call():
                pass
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(y.sum(), x, retain_graph=True)


def test_what_changes_between_two_that_save_it_is_saved_as_each_saw_it() -> None:
    offload, buffer = Offload(1), torch.ones(64)
    first, second = (torch.ones(64, requires_grad=True) for _ in range(2))
    with offload.call():
        one = first * buffer
    with offload.call():
        pass
    buffer.mul_(2)
    with offload.call():
        two = second * buffer
    slopes = torch.autograd.grad(one.sum() + two.sum(), (first, second))
    assert_equal(slopes, (torch.ones(64), torch.full((64,), 2.0)))


def test_parameters_and_their_views_stay_and_hooks_around_get_them() -> None:
    seen: list[Tensor] = []
    offload, weight = Offload(1), nn.Parameter(torch.randn(8, 8))
    other = torch.randn(4, 8, requires_grad=True)

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), offload.call(lambda: [weight]):
        y = nn.functional.linear(other, weight).sin()
    assert {tensor.data_ptr() for tensor in seen} == {weight.data_ptr()}
    assert offload.bytes == 2 * other.nbytes
    y.sum().backward()
    assert weight.grad is not None


@pytest.mark.turns(6, family="slow")
def test_nothing_outlives_the_graph() -> None:
    saved: list[weakref.ref[Any]] = []

    class Noted(Offload):
        def saved(self, tensor: Tensor, call: Any) -> Any:
            made = super().saved(tensor, call)
            saved.append(weakref.ref(made))
            return made

    gc.collect()
    gc.disable()
    try:
        loss = saving(offload := Noted(1), 3)
        assert len(saved) == 6
        assert offload.tensors == 3  # what exp gives is what sin takes
        assert all(ref() is not None for ref in saved)
        del loss  # never differentiated
        assert not any(ref() is not None for ref in saved)
    finally:
        gc.enable()


def test_copies_and_pickles_have_calls_of_their_own() -> None:
    net = Net()
    apply(net, [ActivationOffload(min_bytes=1)])
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net.blocks[0]))):
        loss = twin(X).sum()
        own = next(part._offload for part in twin.modules() if hasattr(part, "_offload"))
        assert own.bytes
        assert own.min_bytes == 1
        loss.backward()
    assert net.blocks[0]._offload.bytes == 0
    assert all(p.grad is None for p in net.parameters())


def test_copies_wait_for_the_computation_and_it_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Stream:
        device = torch.device("cpu")

        def wait_stream(self, other: Any) -> None:
            done.append("copies wait")

        def record_event(self) -> str:
            return "copied"

        def wait_event(self, event: str) -> None:
            assert event == "copied"
            done.append("computation waits")

    offload, pins = Offload(1), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(SideCopies, "beside", lambda self: contextlib.nullcontext())
    offload.copies(torch.device("cpu")).stream = Stream()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: pins.append(pin_memory) or empty(*a, **k))
    loss = saving(offload, 1)
    assert done == ["copies wait"]
    assert pins.count(True) == 1
    done.clear()
    more = saving(offload, 1)
    assert done == ["copies wait", "computation waits"]  # before the first ones' memory is taken again
    done.clear()
    loss.backward()
    assert done == ["copies wait", "computation waits", "computation waits"]  # which two operators use
    assert more.isfinite()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("ratio", [1e-3, 20.0, 1e9])
def test_only_hidden_blocks_are_offloaded_and_the_rest_is_kept_or_recomputed(
    ratio: float, recomputes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights after some steps are those of plain training. A cheap bus takes all blocks but the last."""
    found = []
    for techniques in ([], [ActivationOffload(min_bytes=1, flops_per_byte=ratio)]):
        torch.manual_seed(0)
        module = Toy("init", network=Deep)
        run = trainer([*techniques, *[ActivationCheckpointing()] * recomputes], max_epochs=1)
        with caplog.at_level("INFO"):
            run.fit(module, data(), data())
        found.append({name: p.detach() for name, p in module.named_parameters()})
    assert_equal(*found)
    blocks = list(module.net.blocks)
    offloaded = [block._offloads for block in blocks]
    counted = [block._counted for block in blocks]
    assert len({flops for flops, _ in counted}) == 1
    assert counted[0][0] == 2 * 2 * WIDTH * 4 * WIDTH * 4  # two products for each of four rows
    # As many blocks as fit into the time of those before the last one, at equal distances.
    each = max(1, math.ceil(ratio * counted[1][1] / counted[1][0]))
    if ratio == 20.0:
        assert 1 < each < 8
    assert offloaded == [index % each == 0 and index + each < 8 for index in range(8)]
    if recomputes:
        assert [block._recomputes for block in blocks] == [not one for one in offloaded]
    assert f"{sum(offloaded)} of 8 blocks are offloaded" in caplog.text


def test_blocks_recompute_although_an_earlier_fit_ended_while_they_were_counted() -> None:
    class Stopped(Toy):
        stops = True

        def on_after_backward(self) -> None:
            if self.stops:
                raise RuntimeError("out of memory")

    module = Stopped("init", network=Deep)

    def fit() -> None:
        techniques = [ActivationOffload(min_bytes=1, flops_per_byte=20.0), ActivationCheckpointing()]
        trainer(techniques, max_epochs=1).fit(module, data(), data())

    with pytest.raises(RuntimeError, match="out of memory"):
        fit()
    module.stops = False
    for _ in range(2):
        fit()
        blocks = list(module.net.blocks)
        assert [block._recomputes for block in blocks] == [not block._offloads for block in blocks]


class Deep(Net):
    def __init__(self) -> None:
        super().__init__(depth=8)


def test_hidden_blocks_leave_the_device_when_their_copies_are_done() -> None:
    """Of 8 blocks every third one goes, and is back in time: its copies have the time of three blocks."""
    held = {}
    for chosen in ([], [0, 3], range(8)):
        with fake_cuda():
            net, x = Net(depth=8).cuda(), X.cuda()
            apply(net, [ActivationOffload(min_bytes=1)])
            for index, block in enumerate(net.blocks):
                block._offloads = index in chosen
                block._frees = index - 3 in chosen
            with Resident([*net.parameters(), x]) as resident:
                before = resident.start()
                loss = net(x).square().sum()
                held[len(chosen)] = resident.now() - before
                offload = net.blocks[0]._offload
                if len(chosen) == 2:
                    last = offload._last()
                    assert all(saved.device is None for saved in last._alive())
                    assert all(saved.device is None for saved in last.earlier()._alive())
                loss.backward()
    assert held[8] < held[2] < held[0]
    assert held[0] - held[2] == pytest.approx((held[0] - held[8]) * 2 / 7, rel=0.1)


def test_both_choices_of_recomputed_blocks_are_refused() -> None:
    techniques = [ActivationOffload(flops_per_byte=10.0), ActivationCheckpointing(memory_budget=0.5)]
    with pytest.raises(ConfigurationError, match=r"flops_per_byte and memory_budget .* both choose"):
        trainer(techniques).fit(Toy(), data(), data())


def test_the_first_batch_says_what_went_and_that_nothing_did(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        trainer([ActivationOffload(min_bytes=512)]).fit(Toy(), data(), data())
    assert "tensors were moved to CPU memory in the first batch" in caplog.text
    with pytest.warns(UserWarning, match="nothing was moved to CPU memory .* has 1024 bytes, and min_bytes is 1048576"):
        trainer([ActivationOffload()]).fit(Toy(), data(), data())


def test_bad_arguments_and_devices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="min_bytes must be a whole number of at least 1, got 0"):
        ActivationOffload(min_bytes=0)
    with pytest.raises(ConfigurationError, match="flops_per_byte must be above 0 or null"):
        ActivationOffload(flops_per_byte=0.0)
    with pytest.raises(ConfigurationError, match="found no repeated blocks in Sequential"):
        apply(nn.Sequential(nn.Linear(4, 4)), [ActivationOffload()])
    module = Toy("configure_model")
    with pytest.raises(ConfigurationError, match=r"device is 'cpu', .* nothing can be saved.*ActivationCheckpointing"):
        trainer([lit_efficient.ActivationOffload()]).fit(module, data(), data())
    assert module.net is None


@pytest.mark.gpu
def test_on_a_gpu_gradients_are_equal_and_less_memory_is_taken() -> None:
    found, peaks = [], []
    for offloads in (False, True):
        torch.manual_seed(0)
        net = Net(width=256, depth=8).cuda()
        apply(net, [lit_efficient.ActivationOffload(min_bytes=2**16)] * offloads)
        x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0)).cuda()
        for _ in range(2):
            net.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            net(x).square().mean().backward()
        peaks.append(torch.cuda.max_memory_allocated())
        found.append({name: p.grad.cpu() for name, p in net.named_parameters()})
    assert_equal(*found)
    assert peaks[1] < 0.6 * peaks[0]
