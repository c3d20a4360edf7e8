"""Isolation of documents in packed rows, and causality of a language model: both are tested on the network itself.

    leak = max_t |f(A B)_t - f(A' B)_t| / max_t |f(A B)_t - f(A B')_t|        t in B; B' changes only B's first tokens

If documents attend to each other, document A changes the logits of document B about as much as B's own first tokens do.
If they do not, A changes nothing, whether A is replaced or left out. The arguments that isolate documents differ
between networks, so several are tried in order.

The test runs once, and training changes the weights. Initial weights may mix tokens so little that the leak looks like
rounding. Therefore the structure decides. All checks run with the network's weights and with noise in the place of
gates, biases and weights of zero, in eval mode and in the network's own mode:

- The gradient of B's logits for the tokens of A must be exactly zero (`lit_efficient.models.probes.dependence`).
- The rows of tables that B's tokens read must not depend on A.
- Other tokens of A must leave B's logits equal bit by bit, unless other rows of the batch change them.
- The gradients of weights, and of what B's tokens look up, must equal those without A. Choices of tokens and experts
  are made by place (`lit_efficient.models.probes.choices`), because scores depend on weights.

Gradients in 16 bits are compared with a larger tolerance. A network in shards cannot be differentiated in the middle of
a step. In both cases B's logits must also equal those without A while small matrices are enlarged, dropout is off and
choices are made by place.

A network that is accepted is called 50 to 160 times, with five rows of 16 tokens or with one, and about every third
time with a backward pass. Up to 40 of these calls have one row of the length of packed rows, because some layers
combine only distant tokens. Weights, buffers, counters, modes and random states are restored.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lit_efficient.distributed.row_slices import ROW_POSITIONS
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_dispatch import has_values, no_dispatch_modes
from lit_efficient.internals.torch_modules import held_beside, hook_owners
from lit_efficient.mechanisms.moving import COUNT_OF, holds_images
from lit_efficient.mechanisms.rewind import Rewind, random_states, set_random_states
from lit_efficient.mechanisms.router_balance import unasked
from lit_efficient.models.generation.batched import arguments_of, longest_row, usual_tokens
from lit_efficient.models.networks.document_attention import document_starts, reach_of, read_starts
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.models.probes.choices import ChoicesByPlace, without_dropout
from lit_efficient.models.probes.dependence import Lookups, gradient_difference, lookup_difference, lookups
from lit_efficient.models.probes.modes import evaluating, whole_precision, whole_weights
from lit_efficient.models.probes.noise import (
    Values,
    enlarged,
    gathers_weights,
    noise_for_vectors,
    noise_for_zeros,
    replaced,
    shards_again,
)

_ROW = 16  # tokens of a probe row
# Largest leak that counts as rounding, in float32 and in 16 bits. Over all architectures of transformers, networks that
# isolate documents leak 0 to 1e-4 in float32 and up to 0.06 in bfloat16; the others leak 0.08 to 8.
_EXACT = 5e-3
_COARSE = 0.07
# Largest difference of two equal gradients by rounding, relative to the gradient, in float32 and in 16 bits. Over all
# architectures of transformers it is 4e-5 in float32 and up to 0.2 in bfloat16, on a CPU.
_UNEQUAL = 0.05
_UNEQUAL_COARSE = 0.5
# Entries of a batch with a meaning here. From labels, a network of transformers would compute a loss of its own.
_KNOWN = {"input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "num_bytes", "source"}
_Inputs = dict[str, Any]


_Way = Callable[[Any, Tensor, Tensor], _Inputs]


def by_positions(network: Any, input_ids: Tensor, position_ids: Tensor) -> _Inputs:
    """Return position ids that restart at each document. Most attention models derive their mask from them."""
    return {"input_ids": input_ids, "position_ids": position_ids}


def by_mask(network: Any, input_ids: Tensor, position_ids: Tensor) -> _Inputs:
    """Return a block-diagonal mask for each kind of layer, in the format of the network's attention."""
    from transformers.masking_utils import create_masks_for_generate

    make = getattr(network, "create_masks_for_generate", create_masks_for_generate)
    like = torch.empty((*input_ids.shape, 0), dtype=network.dtype, device=input_ids.device)
    mask = make(network.config, like, None, None, position_ids=position_ids)
    return by_positions(network, input_ids, position_ids) | {"attention_mask": mask}


