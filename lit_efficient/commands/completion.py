"""``python -m lit_efficient completion bash``: print a completion script for a shell.

Uses only the standard library. The words are read from the sources when the script is printed, so that pressing the tab
key does not start Python.
"""

import argparse
import ast
import functools
from collections.abc import Iterator, Sequence

from lit_efficient.catalog import PACKAGE, PURPOSES, read_cards, source
from lit_efficient.commands import COMMANDS, RUNS
from lit_efficient.commands.plan import SOLVES
from lit_efficient.files import configs

# Options of a run whose value is a class. Other commands have options of the same name with other values.
_OF_CLASSES = ("model", "data", "optimizer")
SHELLS = ("bash", "zsh", "fish")
_PROGRAM = "lit-efficient"
_HOW = {
    "bash": 'eval "$(lit-efficient completion bash)"    in ~/.bashrc',
    "zsh": 'eval "$(lit-efficient completion zsh)"    in ~/.zshrc, below compinit',
    "fish": "lit-efficient completion fish > ~/.config/fish/completions/lit-efficient.fish",
}
_OF_RUNS = [
    "-c",
    "--config",
    "--print_config",
    "--seed_everything",
    "--model",
    "--data",
    "--optimizer",
    "--lr_scheduler",
    "--ckpt_path",
]
_OF_RUNS += ["--without", "--allow-import", "--debug", "--help", "--help-all"]


