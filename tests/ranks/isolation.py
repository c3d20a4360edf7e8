"""Packed documents under strategies that shard weights: paths between documents that small weights hide are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader

from lit_efficient import ConfigurationError, LanguageModeling
from lit_efficient.mechanisms.documents import DocumentRows
from lit_efficient.models.networks.gpt import GPT, GPTConfig
from lit_efficient.models.probes import noise
from lit_efficient.models.probes.noise import shards_again
from tests.mechanisms.test_documents import HIDDEN, WITH_SPECIAL, add
from tests.support import trainer

CONFIG = GPTConfig(vocab_size=97, dim=32, depth=2, num_heads=4, max_length=32)


class Hiding(LanguageModeling):
    """A network with a path between documents, which notes whether the question changes its weights."""

    def __init__(self, path: str) -> None:
        super().__init__(CONFIG, learning_rate=1e-3, warmup_steps=0)
        self.path = path
        self.same: bool | None = None

    def configure_model(self) -> None:
        if self.network is not None:
            return
        super().configure_model()
        if self.path != "none":
            add(self.network, HIDDEN[self.path]())

    def _losses(self, batch: dict[str, Tensor], *more: Any, **named: Any) -> Any:
        network: Any = self.network
        if self.same is None:
            free = shards_again(network)
            before = [_bits(p) for p in network.parameters()]
            self._rows.arguments(network, batch, self._agree)
            free()
            self.same = all(torch.equal(*pair) for pair in zip(before, map(_bits, network.parameters())))
        return super()._losses(batch, *more, **named)


def _bits(parameter: Any) -> Tensor:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if not local.numel() and hasattr(parameter, "ds_tensor"):
        local = parameter.ds_tensor
    return local.detach().clone()


def asked(strategy: Callable[[], Any], precision: str = "32-true") -> None:
    """Fit one step with each path."""
    rows: Any = [{name: value[index] for name, value in WITH_SPECIAL.items()} for index in (0, 1)] * 2
    for path in ("none", *HIDDEN):
        torch.manual_seed(0)
        module = Hiding(path)
        run = trainer([], max_steps=1, devices=2, strategy=strategy(), precision=precision)
        if path == "none":
            run.fit(module, DataLoader(rows, 1))
            assert module.same, "the question has changed weights"
            continue
        said = "is not causal" if "later" in path else "does not isolate the documents"
        with pytest.raises(ConfigurationError, match=said):
            run.fit(module, DataLoader(rows, 1))


class Asking(nn.Module):
    """A module that asks in its forward pass, in which the weights outside of the blocks are gathered."""

    def __init__(self, network: GPT) -> None:
        super().__init__()
        self.network = network

    def forward(self) -> Tensor:
        DocumentRows("Task").arguments(self.network, WITH_SPECIAL, _all_agree)
        logits: Tensor = self.network(input_ids=WITH_SPECIAL["input_ids"])
        return logits.sum()


def _all_agree(decision: bool) -> bool:
    number = torch.tensor(int(decision))
    dist.all_reduce(number, op=dist.ReduceOp.MIN)
    return bool(number)


def in_flat_vectors(keeps_names: bool, longest_vector: int) -> None:
    """Ask under torch's first FSDP, which keeps all weights of a block in one vector.

    Args:
        keeps_names: Whether FSDP presents parts of the vector as parameters.
        longest_vector: Largest length of a vector that gets noise. Large networks have longer ones.
    """
    dist.init_process_group("gloo")
    noise._LONGEST_VECTOR = longest_vector
    for path in ("none", *HIDDEN):
        if path == "gate of zero" and not longest_vector:  # nothing but noise opens it
            continue
        torch.manual_seed(0)
        network = GPT(CONFIG)
        if path != "none":
            add(network, HIDDEN[path]())
        module = FullyShardedDataParallel(
            Asking(network),
            auto_wrap_policy=ModuleWrapPolicy({type(network.blocks[0])}),
            use_orig_params=keeps_names,
            device_id=torch.device("cpu"),
        )
        before = [p.detach().clone() for p in module.parameters()]
        if path == "none":
            module().backward()
            assert all(torch.equal(p, own) for p, own in zip(module.parameters(), before, strict=True))
            continue
        said = "is not causal" if "later" in path else "does not isolate the documents"
        with pytest.raises(ConfigurationError, match=said):
            module()
    dist.destroy_process_group()