def by_lengths(network: Any, input_ids: Tensor, position_ids: Tensor) -> _Inputs:
    """Return all rows as one row, with the bounds of the documents.

    Kernels of state-space layers and flash attention take these arguments.
    """
    begins = (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 2) != 1).flatten()
    bounds = torch.cat((begins.nonzero()[:, 0], begins.new_tensor([begins.numel()], dtype=torch.int64))).int()
    longest = int(bounds.diff().max())
    return by_positions(network, input_ids.reshape(1, -1), position_ids.reshape(1, -1)) | {
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest,
        "seq_idx": (begins.cumsum(0) - 1).int()[None],
    }  # fmt: skip


def by_starts(network: Any, input_ids: Tensor, position_ids: Tensor) -> _Inputs:
    """Return, for each token, the index at which its document begins, instead of a mask of [T, T]."""
    if position_ids.shape[1] > longest_row(network):  # longer than the rows for which the layers were examined
        return by_windows(network, input_ids, position_ids)
    starts = document_starts(position_ids)[:, None, None]
    return by_positions(network, input_ids, position_ids) | {"attention_mask": starts}


def by_windows(network: Any, input_ids: Tensor, position_ids: Tensor) -> _Inputs:
    """Return, for each token and kind of layer, the index of the first token that it sees, instead of masks."""
    reach = reach_of(network, max(longest_row(network), position_ids.shape[1]))
    assert reach is not None
    return by_positions(network, input_ids, position_ids) | {"attention_mask": reach.starts(position_ids)}


def by_lengths_and_windows(network: Any, input_ids: Tensor, position_ids: Tensor) -> _Inputs:
    """Return `by_lengths` for layers that carry states, with `by_windows` for the attention between them."""
    inputs = by_lengths(network, input_ids, position_ids)
    return inputs | by_windows(network, inputs["input_ids"], inputs["position_ids"])


def _without_isolation(network: Any, input_ids: Tensor, position_ids: Tensor) -> _Inputs:
    return {"input_ids": input_ids}


WAYS = {"position_ids": by_positions, "a block-diagonal mask": by_mask, "lengths of documents": by_lengths}


