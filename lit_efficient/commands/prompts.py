"""Options that ``generate``, ``sample`` and ``write-data`` share: prompts, checkpoint and device."""

import argparse
import io
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.files.runs import newest_runs

Turns = list[dict[str, str]]
BASE = "base"  # name of the choice of no adapter


def prompts_of(given: Sequence[str], owner: str, texts_alone: str = "") -> list[str | Turns]:
    """Return the prompts of a command line: its texts, or the content of the file that it names."""
    if len(given) == 1 and _is_file(given[0]):
        return read_prompts(Path(given[0]), owner, texts_alone)
    return list(given)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # the text is too long for a file name
        return False


def read_prompts(path: Path, owner: str, texts_alone: str = "") -> list[str | Turns]:
    """Return the prompts of a file.

    Args:
        path: A ``.jsonl`` with ``prompt`` or ``messages`` in each row, or a text file with one prompt per line.
        owner: Name of the command, for messages.
        texts_alone: Advice for the error about ``messages``, if only texts are supported.

    Raises:
        ConfigurationError: If a row has neither; the message names the line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{owner}: {path} is not UTF-8: {error}") from error
    lines = text.replace("\r\n", "\n").split("\n")  # not splitlines(): JSON may contain other line breaks
    if path.suffix != ".jsonl":
        prompts: list[str | Turns] = [line for line in lines if line.strip()]
    else:
        where = f"{owner}: {path}"
        rows = [(line, f"{where}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
        prompts = [_prompt_of(line, place, texts_alone) for line, place in rows]
    if not prompts:
        raise ConfigurationError(f"{owner}: {path} holds no prompts")
    return prompts


def _prompt_of(line: str, where: str, texts_alone: str) -> str | Turns:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        row = {}  # refused below
    prompt = row.get("prompt")
    turns = row.get("messages")
    if isinstance(prompt, str):
        return prompt
    spoken = isinstance(turns, list) and all(
        isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in turns
    )
    if not turns or not spoken or turns[-1]["role"] == "assistant":
        raise ConfigurationError(
            f'{where} must have a text in "prompt", or turns with role and content in "messages", and the last turn '
            "must not be the assistant's"
        )
    if texts_alone:
        raise ConfigurationError(f"{where} has messages: {texts_alone}")
    return turns


def default_device() -> str:
    """Return the type of the accelerator, or "cpu" if there is none."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return "cpu"
    return found.type


def add_model_options(parser: argparse.ArgumentParser, ckpt: str, several: bool = False) -> None:
    """Add the options ``--ckpt`` (described by ``ckpt``; ``several``: one or more), ``--weights`` and ``--device``."""
    count = "+" if several else None
    about = f"{ckpt}, or a run's folder for its last checkpoint"
    parser.add_argument("--ckpt", nargs=count, help=about)
    parser.add_argument(
        "--weights", choices=("auto", "average", "raw"), default="auto", help="auto: the weights that validation used"
    )
    parser.add_argument("--device", help="cpu, cuda, mps, ... (default: the accelerator)")


def check_ckpt(arguments: argparse.Namespace, command: str) -> None:
    """Check that ``--ckpt`` is given.

    Raises:
        ConfigurationError: If it is not. The message lists the newest runs below ``runs``.
    """
    if arguments.ckpt:
        return
    lines = [f"{command} needs --ckpt: a checkpoint, or a run's folder for its last checkpoint"]
    newest = newest_runs(Path("runs"))
    if newest:
        lines.append("The newest runs:")
        lines += [f"  python -m lit_efficient {command} --ckpt {shlex.quote(str(folder))} ..." for folder in newest]
    else:
        lines.append("No run was found in the folder 'runs'. `python -m lit_efficient fit -c CONFIG` begins one.")
    raise ConfigurationError("\n".join(lines))


def load_model(
    load: Callable[[str, Any], tuple[Any, str]], arguments: argparse.Namespace, ckpt: str | None = None
) -> tuple[Any, dict[str, str]]:
    """Return the model that the options name, on its device, and its checkpoint and kind of weights; print both.

    ``ckpt`` is one of several checkpoints of the options.
    """
    from lit_efficient.files.checkpoints import newest_in

    path = str(newest_in(ckpt or arguments.ckpt))
    model, held = load(path, arguments.weights)
    print(f"{path}: {held} weights", file=sys.stderr)
    return model.to(arguments.device or default_device()), {"checkpoint": path, "weights": held}


def adapter_of(name: str) -> str | None:
    """Return the adapter that a user names; None for the base alone."""
    return None if name == BASE else name


def adapters_of(given: Sequence[str], model: Any, prompts: int) -> list[str | None]:
    """Return the adapter of each prompt; one given adapter is for all. ``NAME=FOLDER`` is loaded into the model.

    Raises:
        ConfigurationError: If the number of adapters is another one, or an adapter does not fit.
    """
    from lit_efficient.mechanisms.adapters.several import adapter_names, load_beside

    names = []
    for one in given:
        name, _, folder = one.partition("=")
        if folder:
            load_beside(model, name, folder)
        if name not in (*adapter_names(model), BASE):
            known = ", ".join((*adapter_names(model), BASE))
            raise refusal("generate", "--adapter", f"one of {known}, or NAME=FOLDER", name)
        names.append(adapter_of(name))
    if len(names) not in (0, 1, prompts):
        raise refusal("generate", "--adapter", f"given once, or for each of {prompts} prompts", list(given))
    return names * prompts if len(names) == 1 else names


def forgiving_streams() -> None:
    """Replace characters that the terminal cannot encode instead of raising an error."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
