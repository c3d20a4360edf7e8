"""Text generation for several sequences of any lengths in one batch, with any causal network.

Networks that keep the keys and values of their tokens, and nothing else, are continued in :mod:`.cached_rows`: each
different prompt is read once, all rows draw a token in each step, and a waiting prompt takes the place of a row that
has ended. Others (recurrent states, convolutions, learned prefixes) are read without padding: all rows up to the end of
the shortest, then token by token, where a longer prompt supplies its own next token in the place of a drawn one.

The random numbers of a sample depend on its seed only. Its text therefore does not depend on the other rows, up to
rounding.

Saves: reading the weights from memory for every row but one; reading a prompt for every sample of it but one
"""

import inspect
import math
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, check_number, refusal
from lit_efficient.internals.hugging_face import forget_positions, image_token_ids
from lit_efficient.internals.torch_linear import linear_by_onednn
from lit_efficient.models.generation.cached_rows import CachedRows, Prompts
from lit_efficient.models.generation.pictured import continue_pictured
from lit_efficient.models.generation.sampling import UNIT, Sampling, drawn, penalized, remaining
from lit_efficient.models.networks.gpt import GPT, KVCache
from lit_efficient.models.probes.modes import evaluating, whole_precision
from lit_efficient.models.probes.output_head import hidden_states

End = Literal["stop", "written", "length"]


@dataclass
class Sample:
    """Continuation of a prompt.

    Args:
        tokens: new token ids, including the last one.
        end: ``stop`` (the last token is in ``stop``), ``written`` (the function ``written`` ended it), or ``length``.
        log_probs: log-probability of each token under the network: ``log_softmax(logits)``, without temperature,
            penalty and filters. It is what a training forward computes.
        drawn_log_probs: log-probability of each token under the distribution that it was drawn from, with temperature,
            penalty and filters.
        between: ids that somebody else wrote between the tokens, by the number of tokens before them. `generate`
            writes none.
    """

    tokens: list[int] = field(default_factory=list)
    end: End = "length"
    log_probs: list[float] = field(default_factory=list)
    drawn_log_probs: list[float] = field(default_factory=list)
    between: dict[int, list[int]] = field(default_factory=dict)


def longest_row(network: nn.Module) -> int:
    """Return the maximum number of tokens that a `GPT` or a causal model of transformers reads."""
    if isinstance(network, GPT):
        return network.config.max_length
    config: Any = network.config
    positions = int(getattr(config.get_text_config(), "max_position_embeddings", None) or 0)
    return positions if positions > 0 else 1 << 30


def arguments_of(network: nn.Module) -> set[str]:
    """Return the argument names of a network's forward, including those of the classes that it inherits from."""
    forwards = [vars(kind)["forward"] for kind in type(network).__mro__ if "forward" in vars(kind)]
    return {name for forward in forwards for name in inspect.signature(forward).parameters}


