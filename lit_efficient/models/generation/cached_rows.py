"""Rows of different lengths in one key-value cache, which start and end independently.

    columns   0 ......... width - 1
    row 0     . . k k k k k k k k k      each row ends at the last column; columns before its first token are masked
    row 1     . . . . . . k k k k k

A prompt is read once, in a cache of its own, and copied into as many rows as there are samples of it. Rows that end are
taken out, and others take their place. Positions are counted from each row's first token. Distances between columns of
a row are distances between its tokens, so sliding windows work, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.models.networks.gpt import GPT, KVCache
from lit_efficient.models.probes.output_head import scaled_head


class Unsupported(Exception):
    """The states of a network are not the keys and values of its tokens."""


@dataclass(frozen=True)
class Prompts:
    """Prompts that were read together, and the logits behind each. Tokens begin at the first column.

    Args:
        caches: one for each block; None for a block without keys and values of its own.
        lengths: number of tokens of each prompt.
        logits: ``[B, V]``.
    """

    caches: list[KVCache | None]
    lengths: list[int]
    logits: Tensor


class CachedRows:
    """The rows that are being continued.

    Args:
        network: a `GPT`, or a causal model of transformers.
        arguments: names of the arguments of the network's forward.
        filler: number in the columns before a row. Masked columns have no effect, whatever they hold.
    """

    def __init__(self, network: nn.Module, arguments: set[str], filler: float = 0.0) -> None:
        self.network = network
        self.arguments = arguments
        self.filler = filler
        self.lengths: list[int] = []
        self.caches: list[KVCache | None] = []
        self.theirs: Any = None  # cache of transformers whose layers keep their keys and values in `caches`
        if isinstance(network, GPT):
            self.caches = [KVCache(0) for _ in network.blocks]
        else:
            from lit_efficient.models.generation.transformers_cache import cache_for

            self.theirs = cache_for(network) if "past_key_values" in arguments else None
            if self.theirs is None:
                raise Unsupported
            self.caches = [getattr(layer, "held", None) for layer in self.theirs.layers]
        self.head = scaled_head(network).module

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return max(self.lengths, default=0)

    def read_prompts(self, prompts: Sequence[Sequence[int]], device: torch.device) -> Prompts:
        """Read prompts from their beginning, without changing the rows.

        Shorter prompts are padded at their end, where tokens of a causal network have no effect on those before.
        """
        lengths = [len(prompt) for prompt in prompts]
        most = max(lengths)
        padded = [list(prompt) + [prompt[-1]] * (most - len(prompt)) for prompt in prompts]
        ids = torch.tensor(padded, device=device)
        caches = [None if cache is None else KVCache(most) for cache in self.caches]
        logits = self._run(ids, caches, [length - 1 for length in lengths])
        return Prompts(caches, lengths, logits)

    def change(self, kept: Sequence[int], added: Sequence[tuple[Prompts, int, int]], room: int) -> None:
        """Keep some rows, and add rows behind them.

        Args:
            kept: numbers of rows that continue, ascending.
            added: prompts that were read, the number of a prompt in them, and the number of rows that start with it.
            room: number of tokens that will be read before the next change, at most.
        """
        lengths = [self.lengths[row] for row in kept]
        lengths += [prompts.lengths[row] for prompts, row, count in added for _ in range(count)]
        width = max(lengths)
        for block, held in enumerate(self.caches):
            sources = [prompts.caches[block] for prompts, _, _ in added]
            like = next((cache for cache in (held, *sources) if cache is not None and cache.stores is not None), None)
            if like is None:
                continue
            assert like.stores is not None
            changed = KVCache(width + room)
            changed.length = width
            stores = []
            for part, store in enumerate(like.stores):
                _, heads, _, head_dim = store.shape
                new = store.new_full((len(lengths), heads, width + room, head_dim), self.filler)
                if kept:
                    assert held is not None
                    assert held.stores is not None
                    own = min(width, held.length)
                    old = held.stores[part][:, :, held.length - own : held.length]
                    new[: len(kept), :, width - own : width] = old[list(kept)]
                row = len(kept)
                for (prompts, number, count), source in zip(added, sources):
                    assert source is not None
                    assert source.stores is not None
                    own = prompts.lengths[number]
                    new[row : row + count, :, width - own : width] = source.stores[part][number, :, :own]
                    row += count
                stores.append(new)
            changed.stores = (stores[0], stores[1])
            self.caches[block] = changed
        self.lengths = lengths

    def read(self, tokens: Tensor) -> Tensor:
        """Read one token ``[B]`` of each row, and return the logits ``[B, V]`` behind it."""
        device = tokens.device
        positions = torch.tensor(self.lengths, device=device)
        self.lengths = [length + 1 for length in self.lengths]
        seen = None
        if min(self.lengths) < self.width:
            columns = torch.arange(self.width, device=device)
            seen = columns >= self.width - 1 - positions[:, None]
        return self._run(tokens[:, None], self.caches, [0] * len(tokens), positions[:, None], seen)

    def _run(
        self,
        ids: Tensor,
        caches: list[KVCache | None],
        last: list[int],
        positions: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Return the logits ``[B, V]`` behind column ``last`` of ``ids``, and add keys and values to ``caches``."""
        lengths = [None if cache is None else cache.length + ids.shape[1] for cache in caches]
        inputs: dict[str, Any] = {"input_ids": ids}
        if self.theirs is None:
            for cache in caches:
                assert cache is not None
                cache.kept = seen
                cache.positions = positions
            inputs["cache"] = caches
        else:
            for layer, cache in zip(self.theirs.layers, caches):
                layer.held = cache
            inputs |= {"past_key_values": self.theirs, "use_cache": True}
            if positions is not None and "position_ids" in self.arguments:
                inputs["position_ids"] = positions
            if seen is not None:
                inputs["attention_mask"] = seen.long()
        calls = 0

        def only_last(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            nonlocal calls
            calls += 1
            hidden = arguments[0]
            if hidden.shape[1] > 1:
                rows = torch.arange(len(hidden), device=hidden.device)
                hidden = hidden[rows, torch.tensor(last, device=hidden.device)][:, None]
            return (hidden, *arguments[1:])

        with self.head.register_forward_pre_hook(only_last):
            output = self.network(**inputs)
        logits = output if self.theirs is None else output.logits
        if calls != 1 or not self._holds(output, caches, lengths, seen):
            raise Unsupported
        return logits[:, -1]

    def _holds(self, output: Any, caches: list[KVCache | None], lengths: list[int | None], seen: Tensor | None) -> bool:
        """Return whether the keys and values of the new tokens, and nothing else, were kept."""
        held = [(cache, length) for cache, length in zip(caches, lengths) if cache is not None]
        if self.theirs is None:
            # Techniques that route tokens note in the cache which keys they hide.
            return all(cache.length == length and cache.kept is seen for cache, length in held if length is not None)
        states = {name for name, value in output.items() if name in self.arguments and value is not None}
        grown = [cache.length == length for cache, length in held if cache.stores is not None]
        return states == {"past_key_values"} and any(grown) and all(grown) and self.theirs.is_untouched(output)
