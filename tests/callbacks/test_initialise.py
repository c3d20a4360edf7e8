"""Initialise: the variance of each scheme, the ends of residual branches in each family, kept weights and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lit_efficient import ConfigurationError, Initialise
from lit_efficient.application import apply
from lit_efficient.application.ledger import reports_of
from lit_efficient.callbacks.initialise import SCHEMES, draw_weight
from lit_efficient.internals.torch_fx import all_residual_ends, has_parts, residual_ends
from lit_efficient.models.networks.dit import DiT, DiTConfig
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.models.probes.signs_of_training import sign_of_training
from lit_efficient.testing import Run
from tests.contract.row import Row
from tests.mechanisms.adapters.decoders import FAMILIES, decoder
from tests.timm_models import import_timm


def begins_small(run: Run) -> None:
    """Weights that are not in codes start with a standard deviation of 0.02; torch's default is 0.14."""
    start = {n: t for n, t in run.start.items() if n.endswith("up.weight") and t.is_floating_point()}
    assert all(0.015 < float(t.float().std()) < 0.025 for t in start.values())
    assert run.reports["Initialise"].parameters > 0


ROW = Row(Initialise, begins_small)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_variances_are_those_of_the_schemes(scheme: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = draw_weight(torch.empty(96, 64, 2, 2), scheme, 0.5, generator).double()
    if scheme == "orthogonal":
        rows = weight.flatten(1)
        torch.testing.assert_close(rows @ rows.T, 0.25 * torch.eye(96, dtype=torch.float64), atol=1e-5, rtol=0)
        return
    fans = {"fan_in": 64 * 4, "fan_out": 96 * 4, "xavier": (64 + 96) * 4 / 2}
    cut = 0.8796 if scheme == "truncated_normal" else 1  # standard deviation of a normal that is cut at 2
    wanted = 0.5 * fans.get(scheme, 1) ** -0.5 * cut
    assert float(weight.std()) == pytest.approx(wanted, rel=0.02)
    assert float(weight.abs().max()) < (1.0 if scheme == "truncated_normal" else 10)


@pytest.mark.turns(6, family="slow")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_familys_residual_branches_are_known(family: str) -> None:
    network = decoder(family)
    block = "transformer.h.0" if family == "GPT2" else "model.layers.0"
    names = ["attn.c_proj", "mlp.c_proj"] if family == "GPT2" else ["self_attn.o_proj", "mlp.down_proj"]
    norms = ["post_attention_layernorm", "post_feedforward_layernorm"] if family in {"Gemma2", "Gemma3"} else ["", ""]
    assert [end[:2] for end in residual_ends(network.get_submodule(block))] == list(zip(names, norms, strict=True))
    network.config._name_or_path = ""
    apply(root := nn.ModuleDict({"model": network}), [Initialise(residual="zero")])
    assert reports_of(root)["Initialise"].details["residual_branches"] == 4
    part = network.get_submodule(block)
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    places = torch.arange(3)[None]
    more = {} if family == "GPT2" else {"position_embeddings": _rotary(network, x, places)}
    y = part(x, **more)
    assert torch.equal(y[0] if isinstance(y, tuple) else y, x)  # a block begins as the identity


@pytest.mark.parametrize("make", [lambda: decoder("Gemma2"), lambda: DiT(DiTConfig(width=16, depth=2, heads=2))])
def test_parts_are_looked_at_once_and_each_alone_says_the_same(make: Any) -> None:
    network = make()
    parts = [part for part in network.modules() if has_parts(part) and not isinstance(part, nn.ModuleList)]
    alone = [(part, *end) for part in parts for end in residual_ends(part)]
    assert alone
    assert list(all_residual_ends(network)) == alone


def _rotary(network: Any, x: torch.Tensor, places: torch.Tensor) -> Any:
    layer_types = getattr(network.config, "layer_types", None) if network.config.model_type == "gemma3_text" else None
    return network.model.rotary_emb(x, places, *(layer_types or [])[:1])


def test_branches_are_scaled_by_their_number_and_nothing_else_is_touched() -> None:
    ours = GPT(GPTConfig(vocab_size=64, dim=64, depth=3, num_heads=2))
    apply(ours, [Initialise()])
    for name, parameter in ours.named_parameters():
        end = name.endswith(("attention.out.weight", "mlp.down.weight"))
        if parameter.ndim == 2:
            assert float(parameter.detach().std()) == pytest.approx(0.02 / 6**0.5 if end else 0.02, rel=0.06), name
        else:
            assert (parameter == 1).all()
    assert ours.head.weight is ours.embedding.weight
    again = GPT(GPTConfig(vocab_size=64, dim=64, depth=3, num_heads=2))
    apply(again, [Initialise()])
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def test_biases_are_zeros_unless_they_are_to_stay() -> None:
    for biases in (True, False):
        network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        before = [layer.bias.clone() for layer in network]
        apply(network, [Initialise(residual="same", biases=biases)])
        kept = [torch.equal(layer.bias, bias) for layer, bias in zip(network, before, strict=True)]
        assert all(kept) is not biases
        assert any(layer.bias.any() for layer in network) is not biases


def test_what_is_zero_on_purpose_stays_zero() -> None:
    network = DiT(DiTConfig(width=16, depth=1, heads=2))
    zeros = {name for name, p in network.named_parameters() if p.ndim > 1 and not p.any()}
    assert zeros
    apply(network, [Initialise(weights="fan_in", residual="same")])
    assert zeros == {name for name, p in network.named_parameters() if p.ndim > 1 and not p.any()}
    assert "zero as before" in reports_of(network)["Initialise"].summary


class Residual(nn.Module):
    """Block of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))


def test_behind_a_norm_its_scale_is_what_begins_at_zero() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), Residual(), Residual())
    apply(network, [Initialise(weights="fan_out", scale=2**0.5, residual="zero")])
    for block in (network[1], network[2]):
        assert not block.bn2.weight.any()
        assert block.conv2.weight.any()
        assert (block.bn1.weight == 1).all()


def test_trained_weights_are_kept_unless_told() -> None:
    trained = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    assert sign_of_training(trained) is None
    with torch.no_grad():
        trained[1].weight[2] = 1.5
    with pytest.raises(
        ConfigurationError, match="the norm 1 does not have initial weights, and its weights would be lost"
    ):
        apply(trained, [Initialise(residual="same")])
    apply(trained, [Initialise(residual="same", pretrained=True)])
    network = decoder("Llama")
    network.config._name_or_path = "somewhere/llama"
    with pytest.raises(ConfigurationError, match="was read from 'somewhere/llama'"):
        apply(network, [Initialise()])
    seen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    seen(torch.randn(3, 4))
    assert "statistics of 1 batches" in str(sign_of_training(seen))


def test_branches_of_a_second_stream_or_of_hidden_code_are_refused_not_left_out() -> None:
    diffusers = pytest.importorskip("diffusers")
    heads = {"attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 16}
    sizes = {"sample_size": 8, "pos_embed_max_size": 8, "caption_projection_dim": 16, "in_channels": 4, **heads}
    sd3 = diffusers.SD3Transformer2DModel(num_layers=2, **sizes)
    parts = {"num_layers": 2, "num_single_layers": 1, "axes_dims_rope": (2, 2, 4), "in_channels": 4}
    flux = diffusers.FluxTransformer2DModel(**parts, **heads)
    for network, message in ((sd3, "adds to more than its first argument"), (flux, "cannot be read without a batch")):
        with pytest.raises(ConfigurationError, match=f"{message}, so that the number N .*Set residual='same'"):
            apply(nn.ModuleDict({"model": network}), [Initialise()])
        apply(nn.ModuleDict({"model": network}), [Initialise(residual="same")])


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="shows no residual branches"):
        apply(nn.Sequential(nn.Linear(2, 2)), [Initialise()])
    with pytest.raises(ConfigurationError, match="has no layers of the kinds"):
        apply(nn.Sequential(nn.LayerNorm(2)), [Initialise(residual="same")])
    with pytest.raises(ConfigurationError, match="has no values yet"):
        apply(nn.Sequential(nn.Linear(2, 2, device="meta")), [Initialise(residual="same")])
    for arguments, words in (
        ({"weights": "random"}, "weights must be one of normal"),
        ({"scale": 0}, "scale must be above 0 or null"),
        ({"embeddings": -1}, "embeddings must be at least 0"),
        ({"residual": "half"}, "residual must be one of scaled"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            Initialise(**arguments)  # type: ignore[arg-type]


def _diffusers_dit() -> Any:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2}
    return diffusers.DiTTransformer2DModel(**sizes, sample_size=8, patch_size=2, num_embeds_ada_norm=10)


class Rezero(nn.Module):
    """Block whose branch is multiplied by a learned factor that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return x + torch.tanh(self.gate) * self.down(self.up(x))


@pytest.mark.parametrize("make", [lambda: DiT(DiTConfig(width=16, depth=2, heads=2)), _diffusers_dit, Rezero])
def test_a_branch_has_one_factor_that_begins_at_zero_and_all_of_it_learns(make: Any) -> None:
    """If gate and branch are both zero, neither ever gets a gradient."""
    torch.manual_seed(0)
    apply(root := nn.ModuleDict({"model": make()}), [Initialise(residual="zero")])
    network: Any = root["model"]
    starts = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimizer = torch.optim.Adam(network.parameters())  # moves at any gradient
    for _ in range(4):
        x = torch.randn(4, 4) if isinstance(network, Rezero) else torch.randn(4, 4, 8, 8)
        more = {"class_labels": torch.arange(4)} if hasattr(network, "config") and not isinstance(network, DiT) else {}
        labels = () if more or isinstance(network, Rezero) else (torch.arange(4),)
        y = network(x, torch.arange(1, 5), *labels, **more)
        optimizer.zero_grad()
        (getattr(y, "sample", y) - torch.randn_like(x)).square().mean().backward()
        optimizer.step()
    assert [name for name, p in network.named_parameters() if torch.equal(p, starts[name])] == []


@pytest.mark.turns(6, family="slow")
def test_gates_are_no_branches_and_attention_to_another_text_and_shortcuts_hide_none() -> None:
    timm, transformers = import_timm(), pytest.importorskip("transformers")
    sizes = {"d_model": 16, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
    layers = {
        f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")
    }
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    whisper = transformers.WhisperModel(transformers.WhisperConfig(vocab_size=64, **sizes, **layers, **ids))
    for network, count in ((whisper, 10), (_diffusers_dit(), 4)):
        apply(root := nn.ModuleDict({"model": network}), [Initialise(pretrained=True)])
        assert reports_of(root)["Initialise"].details["residual_branches"] == count
    resnets = [timm.create_model("resnet18", channels=(4, 8, 8, 8), zero_init_last=zero) for zero in (True, False)]
    apply(root := nn.ModuleDict({"model": resnets[1]}), [Initialise("fan_out", residual="zero")])
    assert reports_of(root)["Initialise"].details["residual_branches"] == 8
    ends = [[name for name, p in one.named_parameters() if name.endswith("weight") and not p.any()] for one in resnets]
    assert ends[1] == ends[0]


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm])
def test_a_weight_that_others_compute_stays_and_is_not_counted(norm: Any) -> None:
    net = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 3))
    before = {name: value.clone() for name, value in net.named_parameters()}
    report = apply(net, Initialise(residual="same"))["Initialise"]
    changed = {name for name, value in net.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {"1.weight", "1.bias"}
    assert (report.modules, report.parameters) == (("1",), 12)
    with pytest.raises(ConfigurationError, match="the pattern '0' matches none"):
        apply(nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 3)), Initialise(residual="same", layers="0"))
