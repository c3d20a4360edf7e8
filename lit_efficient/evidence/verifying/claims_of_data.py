"""Claims about dependencies within a batch: between rows, between tokens, and between documents of a packed row."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lit_efficient.declaration import techniques_of
from lit_efficient.evidence.verifying.claims import Batch, Verdict
from lit_efficient.evidence.verifying.layer_calls import (
    Bench,
    BenchClaim,
    aligned,
    by_rows,
    by_tokens,
    cut,
    ends,
    few_rows,
    most,
    ratio,
)
from lit_efficient.evidence.verifying.recorded_calls import Call, floats
from lit_efficient.evidence.verifying.token_batches import NO_TOKENS, TokenBatch, token_batch
from lit_efficient.internals.torch_modules import BatchNorm
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.traits import Trait

# Share of a change that rounding may pass on, in float32 and below.
_EXACT = 1e-3
_COARSE = 0.07
_NO_EFFECT = "no output of a layer depends on the change of the batch"
# Change of the rows, or tokens, that must not depend on a change of the batch, and of those that should.
Moved: TypeAlias = tuple[float, float]
# Function that returns the change between two outputs of a layer; ``None`` if they cannot be compared.
View: TypeAlias = Callable[[Tensor, Tensor], Moved | None]


@dataclass(frozen=True)
class _Leak:
    """Effect of a change of the batch on parts that must not depend on the change."""

    share: float  # largest unwanted change, relative to the intended change
    own: float = 0.0  # largest intended change
    where: str = ""  # first layer with an unwanted change


def _leak(
    one: Sequence[Call],
    other: Sequence[Call],
    view: View,
    tolerance: float,
    is_result: Callable[[Tensor], bool] = lambda tensor: False,
) -> _Leak:
    """Compare the outputs of all layers in two steps.

    Args:
        one: Calls of the first step.
        other: Calls of the second step.
        view: Function that compares two outputs.
        tolerance: Largest unwanted change that may be rounding.
        is_result: Function that is true for the results of the network. Other outputs, which may be unused, count only
            for ``where`` then.
    """
    moved: dict[tuple[str, int], list[Moved]] = {}
    results = set()
    where = ""
    for a, b in aligned(one, other):
        for x, y in zip(floats(a.output), floats(b.output)):
            change = view(x, y)
            if change is not None:
                moved.setdefault(a.key, []).append(change)
                if is_result(x):
                    results.add(a.key)
                if ratio(*change) > tolerance and not where:
                    where = a.described
    last = [change for call in ends(one, results or moved) for change in moved[call.key]]
    share = max((ratio(*change) for change in last), default=0.0)
    own = max((intended for _, intended in last), default=0.0)
    return _Leak(share, own, where)


class RowsApart(BenchClaim):
    """A change of the last row of a batch does not affect the other rows."""

    name = "rows"
    sentence = "the outputs for one row of a batch depend on no other row"
    unit = "change relative to that of the changed row"

    def tried(self, bench: Bench) -> Verdict:
        batch, rows = few_rows(bench.batch)
        others = [row for row in range(rows - 1) if not _same_rows(batch, rows, row, rows - 1)]
        if not others:
            return self.idle("the batch has no two different rows, or its tensors have different numbers of rows")
        # The last row is replaced by a different one of the same batch, which is valid data.
        changed = cut(batch, rows, torch.tensor([*range(rows - 1), others[0]]))
        tolerance = bench.tolerance(_EXACT, _COARSE)

        def view(x: Tensor, y: Tensor) -> Moved | None:
            # A tensor may hold its rows in several layouts. The one with the smallest unwanted change counts.
            layouts = [(a, b) for a, b in zip(by_rows(x, rows), by_rows(y, rows)) if a.shape == b.shape]
            ways = [(most(a[:-1] - b[:-1]), most(a[-1] - b[-1])) for a, b in layouts]
            return min(ways, key=lambda way: ratio(*way), default=None)

        one, _ = bench.step(batch)
        other, _ = bench.step(changed)
        leak = _leak(one, other, view, tolerance)
        why = f"the last of {rows} rows was replaced, and the outputs for the others were compared"
        uncovered: tuple[str, ...] = ()
        norms = {name: part for name, part in bench.module.named_modules() if isinstance(part, BatchNorm)}
        norms = {name: part for name, part in norms.items() if part.training}
        if leak.share > tolerance and norms:
            # Batch statistics depend on all rows on purpose.
            bench.evaluated = list(norms.values())
            one, _ = bench.step(batch)
            other, _ = bench.step(changed)
            leak = _leak(one, other, view, tolerance)
            why += f", without the batch statistics of {len(norms)} layers"
            uncovered = (f"{len(norms)} layers that normalise with statistics of the batch, first {next(iter(norms))}",)
        if not leak.own:
            return self.idle(_NO_EFFECT)
        if leak.share > tolerance:
            inputs = [replace(call, output=(call.args, call.kwargs)) for call in one if call.outermost]
            changed_inputs = [replace(call, output=(call.args, call.kwargs)) for call in other if call.outermost]
            first = min(inputs, key=lambda call: call.outer)
            if _leak([first], changed_inputs, view, tolerance).where:
                return self.idle(f"the training step mixes rows before {first.described} receives them, as mixup does")
        return self.measured(leak.share, tolerance, why, leak.where, uncovered)


class Causal(BenchClaim):
    """A change of a token does not affect earlier tokens."""

    name = "causal"
    sentence = "no token of a language model sees a later token"
    unit = "change relative to that of later tokens"

    def tried(self, bench: Bench) -> Verdict:
        found = token_batch(few_rows(bench.batch)[0])
        if found is None:
            return self.idle(NO_TOKENS)
        rows, length = found.ids.shape
        ids = found.ids.clone()
        before = torch.zeros(rows, length, dtype=torch.bool)
        for row in range(rows):
            # The places differ between rows, to cover the whole length.
            place = max(1, length * (row + 1) // (rows + 1))
            ids[row, place] = _other_than(ids, ids[row, place])
            before[row, :place] = True
        sees_ahead = [one for one in techniques_of(bench.trainer) if Trait.SEES_AHEAD in one.reasons]
        training = not sees_ahead
        one, _ = bench.step(found.batch, training=training)
        other, _ = bench.step(found.with_ids(ids), training=training)
        tolerance = bench.tolerance(_EXACT, _COARSE)
        leak = _leak_of_tokens(one, other, found, before, ~before, tolerance)
        if not leak.own:
            return self.idle(_NO_EFFECT)
        why = f"one token in each of {rows} rows was replaced, and the outputs for earlier tokens were compared"
        if not training:
            why += ", in evaluation mode"
        uncovered = tuple(
            f"training mode, in which {type(one).__name__} sees ahead: {one.reasons[Trait.SEES_AHEAD]}"
            for one in sees_ahead
        )
        return self.measured(leak.share, tolerance, why, leak.where, uncovered)


class DocumentsApart(BenchClaim):
    """Each document of a packed row is computed as if it were alone."""

    name = "packed"
    sentence = "documents that share a row are computed, and trained on, as if each were alone"
    unit = "difference relative to a document's own values"

    def tried(self, bench: Bench) -> Verdict:
        found = token_batch(bench.batch)
        if found is None:
            return self.idle(NO_TOKENS)
        if found.positions is None:
            return self.idle("the batches do not tell where documents begin")
        joined = _joined(found)
        if joined is not None:
            row, place = joined
            why = (
                f"in row {row} a document begins with token {place}: its label is ignored, and the token before it "
                "ends every document; but its position does not begin at 0"
            )
            return self.measured(math.inf, 0.0, why, "the batch: position_ids", unit="documents that continue another")
        documents = [found.documents(row) for row in range(len(found.ids))]
        row = max(range(len(documents)), key=lambda row: len(documents[row]))
        number = len(documents[row])
        if number < 2:
            return self.idle("no row of the first batch holds two documents")
        # One row is enough, and gradients of other rows would be mixed with its own.
        alone = token_batch(found.part(row, 0, found.ids.shape[1]))
        if alone is None:
            return self.idle("the row with the most documents has no labels")
        trials = {
            "one document alone": self._each(bench, alone),
            "another first document": self._changed(bench, alone),
            "the gradient of one document": self._gradient(bench, alone),
        }
        what, worst = max(trials.items(), key=lambda trial: trial[1].share)
        why = (
            f"{number} documents of a row: each document alone, another first document, and the gradient of one "
            f"document; the largest difference: {what}"
        )
        uncovered: tuple[str, ...] = ("dropout within packed rows",)
        if not all(alone.kinds.trained[0, a:b].any() for a, b in alone.documents(0)):
            uncovered += ("documents without labels",)
        return self.measured(worst.share, bench.tolerance(_EXACT, _COARSE), why, worst.where, uncovered)

    def _each(self, bench: Bench, row: TokenBatch) -> _Leak:
        """Compare the outputs for each document in the row with those for the document alone."""
        whole, _ = bench.step(row.batch, training=False)
        found = []
        for begin, end in row.documents(0):
            calls, _ = bench.step(row.part(0, begin, end), training=False)
            view = partial(_document_view, length=row.ids.shape[1], begin=begin, end=end)
            found.append(_leak(whole, calls, view, _EXACT))
        return max(found, key=lambda leak: leak.share)

    def _changed(self, bench: Bench, row: TokenBatch) -> _Leak:
        """Replace the first document, and compare the outputs for the others."""
        begin, end = row.documents(0)[0]
        ids = row.ids.clone()
        for place in range(begin, end):
            ids[0, place] = _other_than(row.ids, ids[0, place])
        one, _ = bench.step(row.batch, training=False)
        other, _ = bench.step(row.with_ids(ids), training=False)
        inside = torch.zeros(row.ids.shape, dtype=torch.bool)
        inside[0, begin:end] = True
        return _leak_of_tokens(one, other, row, ~inside, inside, _EXACT)

    def _gradient(self, bench: Bench, row: TokenBatch) -> _Leak:
        """Change the labels of one document, and compare the gradients at the others in the first layer."""
        length = row.ids.shape[1]
        trained = [place for place in row.documents(0) if row.kinds.trained[0, slice(*place)].any()]
        begin, end = trained[-1]
        labels = torch.full_like(row.labels, IGNORE)
        labels[0, begin:end] = row.labels[0, begin:end]
        if row.targets is row.labels:
            labels[0, end - 1] = IGNORE  # this label is the first token of the next document
        other = torch.where(labels == IGNORE, labels, _other_than(row.ids, row.ids[0, begin]))
        found = []
        where = ""
        for each in (labels, other):
            calls, loss = bench.step(row.with_labels(each), training=False, graph=True)
            first = _first_of_tokens(calls, length)
            if loss is None or first is None:
                return _Leak(0.0)
            where, tensor = first
            (gradient,) = torch.autograd.grad(loss, tensor, allow_unused=True)
            if gradient is None:
                return _Leak(0.0)
            found.append(gradient.reshape(1, length, -1))
        off = found[0] - found[1]
        own = most(off[:, begin:end])
        outside = max(most(off[:, :begin]), most(off[:, end:]))
        return _Leak(ratio(outside, own), own, where)


def _document_view(whole: Tensor, alone: Tensor, length: int, begin: int, end: int) -> Moved | None:
    """Return the difference between a document in a row of ``length`` tokens and alone, and the size of its values."""
    packed = by_tokens(whole, 1, length)
    own = by_tokens(alone, 1, end - begin)
    if packed is None or own is None or packed.shape[2] != own.shape[2]:
        return None
    return most(packed[:, begin:end] - own), most(own)


def _first_of_tokens(calls: Sequence[Call], length: int) -> tuple[str, Tensor] | None:
    """Return the first layer with an output for each token of one row, and the output; ``None`` if there is none."""
    for call in calls:
        for tensor in floats(call.output):
            if tensor.requires_grad and by_tokens(tensor, 1, length) is not None:
                return call.described, tensor
    return None


def _leak_of_tokens(
    one: list[Call], other: list[Call], tokens: TokenBatch, still: Tensor, moves: Tensor, tolerance: float
) -> _Leak:
    """Compare two steps at the tokens that must not change (``still``) and at those that should (``moves``)."""
    rows, length = tokens.ids.shape
    largest = int(tokens.ids.max())

    def view(there: Tensor, here: Tensor) -> Moved | None:
        x = by_tokens(there, rows, length)
        y = by_tokens(here, rows, length)
        if x is None or y is None or x.shape != y.shape:
            return None
        off = (x - y).abs().amax(2).cpu()
        return most(off[still]), most(off[moves])

    # Outputs with a number for each token of the vocabulary are logits.
    return _leak(one, other, view, tolerance, is_result=lambda tensor: tensor.shape[-1] > largest)


def _other_than(ids: Tensor, token: Tensor) -> Tensor:
    """Return another token of the batch."""
    others = ids[ids != token]
    if len(others):
        return others[0]
    return (token + 1) % 2  # 0 or 1, which every vocabulary has


def _joined(tokens: TokenBatch) -> tuple[int, int] | None:
    """Return the row and the place of a document that begins by its labels, but not by its positions.

    Such a document has a single ignored label at its first token, between two labels that are not ignored. The token
    before it is the same for all such documents. ``None`` if there is none.
    """
    assert tokens.positions is not None
    trained = tokens.kinds.trained
    holes = torch.zeros_like(trained)
    holes[:, 1:-1] = trained[:, :-2] & ~trained[:, 1:-1] & trained[:, 2:]
    rows, places = holes.nonzero(as_tuple=True)
    goes_on = tokens.positions[rows, places] == tokens.positions[rows, places - 1] + 1
    if len(rows) < 2 or len(tokens.ids[rows, places - 1].unique()) > 1 or not goes_on.any():
        return None
    first = int(goes_on.nonzero()[0])
    return int(rows[first]), int(places[first])


def _same_rows(batch: Batch, rows: int, one: int, other: int) -> bool:
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == rows]
    return all(torch.equal(leaf[one], leaf[other]) for leaf in leaves)


OF_DATA: tuple[BenchClaim, ...] = (RowsApart(), Causal(), DocumentsApart())
