"""Prefix tuning: trainable keys and values before a sequence, their initial values, and decoders that use them.

    attention(q, [P_k; k], [P_v; v])    P_k, P_v [layers, heads, n, head_dim], the same for all sequences
    direct       P = trained
    projection   P = P_0 + W_out tanh(W_up e + b_up) + b_out,    e [n, dim];  W_out starts at zero

A prefix that is initialised from tokens t consists of the keys and values that the frozen network computes for t.
Before training, the network's output for x is therefore that for [t; x]. The tokens of x always
have positions n, n + 1, ...
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
from lit_efficient.surgery import autocast_dtype, mix_in

CHILD = "prefix_tuning"  # name of the prefix as a child of the decoder


def prefix_of(tensors: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return keys and values, [layers, heads, n, head_dim] each, from the tensors of :class:`PrefixVectors`.

    Args:
        tensors: Parameters and buffers by name.
    """
    keys = tensors["prefix_keys"]
    values = tensors["prefix_values"]
    embedding = tensors.get("prefix_embedding")
    assert keys is not None
    assert values is not None
    if embedding is None:
        return keys, values
    up = tensors["prefix_up"]
    out = tensors["prefix_out"]
    assert up is not None
    assert out is not None
    inner = torch.tanh(F.linear(embedding, up, tensors["prefix_up_bias"]))
    change = F.linear(inner, out, tensors["prefix_out_bias"])  # (n, 2 layers heads head_dim)
    layers, heads, length, width = keys.shape
    change = change.view(length, 2, layers, heads, width).permute(1, 2, 3, 0, 4)
    return keys + change[0], values + change[1]


