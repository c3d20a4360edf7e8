"""KeepFloat32: the modules it finds in real networks, the precision lost without it, and casts without effect."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lit_efficient import ConfigurationError, KeepFloat32, apply
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.support import Net, Toy, data, trainer


def norms_survive_a_cast(run: Run) -> None:
    """After a cast to bfloat16, the network keeps its norms in float32 and computes them in it."""
    low = copy.deepcopy(run.module.net).to(torch.bfloat16)
    for name, part in low.named_modules():
        if name.endswith("norm"):
            assert {p.dtype for p in part.parameters(recurse=False)} == {torch.float32}, name
            x = torch.randn(3, *part.weight.shape).bfloat16()
            assert part(x).dtype is torch.bfloat16
    others = {p.dtype for name, p in low.named_parameters() if name.endswith("stem.weight")}
    assert others <= {torch.bfloat16, torch.uint8}


ROW = Row(KeepFloat32, norms_survive_a_cast, KeepFloat32, changes=False)

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096}


def llama() -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    with torch.no_grad():  # attention that looks somewhere
        for name, p in model.named_parameters():
            p.mul_(15 if "q_proj" in name or "k_proj" in name else 1).copy_(p.bfloat16())
    return model


def moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL, **experts)).eval()


def error(model: Any, ids: Tensor, wanted: Tensor) -> float:
    with torch.no_grad():
        return float((model(ids).logits.float() - wanted).norm() / wanted.norm())


def test_far_positions_are_turned_as_in_float32() -> None:
    """With rotary frequencies that a cast has rounded, angles beyond position 1000 are wrong by more than a radian."""
    model, ids = llama(), torch.randint(0, 64, (1, 1500))
    low, kept = copy.deepcopy(model).bfloat16(), copy.deepcopy(model)
    report = KeepFloat32().transform(kept)
    kept.bfloat16()
    assert report.summary == "3 norms, 1 positions in float32, 96 parameters"
    with torch.no_grad():
        wanted = model(ids).logits
    assert error(kept, ids, wanted) < 0.5 * error(low, ids, wanted)
    places, x = torch.arange(1500)[None], torch.zeros(1, 1500, 32)
    angles = [one.model.rotary_emb(x.to(one.lm_head.weight.dtype), places)[0].float() for one in (model, low, kept)]
    assert (angles[1] - angles[0]).abs().max() > 0.2
    assert (angles[2] - angles[0]).abs().max() < 2**-8  # what is left is the rounding of the cosines


def test_routers_choose_as_in_float32() -> None:
    model = moe()
    router = model.model.layers[0].mlp.gate
    with torch.no_grad():
        router.weight.normal_(std=0.02).copy_(router.weight)
    low, kept = copy.deepcopy(model).bfloat16(), copy.deepcopy(model)
    report = KeepFloat32(("routers",)).transform(kept)
    kept.bfloat16()
    assert report.modules == ("model.layers.0.mlp.gate",)
    x = torch.randn(4000, 32).bfloat16()
    chosen = [one.model.layers[0].mlp.gate(x.to(one.lm_head.weight.dtype))[-1] for one in (model, low, kept)]
    assert torch.equal(chosen[0], chosen[2])
    assert not torch.equal(chosen[0], chosen[1])


def test_what_is_called_a_gate_and_chooses_nothing_is_left_alone() -> None:
    model = GPT(GPTConfig(32, dim=16, depth=2, num_heads=2))
    report = apply(model, [KeepFloat32()])["KeepFloat32"]
    assert report.summary == "5 norms in float32, 80 parameters"
    assert not any("gate" in name for name in report.modules)

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.choose = nn.Linear(8, 3)
            self.square = nn.Linear(3, 3)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    assert KeepFloat32(("routers",)).transform(nn.ModuleDict({"moe": Mixture()})).modules == (
        "moe.choose",
        "moe.square",
    )


@pytest.mark.filterwarnings("ignore:AdamW steps .* in 16 bits")
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_a_run_computes_norms_in_float32(precision: Any) -> None:
    module, seen = Toy(), []
    technique = KeepFloat32(modules=["head"])
    run = trainer([technique], precision=precision, max_steps=2)
    module.net.blocks[0].norm.register_forward_pre_hook(lambda part, args: seen.append(args[0].dtype))
    run.fit(module, data(), data())
    assert {p.dtype for name, p in module.named_parameters() if "norm" in name or "head" in name} == {torch.float32}
    assert module.net.stem.weight.dtype is (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert torch.bfloat16 in seen
    x = torch.randn(4, 16).bfloat16()
    exact = nn.functional.layer_norm(x.double(), (16,), *[p.double() for p in module.net.blocks[0].norm.parameters()])
    assert torch.equal(module.net.blocks[0].norm(x), exact.bfloat16()) or (
        (module.net.blocks[0].norm(x).double() - exact).abs().max() < 2**-7
    )


def test_a_run_says_that_tables_are_rounded(recwarn: pytest.WarningsRecorder) -> None:
    class Tabled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Module()
            self.table.register_buffer("frequencies", torch.rand(4), persistent=False)

    for techniques, said in (([KeepFloat32(("norms",))], 1), ([KeepFloat32()], 0)):
        recwarn.clear()
        trainer(techniques, precision="bf16-true", max_steps=1).fit(Toy(network=Tabled), data(), data())
        assert sum("first 'net.table.frequencies'" in str(w.message) for w in recwarn) == said


def test_what_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kinds must be a list of norms, routers, positions, got 'norms'"):
        KeepFloat32("norms")
    with pytest.raises(ConfigurationError, match="Linear has no norms or routers or positions to keep in float32"):
        KeepFloat32().transform(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="the pattern 'hed' matches none"):
        KeepFloat32(modules=["hed"]).transform(Net())
