"""Stochastic depth: exact in expectation, blocks that are really not run, the same draw when recomputed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lit_efficient import GPT, ConfigurationError, GPTConfig, StochasticDepth
from lit_efficient.application import apply
from lit_efficient.callbacks.stochastic_depth import drop_block, drop_rows, linear_rates
from tests.contract import effects
from tests.contract.row import Row
from tests.support import Block, Net, Toy, assert_equal, data, trainer, weights

ROW = Row(lambda: StochasticDepth(rate=0.7), effects.blocks_are_skipped, lambda: StochasticDepth(rate=0.0))


def test_linear_rates_end_at_the_rate() -> None:
    assert linear_rates(0.5, 4) == [0.125, 0.25, 0.375, 0.5]


def test_dropping_a_block_is_exact_in_expectation() -> None:
    block, x = Block(8), torch.randn(3, 8)
    kept, dropped = (drop_block(block, x, 0.3, drop=drop) for drop in (False, True))
    torch.testing.assert_close(0.7 * kept + 0.3 * dropped, block(x))
    assert torch.equal(dropped, x)


def test_dropping_rows_is_exact_in_expectation() -> None:
    """Over all subsets of 2 of 4 rows, which are equally likely."""
    block, x = Block(8), torch.randn(4, 8)
    subsets = [torch.tensor(rows) for rows in itertools.combinations(range(4), 2)]
    outputs = [drop_rows(block, x, 0.5, rows=rows) for rows in subsets]
    torch.testing.assert_close(torch.stack(outputs).mean(0), block(x))
    assert torch.equal(outputs[0][2:], x[2:])


def test_rows_take_their_own_conditions_along() -> None:
    class Conditioned(nn.Module):
        def forward(
            self, x: torch.Tensor, c: torch.Tensor, *, scale: torch.Tensor, table: torch.Tensor
        ) -> torch.Tensor:
            return x + c * scale + table.sum()

    x, c, scale, table = torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 1), torch.ones(7)
    rows = torch.tensor([2, 0])
    y = drop_rows(Conditioned(), x, 0.5, c, rows=rows, scale=scale, table=table)
    torch.testing.assert_close(y[[0, 2]], (x + 2 * (c * scale + 7))[[0, 2]])
    assert torch.equal(y[[1, 3]], x[[1, 3]])


def test_a_dropped_block_is_not_run_and_its_gradients_are_those_of_a_mask() -> None:
    runs: list[int] = []
    block = Block(8)
    block.register_forward_hook(lambda *_: runs.append(1))
    x = torch.randn(3, 8, requires_grad=True)
    drop_block(block, x, 0.5, parameters=block.parameters(), drop=True).sum().backward()
    assert runs == []
    assert torch.equal(x.grad, torch.ones(3, 8))
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in block.parameters())


def test_the_network_may_change_the_output_of_a_dropped_block_in_place() -> None:
    """As recommenders do, which multiply by a mask of the padding between blocks."""
    block = Block(8)
    x = torch.randn(3, 8, requires_grad=True)
    hidden = x * 1
    y = drop_block(block, hidden, 0.5, parameters=block.parameters(), drop=True)
    y *= 2
    assert torch.equal(hidden, x)
    (y + hidden).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 8), 3.0))


def test_gradients_of_kept_blocks_equal_those_of_a_mask() -> None:
    block, x = Block(8), torch.randn(3, 8)
    ours = torch.autograd.grad(drop_block(block, x, 0.3, drop=False).square().sum(), list(block.parameters()))
    mask = x + (block(x) - x) * (torch.tensor(1.0) / 0.7)
    theirs = torch.autograd.grad(mask.square().sum(), list(block.parameters()))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("skip", ["batch", "sample"])
def test_in_eval_every_block_runs(skip: str) -> None:
    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    apply(net, [StochasticDepth(0.9, mode="uniform", skip=skip)])
    x = torch.randn(8, 16)
    assert torch.equal(net.eval()(x), plain.eval()(x))
    assert not torch.equal(net.train()(x), plain(x))


@pytest.mark.parametrize("skip", ["batch", "sample"])
def test_recomputed_blocks_repeat_their_draw(skip: str) -> None:
    """Outside a trainer the draw is torch's; checkpoint restores it. Inside, it is fixed for the batch."""
    net, x = Net(), torch.randn(8, 16)
    apply(net, [StochasticDepth(0.6, mode="uniform", skip=skip)])
    for i, block in enumerate(net.blocks):
        block._drop_seed, block._drop_now = i, i % 2 == 0
    direct = torch.autograd.grad(net(x).square().sum(), net.stem.weight)[0]
    y = net.stem(x)
    for block in net.blocks:
        y = checkpoint(block, y, use_reentrant=False)
    recomputed = torch.autograd.grad(net.head(y).square().sum(), net.stem.weight)[0]
    assert torch.equal(direct, recomputed)


@pytest.mark.turns(4, family="learns")
def test_training_drops_at_the_rates_that_it_reports() -> None:
    counts = [0, 0, 0, 0]

    class Counting(Toy):
        def on_train_start(self) -> None:
            for i, block in enumerate(self.net.blocks):
                block.up.register_forward_hook(lambda *_, i=i: counts.__setitem__(i, counts[i] + 1))

    run = trainer([StochasticDepth(0.8)], max_epochs=50, limit_val_batches=1, check_val_every_n_epoch=100)
    run.fit(Counting(), data(), data())
    assert run.global_step == 200
    assert [count / 200 for count in counts] == pytest.approx([0.8, 0.6, 0.4, 0.2], abs=0.09)