class PrefixVectors(StaysFloat32, nn.Module):
    """Prefix of all layers, which is trained directly or through a small network, the projection.

    Args:
        keys: Initial keys, [layers, heads, n, head_dim]. They are copied.
        values: Initial values with the same shape. They are copied.
        embedding: Initial input of the projection, [n, dim], which is copied. None trains the prefix directly.
        projection: Width of the projection's hidden layer.
        seed: Seed of the projection's first matrix.
    """

    float32 = ("prefix_",)

    def __init__(
        self, keys: Tensor, values: Tensor, embedding: Tensor | None = None, projection: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        # float32 for narrower bases as well, because usual learning rates are too small to change a bfloat16 value.
        wide = torch.promote_types(keys.dtype, torch.float32)
        keys = keys.detach().to(wide).clone()
        values = values.detach().to(wide).clone()
        if embedding is None:
            self.prefix_keys: Tensor = nn.Parameter(keys)
            self.prefix_values: Tensor = nn.Parameter(values)
            self.register_parameter("prefix_embedding", None)
            return
        self.register_buffer("prefix_keys", keys)
        self.register_buffer("prefix_values", values)
        inner = embedding.shape[1]
        outer = 2 * keys.shape[0] * keys.shape[1] * keys.shape[3]
        up = _drawn((projection, inner), seed, 3) / inner**0.5
        self.prefix_embedding = nn.Parameter(embedding.detach().to(wide).clone())
        self.prefix_up = nn.Parameter(up.to(keys))
        self.prefix_up_bias = nn.Parameter(keys.new_zeros(projection))
        self.prefix_out = nn.Parameter(keys.new_zeros(outer, projection))
        self.prefix_out_bias = nn.Parameter(keys.new_zeros(outer))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, [layers, heads, n, head_dim] each."""
        return prefix_of(dict([*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]))


class PrefixedDecoder(FollowsBase, Switchable):
    """Base of the mix-ins of decoders with a prefix. The mix-in precedes the decoder's own class."""

    prefix_tuning: PrefixVectors
    adds_keys: ClassVar[bool] = True  # attention has more keys than tokens
    prefix_tokens: tuple[int, ...]  # tokens from which the prefix was initialised; empty for a random one
    prefix_length: int

    def vectors(self, held: bool) -> tuple[Tensor, Tensor]:
        """Return keys and values, [layers, heads, n, head_dim] each.

        Args:
            held: The cache contains the prefix already, so that only the size n of the result is used.
        """
        return self.prefix_tuning()

    def follow_base(self) -> None:
        """Initialise the prefix again from the same tokens, with the present weights."""
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
    """Mix-in of a transformers decoder that puts the prefix into the key-value cache before the forward pass."""

    prefix_positional: tuple[str, ...]  # names of the positional arguments of its forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the decoder's own output for a sequence with the prefix before it."""
        if self.adapter_off:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        kwargs |= dict(zip(self.prefix_positional, args, strict=False))
        cache = kwargs.get("past_key_values")
        keys, values = self.vectors(cache is not None and cache.get_seq_length() > 0)
        return prefixed_call(self, super().forward, kwargs, keys, values)  # type: ignore[misc]


class PrefixedGPT(PrefixedDecoder):
    """Mix-in of this package's GPT with a prefix, which is also put first into an empty cache of a generation."""

    config: Any
    embedding: nn.Embedding

    def features(self, input_ids: Tensor, cache: list[Any] | None = None, position_ids: Tensor | None = None) -> Tensor:
        """Return the hidden states of the tokens, which have positions n, n + 1, ..."""
        if self.adapter_off:
            return super().features(input_ids, cache, position_ids)  # type: ignore[misc]
        if position_ids is not None:
            raise ConfigurationError(
                f"{owner_of(self)}: lit_efficient.GPT does not support virtual tokens before each document of a packed "
                "row. Set data.init_args.pack=false, or use a model of transformers"
            )
        seen = 0
        if cache:
            seen = cache[0].length
        keys, values = self.vectors(seen > 0)
        room = self.config.max_length - self.prefix_length
        length = input_ids.shape[1] + max(0, seen - self.prefix_length)
        if length > room:
            raise ConfigurationError(
                f"{owner_of(self)}: virtual tokens take {self.prefix_length} of the max_length = "
                f"{self.config.max_length} positions, so that sequences have at most {room} tokens, got {length}"
            )
        if cache is None:
            cache = [PrefixCache(k[None], v[None]) for k, v in zip(keys, values, strict=True)]
        elif seen == 0:
            dtype = autocast_dtype(input_ids.device) or self.embedding.weight.dtype
            rows = len(input_ids)
            for store, k, v in zip(cache, keys, values, strict=True):
                store.max_length += self.prefix_length
                store.append(k.to(dtype).expand(rows, *k.shape), v.to(dtype).expand(rows, *v.shape))
        return super().features(input_ids, cache)  # type: ignore[misc]


def find_decoder(root: nn.Module, who: str) -> tuple[str, nn.Module]:
    """Return the name and module of the only decoder in ``root``.

    A decoder is this package's GPT, or a transformers model with a key-value cache, without its output head.

    Args:
        root: Any module.
        who: Name of the technique, for messages.

    Raises:
        ConfigurationError: If there is no decoder, or more than one.
    """
    found = {}
    for name, part in root.named_modules():
        if isinstance(part, GPT | PrefixedTransformer) or _is_transformer(part):
            found[name] = part
    inner = []
    for name in found:
        prefix = f"{name}.".lstrip(".")
        if not any(other.startswith(prefix) for other in found if other != name):
            inner.append(name)
    if len(inner) != 1:
        what = f"{len(inner)} ({', '.join(map(repr, inner))})" if inner else "none"
        children = ", ".join(f"{name}: {type(part).__name__}" for name, part in root.named_children())
        raise ConfigurationError(
            f"{who}: needs exactly one decoder with a key-value cache, a causal language model of transformers "
            f"or lit_efficient.GPT, and found {what} in {type(root).__name__}, whose parts are: {children or 'none'}"
        )
    return inner[0], found[inner[0]]


def _is_transformer(module: nn.Module) -> bool:
    ours = any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)
    return ours and "past_key_values" in inspect.signature(module.forward).parameters


def embeddings(decoder: Any) -> nn.Embedding:
    """Return the token embedding of a decoder, with a weight [vocabulary, dim]."""
    if isinstance(decoder, GPT):
        return decoder.embedding
    return decoder.get_input_embeddings()


