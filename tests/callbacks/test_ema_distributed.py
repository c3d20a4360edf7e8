"""Averages on two gloo processes: DDP ranks agree, FSDP2 averages shards in place, both resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lit_efficient import CheckpointAverage, PowerEMA
from tests.contract.test_distributed import PREAMBLE
from tests.support import Toy, assert_equal, data, run_script, trainer

COMMON = (
    PREAMBLE
    + """
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from lit_efficient import EMA

class Sharded(Toy):
    def configure_model(self):
        if self.net is None:
            super().configure_model()
            for block in self.net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

class Seen(L.Callback):
    def on_validation_batch_start(self, trainer, module, *_):
        for part in module.modules():
            if hasattr(part, "reshard"):
                part.reshard()
        self.weights = gathered(module)[0]

def whole(state):
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}

def fit(kind, epochs, ckpt_path=None, save=True):
    if kind == "ddp":
        strategy, module = "ddp", Toy("configure_model")
    else:
        strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=kind == "sharded")
        module = Sharded("configure_model")
    ema, seen = EMA(decay=0.8), Seen()
    run = trainer([ema, seen], devices=2, strategy=strategy, max_epochs=epochs)
    run.fit(module, data(32), data(), ckpt_path=ckpt_path)
    if save:
        run.save_checkpoint(f"{kind}_full.ckpt", weights_only=False)
        run.save_checkpoint(f"{kind}_alone.ckpt", weights_only=True)
    return ema, seen, module, run
"""
)


def test_averages_are_sharded_as_the_weights_are_and_resume_exactly(tmp_path: Path) -> None:
    source = (
        COMMON
        + """
for kind in ("ddp", "full", "sharded"):
    ema, seen, module, run = fit(kind, 1)
    raw = gathered(module)
    assert_equal(raw[0], raw[1])
    if kind != "ddp":
        for name, p in module.named_parameters():
            average = ema._average[name]
            assert type(average).__name__ == "DTensor" and average.placements == p.placements
            assert average.to_local().shape == p.to_local().shape
    average = whole(ema._average)
    assert_equal(seen.weights, {**raw[0], **average})
    assert not torch.equal(raw[0]["net.head.weight"], average["net.head.weight"])
    if kind != "sharded":
        alone, full = (torch.load(f"{kind}_{name}.ckpt", weights_only=True) for name in ("alone", "full"))
        assert (alone["lit_efficient"]["weights"], full["lit_efficient"]["weights"]) == ("ema", "raw")
        assert_equal(alone["state_dict"], average)
        assert_equal(full["state_dict"], raw[0])
        assert_equal(full["callbacks"]["EMA"]["average"], average)
    again, _, resumed, _ = fit(kind, 2, f"{kind}_full.ckpt", save=False)
    straight, _, module, run = fit(kind, 2, save=False)
    assert_equal(gathered(module)[0], gathered(resumed)[0])
    assert_equal(whole(straight._average), whole(again._average))
print("equal")
"""
    )
    assert "equal" in run_script(source, tmp_path, processes=2)


class OneProcess(Toy):
    """The sharded toy's optimizer, without the shards."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_checkpoint_averages_and_power_emas_are_sharded_and_equal_those_of_one_process(tmp_path: Path) -> None:
    source = (
        COMMON
        + """
from torch.utils.data import DataLoader, DistributedSampler
from lit_efficient import CheckpointAverage, PowerEMA

def interleaved():
    # the batches of two processes are together those of eight rows in one process
    dataset = data(32).dataset
    return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, int(os.environ["LOCAL_RANK"]), shuffle=False))

class Steps(L.Callback):
    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, *_):
        self.steps.append({name: p.detach().full_tensor().clone() for name, p in module.named_parameters()})

def fit(last_k, epochs, folder, ckpt_path=None):
    parts = CheckpointAverage(last_k, every_n_steps=2), PowerEMA((0.1, 0.2), 4, folder), Seen(), Steps()
    strategy = ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)
    run = trainer(list(parts), devices=2, strategy=strategy, max_epochs=epochs, use_distributed_sampler=False)
    module = Sharded("configure_model")
    run.fit(module, interleaved(), data(), ckpt_path=ckpt_path)
    return *parts, module, run

for last_k in (2, None):
    average, power, seen, steps, module, run = fit(last_k, 2, f"straight{last_k}")
    local = {name: p.to_local().shape for name, p in module.named_parameters()}
    for held in (*average._snapshots, average.average(module), *power._averages):
        assert {n: t.to_local().shape for n, t in held.items()} == local
        assert all(t.placements == p.placements for (n, p) in module.named_parameters() for t in [held[n]])
    taken = steps.steps[1::2][-last_k:] if last_k else steps.steps[1::2]
    for name, tensor in whole(average.average(module)).items():
        mean = torch.stack([state[name] for state in taken]).mean(0)
        torch.testing.assert_close(tensor, mean, rtol=1e-6, atol=1e-7)
    assert_equal(seen.weights, {**seen.weights, **whole(average.average(module))})
    run.save_checkpoint(f"alone{last_k}.ckpt", weights_only=True)
fit(None, 1, "resumed")[-1].save_checkpoint("half.ckpt", weights_only=False)
fit(None, 2, "resumed", "half.ckpt")[-1].save_checkpoint("resumed.ckpt", weights_only=True)
"""
    )
    run_script(source, tmp_path, processes=2)
    for last_k in (2, None):
        average, power = CheckpointAverage(last_k, 2), PowerEMA((0.1, 0.2), 4, str(tmp_path / "one"))
        run = trainer([average, power], max_epochs=2)
        run.fit(OneProcess("configure_model"), data(32, batch_size=8), data())
        straight = torch.load(tmp_path / f"alone{last_k}.ckpt", weights_only=True)
        assert straight["lit_efficient"]["weights"] == "average"
        torch.testing.assert_close(straight["state_dict"], dict(average.average(run.model)), rtol=1e-4, atol=1e-5)
    assert_equal(straight["state_dict"], torch.load(tmp_path / "resumed.ckpt", weights_only=True)["state_dict"])
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 4
    for name in files:
        one, whole, parts = (load_file(tmp_path / folder / name) for folder in ("one", "straightNone", "resumed"))
        assert_equal(whole, parts)
        torch.testing.assert_close(whole, one, rtol=1e-4, atol=1e-5)
