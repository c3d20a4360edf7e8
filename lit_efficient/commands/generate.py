"""``python -m lit_efficient generate --ckpt FILE --prompt TEXT``: let a trained language model write."""

import argparse
import sys
from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Continue prompts with the model of a checkpoint."""
    parser = argparse.ArgumentParser(
        "lit_efficient generate",
        description="Continue texts with the model of a checkpoint: its adapters are applied, and the averaged weights "
        "of EMA or CheckpointAverage used where the run kept some. The same seed gives the same text.",
    )
    parser.add_argument("--ckpt", required=True, help="a checkpoint of LanguageModeling, or of a task derived from it")
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; may be given several times")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's turn in the model's chat template")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token")
    parser.add_argument("--top_p", type=float, default=0.95, help="draw among the likeliest tokens of this probability")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", choices=("auto", "average", "raw"), default="auto")
    parser.add_argument("--device", help="cpu, cuda, mps, ...; the accelerator by default")
    arguments = parser.parse_args(argv)
    from lit_efficient.tasks.loading import load_language_model

    model, held = load_language_model(arguments.ckpt, arguments.weights)
    model.to(arguments.device or default_device())
    print(f"{arguments.ckpt}: {held} weights", file=sys.stderr)
    texts = model.generate_text(
        arguments.prompt,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        chat=arguments.chat,
    )
    for text in texts:
        print(text)
    return 0


def default_device() -> str:
    """The accelerator, if there is one."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type
