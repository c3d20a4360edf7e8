"""Plan the rungs of torchtune's table of peak memory with our GPT in place of its network, for a GPU.

    python -m benchmarks.plan_beside_torchtune           all rungs
    python -m benchmarks.plan_beside_torchtune LoRA      rungs of these names

Weights are bfloat16 without autocast, as in torchtune's recipes, and AdamW is torch's fused kernel. torchtune compiles
network and loss on each rung. Here norms, rotary positions and gates are compiled, with 4-bit weights nothing. Weights
are not materialised. The published peaks were measured on an A100: `benchmarks/plan_published.py` names their source.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

import lit_efficient as le
from benchmarks.ladder_gpu import Rung, qlora, small
from benchmarks.plan_ladder import Climb, RungFit
from benchmarks.plan_published import predicted


def recomputed() -> list[Any]:
    return [*small(), le.MemoryEfficientLayers("compile")]


def offloaded() -> list[Any]:
    return [*recomputed(), le.ActivationOffload()]


RUNGS: dict[str, tuple[float, Rung]] = {
    "checkpointing": (24.9, Rung(recomputed)),
    "optimizer in backward": (23.1, Rung(lambda: [*recomputed(), le.OptimizerInBackward()])),
    "offloaded": (21.8, Rung(lambda: [*offloaded(), le.OptimizerInBackward()])),
    "8-bit AdamW": (
        17.6,
        Rung(lambda: [*offloaded(), le.OptimizerInBackward(), le.LowBitOptimizer(keep_32bit=())]),
    ),
    "LoRA": (8.5, Rung(lambda: [*offloaded(), le.LoRA(rank=16)])),
    "QLoRA": (4.6, Rung(lambda: [*qlora(), le.ActivationOffload()])),
    "8B QLoRA": (7.4, Rung(qlora, shape="8B", batch=1, length=2048)),
}
"""Published peaks in GiB, and the rungs."""


class Plain(Climb):
    """The network in bfloat16 with torch's own norms, and the fused AdamW."""

    widened = True

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["ids"], labels=batch["ids"].roll(-1, 1)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-5, fused=True)


def main() -> int:
    results = {}
    for name in sys.argv[1:] or RUNGS:
        published, rung = RUNGS[name]
        found = predicted(RungFit(rung, Plain), published)
        results[name] = {"published": published, **found}
        print(f"{name:24} {published:6.2f} GiB  {found['gib']:6.2f} GiB  {found['kinds']}", flush=True)
    print("RESULT " + json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
