"""What tokens see in a language model, asked of the network itself: no later token, no other document of their row.

    leak = max_t |f(A B)_t - f(A' B)_t| / max_t |f(A B)_t - f(A B')_t|        t in B; B' changes B's first tokens only

A changes B as much as B itself does where documents see each other, and not at all where they do not: with A replaced,
and without A. What keeps them apart differs from network to network, so the ways are tried in order. Costs two to eight
calls with five rows of at most 16 tokens, and for packed rows two calls with one row as long as theirs, for layers that
put together what lies further apart; once. Weights, buffers, counters, modes and random states are put back.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lit_efficient.distributed.row_slices import ROW_POSITIONS
from lit_efficient.errors import ConfigurationError
from lit_efficient.internals.torch_dispatch import no_dispatch_modes
from lit_efficient.internals.torch_fake import has_values
from lit_efficient.internals.torch_modules import held_beside, hook_owners
from lit_efficient.mechanisms.rewind import Rewind
from lit_efficient.models.generation.batched import arguments_of, longest_row
from lit_efficient.models.networks.document_attention import causal_throughout, document_starts, read_starts
from lit_efficient.models.networks.gpt import GPT
from lit_efficient.models.probes.modes import evaluating, whole_precision

_ROW = 16
# Of networks that leak none, the rounding alone: 0 to 1e-4 in float32, up to 0.06 in bfloat16; of those that do, 0.08
# to 8 over all architectures of transformers.
_EXACT, _COARSE = 5e-3, 0.07
_Inputs = dict[str, Any]


def by_positions(network: Any, input_ids: Tensor, position_ids: Tensor) -> _Inputs:
    """Positions that start over: most attention models make their mask of them."""
    return {"input_ids": input_ids, "position_ids": position_ids}


def by_mask(network: Any, input_ids: Tensor, position_ids: Tensor) -> _Inputs:
    """A block-diagonal mask for each kind of layer, of the kind that the network's attention takes."""
    from transformers.masking_utils import create_masks_for_generate

    make = getattr(network, "create_masks_for_generate", create_masks_for_generate)
    like = torch.empty((*input_ids.shape, 0), dtype=network.dtype, device=input_ids.device)
    mask = make(network.config, like, None, None, position_ids=position_ids)
    return by_positions(network, input_ids, position_ids) | {"attention_mask": mask}


def by_lengths(network: Any, input_ids: Tensor, position_ids: Tensor) -> _Inputs:
    """All rows as one, with the documents' bounds: what kernels for state-space layers and flash attention take."""
    begins = (position_ids.diff(dim=1, prepend=position_ids[:, :1] - 2) != 1).flatten()
    bounds = torch.cat((begins.nonzero()[:, 0], begins.new_tensor([begins.numel()], dtype=torch.int64))).int()
    longest = int(bounds.diff().max())
    return by_positions(network, input_ids.reshape(1, -1), position_ids.reshape(1, -1)) | {
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest,
        "seq_idx": (begins.cumsum(0) - 1).int()[None],
    }  # fmt: skip


def by_starts(network: Any, input_ids: Tensor, position_ids: Tensor) -> _Inputs:
    """The number of the token at which each one's document begins, in the place of a mask of T x T."""
    starts = document_starts(position_ids)[:, None, None]
    return by_positions(network, input_ids, position_ids) | {"attention_mask": starts}


WAYS = {"position_ids": by_positions, "a block-diagonal mask": by_mask, "lengths of documents": by_lengths}


