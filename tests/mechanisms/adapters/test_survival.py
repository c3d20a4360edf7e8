"""What of an adapter survives rounding: measured, said by export, and trained for by the variant ``rounded``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

from lit_efficient import ConfigurationError, LoRA, QuantizeBase, merge_adapters
from lit_efficient.application import apply
from lit_efficient.mechanisms.adapters.int4 import Int4Linear, codes_on_grid, dequantize_groups, quantize_groups
from lit_efficient.mechanisms.adapters.low_rank import rounded_codes
from lit_efficient.mechanisms.adapters.quantized import dequantize
from lit_efficient.mechanisms.adapters.survival import describe_survival, surviving
from tests.mechanisms.adapters.decoders import Language, decoder, logits
from tests.support import QUIET
from tests.support_cli import export


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def test_values_on_the_grid_stay_and_others_go_to_the_nearest() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    packed, scale, zero = quantize_groups(weight, 16)
    on = dequantize_groups(packed, scale, zero)
    assert torch.equal(codes_on_grid(on, scale, zero), packed)
    step = scale.repeat_interleave(16, 1)
    assert torch.equal(codes_on_grid(on + 0.49 * step, scale, zero), packed)
    inner = on + step <= on.unflatten(1, (-1, 16)).amax(-1).repeat_interleave(16, 1)
    moved = dequantize_groups(codes_on_grid(on + 0.51 * step, scale, zero), scale, zero)
    torch.testing.assert_close(moved[inner], (on + step)[inner])


@pytest.mark.parametrize("format", ["int4", "nf4", "int8"])
def test_small_updates_do_not_survive_and_large_ones_do(format: str) -> None:
    module = nn.ModuleDict({"net": _net()})
    apply(module, [QuantizeBase(format), LoRA(rank=4)])
    assert surviving(module) == {}  # nothing was learnt
    shares = []
    for size in (1e-5, 3.0):
        with torch.no_grad():
            for name, p in module.named_parameters():
                if name.endswith("lora_B"):
                    p.copy_(size * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
        found = surviving(module)
        assert found.keys() == {"net.0", "net.2"}
        shares.append([kept / whole for kept, whole in found.values()])
    if format != "int8":  # whose scales follow the largest weight of a row
        assert max(map(abs, shares[0])) < 0.6
    assert all(abs(share - 1) < 0.05 for share in shares[1])
    layer: Any = module["net"][0]  # the definition, by hand
    base = dequantize(layer).float()
    update = layer.lora_scale * (layer.lora_B @ layer.lora_A)
    kept, whole = found["net.0"]
    assert whole == pytest.approx(update.square().sum().item(), rel=1e-4)
    assert kept / whole == pytest.approx(shares[1][0])
    assert base.shape == update.shape


def _losses_in_int4(variant: str, size: float) -> tuple[float, float, float]:
    """Train a base in int4 to follow a low-rank change of its float weights, then merge and round to int4 again.

    Args:
        variant: That of LoRA.
        size: Scale of the change.

    Returns:
        The losses on held-out rows: before training, after training, and after merging and rounding.
    """
    generator = torch.Generator().manual_seed(3)
    target = _net()
    with torch.no_grad():
        for p in target.parameters():
            if p.ndim == 2:
                left = torch.randn(p.shape[0], 2, generator=generator)
                right = torch.randn(2, p.shape[1], generator=generator)
                p.add_(size * left @ right)
    module = nn.ModuleDict({"net": _net()})
    apply(module, [QuantizeBase("int4", group_size=32), LoRA(rank=8, variant=variant)])
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    held_out = torch.randn(1024, 32, generator=generator)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (module["net"](x) - target(x).detach()).square().mean()

    before = loss(held_out).item()
    for _ in range(100):
        optimizer.zero_grad()
        loss(torch.randn(64, 32, generator=generator)).backward()
        optimizer.step()
        schedule.step()
    trained = loss(held_out).item()
    for name, part in list(merge_adapters(module).named_modules()):
        if type(part) is nn.Linear:  # rounded again, on the best grid of the sum
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, Int4Linear(part.weight.detach(), part.bias, 32))
    assert sum(isinstance(part, Int4Linear) for part in module.modules()) == 2
    return before, trained, loss(held_out).item()


def test_a_small_change_that_is_lost_in_int4_survives_if_it_is_trained_as_rounded() -> None:
    """Limits are at least four standard deviations over seeds away from the mean of the seeds."""
    before, trained, merged = _losses_in_int4("lora", 0.002)
    assert trained < 0.5 * before  # 0.31 (standard deviation 0.01)
    assert merged > 2 * trained  # 3.3 (0.15): all that training gained is lost
    before, trained, rounded = _losses_in_int4("rounded", 0.002)
    assert rounded == pytest.approx(trained, rel=1e-4)
    assert rounded < 0.95 * before  # 0.88 (0.02)


def test_rounded_adapters_learn_a_change_that_qalora_cannot_hold() -> None:
    """QA-LoRA adds one number to all inputs of a group, which does not follow a change of each input."""
    _, _, rounded = _losses_in_int4("rounded", 0.01)
    _, _, qalora = _losses_in_int4("qalora", 0.01)
    assert rounded < 0.5 * qalora  # 0.28 (standard deviation 0.04 over seeds)


def test_the_merged_codes_are_what_was_trained() -> None:
    module = nn.ModuleDict({"net": _net()})
    apply(module, [QuantizeBase("int4", group_size=32), LoRA(rank=4, variant="rounded")])
    plain, x = copy.deepcopy(module), torch.randn(5, 32)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("lora_B"):
                p.normal_(std=0.1)
    y = module["net"](x)
    y.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters() if p.requires_grad)
    merged = merge_adapters(copy.deepcopy(module))
    assert torch.equal(merged["net"](x), y)
    assert not torch.equal(plain["net"](x), y)
    assert all(
        torch.equal(merged.state_dict()[n], t) for n, t in plain.state_dict().items() if n.endswith(("scale", "zero"))
    )
    with pytest.raises(ConfigurationError, match="dropout must be 0 for variant rounded"):
        LoRA(variant="rounded", dropout=0.1)
    with pytest.raises(ConfigurationError, match=r"variant='rounded' merges into the codes.*Add QuantizeBase"):
        apply(nn.ModuleDict({"net": _net()}), [LoRA(variant="rounded")])


def test_export_says_what_would_survive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Language(decoder("Llama"))
    run = L.Trainer(callbacks=[QuantizeBase("int4", group_size=8), LoRA(rank=2)], **QUIET, max_epochs=1)
    run.fit(module)
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    said = describe_survival(surviving(module))
    decoder("Llama").save_pretrained(tmp_path / "base")
    out = ["--format", "merged", "--output", str(tmp_path / "out"), "--base", str(tmp_path / "base")]
    assert export([str(tmp_path / "a.ckpt"), *out, "--no-check"]) == 0
    assert "of the adapter's update would survive" in said
    assert said.partition(" (")[0] in capsys.readouterr().err
    assert logits(module.network) is not None


def test_codes_are_the_same_ones_under_autocast() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    module = nn.ModuleDict({"net": nn.Sequential(layer, nn.Linear(64, 64))})
    apply(module, [QuantizeBase("int4", group_size=32), LoRA(rank=4, variant="rounded", targets=["0"])])
    adapted = module.get_submodule("net.0")
    nn.init.normal_(adapted.get_parameter("lora_B"))
    codes = rounded_codes(adapted)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rounded_codes(adapted), codes)


def test_peft_cannot_hold_the_rounded_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = L.Trainer(
        callbacks=[QuantizeBase("int4", group_size=8), LoRA(rank=2, variant="rounded")], **QUIET, max_epochs=1
    )
    run.fit(Language(decoder("Llama")))
    run.save_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert export([str(tmp_path / "a.ckpt"), "--format", "peft", "--output", str(tmp_path / "out")]) == 2
    assert "variant rounded computes with the sum rounded to int4" in capsys.readouterr().err
