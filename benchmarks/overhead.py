"""Measure the speed of the command line with its callbacks relative to a plain PyTorch loop of the same model.

    python -m benchmarks.overhead [--rounds 5] [--steps 100] [--threads 1] [--device cpu]

Both sides train the network of the language-modelling task on the same batches with the same optimizer (fused AdamW)
and gradient clipping. They alternate in one process, and the CPU time of this process is measured from step 20 to the
last, so that other load slows both sides alike. The command line runs the shipped configuration with all of its
callbacks, without validation. The target is a median ratio of at least 0.98; tests/cli/test_step_cost.py bounds the
number of Python calls that callbacks add to a step.

With ``--device cuda`` both sides train on the GPU in the configuration's precision, and elapsed time is measured. The
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
from pathlib import Path

CONFIG = Path(__file__).parent.parent / "configs" / "tasks" / "language_model.yaml"
TARGET = 0.98
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


def plain_loop(steps: int, device: str) -> float:
    """Return the steps per second of a loop in plain PyTorch."""
    from dataclasses import replace
    from itertools import chain, repeat

    import torch
    import yaml

    from lit_efficient import GPT, GPTConfig, PythonCorpus
    from lit_efficient.losses.next_token import sample_means, token_losses

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
    batches = chain.from_iterable(repeat(data.train_dataloader()))
    now = clock_of(device)
    marks = []
    for step, batch in zip(range(steps), batches):
        ids, labels = (batch[key].to(device) for key in ("input_ids", "shift_labels"))
        loss, _ = sample_means(token_losses(network(ids), labels), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config["trainer"]["gradient_clip_val"])
        optimizer.step()
        scheduler.step()
        if device == "cuda" and step in {WARM_UP, steps - 1}:
            torch.cuda.synchronize()
        marks.append(now())
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
    ratios = []
    for number in range(options.rounds):
        ours = command_line(options.steps, options.device)
        plain = plain_loop(options.steps, options.device)
        ratios.append(ours / plain)
        print(
            f"round {number}: {1000 / ours:.2f} ms a step by the command line, {1000 / plain:.2f} plain, "
            f"ratio {ratios[-1]:.3f}",
            flush=True,
        )
    median = statistics.median(ratios)
    print(f"median ratio {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f}); target: at least {TARGET}")
    return 0 if median >= TARGET or options.device == "cuda" else 1


if __name__ == "__main__":
    sys.exit(main())
