"""``python -m lit_efficient convert CKPT --output FILE``: a checkpoint in shards as one file."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lit_efficient.distributed.shards import read_checkpoint
from lit_efficient.errors import refusal
from lit_efficient.files.checkpoints import write


def run(argv: Sequence[str]) -> int:
    """Answer ``convert``."""
    parser = argparse.ArgumentParser(
        "lit_efficient convert",
        description="Write a checkpoint that several processes have written in shards as one file, with the states of "
        "its optimizers: any strategy resumes from it. ShardedStrategy reads files and folders alike.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CKPT", help="a folder of shards, or a run's folder")
    parser.add_argument("--output", required=True, help="file to write: .ckpt, or .safetensors for weights alone")
    options = parser.parse_args(argv)
    if Path(options.output).suffix not in (".ckpt", ".safetensors"):
        raise refusal("convert", "--output", "a file ending in .ckpt or .safetensors", options.output)
    checkpoint = read_checkpoint(options.checkpoint, optimizers=Path(options.output).suffix == ".ckpt")
    write(options.output, checkpoint)
    print(f"Wrote {len(checkpoint['state_dict'])} tensors to {options.output}.")
    return 0
