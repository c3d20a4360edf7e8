"""Activation checkpointing: fewer bytes kept, the plain network's gradients bit by bit, every name in its place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.flop_counter import FlopCounterMode

from lit_efficient import (
    GPT,
    ActivationCheckpointing,
    ConfigurationError,
    ConflictError,
    GPTConfig,
    HiddenAlignment,
    LatentAlignment,
    LoRA,
    MaxBatchSize,
    StochasticDepth,
)
from lit_efficient.application import apply
from lit_efficient.mechanisms.blocks.recomputation import choose_kept
from lit_efficient.mechanisms.trials.memory import AllocationMeter, SavedTensors
from tests.callbacks.test_stochastic_depth_families import FAMILIES, IDS, Family, _diffusers, built
from tests.processes import run_ranks
from tests.ranks import checkpointing
from tests.support import WIDTH, Net, Toy, assert_equal, data, trainer, weights

_LEVELS = {"sample_size": 8, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "norm_num_groups": 8}
_LEVELS |= {"block_out_channels": (16, 32)}
LATENTS = torch.linspace(-1, 1, 3 * 4 * 8 * 8).view(3, 4, 8, 8)
UNETS = {
    "UNet2DModel": Family(
        _diffusers(
            "UNet2DModel",
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            dropout=0.3,
            **_LEVELS,
        ),
        lambda net: net(LATENTS, torch.tensor([1, 2, 3])).sample,
        ["down_blocks.0.resnets.0", "mid_block.attentions.0", "up_blocks.0.attentions.1"],
    ),
    "UNet2DConditionModel": Family(
        _diffusers(
            "UNet2DConditionModel",
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=16,
            attention_head_dim=8,
            **_LEVELS,
        ),
        lambda net: net(LATENTS, torch.tensor([1, 2, 3]), encoder_hidden_states=torch.ones(3, 4, 16)).sample,
        ["down_blocks.0.resnets.0", "down_blocks.1.attentions.0", "mid_block.resnets.1"],
    ),
}


class Dropping(Net):
    """The toy with dropout and batch statistics inside its blocks, which a second forward could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(WIDTH)
            block.down = nn.Sequential(block.down, nn.Dropout(0.4))


class Spectral(Net):
    """The toy with weights whose norm is estimated anew in each forward, from where the last one left off."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            spectral_norm(block.down)


def trained(net: nn.Module, call: Callable[[nn.Module], Any]) -> tuple[int, dict[str, Any]]:
    """Bytes that one forward saves; gradients, buffers and the state of the random numbers after the backward."""
    torch.manual_seed(1)
    with SavedTensors(net.parameters()) as saved:
        loss = call(net.train()).float().square().sum()
    loss.backward()
    gradients = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return saved.bytes, {"gradients": gradients, "buffers": dict(net.named_buffers()), "random": torch.rand(1)}


def compare(make: Callable[[], nn.Module], call: Callable[[nn.Module], Any], *techniques: Any) -> float:
    """Share of the plain network's bytes that is kept, after the assertion that nothing else differs."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(make())
    apply(nets[1], techniques)
    (before, plain), (after, recomputed) = (trained(net, call) for net in nets)
    assert_equal(plain, recomputed)
    assert list(nets[0].state_dict()) == list(nets[1].state_dict())
    return after / before


X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


FEW = ("GPT", "DiT", "Llama", "DiTTransformer2DModel", "timm ViT", "timm ResNet")


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", [*FEW, *UNETS])
def test_gradients_are_those_of_the_plain_network_and_most_bytes_are_gone(name: str) -> None:
    family = (FAMILIES | UNETS)[name]
    share = compare(family.make, family.call, technique := ActivationCheckpointing())
    assert share < (0.7 if name == "timm ResNet" else 0.4)  # what is between the blocks of a tiny network stays
    found = apply(family.make(), [technique])["ActivationCheckpointing"].modules
    assert set(family.blocks) <= set(found)
    if name in UNETS:
        assert len(found) == 12  # resnets 2 down, 2 mid, 4 up; attentions 1 down, 1 mid, 2 up


@pytest.mark.parametrize("options", [{}, {"every": 2}, {"save": ["matmul"]}])
def test_dropout_and_batch_statistics_are_computed_as_once(options: dict[str, Any]) -> None:
    assert compare(Dropping, lambda net: net(X), ActivationCheckpointing(**options)) < 0.8


def test_a_second_forward_begins_where_the_first_one_did() -> None:
    assert compare(Spectral, lambda net: net(X), ActivationCheckpointing()) < 0.8