class DocumentRows:
    """Builder of the arguments with which a network is called on batches of documents.

    The network is tested before the first batch.

    Args:
        owner: Name of the task, for errors.
        longest: Largest number of tokens of a row, if it is known. Otherwise that of the first batch is used.
    """

    def __init__(self, owner: str, longest: int | None = None) -> None:
        self.owner = owner
        self.longest = longest
        self._tested: nn.Module | None = None  # the network of the results below
        self._way: _Way | None = None  # isolates documents
        self._refusal: ConfigurationError | None = None  # raised if a batch is packed

    def arguments(
        self, network: nn.Module, batch: Mapping[str, Tensor], agree: Callable[[bool], bool] = bool
    ) -> _Inputs:
        """Return the keyword arguments of a call of the network.

        Args:
            network: The language model.
            batch: ``input_ids`` [B, T], with ``position_ids`` if the rows are packed, ``attention_mask`` if they are
                padded, or slices of rows (`own_slices`).
            agree: Function that returns whether all processes pass True, if several call this method together.

        Returns:
            Arguments, in which ``input_ids`` may have the shape [1, B T]. The logits then have it, too.

        Raises:
            ConfigurationError: If tokens attend to later tokens, if documents of a row cannot be isolated, or if rows
                are cut into slices and documents are not isolated by the attention alone.
        """
        plain: _Inputs = {} if isinstance(network, GPT) else {"use_cache": False, **unasked(network)}
        packed = ROW_POSITIONS in batch or _packed(network, batch)
        if holds_images(batch):
            self._check_images(network, packed)
        # The test does not wait for the first packed batch: processes may get it in different steps, and the test is
        # collective.
        untested = "position_ids" in batch and self._way is None and self._refusal is None
        if not has_values(next(network.parameters())):  # a network without values, as in a plan, cannot be tested
            self._tested = network
            self._way = _usual_way(network)
        elif self._tested is not network or untested:
            if "position_ids" in batch:
                rank_zero_info(
                    f"{self.owner}: testing once whether packed documents attend to each other, which may take as "
                    "long as 50 to 160 short steps"
                )
            with undisturbed(network, batch["input_ids"].device) as in_training:
                probe = _Probe(network, batch["input_ids"], plain, in_training)
                if self._tested is not network:
                    self._way = None
                    self._refusal = None
                    self._check_causal(probe, agree)
                    self._tested = network
                if "position_ids" in batch:
                    try:
                        length = max(batch["input_ids"].shape[1], self.longest or 0)
                        self._way = self._find(probe, length, agree)
                    except ConfigurationError as refusal:
                        self._refusal = refusal
        if packed:
            if self._way is None:
                assert self._refusal is not None
                raise self._refusal
            if ROW_POSITIONS in batch:
                return plain | self._of_slices(network, batch)
            return plain | self._way(network, batch["input_ids"], batch["position_ids"])
        optional = () if isinstance(network, GPT) else ("attention_mask", "position_ids")
        inputs = {name: batch[name] for name in ("input_ids", *optional) if name in batch}
        return plain | inputs | self._beside_tokens(network, batch)

    def _check_images(self, network: nn.Module, packed: bool) -> None:
        """Raise an error for rows with images that the network would compute in another way."""
        if packed:
            raise ConfigurationError(
                f"{self.owner}: rows with images cannot be packed, or cut into slices: give each document its own row"
            )
        if any(getattr(part, "adds_keys", False) for part in network.modules()):
            raise ConfigurationError(
                f"{self.owner}: prefix and prompt tuning cannot be used with images, because models compute positions "
                "and masks of images without the virtual tokens. Use LoRA"
            )

    def _beside_tokens(self, network: nn.Module, batch: Mapping[str, Tensor]) -> _Inputs:
        """Return the further entries of a batch that the network takes, such as images and the types of tokens."""
        further = {name for name in batch if name not in _KNOWN and not name.startswith(COUNT_OF)}
        taken = arguments_of(network) if further else set()
        foreign = sorted(name for name in further - taken if name.startswith("pixel_values"))
        if foreign:
            raise ConfigurationError(
                f"{self.owner}: the batch holds images ({foreign[0]}), and {type(network).__name__} reads text only. "
                "Use a model of images and text, or rows without images"
            )
        return {name: batch[name] for name in sorted(further & taken)}

    def _of_slices(self, network: nn.Module, batch: Mapping[str, Tensor]) -> _Inputs:
        ids = batch["input_ids"]
        positions = batch[ROW_POSITIONS]
        if isinstance(network, GPT):
            return by_positions(network, ids, positions)
        # by_starts proves that only the attention mixes tokens, and the attention gathers the other slices' keys.
        if self._way is not by_starts:
            raise ConfigurationError(
                f"{self.owner}: {type(network).__name__} mixes tokens not only by torch's causal attention "
                "(attn_implementation: sdpa), so its rows cannot be cut into slices. Set parallel.context to 1"
            )
        starts = by_starts(network, ids, positions)["attention_mask"]
        return by_positions(network, ids, batch["position_ids"]) | {"attention_mask": starts}

    def _check_causal(self, probe: "_Probe", agree: Callable[[bool], bool]) -> None:
        if probe.blind:
            rank_zero_warn(
                f"{self.owner}: could not test whether tokens of {probe.name} attend to later tokens or to other "
                "documents of their row: no token changes the logits after it, or the logits are not finite"
            )
        # Both parts on every process, because each may run collective calls.
        reads_later = probe.reads_later()
        if not agree(probe.sees_later <= probe.tolerance and not reads_later):
            option = "config_fields: {is_decoder: true}, or " if hasattr(probe.network.config, "is_decoder") else ""
            how = ""
            if probe.sees_later <= probe.tolerance:
                how = " with the present weights. Training may change that, because a path between them exists"
            raise ConfigurationError(
                f"{self.owner}: {probe.name} is not causal: a later token changes the logits of a token by "
                f"{probe.sees_later:.2g} of the change by an earlier token{how}, so each token would be predicted from "
                f"itself. Use {option}a decoder"
            )

    def _find(self, probe: "_Probe", length: int, agree: Callable[[bool], bool]) -> _Way:
        reasons = []
        for name, way in WAYS.items():
            leak, reason = probe.leak(way, length)
            if agree(leak <= probe.tolerance):
                shorter = _without_masks(probe.network, way)
                if shorter is not None and agree(probe.equals(way, shorter, length)):
                    return shorter
                if way is not by_positions:
                    rank_zero_info(f"{self.owner}: packed documents are isolated by {name} in {probe.name}")
                return way
            reasons.append(f"with {name}, {reason}")
        raise ConfigurationError(
            f"{self.owner}: {probe.name} does not isolate the documents of a packed row: {'; '.join(reasons)}. Give "
            "each document its own row: data.init_args.pack=false"
        )


