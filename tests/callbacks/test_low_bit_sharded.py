"""LowBitOptimizer on parameters that two processes share: torchao's states are sharded, too, and resume exactly."""

from __future__ import annotations

from pathlib import Path

from tests.support import run_script

SCRIPT = """
import torch
torch.set_num_threads(1)
torch.compiler.set_stance("force_eager")  # torchao's step would be compiled: the same numbers, minutes later
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from lit_efficient import LowBitOptimizer
from lit_efficient.optimizers.low_bit import measure_state_bytes
from tests.support import Toy, assert_equal, data, trainer

class Sharded(Toy):
    def configure_model(self):
        if self.net is not None:
            return
        super().configure_model()
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

def fit(bits, epochs, ckpt_path=None):
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=True)
    technique = LowBitOptimizer(bits, min_size=0, decay_norm_and_bias=False)
    run = trainer([technique], devices=2, strategy=strategy, max_epochs=epochs, limit_val_batches=0)
    run.fit(Sharded("configure_model"), data(32), ckpt_path=ckpt_path)
    return run

def local(run):
    states = [s for s in run.optimizers[0].state.values()]
    parts = [{k: v.to_local() if hasattr(v, "to_local") else v for k, v in s.items()} for s in states]
    codes = [{k: v.codes if hasattr(v, "codes") else v for k, v in s.items()} for s in parts]
    return {"weights": [p.to_local() for p in run.lightning_module.parameters()], "states": codes}

for bits in (8, "fp8"):
    whole = fit(bits, 2)
    half = fit(bits, 1)
    half.save_checkpoint(f"half_{bits}.ckpt")
    resumed = fit(bits, 2, f"half_{bits}.ckpt")
    assert_equal(local(whole), local(resumed))
    low = {type(s["exp_avg"].to_local()).__name__ for s in whole.optimizers[0].state.values()}
    assert low == {"OptimState8bit" if bits == 8 else "OptimStateFp8", "Tensor"}, low
print("exact")
"""


def test_sharded_states_resume_exactly_from_a_sharded_checkpoint(tmp_path: Path) -> None:
    assert "exact" in run_script(SCRIPT, tmp_path, processes=2)
