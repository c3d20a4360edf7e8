"""``python -m lit_efficient export CKPT --format peft | merged | gguf | safetensors | diffusers --output DIR``."""

import argparse
from collections.abc import Sequence
from typing import Any


def run(argv: Sequence[str]) -> int:
    """Run ``export``."""
    parser = argparse.ArgumentParser("lit_efficient export", description="Export a checkpoint for other programs.")
    parser.add_argument("checkpoint", help="a Lightning checkpoint")
    parser.add_argument(
        "--format",
        choices=("peft", "merged", "gguf", "safetensors", "diffusers"),
        default="safetensors",
        help="default: safetensors, one file of weights with adapters merged; merged is a folder for transformers",
    )
    parser.add_argument("--output", required=True, help="a new folder")
    parser.add_argument(
        "--base",
        help="the frozen base model, if the checkpoint neither contains nor names it: a transformers folder for merged "
        "and peft, else a checkpoint or safetensors file. peft writes this name as the base into the adapter's config",
    )
    parser.add_argument(
        "--weights",
        choices=("auto", "average", "raw", "ema"),
        default="auto",
        help="auto: the weights that validation used, which are the average if the run kept one",
    )
    parser.add_argument(
        "--no_check",
        "--no-check",
        dest="check",
        action="store_false",
        help="skip the check, which loads the folder in a new process and needs memory for a second copy of the model",
    )
    parser.add_argument(
        "--gguf_type",
        "--gguf-type",
        choices=("f16", "q8_0", "bf16", "f32"),
        help="for gguf: number format of the matrices (default: f16)",
    )
    parser.add_argument(
        "--max_shard_size",
        "--max-shard-size",
        metavar="SIZE",
        help="for merged: largest file of weights, such as 500MB (default: 5GB)",
    )
    parser.add_argument(
        "--lora",
        choices=("merged", "diffusers"),
        help="for diffusers: merge adapters (merged, the default) or write a file for load_lora_weights (diffusers)",
    )
    parser.add_argument(
        "--wandb",
        action="store_true",
        help="log the files at Weights & Biases as an artifact that names the training's run and the checkpoint, if a "
        "WandbLogger recorded the training",
    )
    arguments = parser.parse_args(argv)
    training = None
    if arguments.wandb:
        from lit_efficient.cli.wandb_exports import log_export, training_of
        from lit_efficient.errors import check_installed

        check_installed("export: wandb", "wandb")
        training = training_of(arguments.checkpoint)
    diffusers = arguments.format == "diffusers"
    if arguments.lora is not None and not diffusers:
        parser.error(f"--lora does not belong to --format {arguments.format}")
    for option, owner in (("gguf_type", "gguf"), ("max_shard_size", "merged")):
        if getattr(arguments, option) is not None and arguments.format != owner:
            parser.error(f"--{option} does not belong to --format {arguments.format}")
    asked: dict[str, Any] = {"weights": arguments.weights, "base": arguments.base, "check": arguments.check}
    if diffusers:
        from lit_efficient.export.pipelines import export_pipeline

        asked["lora"] = arguments.lora or "merged"
        folder = export_pipeline(arguments.checkpoint, arguments.output, **asked)
    else:
        from lit_efficient.export.adapters import export_checkpoint

        folder = export_checkpoint(
            arguments.checkpoint,
            arguments.output,
            arguments.format,
            gguf_type=arguments.gguf_type,
            max_shard_size=arguments.max_shard_size,
            **asked,
        )
    print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")
    if training is not None:
        print(log_export(training, folder, arguments.format))
    return 0
