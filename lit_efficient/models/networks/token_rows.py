"""Padding masks and positions for layers that receive only the hidden states of tokens.

The network around such a layer receives ``attention_mask`` and ``position_ids``. While it runs, it sets them on the
layer as ``token_rows``.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lit_efficient.surgery import mix_in, unmixed

_ROWS = ("attention_mask", "position_ids")  # names of arguments and of keys of batches


class _KnowsRows:
    """Mix-in of a network that passes its padding mask and positions to layers inside."""

    _row_layers: tuple[str, ...]

    def forward(self, *args: object, **kwargs: object) -> Any:
        own = super().forward  # type: ignore[misc]
        given = {key: _argument(unmixed(self), key, args, kwargs) for key in _ROWS}  # type: ignore[arg-type]
        given = {key: value for key, value in given.items() if isinstance(value, Tensor) and value.ndim == 2}
        if not given:
            return own(*args, **kwargs)
        layers: list[Any] = [self.get_submodule(name) for name in self._row_layers]  # type: ignore[attr-defined]
        before = [layer.token_rows for layer in layers]
        for layer in layers:
            layer.token_rows = {**layer.token_rows, **given}
        try:
            return own(*args, **kwargs)
        finally:
            for layer, rows in zip(layers, before, strict=True):
                layer.token_rows = rows


def pass_rows(root: nn.Module, layers: Sequence[tuple[str, Any]]) -> None:
    """Let the networks inside ``root`` pass their padding mask and positions to ``layers``, given as (name in ``root``,
    layer).
    """
    for _, layer in layers:
        layer.token_rows = {}
    for around, network in root.named_modules():
        prefix = f"{around}." if around else ""
        inside = tuple(name.removeprefix(prefix) for name, _ in layers if name.startswith(prefix) and name != around)
        if inside and _places(unmixed(network)) and not hasattr(network, "training_step"):
            known: tuple[str, ...] = getattr(network, "_row_layers", ())
            mix_in(network, _KnowsRows, _row_layers=tuple(dict.fromkeys((*known, *inside))))


def rows_in(batch: object) -> dict[str, object]:
    """Return the padding mask and positions in a batch, by name, for networks that do not receive them as arguments."""
    if not isinstance(batch, Mapping):
        return {}
    return {key: batch.get(key) for key in _ROWS}


def row_of(layer: Any, name: str, shape: Sequence[int]) -> Tensor | None:
    """Return the tensor that a layer knows under ``name``, or ``None`` if its shape is not ``shape``, [B, T]."""
    value = layer.token_rows.get(name)
    if isinstance(value, Tensor) and value.shape == shape:
        return value
    return None


def _argument(kind: object, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    places = _places(kind)
    if name in places and places[name] < len(args):
        return args[places[name]]
    return kwargs.get(name)


@functools.cache
def _places(kind: Any) -> dict[str, int]:
    names = list(inspect.signature(kind.forward).parameters)[1:]
    return {name: names.index(name) for name in _ROWS if name in names}
