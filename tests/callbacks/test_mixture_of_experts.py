"""MixtureOfExperts: equal to the dense network at first, and always to a loop over experts and transformers' blocks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient import (
    ActivationCheckpointing,
    ConfigurationError,
    LoRA,
    MixtureOfExperts,
    QuantizeBase,
    merge_adapters,
)
from lit_efficient.application import apply
from lit_efficient.mechanisms.adapters.merge import dequantize_layers
from lit_efficient.mechanisms.adapters.quantized import QuantizedExperts
from lit_efficient.mechanisms.flops import FlopMeter
from lit_efficient.mechanisms.side_terms import parts_of
from lit_efficient.models.networks import grouped_linear
from lit_efficient.models.networks.dit import DiT, DiTConfig
from lit_efficient.models.networks.expert_layers import (
    ExpertMixture,
    add_mixture,
    balanced_bias,
    load_balance_loss,
    route_tokens,
    router_z_loss,
)
from lit_efficient.models.networks.gpt import GPT, GPTConfig, SwiGLU
from lit_efficient.models.networks.grouped_linear import ExpertLinear, GroupedLayer
from lit_efficient.testing import Case, Run, check_resumes
from tests.contract.effects import moved
from tests.contract.row import Row
from tests.mechanisms.adapters.decoders import decoder
from tests.processes import run_ranks
from tests.ranks import mixtures
from tests.support import AttentionNet, Toy, trainer

CONFIG = GPTConfig(64, dim=16, depth=2, num_heads=2, hidden_dim=24, max_length=32)
IDS = torch.arange(24).view(2, 12) * 7 % 64


def specialises(run: Run) -> None:
    """Routers train, used experts become different, and checkpoints hold them under the old names."""
    learns = {name for step in run.steps for name in step.gradients}
    parts = {name: part for name, part in run.module.named_modules() if isinstance(part, GroupedLayer)}
    assert parts
    for name in parts:
        weight = run.checkpoint["state_dict"].get(f"{name}.weight")
        if weight is not None and f"{name}.weight" in learns:
            assert weight.shape[0] == 3
            assert not torch.equal(weight[0], weight[1])
    assert all(part.router_weight.dtype == torch.float32 for part in parts_of(run.module, ExpertMixture))
    trained = {name for name in learns if name.endswith("router_weight")}
    assert trained or run.technique("ReplaceHead") is not None  # which trains the head alone at first
    assert trained <= {*moved(run, "router_weight")}
    assert "3 experts" in run.reports["MixtureOfExperts"].summary


ROW = Row(
    lambda: MixtureOfExperts(3, balance_loss=0.1),
    specialises,
    repacks=True,
    network=AttentionNet,
)


def _gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def _dit() -> DiT:
    torch.manual_seed(0)
    dit = DiT(DiTConfig(size=8, channels=2, patch_size=2, width=16, depth=2, heads=2, num_classes=3))
    for p in dit.parameters():
        nn.init.normal_(p, std=0.1)
    return dit


def _decoder(family: str) -> Any:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64}
    if family == "GPT2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0) | {"bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**sizes))


def _outputs(network: nn.Module) -> Tensor:
    if isinstance(network, DiT):
        x = torch.linspace(-1, 1, 256).view(2, 2, 8, 8)
        return network(x, torch.tensor([0.2, 0.7]), torch.tensor([0, 2]))
    y = network(IDS)
    return y if isinstance(y, Tensor) else y.logits


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "make", [_gpt, _dit, *("Llama", "Qwen2", "Qwen3", "GPT2")], ids=lambda make: getattr(make, "__name__", make)
)
def test_starts_as_the_dense_network_in_training_and_evaluation(make: Any) -> None:
    dense = make() if callable(make) else _decoder(make)
    for top_k, shared in ((1, 0), (2, 0), (3, 1), (4, 0)):
        network = copy.deepcopy(dense)
        report = MixtureOfExperts(4, top_k, shared).transform(network)
        assert len(report.modules) == 2
        assert set(dict(network.named_parameters())) == set(dict(dense.named_parameters())) | {
            f"{name}.router_weight" for name in report.modules
        }
        for training in (True, False):
            given, wanted = (_outputs(one.train(training)) for one in (network, dense))
            torch.testing.assert_close(given, wanted, rtol=0, atol=1e-6)
        assert network.load_state_dict(dense.state_dict())  # the dense network's checkpoint


def _drawn(module: nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p) * 0.5


def _experts_one_by_one(mixture: Any, x: Tensor) -> Tensor:
    """Compute each token separately, with a plain copy of the module for each expert."""
    shared, k = mixture.router_shared, mixture.router_top_k
    rows, out = x.flatten(0, -2), []
    total = len(mixture.router_weight)
    for token in rows:
        p = (mixture.router_weight @ token).softmax(0)
        score = p if mixture.router_bias is None else p + mixture.router_bias
        best = sorted(range(total), key=lambda e: -float(score[e].detach()))[:k]
        norm = p[best[0]].detach() if k == 1 else sum(p[e] for e in best)
        y = sum(p[e] / norm * _expert(mixture, e, token) for e in best)
        out.append((y + sum(_expert(mixture, total + s, token) for s in range(shared))) / (1 + shared))
    return torch.stack(out).view_as(x)


def _expert(mixture: Any, e: int, token: Tensor) -> Tensor:
    gate, up, down = (layer.weight[e] for layer in (mixture.gate, mixture.up, mixture.down))
    return F.linear(F.silu(F.linear(token, gate)) * F.linear(token, up), down)


@pytest.mark.parametrize(("top_k", "shared", "biased"), [(1, 0, False), (2, 0, True), (3, 2, False)])
def test_computes_what_a_loop_over_the_experts_does_with_its_gradients(top_k: int, shared: int, biased: bool) -> None:
    mixture: Any = SwiGLU(CONFIG).double()
    add_mixture(mixture, 5, top_k, shared, balanced=biased, generator=torch.Generator().manual_seed(0))
    _drawn(mixture)
    if biased:
        mixture.router_bias.copy_(torch.linspace(-0.5, 0.5, 5))
    x = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found, wanted = mixture(x), _experts_one_by_one(mixture, x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    weigh = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    held = [x, *mixture.parameters()]
    ours, theirs = (torch.autograd.grad((y * weigh).sum(), held) for y in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    assert all(g.abs().sum() > 0 for g in ours)  # the router's, too, with one expert a token


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_no_tokens_are_no_error_and_no_loss(shape: tuple[int, ...]) -> None:
    add_mixture(mixture := SwiGLU(CONFIG), 4, 2, generator=torch.Generator().manual_seed(0))
    mixture.side_terms = []
    (y := mixture(torch.zeros(shape))).sum().backward()
    assert y.shape == shape
    assert mixture.side_terms == []  # the mean over none would not be a number
    assert not any(p.grad.any() for p in mixture.parameters() if p.grad is not None)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_computes_what_transformers_blocks_of_experts_do(family: str) -> None:
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": 16, "num_experts_per_tok": 2}
    theirs: Any = (
        MixtralSparseMoeBlock(MixtralConfig(**sizes, intermediate_size=24, num_local_experts=4))
        if family == "mixtral"
        else Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(**sizes, moe_intermediate_size=24, num_experts=4, norm_topk_prob=True)
        )
    )
    _drawn(theirs)
    ours: Any = SwiGLU(CONFIG)
    add_mixture(ours, 4, 2, generator=torch.Generator().manual_seed(0))
    gate_up = theirs.experts.gate_up_proj.detach()
    ours.gate.weight.data, ours.up.weight.data = (half.contiguous() for half in gate_up.chunk(2, dim=1))
    ours.down.weight.data = theirs.experts.down_proj.detach().clone()
    ours.router_weight.data = theirs.gate.weight.detach().clone()
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
    for one, other in zip(*(_with_gradients(block, x) for block in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    logits = F.linear(x.flatten(0, 1), ours.router_weight)
    chosen = route_tokens(logits, 2)[1]
    wanted = load_balancing_loss_func((logits,), 4, 2)
    torch.testing.assert_close(load_balance_loss(logits, chosen), wanted / 2)  # theirs is top_k where all is even
    torch.testing.assert_close(router_z_loss(logits), logits.exp().sum(-1).log().square().mean())


def _with_gradients(block: Any, x: Tensor) -> list[Tensor]:
    y = block(x)
    y.square().sum().backward()
    gate = block.router_weight if isinstance(block, ExpertMixture) else block.gate.weight
    down = block.down.weight if isinstance(block, ExpertMixture) else block.experts.down_proj
    grads = [y.detach(), x.grad.clone(), gate.grad, down.grad]  # type: ignore[union-attr]
    x.grad = None
    return grads


def test_slices_and_grouped_products_agree_and_are_counted_by_what_works_on_a_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixture: Any = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
    add_mixture(mixture, 4, 2, generator=torch.Generator().manual_seed(0))
    _drawn(mixture)
    x = torch.randn(30, 16, generator=torch.Generator().manual_seed(2))
    results = []
    for groupable in (True, False):
        if not groupable:
            monkeypatch.setattr(grouped_linear, "_is_groupable", lambda *_: False)
        mixture.zero_grad()
        with FlopMeter() as meter:
            y = mixture(x)
            y.sum().backward()
        assert meter.sums.total() == 3 * (2 * 2 * 30 * 2 * 16 * 24) - 2 * 60 * 16 * 24 + 2 * (2 * 30 * 16 * 4)
        assert not meter.unknown
        results.append([y, *(p.grad.clone() for p in mixture.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


class _Language(L.LightningModule):
    def __init__(self, network: Any = None) -> None:
        super().__init__()
        self.network = network or _gpt()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0].long()
        return F.cross_entropy(self.network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def _tokens(rows: int = 16) -> Any:
    tokens = torch.randint(0, 64, (rows, 13), generator=torch.Generator().manual_seed(4))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=4)


def _fit(*techniques: Any, steps: int = 4, module: Any = None, **arguments: Any) -> Any:
    module = module or _Language()
    trainer(techniques, max_steps=steps, max_epochs=None, **arguments).fit(module, _tokens())
    return module


def test_losses_are_added_and_the_bias_follows_the_loads() -> None:
    technique = MixtureOfExperts(4, 1, balance_loss=0.5, z_loss=0.25, bias_rate=0.1)
    module = _Language()
    apply(module, [technique])
    (tokens,) = next(iter(_tokens()))
    mixtures = parts_of(module, ExpertMixture)
    seen: list[Tensor] = []
    hooks = [part.register_forward_pre_hook(lambda part, args: seen.append(args[0].detach())) for part in mixtures]
    with technique._terms.collecting(module):
        loss = module.training_step((tokens,), 0)
        extra = technique.extra_loss(loss, module, None)
        loads = [part.router_load for part in mixtures]
    for hook in hooks:
        hook.remove()
    logits = [F.linear(x.flatten(0, 1), part.router_weight) for x, part in zip(seen, mixtures, strict=True)]
    wanted = [0.5 * load_balance_loss(z, z.argmax(-1)[:, None]) + 0.25 * router_z_loss(z) for z in logits]
    torch.testing.assert_close(extra, sum(wanted) / 2)
    assert all(
        torch.equal(load, z.argmax(-1).bincount(minlength=4))
        for load, z in zip(loads, logits, strict=True)  # type: ignore[arg-type]
    )
    bias = balanced_bias(torch.zeros(4), torch.tensor([5, 1, 3, 3]), 0.1)
    torch.testing.assert_close(bias, torch.tensor([-0.1, 0.1, 0.0, 0.0]))
    # Two micro-batches a step: one step of the bias each.
    trained = _fit(MixtureOfExperts(4, 1, bias_rate=0.125), steps=1, accumulate_grad_batches=2)
    steps = {float(b) for part in parts_of(trained, ExpertMixture) for b in part.router_bias}
    assert steps <= {-0.125, 0.0, 0.125}
    assert steps != {0.0}


@pytest.mark.parametrize("told", [True, False])
def test_padding_counts_neither_in_losses_as_in_transformers_nor_in_loads(told: bool) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    network = decoder("Llama").train()
    technique = MixtureOfExperts(4, 2, balance_loss=1.0, z_loss=0.0, bias_rate=0.1)
    apply(root := nn.ModuleDict({"model": network}), [technique])
    mixtures = parts_of(root, ExpertMixture)
    ids = torch.arange(8).reshape(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    seen: list[Tensor] = []
    hooks = [part.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())) for part in mixtures]
    with technique.watch_step(root, {} if told else {"attention_mask": mask}):
        network(input_ids=ids, attention_mask=mask if told else None)
        extra = technique.extra_loss(None, root, None)
        loads = [part.router_load for part in mixtures]
    assert extra is not None
    logits = [F.linear(x.flatten(0, 1), part.router_weight) for x, part in zip(seen, mixtures, strict=True)]
    wanted = [load_balancing_loss_func((one,), 4, 2, mask) / 2 for one in logits]  # theirs counts each choice
    torch.testing.assert_close(extra, sum(wanted) / len(wanted))
    for load, one in zip(loads, logits, strict=True):
        assert torch.equal(load, one.topk(2).indices[mask.flatten().bool()].flatten().bincount(minlength=4))
    assert all(part.token_rows == {} for part in mixtures)
    for hook in hooks:
        hook.remove()


def test_goes_on_with_the_same_bias() -> None:
    row = Case(lambda: [MixtureOfExperts(3, 1, bias_rate=0.125)], specialises, repacks=True, network=AttentionNet)
    check_resumes(row)


def test_a_bias_evens_out_the_loads_of_a_router_that_prefers_one_expert() -> None:
    logits = torch.randn(512, 8, generator=torch.Generator().manual_seed(0)) + torch.linspace(0, 2, 8)
    bias, shares = torch.zeros(8), []
    for _ in range(200):
        loads = route_tokens(logits, 2, bias)[1].flatten().bincount(minlength=8)
        bias = balanced_bias(bias, loads, 0.005)
        shares.append(float(loads.max() / loads.sum()))
    assert shares[0] > 0.25
    assert shares[-1] < 0.15  # an eighth where all are even


def test_recomputed_blocks_give_the_same_weights() -> None:
    plain = _fit(MixtureOfExperts(4, bias_rate=0.01))
    again = _fit(MixtureOfExperts(4, bias_rate=0.01), ActivationCheckpointing())
    for (name, one), other in zip(plain.state_dict().items(), again.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


def test_adapters_stand_beside_each_expert_and_the_router_trains() -> None:
    module = _fit(MixtureOfExperts(4), LoRA(rank=2, targets="all-linear+experts"))
    layer = module.network.blocks[0].mlp.down
    assert layer.lora_A_weight.shape == (4, 2, 24)
    assert layer.lora_B_weight.abs().amax((1, 2)).gt(0).sum() > 1
    assert torch.equal(layer.weight[0], layer.weight[1])
    assert not layer.weight.requires_grad
    apply(fresh := _Language(), [MixtureOfExperts(4)])
    assert not torch.equal(module.network.blocks[0].mlp.router_weight, fresh.network.blocks[0].mlp.router_weight)
    before = module.network.eval()(IDS)
    torch.testing.assert_close(merge_adapters(module).network(IDS), before, rtol=1e-4, atol=1e-5)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("format", "family", "targets"),
    [
        ("nf4", "", "all-linear+experts"),
        ("int8", "", [r"down\.weight"]),
        ("int4", "GPT2", ["c_attn", r"mlp\.c_proj\.weight"]),
    ],
)
def test_experts_are_quantised_take_adapters_and_are_merged(format: str, family: str, targets: Any) -> None:
    network = _Language(_decoder(family) if family else _gpt())
    plain = copy.deepcopy(network)
    technique = MixtureOfExperts(4)
    skip = ("lm_head", "head")
    apply(network, [technique, QuantizeBase(format, skip=skip, group_size=8)])
    apply(plain, [MixtureOfExperts(4)])
    layers = [name for name, part in network.named_modules() if isinstance(part, QuantizedExperts)]
    assert len(layers) == (4 if family else 6)
    rounded = dequantize_layers(copy.deepcopy(network))
    assert {k: v.shape for k, v in rounded.state_dict().items()} == {k: v.shape for k, v in plain.state_dict().items()}
    torch.testing.assert_close(_outputs(network.network), _outputs(rounded.network), rtol=1e-4, atol=1e-5)
    part = network.get_submodule(layers[0].rpartition(".")[0])
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
    twin = rounded.get_submodule(layers[0].rpartition(".")[0])
    grads = [torch.autograd.grad(mixture(x).square().sum(), x)[0] for mixture in (part, twin)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    # Of the float network's checkpoint, with experts or without, and of its own.
    saved = {k: v.clone() for k, v in network.state_dict().items()}
    for state in (plain.state_dict(), saved):
        network.load_state_dict(state)
        torch.testing.assert_close(_outputs(network.network), _outputs(rounded.network), rtol=1e-4, atol=1e-5)
    apply(network, [LoRA(rank=2, targets=targets)])
    with torch.no_grad():
        for name, p in network.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    adapted = _outputs(network.network)
    assert not torch.allclose(adapted, _outputs(rounded.network), atol=1e-4)
    merged = merge_adapters(network)
    assert any(isinstance(part, ExpertLinear) for part in merged.modules())
    torch.testing.assert_close(_outputs(merged.network), adapted, rtol=1e-3, atol=1e-4)


def test_the_router_stays_in_float32_and_autocast_computes_in_bfloat16() -> None:
    network = _gpt()
    MixtureOfExperts(4).transform(network)
    network.to(torch.bfloat16)
    mlp: Any = network.blocks[0].mlp
    assert mlp.router_weight.dtype == torch.float32
    assert mlp.gate.weight.dtype == torch.bfloat16
    assert network(IDS).dtype == torch.bfloat16
    network.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(torch.ones(2, 3, 16)).dtype == torch.bfloat16
        assert network(IDS).isfinite().all()


def test_refuses_by_a_sentence() -> None:
    from transformers import FalconConfig, FalconForCausalLM

    with pytest.raises(ConfigurationError, match=r"MixtureOfExperts: top_k must be.*at most 4, got 5"):
        MixtureOfExperts(4, 5)
    with pytest.raises(ConfigurationError, match=r"experts must be.*at least 2.*got 1"):
        MixtureOfExperts(1)
    with pytest.raises(ConfigurationError, match="attention' is no feed-forward module: it takes more than"):
        MixtureOfExperts(layers=[r"blocks\.0\.attention"]).transform(_gpt())
    with pytest.raises(ConfigurationError, match=r"attention' is no feed-forward module: it mixes tokens"):
        MixtureOfExperts(layers=[r"blocks\.0\.attention"]).transform(_dit())
    with pytest.raises(ConfigurationError, match="no module of linear layers that maps each token independently"):
        MixtureOfExperts().transform(Toy().net)
    with pytest.raises(
        ConfigurationError,
        match=r"mlp: it has fewer than two plain linear layers: subclasses of nn.Linear \(FalconLinear\) may",
    ):
        MixtureOfExperts().transform(
            FalconForCausalLM(FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
        )
    with torch.device("meta"), pytest.raises(ConfigurationError, match="meta device"):
        MixtureOfExperts().transform(GPT(CONFIG))


@pytest.mark.turns(6, family="ranks")
def test_ranks_route_by_one_bias_and_train_as_one_process_does(tmp_path: Path) -> None:
    run_ranks(mixtures.equal_on_all_ranks, tmp_path)
    ranks = torch.load(tmp_path / "ddp.pt", weights_only=True)
    one = mixtures.weights("auto", 1)
    assert ranks["network.blocks.0.mlp.router_bias"].abs().max() > 0
    torch.testing.assert_close(ranks, one, rtol=1e-3, atol=1e-4)
