"""Prefix in the key-value cache of a transformers decoder: caches, masks and positions that include the prefix.

    tokens       x_0 ... x_T-1            at positions n ... n + T - 1
    keys         [P_k; k_0 ... k_T-1]     n + T keys
    mask         [1 ... 1, mask]          every token attends to the prefix; the caller's mask is for the tokens only

Source: Li & Liang (2021), https://arxiv.org/abs/2101.00190.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_efficient.errors import ConfigurationError, refusal
from lit_efficient.internals.hugging_face import attention_of

CHECKPOINTING = (
    "checkpointing disables the cache, which contains the prefix. Call model.gradient_checkpointing_disable() and save "
    "memory by smaller batches (accumulate_grad_batches), or use LoRA"
)


def owner_of(decoder: object) -> str:
    """Return the name of the technique whose virtual tokens a decoder has, for messages."""
    return str(getattr(decoder, "virtual_tokens_of", "virtual tokens"))


class PrefixCache:
    """Cache of one layer of this package's GPT that contains a prefix and does not store further keys and values.

    Args:
        key: Keys of the prefix, [1, heads, n, head_dim].
        value: Values of the prefix, with the same shape.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key = key
        self.value = value
        self.length = key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prefix followed by keys and values [B, heads, T, head_dim]: [B, heads, n + T, head_dim] each."""
        return _behind(self.key, key), _behind(self.value, value)


def _behind(prefix: Tensor, rest: Tensor) -> Tensor:
    return torch.cat((_like(prefix, rest), rest), dim=2)


def _like(prefix: Tensor, rest: Tensor) -> Tensor:
    """Return the prefix with the batch size and dtype of ``rest``.

    They are known only here, because they depend on autocast and on blocks that compute some rows only.
    """
    return prefix.to(rest.dtype).expand(rest.shape[0], *prefix.shape[1:])


class _Prefixed:
    """Mix-in of a layer of transformers' ``DynamicCache`` that initially contains a prefix of batch size one."""

    keys: Tensor
    values: Tensor
    _layer_type = None  # otherwise transformers' registry would replace the original class by this one

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self.keys.shape[0] != key_states.shape[0] or self.keys.dtype != key_states.dtype:
            self.keys = _like(self.keys, key_states)
            self.values = _like(self.values, value_states)
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]


@functools.cache
def _prefixed(layer: type) -> type:
    return type(layer.__name__, (_Prefixed, layer), {})


def _layers_of(decoder: Any) -> list[Any]:
    """Return the empty layers of a dynamic cache for a decoder."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    layers = DynamicCache(config=decoder.config).layers
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ConfigurationError(
                f"{owner_of(decoder)}: {type(decoder).__name__} has layers with a {type(layer).__name__}, which does "
                "not store keys and values of single tokens. Use LoRA"
            )
    return list(layers)


def _window_of(decoder: object) -> int | None:
    """Return the smallest sliding window of any layer in tokens, or None if no layer has one."""
    return min((layer.sliding_window for layer in _layers_of(decoder) if layer.is_sliding), default=None)


def computed_by_transformer(decoder: Any, forward: Callable[..., Any], **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values that a decoder computes for one row of n tokens, [layers, heads, n, head_dim] each.

    Args:
        decoder: The decoder.
        forward: The decoder's own forward, without a prefix.
        inputs: Token ids or embeddings, as the decoder's arguments.

    Raises:
        ConfigurationError: If gradient checkpointing is enabled, if a sliding window is not longer than n, or if the
            keys of the layers differ in shape.
    """
    from transformers import DynamicCache

    refuse_checkpointing(decoder)
    layers = _layers_of(decoder)
    window = _window_of(decoder)
    length = next(iter(inputs.values())).shape[1]
    if window is not None and length >= window:
        allowed = f"below {window}, the sliding window of {type(decoder).__name__}"
        raise refusal(owner_of(decoder), "num_virtual_tokens", allowed, length)
    cache: Any = DynamicCache(config=decoder.config)
    forward(**inputs, past_key_values=cache, use_cache=True)
    filled = [layer for layer in cache.layers if layer.is_initialized]
    if len(filled) != len(layers) or len({layer.keys.shape for layer in filled}) > 1:
        raise ConfigurationError(
            f"{owner_of(decoder)}: {type(decoder).__name__} must fill a cache with keys of one shape in every layer, "
            f"but {len(filled)} of {len(layers)} layers filled theirs, with the shapes "
            f"{sorted({tuple(layer.keys.shape) for layer in filled})}. Use LoRA"
        )
    return torch.cat([layer.keys for layer in filled]), torch.cat([layer.values for layer in filled])


def refuse_checkpointing(decoder: nn.Module) -> None:
    """Raise :class:`ConfigurationError` if gradient checkpointing is enabled in any part of a decoder."""
    if any(getattr(part, "gradient_checkpointing", False) for part in decoder.modules()):
        raise ConfigurationError(f"{owner_of(decoder)} cannot be combined with gradient checkpointing: {CHECKPOINTING}")