def test_every_second_block_keeps_half() -> None:
    full, half = (compare(Net, lambda net: net(X), ActivationCheckpointing(every)) for every in (1, 2))
    assert 1 - half == pytest.approx((1 - full) / 2)
    names = apply(Net(), [ActivationCheckpointing(every=3)])["ActivationCheckpointing"].modules
    assert names == ("blocks.0", "blocks.3")


def test_saving_by_operator_keeps_their_results_and_runs_them_once() -> None:
    def kept(save: list[str] | None) -> tuple[int, int]:
        net = GPT(GPTConfig(vocab_size=8, dim=16, depth=2, num_heads=2, max_length=8))
        apply(net, [ActivationCheckpointing(save=save)])
        with AllocationMeter([*net.parameters()]) as meter:
            loss = net(IDS).sum()
            after_forward = meter.live
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return after_forward, counter.get_flop_counts()["Global"][torch.ops.aten.mm]

    (none, again), (matmul, once), (both, _) = kept(None), kept(["matmul"]), kept(["matmul", "attention"])
    assert none < matmul < both
    tokens, dim, inner = IDS.numel(), 16, 64
    assert again - once == 2 * 2 * tokens * (4 * dim * dim + 2 * dim * inner)  # no gradient needs the last product


def test_a_budget_chooses_the_largest_blocks_first_and_of_equal_ones_the_last() -> None:
    assert choose_kept([4, 4, 4, 4], 0.5) == [False, False, True, True]
    assert choose_kept([1, 8, 3, 4], 0.75) == [False, True, False, True]
    assert choose_kept([1, 8, 3, 4], 0.0) == [False] * 4
    assert choose_kept([1, 8, 3, 4], 1.0) == [True] * 4


def test_a_budget_is_measured_in_the_first_batch_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    plain, module = Toy(), Toy()
    trainer().fit(plain, data(), data())
    with caplog.at_level("INFO"):
        trainer([ActivationCheckpointing(memory_budget=0.5)]).fit(module, data(), data())
    assert [block._recomputes for block in module.net.blocks] == [True, True, False, False]
    assert_equal(weights(plain), weights(module))
    said = next(r.getMessage() for r in caplog.records if "keep their activations, " in r.getMessage())
    assert "2 of 4 blocks keep their activations, 50% of " in said
    with SavedTensors(module.net.parameters()) as half:
        module.net(X)
    with SavedTensors(plain.net.parameters()) as full:
        plain.net(X)
    inputs = 2 * X.nbytes  # of the recomputed blocks; of the others theirs are among what they save
    assert half.bytes < 0.5 * full.bytes + 3 * inputs
    assert torch._functorch.config.activation_memory_budget == 1.0  # as before


def test_nothing_is_recomputed_without_gradients() -> None:
    runs: list[int] = []
    net = Net()
    apply(net, [ActivationCheckpointing()])
    net.blocks[0].up.register_forward_hook(lambda *_: runs.append(1))
    with torch.no_grad():
        net(X)
    assert len(runs) == 1
    net(X).sum().backward()
    assert len(runs) == 3
    net.eval()(X).sum().backward()  # a network in eval mode trains all the same
    assert len(runs) == 5


def test_frozen_bases_train_their_adapters_through_inputs_without_gradients() -> None:
    def adapted() -> nn.Module:
        net = Net()
        apply(net, [LoRA(rank=2, targets=["up"])])
        for name, parameter in net.named_parameters():
            if name.endswith("lora_B"):
                nn.init.ones_(parameter)
        return net

    assert compare(adapted, lambda net: net(X), ActivationCheckpointing()) < 0.4


def test_stochastic_depth_recomputes_the_blocks_and_rows_that_it_drew() -> None:
    for skip in ("batch", "sample"):
        runs = [Toy(), Toy()]
        for module, technique in zip(runs, ([], [ActivationCheckpointing()]), strict=True):
            trainer([StochasticDepth(0.6, skip=skip), *technique]).fit(module, data(), data())
        assert_equal(weights(runs[0]), weights(runs[1]))


def test_accumulated_batches_train_alike() -> None:
    runs = [Toy(), Toy()]
    for module, technique in zip(runs, ([], [ActivationCheckpointing()]), strict=True):
        trainer(technique, accumulate_grad_batches=2).fit(module, data(), data())
    assert_equal(weights(runs[0]), weights(runs[1]))


