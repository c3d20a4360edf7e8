"""Adapters of stacked experts and of routers: the numbers of peft's ``target_parameters``, and what reports say."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from lit_efficient import ConfigurationError, LoRA, MuonAdamW, QuantizeBase, merge_adapters
from lit_efficient.application import apply
from lit_efficient.mechanisms.adapters.disabled import disabled
from lit_efficient.mechanisms.adapters.merge import dequantize_layers
from lit_efficient.mechanisms.adapters.peft_folder import placement
from lit_efficient.mechanisms.adapters.peft_format import to_peft
from lit_efficient.mechanisms.adapters.peft_saved import write_peft_folder
from lit_efficient.optimizers.muon_adamw import muon_groups
from tests.support import assert_equal, weights

IDS = torch.arange(10)[None] % 7
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 8, "head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "Mixtral": (
        lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL)),
        "model.layers.0.mlp.experts",
    ),
    "gpt-oss": (  # multiplies from the right, with biases beside the weights
        lambda: transformers.GptOssForCausalLM(transformers.GptOssConfig(**SMALL)),
        "model.layers.0.mlp.experts",
    ),
    "Llama 4": (
        lambda: transformers.Llama4ForCausalLM(
            transformers.Llama4TextConfig(**SMALL, intermediate_size_mlp=24, interleave_moe_layer_step=1)
        ),
        "model.layers.0.feed_forward.experts",
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[nn.Module, str]:
    torch.manual_seed(0)
    make, experts = MODELS[request.param]
    net = make().eval()
    for p in net.parameters():
        nn.init.normal_(p, std=0.1)
    return net, experts


def randomize(net: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, p in net.named_parameters():
        if "lora_" in name:
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.1)


def test_experts_compute_what_pefts_do_and_merge_into_their_weights(
    model: tuple[nn.Module, str], tmp_path: Path
) -> None:
    base, experts = copy.deepcopy(model[0]), model[1]
    net, ids = copy.deepcopy(base), IDS
    plain = net(ids).logits
    trained = LoRA(rank=2, targets=[r"experts\.gate_up_proj", r"experts\.down_proj"])
    report = apply(net, [trained])["LoRA"]
    assert report.modules == (experts,)
    assert torch.equal(net(ids).logits, plain)
    randomize(net)
    names = ("gate_up_proj", "down_proj")
    config = peft.LoraConfig(
        r=2, lora_alpha=16, target_modules=[], target_parameters=[f"mlp.experts.{n}" for n in names]
        if "mlp" in experts else [f"feed_forward.experts.{n}" for n in names],
    )  # fmt: skip
    with warnings.catch_warnings(action="ignore"):  # peft reads what transformers has renamed
        theirs = peft.get_peft_model(base, config).eval()
    ours = net.get_submodule(experts)
    peft_layers: list[Any] = [part for part in theirs.modules() if type(part).__name__ == "ParamWrapper"]
    assert peft_layers
    for part in peft_layers:
        a, b = (getattr(ours, f"lora_{f}_{part.parameter_name}") for f in "AB")
        part.lora_A["default"].weight.data.copy_(a.flatten(0, 1))
        part.lora_B["default"].weight.data.copy_(b.permute(1, 2, 0).flatten(1))
    outputs = net(ids).logits
    again = copy.deepcopy(model[0])  # loads what a checkpoint keeps
    apply(again, [LoRA(rank=2, targets=[r"experts\.gate_up_proj", r"experts\.down_proj"])])
    again.load_state_dict({key: tensor for key, tensor in net.state_dict().items() if "lora_" in key})
    assert torch.equal(again(ids).logits, outputs)
    assert not torch.allclose(outputs, plain, atol=1e-4)
    torch.testing.assert_close(outputs, theirs(ids).logits, rtol=1e-5, atol=1e-6)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    write_peft_folder(tmp_path / "ours", *to_peft(net.state_dict(), placement(net), trained.arguments()))
    for folder in ("ours", "theirs"):
        started = nn.ModuleDict({"network": copy.deepcopy(model[0])})
        apply(started, [LoRA(start_from=str(tmp_path / folder))])
        assert torch.equal(started["network"](ids).logits, outputs)
        assert_equal(weights(started["network"]), weights(net))
    outputs.square().sum().backward()
    theirs(ids).logits.square().sum().backward()
    for part in peft_layers:
        grad = getattr(ours, f"lora_A_{part.parameter_name}").grad.flatten(0, 1)
        torch.testing.assert_close(grad, part.lora_A["default"].weight.grad, rtol=1e-4, atol=1e-6)
    with disabled(net):
        assert torch.equal(net(ids).logits, plain)
    merged = merge_adapters(net)
    torch.testing.assert_close(merged(ids).logits, outputs, rtol=1e-5, atol=1e-6)
    assert list(merged.state_dict()) == list(model[0].state_dict())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
def test_an_adapter_of_one_stack_and_of_layers_starts_another(tmp_path: Path) -> None:
    """A linear layer is adapted as a parameter, too, as our exports do where peft would mistake it for an expert."""
    base = MODELS["Mixtral"][0]().eval()
    given: dict[str, Any] = {"r": 2, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj"]}
    given["target_parameters"] = ["mlp.experts.down_proj", "o_proj.weight"]
    theirs: Any = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**given))
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    net = copy.deepcopy(base)
    apply(net, [QuantizeBase(experts=True)])
    dense = peft.PeftModel.from_pretrained(dequantize_layers(copy.deepcopy(net)), tmp_path).eval()
    apply(net, [technique := LoRA(start_from=str(tmp_path))])
    assert technique.variant == "rslora"
    torch.testing.assert_close(net(IDS).logits, dense(IDS).logits, rtol=1e-5, atol=1e-6)
    for change, message in (
        ({"alpha_pattern": {"down_proj": 3}}, r"another lora_alpha for the stacked weights 'model.*experts.down_proj'"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "does not fit MixtralForCausalLM: 2 tensors are missing or"),
    ):
        file = tmp_path / "adapter_config.json"
        file.write_text(
            json.dumps({**json.loads(file.read_text()), "target_parameters": ["experts.down_proj"], **change})
        )
        with pytest.raises(ConfigurationError, match=message):
            apply(copy.deepcopy(base), [LoRA(start_from=str(tmp_path))])
    with pytest.raises(ConfigurationError, match=r"the adapter 'second' adapts stacked experts \('model"):
        apply(copy.deepcopy(base), [LoRA(beside={"second": str(tmp_path)})])


@pytest.mark.turns(3)
def test_linear_layers_alone_leave_the_experts_and_say_so(model: tuple[nn.Module, str]) -> None:
    size = sum(p.numel() for name, p in model[0].named_parameters() if name.startswith(model[1]) and p.ndim == 3)
    report = apply(copy.deepcopy(model[0]), [LoRA(rank=2)])["LoRA"]
    assert model[1] not in (report.modules or ())
    assert f"; {size:,} parameters of experts have no adapter (see targets='all-linear+experts')" in report.summary
    report = apply(both := copy.deepcopy(model[0]), [LoRA(rank=2, targets="all-linear+experts")])["LoRA"]
    assert model[1] in (report.modules or ())
    assert "have no adapter" not in report.summary
    both(IDS).logits.sum().backward()
    assert all(p.grad is not None for p in both.parameters() if p.requires_grad)
    quantized = apply(copy.deepcopy(model[0]), [QuantizeBase(format="int4", group_size=4)])["QuantizeBase"]
    assert quantized.details["bytes_of_experts"] == 4 * size
    with pytest.raises(
        ConfigurationError, match="support the variants lora and rslora without dropout, got variant='dora'"
    ):
        apply(copy.deepcopy(model[0]), [LoRA(targets="all-linear+experts", variant="dora")])


def test_a_router_that_returns_a_tuple_routes_by_the_adapted_weight() -> None:
    torch.manual_seed(0)
    net = MODELS["Llama 4"][0]().eval()
    base, plain = copy.deepcopy(net), net(IDS).logits
    apply(net, [LoRA(rank=2, targets=["router"])])
    torch.testing.assert_close(net(IDS).logits, plain)
    randomize(net)
    router: Any = net.get_submodule("model.layers.0.feed_forward.router")
    with torch.no_grad():
        base.get_submodule("model.layers.0.feed_forward.router").weight += 8 * router.lora_B @ router.lora_A
    torch.testing.assert_close(net(IDS).logits, base(IDS).logits)
    net(IDS).logits.sum().backward()
    assert router.lora_A.grad.any()
    dropping = apply_to(base, LoRA(rank=2, targets=["router"], dropout=0.1))
    with pytest.raises(
        ConfigurationError, match=r"LoRA: 'model\.layers\.0\.feed_forward\.router' rounds its weight, or"
    ):
        dropping.train()(IDS)


def apply_to(net: nn.Module, *techniques: Any) -> nn.Module:
    apply(net, techniques)
    return net


def test_muon_orthogonalises_each_experts_matrix() -> None:
    """As many steps of torch's own on each matrix alone."""
    torch.manual_seed(0)
    start, grads = torch.randn(3, 16, 20), torch.randn(2, 3, 16, 20)
    stack = nn.Parameter(start.clone())
    alone = [nn.Parameter(matrix.clone()) for matrix in start]
    optimizer = MuonAdamW([stack], lr=0.1)
    assert optimizer.param_groups[0]["muon"]
    ones = torch.optim.Muon(alone, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for grad in grads:
        stack.grad = grad
        for matrix, own in zip(alone, grad, strict=True):
            matrix.grad = own
        optimizer.step()
        ones.step()
    torch.testing.assert_close(stack, torch.stack(list(alone)))
    assert not MuonAdamW([nn.Parameter(torch.randn(16, 16, 5))]).param_groups[0]["muon"]  # a filter of width 5
    net = MODELS["Mixtral"][0]()
    by_muon = {id(p) for group in muon_groups(net) if group["muon"] for p in group["params"]}
    assert id(net.get_parameter("model.layers.0.mlp.experts.down_proj")) in by_muon
    assert not any(g["muon"] for g in muon_groups(nn.Sequential(nn.Conv1d(16, 16, 16, bias=False))))