def run(argv: Sequence[str]) -> int:
    """Run ``completion``."""
    parser = argparse.ArgumentParser(
        "lit_efficient completion",
        description="Print a script for a shell that completes commands, options, configs and techniques.",
        epilog="\n".join(f"{shell:<6}{line}" for shell, line in _HOW.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS)
    print({"bash": bash, "zsh": zsh, "fish": fish}[parser.parse_args(argv).shell]())
    return 0


def options() -> dict[str, list[str]]:
    """Return the options of each command."""
    of_runs = [*_OF_RUNS, *(f"--trainer.{name}" for name in _trainer_arguments())]
    found = dict.fromkeys(RUNS, of_runs)
    for command in COMMANDS:
        tree = _command(command)
        own = [*_added(tree), *_added_by_helpers(tree), "--help"]
        if command in like_runs():
            own += of_runs
        found[command] = list(dict.fromkeys(own))
    return found


@functools.cache
def like_runs() -> tuple[str, ...]:
    """Return the commands that accept the options of a run."""
    passes_on = [
        command
        for command in COMMANDS
        if any(isinstance(n, ast.Attribute) and n.attr == "parse_known_args" for n in ast.walk(_command(command)))
    ]
    return (*RUNS, *passes_on)


def _command(name: str) -> ast.Module:
    return ast.parse((PACKAGE / "commands" / f"{name.replace('-', '_')}.py").read_text("utf-8"))


def _added_by_helpers(tree: ast.AST) -> Iterator[str]:
    """Yield options that a command adds by functions of another command's file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lit_efficient.commands."):
            names = {each.name for each in node.names}
            for part in _command(str(node.module).rpartition(".")[2]).body:
                if isinstance(part, ast.FunctionDef) and part.name in names:
                    yield from _added(part)


def _added(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = [part.value for part in node.args if isinstance(part, ast.Constant)]
            yield from (name for name in names if isinstance(name, str) and name.startswith("-"))


def _trainer_arguments() -> list[str]:
    """Return the arguments of Lightning's Trainer, read from its source, because importing it is slow."""
    path = source("lightning.pytorch.trainer.trainer")
    if path:
        tree = ast.parse(path.read_text("utf-8"))
    else:
        tree = ast.Module([], [])
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Trainer":
            init = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
            return [one.arg for one in (*init.args.args[1:], *init.args.kwonlyargs)]
    return []


def values() -> dict[str, list[str]]:
    """Return the words that may follow an option or a command."""
    cards = read_cards()
    of = {slot: [card.name for card in cards if card.slot == slot and not card.is_block] for slot in _OF_CLASSES}
    techniques = [card.name for card in cards if card.slot in ("trainer.callbacks", "trainer.plugins")]
    names = list(configs.known())
    return {
        **dict.fromkeys(("-c", "--config", "copy"), names),
        "--without": techniques,
        **{f"--{slot}": found for slot, found in of.items()},
        "--for": [*PURPOSES, "oom"],
        "--solve": [*SOLVES],
        "techniques": [card.name for card in cards],
        "completion": [*SHELLS],
        "help": [*RUNS, *COMMANDS],
    }


def bash() -> str:
    """Return the script for bash. Words are separated by line breaks, because names of files may have spaces."""
    known = values()
    follow = "\n".join(f"        {name}) words='{' '.join(known[name])}';;" for name in known if name[0] == "-")
    commands = "\n".join(
        f"            {name}) words='{' '.join([*found, *known.get(name, [])])}';;"
        for name, found in {**options(), "help": []}.items()
    )
    return f"""\
# {_HOW["bash"]}
_lit_efficient() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD - 1]}}"
    local IFS=$' \\t\\n' words='' files='' first=''
    if [ "$cur" = '=' ]; then cur=''; elif [ "$prev" = '=' ]; then prev="${{COMP_WORDS[COMP_CWORD - 2]}}"; fi
    case "$cur" in --*=*) prev="${{cur%%=*}}" first="${{cur%%=*}}=" cur="${{cur#*=}}";; esac
    case "$prev" in
        --{" | --".join(_OF_CLASSES)})
            case "${{COMP_WORDS[1]}}" in {" | ".join(like_runs())}) ;; *) prev=--other;; esac;;
    esac
    case "$prev" in
{follow}
        --*) case "$cur" in -*) ;; *) COMPREPLY=(); return;; esac;;
    esac
    case "$prev" in -c | --config) files=yes;; esac
    if [ -z "$words" ]; then
        case "${{COMP_WORDS[1]}}" in
{commands}
            *) words='{" ".join([*RUNS, *COMMANDS, "help", "--help", "--version"])}';;
        esac
        case "$cur" in -*) ;; *) words=$(printf '%s\\n' $words | grep -v '^-');; esac
    fi
    words=$(compgen -P "$first" -W "$words" -- "$cur")
    IFS=$'\\n'
    COMPREPLY=($words)
    if [ "$files" ]; then
        compopt -o filenames 2>/dev/null
        COMPREPLY+=($(compgen -P "$first" -f -- "$cur"))
    fi
}}
complete -o default -F _lit_efficient {_PROGRAM}"""


def zsh() -> str:
    """Return the script for zsh, which can read bash's."""
    return f"# {_HOW['zsh']}\nautoload -U +X bashcompinit && bashcompinit\n{bash().partition(chr(10))[2]}"


def fish() -> str:
    """Return the script for fish."""
    known = values()
    lines = [f"# {_HOW['fish']}"]

    def line(condition: str, words: Sequence[str], *more: str) -> None:
        quoted = " ".join(words)
        lines.append(" ".join([f'complete -c {_PROGRAM} -n "{condition}"', *more, f"-a '{quoted}'"]))

    line("__fish_is_first_token", [*RUNS, *COMMANDS, "help", "--help", "--version"], "-f")
    for command, found in {**options(), "help": []}.items():
        seen = f"__fish_seen_subcommand_from {command}"
        for name in found:
            short, dashes = ("-s", 1) if name[1] != "-" else ("-l", 2)
            flag = f'complete -c {_PROGRAM} -n "{seen}" {short} {name[dashes:]}'
            if name[2:] not in _OF_CLASSES or command in like_runs():
                follows = known.get(name, [])
            else:
                follows = []
            takes = "-r" if name in ("-c", "--config") else "-x"  # -r: also files, -x: only these words
            lines.append(f"{flag} {takes} -a '{' '.join(follows)}'" if follows else flag)
        if command in known:
            line(f"{seen}; and not __fish_seen_subcommand_from {' '.join(known[command])}", known[command], "-f")
    return "\n".join(lines)
