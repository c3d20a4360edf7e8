"""Quantised bases: bytes, rounding, both kinds of checkpoints, resume of QLoRA and its merge."""

from __future__ import annotations

import copy
import pickle
import weakref
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from lit_efficient import (
    CausalLMConfig,
    ConfigurationError,
    LanguageModeling,
    LoRA,
    QuantizeBase,
    StochasticDepth,
    merge_adapters,
)
from lit_efficient.application import apply
from lit_efficient.application.ledger import reports_of
from lit_efficient.callbacks import quantize_base
from lit_efficient.errors import CheckpointError
from lit_efficient.export.adapters import export_checkpoint, merge_state
from lit_efficient.mechanisms.adapters import bitsandbytes_layers, merge
from lit_efficient.mechanisms.adapters.quantized import (
    dequantize,
    is_quantized,
    plain_layer,
    quantize_linear,
    stored_bytes,
)
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from lit_efficient.models.libraries.causal_lm import build
from lit_efficient.tasks.loading import load_language_model
from tests.support import Toy, assert_equal, data, trainer, weights

MODEL = "model.safetensors"

# Bytes a weight, and the largest error relative to the largest weight of a block or row.
EXPECTED = {
    ("nf4", True): (0.517, 0.16),
    ("nf4", False): (0.563, 0.16),
    ("fp4", True): (0.517, 0.18),
    ("int8", True): (1.004, 0.005),
}


@pytest.mark.parametrize(("format", "double"), EXPECTED)
def test_bytes_rounding_and_gradients(format: str, double: bool) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(1024, 1024), torch.randn(4, 1024, requires_grad=True)
    layer = quantize_linear(linear, format, double_quant=double)
    bound, error = EXPECTED[format, double]
    assert stored_bytes(layer) / linear.weight.numel() == pytest.approx(bound, abs=1e-3)
    weight = dequantize(layer)
    assert (weight - linear.weight.detach()).abs().max() <= error * linear.weight.detach().abs().max() * 1.1
    for mode in (True, False):
        layer.train(mode)
        y = layer(x)
        reference = x @ weight.T + linear.bias
        torch.testing.assert_close(y, reference, rtol=0, atol=0.02 if format == "int8" else 1e-4)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(gradient, weight.sum(0).expand(4, -1), rtol=0, atol=0.02)
    wide = copy.deepcopy(layer).double()(x.detach().double())  # bitsandbytes' own 4 bits are wrong there by 10 and more
    torch.testing.assert_close(wide.float(), layer(x).detach(), rtol=0, atol=0.02 if format == "int8" else 1e-4)
    assert wide.dtype == torch.float64
    assert layer.bias is linear.bias
    assert not layer.weight.requires_grad
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))


def test_an_outlier_of_the_inputs_does_not_round_the_others_away_in_int8() -> None:
    """The layer is the one that transformers makes: ``llm_int8_threshold`` is 6 there."""
    torch.manual_seed(0)
    linear = nn.Linear(256, 64)
    x = torch.randn(8, 256)
    x[:, 3] = 60.0
    layer = quantize_linear(linear, "int8").eval()
    exact = x @ dequantize(layer).T + linear.bias
    assert (layer(x) - exact).abs().max() < 0.02  # without the threshold 0.24
    assert layer.state.threshold == transformers.BitsAndBytesConfig(load_in_8bit=True).llm_int8_threshold


@pytest.mark.parametrize("format", ["nf4", "fp4", "int8", "int4"])
def test_checkpoints_of_both_kinds_load(format: str) -> None:
    x = torch.randn(4, 16)
    trained, fresh, other = Toy(), Toy(), Toy()
    for module in (trained, other):
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1.5)
    base = weights(trained)
    for module in (trained, fresh, other):
        apply(module, [QuantizeBase(format, group_size=8)])
    y = trained.net(x)
    assert not torch.equal(fresh.net(x), y)
    for state in (base, trained.state_dict()):  # floats, quantised on the way; and codes with their constants
        module = copy.deepcopy(fresh)
        module.load_state_dict(state)
        assert torch.equal(module.net(x), y)
        assert_equal(weights(module), weights(trained))
        module.load_state_dict(fresh.state_dict())  # and again, after a forward pass
        assert torch.equal(module.net(x), fresh.net(x))


