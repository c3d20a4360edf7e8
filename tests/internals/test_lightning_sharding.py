import inspect
import pickle

import pytest
from torch import nn

from lit_efficient.internals.lightning_sharding import ShardingBase, configure_model
from lit_efficient.internals.wraps import wrapped
from tests.internals.leaning import leans_on


class Twice(nn.Module):
    def forward(self, x):
        raise AssertionError

    def step(self, x):
        return 2 * x


@leans_on(
    "lightning", "_save_distributed_checkpoint, _tensor_parallel_size and _forward_redirection", "lightning_sharding"
)
def test_a_step_runs_as_a_forward_pass_and_sizes_are_those_of_the_world():
    for shards in (True, False):
        assert ShardingBase(save_distributed_checkpoint=shards).in_shards is shards
    strategy, module, seen = ShardingBase(), Twice(), []
    module.register_forward_hook(lambda *_: seen.append("hook"))
    assert strategy.run_as_forward(module, "step", 3) == 6
    assert seen == ["hook"]
    assert "forward" not in vars(module)
    with wrapped(module, configure_model, "configure_model"):
        assert callable(module.configure_model)
    pickle.dumps(Twice())


@leans_on("deepspeed", "_restore_from_bit16_weights", "lightning_sharding")
def test_an_engine_without_optimizer_lacks_what_its_loading_calls():
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    assert "self.optimizer._restore_from_bit16_weights()" in inspect.getsource(DeepSpeedEngine.load_checkpoint)
    assert not hasattr(DeepSpeedZeRoOffload, "_restore_from_bit16_weights")  # else leave it alone
