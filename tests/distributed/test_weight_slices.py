"""Networks larger than a host: weights in slices, of files or drawn."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lit_efficient import GPT, CausalLMConfig, GPTConfig, MixtureOfExperts
from lit_efficient.distributed.deferred_draws import DeferredDraws
from lit_efficient.distributed.weight_slices import built_empty, fill_waiting
from lit_efficient.errors import CheckpointError, ConfigurationError
from lit_efficient.models.libraries.causal_lm import build_empty
from tests.processes import run_ranks
from tests.ranks import slices
from tests.support import assert_equal


def split(network: nn.Module, folder: Path) -> str:
    """Two files and the index that Hugging Face writes."""
    state = dict(network.state_dict())
    folder.mkdir()
    names = sorted(state)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in files.items():
        save_file({name: state[name].contiguous() for name in own}, folder / file)
    listed = {name: file for file, own in files.items() for name in own}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return str(folder)


@pytest.mark.turns(6, family="ranks")
def test_each_of_two_processes_reads_and_draws_its_own_slices(tmp_path: Path) -> None:
    torch.manual_seed(0)
    run_ranks(slices.each_its_own, tmp_path, split(slices.made(), tmp_path / "base"))


@pytest.mark.turns(4, family="ranks")
def test_a_fit_on_two_processes_reads_a_named_model_in_slices(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folders = [str(tmp_path / name) for name in ("tied", "untied")]
    for folder in folders:
        trained(llama(tied=folder == folders[0])).save_pretrained(folder)
    slices.adapter_beside(folders[1])
    run_ranks(slices.in_a_fit, tmp_path, folders)
    for folder in folders:
        plain = slices.losses(folder)
        for rank in (0, 1):
            torch.testing.assert_close(torch.load(f"{folder}_{rank}.pt"), plain, rtol=1e-5, atol=1e-5)
    for name, make in slices.FITTED.items():  # of codes and experts, too, each keeps its slices as they are made
        plain = slices.losses(folders[1], make(folders[1]))
        for rank in (0, 1):
            torch.testing.assert_close(torch.load(f"{folders[1]}_{name}_{rank}.pt"), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.turns(4, family="ranks")
def test_a_fit_on_two_processes_draws_random_weights_in_slices(tmp_path: Path) -> None:
    run_ranks(slices.drawn_in_a_fit, tmp_path, str(tmp_path))
    for name, model in slices.DRAWN.items():
        plain = slices.losses(model(), [MixtureOfExperts(experts=2)])
        for rank in (0, 1):
            torch.testing.assert_close(torch.load(tmp_path / f"{name}_{rank}.pt"), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.turns(4, family="ranks")
def test_experts_become_codes_on_each_of_two_processes(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt_oss", **slices.SIZES_OF_EXPERTS)
    folder = str(tmp_path / "base")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    run_ranks(slices.experts_in_a_fit, tmp_path, folder)
    plain = slices.losses(folder, slices.codes_of_experts())
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(f"{folder}_{rank}.pt"), plain, rtol=1e-5, atol=1e-5)


@pytest.mark.turns(4, family="ranks")
def test_a_denoiser_comes_in_slices_and_is_the_one_of_a_single_process(tmp_path: Path) -> None:
    folder = str(tmp_path / "unet")
    slices.diffusers_unet().save_pretrained(folder)
    run_ranks(slices.networks_of_diffusion, tmp_path, folder)
    for name, backbone in slices.backbones_of(folder).items():
        plain = slices.begun(backbone)
        for rank in (0, 1):
            assert_equal(
                torch.load(f"{folder}_{name}_{rank}.pt"), {**plain.state_dict(), **dict(plain.named_buffers())}
            )


def llama(tied: bool = True) -> Any:
    fields: Any = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**fields, vocab_size=97, tie_word_embeddings=tied))


def trained(network: Any) -> Any:
    """No vector of it, of a norm or a bias, is what it was drawn as."""
    for parameter in network.parameters():
        nn.init.normal_(parameter, 1.0, 0.2) if parameter.ndim == 1 else None
    return network


def gpt() -> nn.Module:
    return GPT(GPTConfig(97, dim=64, depth=2, num_heads=2, max_length=64))


def turned() -> nn.Module:
    """Code that gives a tensor another shape, memory or format after it was drawn, and changes what it was made of."""
    wide = nn.Linear(128, 64)
    nn.init.orthogonal_(wide.weight)  # of fewer rows than columns: turned in place
    copied = nn.Linear(64, 128)
    copied.weight.data = wide.weight.data.t().contiguous()
    factor = torch.full((4,), 0.5)
    with torch.no_grad():
        wide.weight[:, :4].mul_(factor)
        factor.fill_(7.0)
    torch.set_default_dtype(torch.bfloat16)  # as from_config(dtype=...) does
    try:
        half = nn.Linear(64, 64)
    finally:
        torch.set_default_dtype(torch.float32)
    return nn.Sequential(wide, copied, half, nn.Linear(64, 64).bfloat16())


@pytest.mark.parametrize("make", [llama, gpt, slices.made, turned])
def test_deferred_draws_are_those_of_a_network_that_is_built_as_usual(make: Any) -> None:
    torch.manual_seed(3)
    plain, after = make(), torch.get_rng_state()
    torch.manual_seed(3)
    network = built_empty(make)
    large = [p for p in network.parameters() if p.numel() >= 1024]
    assert all(p.device.type == "meta" for p in large)
    fill_waiting(network, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), after)
    assert_equal(
        dict(network.named_parameters(remove_duplicate=False)), dict(plain.named_parameters(remove_duplicate=False))
    )
    assert_equal(dict(network.named_buffers()), dict(plain.named_buffers()))


def test_weights_of_numbers_that_changed_later_are_refused() -> None:
    with DeferredDraws() as draws:
        network = nn.Linear(64, 64)
        numbers = torch.arange(4096.0).view(64, 64)
        with torch.no_grad():
            network.weight.add_(numbers)
        numbers.zero_()
    draws.note(network)
    with pytest.raises(ConfigurationError, match=r"weights were computed from a tensor of \(64, 64\) that was changed"):
        draws.get_tensor("weight")


def test_a_folder_of_transformers_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    model = llama().bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    with torch.device("meta"):
        found = llama()
    found.tie_weights()
    torch.__future__.set_swap_module_params_on_conversion(True)  # as of shards: what is tied stays so
    try:
        slices.read(found, str(tmp_path))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_equal(dict(found.state_dict()), {name: t.float() for name, t in model.state_dict().items()})


def test_small_tensors_of_a_folder_are_read_too(tmp_path: Path) -> None:
    model = trained(llama(tied=False))
    model.save_pretrained(tmp_path)
    network: Any = build_empty(CausalLMConfig(str(tmp_path)))
    fill_waiting(network, torch.device("cpu"))
    assert_equal(dict(network.named_parameters()), dict(model.named_parameters()))


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    folder = split(nn.Linear(3, 2), tmp_path / "base")
    codes = nn.Parameter(torch.zeros(2, 3, dtype=torch.int8, device="meta"), False)
    linear = partial(nn.Linear, 3, 2, device="meta")
    for network, said in (
        (nn.Linear(4, 2, device="meta"), r"'weight' is \(2, 4\) here and \(2, 3\) in"),
        (nn.Sequential(linear()), r"base lacks 2 tensors, first .0.weight."),
        (nn.ParameterDict({"weight": codes}), r"'weight' is torch.int8 here and torch.float32"),
    ):
        with pytest.raises((CheckpointError, ConfigurationError), match=said):
            slices.read(network, folder)
    with pytest.raises(CheckpointError, match="0 indexes and 0 files"):
        slices.read(linear(), str(tmp_path / "none"))
