"""WidthTransfer: the papers' multipliers as weights and rates, the coordinate check, each network, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_efficient import ConfigurationError, Lion, WidthTransfer
from lit_efficient.application import apply
from lit_efficient.models.networks.dit import DiT, DiTConfig, DiTVariant
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.support import AttentionNet


def hidden_rates_are_lower(run: Run) -> None:
    """Of what trains, hidden matrices have half the rate of the others, and those that end branches a quarter."""
    network = run.module.net.gpt
    rates = {id(p): group["lr"] for group in run.trainer.optimizers[0].param_groups for p in group["params"]}
    parts = (network.embedding, network.blocks[1].mlp.up, network.blocks[1].mlp.down)
    found = [rates.get(id(getattr(part, "weight", None))) for part in parts]
    if None not in found and run.technique("GradualUnfreezing") is None:  # whose rates fall with the depth, too
        assert found[1] == pytest.approx(found[0] / 2)
        assert found[2] == pytest.approx(found[0] / 4)
    assert "groups, rates times 1" in run.reports["WidthTransfer"].summary


ROW = Row(lambda: WidthTransfer(8, 2), hidden_rates_are_lower, lambda: WidthTransfer(16, 4), network=AttentionNet)


def gpt(width: int, depth: int = 2, seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(GPTConfig(32, dim=width, depth=depth, num_heads=width // 16, hidden_dim=2 * width, tie_embeddings=False))


def groups(network: nn.Module, rate: float, **options: Any) -> torch.optim.AdamW:
    """What `rewrite_optimizer` makes of one group."""
    optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=0.1, **options)
    WidthTransfer.rewrite_optimizer(WidthTransfer(64), optimizer, network)
    return optimizer


def rates_of(network: nn.Module) -> dict[str, float]:
    """What the rates of its parameters are multiplied by, without those that stay."""
    factors: dict[str, tuple[float, float]] = network.__dict__["_lit_efficient_rate_factors"]
    return {name: rate for name, (rate, _) in factors.items() if rate != 1}


def steps(network: Any, optimizer: Any, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(0, 32, (count + 1, 4, 17), generator=generator)
    for tokens in batches[:-1]:
        optimizer.zero_grad()
        F.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    with torch.no_grad():
        return network(batches[-1, :, :-1])


def test_it_trains_as_with_the_multipliers_of_the_papers() -> None:
    network = gpt(64, 4).double()
    apply(network, [WidthTransfer(32, 2)])
    slow = copy.deepcopy(network)
    m, deep = 2, 2
    ends = [part for block in slow.blocks for part in (block.attention.out, block.mlp.down)]  # type: ignore[union-attr]
    with torch.no_grad():
        slow.head.weight.mul_(m)
        for part in ends:
            part.weight.mul_(deep)
    slow.head.register_forward_hook(lambda *args: args[2] / m)
    for part in ends:
        part.register_forward_hook(lambda *args: args[2] / deep)
    eps = 1e-3  # as large as gradients are, so that it tells
    inside = {p: name for name, p in slow.named_parameters() if "blocks" in name}
    hidden, vectors = ([p for p in inside if (p.ndim > 1) is matrix] for matrix in (True, False))
    others = [p for p in slow.parameters() if p not in inside]
    reference = torch.optim.AdamW(
        [
            {"params": hidden, "lr": 1e-2 / m, "weight_decay": 0.1 * m, "eps": eps / m / deep},
            {"params": vectors, "weight_decay": 0.1, "eps": eps / m / deep},
            {"params": others, "weight_decay": 0.1, "eps": eps / m},
        ],
        1e-2,
    )
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(network(tokens), slow(tokens))
    start = copy.deepcopy(network)
    wanted = steps(slow, reference, 4)
    torch.testing.assert_close(steps(network, groups(network, 1e-2, eps=eps), 4), wanted)
    unscaled = groups(start, 1e-2, eps=eps)
    for group in unscaled.param_groups:
        group["eps"] = eps
    assert float((steps(start, unscaled, 4) - wanted).abs().max()) > 1e-2


def test_deviations_are_those_of_the_base_times_the_papers_factors() -> None:
    base, network = gpt(64, 2), gpt(256, 8)
    apply(network, [WidthTransfer(64, 2)])
    for name, parameter in network.named_parameters():
        if parameter.ndim < 2:
            continue
        key = name if name in dict(base.named_parameters()) else f"blocks.0.{name.split('.', 2)[2]}"
        end = name.endswith(("attention.out.weight", "mlp.down.weight"))
        factor = 1 / 4 if name == "head.weight" else 1 if name == "embedding.weight" else 1 / 2
        wanted = float(base.get_parameter(key).detach().std()) * factor * (1 / 4 if end else 1)
        assert float(parameter.detach().std()) == pytest.approx(wanted, rel=2e-3), name


def test_coordinate_check_activations_change_alike_at_all_widths() -> None:
    """Wider networks change 2.8 times as much without the technique, and 0.81 times as much with it.

    The standard deviations over seeds are 0.17 and 0.04, so the mean of four seeds is five standard errors from limits.
    """

    def change(width: int, transfers: bool, seed: int) -> float:
        network = gpt(width, seed=seed)
        if transfers:
            apply(network, [WidthTransfer(64)])
        optimizer = groups(network, 5e-3)
        before = steps(copy.deepcopy(network), torch.optim.SGD(network.parameters(), 0.0), 0)
        return float((steps(network, optimizer, 3) - before).square().mean().sqrt())

    def ratio(transfers: bool) -> float:
        ratios = [change(256, transfers, seed) / change(64, transfers, seed) for seed in range(4)]
        return sum(ratios) / len(ratios)

    assert ratio(transfers=False) > 2
    assert 0.7 < ratio(transfers=True) < 1.4


def test_llama_and_dit_have_the_same_rates_for_the_same_parts() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 4, "vocab_size": 32, "intermediate_size": 64, "num_key_value_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_attention_heads=4, **sizes))
    apply(llama, [WidthTransfer(16, 2)])
    rates = rates_of(llama)
    block = "model.layers.3"
    assert rates[f"{block}.self_attn.q_proj.weight"] == rates[f"{block}.mlp.up_proj.weight"] == 1 / 2
    assert rates["lm_head.weight"] == 1 / 2
    assert rates[f"{block}.self_attn.o_proj.weight"] == rates[f"{block}.mlp.down_proj.weight"] == 1 / 4
    assert not {name for name in rates if "norm" in name or "embed" in name}
    dit = DiT(DiTConfig(width=32, depth=4, heads=2, variant=DiTVariant(qk_norm=True)))
    zeros = {name for name, p in dit.named_parameters() if not p.any()}
    apply(dit, [WidthTransfer(16, 2)])
    rates = rates_of(dit)
    assert rates["blocks.3.attention.qkv.weight"] == rates["patch_out.weight"] == rates["time.2.weight"] == 1 / 2
    assert rates["blocks.3.attention.out.weight"] == rates["blocks.3.mlp.2.weight"] == 1 / 4
    assert rates["blocks.3.mlp.2.bias"] == 1 / 2
    assert not {"patch_in.weight", "time.0.weight", "label.weight", "blocks.0.attention.qkv.bias"} & rates.keys()
    assert zeros == {name for name, p in dit.named_parameters() if not p.any()}


def test_gemma_and_gpt_2_begin_with_the_same_factors() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 32, "tie_word_embeddings": False}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Gemma2Config(hidden_size=32, num_hidden_layers=4, intermediate_size=64, **heads, **sizes)
    gemma = Gemma2ForCausalLM(config)
    x = torch.randn(2, 3, 32)
    norms = [gemma.model.layers[3].post_feedforward_layernorm, gemma.model.layers[3].input_layernorm]
    plain = [norm(x).detach() for norm in norms]  # times one plus a weight of zero
    apply(gemma, [WidthTransfer(32, 1)])
    torch.testing.assert_close([norm(x).detach() for norm in norms], [plain[0] / 4, plain[1]])

    gemma = Gemma2ForCausalLM(config)
    apply(gemma, [WidthTransfer(16)])  # whose rows are multiplied by the root of the width
    assert rates_of(gemma)["model.embed_tokens.weight"] == pytest.approx(2**-0.5)
    rows = gemma.model.embed_tokens(torch.arange(32)).detach()
    assert float(rows.std()) == pytest.approx(config.initializer_range * 16**0.5, rel=0.1)

    network = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=4, n_layer=1, n_positions=8, **sizes))
    apply(network, [WidthTransfer(16)])
    rates = rates_of(network)  # of layers with weights [inputs, outputs]
    hidden = [f"transformer.h.0.{part}.weight" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert rates == dict.fromkeys([*hidden, "lm_head.weight"], 0.5)
    unknown = OPTForCausalLM(OPTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, **sizes))
    with pytest.raises(ConfigurationError, match="OPTConfig has no attribute intermediate_size or n_inner"):
        apply(unknown, [WidthTransfer(16)])


def test_larger_heads_divide_their_products_by_their_size() -> None:
    def scores(width: int) -> float:
        torch.manual_seed(0)
        network = GPT(GPTConfig(32, dim=width, depth=1, num_heads=2, hidden_dim=64, tie_embeddings=False))
        kept = network.blocks[0].attention.query.weight.detach().clone()  # type: ignore[union-attr]
        apply(network, [WidthTransfer(32, heads="fixed")])
        return float(network.blocks[0].attention.query.weight.detach().std() / kept.std())  # type: ignore[union-attr]

    assert scores(128) == pytest.approx(0.5 * 0.5, rel=0.05)  # as a hidden matrix, and sqrt(16 / 64) for the heads
    with pytest.raises(ConfigurationError, match="heads='fixed' needs a separate layer for queries"):
        apply(DiT(DiTConfig(width=32, depth=1, heads=2)), [WidthTransfer(16, heads="fixed")])


class Wide(nn.Module):
    """A network of somebody's own."""

    def __init__(self, width: int = 16, depth: int = 1) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.stem, self.mid, self.head = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 5)

    def at_width(self, width: int, depth: int) -> Wide:
        return Wide(width, depth)


