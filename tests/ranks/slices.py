"""A network that no process ever has whole: read from files, or drawn, in the slices that each holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lit_efficient import CausalLMConfig, LanguageModeling, ShardedStrategy
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from lit_efficient.models import weight_slices
from lit_efficient.models.deferred_draws import DeferredDraws
from lit_efficient.models.weight_slices import load_slices
from tests.support import assert_equal, trainer

WIDTH, DEPTH = 64, 8


def made() -> nn.Module:
    """Eight blocks, a number alone, a buffer, and rows that two processes share unevenly."""
    network = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)), nn.Linear(WIDTH, 3))
    first, second = (layer.get_parameter("weight") for layer in (network[0], network[1]))
    nn.init.orthogonal_(first)
    nn.init.trunc_normal_(second, std=0.02)
    network.register_parameter("scale", nn.Parameter(torch.tensor([2.0])))
    network.register_buffer("shift", torch.randn(WIDTH))
    return network


class Counted:
    """A file that notes how many bytes it gives at a time."""

    def __init__(self, path: Path) -> None:
        self.file = _map_tensors(path)

    def keys(self) -> Any:
        return self.file.keys()

    def get_slice(self, name: str) -> Any:
        return CountedSlice(self.file.get_slice(name))


class CountedSlice:
    def __init__(self, stored: Any) -> None:
        self.stored, self.get_shape, self.get_dtype = stored, stored.get_shape, stored.get_dtype

    def __getitem__(self, part: Any) -> torch.Tensor:
        found: torch.Tensor = self.stored[part]
        given.append(found.nbytes)
        return found


_map_tensors, given = weight_slices.map_tensors, list[int]()


def sharded(network: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in network:  # type: ignore[attr-defined]
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


def whole(network: nn.Module) -> dict[str, torch.Tensor]:
    state = network.state_dict()
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}


def each_its_own(folder: str) -> None:
    dist.init_process_group("gloo")
    weight_slices.map_tensors = Counted  # type: ignore[assignment]
    with torch.device("meta"):
        network = sharded(made())
    with AllocationMeter() as meter:
        network.to_empty(device="cpu")
        load_slices(network, folder)
    total = sum(t.numel() * 4 for t in network.state_dict().values())
    shard = sum(t.to_local().nbytes if hasattr(t, "to_local") else t.nbytes for t in network.state_dict().values())
    assert shard < 0.55 * total
    assert sum(given) == shard
    assert meter.peak + max(given) <= 1.5 * shard
    torch.manual_seed(0)
    assert_equal(whole(network), dict(made().state_dict()))
    torch.manual_seed(1)
    with DeferredDraws() as draws:
        network = made()
    draws.note(network)
    sharded(network).to_empty(device="cpu")
    draws.fill(network)
    torch.manual_seed(1)
    assert_equal(whole(network), dict(made().state_dict()))
    dist.destroy_process_group()


class Rows(LanguageModeling):
    """Without a schedule, whose steps would be those of the data."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def losses(folder: str, **arguments: Any) -> list[float]:
    """Of four steps of a fit on the model of a folder."""
    seen: list[float] = []

    class Seen(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            seen.append(float(outputs["loss"].detach()))

    tokens = torch.randint(97, (8, 12), generator=torch.Generator().manual_seed(0))
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens]
    run = trainer([Seen()], max_epochs=4, limit_val_batches=0, use_distributed_sampler=False, **arguments)
    loader = DataLoader(rows, batch_size=8)
    run.fit(Rows(CausalLMConfig(folder)), loader, loader)
    return seen


def in_a_fit(folders: list[str]) -> None:
    """Each process reads what it holds of a named model, and nothing else."""
    weight_slices.map_tensors = Counted  # type: ignore[assignment]
    for folder in folders:
        given.clear()
        found = losses(folder, devices=2, strategy=ShardedStrategy())
        total = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        assert 0.4 * total < sum(given) < 0.6 * total, (folder, sum(given), total)
        torch.save(found, f"{folder}_{dist.get_rank()}.pt")
