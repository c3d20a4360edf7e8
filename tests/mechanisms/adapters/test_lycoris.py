"""LoKr and LoHa in LyCORIS's files: training starts with their effect, and an export has the effect of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from peft.tuners.lycoris_utils import LycorisLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lit_efficient import ConfigurationError, LoRA, PeftAdapter
from lit_efficient.application import apply
from lit_efficient.application.ledger import ledger
from lit_efficient.errors import CheckpointError
from lit_efficient.export.check import check_lycoris
from lit_efficient.export.diffusers_lora_check import lycoris_changes
from lit_efficient.mechanisms.adapters.lycoris import delta_of, write_lycoris
from lit_efficient.mechanisms.adapters.peft_saved import peft_files, peft_placement, write_peft_folder
from lit_efficient.models.libraries.original_names import original_layers
from tests.mechanisms.adapters.test_lora_files import Trains, denoiser, originals, pipeline_of, predicted
from tests.support import QUIET
from tests.support_cli import export

Layer = tuple[dict[str, Tensor], float]  # tensors and alpha


def split(size: int, factor: int) -> tuple[int, int]:
    """The two factors of a size as LyCORIS chooses them, near to the square root or the smaller one ``factor``."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    divisors = [d for d in range(1, size + 1) if size % d == 0 and d * d <= size and (factor == -1 or d <= factor)]
    return divisors[-1], size // divisors[-1]


def lokr(weight: Tensor, draw: Any, rank: int, factor: int, both: bool, tucker: bool) -> Layer:
    """Tensors of LoKr for a weight, with the shapes of LyCORIS."""
    out, inside = (split(size, factor) for size in weight.shape[:2])
    kernel = tuple(weight.shape[2:])
    tensors = {}
    if both and rank < max(out[0], inside[0]) / 2:
        tensors |= {"lokr_w1_a": draw(out[0], rank), "lokr_w1_b": draw(rank, inside[0])}
    else:
        tensors["lokr_w1"] = draw(out[0], inside[0])
    if rank >= max(out[1], inside[1]) / 2:
        tensors["lokr_w2"] = draw(out[1], inside[1], *kernel)
    elif tucker and kernel not in ((), (1, 1)):
        tensors |= {"lokr_t2": draw(rank, rank, *kernel), "lokr_w2_a": draw(rank, out[1])}
        tensors["lokr_w2_b"] = draw(rank, inside[1])
    else:
        size = torch.Size(kernel).numel()
        tensors |= {"lokr_w2_a": draw(out[1], rank), "lokr_w2_b": draw(rank, inside[1] * size)}
    return tensors, 1.5


def loha(weight: Tensor, draw: Any, rank: int, tucker: bool) -> Layer:
    kernel = tuple(weight.shape[2:])
    tensors = {}
    for number in (1, 2):
        if tucker and kernel not in ((), (1, 1)):
            tensors |= {f"hada_t{number}": draw(rank, rank, *kernel), f"hada_w{number}_a": draw(rank, len(weight))}
            tensors[f"hada_w{number}_b"] = draw(rank, weight.shape[1])
        else:
            tensors |= {f"hada_w{number}_a": draw(len(weight), rank)}
            tensors[f"hada_w{number}_b"] = draw(rank, weight[0].numel())
    return tensors, 1.5


def delta(weight: Tensor, tensors: dict[str, Tensor], alpha: float) -> Tensor:
    """The change of a weight, as LyCORIS and ComfyUI compute it."""

    def product(a: str, b: str, core: str) -> Tensor:
        if core in tensors:
            return torch.einsum("ijkl,ip,jr->prkl", tensors[core], tensors[a], tensors[b])
        return tensors[a] @ tensors[b]

    if "hada_w1_a" in tensors:
        scale = alpha / tensors["hada_w1_b"].shape[0]
        first, second = (product(f"hada_w{i}_a", f"hada_w{i}_b", f"hada_t{i}") for i in (1, 2))
        return scale * (first * second).reshape(weight.shape)
    w1 = tensors["lokr_w1"] if "lokr_w1" in tensors else product("lokr_w1_a", "lokr_w1_b", "-")
    w2 = tensors["lokr_w2"] if "lokr_w2" in tensors else product("lokr_w2_a", "lokr_w2_b", "lokr_t2")
    ranks = [tensors[name].shape[0] for name in ("lokr_w2_b", "lokr_w1_b") if name in tensors]
    scale = alpha / ranks[0] if ranks else 1.0
    if w2.ndim == 4:
        w1 = w1[:, :, None, None]
    return scale * torch.kron(w1, w2).reshape(weight.shape)


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_loha_of_layers_that_the_authors_stack(family: str, tmp_path: Path) -> None:
    """The change of q, k and v together, as LyCORIS computes it for the authors' layer, and of swapped halves."""
    network = denoiser(pipeline_of(family))
    generator = torch.Generator().manual_seed(6)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    tensors = {}
    stacked = 0
    with torch.no_grad():
        for layer in original_layers(network):
            weights = [network.get_submodule(part).weight for part in layer.parts]
            if weights[0].ndim > 2:
                continue
            whole = torch.cat([weight.detach() for weight in weights])
            own, alpha = loha(whole, draw, 2, False)
            change = delta(whole, own, alpha)
            if layer.swapped:
                change = torch.cat(change.chunk(2)[::-1])
            for weight, part in zip(weights, change.split([len(weight) for weight in weights])):
                weight.add_(part)
            key = f"lycoris_{layer.name.replace('.', '_')}"
            tensors |= {f"{key}.{name}": one.clone() for name, one in own.items()} | {
                f"{key}.alpha": torch.tensor(alpha)
            }
            stacked += len(weights) > 1
    assert stacked > 1
    save_file(tensors, tmp_path / "loha.safetensors")
    module = Trains(denoiser(pipeline_of(family)))
    apply(module, [PeftAdapter(config={"start_from": str(tmp_path / "loha.safetensors")})])
    torch.testing.assert_close(predicted(module.network), predicted(network), rtol=1e-5, atol=1e-5)


