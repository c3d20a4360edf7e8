"""Clipping, spikes and gradient noise on two ranks."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from lit_efficient import AdaptiveGradientClipping, GradientClipping, GradientNoiseScale, SelectiveBackprop, SpikeGuard
from tests.ranks.toys import Sharded, Small, everyones, sharding, weights_of_all, whole
from tests.support import Toy, assert_equal, data, trainer


class Plain(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)


class PlainShards(Sharded):
    """In shards, of which those of a bias are pieces of one unit."""

    configure_optimizers = Plain.configure_optimizers


def act_as_one() -> None:
    clips_as_one()
    skips_as_one()
    hears_the_same_noise()
    chooses_as_one()


def chooses_as_one() -> None:
    """A rank whose losses are not finite in a batch trains on all of it, and the other one does not wait for it."""

    class Odd(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            odd = batch_idx == 1 and self.global_rank == 1
            return output | {"sample_loss": output["sample_loss"] * float("nan")} if odd else output

    choice = SelectiveBackprop()
    trainer([choice], devices=2, strategy="ddp").fit(module := Odd(), data(28), data())
    first, second = everyones(choice.state_dict()["past"])
    assert torch.equal(first, second)
    assert len(first) > 8
    first, second = weights_of_all(module)
    assert_equal(first, second)


def skips_as_one() -> None:
    """A spike of one rank's loss alone is a spike of both."""

    class Spikes(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            return loss * 1e3 if batch_idx == 3 and self.global_rank == 1 else loss

    guard = SpikeGuard(window=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer([guard], devices=2, strategy="ddp").fit(module := Spikes(), data(32), data())
    assert everyones(guard.state_dict()) == [guard.state_dict()] * 2
    assert guard.spikes == 1
    first, second = weights_of_all(module)
    assert_equal(first, second)


def hears_the_same_noise() -> None:
    rows = data(32).dataset
    sums = []
    for devices, strategy in ((1, "auto"), (2, "ddp")):
        noise, module = GradientNoiseScale(every_n_steps=1), Plain("configure_model")
        run = trainer(
            [noise],
            devices=devices,
            strategy=strategy,
            use_distributed_sampler=False,
            accumulate_grad_batches=4 // devices,
        )
        loader = DataLoader(rows, 4) if devices == 1 else DataLoader(rows, 4, sampler=_Alternating())
        run.fit(module, loader, data())
        assert noise._samples == 16
        sums.append(noise.state_dict()["sums"])
    assert_equal(*everyones(sums[1]))
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=0)


class _Alternating(Sampler[int]):
    """Every second batch of four is this rank's: those of a step are those that one process has."""

    def __iter__(self) -> Any:
        rank = int(os.environ["LOCAL_RANK"])
        return iter([i for i in range(32) if i // 4 % 2 == rank])

    def __len__(self) -> int:
        return 16


def clips_as_one() -> None:
    rows = data(32).dataset
    for clip in (lambda: GradientClipping(0.01, 0.005), lambda: AdaptiveGradientClipping(1e-3)):
        ends = []
        for devices, strategy, kind in ((1, "auto", Plain), (2, sharding(), PlainShards)):
            module = kind("configure_model", network=Small)
            run = trainer([clip()], devices=devices, strategy=strategy, use_distributed_sampler=False)
            run.fit(module, DataLoader(rows, 8 // devices, sampler=_interleaved(rows, devices)))
            ends.append(whole(module.state_dict()))
        for name, tensor in ends[0].items():
            torch.testing.assert_close(ends[1][name], tensor, rtol=0, atol=1e-6)


def _interleaved(rows: Any, devices: int) -> Any:
    return DistributedSampler(rows, devices, int(os.environ["LOCAL_RANK"]) % devices, shuffle=False)