def teacher() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(WIDTH, 12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: HiddenAlignment(2, teacher(), hidden=8, source="0"),
        lambda: LatentAlignment(teacher(), encoder=r"blocks\.1", decoder=r"blocks\.2", images="0"),
        lambda: LatentAlignment(teacher(), encoder=r"blocks\.1\.up", decoder=r"blocks\.2", images="0"),
    ],
)
def test_features_of_recomputed_blocks_are_aligned_once(make: Callable[[], Any]) -> None:
    """LatentAlignment takes gradients, which recompute, while it listens."""
    runs = [Toy(), Toy()]
    for module, technique in zip(runs, ([], [ActivationCheckpointing()]), strict=True):
        trainer([make(), *technique]).fit(module, data(), data())
    assert_equal(weights(runs[0]), weights(runs[1]))


def test_copies_and_pickles_recompute_on_their_own() -> None:
    net = Net()
    apply(net, [ActivationCheckpointing()])
    block = net.blocks[0]
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        with SavedTensors(twin.parameters()) as saved:
            loss = twin(X).sum()
        assert saved.bytes == X.nbytes
        loss.backward()
        assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in net.parameters())


def test_a_model_that_recomputes_by_itself_is_refused() -> None:
    net = built("Llama")
    name = "activation" if hasattr(net, "activation_checkpointing_enable") else "gradient"  # in older transformers
    getattr(net, f"{name}_checkpointing_enable")()
    with pytest.raises(ConfigurationError, match=r"'model' already recomputes its activations, so 'model\.layers\.0'"):
        apply(net, [ActivationCheckpointing()])
    getattr(net, f"{name}_checkpointing_disable")()
    apply(net, [ActivationCheckpointing()])
    other = built("DiTTransformer2DModel")
    other.enable_gradient_checkpointing()
    with pytest.raises(ConfigurationError, match=r"'DiTTransformer2DModel' already recomputes its activations"):
        apply(other, [ActivationCheckpointing()])


def test_caches_are_left_out_in_training_and_used_in_evaluation() -> None:
    net = built("Llama")
    apply(net, [ActivationCheckpointing(every=2)])
    output = net.train()(input_ids=IDS, use_cache=True)
    assert output.past_key_values.get_seq_length() == 0
    cached = net.eval()(input_ids=IDS, use_cache=True)  # with gradients recorded
    assert cached.past_key_values.get_seq_length() == IDS.shape[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"save": ["linear"]}, r"save must be some of matmul, attention, convolution or null, got \['linear'\]"),
        ({"save": []}, r"save must be some of .* or null, got \[\]"),
        ({"memory_budget": 1.5}, "memory_budget must be at least 0 and at most 1 or null, got 1.5"),
        ({"memory_budget": 0.5, "every": 2}, "memory_budget chooses what is kept"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"ActivationCheckpointing: {message}"):
        ActivationCheckpointing(**arguments)


def test_what_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="every must be at most the number of blocks, 4, got 5"):
        apply(Net(), [ActivationCheckpointing(every=5)])
    with pytest.raises(ConfigurationError, match="found no repeated blocks in Sequential"):
        apply(nn.Sequential(nn.Linear(4, 4)), [ActivationCheckpointing()])


@pytest.mark.parametrize(
    ("techniques", "message"),
    [
        (
            [ActivationCheckpointing(memory_budget=0.5), MaxBatchSize()],
            "chooses the recomputed blocks in the first batch",
        ),
        (
            [
                ActivationCheckpointing(save=["matmul"]),
                LatentAlignment(nn.Linear(WIDTH, 3), encoder=r"blocks\.1", decoder=r"blocks\.2", images="0"),
            ],
            "can be used only once: leave save out",
        ),
    ],
)
def test_settings_that_exclude_another_technique_are_refused(techniques: list[Any], message: str) -> None:
    with pytest.raises(ConflictError, match=message):
        trainer(techniques).fit(Toy(), data(), data())


@pytest.mark.turns(6, family="ranks")
@pytest.mark.parametrize("shards", [False, True])
def test_on_two_processes_gradients_are_those_without_it_and_of_one_process(shards: bool, tmp_path: Path) -> None:
    run_ranks(checkpointing.gradients_are_the_plain_ones, tmp_path, shards)
    one = checkpointing.fit(checkpointing.Watched(checkpointing.Small), [], None)
    two = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert one.gradients.keys() == two.keys()
    for name, gradient in one.gradients.items():
        torch.testing.assert_close(two[name], gradient, rtol=1e-4, atol=1e-6)
