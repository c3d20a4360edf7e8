"""A prefix in the key-value cache of a transformers decoder: caches, masks and positions that count it in.

    tokens       x_0 ... x_T-1            at the positions  n ... n + T - 1
    keys         [P_k; k_0 ... k_T-1]     n + T of them
    mask         [1 ... 1, mask]          every token sees the prefix; the caller gives masks of real tokens alone

Source: Li & Liang (2021), https://arxiv.org/abs/2101.00190.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.internals.hugging_face import attention_of

CHECKPOINTING = (
    "recomputing a block would leave the prefix out, which is in the cache that checkpointing switches off; call "
    "model.gradient_checkpointing_disable(), and save memory by smaller batches (accumulate_grad_batches), or use LoRA"
)


def owner_of(decoder: Any) -> str:
    """The technique whose virtual tokens a decoder has or is about to get, for errors."""
    return str(getattr(decoder, "virtual_tokens_of", "virtual tokens"))


class PrefixCache:
    """The cache of one layer of this package's GPT that holds a prefix and forgets what it is given.

    Args:
        key: [1, heads, n, head_dim].
        value: As ``key``.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value
        self.length = key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The prefix and ``[B, heads, T, head_dim]`` of each behind it."""
        return _behind(self.key, key), _behind(self.value, value)


def _behind(prefix: Tensor, rest: Tensor) -> Tensor:
    return torch.cat((_like(prefix, rest), rest), dim=2)


def _like(prefix: Tensor, rest: Tensor) -> Tensor:
    """The prefix in batch size and dtype of ``rest``: autocast and blocks that run some rows only decide late."""
    return prefix.to(rest.dtype).expand(rest.shape[0], *prefix.shape[1:])


class _Prefixed:
    """Mix-in of a layer of transformers' ``DynamicCache`` that starts with a prefix of batch size one."""

    keys: Tensor
    values: Tensor
    _layer_type = None  # a class that has one would take the place of the original in transformers' registry

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.keys.shape[0] != key_states.shape[0] or self.keys.dtype != key_states.dtype:
            self.keys, self.values = _like(self.keys, key_states), _like(self.values, value_states)
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]


@functools.cache
def _prefixed(layer: type) -> type:
    return type(layer.__name__, (_Prefixed, layer), {})


def _layers_of(decoder: Any) -> list[Any]:
    """Empty layers of a dynamic cache for this decoder."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    layers = DynamicCache(config=decoder.config).layers
    other = next((layer for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)), None)
    if other is not None:
        raise ConfigurationError(
            f"{owner_of(decoder)}: {type(decoder).__name__} has layers with a {type(other).__name__}, which holds no "
            "keys and values of single tokens; use LoRA"
        )
    return list(layers)


def _window_of(decoder: Any) -> int | None:
    """The smallest sliding window of any layer, in tokens."""
    windows = [layer.sliding_window for layer in _layers_of(decoder) if layer.is_sliding]
    return min(windows) if windows else None


def computed_by_transformer(decoder: Any, forward: Callable[..., Any], **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [layers, heads, n, head_dim] that a decoder's own ``forward`` computes for one row of ``inputs``.

    Raises:
        ConfigurationError: If it checkpoints, its window is not longer than n, or its layers' keys differ in shape.
    """
    from transformers import DynamicCache

    refuse_checkpointing(decoder)
    layers, window = _layers_of(decoder), _window_of(decoder)
    length = next(iter(inputs.values())).shape[1]
    if window is not None and length >= window:
        allowed = f"below {window}, the sliding window of {type(decoder).__name__}"
        raise refusal(owner_of(decoder), "num_virtual_tokens", allowed, length)
    cache: Any = DynamicCache(config=decoder.config)
    forward(**inputs, past_key_values=cache, use_cache=True)
    filled = [layer for layer in cache.layers if layer.is_initialized]
    if len(filled) != len(layers) or len({layer.keys.shape for layer in filled}) > 1:
        raise ConfigurationError(
            f"{owner_of(decoder)}: {type(decoder).__name__} must fill a cache with keys of one shape in every layer; "
            f"{len(filled)} of {len(layers)} layers did, in the shapes "
            f"{sorted({tuple(layer.keys.shape) for layer in filled})}; use LoRA"
        )
    return torch.cat([layer.keys for layer in filled]), torch.cat([layer.values for layer in filled])


def refuse_checkpointing(decoder: Any) -> None:
    """Raise :class:`ConfigurationError` if any part of a decoder has gradient checkpointing switched on."""
    if any(getattr(part, "gradient_checkpointing", False) for part in decoder.modules()):
        raise ConfigurationError(f"{owner_of(decoder)} cannot be combined with gradient checkpointing: {CHECKPOINTING}")


