import pytest
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lit_efficient.internals import lightning_strategies
from tests.internals.leaning import leans_on
from tests.internals.toy_fit import NAMESPACES, trainer


@pytest.mark.parametrize("namespace", NAMESPACES)
@leans_on("lightning", "_MultiProcessingLauncher", "lightning_strategies")
def test_strategies_that_spawn_or_fork_are_known(namespace):
    copies = {}
    for name in ("ddp", "ddp_spawn", "ddp_fork"):
        strategy = trainer(namespace, strategy=name, devices=2).strategy
        strategy._configure_launcher()
        copies[name] = lightning_strategies.copies_the_process(strategy)
    assert copies == {"ddp": False, "ddp_spawn": True, "ddp_fork": True}


@leans_on("lightning", "FSDPStrategy._activation_checkpointing_kwargs", "lightning_strategies")
def test_strategies_that_recompute_are_known():
    recomputes = lightning_strategies.recomputes_activations
    from torch import nn

    assert recomputes(FSDPStrategy(activation_checkpointing_policy={nn.Linear}))
    assert not recomputes(FSDPStrategy())
    assert not recomputes(DDPStrategy())


@leans_on("lightning", "ModelParallelStrategy._save_distributed_checkpoint", "lightning_strategies")
def test_strategies_that_write_one_file_of_many_shards_are_known():
    gathers = lightning_strategies.gathers_checkpoints
    assert gathers(ModelParallelStrategy(save_distributed_checkpoint=False))
    assert not gathers(ModelParallelStrategy())
    assert not gathers(SingleDeviceStrategy("cpu"))