def test_anybodys_network_that_can_be_built_in_another_width() -> None:
    network = Wide(32)
    apply(network, [WidthTransfer(16)])
    assert rates_of(network) == {"mid.weight": 0.5, "head.weight": 0.5}
    optimizer = groups(network, 1e-2)
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found[id(network.mid.weight)] == (5e-3, 0.2)
    assert found[id(network.stem.weight)] == (1e-2, 0.1)


class Part(nn.Module):
    """A branch beside its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Denoiser(nn.Module):
    """Adds to its input, too, and has one branch whatever its depth is."""

    def __init__(self, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.stem, self.middle, self.out = nn.Linear(8, width), Part(width), nn.Linear(width, 8)
        self.parts = nn.ModuleList(Part(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        for part in self.parts:
            hidden = part(hidden)
        return x + self.out(self.middle(hidden))

    def at_width(self, width: int, depth: int) -> Denoiser:
        return Denoiser(width, depth)


def test_branches_that_are_not_repeated_do_not_fall_with_the_depth() -> None:
    network = Denoiser(16, 8)
    apply(network, [WidthTransfer(16, 2)])
    assert {name.partition(".")[0] for name in network.__dict__["_lit_efficient_rate_factors"]} == {"parts"}
    assert rates_of(network)["parts.5.down.weight"] == 1 / 4


def test_eps_is_scaled_as_gradients_are_and_left_where_it_is_something_else() -> None:
    def sizes(width: int, depth: int) -> tuple[GPT, dict[str, float]]:
        network = gpt(width, depth).double()
        apply(network, [WidthTransfer(64, 2)])
        tokens = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(1))
        F.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        named = network.named_parameters()
        return network, {name: float(p.grad.square().mean().sqrt()) for name, p in named if p.grad is not None}

    (_, base), (network, wide) = sizes(64, 2), sizes(256, 8)
    factors: dict[str, tuple[float, float]] = network.__dict__["_lit_efficient_rate_factors"]
    for name in ("blocks.0.attention.value.weight", "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight",
                 "embedding.weight", "head.weight"):  # fmt: skip
        assert 0.6 < wide[name] / base[name] / factors[name][1] < 1.7, name
    assert factors["head.weight"][1] == 1
    assert factors["blocks.0.mlp.up.weight"][1] == 1 / 16
    assert factors["blocks.0.mlp.down.weight"][1] == factors["embedding.weight"][1] == 1 / 4
    for make, said in (
        (torch.optim.NAdam, "eps times 1, 0.25, 0.0625"),
        (torch.optim.Adafactor, "Adafactor has no eps that is compared with gradients"),
        (Lion, "Lion has no eps that is compared with gradients"),
    ):
        optimizer = make(network.parameters(), 1e-3)
        kept = {group["eps"] for group in optimizer.param_groups if "eps" in group}
        report = WidthTransfer(64, 2).rewrite_optimizer(optimizer, network)
        assert said in report.summary
        if make is torch.optim.NAdam:
            assert {group["eps"] for group in optimizer.param_groups} == {1e-8, 1e-8 / 4, 1e-8 / 16}
        else:
            assert kept == {group["eps"] for group in optimizer.param_groups if "eps" in group}


def test_what_it_cannot_scale_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Linear has no GPT, no DiT"):
        apply(nn.Linear(2, 2), [WidthTransfer()])
    with pytest.raises(ConfigurationError, match=r"embedding.weight and head.weight are tied"):
        apply(GPT(GPTConfig(32, dim=32, num_heads=2)), [WidthTransfer(16)])
    with pytest.raises(ConfigurationError, match="the 4 heads at width 64 become a whole number, got 24"):
        apply(gpt(64), [WidthTransfer(24)])
    network = gpt(64)
    with torch.no_grad():
        network.norm.weight[3] = 1.5
    with pytest.raises(ConfigurationError, match="the norm norm does not have initial weights"):
        apply(network, [WidthTransfer(32)])
    network = gpt(64)
    apply(network, [WidthTransfer(32)])
    with pytest.raises(ConfigurationError, match="a step of SGD depends on the scale of the gradient"):
        WidthTransfer(32).rewrite_optimizer(torch.optim.SGD(network.parameters(), 0.1), network)
    for name, value in (("base_width", 0), ("base_depth", 0), ("heads", "x")):
        with pytest.raises(ConfigurationError, match=f"WidthTransfer: {name} must be"):
            WidthTransfer(**{name: value})
