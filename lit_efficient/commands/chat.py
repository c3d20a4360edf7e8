"""A conversation in the terminal: ``generate --chat`` without a prompt."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from lit_efficient.models.generation.batched import longest_row
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.tasks.text_generation import as_chat, length_of, room_for

with contextlib.suppress(ImportError):  # Windows has none
    import readline  # noqa: F401 (input() edits lines by it)

_MOST = 512  # tokens of an answer, where nothing is said
_ENDED = 130  # by Ctrl-C


class Conversation:
    """What was said, and how to go on: answers of at most 512 tokens (or half of what the model reads) if no number is
    given, the first one by the seed, each later one by the next.
    """

    def __init__(
        self, model: Any, sampling: Sampling, max_new_tokens: int | None, endings: Sequence[str], seed: int
    ) -> None:
        self.model, self.tokenizer = model, model.tokenizer
        how: dict[str, Any] = {"max_new_tokens": 1, "sampling": sampling, "seeds": [], "endings": endings}
        model.continuations(self.tokenizer, [], **how)  # or it says why it cannot
        self.sampling, self.endings, self.seed = sampling, endings, seed
        self.most = min(_MOST, longest_row(model.network) // 2) if max_new_tokens is None else max_new_tokens
        self.room = room_for(model.network, self.most)
        as_chat(self.tokenizer, "", "generate: --chat")
        self.turns: list[dict[str, str]] = []
        self.interrupted = False  # and nothing typed since

    def hold(self) -> int:
        """Answer each line that is typed, until there are no more; return the program's exit code."""
        _say("/reset forgets what was said, /quit or Ctrl-D ends; Ctrl-C stops an answer, and once more it ends.")
        while True:
            try:
                line = _read().strip()
                self.interrupted = False
                if line == "/quit":
                    return 0
                if line == "/reset":
                    self.turns = []
                    _say("(forgotten)")
                elif line and self._fits(line):
                    self._answer()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if self.interrupted:
                    return _ENDED
                self.interrupted = True
                _say("\n(Ctrl-C once more ends)")

    def _fits(self, line: str) -> bool:
        """Add the user's turn, and take the oldest ones away that leave no room."""
        turns = [*self.turns, {"role": "user", "content": line}]
        count = len(turns)
        while (length := length_of(self.tokenizer, as_chat(self.tokenizer, turns))) > self.room:
            if len(turns) == 1:
                _say(f"(that has {length} tokens, and there is room for {self.room}: say it in fewer words)")
                return False
            turns = turns[2:]
        if len(turns) < count:
            _say(f"(the oldest {count - len(turns)} turns are dropped: there is room for {self.room} tokens)")
        self.turns = turns
        return True

    def _answer(self) -> None:
        """Print the answer to the last turn while it is written, and add it, stopped or not."""
        written, shown = "", 0

        def watch(_: int, text: str) -> None:
            nonlocal written, shown
            written, safe = text, len(text) - _unsure(text, self.endings)
            if safe > shown:
                print(text[shown:safe], end="", flush=True)
                shown = safe

        try:
            ((written, _),) = self.model.continuations(
                self.tokenizer,
                [as_chat(self.tokenizer, self.turns)],
                max_new_tokens=self.most,
                sampling=self.sampling,
                seeds=[self.seed],
                special=False,
                endings=self.endings,
                watch=watch,
            )
        except KeyboardInterrupt:
            self.interrupted = True
        self.turns.append({"role": "assistant", "content": written})
        self.seed += 1
        print(written[shown:], flush=True)
        if self.interrupted:
            _say("(stopped; Ctrl-C once more ends)")


def _unsure(text: str, endings: Sequence[str]) -> int:
    """How many letters at the end of a text may still become an ending, or another letter."""
    begun = [n for ending in endings for n in range(1, len(ending)) if text.endswith(ending[:n])]
    return max([len(text) - len(text.rstrip("\ufffd")), *begun])


def _read() -> str:
    if sys.stdin is None:  # closed
        raise EOFError
    return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
