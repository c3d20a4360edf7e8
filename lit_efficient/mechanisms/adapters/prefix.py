"""Trainable keys and values in front of a sequence: the tensors, where they stand, and what they start from.

    attention(q, [P_k; k], [P_v; v])    P_k, P_v [layers, heads, n, head_dim], the same for all sequences
    direct       P = trained
    projection   P = P_0 + W_out tanh(W_up e + b_up) + b_out,    e [n, dim];  W_out starts at zero

A prefix that starts from tokens t is the keys and values that the frozen network computes for them. Until it trains,
the network computes for x what it computes for [t; x]: tokens of x stand at the positions n, n + 1, ... for good.
Sources: Li & Liang (2021), https://arxiv.org/abs/2101.00190; P-tuning v2 https://arxiv.org/abs/2110.07602.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.internals.torch_modules import StaysFloat32
from lit_efficient.mechanisms.adapters.base import FollowsBase
from lit_efficient.mechanisms.adapters.disabled import Switchable
from lit_efficient.mechanisms.adapters.prefix_cache import PrefixCache, computed_by_transformer, owner_of, prefixed_call
from lit_efficient.models.networks.gpt import GPT, KVCache, rotary_table
from lit_efficient.models.probes.modes import evaluating
from lit_efficient.surgery import mix_in

CHILD = "prefix_tuning"  # the name under which the prefix stands in the decoder


def prefix_of(tensors: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Keys and values, [layers, heads, n, head_dim] each, from the tensors of :class:`PrefixVectors` by name."""
    keys, values, embedding = (tensors.get(f"prefix_{name}") for name in ("keys", "values", "embedding"))
    assert keys is not None
    assert values is not None
    if embedding is None:
        return keys, values
    up, up_bias, out, out_bias = (tensors[f"prefix_{name}"] for name in ("up", "up_bias", "out", "out_bias"))
    assert up is not None
    assert out is not None
    change = F.linear(torch.tanh(F.linear(embedding, up, up_bias)), out, out_bias)  # (n, 2 layers heads head_dim)
    layers, heads, length, width = keys.shape
    change = change.view(length, 2, layers, heads, width).permute(1, 2, 3, 0, 4)
    return keys + change[0], values + change[1]


class PrefixVectors(StaysFloat32, nn.Module):
    """The prefix of all layers, trained directly or through a small network.

    Args:
        keys: What the keys start from, [layers, heads, n, head_dim]; copied.
        values: As ``keys``.
        embedding: For a projection: the input [n, dim] of the small network; copied.
        projection: For a projection: the width inside it.
        seed: Of the projection's first matrix.
    """

    float32 = ("prefix_",)

    def __init__(
        self, keys: Tensor, values: Tensor, embedding: Tensor | None = None, projection: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        # float32 beside a narrower base: at usual rates a bfloat16 value would hardly move
        wide = torch.promote_types(keys.dtype, torch.float32)
        keys, values = (t.detach().to(wide).clone() for t in (keys, values))
        if embedding is None:
            self.prefix_keys: Tensor = nn.Parameter(keys)
            self.prefix_values: Tensor = nn.Parameter(values)
            self.register_parameter("prefix_embedding", None)
            return
        self.register_buffer("prefix_keys", keys)
        self.register_buffer("prefix_values", values)
        inner, outer = embedding.shape[1], 2 * keys.shape[0] * keys.shape[1] * keys.shape[3]
        up = _drawn((projection, inner), seed, 3) / inner**0.5
        self.prefix_embedding = nn.Parameter(embedding.detach().to(wide).clone())
        self.prefix_up = nn.Parameter(up.to(keys))
        self.prefix_up_bias = nn.Parameter(keys.new_zeros(projection))
        self.prefix_out = nn.Parameter(keys.new_zeros(outer, projection))
        self.prefix_out_bias = nn.Parameter(keys.new_zeros(outer))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Keys and values, [layers, heads, n, head_dim] each."""
        return prefix_of(dict([*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]))


class PrefixedDecoder(FollowsBase, Switchable):
    """What both kinds of decoders share; mixed in front of the decoder's own class."""

    prefix_tuning: PrefixVectors
    adds_keys: ClassVar[bool] = True  # attention has more of them than tokens
    prefix_tokens: tuple[int, ...]  # what the prefix started from; empty: random numbers
    prefix_length: int

    def vectors(self, held: bool) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, heads, n, head_dim]; where a cache has ``held`` them already, their n is all."""
        return self.prefix_tuning()

    def follow_base(self) -> None:
        """Start again from the same tokens, in other weights."""
        if not self.prefix_tokens:
            return
        keys, values = computed(self, self.prefix_tokens)
        vectors = self.prefix_tuning
        with torch.no_grad():
            vectors.prefix_keys.copy_(keys)
            vectors.prefix_values.copy_(values)
            if vectors.prefix_embedding is not None:
                vectors.prefix_embedding.copy_(embeddings(self).weight[list(self.prefix_tokens)])


class PrefixedTransformer(PrefixedDecoder):
    """A decoder of transformers, whose cache is filled with the prefix before it is used."""

    prefix_positional: tuple[str, ...]  # names of the positional arguments of its forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's own output for a sequence that the prefix stands before."""
        if self.adapter_off:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        kwargs |= dict(zip(self.prefix_positional, args, strict=False))
        cache = kwargs.get("past_key_values")
        keys, values = self.vectors(cache is not None and cache.get_seq_length() > 0)
        return prefixed_call(self, super().forward, kwargs, keys, values)  # type: ignore[misc]


