"""BlockSwap: two blocks' frozen weights on the device at any moment; numbers, names and checkpoints of plain runs."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

import lit_efficient
from lit_efficient import (
    ActivationCheckpointing,
    Compile,
    ConfigurationError,
    ConflictError,
    ExactResume,
    LoRA,
    MaxBatchSize,
    QuantizeBase,
)
from lit_efficient.application import apply
from lit_efficient.declaration import check_conflicts
from lit_efficient.mechanisms.blocks.block_map import find_blocks
from lit_efficient.mechanisms.blocks.side_copies import SideCopies
from lit_efficient.mechanisms.blocks.swapping import swapped_tensors
from lit_efficient.testing import Run
from tests.callbacks.test_activation_checkpointing import UNETS
from tests.callbacks.test_stochastic_depth_families import FAMILIES
from tests.contract.effects import training
from tests.contract.row import Row
from tests.cuda.fake_cuda import fake_cuda, on_cuda
from tests.cuda.resident import Resident
from tests.support import WIDTH, Net, Toy, assert_equal, data, trainer

X = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)


class BlockSwap(lit_efficient.BlockSwap):
    """Swaps on the CPU, too, where it saves nothing; where what trains stays, half of the toy's blocks is frozen."""

    def check(self, trainer: Any, module: Any) -> None:
        """Refuse nothing."""

    def transform(self, module: nn.Module) -> Any:
        for _, block in find_blocks(module, who="test") if not self.trained else ():
            for name, p in block.named_parameters():
                if name.endswith(("down.weight", "down.bias")):
                    p.requires_grad_(False)
        return super().transform(module)


def leaves_the_device(run: Run) -> None:
    """Between two calls of the network, two blocks at most have weights in another memory than their own."""
    blocks = [part for part in run.module.modules() if hasattr(part, "_swap")]
    assert len(blocks) in (4, 8)  # in the toy's network, and in one that has attention as well
    there = []
    hooks = [
        block.register_forward_hook(lambda block, *_: there.append([b.there for b in block._swap._blocks.values()]))
        for block in blocks
    ]
    with training(run) as x:
        loss = run.module._sample_loss((x,)).mean()
        if not any(getattr(block, "_recomputes", False) for block in blocks):  # what they drew was drawn in the run
            loss.backward()
            run.module.zero_grad()
    assert there
    assert max(map(sum, there)) == 2
    for hook in hooks:
        hook.remove()
    run.module.state_dict()
    assert not any(block.there for block in blocks[0]._swap._blocks.values())


ROW = Row(
    lambda: BlockSwap(trained=True),
    leaves_the_device,
    neutral=lambda: BlockSwap(trained=True),
    changes=False,
    beside=dict.fromkeys(("OffloadOptimizer", "OptimizerInBackward"), BlockSwap),
)


