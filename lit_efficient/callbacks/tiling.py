"""Tiling: report sizes that matrix kernels cannot divide into full tiles, and pad the vocabulary to a good size.

    V' = ceil(V / m) m;    logits = (W' h)[: V],  W' = [W; 0]    so that the V' - V rows of zeros have no effect

Saves: time on tensor cores: 16-bit products are fastest if all sizes are multiples of 64, and slow if one is not a
    multiple of 8
Costs: (V' - V) D weights for the embedding and for an untied head, with gradients and states; as much of the head's
    product
Source: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/

Losses, gradients and sampled tokens are those of the unpadded network, because the padded logits are cut off. Rows of
zeros have gradients of zero and stay zero, so checkpoints and exports hold only the V rows, under the same names.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import ConfigurationError, ConflictError, check_number, diagnostic
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_modules import Loads, Saves
from lit_efficient.mechanisms.tensor_cores import padded, rows_of
from lit_efficient.surgery import mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_SLOW_UNLESS = 8  # 16-bit numbers in 16 bytes
_GOOD = 64  # 16-bit numbers in 128 bytes


class _Padded(Saves, Loads, nn.Module):
    """Mix-in of an embedding or a head whose weight and bias have padded rows, which checkpoints do not contain."""

    _rows: int  # number of rows without padding
    _plain: tuple[str, ...]  # names of the layer's parameters, without those of adapters

    def after_save(self, destination: dict[str, Any], prefix: str) -> None:
        for name, _ in self.named_parameters(recurse=False):
            if destination[prefix + name].shape[0] > self._rows:
                destination[prefix + name] = destination[prefix + name][: self._rows]

    def before_load(self, state_dict: dict[str, Any], prefix: str) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if value is not None and value.shape[0] == self._rows < len(parameter):
                state_dict[prefix + name] = _pad(value, len(parameter))


class _PaddedHead(_Padded):
    def forward(self, *args: object, **kwargs: object) -> Any:
        return super().forward(*args, **kwargs)[..., : self._rows]


class Tiling(CheckpointHooks, Technique):
    """Report the sizes of a network that are bad for matrix kernels, and optionally pad its vocabulary.

    Args:
        pad_vocabulary: Pad the rows of the token embedding and of the head, tied or not, to a multiple of this number.
            64 is good on any GPU. ``None`` pads nothing.

    Raises:
        ConfigurationError: If padding is wanted and the network does not have exactly one token embedding and one head
            with as many rows.
        ConflictError: If padding is wanted with a strategy that shards weights, or with adapters on the padded layers.
    """

    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.TRAINING_ONLY})
    alters = ("optimizer",)
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (9, "matrix sizes that tensor cores process fast")}

    def __init__(self, pad_vocabulary: int | None = None) -> None:
        super().__init__()
        check_number("Tiling", "pad_vocabulary", pad_vocabulary, least=2, whole=True, null=True)
        self.pad_vocabulary = pad_vocabulary
        self._batch_checked = False

    def check(self, trainer: Any, module: nn.Module) -> None:
        traits = traits_of(trainer.strategy)
        if self.pad_vocabulary is not None and traits.shards:
            raise ConflictError(
                f"Tiling: pad_vocabulary cannot be combined with {traits.name}, which shards the weights. Set the "
                "padded vocabulary size in the model's configuration, or use strategy='ddp'"
            )

    def transform(self, module: nn.Module) -> Report:
        padding = None
        if self.pad_vocabulary is not None:
            padding = _pad_vocabularies(module, self.pad_vocabulary)
        bad_sizes = _bad_sizes(module)
        details: dict[str, float | int | str] = {f"size_{size}": len(names) for size, names in bad_sizes.items()}
        summary = f"all sizes are multiples of {_GOOD}"
        if bad_sizes:
            listed = [f"{size} in {len(names)} layers ({names[0]})" for size, names in bad_sizes.items()]
            summary = f"no multiples of {_GOOD}: {', '.join(listed[:4])}"
            if len(listed) > 4:
                summary += f" and {len(listed) - 4} more sizes"
        if padding is None:
            return Report(summary, details=details)
        names, added, before, after = padding
        details |= {"vocabulary": before, "padded_vocabulary": after}
        cost = f"{format_bytes(added)} more, {after / before - 1:.2%} more operations in the head"
        return Report(f"vocabulary {before:,} -> {after:,}: {cost}; {summary}", modules=names, details=details)

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Cut the padding off all tensors of the checkpoint, including averages in the states of callbacks."""
        for tensors, name, (rows, _) in _padded_entries(module, checkpoint):
            tensors[name] = tensors[name][:rows]

    def read_checkpoint(self, checkpoint: Mapping[str, Any], module: LightningModule) -> None:
        for tensors, name, (rows, size) in _padded_entries(module, checkpoint):
            if tensors is not checkpoint["state_dict"] and len(tensors[name]) == rows:
                tensors[name] = _pad(tensors[name], size)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        for name, part in pl_module.named_modules():
            if isinstance(part, _Padded) and {n for n, _ in part.named_parameters()} != set(part._plain):
                raise ConflictError(
                    f"Tiling: {name!r} is padded and has an adapter, which would not fit the unpadded weight of a "
                    "checkpoint. Choose other targets for the adapter, or leave out pad_vocabulary"
                )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Report whether the first batch's number of samples or tokens is bad: products have as many rows."""
        if self._batch_checked:
            return
        with diagnostic("Tiling", f"the first batch, a {type(batch).__name__},"):
            self._report_rows(batch)

    def _report_rows(self, batch: object) -> None:
        rows = rows_of(batch)
        self._batch_checked = True
        if rows % _SLOW_UNLESS:
            rank_zero_info(
                f"Tiling: a batch has {rows} rows, which is no multiple of {_SLOW_UNLESS}. "
                f"{padded(rows, _SLOW_UNLESS)} rows would take the same time"
            )