def drawn(network: Any, kind: str) -> dict[str, Layer]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    found = {}
    for name, part in network.named_modules():
        wanted = name.rpartition(".")[2] in ("to_q", "to_k", "proj", "conv1", "conv_shortcut", "proj_out", "linear")
        if not isinstance(part, nn.Linear | nn.Conv2d) or not wanted:
            continue
        tucker = "tucker" in kind
        if kind.startswith("loha"):
            found[name] = loha(part.weight.detach(), draw, 2, tucker)
        else:
            rank, factor = {"lokr": (1, -1), "lokr 4": (1, 4), "lokr whole": (100, 2), "lokr both": (1, -1)}.get(
                kind, (1, -1)
            )
            found[name] = lokr(part.weight.detach(), draw, rank, factor, "both" in kind, tucker)
    return found


def merged(network: Any, layers: dict[str, Layer]) -> Any:
    for name, (tensors, alpha) in layers.items():
        weight = network.get_submodule(name).weight
        weight.data += delta(weight, tensors, alpha)
    return network


def as_file(layers: dict[str, Layer], prefix: str, names: dict[str, str]) -> dict[str, Tensor]:
    found = {}
    for name, (tensors, alpha) in layers.items():
        key = prefix + names.get(name, name).replace(".", "_")
        found |= {f"{key}.{kind}": tensor for kind, tensor in tensors.items()} | {f"{key}.alpha": torch.tensor(alpha)}
    return found


KINDS = ["lokr", "lokr 4", "lokr whole", "lokr both", "lokr tucker", "loha", "loha tucker"]
CASES = [("sd15", kind) for kind in KINDS] + [("sdxl", "lokr"), ("sdxl", "loha"), ("sd3", "lokr"), ("flux", "loha")]


@pytest.mark.turns(3)
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_file_of_lycoris_is_a_start_and_an_export(family: str, kind: str, tmp_path: Path) -> None:
    network = denoiser(pipeline_of(family))
    base = predicted(network)
    layers = drawn(network, kind)
    names = originals(network) if family == "sdxl" else {}
    prefix = "lora_unet_" if family.startswith("sd1") or family == "sdxl" else "lycoris_"
    tensors = as_file(layers, prefix, names)
    save_file(tensors, tmp_path / "a.safetensors")
    expected = predicted(merged(denoiser(pipeline_of(family)), layers))
    assert not torch.allclose(base, expected, atol=1e-2)

    module = Trains(network)
    technique = PeftAdapter({"start_from": str(tmp_path / "a.safetensors")})
    apply(module, [technique])
    torch.testing.assert_close(predicted(module.network), expected, rtol=1e-5, atol=1e-5)
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    assert len(trained) == sum(len(own) for own, _ in layers.values())

    again = Trains(denoiser(pipeline_of(family)))  # a checkpoint needs no file
    apply(again, [PeftAdapter(**ledger(module)[0].record["arguments"])])
    again.load_state_dict(module.state_dict())
    assert torch.equal(predicted(again.network), predicted(module.network))

    (own,) = peft_files(peft_placement(module), module.state_dict()).values()
    write_lycoris(tmp_path, *own, denoiser(pipeline_of(family)))
    written = load_file(tmp_path / "lycoris.safetensors")
    assert written.keys() == tensors.keys()
    if kind not in ("lokr 4", "lokr whole"):  # the alpha of a layer without factors has no meaning
        torch.testing.assert_close(written, tensors)
    other = Trains(denoiser(pipeline_of(family)))
    apply(other, [PeftAdapter({"start_from": str(tmp_path / "lycoris.safetensors")})])
    torch.testing.assert_close(predicted(other.network), expected, rtol=1e-5, atol=1e-5)


