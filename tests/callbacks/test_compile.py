"""Compile: graphs are counted, names are as before, steps of one shape compile once, and the numbers stay."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch._dynamo.utils import counters

from lit_efficient import (
    EMA,
    GPT,
    ActivationCheckpointing,
    ChannelsLast,
    Compile,
    ConfigurationError,
    ConflictError,
    GPTConfig,
    HiddenAlignment,
    LatentAlignment,
    LoRA,
    StochasticDepth,
)
from lit_efficient.application import apply
from lit_efficient.mechanisms.trials.memory import SavedTensors
from tests.callbacks.test_activation_checkpointing import Dropping, teacher
from tests.callbacks.test_stochastic_depth_families import FAMILIES, IDS, built
from tests.support import WIDTH, Net, Toy, assert_equal, convolved, data, trainer, weights

X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


class Numbered(nn.Module):
    """Blocks that differ in a number, as those of many networks do."""

    def __init__(self, depth: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(i / 100)) for i in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class GraphsByBatch(Callback):
    """How many graphs there are after each batch of training."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        if not self.counts:
            self.counts.append(graphs())

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(graphs())


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()  # what other tests have compiled would not be compiled again


def fit(*callbacks: Any, module: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    run = trainer(list(callbacks), **arguments)
    run.fit(Toy() if module is None else module, data(), data())
    return run


def test_alike_blocks_share_one_graph_that_every_step_uses() -> None:
    plain, marks = fit(), GraphsByBatch()
    run = fit(Compile(backend="eager"), marks)
    assert [count - marks.counts[0] for count in marks.counts] == [0, 1, 1, 1, 1]
    assert graphs() == marks.counts[-1] + 1  # evaluation without gradients
    assert_equal(weights(plain.lightning_module), weights(run.lightning_module))
    assert all(block._compiled_call_impl is not None for block in run.lightning_module.net.blocks)
    assert run.lightning_module.net._compiled_call_impl is None


def test_sizes_that_are_free_from_the_start_are_compiled_once() -> None:
    def compiled(dynamic: bool | None) -> int:
        torch._dynamo.reset()
        marks = GraphsByBatch()
        run = trainer([Compile(backend="eager", dynamic=dynamic), marks])
        run.fit(Toy(), data(10), data())  # whose last batch has two rows
        return marks.counts[-1] - marks.counts[0]

    assert (compiled(None), compiled(True)) == (2, 1)


@pytest.mark.turns(4, family="compiled")
def test_blocks_that_differ_in_a_number_are_all_compiled() -> None:
    """Torch's own limit is eight versions of a function: two of ten blocks would run uncompiled."""
    before = counters["frames"]["total"] - counters["frames"]["ok"]
    first, net = graphs(), Numbered()
    report = apply(net, [Compile(backend="eager")])["Compile"]
    net(torch.ones(2, 4))
    assert len(report.modules) == 10
    assert graphs() - first == 10
    assert counters["frames"]["total"] - counters["frames"]["ok"] == before


@pytest.mark.parametrize(
    ("modules", "expected"),
    [("network", ("net",)), ("blocks", tuple(f"net.blocks.{i}" for i in range(4))), (["net.head"], ("net.head",))],
)
def test_what_is_compiled_is_said_and_named_as_before(modules: Any, expected: tuple[str, ...]) -> None:
    module, first = Toy(), graphs()
    names = [name for name, _ in module.named_parameters()]
    report = apply(module, [Compile(modules, backend="eager")])["Compile"]
    assert report.modules == expected
    assert [name for name, _ in module.named_parameters()] == names
    assert list(module.state_dict()) == names
    assert torch.equal(module.net(X), Toy().net(X))
    assert graphs() - first == 1


def test_containers_are_opened_and_what_does_not_train_is_left_out() -> None:
    module = Toy()
    module.pair = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
    module.frozen = nn.Linear(2, 2).requires_grad_(False)
    assert apply(module, [Compile("network", backend="eager")])["Compile"].modules == ("net", "pair.0")
    assert apply(Net(), [Compile("network", backend="eager")])["Compile"].modules == ("",)


@pytest.mark.turns(4, family="compiled")
@pytest.mark.parametrize("save", [None, ["matmul"]])
def test_recomputed_blocks_are_compiled_whole_with_right_dropout(save: list[str] | None) -> None:
    def run(*techniques: Any) -> tuple[int, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        net = Dropping().train()
        apply(net, techniques)
        with SavedTensors(net.parameters()) as saved:
            output = net(X.repeat(64, 1))  # so many that random states, which are saved too, are small beside them
        output.square().sum().backward()
        gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        return saved.bytes, {"": output.detach(), **gradients, **dict(net.named_buffers())}

    recompute, first = ActivationCheckpointing(save=save), graphs()
    (_, plain), (compiled, _) = run(), run(Compile(backend="aot_eager"))
    less, tensors = run(recompute, Compile(backend="aot_eager"))
    assert graphs() - first == 2
    torch.testing.assert_close(tensors, plain)
    assert less < compiled


def test_a_backend_that_would_recompute_other_random_numbers_is_refused() -> None:
    with pytest.raises(ConflictError, match="'eager' recomputes a block with other random numbers"):
        apply(Net(), [ActivationCheckpointing(), Compile(backend="eager")])


def test_blocks_within_recomputed_ones_are_compiled_with_them() -> None:
    net = Net()
    techniques = [ActivationCheckpointing(every=2), Compile([r"blocks\.[01]\.up"], backend="aot_eager")]
    assert apply(net, techniques)["Compile"].modules == ("blocks.0", "blocks.1.up")


@pytest.mark.turns(4, family="compiled")
def test_the_compiler_keeps_to_a_memory_budget() -> None:
    def kept(budget: float | None) -> int:
        module = Toy(network=GPTOnRows)
        saved: list[int] = []

        class Measure(Callback):
            def on_train_batch_start(self, *_: Any) -> None:
                self.saved = SavedTensors(module.parameters())
                self.saved.__enter__()

            def on_before_backward(self, *_: Any) -> None:
                self.saved.__exit__()
                saved.append(self.saved.bytes)

        technique = [] if budget is None else [ActivationCheckpointing(memory_budget=budget)]
        fit(*technique, Compile(backend="aot_eager"), Measure(), module=module, max_steps=2)
        assert saved[0] == saved[1]
        return saved[0]

    assert kept(0.0) < kept(0.5) < kept(None)
    assert torch._functorch.config.activation_memory_budget == 1.0


class GPTOnRows(nn.Module):
    """Some tokens more than the other toys have."""

    takes_labels = False

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(GPTConfig(8, dim=WIDTH, depth=2, num_heads=2, hidden_dim=64, max_length=64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gpt((2 * x + 4).long().clamp(0, 7))[..., 0]


@pytest.mark.turns(4, family="compiled")
@pytest.mark.parametrize("skip", ["batch", "sample"])
def test_stochastic_depth_draws_as_without(skip: str) -> None:
    runs = [fit(StochasticDepth(0.6, skip=skip), *c, max_epochs=2) for c in ([], [Compile(backend="eager")])]
    assert_equal(weights(runs[0].lightning_module), weights(runs[1].lightning_module))


def latent_alignment() -> LatentAlignment:
    return LatentAlignment(teacher(), encoder=r"blocks\.1", decoder=r"blocks\.2", images="0")


@pytest.mark.turns(4, family="compiled")
@pytest.mark.parametrize(
    ("backend", "make"),
    [
        ("eager", lambda: [HiddenAlignment(2, teacher(), hidden=8, source="0")]),
        ("eager", lambda: [LoRA(rank=2, targets=["up"]), EMA(decay=0.5)]),
        ("aot_eager", lambda: [latent_alignment()]),
        ("aot_eager", lambda: [ActivationCheckpointing(), latent_alignment()]),
    ],
)
def test_other_techniques_train_as_without(backend: str, make: Any) -> None:
    """LatentAlignment takes gradients twice, which a compiled backward does not allow by itself."""
    runs = [fit(*make(), *c) for c in ([], [Compile(backend=backend)])]
    torch.testing.assert_close(weights(runs[1].lightning_module), weights(runs[0].lightning_module))
    assert torch._functorch.config.donated_buffer  # as before


@pytest.mark.turns(4, family="compiled")
def test_convolutions_with_channels_last_are_compiled() -> None:
    runs = [
        fit(*c, module=Toy(network=convolved(Net))) for c in ([], [ChannelsLast(), Compile("network", backend="eager")])
    ]
    torch.testing.assert_close(weights(runs[1].lightning_module), weights(runs[0].lightning_module))


@pytest.mark.turns(6, family="slow")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")  # imported by inductor
def test_inductor_compiles_blocks_that_train_alike() -> None:
    torch.manual_seed(0)
    nets = [nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))]
    nets.append(copy.deepcopy(nets[0]))
    report = apply(nets[1], [Compile()])["Compile"]
    assert report.summary == "2 modules (Sequential) are compiled in place by inductor"
    first = graphs()
    for net in nets:
        net(torch.ones(2, 4, requires_grad=True)).square().sum().backward()
    assert graphs() - first == 1
    for ours, plain in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)


@pytest.mark.turns(4, family="compiled")
@pytest.mark.parametrize("name", ["Llama", "DiT"])
def test_networks_of_others_and_ours_are_compiled(name: str) -> None:
    nets = [built(name).train() for _ in range(2)]
    apply(nets[1], [Compile(backend="eager", fullgraph=True)])
    first = graphs()
    for net in nets:
        output = net(input_ids=IDS, use_cache=False).logits if name == "Llama" else FAMILIES[name].call(net)
        output.square().sum().backward()
    assert graphs() - first == 1
    for ours, plain in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)