def prefixed_call(
    decoder: Any, forward: Callable[..., Any], kwargs: dict[str, Any], keys: Tensor, values: Tensor
) -> Any:
    """Call a decoder's ``forward`` for a sequence with a prefix before it.

    Args:
        decoder: The decoder.
        forward: The decoder's own forward.
        kwargs: Arguments of the caller, with masks and positions of the tokens without the prefix, and a cache that is
            empty or contains the prefix. The dict is changed.
        keys: Keys of the prefix, [layers, heads, n, head_dim].
        values: Values of the prefix, with the same shape.
    """
    if decoder.training:
        refuse_checkpointing(decoder)
    given = kwargs.get("past_key_values")
    length = keys.shape[2]
    cache = given
    if given is None or given.get_seq_length() == 0:
        cache = _filled(decoder, given, keys, values)
    mask = kwargs.get("attention_mask")
    positions = kwargs.get("position_ids")
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
    if use_cache is None:
        use_cache = decoder.config.use_cache
    if given is None and not use_cache and not isinstance(output, tuple):
        output.past_key_values = None  # otherwise a generation without a cache would use this one
    return output


def _refuse_padding_before_a_window(decoder: nn.Module, mask: Any, length: int) -> None:
    """Raise an error for rows that are padded on the left and longer than a sliding window.

    The window includes the padding between prefix and tokens, so that padding would change the result.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return
    window = _window_of(decoder)
    places = length + mask.shape[1]
    # The values of the mask are read last, because this waits for the GPU.
    if window is not None and places > window and not mask[:, 0].all():
        raise ConfigurationError(
            f"{owner_of(decoder)}: rows that are padded on the left must have at most {window} positions, the sliding "
            f"window of {type(decoder).__name__}, got {places} with the virtual tokens, which would leave the window "
            "sooner than without padding. Pad on the right, or generate from rows of equal length"
        )


def _filled(decoder: Any, cache: Any, keys: Tensor, values: Tensor) -> Any:
    """Return the given cache, or a new one, with the prefix in every layer."""
    from transformers import DynamicCache

    if cache is None:
        cache = DynamicCache(config=decoder.config)
    if type(cache) is not DynamicCache:
        raise ConfigurationError(
            f"{owner_of(decoder)}: virtual tokens require a DynamicCache, got a {type(cache).__name__}. Generate with "
            "cache_implementation='dynamic'"
        )
    layers = _layers_of(decoder)
    cache.layers[:] = [_started(*parts) for parts in zip(layers, keys, values, strict=True)]
    return cache


def _started(layer: nn.Module, key: Tensor, value: Tensor) -> Any:
    kind: Any = type(layer)
    cls: Any = _prefixed(kind)
    started = cls.__new__(cls)
    started.__dict__ |= layer.__dict__
    # The same attributes as `lazy_initialization` sets, without its empty tensors on the device.
    started.dtype = key.dtype
    started.device = key.device
    started.is_initialized = True
    started.keys = key[None]
    started.values = value[None]
    if started.is_sliding:
        started.cumulative_length = key.shape[1]
    return started


def extend_mask(mask: Any, length: int, who: str) -> Any:
    """Return an attention mask with ``length`` visible keys before the present ones, so that S becomes S + ``length``.

    Args:
        mask: Mask [B, S] that is 0 for padding, mask [B, 1 or heads, T, S] that is ``True`` or 0.0 for visible keys, or
            a dict of such masks by the type of layer.
        length: Length of the prefix.
        who: Name of the technique, for messages.

    Raises:
        ConfigurationError: If the mask has another form.
    """
    if isinstance(mask, dict):
        masks = {}
        for kind, part in mask.items():
            masks[kind] = part
            if part is not None:
                masks[kind] = extend_mask(part, length, who)
        return masks
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        given = getattr(mask, "shape", type(mask).__name__)
        raise refusal(who, "attention_mask", "a tensor [B, S] or [B, heads, T, S]", given)
    seen = 1.0
    if mask.ndim == 4 and mask.is_floating_point():  # such a mask is added to the logits
        seen = 0.0
    return torch.cat((mask.new_full((*mask.shape[:-1], length), seen), mask), dim=-1)


def _packed_mask(decoder: Any, positions: Tensor, cache: Any, length: int) -> Any:
    """Return a mask that separates the documents of packed rows, and lets all of them attend to the prefix.

    A document starts wherever the positions do not continue. transformers derives such a mask itself, but only without
    a cache.
    """
    packed = (positions[:, 1:] - positions[:, :-1] != 1).cumsum(-1)
    # On a GPU the check would wait for the device, so that the mask is always created.
    if positions.device.type == "cpu" and not packed.any():
        return None
    batch, tokens = positions.shape
    window = _window_of(decoder)
    attention = attention_of(decoder.config)
    if attention not in ("sdpa", "eager") or (window is not None and length + tokens > window):
        raise ConfigurationError(
            f"{owner_of(decoder)}: rows of several documents (position_ids that start again) require "
            f"attn_implementation sdpa or eager, and at most {window or 'any number of'} positions, the sliding "
            f"window; got {attention!r} and {length + tokens} with the prefix"
        )
    from transformers.masking_utils import create_causal_mask

    document = torch.nn.functional.pad(packed, (1, 0))
    document = torch.nn.functional.pad(document, (length, 0), value=-1)

    def apart(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[row, key] == -1) | (document[row, key] == document[row, query])

    empty = torch.empty((batch, tokens, 0), dtype=decoder.dtype, device=positions.device)
    return create_causal_mask(
        config=decoder.config,
        inputs_embeds=empty,
        attention_mask=None,
        past_key_values=cache,
        position_ids=positions + length,
        and_mask_function=apart,
    )
