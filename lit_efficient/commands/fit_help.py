"""Help of ``fit``, ``validate``, ``test`` and ``predict``, and ``--NAME.help`` for the arguments of one class.

Uses only the standard library.
"""

import re
import shutil
from collections.abc import Sequence

from lit_efficient.catalog import Card, arguments_of, read_cards, read_third_party
from lit_efficient.commands.card import argument_lines, wrapped

_DOES = {
    "fit": "Train the model of a config.",
    "validate": "Evaluate a checkpoint on the validation data of a config.",
    "test": "Evaluate a checkpoint on the test data of a config.",
    "predict": "Compute a checkpoint's predictions for the data of a config.",
}
_COLUMN = 28
_CONFIGS = """
configs: later ones override earlier ones; an option overrides the configs before it
  -c CONFIG                 a complete run, by name or file; `configs` lists names
  -c OVERLAY                changes to the run: -c ema, -c loggers/wandb, mine.yaml
  --print_config            print the merged config; `check -c ...` builds it and stops

techniques: `techniques` lists them, `techniques --for oom` ranks those that save memory
  -c NAME                   add one by its overlay, with recommended arguments
  --trainer.callbacks+=NAME add one by its class, with default arguments
  --without NAME            remove one that a config has
  --NAME.help               arguments of a technique, task, data module or optimizer: --EMA.help

every key of a config is an option
"""
_FIT = """\
  --trainer.KEY VALUE       --trainer.max_steps 1000, --trainer.precision bf16-mixed, --trainer.devices 2
  --model.KEY, --data.KEY   --model.learning_rate 1e-3, --data.batch_size 8
  --optimizer NAME          --optimizer AdamW --optimizer.lr 1e-3, --lr_scheduler CosineAnnealingLR
  --ckpt_path FILE          resume from a checkpoint; last: the newest one
"""
_OTHERS = """\
  --trainer.KEY VALUE       --trainer.devices 1, --trainer.limit_test_batches 10
  --model.KEY, --data.KEY   --data.batch_size 8
  --ckpt_path FILE          checkpoint to evaluate
"""
_END = """\
  --allow-import PACKAGE    allow configs to name classes of your package
  --help-all                list all options    (--debug: show tracebacks)"""


def answer(command: str, arguments: Sequence[str]) -> bool:
    """Print the requested help and return True; return False if this module has no help for the arguments."""
    width = max(40, shutil.get_terminal_size().columns)
    if {"-h", "--help"} & {*arguments}:
        print(short(command, width))
        return True
    matches = (re.fullmatch(r"--([A-Z]\w*)\.help", word) for word in arguments)
    asked = [match[1].lower() for match in matches if match]
    if not asked:
        return False
    cards = {card.name.lower(): card for card in [*read_cards(), *read_third_party()[0]]}
    if any(name not in cards for name in asked):
        return False
    print("\n\n".join(arguments_text(cards[name], width) for name in asked))
    return True


def short(command: str, width: int) -> str:
    """Return the short help of a command."""
    head = f"usage: python -m lit_efficient {command} -c CONFIG [-c OVERLAY ...] [OPTIONS]\n\n{_DOES[command]}\n"
    options = _FIT if command == "fit" else _OTHERS
    lines: list[str] = []
    for line in (head + _CONFIGS + options + _END).splitlines():
        indent = _COLUMN if line.startswith("  ") else 2
        lines += wrapped(line, width, " " * indent) or [""]
    return "\n".join(lines)


def arguments_text(card: Card, width: int) -> str:
    """Return the help of a class: its arguments and how to set them."""
    place = "a block of arguments" if card.is_block else card.slot
    lines = [f"{card.name} ({place})", *wrapped(card.summary, width), ""]
    for one in arguments_of(card):
        if one["default"]:
            default = f" = {one['default']}"
        else:
            default = "  (required)"
        lines += wrapped(f"  {one['name']}: {one['type']}{default}", width, " " * 6)
        lines += wrapped(one["help"], width - 6, start=" " * 6)
    if card.is_block or not card.signature:  # a dataclass documents its fields in the docstring
        lines += [f"  {line}" for line in argument_lines(card.arguments, width - 2)] or ["  no arguments"]
    else:
        sign = "+=" if card.slot.startswith("trainer.") else "="
        use = f"In a run: --{card.slot}{sign}{card.name} --{card.slot}.ARGUMENT VALUE"
        lines += ["", *wrapped(use, width, "  ")]
    return "\n".join([*lines, f"Its card: python -m lit_efficient techniques {card.name}"])