class _Probe:
    """Logits of a network for five rows of two documents: A B, A' B, A B', B A, and A B with another last token.

    Args:
        network: The network, in eval mode.
        input_ids: Tokens of the first batch, ``[B, T]``. Long rows consist of them.
        plain: Further arguments of each call.
        in_training: Parts of the network that are in training mode outside of the test.
    """

    def __init__(self, network: nn.Module, input_ids: Tensor, plain: _Inputs, in_training: Sequence[nn.Module]) -> None:
        device = input_ids.device
        self.tokens = input_ids[0]
        self.network: Any = network
        self.name = type(network).__name__
        self.plain = plain
        self.in_training = in_training
        self.tolerance = _EXACT if whole_precision(network, device) else _COARSE
        length = min(_ROW, longest_row(network))
        self.first = length * 7 // 16  # number of tokens of A
        self.changed = (length - self.first) // 2  # number of tokens of B that differ in B'
        tokens = usual_tokens(network)
        index = torch.arange(length)
        row = tokens[index % len(tokens)]
        other = tokens[(index + 1) % len(tokens)]
        in_a = index < self.first
        in_changed_part = (index >= self.first) & (index < self.first + self.changed)
        is_last = index == length - 1
        rows = [
            row,
            torch.where(in_a, other, row),
            torch.where(in_changed_part, other, row),
            row.roll(-self.first),  # B A
            torch.where(is_last, other, row),
        ]
        self.rows = torch.stack(rows).to(device)
        positions = torch.cat((torch.arange(self.first), torch.arange(length - self.first))).repeat(5, 1)
        positions[3] = torch.cat((torch.arange(length - self.first), torch.arange(self.first)))
        self.positions = positions.to(device)
        # Weights that replace the network's own, and the logits without any isolation. A pair is kept if tokens have an
        # effect on later logits at all.
        self.plain_logits: list[tuple[Values, Tensor]] = []
        states: list[Values] = [[]]
        zeros = noise_for_zeros(network)
        if zeros:
            states.append(zeros)
        self.noise = zeros + noise_for_vectors(network)
        self.exact = whole_weights(network.parameters())
        self.differentiates = not gathers_weights(network)
        self.free = shards_again(network)
        for state in states:
            logits = self._logits({"input_ids": self.rows}, state)
            if self._effect(logits) > 1e-6 * float(_norms(logits).max()):
                self.plain_logits.append((state, logits))
        self.blind = not self.plain_logits
        later = [self._most(logits[0, :-1] - logits[4, :-1], logits) for _, logits in self.plain_logits]
        self.sees_later = max(later, default=0.0)

    def leak(self, way: _Way, length: int) -> tuple[float, str]:
        """Return the leak from A to B in rows of up to ``length`` tokens, and a clause that describes it."""
        try:
            cases: list[tuple[Values, Tensor | None]] = [*self.plain_logits] or [([], None)]
            leaks = [self._near(way, state, plain) for state, plain in cases]
            if max(leaks) <= self.tolerance and length > _ROW:
                leaks += [self._far(way, length, state, plain) for state, plain in self.plain_logits]
            if max(leaks) <= self.tolerance and self._reads_other(way, length):
                return float("inf"), (
                    f"a document changes the next one by {max(leaks):.2g} of that document's own effect with the "
                    "present weights. Training may change that, because a path between the documents exists"
                )
        except Exception as error:  # networks raise different errors for arguments that they do not take
            message = str(error).strip().splitlines()[0] if str(error) else repr(error)
            return float("inf"), f"the network fails ({message})"
        return max(leaks), f"a document changes the next one by {max(leaks):.2g} of that document's own effect"

    def reads_later(self) -> bool:
        """Return whether the logits of tokens depend on later tokens by any path, however small its weight."""
        count, length = self.rows.shape
        index = torch.arange(length, device=self.rows.device)
        ends = torch.arange(1, count + 1, device=self.rows.device)[:, None] * length // (count + 1)
        decided = False
        try:
            for found in self._lookups({"input_ids": self.rows}, index < ends):
                if found.gradients is not None:
                    decided = True
                    if bool((found.gradients * (index >= ends)).any()):
                        return True
        except Exception:  # in training some networks, such as Reformer, take only rows of one length
            return False
        return not decided and self._differs(_without_isolation, [self.rows[4]], slice(0, -1), decided)

    def _reads_other(self, way: _Way, length: int) -> bool:
        """Return whether documents depend on the document before them by any path, however small its weight."""
        index = torch.arange(self.rows.shape[1], device=self.rows.device)
        begins = torch.full((len(self.rows), 1), self.first, device=self.rows.device)
        begins[3] = self.rows.shape[1] - self.first
        decided = False
        for found in self._lookups(way(self.network, self.rows, self.positions), index >= begins):
            if any(self._read_elsewhere(indices) for indices in found.indices):
                return True
            if found.gradients is not None:
                decided = True
                if bool((found.gradients * (index < begins)).any()):
                    return True
        changes = [self._after(token) for token in self.rows[0, [0, self.first]]]
        if self._differs(way, changes, slice(self.first, None), decided):
            return True
        return self._unlike_alone(way, length)

    def _after(self, token: Tensor) -> Tensor:
        """Return B after an A that consists of one token, which changes most what is chosen from a row."""
        row = self.rows[0].clone()
        row[: self.first] = token
        return row

    def _read_elsewhere(self, indices: Tensor) -> bool:
        """Return whether B's tokens look up other rows of a table if A precedes them, or if A changes."""
        size = indices.shape[1] - self.first
        alone = indices[min(3, len(indices) - 1), :size]
        return any(not torch.equal(row[self.first :], alone) for row in indices[:2])

    def _differs(self, way: _Way, changes: Sequence[Tensor], kept: slice, decided: bool) -> bool:
        """Return whether the tokens ``kept`` of the first row have other logits in a changed row.

        This shows paths without gradients, such as choices of tokens. A difference counts if it exceeds that by other
        rows in the batch, which may be rounded otherwise. Without such rounding it must be zero.

        Args:
            way: Function that returns the arguments of a call.
            changes: Rows, ``[T]`` each, that replace the first row one by one.
            kept: Tokens that are equal in all of them.
            decided: Whether gradients show no path. Small differences then count only if nothing is rounded.
        """
        others = self.rows.clone()
        others[1:] = self.rows[0, 0]
        batches = [self.rows, others, *(torch.cat((row[None], self.rows[1:])) for row in changes)]
        joined = way in (by_lengths, by_lengths_and_windows)  # rows of a batch would be further documents of one row
        if joined:
            batches = [self.rows[:1], self.rows[2:3], *(row[None] for row in changes)]
        states = random_states()
        compares = any(getattr(part, "compares_tokens", False) for part in self.network.modules())
        for state, training in self._cases():
            if training and compares:
                continue
            found = []
            for batch in batches:
                set_random_states(states)  # equal dropout in all calls
                with _in_training(self.in_training if training else ()):
                    found.append(self._logits(way(self.network, batch, self.positions[: len(batch)]), state))
            first, second, *changed = found
            if joined:
                limit = self.tolerance * self._effect(torch.cat((first, first, second)))
            else:
                limit = 4 * float(_norms(first[0, kept] - second[0, kept]).max())
                if decided and limit > 0:
                    limit = max(limit, self.tolerance * self._effect(first))
            if any(float(_norms(first[0, kept] - logits[0, kept]).max()) > limit for logits in changed):
                return True
        return False

    def _unlike_alone(self, way: _Way, length: int) -> bool:
        """Return whether a document in a packed row differs from the same document alone.

        This shows weights that are chosen by the number of a token in its row, or by the tokens before it, and choices
        among the tokens of a row. Choices are made by place, so that rounding does not change them.
        """
        if self.blind:
            return False
        length = min(length, longest_row(self.network))
        with ChoicesByPlace(), without_dropout():
            for state in ([], self.noise):
                if self._gradients_differ(way, length, state):
                    return True
                # Gradients in 16 bits are rounded too much to show a part of a change.
                if not (self.exact and self.differentiates):
                    with self._weights(state, larger=True):
                        if self._logits_differ(way, length):
                            return True
                        if self._repeats(partial(self._last, 1, {"input_ids": self.rows[:1]})):
                            with _in_training(self.in_training):
                                if self._logits_differ(way, length):
                                    return True
        return False

    def _gradients_differ(self, way: _Way, length: int, state: Values) -> bool:
        """Return whether gradients of a document's logits differ from those of the same document alone."""
        if not self.differentiates:
            return False
        weights = [p for p in self.network.parameters() if p.requires_grad and p.is_floating_point()]
        count = self.rows.shape[1] - self.first
        row = self._after(self.rows[0, self.first])[None]
        packed = partial(self._last, count, way(self.network, row, self.positions[:1]))
        alone = partial(self._last, count, {"input_ids": self.rows[:1, self.first :]})
        limit = _UNEQUAL if self.exact else _UNEQUAL_COARSE
        share = 1.0 if self.exact else 0.98  # of the tokens, because rounding in 16 bits may change a few of many
        long = partial(self._long, way, length, [], 0), partial(self._long, _without_isolation, length, [], 0, True)
        autocast = torch.is_autocast_enabled(self.rows.device.type) and not self.exact
        with self._weights(state), torch.autocast(self.rows.device.type, enabled=autocast):
            modes = [False]
            if self._repeats(packed):
                modes.append(True)
            for training in modes:
                pairs = [(packed, self.rows.shape[1], alone, count)]
                if length > _ROW and training == modes[-1]:
                    # In the network's own mode, in which activation checkpointing is active.
                    pairs.append((long[0], length, long[1], length - _first_of(length)))
                for first, in_row, second, by_itself in pairs:
                    found = self._attempt(first, (1, in_row), None, training)
                    # Without memory for the activations of long rows the leak decides.
                    if found is None or found.gradients is None:
                        continue
                    if bool(found.gradients[0, : in_row - by_itself].any()):
                        return True
                    own = self._attempt(second, (1, by_itself), None, training)
                    if own is not None and lookup_difference(found, own, share) > limit:
                        return True
                with _in_training(self.in_training if training else ()):
                    least = 1e-4 if self.exact else 1e-2
                    if gradient_difference(packed, alone, weights, least) > limit:
                        return True
        return False

    def _repeats(self, call: Callable[[], Tensor]) -> bool:
        """Return whether the network has a mode of its own, in which it gives the same logits twice."""
        if not self.in_training or any(getattr(part, "compares_tokens", False) for part in self.network.modules()):
            return False
        with _in_training(self.in_training):
            return torch.equal(call(), call())

    def _logits_differ(self, way: _Way, length: int) -> bool:
        """Return whether a document's logits differ from those of the same document alone, or with another A."""
        plain = self._logits({"input_ids": self.rows}, [])
        limit = self.tolerance * (2 * self._effect(plain) + float(_norms(plain).max()) / 8)
        packed = self._logits(way(self.network, self.rows, self.positions), [])[:2, self.first :]
        alone = self._last(packed.shape[1], {"input_ids": self.rows[:1, self.first :]})
        differences = [packed - alone]
        if length > _ROW:
            alone = self._long(_without_isolation, length, [], 0, True)
            differences += [self._long(way, length, [], shift) - alone for shift in (0, 1)]
        return any(float(_norms(difference).max()) > limit for difference in differences)

    def _last(self, count: int, inputs: _Inputs) -> Tensor:
        """Return the logits of the last tokens of one row."""
        logits = self._call(inputs, [])
        return logits.reshape(-1, logits.shape[-1])[-count:].float()

    @contextmanager
    def _weights(self, state: Values, larger: bool = False) -> Iterator[None]:
        """Run the body with other weights. Parts that keep gathered weights gather them again."""
        if not state and not larger:
            yield
            return
        self.free()
        with enlarged(self.network) if larger else nullcontext(), replaced(state):
            try:
                yield
            finally:
                self.free()

    def _cases(self) -> list[tuple[Values, bool]]:
        """Return the states of the network in which it is tested, each with whether it is in its own mode."""
        cases: list[tuple[Values, bool]] = [([], False), (self.noise, False)]
        if self.in_training:
            cases += [([], True), (self.noise, True)]
        return cases

    def _lookups(self, inputs: _Inputs, chosen: Tensor) -> Iterator[Lookups]:
        """Yield the lookups of calls with the network's weights and with noise, in eval mode and in its own mode."""
        if not self.differentiates:
            return
        for state, training in self._cases():
            with self._weights(state):  # until the backward pass has ended, which may recompute the forward pass
                found = self._attempt(partial(self._logits, inputs, []), tuple(self.rows.shape), chosen, training)
            if found is not None:
                yield found

    def _attempt(
        self, call: Callable[[], Tensor], shape: tuple[int, ...], chosen: Tensor | None, training: bool
    ) -> Lookups | None:
        """Return the lookups of a call, or None if it cannot be differentiated, such as for operators without gradient.

        Raises:
            Exception: If the network fails in training mode, in which it would fail in the next step, too.
        """
        failed = None
        with _in_training(self.in_training if training else ()):
            try:
                return lookups(call, shape, chosen)
            except Exception as error:  # networks raise different errors
                failed = error
            if training and not isinstance(failed, torch.OutOfMemoryError):
                call()
        return None

    def equals(self, way: _Way, other: _Way, length: int) -> bool:
        """Return whether the network takes the arguments of another way, and isolates documents as well with them."""
        if self.blind:
            return False
        try:
            read_starts()
            for state, plain in self.plain_logits:
                expected = self._logits(way(self.network, self.rows, self.positions), state)
                logits = self._logits(other(self.network, self.rows, self.positions), state)
                if self._most(expected - logits, plain) > self.tolerance:
                    return False
            state, plain = self.plain_logits[0]
            expected = self._long(way, length, state, 0)
            logits = self._long(other, length, state, 0)
            if float(_norms(expected - logits).median()) / self._effect(plain) > self.tolerance:
                return False
            return not self._reads_other(other, length)
        except Exception:  # networks raise different errors for arguments that they do not take
            return False

    def _near(self, way: Any, state: Values, plain: Tensor | None) -> float:
        """Return the leak in the probe rows: with A replaced, and without A."""
        logits = self._logits(way(self.network, self.rows, self.positions), state)
        if plain is None:
            return 0.0
        second = logits[0, self.first :]
        after_other = logits[1, self.first :]
        alone = plain[3, : len(logits[3]) - self.first]
        return max(self._most(second - after_other, plain), self._most(second - alone, plain))

    def _far(self, way: Any, length: int, state: Values, plain: Tensor) -> float:
        """Return the leak at the last tokens of a long row: with A replaced, and without A.

        The median over tokens is used, because rounding may choose other experts for single tokens.
        """
        logits = self._long(way, length, state, 0)
        after_other = self._long(way, length, state, 1)
        alone = self._long(_without_isolation, length, state, 0, alone=True)
        leaks = [float(_norms(logits - other).median()) for other in (after_other, alone)]
        return max(leaks) / self._effect(plain)

    def _long(self, way: Any, length: int, state: Values, shift: int, alone: bool = False) -> Tensor:
        """Return the logits of the last tokens of a row of two documents.

        ``shift`` changes the tokens of the first one, and ``alone`` leaves it out.
        """
        length = min(length, longest_row(self.network))
        first = _first_of(length)
        index = torch.arange(length, device=self.rows.device)
        positions = torch.where(index < first, index, index - first)[None]
        last = {"logits_to_keep": _ROW} if "logits_to_keep" in arguments_of(self.network) else {}
        row = self.tokens[(index + shift * (index < first)) % len(self.tokens)][None]
        if alone:
            row = row[:, first:]
            positions = positions[:, first:]
        logits = self._call(way(self.network, row, positions) | last, state)
        return logits.reshape(-1, logits.shape[-1])[-min(_ROW, length - first) :].float()

    def _logits(self, inputs: _Inputs, state: Values) -> Tensor:
        logits = self._call(inputs, state).float()
        return logits.reshape(-1, self.rows.shape[1], logits.shape[-1])

    def _call(self, inputs: _Inputs, state: Values) -> Tensor:
        inputs = {**self.plain, **inputs}
        with self._weights(state):
            output = self.network(**inputs)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits

    def _effect(self, logits: Tensor) -> float:
        """Return the largest change of a later token's logits by the changed tokens of B."""
        after = self.first + self.changed
        return float(_norms(logits[0, after:] - logits[2, after:]).max())

    def _most(self, difference: Tensor, logits: Tensor) -> float:
        """Return the largest norm of a difference of logits, relative to the effect of B's own tokens."""
        return float(_norms(difference).max()) / self._effect(logits)


