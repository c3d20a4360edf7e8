"""Measure the time of help and catalogue, and the time until the first step of a training.

    python -m benchmarks.startup [--rounds 5] [--only help | step]

Help and catalogue are compared with the import of Lightning's command line. The target is at most a tenth of its time.
The first optimizer step of ``fit -c language_model``, including start-up, is compared with that of a plain Lightning
script with the same module and data. The target is at most 1.3 times. The same network in plain PyTorch is also shown.
Commands alternate, each in a fresh process with warm caches. Medians of wall time and CPU time are printed. The targets
use CPU time, because the machine may be shared.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

HELP = {
    "import lightning.pytorch.cli": ["-c", "import lightning.pytorch.cli"],
    "lit_efficient --help": ["-m", "lit_efficient", "--help"],
    "lit_efficient techniques": ["-m", "lit_efficient", "techniques"],
}
_ENDS = """
import os
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: os._exit(0))
"""
_LIGHTNING = """
import lightning.pytorch as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lit_efficient import LanguageModeling, PythonCorpus
from lit_efficient.models.networks.gpt import GPTConfig
L.seed_everything(0)
module = LanguageModeling(GPTConfig(dim=128, depth=4, num_heads=4, max_length=512), 4e-3, 0.1, 40)
data = PythonCorpus(vocab_size=2048, sequence_length=128, batch_size=8, val_batch_size=32, val_fraction=0.02)
saving = ModelCheckpoint(filename="{step}", monitor="val/loss", save_last=True)
options = {"max_steps": 1000, "val_check_interval": 250, "gradient_clip_val": 1.0, "log_every_n_steps": 10}
L.Trainer(**options, callbacks=[saving]).fit(module, data)
"""
_TORCH = """
import torch
from lit_efficient.models.networks.gpt import GPT, GPTConfig
network = GPT(GPTConfig(dim=128, depth=4, num_heads=4, max_length=512, vocab_size=2048))
optimizer = torch.optim.AdamW(network.parameters(), 4e-3)
ids = torch.randint(2048, (8, 129))
logits = network(ids[:, :-1])
torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
optimizer.step()
"""
_FIT = """
import sys
sys.argv[1:] = ["fit", "-c", "language_model"]
import runpy
runpy.run_module("lit_efficient", run_name="__main__", alter_sys=True)
"""
STEP = {
    "plain Lightning": ["-c", _ENDS + _LIGHTNING],
    "lit_efficient fit": ["-c", _ENDS + _FIT],
    "plain PyTorch": ["-c", _ENDS + _TORCH],
}


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Return the wall and CPU time of a fresh process in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
        wall = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(commands: dict[str, list[str]], rounds: int) -> dict[str, float]:
    """Print the medians and their ratios to the first command. Return the medians of CPU time."""
    for arguments in commands.values():  # what the first start pays: byte code, the disk cache
        seconds(arguments)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, arguments in commands.items():
            times[name].append(seconds(arguments))
    medians = {name: [statistics.median(kind) for kind in zip(*values)] for name, values in times.items()}
    reference = next(iter(medians))
    for name, (wall, cpu) in medians.items():
        ratios = [mine / theirs for mine, theirs in zip((wall, cpu), medians[reference])]
        print(f"{name:<30} {wall:7.3f} s {ratios[0]:7.1%}   CPU {cpu:7.3f} s {ratios[1]:7.1%} of {reference}")
    return {name: cpu for name, (_, cpu) in medians.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("help", "step"))
    arguments = parser.parse_args()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    slow = []
    if arguments.only != "step":
        cpu = compare(HELP, arguments.rounds)
        reference, *ours = cpu
        slow += [name for name in ours if cpu[name] > 0.1 * cpu[reference]]
    if arguments.only != "help":
        cpu = compare(STEP, arguments.rounds)
        script, fit, plain = cpu
        print(f"{fit}: {cpu[fit] / cpu[script]:.2f} times {script}, {cpu[fit] / cpu[plain]:.2f} times {plain}")
        if cpu[fit] > 1.3 * cpu[script]:
            slow.append(fit)
    print(f"slower than the target: {', '.join(slow)}" if slow else "all targets are reached")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
