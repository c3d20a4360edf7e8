"""Measure the speed of the command line with its callbacks relative to a plain PyTorch loop of the same model.

    python -m benchmarks.overhead [--rounds 5] [--steps 100] [--threads 1] [--device cpu]

Both sides train the network of the language-modelling task on the same batches with the same optimizer and gradient
clipping. They alternate, each in a separate process. Time is measured from step 20 to the last. The command line runs
the shipped configuration with all of its callbacks, without validation. The default is one thread, because with more
threads than idle cores the result depends on other programs. The target is a median ratio of at least 0.95.

With ``--device cuda`` both sides train on the GPU in the configuration's precision. The device is synchronised only at
the start and the end of the measurement. On so small a network the GPU waits for Python, so this is the worst case, and
no target is set.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs" / "tasks" / "language_model.yaml"
WARM_UP = 20


def command_line(steps: int, device: str) -> float:
    from benchmarks import step_clock
    from benchmarks.step_clock import MARKS
    from lit_efficient.__main__ import main

    step_clock.WAITS = {WARM_UP, steps - 1} if device == "cuda" else set()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["fit", "--config", str(CONFIG), f"--trainer.max_steps={steps}", "--trainer.limit_val_batches=0"]
        arguments += [f"--trainer.accelerator={'gpu' if device == 'cuda' else device}", "--trainer.devices=1"]
        arguments += [f"--trainer.default_root_dir={folder}", "--trainer.callbacks+=benchmarks.step_clock.StepClock"]
        code = main([*arguments, "--allow-import", "benchmarks"])
    assert code == 0, code
    return (len(MARKS) - 1 - WARM_UP) / (MARKS[-1] - MARKS[WARM_UP])


def plain_loop(steps: int, device: str) -> float:
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
        marks.append(time.perf_counter())
    return (len(marks) - 1 - WARM_UP) / (marks[-1] - marks[WARM_UP])


def in_a_process(side: str, steps: int, threads: int, device: str) -> float:
    command = [sys.executable, "-m", "benchmarks.overhead", "--side", side, "--steps", str(steps), "--device", device]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--side", choices=["command_line", "plain_loop"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        rate = {"command_line": command_line, "plain_loop": plain_loop}[options.side](options.steps, options.device)
        print(json.dumps(rate))
        return 0
    ratios = []
    for number in range(options.rounds):
        ours, plain = (
            in_a_process(side, options.steps, options.threads, options.device)
            for side in ("command_line", "plain_loop")
        )
        ratios.append(ours / plain)
        print(f"round {number}: {ours:.2f} steps/s by the command line, {plain:.2f} plain, ratio {ratios[-1]:.3f}")
    median = statistics.median(ratios)
    print(f"median ratio {median:.3f} ({min(ratios):.3f} to {max(ratios):.3f}); target: at least 0.95")
    return 0 if median >= 0.95 or options.device == "cuda" else 1


if __name__ == "__main__":
    sys.exit(main())