class DocumentRows:
    """The arguments with which a network reads batches of documents; before the first ones it is asked what it sees."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._asked: nn.Module | None = None
        self._way: Callable[[Any, Tensor, Tensor], _Inputs] | None = None
        self._refusal: ConfigurationError | None = None

    def arguments(
        self, network: nn.Module, batch: Mapping[str, Tensor], agree: Callable[[bool], bool] = bool
    ) -> _Inputs:
        """What to call the network with. ``input_ids`` may be ``[1, B T]`` then, and so is what comes back.

        The batch has ``input_ids`` ``[B, T]``, with ``position_ids`` if it is packed, ``attention_mask`` if padded,
        or slices of rows (`own_slices`); ``agree`` says whether all processes say yes, where several call at once.

        Raises:
            ConfigurationError: if a token sees later ones, nothing keeps the documents of a row apart, or, of slices,
                not the starts of documents alone do.
        """
        plain: _Inputs = {} if isinstance(network, GPT) else {"use_cache": False}
        packed = ROW_POSITIONS in batch or _packed(network, batch)
        # Not as late as a packed batch: another process may have its first one in another step, and waits there.
        may_be = "position_ids" in batch and self._way is None and self._refusal is None
        if not has_values(next(network.parameters())):  # as in a plan: it cannot be asked
            self._asked, self._way = network, _usual_way(network)
        elif self._asked is not network or may_be:
            with _undisturbed(network, batch["input_ids"].device):
                probe = _Probe(network, batch["input_ids"].device, plain)
                if self._asked is not network:
                    self._way = self._refusal = None
                    self._check_causal(probe, agree)
                    self._asked = network
                if "position_ids" in batch:
                    try:
                        self._way = self._find(probe, batch["input_ids"].shape[1], agree)
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
        return plain | {name: batch[name] for name in ("input_ids", *optional) if name in batch}

    def _of_slices(self, network: nn.Module, batch: Mapping[str, Tensor]) -> _Inputs:
        ids, positions = batch["input_ids"], batch[ROW_POSITIONS]
        if isinstance(network, GPT):
            return by_positions(network, ids, positions)
        if self._way is not by_starts:  # only then nothing but the attention that gathers has tokens see others
            raise ConfigurationError(
                f"{self.owner}: {type(network).__name__} mixes tokens by more than torch's causal attention "
                "(attn_implementation: sdpa), so that its rows cannot be cut: set parallel.context to 1"
            )
        starts = by_starts(network, ids, positions)["attention_mask"]
        return by_positions(network, ids, batch["position_ids"]) | {"attention_mask": starts}

    def _check_causal(self, probe: "_Probe", agree: Callable[[bool], bool]) -> None:
        if probe.blind:
            rank_zero_warn(
                f"{self.owner}: it is not known whether tokens of {probe.name} see later ones, or other documents of "
                "their row: no token changes what follows it, or the logits are not finite"
            )
        if not agree(probe.sees_later <= probe.tolerance):
            decoder = "config_fields: {is_decoder: true}, or " if hasattr(probe.network.config, "is_decoder") else ""
            raise ConfigurationError(
                f"{self.owner}: {probe.name} is not causal: its tokens see later ones ({probe.sees_later:.2g} of what "
                f"an earlier one changes), so that each would be predicted from itself; take {decoder}a decoder"
            )

    def _find(
        self, probe: "_Probe", length: int, agree: Callable[[bool], bool]
    ) -> Callable[[Any, Tensor, Tensor], _Inputs]:
        reasons = []
        for name, way in WAYS.items():
            leak, reason = probe.leak(way, length)
            if agree(leak <= probe.tolerance):
                if agree(probe.takes_starts(way, length)):
                    return by_starts
                if way is not by_positions:
                    rank_zero_info(f"{self.owner}: packed documents are kept apart by {name} in {probe.name}")
                return way
            reasons.append(f"with {name} {reason}")
        raise ConfigurationError(
            f"{self.owner}: documents of a packed row see each other in {probe.name}: {'; '.join(reasons)}. Give each "
            "document a row of its own: data.init_args.pack=false"
        )


class _Probe:
    """Five rows, and what a network makes of them: A B, A' B, A B', B A, and A B with another last token."""

    def __init__(self, network: nn.Module, device: torch.device, plain: _Inputs) -> None:
        self.network: Any = network
        self.name = type(network).__name__
        self.plain = plain
        self.tolerance = _EXACT if whole_precision(network, device) else _COARSE
        length = min(_ROW, longest_row(network))
        self.first = length * 7 // 16  # tokens of A
        self.changed = (length - self.first) // 2  # those of B that are others in B'
        tokens = _tokens(self.network)
        index = torch.arange(length)
        row, other = (tokens[(index + shift) % len(tokens)] for shift in (0, 1))
        begins, ends = self.first, self.first + self.changed
        places = [index < begins, (index >= begins) & (index < ends), index == length - 1]
        rows = [row, *(torch.where(place, other, row) for place in places)]
        rows.insert(3, row.roll(-self.first))  # B A
        self.rows = torch.stack(rows).to(device)
        positions = torch.cat((torch.arange(self.first), torch.arange(length - self.first))).repeat(5, 1)
        positions[3] = torch.cat((torch.arange(length - self.first), torch.arange(self.first)))
        self.positions = positions.to(device)
        states: list[dict[str, Tensor]] = [{}]
        if awake := _awake(network):
            states.append(awake)
        self.plain_logits = [(state, self._logits({"input_ids": self.rows}, state)) for state in states]
        self.plain_logits = [
            (state, logits)
            for state, logits in self.plain_logits
            if self._effect(logits) > 1e-6 * float(_norms(logits).max())
        ]
        self.blind = not self.plain_logits
        later = [self._most(logits[0, :-1] - logits[4, :-1], logits) for _, logits in self.plain_logits]
        self.sees_later = max(later, default=0.0)

    def leak(self, way: Callable[[Any, Tensor, Tensor], _Inputs], length: int) -> tuple[float, str]:
        """By how much A changes B, in rows of up to ``length`` tokens, and how to say it."""
        try:
            asked: list[tuple[dict[str, Tensor], Tensor | None]] = [*self.plain_logits] or [({}, None)]
            leaks = [self._near(way, state, plain) for state, plain in asked]
            if max(leaks) <= self.tolerance and length > _ROW:
                leaks += [self._far(way, length, *found) for found in self.plain_logits[:1]]
        except Exception as error:  # each network refuses what it does not take in its own way
            return float("inf"), f"it fails ({str(error).strip().splitlines()[0] if str(error) else repr(error)})"
        return max(leaks), f"one changes the next by {max(leaks):.2g} of what that changes itself"

    def takes_starts(self, way: Callable[[Any, Tensor, Tensor], _Inputs], length: int) -> bool:
        """Whether the network gives the same without a mask as in a ``way`` that keeps documents apart."""
        if self.blind or isinstance(self.network, GPT):
            return False
        try:
            if not causal_throughout(self.network, min(longest_row(self.network), 1 << 20)):
                return False
            read_starts()
            for state, plain in self.plain_logits:
                there, here = (
                    self._logits(each(self.network, self.rows, self.positions), state) for each in (way, by_starts)
                )
                if self._most(there - here, plain) > self.tolerance:
                    return False
            state, plain = self.plain_logits[0]
            there, here = (self._long(each, length, state, 0) for each in (way, by_starts))
            return float(_norms(there - here).median()) / self._effect(plain) <= self.tolerance
        except Exception:  # each network refuses what it does not take in its own way
            return False

    def _near(self, way: Any, state: dict[str, Tensor], plain: Tensor | None) -> float:
        logits = self._logits(way(self.network, self.rows, self.positions), state)
        if plain is None:
            return 0.0
        second, alone = logits[0, self.first :], plain[3, : len(logits[3]) - self.first]
        return max(self._most(second - other, plain) for other in (logits[1, self.first :], alone))

    def _far(self, way: Any, length: int, state: dict[str, Tensor], plain: Tensor) -> float:
        """The same of a long row's last tokens: the middle of them, as rounding may choose other experts for one."""
        there, here = (self._long(way, length, state, shift) for shift in (0, 1))
        return float(_norms(there - here).median()) / self._effect(plain)

    def _long(self, way: Any, length: int, state: dict[str, Tensor], shift: int) -> Tensor:
        """Logits of the last tokens of a row of two documents, the first of which has other tokens with ``shift``."""
        length = min(length, longest_row(self.network))
        first = length * 7 // 16 | 1  # no multiple of what layers put together
        index = torch.arange(length, device=self.rows.device)
        positions = torch.where(index < first, index, index - first)[None]
        tokens = _tokens(self.network).to(self.rows.device)
        last = {"logits_to_keep": _ROW} if "logits_to_keep" in arguments_of(self.network) else {}
        row = tokens[(index + shift * (index < first)) % len(tokens)][None]
        logits = self._call(way(self.network, row, positions) | last, state)
        return logits.reshape(-1, logits.shape[-1])[-min(_ROW, length - first) :].float()

    def _logits(self, inputs: _Inputs, state: dict[str, Tensor]) -> Tensor:
        return self._call(inputs, state).float().reshape(*self.rows.shape, -1)

    def _call(self, inputs: _Inputs, state: dict[str, Tensor]) -> Tensor:
        inputs = {**self.plain, **inputs}
        output = torch.func.functional_call(self.network, state, (), inputs) if state else self.network(**inputs)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits

    def _effect(self, logits: Tensor) -> float:
        behind = self.first + self.changed
        return float(_norms(logits[0, behind:] - logits[2, behind:]).max())

    def _most(self, difference: Tensor, logits: Tensor) -> float:
        return float(_norms(difference).max()) / self._effect(logits)


