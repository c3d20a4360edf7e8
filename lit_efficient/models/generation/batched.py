"""Text generation for several sequences of any lengths in one batch, with any causal network.

Rows are not padded. All are read up to the end of the shortest, then token by token, where a longer prompt supplies its
own next token in the place of a drawn one. Nothing has to be masked, which state-space models do not support, and every
token has the position that it has alone.

Saves: reading the weights from memory for every row but one
Costs: one step for each token by which the longest prompt exceeds the shortest
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.internals.hugging_face import forget_positions, image_token_ids
from lit_efficient.models.generation.sampling import Sampling, penalized, sample_token
from lit_efficient.models.networks.gpt import GPT, KVCache
from lit_efficient.models.probes.modes import evaluating, whole_precision
from lit_efficient.models.probes.output_head import hidden_states


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
def continue_rows(
    network: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    stop: set[int],
    written: Callable[[int, list[int]], bool] | None = None,
) -> list[list[int]]:
    """Continue each prompt by at most ``max_new_tokens`` ids, up to and including the first id in ``stop``.

    Unlike ``generate`` of transformers it neither reads nor changes the global random state.

    Args:
        network: a `GPT`, or a causal model of transformers.
        prompts: ids of each prompt, at least one.
        max_new_tokens: maximum number of tokens to add.
        sampling: parameters of sampling.
        generators: the only source of randomness of each prompt, on the device of the network.
        stop: ids that end a text.
        written: called after each token with the number of its row and all new ids of that row; if it returns true, the
            row ends.

    Returns:
        The new ids of each prompt.
    """
    rows = [list(prompt) for prompt in prompts]
    seen = min(map(len, rows))
    most = max(map(len, rows)) + max_new_tokens
    ends = [len(row) + max_new_tokens for row in rows]
    device = generators[0].device
    forget_positions(network)
    with evaluating(network):
        pending = torch.tensor([row[:seen] for row in rows], device=device)
        reader = _Reader(network, most, device)
        while True:
            logits = reader.read(pending)
            drawing = [i for i, row in enumerate(rows) if len(row) == seen < ends[i]]
            drawn = [_drawn(logits[i : i + 1], rows[i], sampling, generators[i]) for i in drawing]
            for i, token in zip(drawing, torch.cat(drawn).flatten().tolist() if drawn else ()):
                rows[i].append(token)
                if token in stop or (written is not None and written(i, rows[i][len(prompts[i]) :])):
                    ends[i] = len(rows[i])
            if all(len(row) == end for row, end in zip(rows, ends)):
                return [row[len(prompt) :] for row, prompt in zip(rows, prompts)]
            # A row that has ended reads its last token again, and its logits are ignored.
            pending = torch.tensor([row[min(seen, len(row) - 1)] for row in rows], device=device)[:, None]
            seen += 1


def _drawn(logits: Tensor, row: list[int], how: Sampling, generator: torch.Generator) -> Tensor:
    if how.repetition_penalty != 1.0:
        logits = penalized(logits, torch.tensor([sorted(set(row))], device=logits.device), how.repetition_penalty)
    return sample_token(logits, how.temperature, how.top_p, generator, how.top_k, how.min_p)


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

    Lengths of windows and chunks are among them, whatever their names.
    """
    config: Any = network.config
    pending: list[Any] = [config.to_dict(), *(vars(part) for part in network.modules())]
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