def _without_masks(network: Any, way: _Way) -> _Way | None:
    """Return the way without masks that may replace ``way``. Nothing is tested here."""
    if isinstance(network, GPT):
        return None
    reach = reach_of(network, longest_row(network))
    if reach is None:
        return None
    if way is by_lengths:
        return by_lengths_and_windows
    return by_starts if reach.whole else by_windows


def _usual_way(network: Any) -> _Way:
    """Return the way that isolates documents in most networks, for a network that cannot be tested."""
    adds_keys = any(getattr(part, "adds_keys", False) for part in network.modules())  # prefixes have no start
    way = None if adds_keys else _without_masks(network, by_positions)
    if way is None:
        return by_positions
    read_starts()
    return way


def _first_of(length: int) -> int:
    """Return the number of tokens of the first document of a long row.

    It is odd, so that it is no multiple of the chunks that layers form.
    """
    return length * 7 // 16 | 1


def _norms(logits: Tensor) -> Tensor:
    return torch.linalg.vector_norm(logits, dim=-1)


def _packed(network: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    """Return whether a batch has rows with several documents."""
    if "position_ids" not in batch:
        return False
    if "attention_mask" not in batch or isinstance(network, GPT):
        return True
    real = batch["attention_mask"].bool()  # in padded rows of one document positions restart only after padding
    return bool(((batch["position_ids"].diff(dim=1) != 1) & real[:, 1:] & real[:, :-1]).any())


@contextmanager
def _in_training(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Run the body with some modules of a network that is in eval mode in training mode."""
    for part in parts:
        part.training = True
    try:
        yield
    finally:
        for part in parts:
            part.training = False


@contextmanager
def undisturbed(network: nn.Module, device: torch.device) -> Iterator[list[nn.Module]]:
    """Context for calls of a network in eval mode, eagerly and without gradients, that leave no trace.

    The value is the list of the parts that were in training mode, or recompute their activations in that mode alone.
    """
    parts: list[Any] = list(network.modules())
    in_training = [part for part in parts if part.training or getattr(part, "gradient_checkpointing", False)]
    # Owners of forward hooks may count calls or update metrics, such as callbacks.
    for owner in hook_owners(network):
        parts.append(owner)
        for value in vars(owner).values():
            if isinstance(value, nn.Module):
                parts += value.modules()
    # Tensors that need gradients are no state, but results, or FSDP's views of gathered weights.
    beside = [value for part in parts for value in held_beside(part)]
    held = [value for value in beside if not (isinstance(value, Tensor) and value.requires_grad)]
    record = Rewind(held, parts, outside=_left_alone)
    kind = device.type
    # Without autocast's cache: the training step must not find weights there that were cast without gradients.
    autocast = torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    )
    # TensorFloat-32 would round float32 networks to 11 bits.
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        eagerly = torch.compiler.set_stance("force_eager")
        # Without dispatch modes, so that meters do not count these calls.
        # Validation runs in inference mode, in which nothing can be differentiated.
        with torch.inference_mode(False), evaluating(network), torch.no_grad(), autocast, eagerly, no_dispatch_modes():
            yield in_training
    finally:
        torch.set_float32_matmul_precision(precision)
        record.restore()


def _left_alone(kind: type) -> bool:
    """Return whether Rewind ignores a type: it records plain containers and tensors only, and no weights."""
    plain = issubclass(kind, dict | list | tuple | set | deque | Tensor)
    return not plain or issubclass(kind, nn.Parameter) or hasattr(kind, "to_local")
