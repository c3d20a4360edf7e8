"""Train the GPT of examples/reinforcement_learning.py over several seeds: ``python -m benchmarks.policy_arithmetic``.

Prints the share of exact answers to held-out sums before and after GRPO, drawn at temperature 1, and the CPU time.
Fails if a seed starts above 0.5, ends below 0.95, or takes longer than ten minutes of CPU time.
"""

import argparse
import runpy
import sys
import tempfile
import time

from benchmarks import figures
from benchmarks.clock import use_one_thread

START = 0.5
GOAL = 0.95
SECONDS = 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    options = parser.parse_args()
    use_one_thread()
    train = runpy.run_path(str(figures.ROOT / "examples" / "reinforcement_learning.py"))["main"]
    failed = []
    for seed in options.seeds:
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            found = train(folder, seed)
        seconds = time.process_time() - start
        before = found["before"]["exact"]
        after = found["after"]["exact"]
        shares = f"{before:.3f} to {after:.3f}, greedily {found['greedily']['exact']:.3f}"
        print(f"seed {seed}: {shares}, {seconds:.0f} CPU-seconds", flush=True)
        if before > START or after < GOAL or seconds > SECONDS:
            failed.append(seed)
    if failed:
        print(f"Missed by seeds {failed}")
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
