import importlib

import pytest
import torch

from lit_efficient.internals.lightning_strategies import (
    Traits,
    forget_first_backward,
    is_parallel,
    pickles,
    run_alone,
    traits_of,
)
from tests.internals.leaning import leans_on
from tests.internals.toy_fit import NAMESPACES, trainer


def traits(name, **given):
    return Traits(
        **({key: False for key in Traits.__annotations__ if key not in ("name", "stage")} | {"name": name} | given)
    )


@pytest.mark.parametrize("namespace", NAMESPACES)
@leans_on("lightning", "_MultiProcessingLauncher, _start_method", "lightning_strategies")
def test_strategies_that_spawn_or_fork_are_known(namespace):
    spawns = {}
    pickled = {}
    for name in ("ddp", "ddp_spawn", "ddp_fork"):
        strategy = trainer(namespace, strategy=name, devices=2).strategy
        strategy._configure_launcher()
        spawns[name] = traits_of(strategy).spawns
        pickled[name] = pickles(strategy)
    assert pickled == {"ddp": False, "ddp_spawn": True, "ddp_fork": False}
    assert spawns == {"ddp": False, "ddp_spawn": True, "ddp_fork": True}


@pytest.mark.parametrize("namespace", NAMESPACES)
@leans_on(
    "lightning",
    "FSDPStrategy._activation_checkpointing_kwargs, ModelParallelStrategy._save_distributed_checkpoint",
    "lightning_strategies",
)
def test_what_strategies_do_to_parameters_and_checkpoints_is_known(namespace):
    strategies = importlib.import_module(f"{namespace}.strategies")
    ddp, sharded, flat = strategies.DDPStrategy, strategies.ModelParallelStrategy, strategies.FSDPStrategy

    class Own(ddp):
        pass

    expected = [
        (None, traits("NoneType")),
        (strategies.SingleDeviceStrategy("cpu"), traits("SingleDeviceStrategy")),
        (ddp(), traits("DDPStrategy", replicates=True)),
        (Own(), traits("Own", replicates=True)),
        (sharded(), traits("ModelParallelStrategy", dtensors=True)),
        (
            sharded(save_distributed_checkpoint=False),
            traits("ModelParallelStrategy", dtensors=True, saves_one_file=True),
        ),
        (flat(), traits("FSDPStrategy", flattens=True)),
        (
            flat(activation_checkpointing_policy={torch.nn.Linear}),
            traits("FSDPStrategy", flattens=True, recomputes=True),
        ),
    ]
    for strategy, found in expected:
        assert traits_of(strategy) == found
        assert is_parallel(strategy) is (found.name not in ("NoneType", "SingleDeviceStrategy"))
        assert traits_of(strategy).shards is (found.dtensors or found.flattens)
    # DeepSpeed may not be installed: it inherits from DDPStrategy, and shards all the same.
    assert issubclass(strategies.DeepSpeedStrategy, ddp)
    deep = strategies.DeepSpeedStrategy.__new__(strategies.DeepSpeedStrategy)
    deep._launcher = None
    assert traits_of(deep) == traits("DeepSpeedStrategy", flattens=True)


@pytest.mark.parametrize("namespace", NAMESPACES)
@leans_on("lightning", "Trainer._accelerator_connector", "lightning_strategies")
def test_a_trainer_of_several_processes_can_be_one_of_one(namespace):
    run = trainer(namespace, strategy="ddp", devices=2, precision="bf16-mixed")
    precision = run.strategy.precision_plugin
    run_alone(run)
    assert run.world_size == 1
    assert type(run.strategy).__module__.startswith(f"{namespace}.")
    assert type(run.strategy).__name__ == "SingleDeviceStrategy"
    assert run.strategy.precision_plugin is precision


@pytest.mark.parametrize("namespace", NAMESPACES)
@leans_on("lightning", "DDPStrategy._pl_static_graph_delay_done", "lightning_strategies")
def test_ddp_notes_that_its_static_graph_was_flushed(namespace):
    strategy = trainer(namespace, strategy="ddp", devices=2).strategy
    assert strategy._pl_static_graph_delay_done is False
    strategy._pl_static_graph_delay_done = True
    forget_first_backward(strategy)
    assert strategy._pl_static_graph_delay_done is False
