"""Sequence-length warm-up: short sequences first, and longer ones step by step.

    length at step t = start + (end - start) * min(1, t / steps), rounded down to multiple_of;  from t = steps on whole

Saves: the cost of attention over long rows in the first steps, and the spikes of loss at large batches and rates that
    short first sequences prevent; with `fold` no token is lost for it
Costs: long-range dependencies are learned later; a compiled network compiles for each length
Source: Li et al. (2022), https://arxiv.org/abs/2108.06084; Pouransari et al. (2024), https://arxiv.org/abs/2405.13226
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_choice, check_number, refusal
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.mechanisms.moving import rebuilt
from lit_efficient.mechanisms.ramps import BatchChanges, check_steps, ramped, steps_of


def shorten(batch: Any, ids: Tensor, length: int, fold: bool = False) -> Any:
    """A batch of shorter rows: the first ``length`` positions of each, or all of them in more rows.

    Args:
        batch: Nested containers of tensors. Those that begin with the dimensions of ``ids`` are changed, of masks
            [..., T, T] the last two, unless three dimensions hold fractions, as embeddings do; others stay, or come
            once for each piece of their row.
        ids: The tensor [B, T] that tells rows and positions.
        length: Positions of the new rows, at least 1; rows that are no longer stay as they are.
        fold: Whether the rest of a row becomes rows of its own, [B * (T // length), length]; what is left of it then,
            fewer than ``length`` positions, is dropped. ``position_ids`` of a document that is cut begin at 0 again,
            and pieces in which an ``attention_mask`` has nothing are left out.

    Raises:
        ConfigurationError: With ``fold``, for masks [..., T, T].

    Example:
        >>> import torch
        >>> ids = torch.arange(8).reshape(1, 8)
        >>> shorten({"input_ids": ids}, ids, 4, fold=True)["input_ids"].tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    rows, whole = ids.shape
    if length >= whole:
        return batch
    pieces = whole // length if fold else 1
    padding = batch.get("attention_mask") if fold and isinstance(batch, Mapping) else None
    kept = None
    if isinstance(padding, Tensor) and padding.shape == ids.shape:
        kept = padding[:, : pieces * length].reshape(rows * pieces, length).any(1)

    def change(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return rebuilt(item, change)
        if item.ndim >= 3 and item.shape[-2:] == (whole, whole) and (item.ndim > 3 or not item.is_floating_point()):
            if fold:
                raise ConfigurationError(
                    "SequenceLengthRamp: mode='fold' cannot cut an attention mask [..., T, T] in pieces: use mode='cut'"
                )
            return item[..., :length, :length]
        if item.shape[:2] == (rows, whole):
            item = item[:, : pieces * length].reshape(rows * pieces, length, *item.shape[2:])
        elif fold and item.ndim and len(item) == rows:
            item = item.repeat_interleave(pieces, 0)
        else:
            return item
        return item if kept is None else item[kept]

    shorter = change(batch)
    if fold and isinstance(shorter, Mapping) and isinstance(positions := shorter.get("position_ids"), Tensor):
        shorter["position_ids"] = _from_zero(positions)  # type: ignore[index]
    return shorter


def _from_zero(positions: Tensor) -> Tensor:
    """Positions [B, T] of rows whose first document may have begun in an earlier row: it begins at 0."""
    first = (positions == 0).cumsum(1) == 0
    return positions - positions[:, :1] * first


class SequenceLengthRamp(BatchChanges):
    """Train on short sequences first, by cutting each batch of tokens, and validate on whole ones.

    Tokens, throughput and accumulation are counted of what is left. A batch that would have nothing to learn, as where
    long prompts come first, stays whole. While memory is measured, batches are whole, too.

    Args:
        start: Positions of the first batches, at least 1.
        end: Positions after which rows stay whole, above ``start``: the data's ``max_length``.
        steps: Optimizer steps until then, or a share of ``max_steps`` between 0 and 1.
        mode: ``cut`` drops the rest of each row, ``fold`` makes further rows of it: a step costs as many tokens as
            ever, and attention less.
        multiple_of: Lengths are multiples of this, at least 1; each is a shape to compile for.
        of: Where the tokens [B, T] are: a key of the batch, or a number for one that is a list or tuple.

    Raises:
        ConfigurationError: For an argument out of range, batches without such tokens, rows padded on the left, and with
            ``fold`` masks [..., T, T] and several texts a row, as of pairs.
    """

    phase = Phase.LOSS
    needs = ("end", "steps")
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "short rows first, whose attention costs less")}

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
            raise refusal("SequenceLengthRamp", "of", "a key of the batch, or a number", of)
        self.start = start
        self.end = end
        self.steps = steps
        self.mode = mode
        self.multiple_of = multiple_of
        self.of = of
        self._steps = 1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._steps = steps_of("SequenceLengthRamp", "steps", self.steps, trainer)
        super().setup(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        how = "the rest in further rows" if self.mode == "fold" else "the rest is dropped"
        return Report(f"rows of {self.start} tokens at first, whole ones after {self._steps} steps; {how}")

    def length_at(self, step: int) -> int | None:
        """How long rows are at most after so many optimizer steps; ``None``: as long as they come."""
        if step >= self._steps:
            return None
        length = int(ramped(step, self.start, self.end, self._steps))
        return max(self.start, length - length % self.multiple_of)

    def change(self, batch: Any, step: int) -> Any:
        length, ids = self.length_at(step), self._ids(batch)
        if length is None:
            return batch
        if any(bool(((mask[:, 0] == 0) & (mask[:, -1] != 0)).any()) for mask in _named(batch, "attention_mask", 2)):
            raise ConfigurationError(
                "SequenceLengthRamp: rows are padded on the left, where they would be cut: pad on the right"
            )
        sides = len(_named(batch, "input_ids", 2))
        if sides > 1 and self.mode == "fold":
            raise ConfigurationError(
                f"SequenceLengthRamp: a batch of {sides} texts a row, as of pairs, cannot be folded: the pieces do not "
                "belong together: use mode='cut'"
            )
        shorter = shorten(batch, ids, length, self.mode == "fold")
        for i in range(sides):  # the others, which may be of other lengths
            shorter = shorten(shorter, _named(shorter, "input_ids", 2)[i], length)
        return shorter if _teaches(shorter) else batch

    def _ids(self, batch: Any) -> Tensor:
        try:
            found = batch[self.of] if isinstance(batch, Mapping) else batch[int(self.of)]
        except (KeyError, IndexError, TypeError, ValueError):
            found = None
        if not isinstance(found, Tensor) or found.ndim < 2:
            held = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            raise ConfigurationError(f"SequenceLengthRamp: of={self.of!r} is no tensor [B, T] of a batch with {held}")
        return found if found.ndim == 2 else found[..., 0]


def _named(batch: Any, end: str, ndim: int) -> list[Tensor]:
    """The tensors of a batch that are called so, perhaps with more in front (``chosen_labels``)."""
    items = batch.items() if isinstance(batch, Mapping) else ()
    return [v for key, v in items if isinstance(v, Tensor) and v.ndim == ndim and str(key).endswith(end)]


def _teaches(batch: Any) -> bool:
    found = _named(batch, "shift_labels", 2) or _named(batch, "labels", 2)
    return all(bool((labels != IGNORE).any()) for labels in found)
