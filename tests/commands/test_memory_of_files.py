"""What checkpoints are turned into, in the memory of one model at most: by count, and read by torch and safetensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from benchmarks.real_size import peak_of
from lit_efficient import CheckpointAverage
from lit_efficient.commands import average, convert
from lit_efficient.distributed.shards import TIED
from lit_efficient.export.adapters import export_checkpoint
from lit_efficient.files.checkpoints import save_atomically
from lit_efficient.internals.heap import give_back
from lit_efficient.mechanisms.averages.snapshots import Snapshot, synthesize, write_snapshot
from tests import processes
from tests.support import Toy, assert_equal, data, trainer

MODEL, SLACK = 128, 96  # MiB; pieces on their way, and what is free in the heap between others


def weights(seed: int) -> dict[str, torch.Tensor]:
    """128 MiB in 32 tensors of bfloat16, and what is unusual."""
    generator = torch.Generator().manual_seed(seed)
    state = {f"w{i}": torch.randn(1024, 2048, generator=generator).bfloat16() for i in range(MODEL // 4)}
    state |= {"number": torch.tensor(float(seed)), "none": torch.empty(0, 3), "turned": torch.arange(6.0).view(2, 3).T}
    return state | {"codes": torch.arange(8, dtype=torch.int8), "count": torch.tensor(seed), "tied": state["w0"]}


def shards(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    moments = {name: {"exp_avg": tensor.float()} for name, tensor in state.items() if name.startswith("w")}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": [*moments]}]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch, of its own processes
        dcp.save({"state_dict": state, "optimizer_0": optimizer}, checkpoint_id=folder, no_dist=True)
    save_atomically({"epoch": 1, TIED: {"tied": "w0"}}, folder / "meta.pt")
    return folder


def peaks_at(most: int, work: Callable[[], Any]) -> Any:
    """What ``work`` gives, if it took so many MiB at most."""
    found: list[Any] = []
    give_back()  # or what is free in the heap is taken without being seen
    assert (peak := peak_of(lambda: found.append(work()))) <= most, peak
    return found.pop()


@pytest.mark.turns(6, family="slow")
def test_no_second_model_is_ever_in_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for part in (_write, _turn):
        assert processes.run(part, tmp_path, log=log) == 0, log.read_text()


def _write(place: Path) -> None:
    for seed in range(3):
        state = weights(seed)
        shards(place / f"{seed}.ckpt", state)
        torch.save({"state_dict": state}, place / f"{seed}.pt")
        write_snapshot(place, Snapshot(seed + 1, 0.1), {n: t for n, t in state.items() if t.is_floating_point()})


@pytest.mark.turns(6, family="slow")
def test_an_average_of_bfloat16_takes_no_more_than_its_sum_in_float32(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for part in (_write_averaged, _average_averaged):
        assert processes.run(part, tmp_path, log=log) == 0, log.read_text()


def _write_averaged(place: Path) -> None:
    run = trainer([CheckpointAverage(2, 1)], max_steps=1)
    run.fit(Toy(), data(), data())
    run.save_checkpoint(place / "toy.ckpt", weights_only=False)
    checkpoint = torch.load(place / "toy.ckpt", weights_only=True)
    (state,) = (state for name, state in checkpoint["callbacks"].items() if name.startswith("CheckpointAverage"))
    floats = [{n: t for n, t in weights(seed).items() if n.startswith("w")} for seed in range(2)]
    checkpoint["state_dict"], state["snapshots"] = floats[1], floats
    torch.save(checkpoint, place / "averaged.ckpt")


def _average_averaged(place: Path) -> None:
    asked = [str(place / "averaged.ckpt")] * 2 + ["--output", str(place / "mean.ckpt")]
    peaks_at(2 * MODEL + 64, lambda: average.run(asked))  # it was four models of bfloat16
    found = torch.load(place / "mean.ckpt", weights_only=True)["state_dict"]
    expected = (weights(0)["w3"].double() + weights(1)["w3"].double()) / 2
    torch.testing.assert_close(found["w3"].double(), expected, rtol=2**-7, atol=1e-6)


def _turn(place: Path) -> None:
    """The folder holds a model of bfloat16, and two in float32 that are the optimizer's."""
    folder, one = str(place / "0.ckpt"), place / "one"
    peaks_at(SLACK, lambda: convert.run([folder, "--output", str(one.with_suffix(".ckpt"))]))
    peaks_at(SLACK, lambda: convert.run([folder, "--output", str(one.with_suffix(".safetensors"))]))
    peaks_at(SLACK, lambda: export_checkpoint(folder, one, "safetensors", check=False))
    for kind in ("ckpt", "pt"):
        asked = [*(str(place / f"{seed}.{kind}") for seed in range(3)), "--output", str(place / f"mean.{kind}")]
        peaks_at(MODEL + SLACK, lambda asked=asked: average.run(asked))  # type: ignore[misc]
    built = peaks_at(MODEL + SLACK, lambda: synthesize(place, [0.08, 0.1, 0.12]))  # six models are built
    states = [weights(seed) for seed in range(3)]
    floats = [name for name, tensor in states[0].items() if tensor.is_floating_point()]
    torch.testing.assert_close(
        {n: t.to(states[2][n].dtype) for n, t in built[1].items()}, {n: states[2][n] for n in floats}
    )
    for kind in ("ckpt", "pt"):
        state = torch.load(place / f"mean.{kind}", weights_only=True)["state_dict"]
        mean = {n: (sum(s[n].double() for s in states) / 3).to(states[0][n].dtype) for n in floats}
        torch.testing.assert_close({name: state.pop(name) for name in floats}, mean)
        assert_equal(state, {name: tensor for name, tensor in states[2].items() if name not in floats})
    found = torch.load(one.with_suffix(".ckpt"), weights_only=True)
    assert found["state_dict"]["tied"].data_ptr() == found["state_dict"]["w0"].data_ptr()
    assert_equal(found["optimizer_states"][0]["state"][1], {"exp_avg": states[0]["w1"].float()})
    for one_ in (found["state_dict"], load_file(one.with_suffix(".safetensors")), load_file(one / "model.safetensors")):
        assert_equal(one_, states[0])
