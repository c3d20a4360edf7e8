"""Configs as the command line runs them, on the GPU that is not there: trained, validated, sampled and saved."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_efficient.__main__ import main
from tests.configs.following import CONFIGS, small
from tests.cuda.fake_cuda import fake_cuda

SIZES: dict[str, dict[str, Any]] = {
    "language_model": {
        "model": {"model": {"dim": 32, "depth": 1, "num_heads": 2, "max_length": 256}},
        "data": {"vocab_size": 280, "sequence_length": 16, "val_batch_size": 2, "val_fraction": 0.3},
    },
    "autoencoder": {"data": {"image_size": 8, "batch_size": 4}},
    "latent_diffusion": {
        "model": {"backbone": {"size": 4, "width": 16, "depth": 2, "heads": 2}, "sampling_steps": 1},
        "data": {
            "image_size": 16,
            "batch_size": 4,
            "autoencoder": {"width": 8},
            "autoencoder_steps": 2,
            "judge_steps": 2,
        },
    },
}
# What these overlays name cannot be had here (a hub's teacher, float8, NCCL), or has no place in these tasks: they
# have ExactResume already, on a GPU FastMatmul, too; nothing is large enough for 8 bits, nothing frozen for BlockSwap,
# no layer's bias goes into a batch norm, and no GPU is there whose memory DataLoaderTuner could pin.
ELSEWHERE = {"feature_matching", "hidden_alignment", "latent_alignment", "replace_head", "compile", "exact_resume"}
ELSEWHERE |= {"low_bit_optimizer", "fast_matmul", "float8_precision", "block_swap", "data_loader_tuner"}
ELSEWHERE |= {"no_bias_before_norm", "sharded_strategy"}
LANGUAGE = {"chunked_cross_entropy", "ia3", "lora", "prefix_tuning", "qalora", "qlora", "quantize_base", "tiling"}
LANGUAGE |= {"keep_float32", "memory_efficient_layers", "sequence_length_ramp", "token_weighted_accumulation"}
LANGUAGE |= {"label_smoothing", "neftune", "prompt_tuning"}
TASKS = dict.fromkeys(LANGUAGE, "language_model") | {"resolution_ramp": "autoencoder"}
# For networks as small as these.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "activation_offload": {"min_bytes": 256},
    "apollo": {"rank": 2},
    "galore": {"rank": 2},
    "resolution_ramp": {"multiple_of": 4},
    "tiled_mlp": {"tokens": 2},
    "token_routing": {"before": 0},
}
OVERLAYS = sorted({path.stem for path in (CONFIGS / "techniques").glob("*.yaml")} - ELSEWHERE)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "diffusers"):  # before there seems to be a GPU: they ask torch's build
        import_module(name)

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Lightning sets it beside deterministic
    monkeypatch.chdir(tmp_path)
    for number in range(4):
        Path(f"{number}.py").write_text("def main(reader, writer):\n    return reader.read(writer)\n" * 60)


def fit(task: str, *overlays: str, float64: bool = True) -> dict[str, Any]:
    """Two steps with a validation: what was saved at the end."""
    sizes = SIZES[task]
    if task == "language_model":
        sizes = {**sizes, "data": {**sizes["data"], "files": {"paths": ["."]}}}
    configs = [small(CONFIGS / "tasks" / f"{task}.yaml", **sizes)]
    for overlay in overlays:
        written = yaml.safe_load((CONFIGS / "techniques" / f"{overlay}.yaml").read_text("utf-8"))
        for entry in written.get("trainer", {}).get("callbacks+", []):
            entry.setdefault("init_args", {}).update(ARGUMENTS.get(overlay, {}))
        Path(f"{overlay}.yaml").write_text(yaml.safe_dump(written))
        configs.append(f"{overlay}.yaml")
    arguments = [word for config in configs for word in ("-c", config)]
    arguments += ["--trainer.accelerator=gpu", "--trainer.devices=1", "--trainer.deterministic=true"]
    with fake_cuda(float64):
        assert main(["fit", *arguments]) == 0
    (saved,) = Path("runs").rglob("last.ckpt")
    return torch.load(saved, weights_only=True)


@pytest.mark.turns(4, family="shipped configs")
@pytest.mark.parametrize("task", SIZES)
def test_a_task(task: str) -> None:
    assert fit(task)["global_step"] == 2


@pytest.mark.turns(3)
@pytest.mark.parametrize("task", SIZES)
def test_a_task_where_the_device_has_no_float64(task: str) -> None:
    """As on Apple's GPUs."""
    overlays = ["snr_weighting"] if task == "latent_diffusion" else []
    assert fit(task, *overlays, float64=False)["global_step"] == 2


@pytest.mark.nightly
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay(overlay: str) -> None:
    assert fit(TASKS.get(overlay, "latent_diffusion"), overlay)["global_step"] == 2
