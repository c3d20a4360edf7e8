"""Conversation in the terminal, for ``generate --chat`` without a prompt."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from lit_efficient.commands.prompts import BASE, adapter_of
from lit_efficient.mechanisms.adapters.several import adapter_names
from lit_efficient.models.generation.batched import longest_row
from lit_efficient.models.generation.sampling import Sampling
from lit_efficient.tasks.text_generation import as_chat, length_of, room_for

with contextlib.suppress(ImportError):  # not available on Windows
    import readline  # noqa: F401 (gives input() line editing)

_MOST = 512  # default limit of an answer, in tokens
_ENDED = 130  # exit code after Ctrl-C


class Conversation:
    """Conversation with a language model.

    Args:
        model: Module with a tokenizer that writes text.
        sampling: How tokens are drawn.
        max_new_tokens: Limit of an answer. None: 512 tokens, or half of the model's longest row if that is less.
        endings: Texts that end an answer.
        seed: Seed of the first answer; each later answer uses the next number.
        adapters: Adapter that answers, in a list; empty for the active ones.
    """

    def __init__(
        self,
        model: Any,
        sampling: Sampling,
        max_new_tokens: int | None,
        endings: Sequence[str],
        seed: int,
        adapters: Sequence[str | None] = (),
    ) -> None:
        self.model = model
        self.tokenizer = model.tokenizer
        self.sampling = sampling
        self.endings = endings
        self.seed = seed
        self.adapters = adapters
        # Without prompts this only checks the arguments.
        model.continuations(self.tokenizer, [], max_new_tokens=1, sampling=sampling, seeds=[], endings=endings)
        if max_new_tokens is None:
            self.most = min(_MOST, longest_row(model.network) // 2)
        else:
            self.most = max_new_tokens
        self.room = room_for(model.network, self.most)
        as_chat(self.tokenizer, "", "generate: --chat")
        self.turns: list[dict[str, str]] = []
        self.interrupted = False  # Ctrl-C was pressed since the last line

    def hold(self) -> int:
        """Answer each typed line until the input ends; return the program's exit code."""
        _say("/reset clears the conversation, /quit or Ctrl-D ends; Ctrl-C stops an answer, a second Ctrl-C ends.")
        if len(known := adapter_names(self.model.network)) > 1:
            _say(f"/adapter NAME switches to another adapter: {', '.join((*known, BASE))}.")
        while True:
            try:
                line = _read().strip()
                self.interrupted = False
                if line == "/quit":
                    return 0
                if line.startswith("/adapter"):
                    self._switch(line.removeprefix("/adapter").strip())
                elif line == "/reset":
                    self.turns = []
                    _say("(conversation cleared)")
                elif line and self._fits(line):
                    self._answer()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if self.interrupted:
                    return _ENDED
                self.interrupted = True
                _say("\n(press Ctrl-C again to end)")

    def _switch(self, name: str) -> None:
        """Let another adapter answer from now on."""
        known = adapter_names(self.model.network)
        if name not in (*known, BASE):
            _say(f"(/adapter needs one of {', '.join((*known, BASE))})")
            return
        self.adapters = [adapter_of(name)]
        _say(f"(adapter {name})")

    def _fits(self, line: str) -> bool:
        """Add the user's turn and drop the oldest turns if the prompt is too long; return whether the turn fits."""
        turns = [*self.turns, {"role": "user", "content": line}]
        count = len(turns)
        while (length := length_of(self.tokenizer, as_chat(self.tokenizer, turns))) > self.room:
            if len(turns) == 1:
                _say(f"(the message has {length} tokens, and the limit is {self.room}: shorten it)")
                return False
            turns = turns[2:]
        if len(turns) < count:
            _say(f"(the oldest {count - len(turns)} turns are dropped: the limit is {self.room} tokens)")
        self.turns = turns
        return True

    def _answer(self) -> None:
        """Print the answer to the last turn while it is generated, and add it to the turns, even if it was stopped."""
        written = ""
        shown = 0

        def watch(_: int, text: str) -> None:
            nonlocal written, shown
            written = text
            safe = len(text) - _unsure(text, self.endings)
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
                adapters=self.adapters,
            )
        except KeyboardInterrupt:
            self.interrupted = True
        self.turns.append({"role": "assistant", "content": written})
        self.seed += 1
        print(written[shown:], flush=True)
        if self.interrupted:
            _say("(stopped; press Ctrl-C again to end)")


def _unsure(text: str, endings: Sequence[str]) -> int:
    """Return how many letters at a text's end may still change: a begun ending, or an incomplete character."""
    begun = [n for ending in endings for n in range(1, len(ending)) if text.endswith(ending[:n])]
    return max([len(text) - len(text.rstrip("\ufffd")), *begun])


def _read() -> str:
    if sys.stdin is None:  # the stream is closed
        raise EOFError
    return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
