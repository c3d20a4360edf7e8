"""LoRA on two gloo processes: the same adapters on all ranks, under DDP and sharded by FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import run_script


@pytest.mark.parametrize("variant", ["dora"])
def test_ranks_agree_and_shards_compute_what_ddp_computes(variant: str, tmp_path: Path) -> None:
    source = f"""
    import torch, lightning.pytorch as L, torch.distributed as dist
    torch.set_num_threads(1)
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from lit_efficient import LoRA
    from lit_efficient.application import apply
    from tests.support import Toy, data, trainer

    def make():
        return LoRA(rank=2, variant={variant!r}, lr_ratio=4.0)

    class Sharded(Toy):
        def configure_model(self):
            if self.net is not None:
                return
            super().configure_model()
            apply(self, [make()])  # shards come after all techniques
            for block in self.net.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def fit(kind, strategy):
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # ranks differ in all but the adapters
        run = trainer([make()], devices=2, strategy=strategy, max_epochs=1, limit_val_batches=0)
        module = kind("configure_model")
        run.fit(module, data(32))
        whole = {{k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in module.state_dict().items()}}
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, whole)
        for other in everyone[1:]:
            assert all(torch.equal(everyone[0][key], tensor) for key, tensor in other.items())
        return whole

    plain = fit(Toy, "ddp")
    sharded = fit(Sharded, ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1))
    assert plain.keys() == sharded.keys()
    for key, tensor in plain.items():
        torch.testing.assert_close(sharded[key], tensor, rtol=1e-4, atol=1e-5)
    assert plain["net.stem.lora_B"].abs().sum() > 0
    print("equal")
    """
    assert "equal" in run_script(source, tmp_path, processes=2)