@pytest.mark.turns(4, family="compiled")
def test_copies_and_pickles_work_and_are_compiled_by_their_own_fit() -> None:
    module = fit(StochasticDepth(0.2), Compile(backend="eager")).lightning_module
    block = module.net.blocks[0].eval()
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert twin._compiled_call_impl is None
        assert torch.equal(twin(X), block(X))
    module.train()._trainer = None
    twin = copy.deepcopy(module)
    fit(StochasticDepth(0.2), Compile(backend="eager"), module=twin)
    assert all(part._compiled_call_impl is not None for part in twin.net.blocks)


def test_what_runs_uncompiled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fit(Compile(backend="eager"))
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compile: ")]
    assert said == ["Compile: 2 new graphs of 2 functions in this fit"]


class Printing(nn.Module):
    """Breaks its graph in the second line of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        sys.stdout.write("")
        return x + 1


class Looping(Printing):
    """Is given up whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            if x.sum() > 0:
                x = self.inner(x)
        return x


class Breaking(Net):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = Printing(), Looping()


def test_the_places_where_graphs_break_are_named_with_their_reasons(caplog: pytest.LogCaptureFixture) -> None:
    begin, forward = inspect.getsourcelines(Printing.forward)[1], inspect.getsourcelines(Looping.forward)[1]
    chosen = Compile(modules=["stem", "head"], backend="eager")
    with caplog.at_level("INFO"), pytest.warns(match=r"\d functions or versions of them, which ran uncompiled"):
        fit(chosen, module=Toy("configure_model", network=Breaking))
    (said,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("Compile: 2 graph breaks"))
    first, *places = said.splitlines()
    assert first == "Compile: 2 graph breaks, each of which returns to Python:"
    assert places[0].startswith(f"  {__file__}:{begin + 2}: ")
    assert "write" in places[0]
    assert places[1].startswith(f"  {__file__}:{forward}: Data-dependent branching.")
    assert places[1].endswith("the whole function runs uncompiled")