def usual_tokens(network: Any) -> Tensor:
    """Return about 16 token ids that are not special tokens, spread over the vocabulary, on the CPU."""
    if isinstance(network, GPT):
        ids = torch.arange(network.head.out_features)
    else:
        config = network.config.get_text_config()
        ids = torch.arange(config.vocab_size)
        special: list[int | None] = [*image_token_ids(network.config)]  # refused without an image
        for name in ("pad", "bos", "eos"):
            found = getattr(config, f"{name}_token_id", None)
            special += found if isinstance(found, list) else [found]
        left_out = torch.tensor([token for token in special if token is not None], dtype=torch.int64)
        usual = ids[~torch.isin(ids, left_out)]
        if len(usual):
            ids = usual
    return ids[:: max(1, len(ids) // 16)]


@torch.no_grad()
def generate(
    network: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    sampling: Sampling,
    seeds: Sequence[int],
    stop: set[int],
    written: Callable[[int, list[int]], bool] | None = None,
    rows: int | None = None,
    device: torch.device | None = None,
    pictured: Mapping[int, Mapping[str, Tensor]] = MappingProxyType({}),
) -> list[Sample]:
    """Continue each prompt by at most ``max_new_tokens`` ids, up to and including the first id in ``stop``.

    Several samples of a prompt are given as equal prompts with different seeds. Unlike ``generate`` of transformers
    this function neither reads nor changes the global random state.

    Args:
        network: a `GPT`, or a causal model of transformers.
        prompts: ids of each prompt, at least one.
        max_new_tokens: maximum number of tokens to add, for all prompts or for each.
        sampling: parameters of sampling.
        seeds: seed of each prompt's random numbers.
        stop: ids that end a text.
        written: called after each token with the number of its prompt and all new ids of it; if it returns true, the
            sample ends.
        rows: maximum number of rows in a batch. None: all prompts.
        device: device on which the network computes. None: that of its weights.
        pictured: inputs of the prompts with images by their numbers, as the model's processor makes them. Each such
            prompt is a batch.

    Raises:
        ConfigurationError: for arguments out of range, and for a prompt that leaves no room for new tokens.
    """
    sampling.check("generate")
    room = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    for most in room:
        check_number("generate", "max_new_tokens", most, least=1, whole=True)
    check_number("generate", "rows", rows, least=1, whole=True, null=True)
    if len(seeds) != len(prompts):
        raise refusal("generate", "seeds", f"one for each of the {len(prompts)} prompts", seeds)
    longest = longest_row(network)
    for prompt, most in zip(prompts, room):
        if not 0 < len(prompt) <= longest - most:
            raise ConfigurationError(
                f"generate: prompts must have 1 to {longest - most} tokens, because the network reads "
                f"{longest}, got one of {len(prompt)} tokens"
            )
    if not prompts:
        return []
    device = device or next(network.parameters()).device
    samples = [_Row(i, prompt, room[i], seeds[i]) for i, prompt in enumerate(prompts)]
    writer = _Writer(network, device, sampling, stop, written, rows or len(prompts))
    forget_positions(network)
    texts = [row for row in samples if row.number not in pictured]
    with evaluating(network), linear_by_onednn():
        for number, inputs in pictured.items():
            writer.read_pictured(samples[number], inputs)
        if texts and _is_cached(network, max(row.start + row.most for row in texts), device):
            writer.replace_rows(texts)
        else:
            for first in range(0, len(texts), writer.size):
                writer.read_on(texts[first : first + writer.size])
    return [row.sample for row in samples]


class _Row:
    """Sample that is being written."""

    def __init__(self, number: int, prompt: Sequence[int], most: int, seed: int) -> None:
        self.number = number
        self.ids = list(prompt)
        self.start = len(prompt)
        self.most = most
        draw = torch.Generator("cpu").manual_seed(seed)
        uniform = torch.rand(most, generator=draw, dtype=torch.float64, device="cpu")
        self.uniform = (uniform * UNIT).long().tolist()
        self.sample = Sample()
        self.ended = False

    @property
    def left(self) -> int:
        """Return the number of tokens that may follow."""
        return self.most - len(self.sample.tokens)


class _Writer:
    """Writes rows in batches of at most ``size``."""

    def __init__(
        self,
        network: nn.Module,
        device: torch.device,
        sampling: Sampling,
        stop: set[int],
        written: Callable[[int, list[int]], bool] | None,
        size: int,
    ) -> None:
        self.network = network
        self.device = device
        self.sampling = sampling
        self.stop = stop
        self.written = written
        self.size = size

    def replace_rows(self, samples: Sequence[_Row]) -> None:
        """Write samples in one cache, where the next prompts take the places of rows that end."""
        cached = CachedRows(self.network, arguments_of(self.network))
        waiting = deque(samples)
        unread = Counter(tuple(row.ids) for row in samples)  # samples of each prompt that have not begun
        read: dict[tuple[int, ...], tuple[Prompts, int]] = {}
        live: list[_Row] = []
        while waiting or live:
            kept = [i for i, row in enumerate(live) if not row.ended]
            free = self.size - len(kept)
            if len(kept) == len(live) and not (waiting and free):
                tokens = torch.tensor([row.ids[-1] for row in live], device=self.device)
                self._draw(live, cached.read(tokens))
                continue
            new = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            self._read_prompts(cached, read, new)
            begun = Counter(tuple(row.ids) for row in new)
            order = list(begun)
            new.sort(key=lambda row: order.index(tuple(row.ids)))  # rows of one prompt are neighbours in the cache
            live = [live[i] for i in kept] + new
            if not live:
                return
            added = [(*read[prompt], count) for prompt, count in begun.items()]
            cached.change(kept, added, max(row.left for row in live))
            if new:
                logits = [one.logits[number].expand(count, -1) for one, number, count in added]
                self._draw(new, torch.cat(logits))
            unread -= begun
            read = {prompt: found for prompt, found in read.items() if prompt in unread}

    def _read_prompts(
        self, cached: CachedRows, read: dict[tuple[int, ...], tuple[Prompts, int]], rows: Sequence[_Row]
    ) -> None:
        """Add the prompts of ``rows`` to ``read``, in batches whose rows are padded to at most twice their length."""
        prompts = sorted({tuple(row.ids) for row in rows} - read.keys(), key=len)
        while prompts:
            batch = [prompt for prompt in prompts if len(prompt) <= 2 * len(prompts[0])]
            prompts = prompts[len(batch) :]
            found = cached.read_prompts(batch, self.device)
            read.update({prompt: (found, number) for number, prompt in enumerate(batch)})

    def read_on(self, rows: Sequence[_Row]) -> None:
        """Write samples whose network has other states than keys and values, without padding."""
        seen = min(row.start for row in rows)
        reader = _Reader(self.network, max(row.start + row.most for row in rows), self.device)
        pending = torch.tensor([row.ids[:seen] for row in rows], device=self.device)
        while True:
            logits = reader.read(pending)
            drawing = [i for i, row in enumerate(rows) if len(row.ids) == seen and not row.ended]
            if drawing:
                self._draw([rows[i] for i in drawing], logits[drawing])
            if all(row.ended for row in rows):
                return
            # A row that has ended reads its last token again, and its logits are ignored.
            tokens = [row.ids[min(seen, len(row.ids) - 1)] for row in rows]
            pending = torch.tensor(tokens, device=self.device)[:, None]
            seen += 1

    def read_pictured(self, row: _Row, inputs: Mapping[str, Tensor]) -> None:
        """Write a sample of a prompt with images."""

        def draw(logits: Tensor) -> tuple[int, bool]:
            self._draw([row], logits)
            return row.ids[-1], row.ended

        forget_positions(self.network)
        continue_pictured(self.network, inputs, row.most, self.device, draw)
        forget_positions(self.network)

    def _draw(self, rows: Sequence[_Row], logits: Tensor) -> None:
        """Draw the next token of each row from logits ``[B, V]``, and end rows."""
        how = self.sampling
        logits = logits.float()
        changed = logits
        if how.repetition_penalty != 1.0:
            # Tokens of images may have ids that no model writes, above those of the logits.
            written = [sorted({token for token in row.ids if token < logits.shape[-1]}) for row in rows]
            seen = [torch.tensor([ids], device=self.device) for ids in written]
            penalty = how.repetition_penalty
            changed = torch.cat([penalized(logits[i : i + 1], ids, penalty) for i, ids in enumerate(seen)])
        log_probs = logits.log_softmax(-1)
        from_which = log_probs
        if changed is not logits or how != Sampling(1.0, 1.0):
            from_which = remaining(changed, how)
        if how.temperature == 0:
            tokens = changed.argmax(-1)
        else:
            uniform = [row.uniform[len(row.sample.tokens)] for row in rows]
            tokens = drawn(from_which, torch.tensor(uniform, device=self.device))
        chosen = tokens[:, None]
        columns = (tokens, log_probs.gather(-1, chosen)[:, 0], from_which.gather(-1, chosen)[:, 0])
        # One transfer from a device. float32 holds all whole numbers up to 2 ** 24 exactly.
        found = torch.stack([column.float() for column in columns], 1).tolist()
        for row, (token, log_prob, drawn_log_prob) in zip(rows, found):
            if math.isnan(log_prob + drawn_log_prob):
                raise ConfigurationError(
                    f"generate: the network's logits are not finite, or the temperature, {how.temperature}, is too "
                    "small for them"
                )
            self._append(row, int(token), log_prob, drawn_log_prob)

    def _append(self, row: _Row, token: int, log_prob: float, drawn_log_prob: float) -> None:
        sample = row.sample
        row.ids.append(token)
        sample.tokens.append(token)
        sample.log_probs.append(log_prob)
        sample.drawn_log_probs.append(drawn_log_prob)
        row.ended = True
        if token in self.stop:
            sample.end = "stop"
        elif self.written is not None and self.written(row.number, sample.tokens):
            sample.end = "written"
        else:
            row.ended = not row.left


_CACHED: weakref.WeakKeyDictionary[nn.Module, tuple[list[type], dict[int, bool]]] = weakref.WeakKeyDictionary()


def _is_cached(network: nn.Module, most: int, device: torch.device) -> bool:
    """Return whether :class:`CachedRows` continues rows of up to ``most`` tokens as the network reads them alone.

    The answers are kept, because training generates often. They depend on the classes of a network's modules, which
    techniques may change, and not on its weights.
    """
    classes = [type(part) for part in network.modules()]
    known = _CACHED.get(network)
    if known is None or known[0] != classes:
        known = _CACHED[network] = (classes, {})
    answers = known[1]
    for length in _lengths(network, most):
        if length not in answers:
            answers[length] = _continues_padded(network, usual_tokens(network).to(device), length)
        if not answers[length]:
            return False
    return True


def _lengths(network: nn.Module, most: int) -> list[int]:
    """Return lengths of rows for trials, up to ``most``. A shorter run never reaches the end of a window or chunk."""
    if isinstance(network, GPT):
        return [8]
    ends = [number + 2 for number in _numbers(network)]
    return [8, *(end for end in ends if 8 < end <= min(most, longest_row(network)))]


def _continues_padded(network: nn.Module, tokens: Tensor, length: int) -> bool:
    """Return whether two rows, one of ``length`` tokens and a short one, have the same logits as each row alone.

    Columns before the short row are filled with numbers that would change its logits if it saw them.
    """
    close = 1e-3 if whole_precision(network, tokens.device) else 0.1
    index = torch.arange(length)
    long, short = tokens[torch.stack((index, -1 - index)) % len(tokens)].tolist()
    short = short[:7]
    try:
        rows = CachedRows(network, arguments_of(network), filler=50.0)
        found = rows.read_prompts([short[:3], long[: length - 4]], tokens.device)
        rows.change([], [(found, 1, 1), (found, 0, 1)], 4)
        parts = [found.logits[[1, 0]]]
        for i in range(4):
            last = torch.tensor([long[length - 4 + i], short[3 + i]], device=tokens.device)
            parts.append(rows.read(last))
        for row, ids in enumerate((long, short)):
            whole = _last_logits(network, torch.tensor([ids], device=tokens.device), 5).float()
            ours = torch.stack([part[row] for part in parts]).float()
            if not bool((ours - whole).abs().max() <= close * whole.abs().max()):
                return False
    except Exception:  # each network fails in its own way
        return False
    return True


def _last_logits(network: Any, ids: Tensor, count: int) -> Tensor:
    """Return the last logits ``[count, V]`` of one row, read at once."""
    if isinstance(network, GPT):
        logits = network(ids)
    else:
        # Logits of a long row and a large vocabulary need much memory.
        last = {"logits_to_keep": count} if "logits_to_keep" in arguments_of(network) else {}
        logits = network(input_ids=ids, use_cache=False, **last).logits
    found: Tensor = logits[0, -count:]
    return found


class _Reader:
    """Reads rows piece by piece, and passes on the state that the network returns (keys and values, or recurrent
    states).

    Names of states differ between models: every output that is also an argument is passed on. Some networks compute
    other logits from a state than from the whole text. Such a network is given the whole text for each token.
    """

    def __init__(self, network: nn.Module, most: int, device: torch.device) -> None:
        self.network = network
        self.caches = None
        if isinstance(network, GPT):
            self.caches = [KVCache(most) for _ in network.blocks]
        self.arguments = arguments_of(network)
        self.state: dict[str, Any] = {}
        self.all: Tensor | None = None  # the text so far, for a network whose states are not passed on
        self.passes_state = False
        if self.caches is None:
            tokens = usual_tokens(network).to(device)
            # A run that is shorter than a window or a chunk never reaches its end.
            ends = [number + 2 for number in _numbers(network) if number + 2 <= min(most, longest_row(network))]
            self.passes_state = all(self._continues_exactly(tokens, length) for length in (6, *ends))

    def read(self, pending: Tensor) -> Tensor:
        """Return the logits ``[B, V]`` after ``pending`` ``[B, T]``, which follow the tokens read before."""
        if self.caches is not None:
            last_logits: Tensor = hidden_states(self.network, {"input_ids": pending, "cache": self.caches})[1]
            return last_logits[:, -1]
        if not self.state:
            if self.all is not None:
                pending = torch.cat((self.all, pending), 1)
            self.all = pending
        last = {"logits_to_keep": 1} if "logits_to_keep" in self.arguments else {}
        output = self.network(input_ids=pending, use_cache=self.passes_state, **last, **self.state)
        if self.passes_state:
            states = {name: value for name, value in output.items() if name in self.arguments}
            self.state = {name: value for name, value in states.items() if value is not None}
        logits: Tensor = output.logits[:, -1]
        return logits

    def _continues_exactly(self, tokens: Tensor, length: int) -> bool:
        """Return whether two rows of ``length`` tokens have the same logits from states as from the whole text.

        The last four tokens are read one by one, and then the last one alone.
        """
        index = torch.arange(length)
        rows = tokens[torch.stack((index, -1 - index)) % len(tokens)]
        self.passes_state = False
        whole = self.read(rows).float()
        self.all = None
        self.passes_state = True
        close = 1e-3 if whole_precision(self.network, rows.device) else 0.1
        try:
            for sizes in ((length - 4, 1, 1, 1, 1), (length - 1, 1)):
                self.all = None
                self.state = {}
                parts = [self.read(part).float() for part in rows.split(sizes, 1)][-1]
                if not bool((parts - whole).abs().max() <= close * whole.abs().max()):
                    return False
        except Exception:  # each network fails in its own way
            return False
        finally:
            self.all = None
            self.state = {}
        return True


def _numbers(network: nn.Module) -> list[int]:
    """Return the whole numbers in a network's configuration and modules, in ascending order.

    Lengths of windows and chunks are among them, whatever their names. Attributes that number the layers are left out:
    their values are 0, 1, 2, ...
    """
    config: Any = network.config
    attributes: dict[str, list[Any]] = {}
    for part in network.modules():
        for name, value in vars(part).items():
            attributes.setdefault(name, []).append(value)
    pending: list[Any] = [config.to_dict()]
    for values in attributes.values():
        numbers = {value for value in values if type(value) is int}
        if numbers != set(range(len(numbers))):
            pending += values
    found = set()
    while pending:
        value = pending.pop()
        if type(value) is int:
            found.add(value)
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
    return sorted(number for number in found if number > 4)
