"""EMA, CheckpointAverage and PowerEMA on two ranks."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lit_efficient import EMA, CheckpointAverage, PowerEMA
from tests.ranks.toys import Sharded, Small, sharding, weights_of_all, whole
from tests.support import Toy, assert_equal, data, trainer


class PlainAdamW:
    """One group, for a toy with shards and for one without."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)  # type: ignore[attr-defined]


class ShardedNet(PlainAdamW, Sharded):
    pass


class OneProcess(PlainAdamW, Toy):
    pass


class Seen(L.Callback):
    """The weights that validation used."""

    def on_validation_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        for part in module.modules():
            if hasattr(part, "reshard"):
                part.reshard()
        self.weights = weights_of_all(module)[0]


def fit_ema(kind: str, epochs: int, ckpt_path: str | None = None, save: bool = True) -> tuple[EMA, Seen, Any]:
    strategy = "ddp" if kind == "ddp" else sharding(kind == "sharded")
    module = (Toy if kind == "ddp" else ShardedNet)("configure_model", network=Small)
    ema, seen = EMA(decay=0.8), Seen()
    run = trainer([ema, seen], devices=2, strategy=strategy, max_epochs=epochs)
    run.fit(module, data(24), data(), ckpt_path=ckpt_path)
    if save:
        run.save_checkpoint(f"{kind}_full.ckpt", weights_only=False)
        run.save_checkpoint(f"{kind}_alone.ckpt", weights_only=True)
    return ema, seen, module


def sharded_as_the_weights() -> None:
    for kind in ("ddp", "full", "sharded"):
        ema, seen, module = fit_ema(kind, 1)
        raw = weights_of_all(module)
        assert_equal(raw[0], raw[1])
        if kind != "ddp":
            for name, p in module.named_parameters():
                average: Any = ema._average[name]
                assert type(average).__name__ == "DTensor"
                assert average.placements == p.placements
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
        again, _, resumed = fit_ema(kind, 2, f"{kind}_full.ckpt", save=False)
        straight, _, module = fit_ema(kind, 2, save=False)
        assert_equal(weights_of_all(module)[0], weights_of_all(resumed)[0])
        assert_equal(whole(straight._average), whole(again._average))


def interleaved() -> DataLoader:
    """The batches of two processes are together those of eight rows in one process."""
    dataset = data(32).dataset
    return DataLoader(dataset, 4, sampler=DistributedSampler(dataset, 2, int(os.environ["LOCAL_RANK"]), shuffle=False))


class Steps(L.Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.steps.append({name: p.detach().full_tensor().clone() for name, p in module.named_parameters()})


def fit_snapshots(last_k: int | None, epochs: int, folder: str, ckpt_path: str | None = None) -> tuple[Any, ...]:
    parts = CheckpointAverage(last_k, every_n_steps=2), PowerEMA((0.1, 0.2), 4, folder), Seen(), Steps()
    strategy = sharding(save_distributed_checkpoint=False)
    run = trainer(list(parts), devices=2, strategy=strategy, max_epochs=epochs, use_distributed_sampler=False)
    module = ShardedNet("configure_model", network=Small)
    run.fit(module, interleaved(), data(), ckpt_path=ckpt_path)
    return *parts, module, run


def snapshots() -> None:
    for last_k in (2, None):
        average, power, seen, steps, module, run = fit_snapshots(last_k, 2, f"straight{last_k}")
        local = {name: p.to_local().shape for name, p in module.named_parameters()}
        for held in (*average._snapshots, average.average(module), *power._averages):
            assert {n: t.to_local().shape for n, t in held.items()} == local
            assert all(held[n].placements == p.placements for n, p in module.named_parameters())
        taken = steps.steps[1::2][-last_k:] if last_k else steps.steps[1::2]
        for name, tensor in whole(average.average(module)).items():
            mean = torch.stack([state[name] for state in taken]).mean(0)
            torch.testing.assert_close(tensor, mean, rtol=1e-6, atol=1e-7)
        assert_equal(seen.weights, {**seen.weights, **whole(average.average(module))})
        run.save_checkpoint(f"alone{last_k}.ckpt", weights_only=True)
    fit_snapshots(None, 1, "resumed")[-1].save_checkpoint("half.ckpt", weights_only=False)
    fit_snapshots(None, 2, "resumed", "half.ckpt")[-1].save_checkpoint("resumed.ckpt", weights_only=True)
