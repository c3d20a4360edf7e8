"""``python -m lit_efficient``: help, version and the catalogue answer before torch is imported."""

import sys

if __name__ == "__main__":  # before any other import: the working directory may have a torch.py of another origin
    import os  # Python has imported it already

    # Python put the working directory first; under `python -c`, by the name "". A program that calls runpy may have
    # taken it out or have another first entry, which stays.
    _here = os.getcwd()
    if sys.path[:1] in ([""], [_here]) and not sys.flags.safe_path:
        del sys.path[0]
    _parent = os.path.join(os.path.dirname(__file__), os.pardir)
    _checkout = os.path.isdir(_here) and os.path.samefile(_here, _parent)
    if _checkout or any(_word.replace("_", "-").startswith("--allow-import") for _word in sys.argv):
        sys.path.append(_here)  # in the last place, where it can hide nothing
    if not _checkout:
        os.environ.setdefault("PYTHONSAFEPATH", "1")  # for processes that this one starts

import os
import signal
from collections.abc import Sequence

from lit_efficient import __version__
from lit_efficient.commands import COMMANDS, RUNS
from lit_efficient.errors import EXIT_CODES, LitEfficientError, OutOfMemoryError, is_out_of_memory

SUBCOMMANDS = (*RUNS, *COMMANDS)

