"""Tiling: sizes that matrix kernels cut badly are named, and a vocabulary is padded to one that they cut well.

    V' = ceil(V / m) m;    logits = (W' h)[: V],  W' = [W; 0]    so that the V' - V rows of zeros are never seen

Saves: time where tensor cores are: products are fastest where all sizes are multiples of 64 (16 bits), slow below 8
Costs: (V' - V) D weights, once more for an untied head, with their gradients and states; as much of the head's product
Source: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/

Losses, gradients and drawn tokens are those of the unpadded network: what is padded is cut off before anybody reads it.
Rows of zeros get gradients of zero and stay zeros, so checkpoints and exports hold the V rows alone, under their names.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_efficient.application.checkpoints import CheckpointHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_number
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_modules import Loads, Saves
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.mechanisms.trials.memory import format_bytes
from lit_efficient.surgery import mix_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait

_BAD, _GOOD = 8, 64  # 16 bytes and 128 bytes of 16-bit numbers


def padded(size: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is at least ``size``.

    Example:
        >>> padded(50257, 64)
        50304
    """
    return -(-size // multiple) * multiple


class _Padded(Saves, Loads, nn.Module):
    """Mix-in of an embedding or a head whose weight, and bias, have more rows than anybody sees."""

    _rows: int
    _plain: tuple[str, ...]  # names of the layer's own parameters

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
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)[..., : self._rows]