@pytest.mark.turns(4, family="resumed")
@pytest.mark.parametrize("format", ["nf4", "int8"])
@pytest.mark.parametrize("save_base", [False, True])
def test_qlora_resumes_bit_exactly_and_merges(format: str, save_base: bool, tmp_path: Path) -> None:
    def fit(epochs: int, **arguments: Any) -> Any:
        torch.manual_seed(0)
        module = Toy("configure_model", "lambda")
        run = trainer([LoRA(rank=2, save_base=save_base), QuantizeBase(format, skip=("head",))], max_epochs=epochs)
        run.fit(module, data(), data(), **arguments)
        return run

    whole = fit(2)
    fit(1).save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert save_base or {key.rpartition(".")[2] for key in state} == {"lora_A", "lora_B"}
    resumed = fit(2, ckpt_path=tmp_path / "half.ckpt")
    assert_equal(weights(whole.lightning_module), weights(resumed.lightning_module))
    module = whole.lightning_module
    x = next(iter(data()))[0]
    y = module.net(x)
    merge_adapters(module)
    torch.testing.assert_close(module.net(x), y, rtol=1e-5, atol=0.05 if format == "int8" else 1e-5)
    assert type(module.net.stem) is nn.Linear
    assert module.state_dict().keys() == Toy().state_dict().keys()


def test_the_report_measures_and_skipped_and_tied_layers_stay() -> None:
    module = Toy()
    module.net.blocks[1].up.weight = module.net.blocks[0].up.weight
    apply(module, [QuantizeBase(skip=("head", r"blocks\.3\..*"))])
    report = reports_of(module)["QuantizeBase"]
    assert report.modules == (
        "net.stem",
        "net.blocks.0.down",
        "net.blocks.1.down",
        "net.blocks.2.up",
        "net.blocks.2.down",
    )
    layers = [module.get_submodule(name) for name in report.modules]
    assert report.bytes_saved == 4 * report.parameters - sum(map(stored_bytes, layers))
    assert type(module.net.head) is nn.Linear


T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", ["T5Model", "UMT5EncoderModel", "T5ForTokenClassification", "SwitchTransformersModel"])
def test_layers_to_whose_type_others_cast_stay_floats(name: str) -> None:
    kind: Any = getattr(transformers, name)
    torch.manual_seed(0)
    net = kind(kind.config_class(**T5, decoder_start_token_id=0)).eval()
    report = apply(net, [QuantizeBase("int4", skip=())])["QuantizeBase"]
    hand = copy.deepcopy(net)
    for path, part in list(hand.named_modules()):
        if is_quantized(part):
            owner, _, last = path.rpartition(".")
            setattr(hand.get_submodule(owner), last, plain_layer(part, dequantize(part)))
    ids = torch.arange(8)[None]
    inputs = {"input_ids": ids} | ({} if "decoder" not in dict(net.named_children()) else {"decoder_input_ids": ids})
    with torch.no_grad():
        assert_equal(net(**inputs)[0], hand(**inputs)[0])
    kept = [path for path, part in net.named_modules() if type(part) is nn.Linear]
    assert kept
    assert all(path.endswith("wo") for path in kept)
    assert f"{len(kept)} layers are not changed, because other code reads their weights: {kept[0]}" in report.summary


