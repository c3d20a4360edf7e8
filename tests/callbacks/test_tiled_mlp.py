"""TiledMLP: the numbers and gradients of whole rows, from MLPs that see no more than a tile of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from lit_efficient import (
    ActivationCheckpointing,
    ConfigurationError,
    GPTConfig,
    LoRA,
    QuantizeBase,
    TiledMLP,
)
from lit_efficient.application import apply
from lit_efficient.callbacks.tiled_mlp import _Tiled, tiled
from lit_efficient.mechanisms.trials.memory import AllocationMeter, SavedTensors
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.testing import Block, Net, Run, data
from tests.contract import effects
from tests.contract.row import Row
from tests.mechanisms.test_documents import network_of
from tests.support import AttentionNet, Toy, trainer

IDS = torch.arange(64).view(2, 32)
TOKENS = IDS.numel()
Extra = Callable[[], list[Any]]


@contextmanager
def rows_seen(module: nn.Module) -> Iterator[list[int]]:
    """How many tokens each call of a matrix within a tiled module has had."""
    seen: list[int] = []
    inner = [p for part in module.modules() if isinstance(part, _Tiled) for p in part.modules() if p is not part]
    matrices = [part for part in inner if hasattr(part, "in_features") or hasattr(part, "nf")]
    hooks = [p.register_forward_pre_hook(lambda _, args: seen.append(args[0][..., 0].numel())) for p in matrices]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def computes_tiles(run: Run) -> None:
    eager = torch.compiler.set_stance("force_eager")  # compiled code calls no hooks
    with effects.training(run) as x, rows_seen(run.module) as seen, eager:
        for _ in range(4):  # StochasticDepth may leave out all blocks of a batch
            run.module._sample_loss((x,)).mean().backward()
    assert 0 < max(seen) <= 5
    assert len(run.reports["TiledMLP"].modules) == sum(isinstance(part, _Tiled) for part in run.module.modules())


ROW = Row(lambda: TiledMLP(tokens=5), computes_tiles, network=AttentionNet)  # sums in another order


def gradients(network: nn.Module) -> tuple[int, list[Tensor]]:
    """Bytes kept for the backward pass, the output, and the parameters' gradients."""
    network.zero_grad()
    with SavedTensors([*network.parameters(), *network.buffers()]) as saved:
        torch.manual_seed(0)
        out = network(IDS)
        out = out if isinstance(out, Tensor) else out.logits
    out.float().square().mean().backward()
    return saved.bytes, [out.detach(), *(p.grad for p in network.parameters() if p.grad is not None)]


def _adapted() -> list[Any]:
    return [LoRA(targets=[r"mlp\..*"])]


def _quantised() -> list[Any]:
    return [QuantizeBase(), LoRA()]


@pytest.mark.parametrize(
    ("kind", "beside"),
    [("gpt", list), ("llama", list), ("gpt2", list), ("gemma2", _adapted), ("llama", _quantised)],
)
def test_numbers_and_gradients_are_those_of_whole_rows(kind: str, beside: Extra) -> None:
    network = (
        GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4))
        if kind == "gpt2"
        else network_of(kind)
    )
    apply(network.train(), beside())
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.01)  # fresh adapters give zeros
    changed = deepcopy(network)
    report = apply(changed, [TiledMLP(tokens=10)])["TiledMLP"]
    before, plain = gradients(network)
    with rows_seen(changed) as seen:
        after, found = gradients(changed)
    assert len(plain) == len(found)
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6 * float(one.abs().max()))
    assert {*seen} == {10, 4}  # 64 tokens
    assert before - after == pytest.approx(TOKENS * report.details["bytes_per_token_saved"], rel=0.25)
    assert list(network.state_dict()) == list(changed.state_dict())


def test_a_recomputed_block_never_has_more_than_a_tile_of_its_mlp() -> None:
    """The issue it is there for: checkpointing keeps nothing of a block, and then needs all of it at once."""
    network = GPT(GPTConfig(97, dim=32, depth=2, num_heads=4, hidden_dim=128, max_length=32)).train()
    widest: list[int] = []
    apply(network, [ActivationCheckpointing(), TiledMLP(tokens=8)])

    def weigh(tensor: Tensor) -> Tensor:
        if tensor.shape[-1:] == (128,) and not isinstance(tensor, nn.Parameter):
            widest.append(tensor.shape[:-1].numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        out = network(IDS)
    assert not widest
    with torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor), rows_seen(network) as seen:
        out.square().mean().backward()
    assert {*seen} == {8}
    assert len(seen) > 2 * 3 * 8  # all tiles in the block's second forward, and most of them in their own


