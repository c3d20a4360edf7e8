"""Adapters on two gloo processes: the same on all ranks, under DDP and sharded by FSDP2; resumed without the base."""

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


def test_shards_resume_from_adapters_alone_and_miss_none(tmp_path: Path) -> None:
    source = """
    import torch, torch.distributed as dist
    torch.set_num_threads(1)
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from lit_efficient import LoRA, PrefixTuning, QuantizeBase
    from lit_efficient.mechanisms.adapters.sharded import checkpoint_keys
    from lit_efficient.application import apply
    from lit_efficient.errors import CheckpointError, ConflictError
    from pathlib import Path
    from tests.support import AttentionNet, Net, Toy, assert_equal, data, trainer

    class Sharded(Toy):
        def __init__(self, make, network, factor):
            super().__init__("configure_model", network=network)
            self.make, self.factor = make, factor

        def configure_model(self):
            if self.net is not None:
                return
            super().configure_model()
            with torch.no_grad():
                for p in self.net.parameters():
                    p.mul_(self.factor)
            apply(self, self.make())
            for block in (self.net.gpt if self.network is AttentionNet else self.net).blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def fit(make, network, epochs, shards=False, ckpt_path=None, factor=1.0):
        torch.manual_seed(0)
        strategy = ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=shards
        )
        run = trainer(make(), devices=2, strategy=strategy, max_epochs=epochs, limit_val_batches=0)
        module = Sharded(make, network, factor)
        run.fit(module, data(8), ckpt_path=ckpt_path)
        return run, {
            k: (v.full_tensor() if hasattr(v, "full_tensor") else v).clone() for k, v in module.state_dict().items()
        }

    def refused(kind, words, *arguments, **named):
        try:
            fit(*arguments, **named)
        except kind as error:
            assert words in str(error), error
        else:
            raise AssertionError("not refused")

    lora = lambda: [LoRA(rank=2)]
    cases = {
        "lora": (lora, Net, False, {"lora_A", "lora_B"}),
        "nf4": (lambda: [QuantizeBase("nf4"), LoRA(rank=2, variant="dora")], Net, True,
                {"lora_A", "lora_B", "lora_magnitude"}),
        "prefix": (lambda: [PrefixTuning(init_tokens=[1, 2])], AttentionNet, False, {"prefix_keys", "prefix_values"}),
    }
    for name, (make, network, shards, kept) in cases.items():
        _, whole = fit(make, network, 2)
        run, half = fit(make, network, 1, shards)
        run.save_checkpoint(f"{name}.ckpt", weights_only=False)
        keys = checkpoint_keys(Path(f"{name}.ckpt"))
        assert {key.rpartition(".")[2] for key in keys if not key.endswith("squared")} == kept, (name, keys)
        assert not all(torch.equal(whole[key], half[key]) for key in keys)  # the second epoch matters
        _, resumed = fit(make, network, 2, shards, f"{name}.ckpt")
        assert_equal(whole, resumed)

    refused(CheckpointError, "another base", lora, Net, 2, ckpt_path="lora.ckpt", factor=1.5)
    if dist.get_rank() == 0:
        checkpoint = torch.load("lora.ckpt", weights_only=True)
        del checkpoint["state_dict"]["net.stem.lora_A"]
        torch.save(checkpoint, "lora.ckpt")
    dist.barrier()
    refused(CheckpointError, "lacks 1 of the 20 tensors that train beside the frozen base: net.stem.lora_A",
            lora, Net, 2, ckpt_path="lora.ckpt")
    refused(ConflictError, "format='int8' cannot be sharded", lambda: [QuantizeBase("int8"), *lora()], Net, 1)
    print("resumed")
    """
    assert "resumed" in run_script(source, tmp_path, processes=2)