class PrefixedGPT(PrefixedDecoder):
    """This package's GPT; an empty cache of a generation gets the prefix first."""

    config: Any
    embedding: nn.Embedding

    def features(self, input_ids: Tensor, cache: list[Any] | None = None, position_ids: Tensor | None = None) -> Tensor:
        """Hidden states of the tokens, which stand at the positions n, n + 1, ..."""
        if self.adapter_off:
            return super().features(input_ids, cache, position_ids)  # type: ignore[misc]
        if position_ids is not None:
            raise ConfigurationError(
                f"{owner_of(self)}: this GPT cannot have virtual tokens before each document of a packed row; do not "
                "pack (data.init_args.pack=false), or take a model of transformers"
            )
        seen = cache[0].length if cache else 0
        keys, values = self.vectors(seen > 0)
        room = self.config.max_length - self.prefix_length
        length = input_ids.shape[1] + max(0, seen - self.prefix_length)
        if length > room:
            raise ConfigurationError(
                f"{owner_of(self)}: {self.prefix_length} of max_length = {self.config.max_length} positions are for "
                f"virtual tokens, so that sequences have at most {room} tokens, got {length}"
            )
        if cache is None:
            cache = [PrefixCache(k[None], v[None]) for k, v in zip(keys, values, strict=True)]
        elif seen == 0:
            device = input_ids.device.type
            dtype = self.embedding.weight.dtype
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
            for store, k, v in zip(cache, keys, values, strict=True):
                store.max_length += self.prefix_length
                store.append(*(t.to(dtype).expand(len(input_ids), *t.shape) for t in (k, v)))
        features: Tensor = super().features(input_ids, cache)  # type: ignore[misc]
        return features


def find_decoder(root: nn.Module, who: str) -> tuple[str, nn.Module]:
    """Name and module of the only decoder in ``root``: of transformers, without its head, or this package's GPT.

    Raises:
        ConfigurationError: If there is none, or more than one.
    """
    found = {
        name: part
        for name, part in root.named_modules()
        if isinstance(part, GPT | PrefixedTransformer) or _is_transformer(part)
    }
    inner = [
        name for name in found if not any(other.startswith(f"{name}.".lstrip(".")) for other in found if other != name)
    ]
    if len(inner) != 1:
        what = f"{len(inner)} ({', '.join(map(repr, inner))})" if inner else "none"
        raise ConfigurationError(
            f"{who}: needs exactly one decoder with a key-value cache, a causal language model of transformers "
            f"or lit_efficient.GPT, and found {what} in {type(root).__name__}; its parts are: "
            f"{', '.join(f'{name}: {type(part).__name__}' for name, part in root.named_children()) or 'none'}"
        )
    return inner[0], found[inner[0]]


def _is_transformer(module: nn.Module) -> bool:
    ours = any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)
    return ours and "past_key_values" in inspect.signature(module.forward).parameters


def embeddings(decoder: Any) -> nn.Embedding:
    """The table of a decoder's tokens, [vocabulary, dim]."""
    return decoder.embedding if isinstance(decoder, GPT) else decoder.get_input_embeddings()


