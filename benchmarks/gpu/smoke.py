"""Train six steps with one technique on a small GPT, a small DiT or a user's network, and count waits for the device.

    python -m benchmarks.gpu.smoke --list
    python -m benchmarks.gpu.smoke "LoRA dora" [--device cuda] [--precision 32-true bf16-mixed]

Prints a line ``RESULT {...}`` for each precision: the loss, the peak of the device's memory, and the number of
synchronisations with the device in a step, by line of code. CUDA reports the synchronisations
(``torch.cuda.set_sync_debug_mode``). The line is the innermost one of this package on the stack, or else of torch or
Lightning. A run fails if the loss is not finite, if no parameter changes, or if a trainable tensor is not on the
device.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import math
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader

import lit_efficient as le
from benchmarks.gpu.cases import CASES, Case

STEPS = 6
COUNTED = (4, 5)  # Waits are counted in the last two steps, after warm-up.
VOCABULARY = 512
LENGTH = 128


class User(L.LightningModule):
    """LightningModule of a user, whose network is built in ``__init__`` on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.net(batch["input_ids"][:, :64].float() / VOCABULARY).float().square().mean()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-3)


class Convolutions(User):
    """LightningModule of a user, with a convolutional network on images of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)]
        self.net = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Sequential(*layers))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = batch["input_ids"][:, :64].float() / VOCABULARY
        return self.net(x.view(-1, 8, 8)).float().square().mean()


def shape() -> Any:
    return le.GPTConfig(vocab_size=VOCABULARY, dim=64, depth=4, num_heads=4, num_kv_heads=2, max_length=256)


def gpt() -> L.LightningModule:
    return le.LanguageModeling(shape(), warmup_steps=1)


def llama() -> L.LightningModule:
    fields = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    return le.LanguageModeling(le.CausalLMConfig(config_fields={"model_type": "llama", **fields}), warmup_steps=1)


def experts() -> L.LightningModule:
    fields = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    fields |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    fields |= {"num_experts": 4, "num_experts_per_tok": 2, "model_type": "qwen3_moe"}
    return le.LanguageModeling(le.CausalLMConfig(config_fields=fields), warmup_steps=1)


def dit() -> L.LightningModule:
    backbone = le.DiTConfig(channels=2, size=8, patch_size=2, width=64, depth=4, heads=2)
    return le.LatentDiffusion(backbone=backbone, sampling_steps=3, samples=le.Samples(0))


def preference() -> L.LightningModule:
    return le.Preference(shape(), warmup_steps=1)


def packed() -> list[dict[str, torch.Tensor]]:
    return [{**row, "position_ids": torch.arange(LENGTH) % 48} for row in tokens()]


def tokens() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(64):
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        rows.append({"input_ids": ids, "shift_labels": ids.roll(-1)})
    return rows


def pairs() -> list[dict[str, torch.Tensor]]:
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in tokens()]
    return [
        {
            f"{kind}_{key}": value.roll(int(kind == "chosen"))
            for kind in ("chosen", "rejected")
            for key, value in row.items()
        }
        for row in rows
    ]


def latents() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"latents": torch.randn(2, 8, 8, generator=generator), "labels": torch.tensor(i % 10)} for i in range(64)]


class CountWaits(L.Callback):
    """Callback that counts CUDA's synchronisation warnings in the last steps by line of code (none on a CPU)."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.places = collections.Counter[str]()
        self.shown: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.cuda and batch_idx in COUNTED and self.shown is None:
            self.shown = warnings.showwarning
            self.filters = warnings.filters[:]
            warnings.simplefilter("always")
            warnings.showwarning = self.note
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self.shown is not None:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = self.shown
            warnings.filters[:] = self.filters
            self.shown = None

    def note(self, message: Any, category: Any, filename: str, lineno: int, *_: object) -> None:
        if "called a synchronizing" not in str(message):  # the mode itself is announced, too
            return
        frames = [f for f in traceback.extract_stack()[:-1] if "warnings.py" not in f.filename]
        ours = [f for f in frames if "/lit_efficient/" in f.filename]
        frame = (ours or frames)[-1]
        self.places[f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno}"] += 1


MODULES = {
    **{"gpt": gpt, "llama": llama, "experts": experts, "dit": dit, "preference": preference},
    **{"user": User, "convolutions": Convolutions},
}
ROWS = {"tokens": tokens, "packed": packed, "pairs": pairs, "latents": latents}


def run(case: Case, precision: str, device: str) -> dict[str, Any]:
    """Train six steps. Return the results."""
    L.seed_everything(0, verbose=False)
    cuda = device == "cuda"
    count = CountWaits(cuda)
    module = MODULES[case.module]()
    losses = []
    if case.optimizer is not None:
        module.configure_optimizers = lambda: case.optimizer(module.parameters())

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.before = {n: p.detach().clone() for n, p in pl_module.named_parameters() if p.requires_grad}

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: object) -> None:
            losses.append(outputs["loss"].detach() if isinstance(outputs, dict) else outputs.detach())

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            now = {n: p for n, p in pl_module.named_parameters() if n in self.before}
            self.moved = sum(not torch.equal(p.detach(), self.before[n]) for n, p in now.items())
            self.elsewhere = [n for n, p in now.items() if p.device.type != device]

    watch = Watch()
    settings = {"limit_val_batches": 0, "enable_checkpointing": False, **case.trainer}
    accumulate = settings.get("accumulate_grad_batches", 1)
    trainer = L.Trainer(
        accelerator="gpu" if cuda else "cpu", devices=1, precision=precision, logger=False,
        max_steps=-(-STEPS // accumulate), callbacks=[*case.callbacks(), watch, count], enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, **settings,
    )  # fmt: skip
    loader = DataLoader(ROWS[case.rows](), 4)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    try:
        trainer.fit(module, loader, loader if settings["limit_val_batches"] else None)
    finally:
        count.stop()
    seconds = time.perf_counter() - start
    loss = [float(value) for value in losses]
    assert all(map(math.isfinite, loss)), f"losses {loss}"
    assert watch.moved, f"none of {len(watch.before)} tensors that train has moved"
    assert not (case.on_device and watch.elsewhere), f"not on {device}: {watch.elsewhere[:3]} of {len(watch.elsewhere)}"
    return {
        "loss": [round(loss[0], 4), round(loss[-1], 4)],
        "seconds": round(seconds, 2),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1) if cuda else None,
        "waits_a_step": round(sum(count.places.values()) * accumulate / len(COUNTED), 1) if cuda else None,
        "places": dict(count.places.most_common()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=list(CASES))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--precision", nargs="+")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list or options.case is None:
        print("\n".join(CASES))
        return 0
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    case = CASES[options.case]
    failed = False
    if options.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.1)  # several cases share the device
    for precision in options.precision or case.precision:
        try:
            found = run(case, precision, options.device)
        except Exception as error:
            failed = True
            own = [f for f in traceback.extract_tb(error.__traceback__) if "/lit_efficient/" in f.filename]
            place = f" at {'/'.join(Path(own[-1].filename).parts[-2:])}:{own[-1].lineno}" if own else ""
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"}
            traceback.print_exc()
        print("RESULT " + json.dumps({precision: found}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
