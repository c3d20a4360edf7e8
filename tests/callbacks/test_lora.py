"""LoRA: trained parameters, contents of checkpoints, bases with which it resumes, and the steps of LoRA+."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import GPT, ConfigurationError, GPTConfig, LoRA, LowBitOptimizer, QuantizeBase, merge_adapters
from lit_efficient.application import apply
from lit_efficient.application.ledger import reports_of
from lit_efficient.application.recorded import replay
from lit_efficient.callbacks.lora import stretch_steps
from lit_efficient.errors import CheckpointError
from lit_efficient.mechanisms.adapters.low_rank import LowRank
from tests.support import Net, Toy, assert_equal, data, trainer, weights


def fit(module: Any, callbacks: list[Any], **arguments: Any) -> Any:
    torch.manual_seed(0)
    run = trainer(callbacks, **arguments)
    run.fit(module, data(), data(), ckpt_path=arguments.pop("ckpt_path", None))
    return run


def test_only_adapters_train_and_the_report_counts_them() -> None:
    before = weights(Toy())
    run = fit(module := Toy(), [LoRA(rank=2)])
    after = weights(module)
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"lora_A", "lora_B"}
    assert len(trained) == 2 * 10
    expected = 2 * (2 * 32 + 8 * 80)  # r (in + out): stem, head, four blocks of up and down
    report = reports_of(module)["LoRA"]
    assert report.parameters == expected
    assert report.details["adapter_bytes"] == 4 * expected
    assert "experts" not in report.summary
    assert report.bytes_saved == 4 * sum(t.numel() for t in before.values())
    assert len(run.optimizers[0].state) == len(trained)


def test_a_checkpoint_holds_what_trains_and_loads_into_a_fresh_module(tmp_path: Path) -> None:
    technique = LoRA(rank=2, targets=["up"], modules_to_save=["head"], bias="lora_only")
    run = fit(module := Toy(), [technique])
    for weights_only in (False, True):
        run.save_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only)
        checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
        ends = {key.split(".", 3)[-1] if "blocks" in key else key for key in checkpoint["state_dict"]}
        assert ends == {"up.lora_A", "up.lora_B", "up.bias", "net.head.weight", "net.head.bias"}
        again = Toy()
        replay(again, checkpoint)
        again.load_state_dict(checkpoint["state_dict"])
        assert_equal(weights(module), weights(again))


def test_save_base_keeps_the_base_and_restores_it(tmp_path: Path) -> None:
    run = fit(module := Toy(), [LoRA(rank=2, save_base=True)])
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    other = Toy()
    nn.init.zeros_(other.net.stem.weight)
    replay(other, checkpoint)
    other.load_state_dict(checkpoint["state_dict"])
    assert_equal(weights(module), weights(other))


def test_another_base_is_refused_by_the_names_of_its_tensors(tmp_path: Path) -> None:
    fit(Toy(), [LoRA(rank=2)]).save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    other = Toy()
    with torch.no_grad():
        other.net.stem.weight.mul_(1.5)
    for function, loaders in (("fit", (data(), data())), ("validate", (data(),))):
        run = trainer([LoRA(rank=2)], max_epochs=2)
        with pytest.raises(CheckpointError, match=r"other frozen weights: 1 of 28 frozen tensors.*'net.stem.weight'"):
            getattr(run, function)(copy.deepcopy(other), *loaders, ckpt_path=tmp_path / "a.ckpt")


@pytest.mark.parametrize("variant", ["lora", "dora", "pissa", "olora"])
def test_a_base_checkpoint_loads_into_the_adapted_module(variant: str) -> None:
    torch.manual_seed(5)
    base = Net()
    x = torch.randn(2, 16)
    root = Toy()
    apply(root, [LoRA(rank=2, variant=variant)])
    root.load_state_dict({f"net.{key}": tensor for key, tensor in base.state_dict().items()})
    torch.testing.assert_close(root.net(x), base(x), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Missing key"):
        root.load_state_dict({"net.stem.weight": base.stem.weight})


def test_a_frozen_weight_that_changed_all_the_same_is_kept(tmp_path: Path) -> None:
    run = fit(module := Toy(), [LoRA(rank=2)])
    with torch.no_grad():
        module.net.stem.weight.zero_()
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert not torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]["net.stem.weight"].any()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_lora_plus_equals_a_group_with_a_higher_rate(kind: Any) -> None:
    torch.manual_seed(0)
    ours, theirs = [[nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))] for _ in range(2)]
    one = kind(ours, lr=0.01, weight_decay=0.1)
    two = kind([{"params": theirs[:1]}, {"params": theirs[1:], "lr": 0.16}], lr=0.01, weight_decay=0.1)
    stretch_steps(one, 16.0, ours[1:])
    for _ in range(5):
        gradient = torch.randn(2, 3)
        for parameters, optimizer in ((ours, one), (theirs, two)):
            for p, g in zip(parameters, gradient):
                p.grad = g.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert [group["lr"] for group in one.param_groups] == [0.01]


def test_lora_plus_stretches_all_tensors_at_once_by_the_formula() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(5).double()), nn.Parameter(torch.randn(4))]
    before, theirs = [p.detach().clone() for p in ours], copy.deepcopy(ours)
    optimizer, plain = (torch.optim.SGD(parameters, lr=0.1, momentum=0.9) for parameters in (ours, theirs))
    stretch_steps(optimizer, 16.0, ours)
    for p, other in zip(ours, theirs):
        p.grad = torch.randn_like(p)
        other.grad = p.grad.clone()
    optimizer.step()
    plain.step()
    for p, other, old in zip(ours, theirs, before):
        assert torch.equal(p, old + 16.0 * (other.detach() - old))


def test_lora_plus_outlives_the_swap_of_the_optimizer() -> None:
    modules = [Toy(), Toy()]
    for module, ratio in zip(modules, (None, 8.0)):
        fit(module, [LoRA(rank=2, lr_ratio=ratio), LowBitOptimizer(min_size=0)], max_epochs=-1, max_steps=1)
    small, large = (module.net.stem.lora_B.detach() for module in modules)
    torch.testing.assert_close(8 * small, large)


def test_lora_plus_stretches_an_optimizer_once_that_is_returned_in_a_second_fit() -> None:
    class Kept(Toy):
        kept: Any = None

        def configure_optimizers(self) -> Any:
            self.kept = self.kept or torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
            return self.kept

    class Filled(Kept):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            for p in self.parameters():
                p.data.fill_(0.1)

    once, twice = Filled(), Filled()
    fit(twice, [LoRA(rank=2, lr_ratio=8.0)], max_epochs=-1, max_steps=1)
    for module in (once, twice):
        fit(module, [LoRA(rank=2, lr_ratio=8.0)], max_epochs=-1, max_steps=1)
    assert_equal(weights(once), weights(twice))


def test_convolutions_are_named_where_nothing_else_takes_them() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    report = apply(copy.deepcopy(net), [LoRA(rank=1)])["LoRA"]
    assert "convolutions have no adapter unless they are named: targets=['0']" in report.summary
    with pytest.raises(
        ConfigurationError, match=r"covers every layer .* Other layers that can have adapters: targets=\['0'\]"
    ):
        apply(copy.deepcopy(net), [LoRA(rank=1, modules_to_save=["2"])])
    with pytest.raises(
        ConfigurationError, match=r"has no linear layer to adapt; name other layers .*: targets=\['0'\]"
    ):
        apply(net[:1], [LoRA(rank=1)])


@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_packed_codes_count_as_the_weights_they_stand_for(format: str) -> None:
    plain, quantized = Toy(), Toy()
    size = sum(p.numel() for p in plain.parameters())
    apply(quantized, [QuantizeBase(format, group_size=8), LoRA(rank=2)])
    report = reports_of(quantized)["LoRA"]
    assert f" of {size + report.parameters:,} parameters train" in report.summary  # without scales and zero points


def test_an_optimizer_that_was_built_too_early_is_refused() -> None:
    class Early(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.early = torch.optim.SGD(self.parameters(), lr=0.1)

        def configure_optimizers(self) -> Any:
            return self.early

    with pytest.raises(ConfigurationError, match=r"LoRA: no optimizer holds 20 of the 20 parameters .*lora_A"):
        fit(Early(), [LoRA()])


def test_merging_gives_a_plain_module_that_can_be_adapted_again() -> None:
    fit(module := Toy(), [LoRA(rank=2, variant="rslora")])
    x = next(iter(data()))[0]
    y = module.net(x)
    merge_adapters(module)
    torch.testing.assert_close(module.net(x), y, rtol=1e-5, atol=1e-5)
    assert module.state_dict().keys() == Toy().state_dict().keys()
    fit(module, [LoRA(rank=4)])
    assert module.net.stem.lora_A.shape == (4, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank must be a whole number of at least 1, got 0"),
        ({"alpha": 0}, "alpha must be above 0, got 0"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        (
            {"variant": "lokr"},
            "variant must be one of lora, .*, lora_fa, alora, qalora, rounded, got 'lokr'",
        ),
        ({"lr_ratio": -1.0}, "lr_ratio must be above 0 or null, got -1.0"),
        ({"patterns": {"stem": {"r": 2}}}, r"patterns\['stem'\] must be a mapping with rank, alpha or both, got"),
        ({"patterns": {"stem": {"rank": 0}}}, r"patterns\['stem'\].rank must be a whole number of at least 1 or null"),
        (
            {"variant": "alora"},
            "invocation_tokens must be a list of ids for variant alora, and null for others, got No",
        ),
        ({"invocation_tokens": [1]}, "invocation_tokens must be a list of ids for variant alora, and null for others"),
        ({"bias": "some"}, "bias must be one of none, lora_only, all, got 'some'"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LoRA(**arguments)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_our_own_network_gets_no_adapter_either(tied: bool) -> None:
    config = GPTConfig(vocab_size=64, depth=1, dim=16, num_heads=2, max_length=8, tie_embeddings=tied)
    module = nn.ModuleDict({"network": GPT(config)})
    apply(module, [LoRA(rank=2)])
    adapted = {name for name, part in module.named_modules() if isinstance(part, LowRank)}
    linear = {name for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    assert linear - adapted == {"network.head"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"targets": ["q_proj"]},
            r"'q_proj' matches none of the 10 .* end in: stem, up, down, head ",
        ),
        ({"targets": "("}, r"'\(' is no regular expression"),
        ({"targets": []}, r"targets must be all-linear, all-linear\+experts or a list of patterns"),
        ({"variant": "pissa", "rank": 17}, "rank must be at most 16 for pissa on 'net.stem', got 17"),
        ({"modules_to_save": ["net"]}, "covers every layer"),
        (
            {"patterns": {"stem": {"rank": 1}, "q_proj": {"rank": 2}}},
            "patterns: 'q_proj' matches none of the layers with",
        ),
        ({"rates": {"stem": 2.0, "text_ntworks": 0.5}}, "LoRA: rates: the pattern 'text_ntworks' matches none"),
    ],
)
def test_bad_targets_are_refused_before_anything_changes(arguments: dict[str, Any], message: str) -> None:
    module = Toy()
    before = module.state_dict().keys()
    with pytest.raises(ConfigurationError, match=message):
        apply(module, [LoRA(**arguments)])
    assert module.state_dict().keys() == before
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("number_format", ["int4", "int8", "nf4"])
def test_pissa_of_a_higher_rank_than_a_quantised_layer_has_is_refused(number_format: str) -> None:
    bound = "LoRA: rank must be at most 16 for pissa on '0', got 17"
    for rank, expected in ((16, contextlib.nullcontext()), (17, pytest.raises(ConfigurationError, match=bound))):
        with expected:
            apply(nn.Sequential(nn.Linear(32, 16)), [QuantizeBase(number_format), LoRA(rank, variant="pissa")])


@pytest.mark.parametrize(
    "technique", [LoRA(rank=2, targets=["linear1", "linear2"]), QuantizeBase("int4", group_size=16)]
)
def test_torchs_encoder_calls_changed_layers_in_evaluation_too(technique: Any) -> None:
    """The encoder's fused path for evaluation reads the weights without calling the layers."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    net = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2))
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = net.eval()(x)
    apply(net, [technique])
    for name, parameter in net.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        evaluated, trained = net.eval()(x), net.train()(x)
    torch.testing.assert_close(evaluated, trained, rtol=1e-4, atol=1e-5)
    assert not torch.equal(evaluated, plain)


def test_a_model_that_has_layers_of_peft_is_refused() -> None:
    peft = pytest.importorskip("peft")
    module = Toy()
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["up"]), module.net)
    before = weights(module)
    with pytest.raises(ConfigurationError, match="already has layers of peft's LoRA"):
        LoRA(rank=2).transform(module)
    assert weights(module).keys() == before.keys()