class Branching(Printing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum() > 0 else x


class Whole(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = Branching()


def test_fullgraph_says_which_line_it_refuses() -> None:
    with pytest.raises(RuntimeError) as raised:
        fit(Compile(modules=["head"], backend="eager", fullgraph=True), module=Toy("configure_model", network=Whole))
    line = inspect.getsourcelines(Branching.forward)[1] + 1
    (note,) = raised.value.__notes__
    assert f"fullgraph=True allows no graph break, and {__file__}:{line} has one: Data-dependent branching" in note


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "inductr"}, r"backend must be one of .*\(did you mean inductor\?\), got 'inductr'"),
        ({"mode": "fast"}, "mode must be one of default, reduce-overhead, .*got 'fast'"),
        ({"mode": "max-autotune", "backend": "aot_eager"}, "mode 'max-autotune' needs the backend inductor"),
        ({"modules": []}, r"modules must be blocks, network or patterns, got \[\]"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"Compile: {message}"):
        Compile(**arguments)


def test_what_is_compiled_already_is_refused() -> None:
    net = Net()
    net.blocks[2].compile(backend="eager")
    with pytest.raises(ConfigurationError, match=r"Compile: 'blocks\.2', or a part of it, is compiled already"):
        apply(net, [Compile(backend="eager")])
    with pytest.raises(ConfigurationError, match=r"found no repeated blocks in .*: modules="):
        apply(nn.Sequential(nn.Linear(4, 4)), [Compile()])


def test_a_whole_network_is_refused_beside_stochastic_depth() -> None:
    with pytest.raises(ConflictError, match=r"Compile\(modules='network'\): .* blocks or patterns"):
        trainer([StochasticDepth(0.5), Compile("network", backend="eager")]).fit(Toy(), data(), data())
