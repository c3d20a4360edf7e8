"""What tells which tokens are padding, and where texts begin, for layers that are given the tokens alone.

The networks around such a layer are called with it: each hands it down to the layers, as ``token_rows``, while it runs.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lit_efficient.surgery import mix_in, unmixed

_ROWS = ("attention_mask", "position_ids")  # as arguments and in batches


class _KnowsRows:
    """Mix-in of a network around the layers."""

    _row_layers: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
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


def tell_rows(root: nn.Module, layers: Sequence[tuple[str, Any]]) -> None:
    """Let the networks inside ``root`` tell layers, given by their names in it, of the rows that they run on."""
    for _, layer in layers:
        layer.token_rows = {}
    for around, network in root.named_modules():
        prefix = f"{around}." if around else ""
        inside = tuple(name.removeprefix(prefix) for name, _ in layers if name.startswith(prefix) and name != around)
        if inside and _places(unmixed(network)) and not hasattr(network, "training_step"):
            known: tuple[str, ...] = getattr(network, "_row_layers", ())
            mix_in(network, _KnowsRows, _row_layers=tuple(dict.fromkeys((*known, *inside))))


def rows_in(batch: Any) -> dict[str, Any]:
    """What a batch says of its rows, for networks that are not called with it."""
    return {key: batch.get(key) for key in _ROWS} if isinstance(batch, Mapping) else {}


def row_of(layer: Any, name: str, shape: Sequence[int]) -> Tensor | None:
    """What a layer knows by a name, where it is of that shape [B, T]."""
    value = layer.token_rows.get(name)
    return value if isinstance(value, Tensor) and value.shape == shape else None


def _argument(kind: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    places = _places(kind)
    return args[places[name]] if name in places and places[name] < len(args) else kwargs.get(name)


@functools.cache
def _places(kind: Any) -> dict[str, int]:
    names = list(inspect.signature(kind.forward).parameters)[1:]
    return {name: names.index(name) for name in _ROWS if name in names}