def prefixed_call(
    decoder: Any, forward: Callable[..., Any], kwargs: dict[str, Any], keys: Tensor, values: Tensor
) -> Any:
    """Call ``forward`` for a sequence that a prefix stands before.

    Args:
        decoder: Whose forward it is.
        forward: The decoder's own.
        kwargs: What the caller gave: masks and positions of real tokens, and a cache that is empty or has the prefix.
        keys: [layers, heads, n, head_dim].
        values: As ``keys``.
    """
    if decoder.training:
        refuse_checkpointing(decoder)
    given, length = kwargs.get("past_key_values"), keys.shape[2]
    cache = given
    if given is None or given.get_seq_length() == 0:
        cache = _filled(decoder, given, keys, values)
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        _refuse_padding_before_a_window(decoder, mask, length)
        mask = extend_mask(mask, length, owner_of(decoder))
    elif positions is not None and given is None:
        mask = _packed_mask(decoder, positions, cache, length)
    kwargs |= {"past_key_values": cache, "attention_mask": mask}
    if positions is not None:
        kwargs["position_ids"] = positions + length
    output = forward(**kwargs)
    use_cache = kwargs.get("use_cache")
    wanted = decoder.config.use_cache if use_cache is None else use_cache
    if given is None and not wanted and not isinstance(output, tuple):
        output.past_key_values = None  # generation without a cache would take it up
    return output


def _refuse_padding_before_a_window(decoder: Any, mask: Any, length: int) -> None:
    """A window counts padding that stands between the prefix and the tokens, which a row alone does not have."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return
    window, places = _window_of(decoder), length + mask.shape[1]
    if window is not None and places > window and not mask[:, 0].all():  # a GPU is asked past a window alone
        raise ConfigurationError(
            f"{owner_of(decoder)}: rows that are padded on the left have at most {window} positions, the sliding "
            f"window of {type(decoder).__name__}, got {places} with the virtual tokens, which would be out of "
            "sight sooner than without padding: pad on the right, or generate rows of one length together"
        )


def _filled(decoder: Any, cache: Any, keys: Tensor, values: Tensor) -> Any:
    """The given cache, or a new one, with the prefix in every layer."""
    from transformers import DynamicCache

    if cache is None:
        cache = DynamicCache(config=decoder.config)
    if type(cache) is not DynamicCache:
        raise ConfigurationError(
            f"{owner_of(decoder)}: virtual tokens go into a DynamicCache only, got a {type(cache).__name__}: generate "
            "with cache_implementation='dynamic'"
        )
    layers = _layers_of(decoder)
    cache.layers[:] = [_started(*parts) for parts in zip(layers, keys, values, strict=True)]
    return cache


def _started(layer: Any, key: Tensor, value: Tensor) -> Any:
    kind: Any = type(layer)
    cls: Any = _prefixed(kind)
    started = cls.__new__(cls)
    started.__dict__ |= layer.__dict__
    # As `lazy_initialization`, without waits for empty tensors, and a window that exports alone read, on the device.
    started.dtype, started.device, started.is_initialized = key.dtype, key.device, True
    started.keys, started.values = key[None], value[None]
    if started.is_sliding:
        started.cumulative_length = key.shape[1]
    return started


def extend_mask(mask: Any, length: int, who: str) -> Any:
    """Put ``length`` visible keys before those of an attention mask; S becomes S + ``length``.

    Args:
        mask: [B, S], not 0 where a token is real; [B, 1 or heads, T, S], ``True`` or 0.0 where a token is seen; or
            masks of both kinds by the type of layer.
        length: Of the prefix.
        who: Name of the technique, for the error.

    Raises:
        ConfigurationError: For another kind of mask.
    """
    if isinstance(mask, dict):
        return {kind: None if part is None else extend_mask(part, length, who) for kind, part in mask.items()}
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        given = getattr(mask, "shape", type(mask).__name__)
        raise refusal(who, "attention_mask", "a tensor [B, S] or [B, heads, T, S]", given)
    seen = 0.0 if mask.ndim == 4 and mask.is_floating_point() else 1.0
    return torch.cat((mask.new_full((*mask.shape[:-1], length), seen), mask), dim=-1)


def _packed_mask(decoder: Any, positions: Tensor, cache: Any, length: int) -> Any:
    """For positions that start over within a row: a mask that keeps documents apart but for the prefix.

    transformers makes one by itself from such positions, but only where there is no cache.
    """
    packed = (positions[:, 1:] - positions[:, :-1] != 1).cumsum(-1)
    if positions.device.type == "cpu" and not packed.any():  # a GPU does not tell, and masks all
        return None
    batch, tokens = positions.shape
    window, attention = _window_of(decoder), attention_of(decoder.config)
    if attention not in ("sdpa", "eager") or (window is not None and length + tokens > window):
        raise ConfigurationError(
            f"{owner_of(decoder)}: rows of several documents (position_ids that start over) need attn_implementation "
            f"sdpa or eager and at most {window or 'any number of'} positions, the sliding window; got {attention!r} "
            f"and {length + tokens} with the prefix"
        )
    from transformers.masking_utils import create_causal_mask

    document = torch.nn.functional.pad(packed, (1, 0))
    document = torch.nn.functional.pad(document, (length, 0), value=-1)

    def apart(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[row, key] == -1) | (document[row, key] == document[row, query])

    empty = torch.empty((batch, tokens, 0), dtype=decoder.dtype, device=positions.device)
    mask: Any = create_causal_mask(
        config=decoder.config, inputs_embeds=empty, attention_mask=None, past_key_values=cache,
        position_ids=positions + length, and_mask_function=apart,
    )  # fmt: skip
    return mask
