"""``python -m lit_efficient convert CKPT --output FILE``: write a sharded checkpoint as one file."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import refusal
from lit_efficient.files.checkpoints import write


def run(argv: Sequence[str]) -> int:
    """Run ``convert``."""
    parser = argparse.ArgumentParser(
        "lit_efficient convert",
        description="Write a sharded checkpoint of several processes as one file, with the states of its optimizers, "
        "so that any strategy can resume from it. ShardedStrategy reads both files and folders.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a folder of shards, or a run's folder")
    parser.add_argument("--output", required=True, help="file to write: .ckpt, or .safetensors for only the weights")
    options = parser.parse_args(argv)
    if Path(options.output).suffix not in (".ckpt", ".safetensors"):
        raise refusal("convert", "--output", "a file ending in .ckpt or .safetensors", options.output)
    checkpoint = read_checkpoint(options.checkpoint, optimizers=Path(options.output).suffix == ".ckpt")
    write(options.output, checkpoint)
    print(f"Wrote {len(checkpoint['state_dict'])} tensors to {options.output}.")
    return 0