def _usual_way(network: Any) -> Callable[[Any, Tensor, Tensor], _Inputs]:
    """What keeps documents apart in most networks."""
    adds_keys = any(getattr(part, "adds_keys", False) for part in network.modules())  # that no start counts
    if isinstance(network, GPT) or adds_keys or not causal_throughout(network, min(longest_row(network), 1 << 20)):
        return by_positions
    read_starts()
    return by_starts


def _norms(logits: Tensor) -> Tensor:
    return torch.linalg.vector_norm(logits, dim=-1)


def _tokens(network: Any) -> Tensor:
    """Some ids that are no special ones, spread over the vocabulary."""
    if isinstance(network, GPT):
        return torch.arange(network.head.out_features)[:: max(1, network.head.out_features // _ROW)]
    config = network.config.get_text_config()
    given = [getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos")]
    special = {token for ids in given for token in (ids if isinstance(ids, list) else [ids])}
    usual = torch.tensor([token for token in range(config.vocab_size) if token not in special] or [0])
    return usual[:: max(1, len(usual) // _ROW)]


def _awake(network: nn.Module) -> dict[str, Tensor]:
    """Noise in place of the parameters that are all zero: behind them a fresh network hides what it will see.

    Be it all, or what one kind of its layers would carry from document to document.
    """
    zeros = {
        name: parameter
        for name, parameter in network.named_parameters()
        if type(parameter) is nn.Parameter
        and parameter.is_floating_point()
        and parameter.numel()
        and not parameter.any()
    }
    return {name: torch.linspace(-0.1, 0.1, p.numel()).to(p).sin_().view_as(p) for name, p in zeros.items()}


def _packed(network: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    if "position_ids" not in batch:
        return False
    if "attention_mask" not in batch or isinstance(network, GPT):
        return True
    real = batch["attention_mask"].bool()  # positions of padded rows start over behind the filling only
    return bool(((batch["position_ids"].diff(dim=1) != 1) & real[:, 1:] & real[:, :-1]).any())


@contextmanager
def _undisturbed(network: nn.Module, device: torch.device) -> Iterator[None]:
    """Call ``network`` in eval mode, eagerly and without gradients, as if it had not been called."""
    parts: list[Any] = list(network.modules())
    owners = hook_owners(network)  # a callback that counts, say, or measures by metrics
    parts += owners
    parts += [
        part for owner in owners for own in vars(owner).values() if isinstance(own, nn.Module) for part in own.modules()
    ]
    held = [value for part in parts for value in held_beside(part)]
    record = Rewind(held, parts, outside=_left_alone)
    kind = device.type
    # A weight that is cast here, without gradients, must not be what the step finds in autocast's cache.
    autocast = torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False
    )
    try:
        eagerly = torch.compiler.set_stance("force_eager")
        with evaluating(network), torch.no_grad(), autocast, eagerly, no_dispatch_modes():  # who counts does not see it
            yield
    finally:
        record.restore()


def _left_alone(kind: type) -> bool:
    """All but plain containers and tensors: nothing writes weights here, and what objects hold belongs together."""
    plain = issubclass(kind, dict | list | tuple | set | deque | Tensor)
    return not plain or issubclass(kind, nn.Parameter) or hasattr(kind, "to_local")