def test_an_export_has_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(as_file(drawn(denoiser(pipeline_of("sdxl")), "loha"), "lora_unet_", {}), tmp_path / "a.safetensors")
    module = Trains(denoiser(pipeline_of("sdxl")).train())
    run = pl.Trainer(callbacks=[PeftAdapter({"start_from": str(tmp_path / "a.safetensors")})], **QUIET, max_steps=1)
    run.fit(module, torch.utils.data.DataLoader(torch.zeros(1)))
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert export([str(tmp_path / "a.ckpt"), "--format", "peft", "--output", str(tmp_path / "out")]) == 0
    count = sum(isinstance(part, LycorisLayer) for part in module.modules())
    said = f"peft loads the {count} adapted layers that were trained, and lycoris.safetensors has the same changes"
    assert count
    assert said in capsys.readouterr().err
    other = Trains(denoiser(pipeline_of("sdxl")))
    apply(other, [PeftAdapter({"start_from": str(tmp_path / "out" / "lycoris.safetensors")})])
    torch.testing.assert_close(predicted(other.network), predicted(module.network), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["lokr", "lokr whole", "lokr tucker", "loha tucker"])
def test_the_check_of_an_export_computes_the_change_of_the_file(kind: str, tmp_path: Path) -> None:
    network = denoiser(pipeline_of("sd15"))
    layers = drawn(network, kind)
    save_file(as_file(layers, "lora_unet_", {}), tmp_path / "a.safetensors")
    for name, (tensors, alpha) in layers.items():
        weight = network.get_submodule(name).weight
        change = delta_of(tensors | {"alpha": torch.tensor(alpha)}).reshape(weight.shape)
        torch.testing.assert_close(change, delta(weight, tensors, alpha))
    module = Trains(network)
    apply(module, [PeftAdapter({"start_from": str(tmp_path / "a.safetensors")})])
    ((tensors, config),) = peft_files(where := peft_placement(module), module.state_dict()).values()
    write_peft_folder(tmp_path / "out", tensors, config)
    write_lycoris(tmp_path / "out", tensors, config, denoiser(pipeline_of("sd15")))
    part = {"library": "diffusers", **where["diffusers"]}
    found = list(lycoris_changes(tmp_path / "out", part))
    assert {name for name, _, _ in found} == layers.keys()
    for _, wanted, change in found:
        torch.testing.assert_close(change, wanted)
    if kind == "lokr":
        file = tmp_path / "out" / "lycoris.safetensors"
        written = load_file(file)
        first = next(key for key in written if key.endswith(".lokr_w2_a"))
        save_file(written | {first: written[first] * 1.01}, file)
        with pytest.raises(
            CheckpointError, match=r"lycoris.safetensors changes other weights.*1 of \d+ layers differ or"
        ):
            check_lycoris(tmp_path / "out", part, tensors)
        other = tensors | {next(iter(tensors)): torch.zeros(1)}
        with pytest.raises(
            CheckpointError, match=r"peft's file has other adapters than were trained: 1 of \d+ tensors"
        ):
            check_lycoris(tmp_path / "out", part, other)


def test_factors_that_peft_does_not_make_are_named(tmp_path: Path) -> None:
    """A factor that divides a side below its square has the larger part first in peft, and second in LyCORIS."""
    layer = {"lokr_w1": torch.ones(2, 1), "lokr_w2": torch.ones(4, 4, 3, 3)}
    fits = {"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(8, 2)}
    layers = {"conv_in": (layer, 1.0), "time_embedding.linear_1": (fits, 1.0)}
    save_file(as_file(layers, "lora_unet_", {}), tmp_path / "a.safetensors")
    message = r"fits 1 of 2 layers, and not 'conv_in': .*\(8, 4\) is \(2, 1\) in the file and \(4, 4\) in peft"
    with pytest.raises(ConfigurationError, match=message):
        apply(Trains(denoiser(pipeline_of("sd15"))), [PeftAdapter({"start_from": str(tmp_path / "a.safetensors")})])


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(as_file(drawn(denoiser(pipeline_of("sd15")), "lokr"), "lora_unet_", {}), file)
    with pytest.raises(ConfigurationError, match=r"adapters of LyCORIS's lokr: use PeftAdapter with"):
        LoRA(start_from=str(file))
    with pytest.raises(ConfigurationError, match=r"PeftAdapter: .*does not fit SD3Transformer2DModel"):
        apply(Trains(denoiser(pipeline_of("sd3"))), [PeftAdapter({"start_from": str(file)})])
    flux = denoiser(pipeline_of("flux"))
    layer = as_file({"x": lokr(torch.zeros(48, 16), torch.zeros, 1, -1, False, False)}, "", {"x": "X"})
    save_file(
        {f"lora_unet_double_blocks_0_img_attn_qkv.{key.partition('.')[2]}": one for key, one in layer.items()}, file
    )
    with pytest.raises(ConfigurationError, match=r"img_attn.qkv as one layer, .*splits into .*to_q.*or use LoHa"):
        apply(Trains(flux), [PeftAdapter({"start_from": str(file)})])
    pair = {f"lora_unet_mid_block_resnets_0_conv1.lora_{one}.weight": torch.zeros(2, 2) for one in ("up", "down")}
    save_file(pair, file)
    with pytest.raises(ConfigurationError, match=r"has factors of LoRA: use LoRA with start_from"):
        apply(Trains(denoiser(pipeline_of("sd15"))), [PeftAdapter({"start_from": str(file)})])
