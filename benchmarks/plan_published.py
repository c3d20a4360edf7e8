"""Predict published figures by `plan`: torchtune's table of peak memory for Llama 3.2 3B on one A100.

    python -m benchmarks.plan_published

The table is "Optimization flags" in torchtune's README (https://github.com/pytorch/torchtune, since November 2024). It
lists full finetuning of Llama 3.2 3B in bf16 at batch size 2, with texts packed to 4096 tokens, and adds one technique
on each rung. LoRA and QLoRA include all of them except the fused optimizer step and the 8-bit AdamW. "Peak memory
active" is the allocator's value.

The network repeats torchtune's modules operator by operator: norms and rotary embeddings in float32, keys and values
copied for grouped heads, and a tied head whose logits are cast to float32. As in torchtune, the loop clears gradients
after the step. From the second rung on, torchtune compiles network and loss, which `plan` cannot predict. With
activation checkpointing the compiled network saves the same tensors as the eager one. The compiled loss keeps logits in
16 bits and their log-sum-exp, and computes each chunk's gradient immediately. :class:`CompiledLoss` reproduces this.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lit_efficient as le
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource

WIDTH = 3072
LAYERS = 28
HEADS = 24
GROUPS = 8
HIDDEN = 8192
WORDS = 128256
BATCH = 2
LENGTH = 4096
CHUNKS = 8


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.scale


class Rotation(nn.Module):
    """Rotary position embedding, shared by all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(131072, WIDTH // HEADS // 2, 2), False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        turn = self.cache[positions].float()
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        turn = turn.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        first = pairs[..., 0] * turn[..., 0] - pairs[..., 1] * turn[..., 1]
        second = pairs[..., 1] * turn[..., 0] + pairs[..., 0] * turn[..., 1]
        return torch.stack([first, second], -1).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, rotated: nn.Module) -> None:
        super().__init__()
        self.rotated = rotated
        narrow = WIDTH // HEADS * GROUPS
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.output_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, narrow, bias=False)
        self.v_proj = nn.Linear(WIDTH, narrow, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.rotated(self.q_proj(x).view(batch, length, HEADS, -1), positions).transpose(1, 2)
        k, v = (layer(x).view(batch, length, GROUPS, -1) for layer in (self.k_proj, self.v_proj))
        k = self.rotated(k, positions).transpose(1, 2)
        v = v.transpose(1, 2)
        shape = (batch, GROUPS, HEADS // GROUPS, length, WIDTH // HEADS)
        k, v = (one.unsqueeze(2).expand(shape).flatten(1, 2) for one in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(out.transpose(1, 2).contiguous().view(batch, length, -1))


class Block(nn.Module):
    def __init__(self, rotated: nn.Module) -> None:
        super().__init__()
        self.sa_norm = Norm()
        self.attn = Attention(rotated)
        self.mlp_norm = Norm()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.attn(self.sa_norm(x), positions) + x
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        rotated = Rotation()
        self.layers = nn.ModuleList(Block(rotated) for _ in range(LAYERS))
        self.norm = Norm()

    def forward(self, tokens: Tensor, positions: Tensor, chunked: bool) -> Any:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        x = self.norm(x)
        if chunked:
            return [F.linear(piece, self.tok_embeddings.weight) for piece in x.chunk(CHUNKS, 1)]
        return F.linear(x, self.tok_embeddings.weight).float()


class CompiledLoss(torch.autograd.Function):
    """Summed cross-entropy of a chunk, with one kernel for each direction. Logits stay in 16 bits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        sums = logits.new_empty(logits.shape[0], dtype=torch.float32)
        ctx.save_for_backward(logits, labels, sums)
        return sums.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None


class Finetuning(L.LightningModule):
    """torchtune's recipe for finetuning.

    Args:
        chunked: Whether logits are computed in chunks.
        optimizer: Function from the trainable parameters to the optimizer.
    """

    def __init__(self, chunked: bool, optimizer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.chunked = chunked
        self.optimizer = optimizer
        self.net: Any = None

    def configure_model(self) -> None:
        self.net = self.net or Llama()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        logits = self.net(batch["tokens"], batch["positions"], self.chunked)
        if not self.chunked:
            return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))
        pairs = zip(logits, labels.chunk(CHUNKS, 1))
        return sum(CompiledLoss.apply(one.flatten(0, 1), label.flatten()) for one, label in pairs)  # type: ignore[return-value]

    def on_train_batch_end(self, *_: Any) -> None:
        self.zero_grad()

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad])


ADAMW = partial(torch.optim.AdamW, lr=2e-5, fused=True)
LORA = partial(le.LoRA, 64, 128.0, [r".*\.q_proj", r".*\.v_proj", r".*\.output_proj", r".*\.w[123]"])


@dataclass(frozen=True)
class Rung:
    """A line of the table.

    Args:
        name: Name in torchtune's table.
        gib: Published peak in GiB.
        techniques: Function that returns the techniques.
        chunked: Whether the loss is computed in chunks.
        why_not: Reason why the rung is not predicted.
    """

    name: str
    gib: float
    techniques: Callable[[], list[Any]] = list
    chunked: bool = True
    why_not: str = ""


def _checkpointed() -> list[Any]:
    return [le.ActivationCheckpointing(blocks=r"layers\.\d+")]


def _offloaded() -> list[Any]:
    return [*_checkpointed(), le.ActivationOffload(blocks=r"layers\.\d+")]


RUNGS = (
    Rung("Baseline", 25.5, why_not="its batches are as long as their texts happen to be"),
    Rung("+ Packed Dataset", 60.0, chunked=False),
    Rung("+ Compile", 51.0, why_not="what compiled kernels keep is not traced"),
    Rung("+ Chunked Cross Entropy", 42.9, why_not="what compiled kernels keep is not traced"),
    Rung("+ Activation Checkpointing", 24.9, _checkpointed),
    Rung("+ Fuse optimizer step into backward", 23.1, lambda: [*_checkpointed(), le.OptimizerInBackward()]),
    Rung("+ Activation Offloading", 21.8, lambda: [*_offloaded(), le.OptimizerInBackward()]),
    Rung("+ 8-bit AdamW", 17.6, lambda: [*_offloaded(), le.OptimizerInBackward(), le.LowBitOptimizer(keep_32bit=())]),
    Rung("LoRA", 8.5, lambda: [*_offloaded(), LORA()]),
    Rung("QLoRA", 4.6, lambda: [*_offloaded(), LORA(), le.QuantizeBase()]),
)


def bare_trainer(callbacks: list[Any], accelerator: str = "cpu") -> L.Trainer:
    """Return a trainer for a few steps in bfloat16 that writes no files."""
    return L.Trainer(
        accelerator=accelerator,
        devices=1,
        precision="bf16-true",
        callbacks=callbacks,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class RungFit(FitSource):
    """Makes the fit of a rung without materialising weights."""

    def __init__(self, rung: Rung) -> None:
        self.rung = rung

    def make(self, change: Change = AS_IT_IS) -> Fit:
        tokens = torch.zeros(LENGTH, dtype=torch.long)
        rows = [{"tokens": tokens, "labels": tokens, "positions": tokens}] * (2 * BATCH)
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
        trainer = bare_trainer([*self.rung.techniques(), *change.callbacks()], accelerator)
        with torch.device("meta"):
            return Fit(trainer, Finetuning(self.rung.chunked, ADAMW), DataLoader(rows, BATCH))


def predicted(source: FitSource, known: float) -> dict[str, Any]:
    """Return the text of the predicted peak in GiB and its error in percent, and the figures."""
    begin = time.process_time()
    found = le.plan(source, device="cuda")
    gib = found.peak / 2**30
    kinds = {kind: round(size / 2**30, 2) for kind, size in found.kinds.items() if size >= 2**24}
    told = {"gib": round(gib, 2), "error": round(100 * (gib / known - 1), 1), "kinds": kinds}
    return {**told, "notes": found.notes, "cpu_seconds": round(time.process_time() - begin, 1)}


def main() -> int:
    results: dict[str, Any] = {}
    for rung in RUNGS:
        try:
            found = {"why_not": rung.why_not} if rung.why_not else predicted(RungFit(rung), rung.gib)
        except le.LitEfficientError as error:
            found = {"why_not": str(error).splitlines()[0]}
        results[rung.name] = {"published": rung.gib, **found}
        shown = found.get("why_not") or f"{found['gib']:6.2f} GiB  {found['error']:+.1f} %  {found['kinds']}"
        print(f"{rung.name:36} {rung.gib:5.1f} GiB  {shown}", flush=True)
    print("RESULT " + json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