class Tiling(CheckpointHooks, Technique):
    """Say which sizes of a network are cut badly by matrix kernels, and pad its vocabulary if asked to.

    Args:
        pad_vocabulary: What the rows of the token embedding and of the head, tied or not, are padded to a multiple of;
            64 is good on any GPU. ``None`` changes nothing.

    Raises:
        ConfigurationError: To pad, without a token embedding and a head of as many rows.
        ConflictError: To pad, under a strategy that shards weights, and beside adapters of the padded layers.
    """

    phase = Phase.ARCHITECTURE
    traits = frozenset({Trait.TRAINING_ONLY})
    alters = ("optimizer",)
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (9, "sizes that tensor cores like")}

    def __init__(self, pad_vocabulary: int | None = None) -> None:
        super().__init__()
        check_number("Tiling", "pad_vocabulary", pad_vocabulary, least=2, whole=True, null=True)
        self.pad_vocabulary = pad_vocabulary
        self._said = False

    def check(self, trainer: Any, module: Any) -> None:
        traits = traits_of(trainer.strategy)
        if self.pad_vocabulary is not None and traits.shards:
            raise ConflictError(
                f"Tiling: pad_vocabulary cannot be combined with {traits.name}: choose a vocabulary of that size in "
                "the model's configuration, or use strategy='ddp'"
            )

    def transform(self, module: nn.Module) -> Report:
        rows = _pad_vocabularies(module, self.pad_vocabulary) if self.pad_vocabulary is not None else None
        missed = _missed(module)
        sizes = [f"{size} in {len(names)} layers ({names[0]})" for size, names in missed.items()]
        said = f"no multiples of {_GOOD}: {', '.join(sizes[:4])}" if sizes else f"all sizes are multiples of {_GOOD}"
        further = f" and {len(sizes) - 4} more sizes" if len(sizes) > 4 else ""
        details: dict[str, float | int | str] = {f"size_{size}": len(names) for size, names in missed.items()}
        if rows is None:
            return Report(said + further, details=details)
        names, added, before, after = rows
        details |= {"vocabulary": before, "padded_vocabulary": after}
        cost = f"{format_bytes(added)} more, {after / before - 1:.2%} more of the head's product"
        return Report(f"vocabulary {before:,} -> {after:,}: {cost}; {said}{further}", modules=names, details=details)

    @classmethod
    def trim_checkpoint(cls, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Cut the padding off averages, too, by whichever callback and under whichever key they stand."""
        for tensors, name, (rows, _) in _padded_entries(module, checkpoint):
            tensors[name] = tensors[name][:rows]

    def read_checkpoint(self, checkpoint: Mapping[str, Any], module: Any) -> None:
        for tensors, name, (rows, size) in _padded_entries(module, checkpoint):
            if tensors is not checkpoint["state_dict"] and len(tensors[name]) == rows:
                tensors[name] = _pad(tensors[name], size)

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        super().on_fit_start(trainer, pl_module)
        for name, part in pl_module.named_modules():
            if isinstance(part, _Padded) and {n for n, _ in part.named_parameters()} != set(part._plain):
                raise ConflictError(
                    f"Tiling: {name!r} is padded and has an adapter, which would be merged with other rows: "
                    "name other targets, or leave out pad_vocabulary"
                )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Look at the first batch: a linear layer's product has as many rows as it has samples or tokens."""
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        if tensors and not self._said:
            whole = next((t for t in tensors if t.ndim == 2 and not t.is_floating_point()), None)
            rows = len(tensors[0]) if whole is None else whole.numel()
            if rows % _BAD:
                rank_zero_info(
                    f"Tiling: a batch has {rows} rows, no multiple of {_BAD}; {padded(rows, _BAD)} cost as much"
                )
            self._said = True


def _missed(module: nn.Module) -> dict[int, list[str]]:
    """Sizes of matrices that are no multiple of 64, and the layers that have them."""
    found: dict[int, list[str]] = {}
    for name, part in module.named_modules():
        if isinstance(part, _Padded):
            continue
        for size in {getattr(part, "in_features", _GOOD), getattr(part, "out_features", _GOOD)}:
            if isinstance(size, int) and size % _GOOD:
                found.setdefault(size, []).append(name)
    return found


def _pad_vocabularies(module: nn.Module, multiple: int) -> tuple[tuple[str, ...], int, int, int]:
    """Names of what was padded, bytes that this added, and rows before and after."""
    named = list(module.named_modules())
    tables = [(name, part) for name, part in named if isinstance(part, nn.Embedding)]
    heads = [(name, part) for name, part in named if isinstance(part, nn.Linear)]
    pairs = [
        (table, head)
        for table in tables
        for head in heads
        if head[1].out_features == table[1].num_embeddings and head[1].in_features == table[1].embedding_dim
    ]
    if len(pairs) != 1:
        raise ConfigurationError(
            f"Tiling: pad_vocabulary needs one token embedding and one head of as many rows, {type(module).__name__} "
            f"has {len(pairs)} such pairs"
        )
    (table_name, table), (head_name, head) = pairs[0]
    rows, size = table.num_embeddings, padded(table.num_embeddings, multiple)
    grown: dict[int, nn.Parameter] = {}
    added = 0
    for part, kind in ((table, _Padded), (head, _PaddedHead)) if size > rows else ():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if id(parameter) not in grown:
                grown[id(parameter)] = nn.Parameter(_pad(parameter.detach(), size), parameter.requires_grad)
                added += (grown[id(parameter)].numel() - parameter.numel()) * parameter.element_size()
            setattr(part, name, grown[id(parameter)])
        mix_in(part, kind, _rows=rows, _plain=tuple(name for name, _ in part.named_parameters()))
    return (table_name, head_name), added, rows, size


def _padded_entries(
    module: nn.Module, checkpoint: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], str, tuple[int, int]]]:
    """Where tensors of padded parameters stand in a checkpoint: the dict, the name, and rows without and with padding.

    They are found by their names, among the weights and in the states of callbacks.
    """
    sizes = {
        f"{prefix}.{name}".lstrip("."): (part._rows, len(parameter))
        for prefix, part in module.named_modules()
        if isinstance(part, _Padded)
        for name, parameter in part.named_parameters(recurse=False)
    }
    dicts: list[Any] = [checkpoint.get("state_dict"), checkpoint.get("callbacks")]
    while dicts:
        found = dicts.pop()
        if isinstance(found, dict):
            dicts += found.values()
            for name in [name for name in sizes if isinstance(found.get(name), Tensor)]:
                yield found, name, sizes[name]


def _pad(value: Tensor, rows: int) -> Tensor:
    return F.pad(value, (0, 0) * (value.ndim - 1) + (0, rows - len(value)))