def adapted(make: Any, *more: Any, **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    net = Net(**arguments)
    apply(net, [*make(), *more])
    for name, p in net.named_parameters():
        if name.endswith("lora_B"):
            nn.init.ones_(p)
    return net


def trained(net: nn.Module, x: Tensor = X) -> dict[str, Any]:
    """Gradients of two steps, and what the network says afterwards."""
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    found: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        found |= {f"{step} {name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
    with torch.no_grad():
        return found | {"output": net(x)}


SETS = {
    "LoRA": lambda: [LoRA(rank=2)],
    "nf4": lambda: [QuantizeBase(), LoRA(rank=2, variant="dora")],
    "int8": lambda: [QuantizeBase("int8"), LoRA(rank=2)],
    "int4, recomputed": lambda: [QuantizeBase("int4", group_size=16), LoRA(rank=2), ActivationCheckpointing()],
    "compiled": lambda: [LoRA(rank=2), Compile(backend="aot_eager")],
    "offloaded": lambda: [QuantizeBase(), LoRA(rank=2), lit_efficient.ActivationOffload(min_bytes=1)],
}


@pytest.mark.turns(6, family="slow")
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("name", SETS)
def test_gradients_weights_and_outputs_are_those_without_it(name: str) -> None:
    plain, ours = adapted(SETS[name]), adapted(SETS[name], lit_efficient.BlockSwap())
    assert_equal(trained(plain), trained(ours))
    assert_equal(dict(plain.state_dict()), dict(ours.state_dict()))
    assert list(plain.state_dict()) == list(ours.state_dict())


TRAINED = SETS | {
    "all": lambda: [],
    "recomputed": lambda: [ActivationCheckpointing()],
    "all, compiled": lambda: [Compile(backend="aot_eager")],
    "all, offloaded": lambda: [lit_efficient.ActivationOffload(min_bytes=1)],
}


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("name", TRAINED)
def test_what_trains_is_swapped_with_its_gradients(name: str) -> None:
    plain = adapted(TRAINED[name])
    ours = adapted(TRAINED[name], lit_efficient.BlockSwap(trained=True))
    assert_equal(trained(plain), trained(ours))
    assert_equal(dict(plain.state_dict()), dict(ours.state_dict()))
    ours(X).sum().backward()  # after which all is at rest
    known = ours.blocks[0]._swap._blocks.values()
    assert not any(block.there or block.gradients for block in known)
    assert all(t.grad is not None for block in known for t in block.tensors if t.requires_grad)


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_several_backward_passes_are_added(set_to_none: bool, clip: float | None) -> None:
    """And a ``zero_grad`` between forward and backward, as Lightning's, clears what the blocks that are there have."""
    ends = []
    for swaps in (False, True):
        net = adapted(list, *[lit_efficient.BlockSwap(trained=True)] * swaps)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for step in range(3):
            loss = net(X * (step + 1)).square().mean()
            optimizer.zero_grad(set_to_none)
            loss.backward()
            for more in range(2):
                net(X - more).square().mean().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
        ends.append(dict(net.state_dict()) | {f"{n}.grad": p.grad for n, p in net.named_parameters()})
    assert_equal(*ends)


@pytest.mark.parametrize("more", [[], [ActivationCheckpointing()]])
def test_two_blocks_with_their_gradients_are_on_the_device_at_any_moment(more: list[Any]) -> None:
    peaks: dict[tuple[bool, str], int] = {}
    found = []
    for swaps in (False, True):
        with fake_cuda():
            parts = [*more, *[lit_efficient.BlockSwap(trained=True)] * swaps]
            net = adapted(list, *parts, width=128, depth=8).cuda()
            x = torch.linspace(-1, 1, 128).view(1, 128).cuda()
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            for _ in range(2):  # the first takes the memory
                optimizer.zero_grad()
                block = sum(p.nbytes for p in net.blocks[0].parameters())
                swap = getattr(net.blocks[0], "_swap", None)
                memories = [known.memory for known in swap._blocks.values() if known.memory is not None] if swap else []
                states = [t for state in optimizer.state.values() for t in state.values()]
                rest = sum(p.nbytes for name, p in net.named_parameters() if "blocks" not in name)
                with Resident([*net.parameters(), *states], memories) as resident:
                    resident.start()
                    loss = net(x).square().sum()
                    peaks[swaps, "forward"] = resident.peak
                    resident.start()
                    loss.backward()
                    peaks[swaps, "backward"] = resident.peak
                    assert all(on_cuda(p) == on_cuda(p.grad) for p in net.parameters())
                    resident.start()
                    optimizer.step()
                    peaks[swaps, "step"] = resident.peak
            for name, p in net.named_parameters():
                assert on_cuda(p) == on_cuda(optimizer.state[p]["exp_avg"]) == (not swaps or "blocks" not in name)
            found.append({name: p.detach().cpu() for name, p in net.named_parameters()})
    assert_equal(*found)
    # Weights and both states are there throughout, gradients from the backward pass on.
    few = 3 * rest + 0.6 * block  # what is not of blocks, and activations
    assert peaks[False, "forward"] >= 24 * block
    assert peaks[True, "forward"] < 2 * block + few
    assert peaks[False, "backward"] >= 32 * block
    assert peaks[True, "backward"] < 3 * block + rest + few
    assert peaks[True, "step"] < 2 * rest + few


class Places(Callback):
    """Where the first block's weights, and the states of their optimizer, are after each step; saves after two."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, set[tuple[bool, ...]]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: object) -> None:
        (optimizer,) = trainer.optimizers
        for name, p in pl_module.named_parameters():
            if "blocks.0" in name:
                self.seen.add(tuple(on_cuda(t) for t in (p, *optimizer.state[p].values()) if t.ndim))
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


class Decayed(Toy):
    """With an optimizer that has states, and one kernel for both devices."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)


def test_a_run_on_a_device_steps_in_cpu_memory_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Lightning moves the states that it has read to the device, where the weights are not."""
    ends = []
    path = tmp_path / "half.ckpt"
    for swaps, resumed in [(False, None), (True, None), (True, path)]:
        places = Places(path)
        with fake_cuda():
            torch.manual_seed(0)
            parts = [ExactResume(seed=1), places, *[lit_efficient.BlockSwap(trained=True)] * swaps]
            run = trainer(parts, accelerator="gpu", deterministic=True, max_steps=4, limit_val_batches=0)
            module = Decayed("configure_model")
            run.fit(module, data(shuffle=True), data(), ckpt_path=resumed, weights_only=True)
            ends.append({name: tensor.cpu() for name, tensor in module.state_dict().items()})
        assert places.seen == {(not swaps,) * 3}
    assert_equal(ends[0], ends[1])
    assert_equal(ends[0], ends[2])


def test_what_has_no_gradients_to_find_is_refused() -> None:
    run = trainer()
    run.precision_plugin.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ConflictError, match=r"gradient scaler .*bf16-mixed"):
        lit_efficient.BlockSwap(trained=True).check(run, Toy())
    net = adapted(list, lit_efficient.BlockSwap(trained=True))
    with pytest.raises(ConfigurationError, match="Leave out trained=True"):
        net(X).sum().backward(create_graph=True)
    swap = lit_efficient.BlockSwap(trained=True)
    for other in (lit_efficient.OptimizerInBackward(), lit_efficient.OffloadOptimizer()):
        with pytest.raises(ConflictError, match=r"BlockSwap\(trained=True\)"):
            check_conflicts([swap, other])
        check_conflicts([lit_efficient.BlockSwap(), other])


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", ["timm Swin", "UNet2DConditionModel"])
def test_matrices_of_networks_of_others_are_swapped(name: str) -> None:
    """Norms and biases train; blocks run in another order than their names'."""
    nets, found = [], []
    for techniques in ([], [lit_efficient.BlockSwap(), lit_efficient.ActivationOffload(min_bytes=1)]):
        torch.manual_seed(0)
        net = (FAMILIES | UNETS)[name].make().train()
        for p in net.parameters():
            p.requires_grad_(p.ndim < 2)
        apply(net, techniques)
        torch.manual_seed(1)
        (FAMILIES | UNETS)[name].call(net).float().square().sum().backward()
        nets.append(dict(net.state_dict()))
        found.append({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
    assert_equal(*found)
    assert_equal(*nets)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Before there seems to be a GPU: its import asks torch's build."""
    import_module("bitsandbytes")


@pytest.mark.parametrize(
    ("format", "more"), [(None, []), (None, [ActivationCheckpointing()]), ("nf4", [ActivationCheckpointing()])]
)
def test_two_blocks_are_on_the_device_at_any_moment(format: str | None, more: list[Any]) -> None:
    base = [QuantizeBase(format)] if format else []
    peaks: dict[tuple[bool, str], int] = {}
    found = []
    for swaps in (False, True):
        with fake_cuda():
            net = adapted(
                lambda: [*base, LoRA(rank=1), *more], *[lit_efficient.BlockSwap()] * swaps, width=128, depth=8
            ).cuda()
            x = torch.linspace(-1, 1, 128).view(1, 128).cuda()
            net(x)  # which takes the memory
            block = sum(t.nbytes for t in swapped_tensors(net.blocks[0], dict(net.blocks[0].named_parameters())))
            swap = getattr(net.blocks[0], "_swap", None)
            memories = [known.memory for known in swap._blocks.values()] if swap else []
            rest = sum(p.nbytes for name, p in net.named_parameters() if "blocks" not in name or p.requires_grad)
            weights_ = [t for b in net.blocks for t in swapped_tensors(b, dict(b.named_parameters()))]
            with Resident([*net.parameters(), *weights_], memories) as resident:
                loss = net(x).square().sum()
                peaks[swaps, "forward"] = resident.peak - rest
                resident.start()
                loss.backward()
                peaks[swaps, "backward"] = resident.peak - rest
                resident.start()
                with torch.no_grad():
                    net(x)
                peaks[swaps, "evaluation"] = resident.peak - rest
            found.append({name: p.grad.cpu() for name, p in net.named_parameters() if p.grad is not None})
    assert_equal(*found)
    for phase in ("forward", "backward", "evaluation"):
        assert peaks[False, phase] >= 8 * block
        assert peaks[False, phase] - peaks[True, phase] > 5.9 * block  # what a layer dequantises is in both
        assert format or peaks[True, phase] < 2.5 * block


def test_a_run_on_a_device_leaves_the_blocks_in_cpu_memory(tmp_path: Path) -> None:
    with fake_cuda():
        module = Toy("configure_model")
        run = trainer([LoRA(rank=2, save_base=True), lit_efficient.BlockSwap()], accelerator="gpu")
        run.fit(module, data(), data())
        run.save_checkpoint(tmp_path / "swapped.ckpt", weights_only=True)
        assert on_cuda(module.seen["sample_loss"])
    (plain := trainer([LoRA(rank=2, save_base=True)])).fit(other := Toy("configure_model"), data(), data())
    plain.save_checkpoint(tmp_path / "plain.ckpt", weights_only=True)
    states = [torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("swapped", "plain")]
    assert list(states[0]["state_dict"]) == list(states[1]["state_dict"])
    torch.testing.assert_close(*(state["state_dict"] for state in states))
    sizes = [(tmp_path / f"{name}.ckpt").stat().st_size for name in ("swapped", "plain")]
    assert sizes[0] < 1.05 * sizes[1]  # no storage is larger than what it is of
    assert all(p.device.type == "cpu" for p in other.parameters())


def test_trials_that_are_undone_and_evaluation_that_comes_first_leave_no_trace() -> None:
    """A record of all memory is taken while some of it is empty, and a validation makes it in inference mode."""
    ends = []
    for swaps in (False, True):
        module = Toy("configure_model")
        with fake_cuda():
            parts = [LoRA(rank=2), *[lit_efficient.BlockSwap()] * swaps, MaxBatchSize(max_size=2)]
            run = trainer(parts, accelerator="gpu", num_sanity_val_steps=2)
            torch.manual_seed(0)
            run.fit(module, data(), data())
            ends.append({name: tensor.cpu() for name, tensor in module.state_dict().items()})
    assert_equal(*ends)


@pytest.fixture
def swapped() -> nn.Module:
    net = adapted(SETS["LoRA"], lit_efficient.BlockSwap())
    net(X)
    return net


def test_what_is_written_while_a_block_is_there_or_away_is_kept(swapped: nn.Module) -> None:
    blocks = swapped.blocks
    known = blocks[0]._swap._blocks
    assert [known[i].there for i in range(4)] == [False, False, True, True]
    reference = adapted(SETS["LoRA"])
    with torch.no_grad():
        for net in (swapped, reference):
            net.blocks[3].up.weight.mul_(2)  # there
            net.blocks[0].up.weight.mul_(3)  # away
            net.blocks[2].up.weight.data = net.blocks[2].up.weight.data * 5  # replaced, there
            net.blocks[1].up.weight.data = net.blocks[1].up.weight.data * 7  # replaced, away
    for _ in range(2):
        assert_equal(swapped(X), reference(X))
    assert_equal(dict(swapped.state_dict()), dict(reference.state_dict()))
    assert not any(known[i].there for i in range(4))  # as a state is nothing that is filled anew
    swapped(X)
    state = {name: tensor * 2 for name, tensor in swapped.state_dict().items()}
    swapped(X)
    for net in (swapped, reference):
        net.load_state_dict(state)
    assert_equal(swapped(X), reference(X))
    assert_equal(dict(swapped.state_dict()), state)
    assert_equal(swapped.double()(X.double()), reference.double()(X.double()))
    assert blocks[0].up.weight.dtype == torch.float64


def test_what_begins_to_train_stays_on_the_device(swapped: nn.Module) -> None:
    weight = swapped.blocks[1].up.weight
    with fake_cuda():
        swapped.cuda()
        swapped(X.cuda())
        assert not on_cuda(weight)
        weight.requires_grad_(True)
        swapped(X.cuda()).sum().backward()
        assert on_cuda(weight)
        assert on_cuda(weight.grad)
        swapped(X.cuda())
        swapped.state_dict()
        assert on_cuda(weight)
        assert not on_cuda(swapped.blocks[1].down.weight)


def test_copies_and_pickles_swap_on_their_own(swapped: nn.Module) -> None:
    expected = swapped(X).detach()
    twins = [copy.deepcopy(swapped), copy.deepcopy(swapped)]
    twins[1].blocks = pickle.loads(pickle.dumps(swapped.blocks))
    with torch.no_grad():
        for p in swapped.parameters():
            p.zero_()
    for twin in twins:
        for _ in range(2):
            assert_equal(twin(X).detach(), expected)
        assert sum(block.there for block in twin.blocks[0]._swap._blocks.values()) == 2
        twin(X).sum().backward()
    assert swapped(X).count_nonzero() == 0


def test_a_graph_can_be_used_twice_and_blocks_in_any_order() -> None:
    nets = [adapted(SETS["LoRA"]), adapted(SETS["LoRA"], lit_efficient.BlockSwap())]
    found = []
    for net in nets:
        a, b = net.blocks[2](net.blocks[0](X)), net.blocks[3](net.blocks[1](X))
        loss = (net.blocks[0](a) * b).sum() + net.blocks[1](X).sum()
        wanted = [p for p in net.blocks.parameters() if p.requires_grad]
        found.append([torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True) for _ in range(2)])
    assert_equal(*[[[0 if g is None else g for g in grads] for grads in each] for each in found])


def test_shared_weights_and_the_first_blocks_stay() -> None:
    net = Net(depth=6)
    net.requires_grad_(False)
    net.blocks[4].up.weight = net.blocks[5].up.weight
    report = apply(net, [lit_efficient.BlockSwap(keep=1)])["BlockSwap"]
    assert report.modules == tuple(f"blocks.{i}" for i in range(1, 6))
    assert "up.weight" not in net.blocks[4]._swap_names
    assert "up.weight" in net.blocks[3]._swap_names
    expected = copy.deepcopy(net)(X)
    assert_equal(net(X), expected)


class Peeking(nn.Module):
    """A block that gives its own weights away, or nothing that can be followed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return {"view": (y, self.layer.weight[:2]), "object": Run(None, y)}[self.how]


@pytest.mark.parametrize(("how", "message"), [("view", "a view of its own weights"), ("object", "contains no tensors")])
def test_what_could_not_be_right_is_refused(how: str, message: str) -> None:
    net = nn.ModuleList([Peeking(how) for _ in range(3)])
    apply(net, [lit_efficient.BlockSwap(blocks=[r"\d"])])
    with pytest.raises(ConfigurationError, match=message):
        net[0](X.clone().requires_grad_())


def test_copies_wait_for_the_computation_and_it_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Stream:
        device = torch.device("cpu")

        def wait_stream(self, other: Any) -> None:
            done.append("copies wait")

        def record_event(self) -> str:
            done.append("copied")
            return f"copy {done.count('copied')}"

        def wait_event(self, event: str) -> None:
            done.append(f"computation waits for {event}")

    def host(self: Any, size: int) -> Tensor:
        done.append("taken")
        return torch.empty(size, dtype=torch.uint8)

    net = adapted(SETS["LoRA"], lit_efficient.BlockSwap())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream())
    monkeypatch.setattr(SideCopies, "beside", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(SideCopies, "host", host)
    swap = net.blocks[0]._swap
    swap._copies[torch.device("cpu")] = copies = SideCopies(torch.device("cpu"))
    copies.stream = Stream()
    net.blocks[0](X)
    came = ["copies wait", "copied"]
    assert done == ["taken", *came, "taken", *came, "computation waits for copy 1"]  # not for the next one's
    done.clear()
    swap._blocks[1].done = "copy of 1"
    net.blocks[1](X)
    assert done == ["taken", *came, "computation waits for copy of 1"]
    for i in (2, 3, 0):
        net.blocks[i](X)
    done.clear()
    net.blocks[1](X)
    assert "taken" not in done


def test_bad_arguments_and_devices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="BlockSwap: keep must be a whole number of at least 0, got -1"):
        lit_efficient.BlockSwap(keep=-1)
    with pytest.raises(ConfigurationError, match="keep must be below 2, because 2 of 4 blocks are always there, got 2"):
        apply(Net(), [lit_efficient.BlockSwap(keep=2)])
    with pytest.raises(
        ConfigurationError, match="Net has 2 blocks, and 2 are on the device at a time, so that nothing can be saved"
    ):
        apply(Net(depth=2), [lit_efficient.BlockSwap()])
    with pytest.raises(ConfigurationError, match=r"nothing is frozen in the 4 blocks of Net.*add LoRA"):
        apply(Net(), [lit_efficient.BlockSwap()])
    module = Toy("configure_model")
    with pytest.raises(ConfigurationError, match=r"device is 'cpu'.*nothing can be saved.*QuantizeBase"):
        trainer([lit_efficient.BlockSwap()]).fit(module, data(), data())
    assert module.net is None
    with pytest.raises(ConflictError, match=r"DDPStrategy needs all weights on the devices.*FSDP2"):
        lit_efficient.BlockSwap().check(trainer(strategy="ddp"), module)


def test_kept_casts_are_warned_of() -> None:
    parts = [LoRA(rank=2), BlockSwap()]
    with pytest.warns(UserWarning, match="keeps a copy of its frozen float32 weight in 16 bits"):
        trainer(parts, precision="bf16-mixed").fit(Toy(), data(), data())
    trainer([*parts, ActivationCheckpointing()], precision="bf16-mixed").fit(Toy(), data(), data())


@pytest.mark.gpu
@pytest.mark.parametrize("everything", [False, True])
def test_on_a_gpu_gradients_are_equal_and_less_memory_is_taken(everything: bool) -> None:
    found, peaks, net = [], [], None
    for swaps in (False, True):
        net = None
        gc.collect()  # of what is wrapped in place
        parts = [lit_efficient.BlockSwap(trained=everything)] * swaps
        net = adapted(TRAINED["all" if everything else "LoRA"], *parts, width=512, depth=12).cuda()
        x = torch.linspace(-1, 1, 16 * 512).view(16, 512).cuda()
        trained(net, x)
        torch.cuda.reset_peak_memory_stats()
        found.append({name: tensor.cpu() for name, tensor in trained(net, x).items()})
        peaks.append(torch.cuda.max_memory_allocated())
    if everything:  # stepped on the CPU, whose kernels round in another order
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    else:
        assert_equal(*found)
    weights = sum(p.nbytes for p in net.parameters())
    assert peaks[0] - peaks[1] > 0.75 * weights  # ten of twelve blocks; a peak holds cuBLAS's own memory, too
    assert all(block._swap._blocks[i].host.is_pinned() for i, block in enumerate(net.blocks))
