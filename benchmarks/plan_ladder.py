"""Compare `plan` with peaks measured on a GPU: the rungs of `ladder_gpu.py` that figures.json records.

    python -m benchmarks.plan_ladder            all rungs that were measured without a compiler
    python -m benchmarks.plan_ladder LoRA       rungs of these names
    python -m benchmarks.plan_ladder '8B QLoRA in tiles, 24 GiB@131072'    with rows of another length

Weights are not materialised. The loop is that of the ladder, which clears gradients after the step. The plan reproduces
the environment of the measured run: torch 2.11, whose autocast leaves RMSNorm unchanged (2.12 casts its input to
float32), AdamW's foreach kernels (except for `FUSED`), and Liger's kernel for the loss. `plan` cannot predict compiled
code, or offloading whose copies overlap with computation.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lit_efficient as le
from benchmarks.ladder_gpu import RUNGS, SHAPES, VOCABULARY, Rung
from benchmarks.plan_published import bare_trainer, predicted
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource
from lit_efficient.losses import liger_cross_entropy
from lit_efficient.surgery import mix_in

NAMES = ("base", "packed", "chunked loss", "checkpointing", "optimizer in backward")
NAMES = (*NAMES, "GaLore", "8-bit AdamW", "LoRA", "QLoRA", "activation offload", "checkpointing, offloaded")
NAMES = (*NAMES, "offloaded or recomputed", "offload", "block swap")
FUSED = (
    "base",
    "chunked loss",
    "checkpointing",
    "checkpointing, offloaded",
    "block swap",
)  # measured with AdamW's fused kernel


class NotWidened(nn.Module):
    """RMSNorm that ignores autocast, as in torch 2.11."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


class Climb(L.LightningModule):
    """The network and training loop of the ladder."""

    widened = False  # norms follow autocast

    def __init__(self, rung: Rung) -> None:
        super().__init__()
        self.rung = rung
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            shape = SHAPES[self.rung.shape]
            self.net = le.GPT(le.GPTConfig(vocab_size=VOCABULARY, max_length=self.rung.length, **shape))
            for part in self.net.modules():
                if isinstance(part, nn.RMSNorm) and not self.widened:
                    mix_in(part, NotWidened)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        packed = {"position_ids": batch["positions"]} if self.rung.packed > 1 else {}
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.net(batch["ids"], labels=batch["ids"].roll(-1, 1), **packed).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.zero_grad()

    def configure_optimizers(self) -> Any:
        how = {"fused" if self.rung in map(RUNGS.get, FUSED) else "foreach": True}
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-5, **how)


class RungFit(FitSource):
    """Makes the fit of a rung without materialising weights."""

    def __init__(self, rung: Rung, module: type[Climb] = Climb) -> None:
        self.rung = rung
        self.module = module

    def make(self, change: Change = AS_IT_IS) -> Fit:
        ids = torch.zeros(self.rung.length, dtype=torch.long)
        positions = torch.arange(self.rung.length) % (self.rung.length // self.rung.packed)
        trainer = bare_trainer([*self.rung.techniques(), *change.callbacks()])
        rows = [{"ids": ids, "positions": positions}] * (2 * self.rung.batch)
        with torch.device("meta"):
            return Fit(trainer, self.module(self.rung), DataLoader(rows, self.rung.batch))


def measured() -> dict[str, float]:
    """Return the recorded peaks of a GPU's allocator in GiB, by rung."""
    records = json.loads((Path(__file__).parent / "records" / "figures.json").read_text())["records"]
    rungs = [one for one in records if one.get("table") == "gpu"]
    return {one["id"].removeprefix("gpu/"): one["figures"]["peak_gib"] for one in rungs}


def main() -> int:
    peaks = measured()
    results = {}
    for wanted in sys.argv[1:] or NAMES:
        name, _, length = wanted.partition("@")
        rung = RUNGS[name]
        peak = peaks.get(name, math.nan)
        if length:
            rung = replace(rung, length=int(length))
            peak = math.nan
        with mock.patch.object(liger_cross_entropy, "installed", return_value=True):
            found = predicted(RungFit(rung), peak)
        results[wanted] = {"measured": peak, **found}
        shown = f"{found['gib']:6.2f} GiB  {found['error']:+.1f} %  {found['kinds']}"
        print(f"{wanted:24} {peak:6.2f} GiB  {shown}", flush=True)
    print("RESULT " + json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