def test_the_draw_depends_on_the_seed_and_the_batch_alone() -> None:
    states = []
    for seed, noise in ((0, 0), (0, 99), (1, 0)):
        torch.manual_seed(noise)
        module = Toy("configure_model")
        trainer([StochasticDepth(0.7, seed=seed)]).fit(module, data(), data())
        states.append(weights(module))
    assert_equal(states[0], states[1])
    assert not torch.equal(states[0]["net.head.weight"], states[2]["net.head.weight"])


def test_after_training_the_draw_is_torchs_again() -> None:
    module = Toy("configure_model")
    trainer([StochasticDepth(0.9, mode="uniform")]).fit(module, data(), data())
    module.train()
    outputs = {module.net(torch.ones(2, 16)).sum().item() for _ in range(32)}
    assert len(outputs) > 1


def test_blocks_that_are_not_residual_are_refused() -> None:
    class Widening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 8)), nn.Sequential(nn.Linear(8, 8))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    with pytest.raises(ConfigurationError, match=r"these blocks cannot be skipped: layers\.0, layers\.1"):
        apply(Widening(), [StochasticDepth(0.5)])


class Halving(nn.Module):
    """A shortcut without weights that halves the picture, as the networks of CIFAR have it."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.conv, self.stride = nn.Sequential(nn.Conv2d(3, 3, 3, stride, 1)), stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, :: self.stride, :: self.stride] + self.conv(x)


class HalvingAt(Halving):
    """One that is given the time, too: what its input looks like is not known before."""

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * time


class InTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([HalvingAt(1), HalvingAt(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, torch.ones(()))
        return x


def test_what_changes_the_shape_is_left_out_or_refused_with_the_blocks_name() -> None:
    net = nn.Sequential(Halving(1), Halving(2))
    report = apply(net, [StochasticDepth(0.5)])["StochasticDepth"]
    assert report.modules == ("0",)
    assert report.summary.endswith("left out: 1 (it changes the shape)")
    assert net(torch.ones(1, 3, 4, 4)).shape == (1, 3, 2, 2)
    late = InTime()
    apply(late, [StochasticDepth(0.5)])
    message = r"StochasticDepth: block 'blocks\.1': a block maps x \[1, 3, 4, 4\], time \[\] to"
    with pytest.raises(ConfigurationError, match=message):
        late(torch.ones(1, 3, 4, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 1.0}, "rate must be at least 0 and below 1, got 1.0"),
        ({"rate": -0.1}, "rate must be at least 0 and below 1, got -0.1"),
        ({"mode": "cubic"}, "mode must be one of linear, uniform, got 'cubic'"),
        ({"skip": "token"}, "skip must be one of batch, sample, got 'token'"),
    ],
)
def test_arguments_are_checked_when_it_is_built(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"StochasticDepth: {message}"):
        StochasticDepth(**arguments)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_rows_of_our_gpt_are_cut_whatever_the_batch_size(batch: int) -> None:
    gpt = GPT(GPTConfig(vocab_size=32, dim=16, depth=2, num_heads=2, max_length=8))
    ids = torch.randint(0, 32, (batch, 8))
    whole = gpt(ids)
    apply(gpt, [StochasticDepth(0.4, mode="uniform", skip="sample")])
    outputs = torch.stack([gpt(ids) for _ in range(4)])
    assert outputs.shape[1:] == whole.shape
    assert torch.equal(outputs[0], whole) == (batch == 1)  # a single row always runs


def test_frozen_blocks_of_a_teacher_count_for_no_depth() -> None:
    net = nn.ModuleDict({"student": Net(depth=4), "teacher": Net(depth=12).requires_grad_(False)})
    apply(net, [StochasticDepth(rate=0.5)])
    rates = [part._drop_rate for part in net.modules() if hasattr(part, "_drop_rate")]
    assert rates == linear_rates(0.5, 4)


def test_rows_of_blocks_with_time_first_are_refused() -> None:
    def encoder(batch_first: bool) -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
        return nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))

    with pytest.raises(ConfigurationError, match="needs the batch as the first dimension"):
        apply(encoder(batch_first=False), [StochasticDepth(skip="sample")])
    apply(encoder(batch_first=True), [StochasticDepth(skip="sample")])
    apply(encoder(batch_first=False), [StochasticDepth(skip="batch")])


def test_after_an_exception_a_loop_of_ones_own_draws_anew() -> None:
    class Broken(Toy):
        def on_train_batch_end(self, *_: object) -> None:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        trainer([StochasticDepth(rate=0.9)]).fit(module := Broken(), data(), data())
    assert {part._drop_now for part in module.modules() if hasattr(part, "_drop_now")} == {None}


def test_nothing_is_dropped_while_memory_is_measured() -> None:
    technique = StochasticDepth(rate=0.9)
    run = trainer([technique])
    run.fit(module := Toy(), data(), data())
    technique.worst_case = True
    technique.on_train_batch_start(run, module, None, 0)
    assert {part._drop_now for part in module.modules() if hasattr(part, "_drop_now")} == {False}


def test_rows_that_are_too_few_for_the_rate_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ConfigurationError, match=r"leaves out none of the 4 rows of a batch at rate=0\.1\. Use skip='batch'"
    ):
        trainer([StochasticDepth(0.1, skip="sample")]).fit(Toy(), data(), data())
    with caplog.at_level("INFO"):
        trainer([StochasticDepth(0.4, skip="sample")]).fit(Toy(), data(), data())
    assert "1 of 4 blocks run on all 4 rows of a batch" in caplog.text