def computed(decoder: Any, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, heads, n, head_dim] that a decoder computes for ``tokens``, its prefix left out."""
    ids = torch.tensor([list(tokens)], device=embeddings(decoder).weight.device)
    with torch.no_grad(), evaluating(decoder):
        if not isinstance(decoder, GPT):
            return computed_by_transformer(decoder, _plain(decoder).forward, input_ids=ids)
        return computed_from(decoder, decoder.embedding(ids)[0])


def computed_from(decoder: Any, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, heads, n, head_dim] for embeddings [n, dim], its prefix left out; differentiable."""
    embedded = embedded.to(embeddings(decoder).weight.dtype)[None]
    if not isinstance(decoder, GPT):
        return computed_by_transformer(decoder, _plain(decoder).forward, inputs_embeds=embedded)
    config, length = decoder.config, embedded.shape[1]
    caches = [_Recorder(length) for _ in decoder.blocks]
    rotary = rotary_table(0, length, config.head_dim, config.constants.rope_theta, embedded.device)
    for block, cache in zip(decoder.blocks, caches, strict=True):
        embedded = block(embedded, rotary, cache)
    return torch.cat([cache.key for cache in caches]), torch.cat([cache.value for cache in caches])


def _plain(decoder: Any) -> Any:
    return super(PrefixedTransformer, decoder) if isinstance(decoder, PrefixedTransformer) else decoder


class _Recorder(KVCache):
    key: Tensor
    value: Tensor

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.key, self.value = key, value
        self.length = key.shape[2]
        return key, value


def add_prefix(
    decoder: Any, length: int, tokens: Sequence[int] = (), *, projection: int = 0, seed: int = 0
) -> PrefixVectors:
    """Put a prefix in front of all sequences of a decoder, in place; it is returned, and the child ``prefix_tuning``.

    Args:
        decoder: What :func:`find_decoder` gave.
        length: Number n of virtual tokens.
        tokens: The n tokens that it starts from; none: random numbers, as large as the keys and values of
            tokens from all over the vocabulary.
        projection: Width inside the small network that makes the prefix; 0: no such network.
        seed: Of random numbers.

    Raises:
        ConfigurationError: If the decoder cannot have such a prefix.
    """
    table = embeddings(decoder).weight
    keys, values = computed(decoder, tokens or _spread(length, len(table)))
    embedding = table[list(tokens)] if tokens else _drawn((length, table.shape[1]), seed, 2)
    if not tokens:
        keys, values = ((_drawn(t.shape, seed, i) * t.float().std().cpu()).to(t) for i, t in enumerate((keys, values)))
    vectors = PrefixVectors(keys, values, embedding.to(keys) if projection else None, projection, seed)
    setattr(decoder, CHILD, vectors)
    mix_in_prefix(decoder, PrefixedGPT, PrefixedTransformer, prefix_tokens=tuple(tokens), prefix_length=length)
    return vectors


def mix_in_prefix(decoder: Any, gpt: type, transformer: type, **attributes: Any) -> None:
    """Make a decoder one with a prefix: our GPT, or one of transformers, whose ``forward`` may be called by place."""
    if isinstance(decoder, GPT):
        mix_in(decoder, gpt, **attributes)
        return
    parameters = inspect.signature(decoder.forward).parameters.values()
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    mix_in(decoder, transformer, prefix_positional=names, **attributes)


def _spread(length: int, vocabulary: int) -> list[int]:
    """Tokens from all over the vocabulary; its first is padding in many, with an embedding of zeros."""
    return [(i + 1) * vocabulary // (length + 1) for i in range(length)]


def _drawn(shape: Sequence[int], seed: int, stream: int) -> Tensor:
    generator = torch.Generator().manual_seed(4 * seed + stream)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def tokenizer_at(path: str, who: str) -> Any:
    """The tokenizer of a ``tokenizer.json``, or of a folder that has one; ``who`` asks, for the error.

    Raises:
        ConfigurationError: If there is no such file.
    """
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise refusal(who, "tokenizer", "a tokenizer.json or a folder that has one", path)
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def read_tokens(text: str, path: str, who: str) -> list[int]:
    """The token numbers of a text, without special tokens, as :func:`tokenizer_at` has them.

    Raises:
        ConfigurationError: If there is no such file, or the text has no tokens.
    """
    tokens: list[int] = tokenizer_at(path, who).encode(text, add_special_tokens=False).ids
    if not tokens:
        raise ConfigurationError(f"{who}: init_text={text!r} has no tokens in {path!r}")
    return tokens
