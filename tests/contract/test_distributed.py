"""The contract on two gloo processes: DDP equals one process with twice the batch, FSDP2 trains or refuses by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_efficient import SNRWeighting, StochasticDepth
from tests.support import Toy, data, run_script, trainer, weights

PREAMBLE = """
import os
import torch, lightning.pytorch as L
import torch.distributed as dist
torch.set_num_threads(1)
from lit_efficient import LowBitOptimizer, SNRWeighting, StochasticDepth
from tests.support import Toy, data, trainer, weights, assert_equal, QUIET

def gathered(module):
    whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in module.state_dict().items()}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, whole)
    return everyone
"""


@pytest.mark.parametrize("skip", ["batch", "sample"])
def test_ddp_ranks_stay_equal_and_resume_bit_exactly(skip: str, tmp_path: Path) -> None:
    source = (
        PREAMBLE
        + f"""
def make():
    return [StochasticDepth(0.9, skip={skip!r}), LowBitOptimizer(min_size=0), SNRWeighting(gamma=1.0)]

def fit(epochs, ckpt_path=None):
    run = trainer(make(), devices=2, strategy="ddp", max_epochs=epochs)
    module = Toy("configure_model", "lambda")
    run.fit(module, data(32), data(), ckpt_path=ckpt_path)
    return run, module

run, module = fit(2)
first, second = gathered(module)
assert_equal(first, second)
half, _ = fit(1)
half.save_checkpoint("half.ckpt", weights_only=False)
resumed, again = fit(2, "half.ckpt")
assert resumed.global_step == run.global_step == 8, resumed.global_step
assert_equal(first, gathered(again)[0])
print("equal")
"""
    )
    assert "equal" in run_script(source, tmp_path, processes=2)


def test_ddp_equals_one_process_on_the_whole_batch(tmp_path: Path) -> None:
    """The same blocks are dropped on both ranks, so the averaged gradients are those of the whole batch."""
    source = (
        PREAMBLE
        + """
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

def fit(devices, batch):
    torch.manual_seed(0)
    run = trainer([StochasticDepth(0.7), SNRWeighting(gamma=1.0)], devices=devices, max_epochs=1,
                  strategy="ddp" if devices > 1 else "auto", use_distributed_sampler=False)
    module = Toy("configure_model")
    loader = data(32, batch)
    rank = int(os.environ["LOCAL_RANK"])
    # interleaved rows: rank r of step s gets rows 2 * 4 * s + r, + 2, ...
    sampler = DistributedSampler(loader.dataset, 2, rank, shuffle=False) if devices > 1 else None
    run.fit(module, DataLoader(loader.dataset, batch, sampler=sampler))
    return weights(module)

two = fit(2, 4)
if int(os.environ["RANK"]) == 0:
    torch.save(two, "two.pt")
dist.barrier()
print("done")
"""
    )
    run_script(source, tmp_path, processes=2)
    module = Toy("configure_model")
    trainer([StochasticDepth(0.7), SNRWeighting(gamma=1.0)], max_epochs=1).fit(module, data(32, 8), data())
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    for name, tensor in weights(module).items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-5)


def test_fsdp2_trains_with_what_works_on_shards_and_refuses_the_rest(tmp_path: Path) -> None:
    source = (
        PREAMBLE
        + """
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from lit_efficient import ConflictError, Phase, Report, Technique

class Sharded(Toy):
    def configure_model(self):
        if self.net is not None:
            return
        super().configure_model()
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

class Grow(Technique):
    phase = Phase.ADAPT
    def transform(self, module):
        raise AssertionError("must be refused before it acts")

def fit(callbacks):
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = trainer(callbacks, devices=2, strategy=strategy, max_epochs=1, limit_val_batches=0)
    module = Sharded("configure_model")
    run.fit(module, data(32))
    return module

plain = gathered(fit([]))
module = fit([StochasticDepth(0.9), SNRWeighting(gamma=1.0)])
first, second = gathered(module)
assert_equal(first, second)
assert plain[0].keys() == first.keys()
assert not torch.equal(plain[0]["net.head.weight"], first["net.head.weight"])
assert type(module.net.blocks[0].up.weight).__name__ == "DTensor"

low = LowBitOptimizer(backend="bitsandbytes")
refused = [([Grow()], "must change the network before it is sharded"), ([low], "DTensors")]
for callbacks, message in refused:
    try:
        fit(callbacks)
    except ConflictError as error:
        assert message in str(error), error
    else:
        raise AssertionError("not refused")
print("equal")
"""
    )
    assert "equal" in run_script(source, tmp_path, processes=2)