class Casting(nn.Module):
    """Module that casts to the type of a layer in a list, and of one whose name is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.hidden, self.first = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(len(self.parts)):
            x = self.parts[i](x.to(self.parts[i].weight.dtype))
        layer = self.hidden
        return layer(self.first(x).to(layer.weight.dtype))


@pytest.mark.parametrize("format", ["nf4", "int8", "int4"])
def test_what_the_source_does_not_show_is_refused_with_the_way_out(format: str) -> None:
    net = Casting()
    report = apply(net, [QuantizeBase(format)])["QuantizeBase"]
    assert report.modules == ("hidden", "first")
    with pytest.raises(ConfigurationError, match=r"with 32 inputs and 32 outputs was given torch\.u?int8.*in skip"):
        net(torch.randn(2, 32))


def test_bad_arguments_and_nothing_to_do_are_errors() -> None:
    with pytest.raises(ConfigurationError, match="format must be one of nf4, fp4, int8, int4, got 'nf3'"):
        QuantizeBase("nf3")
    with pytest.raises(ConfigurationError, match=r"skip: '\(' is no regular expression"):
        QuantizeBase(skip=("(",))
    with pytest.raises(ConfigurationError, match=r"Toy has no torch.nn.Linear left to quantise \(skip="):
        apply(Toy(), [QuantizeBase(skip=(".*",))])


@pytest.mark.turns(4, family="resumed")
@pytest.mark.parametrize(("variant", "save_base"), [("qalora", False), ("qalora", True), ("rounded", False)])
def test_what_merges_into_int4_resumes_bit_exactly_merges_and_exports(
    variant: str, save_base: bool, tmp_path: Path
) -> None:
    targets = ["stem", "up", "down"]

    def fit(epochs: int, **arguments: Any) -> Any:
        torch.manual_seed(0)
        module = Toy("configure_model", "lambda")
        lora = LoRA(rank=2, variant=variant, targets=targets, save_base=save_base)
        run = trainer([lora, QuantizeBase("int4", group_size=8, skip=("head",))], max_epochs=epochs)
        run.fit(module, data(), data(), **arguments)
        return run

    whole = fit(2)
    fit(1).save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert save_base or {key.rpartition(".")[2] for key in state} == {"lora_A", "lora_B"}
    resumed = fit(2, ckpt_path=tmp_path / "half.ckpt")
    assert_equal(weights(whole.lightning_module), weights(resumed.lightning_module))

    whole.save_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    torch.save(weights(Toy()), tmp_path / "base.pt")
    base = None if save_base else tmp_path / "base.pt"
    module = whole.lightning_module
    x = next(iter(data()))[0]
    y = module.net(x)
    codes = module.net.stem.weight.clone()
    merge_adapters(module)
    torch.testing.assert_close(module.net(x), y, rtol=1e-5, atol=1e-5)
    assert torch.equal(module.net.stem.weight, codes) is (variant == "qalora")  # the other's codes have moved
    codes = module.net.stem.weight.clone()
    exported = load_file(
        export_checkpoint(tmp_path / "whole.ckpt", tmp_path / "out", "safetensors", base, check=False) / MODEL
    )
    torch.testing.assert_close(exported, weights(module), rtol=1e-6, atol=1e-6)
    assert exported["net.stem.weight"].dtype is torch.uint8
    assert torch.equal(exported["net.stem.weight"], codes)

    checkpoint = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    floats = merge_state(checkpoint, None if save_base else weights(Toy()), keep_int4=False)
    plain = Toy()
    plain.load_state_dict(floats)
    torch.testing.assert_close(plain.net(x), y, rtol=1e-5, atol=1e-5)

    # The merged module is still quantised, says so in its checkpoints, and takes a second adapter.
    torch.manual_seed(0)
    again = trainer([LoRA(rank=2, variant="qalora"), QuantizeBase("int4", group_size=8, skip=("head",))])
    with pytest.raises(ConfigurationError, match=r"variant='qalora' .* 'net.head' is a Linear without them"):
        again.fit(copy.deepcopy(module), data(), data())
    if variant == "rounded":
        return
    lora = LoRA(rank=2, variant="qalora", targets=targets)
    trainer([lora, QuantizeBase("int4", group_size=8, skip=("head",))]).fit(module, data(), data())
    assert torch.equal(module.net.stem.weight, codes)


def test_qalora_needs_an_int4_base_and_groups_that_fit() -> None:
    for others in ([], [QuantizeBase("nf4")]):
        with pytest.raises(
            ConfigurationError, match=r"Add QuantizeBase\(format='int4', group_size=32\) to the callbacks"
        ):
            apply(Toy(), [LoRA(variant="qalora"), *others])
    with pytest.raises(ConfigurationError, match=r"got 32 for the 16 of 'net.stem' and 5 more. 16 divides all"):
        apply(module := Toy(), [QuantizeBase("int4")])
    assert_equal(weights(module), weights(Toy()))
    for size, allowed in ((0, "a whole number of at least 2"), (7, "even")):
        with pytest.raises(ConfigurationError, match=f"group_size must be {allowed}, got {size}"):
            QuantizeBase("int4", group_size=size)
    apply(module, [QuantizeBase("int4", group_size=16), LoRA(variant="qalora")])
    report = reports_of(module)["QuantizeBase"]
    assert report.details["bytes_per_parameter"] == 0.5 + 8 / 16


@pytest.mark.parametrize("format", ["nf4", "int4"])
def test_float_layers_go_one_by_one(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    floats = [weakref.ref(layer.weight) for layer in module]
    alive: list[int] = []

    def counted(layer: Any, *args: Any, **kwargs: Any) -> Any:
        alive.append(sum(ref() is not None for ref in floats))
        return quantize_linear(layer, *args, **kwargs)

    monkeypatch.setattr(quantize_base, "quantize_linear", counted)
    report = QuantizeBase(format, skip=()).transform(module)
    assert alive == [5, 4, 3, 2, 1]  # a list of layers would keep all five to the end
    assert not any(ref() for ref in floats)
    assert report.modules == ("0", "1", "2", "3", "4")
    assert report.parameters == 5 * 64 * 64


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_a_layer_is_quantised_in_pieces_as_bitsandbytes_does_it_whole(
    format: str, double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitsandbytes as bnb

    linear = nn.Linear(255, 259, bias=False, dtype=torch.bfloat16)  # an odd number of weights, no multiple of a block
    theirs, at_once = bnb.functional.quantize_4bit, list[int]()

    def noted(weights: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        at_once.append(weights.numel())
        return theirs(weights, *args, **kwargs)

    monkeypatch.setattr(bitsandbytes_layers, "_PIECE", 2**12)
    try:
        for default in (torch.float32, torch.bfloat16):  # as in a run of bf16-true
            torch.set_default_dtype(default)
            weight = linear.weight.detach()
            whole: Any = bnb.nn.Params4bit(weight, compress_statistics=double, quant_type=format).to("cpu")
            with monkeypatch.context() as patched:
                patched.setattr(bnb.functional, "quantize_4bit", noted)
                layer: Any = quantize_linear(linear, format, double_quant=double)
            assert max(at_once) == 2**12  # each takes 12 bytes while it is done
            assert torch.equal(layer.weight, whole)
            assert vars(layer.weight).keys() == vars(whole).keys()
            assert_equal(layer.weight.quant_state.as_dict(packed=True), whole.quant_state.as_dict(packed=True))
    finally:
        torch.set_default_dtype(torch.float32)


READ = {  # by family: changes of its config, and what of the network QuantizeBase is to skip
    "llama": ({}, ("lm_head",)),
    "qwen3": ({"tie_word_embeddings": True}, ()),
    "gpt2": ({}, ("network.lm_head",)),  # layers whose weight lies the other way round
    "mixtral": ({}, ("q_proj",)),  # experts, which transformers puts together as they are read
    "mamba": ({}, ()),  # reads the weight of some of its layers
}
PEAKS = {"nf4": 1.3, "fp4": 1.3, "int8": 1.3, "int4": 3.0}  # layers; int4's own steps take some copies of one


def base(family: str, folder: Path) -> str:
    from tests.models.libraries.test_causal_lm import FAMILIES

    families = {
        **FAMILIES,
        "mamba": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 97},
    }
    torch.manual_seed(0)
    fields = {**families[family], **READ[family][0]}
    build(CausalLMConfig(config_fields=fields)).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


class Holder(nn.Module):
    def __init__(self, technique: QuantizeBase | None, spec: CausalLMConfig) -> None:
        super().__init__()
        self.network = build(spec, None, technique and technique.on_read("network."))


@pytest.mark.turns(5)
@pytest.mark.parametrize("format", ["nf4", "int8", "int4"])
@pytest.mark.parametrize("family", READ)
def test_what_is_read_from_a_folder_is_quantised_as_a_float_base_is(family: str, format: str, tmp_path: Path) -> None:
    spec, skip = CausalLMConfig(base(family, tmp_path)), READ[family][1]
    late, early = Holder(None, spec), Holder(technique := QuantizeBase(format, skip=skip, group_size=8), spec)
    assert any(map(is_quantized, early.modules()))
    reports = [QuantizeBase(format, skip=skip, group_size=8).transform(late), technique.transform(early)]
    assert reports[0] == reports[1]
    theirs, ours = late.state_dict(), early.state_dict()
    assert list(theirs) == list(ours)
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    for one, other in zip(late.named_parameters(), early.named_parameters(), strict=True):
        assert (one[0], one[1].requires_grad, type(one[1])) == (other[0], other[1].requires_grad, type(other[1]))
    ids = torch.arange(6)[None]
    assert torch.equal(late.network(ids, use_cache=False).logits, early.network(ids, use_cache=False).logits)


@pytest.mark.parametrize("format", PEAKS)
def test_one_float_layer_is_in_memory_at_a_time(format: str, tmp_path: Path) -> None:
    """The peak is the quantised layers, the float parameters and one float layer; the float base has 23 layers."""
    fields = {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
    fields |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 97}
    build(CausalLMConfig(config_fields=fields)).to(torch.bfloat16).save_pretrained(tmp_path)
    technique = QuantizeBase(format)
    with AllocationMeter() as meter:
        held = Holder(technique, CausalLMConfig(str(tmp_path)))
        report = technique.transform(held)
    layer, floats = 4 * 128 * 256, 4 * sum(p.numel() for p in held.parameters() if p.is_floating_point())
    assert len(report.modules) == 42
    assert report.bytes_saved > 20 * layer
    assert meter.peak <= meter.live + PEAKS[format] * layer
    assert meter.live <= 1.05 * (floats + report.details["bytes_per_parameter"] * report.parameters)


def test_a_task_reads_its_base_so_where_nothing_acts_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = base("llama", tmp_path / "base")
    early: list[int] = []
    transform = QuantizeBase.transform

    def counted(self: QuantizeBase, module: Any) -> Any:
        early.append(len(self._early))
        return transform(self, module)

    monkeypatch.setattr(QuantizeBase, "transform", counted)

    class Own(LanguageModeling):
        def configure_model(self) -> None:
            super().configure_model()
            assert not any(map(is_quantized, self.modules())), "what others see between is a float network"

    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2

    def trained(kind: type[LanguageModeling], *techniques: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        task = kind(CausalLMConfig(folder), learning_rate=0.1, warmup_steps=0)
        run = trainer([QuantizeBase(), LoRA(rank=2), *techniques], max_steps=1, limit_val_batches=0)
        run.fit(task, *(DataLoader(rows, batch_size=2) for _ in range(2)))
        return weights(task)

    found = [trained(LanguageModeling), trained(Own), trained(LanguageModeling, StochasticDepth(rate=0.1))]
    assert early == [14, 0, 0]
    assert_equal(found[0], found[1])


def test_a_base_is_read_so_for_a_checkpoint_alone_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = LanguageModeling(CausalLMConfig(base("llama", tmp_path / "base")), learning_rate=0.1, warmup_steps=0)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    run = trainer([QuantizeBase(), LoRA(rank=2)], max_steps=1, limit_val_batches=0)
    run.fit(task, *(DataLoader(rows, batch_size=2) for _ in range(2)))
    run.save_checkpoint(tmp_path / "a.ckpt")
    late: list[Any] = []
    kept = QuantizeBase._layers
    monkeypatch.setattr(QuantizeBase, "_layers", lambda *given: late.extend(found := kept(*given)) or found)
    loaded, _ = load_language_model(str(tmp_path / "a.ckpt"))
    assert not late, "layers that were in memory as floats"
    assert_equal(weights(loaded), weights(task))


def test_a_merge_holds_no_layer_that_it_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    apply(module, [QuantizeBase(skip=())])
    codes = [weakref.ref(layer) for layer in module]
    alive: list[int] = []

    def counted(layer: Any) -> Any:
        alive.append(sum(ref() is not None for ref in codes))
        return dequantize(layer)

    monkeypatch.setattr(merge, "dequantize", counted)
    merge_adapters(module)
    assert alive == [5, 4, 3, 2, 1]


def test_adapters_beside_random_weights_are_refused_before_any_are_drawn(tmp_path: Path) -> None:
    fields = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 2, "vocab_size": 97}
    task = LanguageModeling(CausalLMConfig(config_fields=fields), warmup_steps=0)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    run = trainer([LoRA(rank=1)], max_steps=1, limit_val_batches=0)
    run.fit(task, *(DataLoader(rows, batch_size=2) for _ in range(2)))
    run.save_checkpoint(tmp_path / "a.ckpt")
    with AllocationMeter() as meter, pytest.raises(CheckpointError, match=r"lacks \d+ frozen tensors.*save_base=True"):
        export_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", "merged")
    assert meter.peak < sum(p.nbytes for p in task.parameters()) / 2


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_autocast_reaches_the_output_of_a_4_bit_layer(kind: str) -> None:
    """A norm gives float32 under autocast. What follows a 4-bit layer then must not be float32, too."""
    torch.manual_seed(0)
    layer = quantize_linear(nn.Linear(64, 128), kind)
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours = layer(x)
        theirs = bitsandbytes.nn.Linear4bit.forward(layer, x)
    assert (ours.dtype, theirs.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(ours.float(), theirs)
    (gradient,) = torch.autograd.grad(ours.sum(), x)
    (expected,) = torch.autograd.grad(theirs.sum(), x)
    assert torch.equal(gradient, expected)
    assert layer(x).dtype == torch.float32  # without autocast
