"""Rows of tokens cut among processes, beside one process that has them whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lit_efficient import (
    ActivationCheckpointing,
    CausalLMConfig,
    ChunkedCrossEntropy,
    ConfigurationError,
    ExactResume,
    GPTConfig,
    LanguageModeling,
    LoRA,
    NEFTune,
    Parallel,
    SelectiveBackprop,
    ThroughputMeter,
)
from lit_efficient.distributed.row_slices import ROW_POSITIONS, gather_rows, own_positions, own_slices, share_rows
from lit_efficient.errors import LitEfficientError
from lit_efficient.internals.lightning_strategies import readers
from lit_efficient.mechanisms.metering import measure
from lit_efficient.mechanisms.trials.memory import AllocationMeter
from lit_efficient.models.networks.document_attention import attend_documents, document_starts
from lit_efficient.models.networks.gpt import GPT
from tests.ranks.sharded import fit as fit_toy
from tests.ranks.sharded import strategy
from tests.ranks.toys import everyones, whole
from tests.support import Net, trainer

LENGTH, VOCABULARY, STEPS = 37, 32, 4  # no multiple of the pieces
OURS = GPTConfig(VOCABULARY, dim=16, depth=2, num_heads=4, num_kv_heads=2, hidden_dim=32, max_length=256)
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
LLAMA = CausalLMConfig(config_fields={"model_type": "llama", **SIZES, **HEADS})
SLIDING: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 4}
GEMMA = CausalLMConfig(config_fields={"model_type": "gemma3_text", **SIZES, **HEADS, **SLIDING})

Row = dict[str, Tensor]


def plain(index: int) -> Row:
    ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids, "num_bytes": torch.tensor(50 + index)}


def packed(index: int) -> Row:
    """Three documents, of other lengths in each row, whose first tokens teach nothing."""
    first = 5 + 3 * (index % 4)
    sizes = first, 11, LENGTH - first - 11
    row = plain(index)
    positions = torch.cat([torch.arange(size) for size in sizes])
    return {**row, "labels": row["labels"].masked_fill(positions < 2, -100), "position_ids": positions}


def padded(index: int) -> Row:
    """Filled up on the right, most of it in some rows: a process has a slice that teaches nothing."""
    row, kept = plain(index), 6 + 9 * (index % 4)
    mask = (torch.arange(LENGTH) < kept).long()
    return {**row, "labels": row["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


class Logged(L.Callback):
    """What was logged, the tokens of a batch, and the operations of its linear layers in this process."""

    def __init__(self, meter: ThroughputMeter) -> None:
        self.meter = meter
        self.seen: list[Tensor] = []
        self.counted: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.counted and self.meter.flops is not None:
            amount = measure(batch)[0]
            self.counted = [float(amount.real) * readers(trainer), self.meter.flops.position * amount.positions]
        self.seen.append(trainer.callback_metrics["train/loss"].clone().float())

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint("half.ckpt")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        names = ("val/loss", "val/bits_per_byte")
        self.seen += [trainer.callback_metrics[name].clone().float() for name in names]


Case = tuple[Callable[[], list[Any]], Any, Callable[[int], Row], dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": (list, OURS, plain, {"gradient_clip_val": 0.1}),
    "packed": (lambda: [ChunkedCrossEntropy(chunk_size=7)], OURS, packed, {"accumulate_grad_batches": 2}),
    "padded": (lambda: [LoRA(rank=2)], LLAMA, padded, {}),
    "llama": (lambda: [ActivationCheckpointing()], LLAMA, packed, {}),
    "checkpointing": (lambda: [ActivationCheckpointing(), LoRA(rank=2)], OURS, packed, {}),
}


def fit(
    name: str | Case, rows: int = 1, ckpt_path: str | None = None, **more: Any
) -> tuple[Any, Tensor, Mapping[str, Tensor]]:
    """A fit in which so many processes share each row: the trainer, what was logged, and the whole weights."""
    make, config, draw, arguments = CASES[name] if isinstance(name, str) else name
    world = int(os.environ.get("WORLD_SIZE", "1"))
    items: Any = [draw(index) for index in range(4 * STEPS)]
    logged = Logged(meter := ThroughputMeter())
    chosen = strategy(parallel=Parallel(context=rows)) if world > 1 else "auto"
    arguments = {"max_epochs": 2, "devices": world, "strategy": chosen, **arguments, **more}
    torch.manual_seed(0)
    module = LanguageModeling(config, learning_rate=1e-3, warmup_steps=0)
    run = trainer([*make(), ExactResume(), meter, logged], **arguments)
    loaders = [DataLoader(items, 4 * rows // world, shuffle=shuffle) for shuffle in (True, False)]
    run.fit(module, *loaders, ckpt_path=ckpt_path)
    weights = {key: value.detach().clone() for key, value in whole(module.state_dict()).items()}
    return run, torch.stack(logged.seen), weights


def as_one(names: tuple[str, ...]) -> None:
    for name in names:
        run, logged, weights = fit(name, rows=2)
        _, _, again = fit(name, rows=2, ckpt_path="half.ckpt")
        assert all(torch.equal(weights[key], again[key]) for key in weights), name
        assert torch.equal(*everyones(logged)), name
        if dist.get_rank() == 0:
            torch.save({"logged": logged, "weights": weights}, f"{name}.pt")
        counted = everyones(counted_in(run))
        if dist.get_rank() == 0:
            torch.save(counted, f"{name}_counted.pt")


def counted_in(run: Any) -> list[float]:
    return next(part.counted for part in run.callbacks if isinstance(part, Logged))


def numbers_memory_and_refusals() -> None:
    """Attention's numbers, what a step holds beside whole rows, and what cannot work on slices."""
    fit((list, OURS, plain, {"max_epochs": 1}), rows=2)  # and processes that know each other
    share_rows(dist.group.WORLD)
    draw = torch.Generator().manual_seed(0)
    q, k, v, weigh = (torch.randn(2, n, 24, 8, generator=draw, dtype=torch.float64) for n in (4, 2, 2, 4))
    positions = torch.stack([torch.arange(24), torch.cat((torch.arange(9), torch.arange(15)))])
    places, starts = own_positions(24, q.device), document_starts(positions)
    found = []
    for cut in (False, True):
        whole_or_own: Any = [heads[:, :, places] if cut else heads for heads in (q, k, v, weigh)]
        inputs: Any = [heads.clone().requires_grad_() for heads in whole_or_own[:3]]
        out = attend_documents(inputs[0], inputs[1], inputs[2], starts)
        (out * whole_or_own[3]).sum().backward()
        results = [out, *(heads.grad for heads in inputs)]
        found.append(results if cut else [one[:, :, places] for one in results])
    inputs = [heads[:, :, places].clone().requires_grad_() for heads in (q, k, v)]
    index = torch.arange(24)  # as on a GPU whose FlexAttention fails
    mask = ((index <= index[:, None]) & (index >= starts[:, :, None]))[:, None, places]
    key, value = (heads.repeat_interleave(2, 1) for heads in gather_rows(*inputs[1:]))
    out = F.scaled_dot_product_attention(inputs[0], key, value, attn_mask=mask)
    (out * weigh[:, :, places]).sum().backward()
    for results in (found[1], [out, *(heads.grad for heads in inputs)]):
        for one, other in zip(results, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for make in (list, lambda: [ActivationCheckpointing()]):
        held = [_held(make, cut) for cut in (False, True)]
        assert 0.45 < held[1] / held[0] < 0.56, held
    share_rows(None)
    cases: list[tuple[Any, Any, str]] = [
        ([NEFTune()], OURS, "NEFTune cannot work on slices: its noise depends on the length of each text"),
        ([SelectiveBackprop()], OURS, "SelectiveBackprop cannot work on slices: samples are chosen"),
        ([], GEMMA, "mixes tokens not only by torch's causal attention"),
    ]
    for made, config, said in cases:
        with pytest.raises(LitEfficientError, match=said):
            fit((partial(list, made), config, plain, {}), rows=2)
    with pytest.raises(ConfigurationError, match=r"parallel.context needs batches with input_ids and labels \[B, T\]"):
        fit((list, OURS, lambda index: {"input_ids": plain(index)["input_ids"]}, {}), rows=2)
    with pytest.raises(LitEfficientError, match="Trained does not declare that it trains on slices of rows"):
        fit_toy(list, Net, sharding={"parallel": Parallel(context=2)})


def _held(make: Callable[[], list[Any]], cut: bool) -> int:
    """Most bytes of a forward and a backward pass of a long row."""
    network = GPT(replace(OURS, max_length=2048, dim=64, depth=4, hidden_dim=None))
    for technique in make():
        technique.transform(network)
    ids = torch.arange(2048)[None] % VOCABULARY
    batch = {"input_ids": ids, "shift_labels": ids, ROW_POSITIONS: torch.arange(2048)[None]}
    batch = own_slices({"input_ids": ids, "shift_labels": ids}) if cut else batch
    with AllocationMeter() as meter:
        network(batch["input_ids"], None, batch[ROW_POSITIONS], batch["shift_labels"]).mean().backward()
    return meter.peak


def two_by_two() -> None:
    """Two rows at a time, each of which two processes share."""
    _, logged, weights = fit("packed", rows=2)
    if dist.get_rank() == 0:
        torch.save({"logged": logged, "weights": weights}, "packed.pt")
