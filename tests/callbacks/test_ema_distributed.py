"""EMA on two gloo processes: DDP ranks agree, FSDP2 averages shards in place, both resume exactly."""

from __future__ import annotations

from pathlib import Path

from tests.contract.test_distributed import PREAMBLE
from tests.support import run_script

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
