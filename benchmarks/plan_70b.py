"""Measure the time and memory that `plan` needs for Llama 3.1 70B. Target: at most 60 s and 4 GiB.

    python -m benchmarks.plan_70b [--length 4096]

Plans LoRA on all linear layers over a 4-bit base, with activation checkpointing. The network is built from its
published configuration on the meta device. Prints elapsed seconds, CPU seconds and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import Any

BEGIN = time.monotonic()

import lightning.pytorch as L  # noqa: E402 (imports count)
import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import lit_efficient as le  # noqa: E402
from lit_efficient.evidence.fits import AS_IT_IS, Change, Fit, FitSource  # noqa: E402

# config.json of meta-llama/Llama-3.1-70B
FIELDS = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


class Llama70B(FitSource):
    """Makes the fit of Llama 3.1 70B. A smaller ``layers`` gives a smaller network."""

    def __init__(self, length: int = 4096, layers: int = 80) -> None:
        self.length = length
        self.fields = {**FIELDS, "num_hidden_layers": layers}

    def make(self, change: Change = AS_IT_IS) -> Fit:
        tokens = torch.zeros(self.length, dtype=torch.long)
        techniques = [le.QuantizeBase(), le.LoRA(rank=16), le.ActivationCheckpointing(), le.ChunkedCrossEntropy()]
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            precision="bf16-true",
            callbacks=[*techniques, *change.callbacks()],
            max_steps=4,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with torch.device("meta"):
            module = le.LanguageModeling(le.CausalLMConfig(config_fields=self.fields), warmup_steps=0)
        return Fit(trainer, module, DataLoader([{"input_ids": tokens, "labels": tokens}] * 4, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=80)
    options = parser.parse_args()
    found = le.plan(Llama70B(options.length, options.layers), device="cuda")
    result: dict[str, Any] = {
        "seconds": round(time.monotonic() - BEGIN, 1),
        "cpu_seconds": round(time.process_time(), 1),
        "gib_of_the_process": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "parameters": found.parameters,
        "trainable": found.trainable,
        "peak_gib": round(found.peak / 2**30, 2),
        "kinds": {kind: round(size / 2**30, 2) for kind, size in found.kinds.items() if size >= 2**24},
        "notes": list(found.notes),
    }
    print("RESULT " + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
