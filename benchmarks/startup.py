"""How long help and the catalogue take to answer, beside importing Lightning's own command line.

    python benchmarks/startup.py [--rounds 5]

The three commands alternate, each in a fresh process, and medians are compared: at most a tenth is the promise.
"""

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "import lightning.pytorch.cli": ["-c", "import lightning.pytorch.cli"],
    "lit_efficient --help": ["-m", "lit_efficient", "--help"],
    "lit_efficient techniques": ["-m", "lit_efficient", "techniques"],
}


def seconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for arguments in COMMANDS.values():  # what the first start pays: byte code, the disk cache
        seconds(arguments)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            times[name].append(seconds(arguments))
    medians = {name: statistics.median(values) for name, values in times.items()}
    reference = medians["import lightning.pytorch.cli"]
    for name, median in medians.items():
        print(f"{name:<30} {median:7.3f} s   {median / reference:6.1%} of the import")
    slow = [name for name in COMMANDS if name.startswith("lit_efficient") and medians[name] > reference / 10]
    print(f"more than a tenth: {', '.join(slow)}" if slow else "all within a tenth")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
