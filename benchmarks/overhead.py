"""Measure the speed of the command line with its callbacks relative to plain loops of PyTorch and of Lightning.

    python -m benchmarks.overhead [--rounds 5] [--steps 100] [--threads 1] [--device cpu]

All sides train the network of the language-modelling task on the same batches with the same optimizer (fused AdamW),
schedule and gradient clipping. They alternate in one process, and the CPU time of this process is measured from step 20
to the last, so that other load slows all sides alike. The command line runs the shipped configuration with all of its
callbacks, without validation. The loop of Lightning is a module of a few lines, which logs its loss, under a trainer
with Lightning's defaults (logger, progress bar, checkpoints). The targets are median ratios of at least 0.98 beside
PyTorch and 1 beside Lightning; tests/cli/test_step_cost.py bounds the number of Python calls that callbacks add to a
step.

With ``--device cuda`` all sides train on the GPU in the configuration's precision, and elapsed time is measured. The
device is synchronised only at the start and the end of the measurement. On so small a network the GPU waits for
Python, so this is the worst case, and no target is set.
"""

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent.parent / "configs" / "tasks" / "language_model.yaml"
TARGETS = {"PyTorch": 0.98, "Lightning": 1.0}
CLIP = 1.0  # as in the configuration
WARM_UP = 20


def command_line(steps: int, device: str) -> float:
    """Return the steps per second of the command line."""
    from benchmarks import step_clock
    from benchmarks.step_clock import MARKS
    from lit_efficient.__main__ import main

    MARKS.clear()
    step_clock.WAITS = {WARM_UP, steps - 1} if device == "cuda" else set()
    step_clock.now = clock_of(device)
    said = io.StringIO()
    silent = contextlib.redirect_stdout(said), contextlib.redirect_stderr(said)
    with tempfile.TemporaryDirectory() as folder, silent[0], silent[1]:
        arguments = ["fit", "--config", str(CONFIG), f"--trainer.max_steps={steps}", "--trainer.limit_val_batches=0"]
        arguments += [f"--trainer.accelerator={'gpu' if device == 'cuda' else device}", "--trainer.devices=1"]
        arguments += [f"--trainer.default_root_dir={folder}", "--trainer.callbacks+=benchmarks.step_clock.StepClock"]
        code = main([*arguments, "--allow-import", "benchmarks"])
    if code:
        sys.exit(said.getvalue())
    return (len(MARKS) - 1 - WARM_UP) / (MARKS[-1] - MARKS[WARM_UP])


def parts(device: str) -> tuple[Any, Any, Any, Any]:
    """Return network, optimizer, schedule and data of the shipped configuration."""
    import torch
    import yaml

    from lit_efficient import GPT, GPTConfig, PythonCorpus

    config = yaml.safe_load(CONFIG.read_text())
    arguments = config["model"]["init_args"]
    torch.manual_seed(config["seed_everything"])
    data = PythonCorpus(**config["data"]["init_args"])
    data.prepare_data()
    data.setup("fit")
    network = GPT(replace(GPTConfig(**arguments["model"]), vocab_size=data.vocab_size)).to(device)
    groups = [
        {"params": [p for p in network.parameters() if p.ndim >= 2], "weight_decay": arguments["weight_decay"]},
        {"params": [p for p in network.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, arguments["learning_rate"], betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
    return network, optimizer, scheduler, data


def loss_of(network: Any, ids: Any, labels: Any) -> Any:
    from lit_efficient.losses.next_token import sample_means, token_losses

    loss, _ = sample_means(token_losses(network(ids), labels), labels)
    return loss


def plain_loop(steps: int, device: str) -> float:
    """Return the steps per second of a loop in plain PyTorch."""
    import torch

    network, optimizer, scheduler, data = parts(device)
    batches = chain.from_iterable(repeat(data.train_dataloader()))
    now = clock_of(device)
    marks = []
    for step, batch in zip(range(steps), batches):
        ids, labels = (batch[key].to(device) for key in ("input_ids", "shift_labels"))
        loss = loss_of(network, ids, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        if device == "cuda" and step in {WARM_UP, steps - 1}:
            torch.cuda.synchronize()
        marks.append(now())
    return (len(marks) - 1 - WARM_UP) / (marks[-1] - marks[WARM_UP])


def lightning_loop(steps: int, device: str) -> float:
    """Return the steps per second of a plain module under Lightning's default trainer."""
    import lightning.pytorch as L

    from benchmarks import step_clock

    network, optimizer, scheduler, data = parts(device)

    class Plain(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_of(self.network, batch["input_ids"], batch["shift_labels"])
            self.log("train/loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    step_clock.MARKS.clear()
    step_clock.WAITS = {WARM_UP, steps - 1} if device == "cuda" else set()
    step_clock.now = clock_of(device)
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        run = L.Trainer(
            accelerator="gpu" if device == "cuda" else device,
            devices=1,
            max_steps=steps,
            limit_val_batches=0,
            gradient_clip_val=CLIP,
            log_every_n_steps=10,
            default_root_dir=folder,
            callbacks=[step_clock.StepClock()],
        )
        run.fit(Plain(), train_dataloaders=data.train_dataloader())
    marks = step_clock.MARKS
    return (len(marks) - 1 - WARM_UP) / (marks[-1] - marks[WARM_UP])


def clock_of(device: str) -> Callable[[], float]:
    """Return the function that reads the time: CPU time of this process, or elapsed time for a GPU."""
    return time.perf_counter if device == "cuda" else time.process_time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    sides = {"PyTorch": plain_loop, "Lightning": lightning_loop}
    ratios: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds):
        ours = command_line(options.steps, options.device)
        words = [f"round {number}: {1000 / ours:.2f} ms a step by the command line"]
        for name, side in sides.items():
            plain = side(options.steps, options.device)
            ratios[name].append(ours / plain)
            words.append(f"{1000 / plain:.2f} by {name}, ratio {ratios[name][-1]:.3f}")
        print(", ".join(words), flush=True)
    missed = False
    for name, found in ratios.items():
        median = statistics.median(found)
        missed |= median < TARGETS[name]
        print(
            f"beside {name}: median ratio {median:.3f} ({min(found):.3f} to {max(found):.3f}); "
            f"target: at least {TARGETS[name]}"
        )
    return int(missed and options.device == "cpu")


if __name__ == "__main__":
    sys.exit(main())
