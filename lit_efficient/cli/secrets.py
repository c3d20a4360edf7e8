"""Secrets of a run: the run uses them, and files, logs and checkpoints show ``***`` instead.

A secret is known by the name of its key, in configs and in the environment, or by its form, as a password in a URL.
"""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lit_efficient.internals.wraps import temporarily

HIDDEN = "***"
_NAMES = re.compile(
    r"(^|_)(api_?key|passw(or)?d|pwd|passphrase|credentials?|secret(_access)?(_key)?|authorization|bearer|jwt|"
    r"(private|access|account|signing|encryption|ssh|service|subscription)_key|connection_string|"
    r"^token|(access|api|auth|bearer|bot|csrf|git(hub|lab)|hf|hub|id|refresh|secret|session|user|wandb)_token)$"
)
_NUMBERS = re.compile(r"passw|pwd|secret|api_?key")  # a token may be the number of one in a vocabulary
_FORMS = (
    (re.compile(r"://[^/\s:@'\"]*:[^/\s@]+@"), f"://{HIDDEN}@"),
    (re.compile(r"([?&][\w-]*(?i:token|api_?key|sig|signature|secret|password)=)[^&\s'\"]+"), rf"\1{HIDDEN}"),
    (re.compile(r"((?i:authorization)['\"]?\s*[:=]\s*['\"]?(?:\w+ +)?)[\w+/=.~-]{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"\b(hf_|gh[opusr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[A-Za-z0-9_-]{16,}"), HIDDEN),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----(.*?-----END [A-Z ]*PRIVATE KEY-----|.*)", re.DOTALL), HIDDEN),
)
_NAMED = re.compile(r"(\b([\w-]+)['\"]?\s*[:=]\s*['\"]?)[^\s'\",{}\[\]*]{8,}")  # as errors show a mapping
_SHORTEST = 8  # characters of a value that is searched for in any text
_known: set[str] = set()


def names_a_secret(key: str) -> bool:
    """Return whether the last part of a dotted key says that its value is a secret."""
    last = key.rpartition(".")[2]
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower().replace("-", "_")
    return bool(_NAMES.search(snake))


def remember(*trees: Mapping[str, object] | list[object]) -> None:
    """Hide the secrets of configs and of the environment from now on, in any text."""
    for tree in trees:
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            if _is_secret(key, value) and len(str(value)) >= _SHORTEST:
                _known.add(str(value))
            elif isinstance(value, Mapping | list):
                remember(value)
    for key, value in os.environ.items():
        is_path = os.path.isabs(value) and os.path.exists(value)  # as the shell's PWD
        if names_a_secret(key) and len(value) >= _SHORTEST and not is_path:
            _known.add(value)


def masked(value: object) -> Any:
    """Return a text, or plain data of any depth, without secrets."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if _is_secret(key, one) else masked(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [masked(one) for one in value]
    if isinstance(value, str):
        for secret in sorted(_known, key=len, reverse=True):  # one may be a part of another
            value = value.replace(secret, HIDDEN)
        for form, instead in _FORMS:
            value = form.sub(instead, value)
        value = _mask_named(value)
    return value


def _mask_named(text: str) -> str:
    found = _NAMED.search(text)
    while found:
        if names_a_secret(found[2]):
            text = text[: found.end(1)] + HIDDEN + text[found.end() :]
        # A value may hold the next name: `data: Data.password: 12345678`.
        found = _NAMED.search(text, found.end(1))
    return text


def print_error(message: str, code: int) -> int:
    """Print an error without secrets; return the exit code."""
    print(f"error: {masked(message)}", file=sys.stderr)
    return code


def masking(write: Callable[..., object], first: Any, *more: object, **options: object) -> object:
    """Call ``write`` with a first argument without secrets.

    Args:
        write: Function that saves a checkpoint or logs hyper-parameters.
        first: A checkpoint, of which the hyper-parameters are masked, or hyper-parameters.
        more: Further arguments.
        options: Further arguments by name.
    """
    if isinstance(first, Mapping) and "state_dict" in first:
        first = {key: masked(one) if key.endswith("hyper_parameters") else one for key, one in first.items()}
    else:
        first = masked(first if isinstance(first, Mapping) else vars(first))
    return write(first, *more, **options)


def redacted(words: Iterable[str]) -> list[str]:
    """Return the words of a command line with ``***`` instead of secrets."""
    shown: list[str] = []
    is_value = False  # the word is the value of an option that names a secret
    for word in words:
        name, equals, value = word.partition("=")
        names_one = name.startswith("-") and names_a_secret(name.lstrip("-"))
        in_mapping = any(map(names_a_secret, re.findall(r"([\w-]+)[\"']?\s*:", word)))
        if is_value or in_mapping or masked(word) != word or (names_one and value):
            keeps_name = equals and not is_value and name.startswith("-") and masked(name) == name
            shown.append(f"{name}={HIDDEN}" if keeps_name else HIDDEN)
        else:
            shown.append(word)
        is_value = names_one and not equals
    return shown


def hide_words() -> None:
    """Let W&B record command lines without secrets: it reads ``sys.argv`` when its run begins."""
    import wandb

    if getattr(wandb.init, "func", None) is not _with_hidden_words:
        wandb.init = functools.partial(_with_hidden_words, wandb.init)


def _with_hidden_words(begin: Callable[..., object], *arguments: object, **options: object) -> Any:
    with temporarily(sys, argv=redacted(sys.argv)):  # not longer: code that starts processes reads it, too
        return begin(*arguments, **options)


def _is_secret(key: object, value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return bool(_NUMBERS.search(str(key).lower())) and names_a_secret(str(key))
    return isinstance(value, str) and value != "" and names_a_secret(str(key))
