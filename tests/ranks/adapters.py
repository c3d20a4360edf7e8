"""Adapters on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lit_efficient import LoRA, PeftAdapter, PrefixTuning, QuantizeBase
from lit_efficient.application import transform_by
from lit_efficient.distributed.shards import checkpoint_keys
from lit_efficient.errors import CheckpointError, ConflictError
from tests.ranks.toys import Small, shard, sharding, weights_of_all, whole
from tests.support import AttentionNet, Toy, assert_equal, data, trainer

Make = Callable[[], list[Any]]


class Adapted(Toy):
    """Shards come after all techniques. ``factor`` makes another base of the same shapes."""

    def __init__(self, make: Make, network: type[torch.nn.Module], factor: float = 1.0) -> None:
        super().__init__("configure_model", network=network)
        self.make, self.factor = make, factor

    def configure_model(self) -> None:
        if isinstance(self.net, torch.nn.Module):
            return
        super().configure_model()
        with torch.no_grad():
            for p in self.net.parameters():
                p.mul_(self.factor)
        transform_by(self, self.make())
        shard(self, (self.net.gpt if self.network is AttentionNet else self.net).blocks)


class OneGroup(Adapted):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def as_under_ddp(variant: str) -> None:
    def make() -> list[Any]:
        return [LoRA(rank=2, variant=variant, lr_ratio=4.0)]

    def fit(module: Toy, strategy: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # ranks differ in all but the adapters
        run = trainer(make(), devices=2, strategy=strategy, max_epochs=1, limit_val_batches=0)
        run.fit(module, data(32))
        first, second = weights_of_all(module)
        assert_equal(first, second)
        return first

    plain = fit(Toy("configure_model", network=Small), "ddp")
    shards = fit(Adapted(make, Small), sharding())
    assert plain.keys() == shards.keys()
    for key, tensor in plain.items():
        torch.testing.assert_close(shards[key], tensor, rtol=1e-4, atol=1e-5)
    assert plain["net.stem.lora_B"].abs().sum() > 0


def fit(
    make: Make,
    network: type[torch.nn.Module],
    epochs: int,
    shards: bool = False,
    ckpt_path: str | None = None,
    factor: float = 1.0,
) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    run = trainer(make(), devices=2, strategy=sharding(shards), max_epochs=epochs, limit_val_batches=0)
    module = OneGroup(make, network, factor)
    run.fit(module, data(8), ckpt_path=ckpt_path)
    return run, {name: tensor.clone() for name, tensor in whole(module.state_dict()).items()}


def lora() -> list[Any]:
    return [LoRA(rank=2)]


def quantised_dora() -> list[Any]:
    return [QuantizeBase("nf4"), LoRA(rank=2, variant="dora")]


def prefix() -> list[Any]:
    return [PrefixTuning(init_tokens=[1, 2])]


def lokr() -> list[Any]:
    return [PeftAdapter({"peft_type": "LOKR", "r": 2, "target_modules": ["up", "down"]})]


CASES: tuple[tuple[Make, type[torch.nn.Module], bool, set[str]], ...] = (
    (lora, Small, False, {"lora_A", "lora_B"}),
    (quantised_dora, Small, True, {"lora_A", "lora_B", "lora_magnitude"}),
    (prefix, AttentionNet, False, {"prefix_keys", "prefix_values"}),
    (lokr, Small, True, {"default"}),  # net.blocks.0.up.lokr_w1.default
)


def resumed_from_adapters_alone() -> None:
    for make, network, shards, kept in CASES:
        path = f"{make.__name__}.ckpt"
        _, straight = fit(make, network, 2)
        run, half = fit(make, network, 1, shards)
        run.save_checkpoint(path, weights_only=False)
        keys = checkpoint_keys(Path(path))
        assert {key.rpartition(".")[2] for key in keys if not key.endswith("squared")} == kept, (path, keys)
        assert not all(torch.equal(straight[key], half[key]) for key in keys)  # the second epoch matters
        _, resumed = fit(make, network, 2, shards, path)
        assert_equal(straight, resumed)

    with pytest.raises(CheckpointError, match="other frozen weights"):
        fit(lora, Small, 2, ckpt_path="lora.ckpt", factor=1.5)
    if dist.get_rank() == 0:
        checkpoint = torch.load("lora.ckpt", weights_only=True)
        del checkpoint["state_dict"]["net.stem.lora_A"]
        torch.save(checkpoint, "lora.ckpt")
    dist.barrier()
    lacks = r"lacks 1 of the 12 tensors that are not part of the frozen base: net\.stem\.lora_A"
    with pytest.raises(CheckpointError, match=lacks):
        fit(lora, Small, 2, ckpt_path="lora.ckpt")
    with pytest.raises(ConflictError, match="format='int8' cannot be sharded"):
        fit(lambda: [QuantizeBase("int8"), *lora()], Small, 1)


def started(variant: str) -> None:
    """Save the adapters of a run after a step with a rate of 0, which therefore are as they start."""

    class Still(Toy):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.0)

    torch.manual_seed(0)
    run = trainer([LoRA(rank=2, variant=variant, start_rounds=2)], devices=2, strategy="ddp", max_steps=1)
    run.fit(module := Still(), data(16))
    first, second = weights_of_all(module)
    assert_equal(first, second)
    if run.is_global_zero:
        torch.save(first, "started.pt")