def test_the_peak_of_recomputed_blocks_is_half() -> None:
    def peak(extra: list[Any]) -> int:
        network = GPT(GPTConfig(97, dim=64, depth=4, num_heads=4, hidden_dim=256, max_length=1024)).train()
        apply(network, [ActivationCheckpointing(), *extra])
        ids = torch.arange(1024)[None] % 97
        with AllocationMeter() as meter:
            network(ids, labels=ids).mean().backward()
        return meter.peak

    assert peak([TiledMLP()]) < 0.55 * peak([])


def test_dropout_is_drawn_again_as_it_was() -> None:
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8)).double()
    x = torch.randn(3, 7, 8, dtype=torch.float64, requires_grad=True)
    changed = deepcopy(mlp)
    network = nn.ModuleList([nn.Module(), nn.Module()])
    network[0].mlp, network[1].mlp = changed, deepcopy(changed)
    apply(network, [TiledMLP(tokens=4, layers=["mlp"])])
    torch.manual_seed(1)
    plain = torch.autograd.grad((tiled(mlp, x, 4) * x.detach().cos()).sum(), [x, *mlp.parameters()])
    torch.manual_seed(1)
    found = torch.autograd.grad((changed(x) * x.detach().cos()).sum(), [x, *changed.parameters()])
    assert all(torch.equal(*pair) for pair in zip(plain, found, strict=True))


@pytest.mark.parametrize("tokens", [1, 4, 21, 100])
def test_tiles_cover_each_token_once(tokens: int) -> None:
    x = torch.arange(42.0).view(3, 7, 2)
    sizes: list[int] = []

    def double(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return 2 * rows

    assert torch.equal(tiled(double, x, tokens), 2 * x)
    assert max(sizes) == min(tokens, 21)


def test_evaluation_is_tiled_without_a_second_forward() -> None:
    network = network_of("llama").eval()
    apply(network, [TiledMLP(tokens=16)])
    with rows_seen(network) as seen, torch.no_grad():
        network(IDS)
    assert seen == [16] * (2 * 3 * TOKENS // 16)


def test_an_empty_copy_is_asked_for_its_shapes() -> None:
    real = network_of("llama")
    with torch.device("meta"):
        empty = network_of("llama")
    found = [apply(network, [TiledMLP()])["TiledMLP"] for network in (real, empty)]
    assert found[0] == found[1]
    assert found[0].modules == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert found[0].details["tokens"] == 32


class Mixing(nn.Sequential):
    """As an MLP, but over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(-2, keepdim=True)


class Experts(nn.Module):
    """Routed tokens: which expert has how many is a matter of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList([_mlp() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        share = F.softmax(self.router(x), -1)
        return sum(share[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


class Holder(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def _mlp(kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    return kind(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def test_what_mixes_tokens_or_is_no_module_is_refused_by_name() -> None:
    blocks = nn.Sequential(Holder(_mlp(Mixing)), Holder(_mlp(Mixing)))
    with pytest.raises(ConfigurationError, match=r"layers: '0.mlp' does not map each token"):
        apply(blocks, [TiledMLP(layers=["mlp"])])
    with pytest.raises(ConfigurationError, match="no module that maps each token independently"):
        apply(Net(), [TiledMLP()])  # its matrices stand in the block itself
    assert isinstance(Net().blocks[0], Block)


def test_experts_are_tiled_one_by_one_and_their_router_is_not() -> None:
    blocks = nn.Sequential(Holder(Experts()), Holder(Experts()))
    report = apply(blocks, [TiledMLP()])["TiledMLP"]
    assert report.modules == tuple(f"{i}.mlp.experts.{j}" for i in range(2) for j in range(2))


def test_a_batch_that_is_no_longer_than_a_tile_is_said() -> None:
    fit = trainer([TiledMLP(tokens=1000)], max_steps=1, limit_val_batches=0)
    with pytest.warns(UserWarning, match="TiledMLP: no MLP had more tokens in the first batch than a tile of 1,000"):
        fit.fit(Toy(network=AttentionNet), data(), data())


@pytest.mark.parametrize("tokens", [0, -1, 1.5])
def test_bad_arguments_are_refused(tokens: Any) -> None:
    with pytest.raises(ConfigurationError, match="TiledMLP: tokens"):
        TiledMLP(tokens=tokens)
