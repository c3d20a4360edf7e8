"""LowBitOptimizer on two ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lit_efficient import LowBitOptimizer
from tests.ranks.toys import Sharded, Small, sharding
from tests.support import assert_equal, data, trainer


def fit(bits: Literal[8, "fp8"], epochs: int, ckpt_path: str | None = None) -> Any:
    technique = LowBitOptimizer(bits, min_size=0, decay_norm_and_bias=False)
    run = trainer([technique], devices=2, strategy=sharding(), max_epochs=epochs, limit_val_batches=0)
    run.fit(Sharded("configure_model", network=Small), data(16), ckpt_path=ckpt_path)
    return run


def local(run: Any) -> dict[str, Any]:
    states = run.optimizers[0].state.values()
    parts = [{k: v.to_local() if hasattr(v, "to_local") else v for k, v in s.items()} for s in states]
    codes = [{k: v.codes if hasattr(v, "codes") else v for k, v in s.items()} for s in parts]
    return {"weights": [p.to_local() for p in run.lightning_module.parameters()], "states": codes}


def resumed_exactly() -> None:
    torch.compiler.set_stance("force_eager")  # torchao's step would be compiled: the same numbers, minutes later
    each: tuple[Literal[8, "fp8"], ...] = (8, "fp8")
    for bits in each:
        whole = fit(bits, 2)
        half = fit(bits, 1)
        half.save_checkpoint(f"half_{bits}.ckpt")
        resumed = fit(bits, 2, f"half_{bits}.ckpt")
        assert_equal(local(whole), local(resumed))
        low = {type(s["exp_avg"].to_local()).__name__ for s in whole.optimizers[0].state.values()}
        assert low == {"OptimState8bit" if bits == 8 else "OptimStateFp8", "Tensor"}, low


def one_of_two_matrices_of_a_shape() -> None:
    """Embedding and head of one shape, of which one keeps whole states, step as whole matrices do; compiled."""
    from lit_efficient.optimizers.low_bit_torchao import AdamWLowBit

    torch.distributed.init_process_group("gloo")
    mesh, draw = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    drawn = [torch.randn(32, 32, generator=draw) for _ in range(4)]
    stepped: list[list[Any]] = []
    for place in (lambda t: distribute_tensor(t, mesh, [Shard(0)]), torch.clone):
        weights = [nn.Parameter(place(t)) for t in drawn[:2]]
        optimizer = AdamWLowBit(weights, lr=1e-2, min_size=256, keep_32bit={weights[0]})
        for weight, gradient in zip(weights, drawn[2:]):
            weight.grad = place(gradient)
        optimizer.step()
        stepped.append(weights)
    for shards, whole in zip(*stepped):
        torch.testing.assert_close(shards.full_tensor(), whole, rtol=0, atol=0)