def computed(decoder: Any, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the keys and values that a decoder computes for ``tokens`` without its prefix.

    The shape of both is [layers, heads, n, head_dim]. The result has no gradient.
    """
    ids = torch.tensor([list(tokens)], device=embeddings(decoder).weight.device)
    with torch.no_grad(), evaluating(decoder):
        if not isinstance(decoder, GPT):
            return computed_by_transformer(decoder, _plain(decoder).forward, input_ids=ids)
        return computed_from(decoder, decoder.embedding(ids)[0])


def computed_from(decoder: Any, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values that a decoder computes for embeddings [n, dim] without its prefix, differentiably.

    The shape of both is [layers, heads, n, head_dim].
    """
    embedded = embedded.to(embeddings(decoder).weight.dtype)[None]
    if not isinstance(decoder, GPT):
        return computed_by_transformer(decoder, _plain(decoder).forward, inputs_embeds=embedded)
    config = decoder.config
    length = embedded.shape[1]
    caches = [_Recorder(length) for _ in decoder.blocks]
    rotary = rotary_table(0, length, config.head_dim, config.constants.rope_theta, embedded.device)
    for block, cache in zip(decoder.blocks, caches, strict=True):
        embedded = block(embedded, rotary, cache)
    return torch.cat([cache.key for cache in caches]), torch.cat([cache.value for cache in caches])


def _plain(decoder: nn.Module) -> Any:
    if isinstance(decoder, PrefixedTransformer):
        return super(PrefixedTransformer, decoder)
    return decoder


class _Recorder(KVCache):
    key: Tensor
    value: Tensor

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.key = key
        self.value = value
        self.length = key.shape[2]
        return key, value


def add_prefix(
    decoder: nn.Module, length: int, tokens: Sequence[int] = (), *, projection: int = 0, seed: int = 0
) -> PrefixVectors:
    """Add a prefix to a decoder, in place, as its child ``prefix_tuning``, and return the prefix.

    Args:
        decoder: Decoder that :func:`find_decoder` returned.
        length: Number n of virtual tokens.
        tokens: The n tokens from which the prefix is initialised. If it is empty, the prefix is random, with the
            standard deviations of the keys and values of tokens from the whole vocabulary.
        projection: Width of the hidden layer of the projection, or 0 for a prefix without one.
        seed: Seed of random values.

    Raises:
        ConfigurationError: If the decoder does not support a prefix.
    """
    table = embeddings(decoder).weight
    keys, values = computed(decoder, tokens or _spread(length, len(table)))
    if tokens:
        embedding = table[list(tokens)]
    else:
        embedding = _drawn((length, table.shape[1]), seed, 2)
        keys = (_drawn(keys.shape, seed, 0) * keys.float().std().cpu()).to(keys)
        values = (_drawn(values.shape, seed, 1) * values.float().std().cpu()).to(values)
    vectors = PrefixVectors(keys, values, embedding.to(keys) if projection else None, projection, seed)
    setattr(decoder, CHILD, vectors)
    mix_in_prefix(decoder, PrefixedGPT, PrefixedTransformer, prefix_tokens=tuple(tokens), prefix_length=length)
    return vectors


def mix_in_prefix(decoder: nn.Module, gpt: type, transformer: type, **attributes: object) -> None:
    """Apply the mix-in ``gpt`` or ``transformer`` to a decoder, by its class, in place.

    Args:
        decoder: The decoder.
        gpt: Mix-in for this package's GPT.
        transformer: Mix-in for a decoder of transformers.
        attributes: Attributes of the decoder.
    """
    if isinstance(decoder, GPT):
        mix_in(decoder, gpt, **attributes)
        return
    parameters = inspect.signature(decoder.forward).parameters.values()
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    mix_in(decoder, transformer, prefix_positional=names, **attributes)


def _spread(length: int, vocabulary: int) -> list[int]:
    """Return tokens from the whole vocabulary, except the first, which is often padding with an embedding of zeros."""
    return [(i + 1) * vocabulary // (length + 1) for i in range(length)]


def _drawn(shape: Sequence[int], seed: int, stream: int) -> Tensor:
    generator = torch.Generator().manual_seed(4 * seed + stream)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def tokenizer_at(path: str, who: str) -> Any:
    """Load a tokenizer.

    Args:
        path: A ``tokenizer.json``, or a folder that contains one.
        who: Name of the technique, for messages.

    Raises:
        ConfigurationError: If the file does not exist.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        raise refusal(who, "tokenizer", "a tokenizer.json or a folder that has one", path)
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def read_tokens(text: str, path: str, who: str) -> list[int]:
    """Return the token ids of a text, without special tokens.

    Args:
        text: The text.
        path: Path of the tokenizer, as for :func:`tokenizer_at`.
        who: Name of the technique, for messages.

    Raises:
        ConfigurationError: If the tokenizer does not exist, or the text has no tokens.
    """
    tokens: list[int] = tokenizer_at(path, who).encode(text, add_special_tokens=False).ids
    if not tokens:
        raise ConfigurationError(f"{who}: init_text={text!r} has no tokens in {path!r}")
    return tokens