HELP = f"""lit_efficient {__version__}: training-efficiency techniques for PyTorch Lightning that compose,
resume bit-exactly and prove what they save.

usage: python -m lit_efficient COMMAND ...

  fit         train:    -c CONFIG [-c OVERLAY ...] [--without NAME] [--trainer.max_steps 100 ...] [--ckpt_path FILE]
  check       check that a fit reaches its first step, without reading data:    -c CONFIG [...]
  plan        predict memory by kind, FLOPs and the largest batch of a fit, or find changes with which it fits:
              -c CONFIG [--device-memory 24GiB] [--devices 8] [--solve max_length]
  tune        search the fastest settings of a fit within a memory limit, at the same effective batch, and write an
              overlay:    -c CONFIG --device_memory 24GiB [--minutes 20] [--allow_changes]
  sweep       train each combination of values, on all GPUs, and print a table:
              -c CONFIG --grid model.learning_rate=1e-3,3e-4 --grid seed_everything=0,1 [--trials 20]
  verify      check that a training computes what it claims: accumulation, resuming, masks, exports, ...
              -c CONFIG [...] [--only A,B] [--full] [--json]
  compare     measure time and memory that techniques save on a config:    -c CONFIG --with lora ema | --all
  validate    evaluate a checkpoint on the validation data:    -c CONFIG --ckpt_path FILE
  test        evaluate a checkpoint on the test data
  predict     compute a checkpoint's predictions
  techniques  list all techniques by purpose; `techniques NAME` prints a card, `--for oom` ranks techniques that save
              memory, `--matrix` lists conflicts    [--for memory | speed | quality | safety | oom] [--json]
  configs     list the configs of the package; CONFIG is a name in this list, or a file    [--json]
  copy        write a config of the package into a file to edit:    NAME [FILE]
  report      write an HTML page with charts of runs, side by side:    RUN [RUN ...] [--output FILE.html | --serve]
  preview     show a batch of tokens without training: trained, masked, packed, truncated    -c CONFIG.yaml
  cache-latents  encode the images of a config once for all runs:    -c CONFIG.yaml [--batch_size 32 --device cuda]
  average     write the weighted mean of checkpoints:    CKPT... --output FILE
  convert     write a sharded checkpoint as one file:    CKPT --output FILE
  ema-sweep   build averages of any width after a run with PowerEMA:    DIR --sigma_rel 0.05 0.10 0.15
              and validate each, as a table and a plot:    ... -c CONFIG.yaml --checkpoint FILE
  evaluate    run tasks of lm-eval on a language model:    --ckpt FILE --tasks TASK ... [--limit 100 --output FILE.json]
  generate    continue texts with a language model:    --ckpt FILE --prompt TEXT [--temperature 0.8 --seed 0]
              or chat with it:    --ckpt FILE --chat
  sample      draw images with a diffusion model:    --ckpt FILE --output FILE.png [--classes 0,3 | --prompts TEXT ...]
  tokenizer   train a tokenizer on text:    --kind superbpe | bpe --vocab_size 4096 --output DIR [--paths FOLDER ...]
  write-data  write training data by a teacher model:    --ckpt FILE | --model NAME --prompts FILE --output FILE.jsonl
  select-data  keep the best rows, by loss or gradient:  --method rho | less --ckpt FILE --output DIR -c X.yaml
  export      export weights for other programs:    CKPT --format peft | merged | gguf | ... --output DIR
  completion  print a script for the shell that completes commands, options and names:    bash | zsh | fish
  schema      print a JSON schema of configs, with which editors complete keys and mark typos:
              > lit_efficient.schema.json
  new-technique  write the files of a technique of your own, with a test that passes:    NAME

COMMAND --help and help COMMAND list the options of a command. A config imports the classes that it names; your own
package needs --allow-import PACKAGE. --quiet prints only errors, warnings and the last lines, --debug the traceback of
an error. --version prints the version.

exit codes: {", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())},
128+n after signal n

examples:
  python -m lit_efficient fit -c language_model
  python -m lit_efficient fit -c language_model -c stochastic_depth"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The words after the program's name; ``None`` for those of this process.

    Returns:
        An exit code of :data:`lit_efficient.errors.EXIT_CODES`, or 128 + n after signal n.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command == "help" and len(arguments) > 1:
        command, arguments = arguments[1], [arguments[1], *arguments[2:], "--help"]
    if command in ("-h", "--help", "help"):
        print(_fitted(HELP))
        return 0
    if command == "--version":
        print(f"lit_efficient {__version__}")
        return 0
    if command not in SUBCOMMANDS and not command.startswith("-"):
        import difflib

        near = difflib.get_close_matches(command, SUBCOMMANDS, n=1)
        hint = ""
        if near:
            hint = f" Did you mean {near[0]}?"
        print(f"error: there is no command {command!r}.{hint} Commands: {', '.join(SUBCOMMANDS)}.", file=sys.stderr)
        return 2
    try:
        return _run(command, arguments)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _run(command: str, arguments: list[str]) -> int:
    from lit_efficient.internals.import_noise import silence_imports

    silence_imports()
    if command in COMMANDS:
        return _run_command(command, arguments[1:])
    if any(word in ("-h", "--help") or word.endswith(".help") for word in arguments):
        from lit_efficient.commands.fit_help import answer

        if command in RUNS and answer(command, arguments[1:]):
            return 0
    from lit_efficient.cli import run

    return run(["--help" if word in ("--help-all", "--help_all") else word for word in arguments])


def _fitted(text: str) -> str:
    """Return the help in the terminal's width. Continued lines are indented."""
    import re
    import shutil
    import textwrap

    width = max(40, shutil.get_terminal_size().columns)
    lines = re.sub(r"\n {14}|(?<=[a-z,:])\n(?=\w)", " ", text).splitlines()
    indents = [" " * (14 if line.startswith("  ") and "python -m" not in line else 0) for line in lines]
    fitted = [
        textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
        for line, indent in zip(lines, indents)
    ]
    return "\n".join(line for part in fitted for line in part)


def _run_command(command: str, arguments: list[str]) -> int:
    """Run a command that needs no trainer, and print errors that the user can correct as a sentence."""
    from importlib import import_module

    from lit_efficient.cli.words import spelt

    try:
        given = spelt([argument for argument in arguments if argument != "--debug"])
        return int(import_module(f"lit_efficient.commands.{command.replace('-', '_')}").run(given))
    except SystemExit as end:  # argparse raises it after --help or for a wrong option
        if isinstance(end.code, int):
            return end.code
        raise
    except BrokenPipeError:  # the reader has closed the pipe
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for what Python still flushes at its end)
        return 0
    except Exception as error:
        code = None
        if isinstance(error, LitEfficientError | OSError):
            code = getattr(error, "exit_code", 2)
        elif is_out_of_memory(error):  # imports torch, for other errors alone
            code = OutOfMemoryError.exit_code
        if code is None or "--debug" in arguments:
            raise
        print(f"error: {error}", file=sys.stderr)
        return code


if __name__ == "__main__":
    try:
        code = main()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt from here on shows no traceback
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # `... | head` has closed the pipe
        sys.stdout = None
        code = 0
    sys.exit(code)
