"""Sequence-length warm-up: train on short sequences first, and increase their length step by step.

    length at step t = start + (end - start) * min(1, t / steps), rounded down to multiple_of; whole rows from t = steps

Saves: the cost of attention over long rows in the first steps, with ``fold`` without losing tokens; fewer loss spikes
    with large batches and rates
Costs: long-range dependencies are learned later; a compiled network is compiled again for each length
Source: Li et al. (2022), https://arxiv.org/abs/2108.06084; Pouransari et al. (2024), https://arxiv.org/abs/2405.13226
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.mechanisms.moving import holds_images, rebuilt
from lit_efficient.mechanisms.ramps import BatchChanges, check_steps, ramped, steps_of


def shorten(batch: object, ids: Tensor, length: int, fold: bool = False) -> object:
    """Return a batch with shorter rows: the first ``length`` positions of each row, or all positions in more rows.

    Args:
        batch: Nested containers of tensors. Tensors [B, T, ...] are shortened in their second dimension, and masks
            [..., T, T] in their last two. A floating-point tensor with three dimensions is no mask, because it may hold
            embeddings. With ``fold``, other tensors [B, ...] are repeated for each piece of their row.
        ids: Tensor [B, T], whose shape gives the numbers of rows and positions.
        length: Number of positions of the new rows, at least 1. Rows that are not longer do not change.
        fold: True to split each row into pieces: [B * (T // length), length]. A remainder with fewer than ``length``
            positions is dropped. ``position_ids`` of a document that is split begin at 0 in each piece. Pieces whose
            ``attention_mask`` is all zeros are left out.

    Returns:
        A new batch, or ``batch`` itself if no row is longer than ``length``.

    Raises:
        ConfigurationError: With ``fold``, if the batch has masks [..., T, T].

    Example:
        >>> import torch
        >>> ids = torch.arange(8).reshape(1, 8)
        >>> shorten({"input_ids": ids}, ids, 4, fold=True)["input_ids"].tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    rows, whole = ids.shape
    if length >= whole:
        return batch
    pieces = 1
    padding = None
    if fold:
        pieces = whole // length
        if isinstance(batch, Mapping):
            padding = batch.get("attention_mask")
    kept = None  # mask of the pieces that contain more than padding
    if isinstance(padding, Tensor) and padding.shape == ids.shape:
        kept = padding[:, : pieces * length].reshape(rows * pieces, length).any(1)

    def change(item: object) -> Any:
        if not isinstance(item, Tensor):
            return rebuilt(item, change)
        if item.ndim >= 3 and item.shape[-2:] == (whole, whole) and (item.ndim > 3 or not item.is_floating_point()):
            if fold:
                raise ConfigurationError(
                    "SequenceLengthRamp: mode='fold' cannot split an attention mask [..., T, T]. Use mode='cut'"
                )
            return item[..., :length, :length]
        if item.shape[:2] == (rows, whole):
            item = item[:, : pieces * length].reshape(rows * pieces, length, *item.shape[2:])
        elif fold and item.ndim and len(item) == rows:
            item = item.repeat_interleave(pieces, 0)
        else:
            return item
        if kept is None:
            return item
        return item[kept]

    shorter = change(batch)
    if fold and isinstance(shorter, Mapping):
        positions = shorter.get("position_ids")
        if isinstance(positions, Tensor):
            shorter["position_ids"] = _from_zero(positions)  # type: ignore[index]
    return shorter


def _from_zero(positions: Tensor) -> Tensor:
    """Return positions [B, T] in which the first document of each row begins at 0, also if it began in another row."""
    first = (positions == 0).cumsum(1) == 0
    return positions - positions[:, :1] * first


class SequenceLengthRamp(BatchChanges):
    """Train on short sequences first, by shortening each batch of tokens, and validate on whole sequences.

    Tokens, throughput and accumulation only count the remaining tokens. If no remaining token would contribute to the
    loss, for example with long prompts, the batch stays whole. While memory is measured, batches stay whole, too.

    Args:
        start: Number of positions of the first batches, at least 1 and below ``end``.
        end: Number of positions at the end of the ramp, at least 2. Set it to ``max_length`` of the data.
        steps: Number of optimizer steps of the ramp, or a share of ``max_steps`` between 0 and 1.
        mode: ``cut`` drops the rest of each row. ``fold`` makes further rows of it, so that a step has the same number
            of tokens, but less attention.
        multiple_of: Divisor of the lengths, at least 1. Each length is a shape that a compiled network is compiled for.
        of: Place of the tokens [B, T]: a key of the batch, or a position if the batch is a list or tuple.

    Raises:
        ConfigurationError: For an argument out of range, for batches without such tokens, and for rows padded on the
            left. With ``fold`` also for masks [..., T, T] and for several texts per row, such as pairs.
    """

    phase = Phase.LOSS
    needs = ("end", "steps")
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "short rows at first, whose attention costs less")}

    def __init__(
        self,
        start: int = 64,
        end: int = 1024,
        steps: int | float = 0.1,
        mode: str = "cut",
        multiple_of: int = 8,
        of: str = "input_ids",
    ) -> None:
        super().__init__()
        check_number("SequenceLengthRamp", "end", end, least=2, whole=True)
        check_number("SequenceLengthRamp", "start", start, least=1, below=end, whole=True)
        check_steps("SequenceLengthRamp", "steps", steps)
        check_choice("SequenceLengthRamp", "mode", mode, ("cut", "fold"))
        check_number("SequenceLengthRamp", "multiple_of", multiple_of, least=1, whole=True)
        if not of:
            raise refusal("SequenceLengthRamp", "of", "a key or a position in the batch", of)
        self.start = start
        self.end = end
        self.steps = steps
        self.mode = mode
        self.multiple_of = multiple_of
        self.of = of
        self._steps = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._steps = steps_of("SequenceLengthRamp", "steps", self.steps, trainer)
        super().setup(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        rest = "the rest is dropped"
        if self.mode == "fold":
            rest = "the rest becomes further rows"
        return Report(f"rows of {self.start} tokens at first, whole rows after {self._steps} steps; {rest}")

    def length_at(self, step: int) -> int | None:
        """Return the maximum length of rows after ``step`` optimizer steps, or ``None`` for no limit."""
        if step >= self._steps:
            return None
        length = int(ramped(step, self.start, self.end, self._steps))
        return max(self.start, length - length % self.multiple_of)

    def change(self, batch: object, step: int) -> Any:
        length = self.length_at(step)
        ids = self._ids(batch)  # also without a limit, to check the batch
        if length is None:
            return batch
        for mask in _named(batch, "attention_mask", 2):
            padded_left = (mask[:, 0] == 0) & (mask[:, -1] != 0)
            if bool(padded_left.any()):
                raise ConfigurationError(
                    "SequenceLengthRamp: rows are padded on the left, so tokens would be dropped and padding kept. "
                    "Pad on the right"
                )
        if holds_images(batch):
            raise ConfigurationError(
                "SequenceLengthRamp: the batch holds images, and a cut may remove a part of the tokens of an image. "
                "Leave the technique out, or give rows of text alone"
            )
        texts = len(_named(batch, "input_ids", 2))
        if texts > 1 and self.mode == "fold":
            raise ConfigurationError(
                f"SequenceLengthRamp: a batch with {texts} texts per row, such as pairs, cannot be folded, because "
                "their pieces do not belong together. Use mode='cut'"
            )
        shorter = shorten(batch, ids, length, self.mode == "fold")
        for i in range(texts):  # further texts may have other lengths
            shorter = shorten(shorter, _named(shorter, "input_ids", 2)[i], length)
        if not _has_targets(shorter):  # a mean over no tokens is NaN
            return batch
        return shorter

    def _ids(self, batch: Any) -> Tensor:
        try:
            key = self.of if isinstance(batch, Mapping) else int(self.of)
            found = batch[key]
        except (KeyError, IndexError, TypeError, ValueError):
            found = None
        if not isinstance(found, Tensor) or found.ndim < 2:
            if isinstance(batch, Mapping):
                held = ", ".join(map(str, batch))
            else:
                held = f"a {type(batch).__name__}"
            raise ConfigurationError(
                f"SequenceLengthRamp: of={self.of!r} is no tensor [B, T] of a batch with {held}. Set of to the tokens"
            )
        if found.ndim > 2:  # several numbers per position
            return found[..., 0]
        return found


def _named(batch: object, end: str, ndim: int) -> list[Tensor]:
    """Return the tensors of a batch with ``ndim`` dimensions and a key that ends with ``end``."""
    if not isinstance(batch, Mapping):
        return []
    return [v for key, v in batch.items() if isinstance(v, Tensor) and v.ndim == ndim and str(key).endswith(end)]


def _has_targets(batch: object) -> bool:
    """Return whether each tensor of labels has a token that contributes to the loss. True without labels."""
    found = _named(batch, "shift_labels", 2) or _named(batch, "labels", 2)
    return all(bool((labels != IGNORE).any()) for labels in found)