def _bad_sizes(module: nn.Module) -> dict[int, list[str]]:
    """Return the sizes of matrices that are no multiple of 64, with the names of the layers that have them."""
    found: dict[int, list[str]] = {}
    for name, part in module.named_modules():
        if isinstance(part, _Padded):
            continue
        for size in {getattr(part, "in_features", _GOOD), getattr(part, "out_features", _GOOD)}:
            if isinstance(size, int) and size % _GOOD:
                found.setdefault(size, []).append(name)
    return found


def _pad_vocabularies(module: nn.Module, multiple: int) -> tuple[tuple[str, ...], int, int, int]:
    """Pad the token embedding and the head.

    Returns:
        Names of the padded layers, number of added bytes, and rows before and after.
    """
    tables = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding)]
    heads = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    pairs = []
    for table_name, table in tables:
        for head_name, head in heads:
            if head.out_features == table.num_embeddings and head.in_features == table.embedding_dim:
                pairs.append((table_name, table, head_name, head))
    if len(pairs) != 1:
        raise ConfigurationError(
            "Tiling: pad_vocabulary needs exactly one token embedding and one head with as many rows, but "
            f"{type(module).__name__} has {len(pairs)} such pairs"
        )
    table_name, table, head_name, head = pairs[0]
    rows = table.num_embeddings
    size = padded(rows, multiple)
    names = (table_name, head_name)
    if size == rows:
        return names, 0, rows, size
    padded_parameters: dict[int, nn.Parameter] = {}  # by the id of the original: tied weights stay tied
    added = 0
    for part, mixin in ((table, _Padded), (head, _PaddedHead)):
        for name, parameter in list(part.named_parameters(recurse=False)):
            if id(parameter) not in padded_parameters:
                longer = nn.Parameter(_pad(parameter.detach(), size), parameter.requires_grad)
                padded_parameters[id(parameter)] = longer
                added += (longer.numel() - parameter.numel()) * parameter.element_size()
            setattr(part, name, padded_parameters[id(parameter)])
        mix_in(part, mixin, _rows=rows, _plain=tuple(name for name, _ in part.named_parameters()))
    return names, added, rows, size


def _padded_entries(
    module: nn.Module, checkpoint: Mapping[str, object]
) -> Iterator[tuple[dict[str, Any], str, tuple[int, int]]]:
    """Yield the places of padded parameters' tensors in a checkpoint.

    They are found by parameter names, in the weights and in the states of callbacks.

    Yields:
        The dictionary that holds a tensor, its key there, and the numbers of rows without and with padding.
    """
    sizes: dict[str, tuple[int, int]] = {}
    for prefix, part in module.named_modules():
        if isinstance(part, _Padded):
            for name, parameter in part.named_parameters(recurse=False):
                sizes[f"{prefix}.{name}".lstrip(".")] = (part._rows, len(parameter))
    dicts: list[object] = [checkpoint.get("state_dict"), checkpoint.get("callbacks")]
    while dicts:
        found = dicts.pop()
        if isinstance(found, dict):
            dicts += found.values()
            for name in [name for name in sizes if isinstance(found.get(name), Tensor)]:
                yield found, name, sizes[name]


def _pad(value: Tensor, rows: int) -> Tensor:
    """Return ``value`` with rows of zeros added at its end."""
    return F.pad(value, (0, 0) * (value.ndim - 1) + (0, rows - len(value)))
