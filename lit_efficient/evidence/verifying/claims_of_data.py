"""Claims on what sees what in a batch: rows, tokens and documents, and which tokens are learned."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_efficient.declaration import techniques_of
from lit_efficient.evidence.verifying.claims import Claim, Verdict
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
from lit_efficient.internals.torch_layers import BatchNorm
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.losses.next_token import IGNORE
from lit_efficient.traits import Trait

_EXACT, _COARSE = 1e-3, 0.07  # of a change, what rounding alone may pass on, in float32 and below
_BLIND = "nothing that the layers give out follows from what was changed"


class RowsApart(BenchClaim):
    """Another last row of the batch changes nothing that is computed of the other rows."""

    name, sentence = "rows", "what is computed of one row of a batch follows from no other row"

    def tried(self, bench: Bench) -> Verdict:
        batch, rows = few_rows(bench.batch)
        others = [row for row in range(rows - 1) if not _same_rows(batch, rows, row, rows - 1)]
        if not others:
            return self.idle("the batch has no two rows that differ, or its tensors no rows in common")
        changed = cut(batch, rows, torch.tensor([*range(rows - 1), others[0]]))  # another one in the last one's place
        tolerance = bench.tolerance(_EXACT, _COARSE)
        leak, own, where, outside = self._leak(bench, batch, changed, rows, tolerance)
        norms = {name: part for name, part in bench.module.named_modules() if isinstance(part, BatchNorm)}
        norms = {name: part for name, part in norms.items() if part.training}
        uncovered: tuple[str, ...] = ()
        if leak > tolerance and norms:
            bench.still = [*norms.values()]
            leak, own, where, outside = self._leak(bench, batch, changed, rows, tolerance)
            uncovered = (
                f"{len(norms)} layers that normalise by the statistics of the batch, first {next(iter(norms))}",
            )
        if not own:
            return self.idle(_BLIND)
        if leak > tolerance and outside:
            return self.idle(f"the training step mixes rows before {where} sees them, as mixup does")
        apart = f", but for the batch statistics of {len(norms)} layers, which are meant to" if uncovered else ""
        why = f"the last of {rows} rows was replaced by another one, and the others computed as before{apart}"
        return self.measured(leak, tolerance, "share of its own change", why, where=where, uncovered=uncovered)

    def _leak(
        self, bench: Bench, batch: Any, changed: Any, rows: int, tolerance: float
    ) -> tuple[float, float, str, bool]:
        """How much other rows move of what the changed one does, that, the first layer, and whether it is before it."""
        one, other = (bench.step(each)[0] for each in (batch, changed))
        steps = list(aligned(one, other))
        moved = {a.key: _moved(_of_rows(a.output, rows), _of_rows(b.output, rows)) for a, b in steps}
        last = ends(one, [key for key, ways in moved.items() if ways])
        leaks = {call.key: _least(moved[call.key]) for call in last}
        leak = max((by for by, _ in leaks.values()), default=0.0)
        own = max((size for _, size in leaks.values()), default=0.0)
        first = next((a for a, _ in steps if moved[a.key] and _least(moved[a.key])[0] > tolerance), None)
        outermost = [(a, b) for a, b in steps if a.outermost]
        begin = min(outermost, key=lambda pair: pair[0].outer, default=None)
        outside = (
            begin is not None and _least(_moved(*(_of_rows((c.args, c.kwargs), rows) for c in begin)))[0] > tolerance
        )
        where = "" if first is None else first.described
        return leak, own, begin[0].described if outside and begin else where, outside


class Causal(BenchClaim):
    """Another token changes nothing that is computed of those before it."""

    name, sentence = "causal", "no token of a language model sees a later one"

    def tried(self, bench: Bench) -> Verdict:
        found = token_batch(few_rows(bench.batch)[0])
        if found is None:
            return self.idle(NO_TOKENS)
        rows, length = found.ids.shape
        ids = found.ids.clone()
        places = [max(1, length * (row + 1) // (rows + 1)) for row in range(rows)]
        for row, place in enumerate(places):
            ids[row, place] = _other_than(ids, ids[row, place])
        sees = [by for by in techniques_of(bench.trainer) if Trait.SEES_AHEAD in by.reasons]
        ahead = {type(by).__name__: by.reasons[Trait.SEES_AHEAD] for by in sees}
        one, other = (bench.step(batch, training=not ahead)[0] for batch in (found.batch, found.with_ids(ids)))
        before, behind = (torch.zeros(rows, length, dtype=torch.bool) for _ in range(2))
        for row, place in enumerate(places):
            before[row, :place] = behind[row, place:] = True
        tolerance = bench.tolerance(_EXACT, _COARSE)
        leak, own, where = _leak_of_tokens(one, other, found, before, behind, tolerance)
        if not own:
            return self.idle(_BLIND)
        why = f"one token in each of {rows} rows was replaced, and what is computed of those before it compared"
        why += ", in evaluation" if ahead else ""
        uncovered = tuple(f"training, in which {name} sees ahead: {reason}" for name, reason in ahead.items())
        return self.measured(leak, tolerance, "share of what moves behind it", why, where=where, uncovered=uncovered)


class DocumentsApart(BenchClaim):
    """Each document of a packed row is computed as if it were alone."""

    name, sentence = "packed", "documents that share a row are computed, and learned, as each one alone"

    def tried(self, bench: Bench) -> Verdict:
        found = token_batch(bench.batch)
        if found is None or found.positions is None:
            return self.idle(NO_TOKENS if found is None else "the batches do not say where documents begin")
        if joined := _joined(found):
            row, place = joined
            why = (
                f"in row {row} a document begins with token {place}: its label is left out, behind the token that ends "
                "all of them; but its position does not begin again"
            )
            return self.measured(float("inf"), 0.0, "documents that go on", why, where="the batch: position_ids")
        packed = [row for row in range(len(found.ids)) if len(found.documents(row)) > 1]
        if not packed:
            return self.idle("no row of the first batch holds two documents")
        row = max(packed, key=lambda row: len(found.documents(row)))
        alone = token_batch(found.part(row, 0, found.ids.shape[1]))
        if alone is None:
            return self.idle("the row with the most documents learns nothing")
        tolerance = bench.tolerance(_EXACT, _COARSE)
        trials = [self._each(bench, alone), self._changed(bench, alone), self._learned(bench, alone)]
        worst, where, what = max(trials)
        number = len(found.documents(row))
        why = f"{number} documents of a row: each alone, with another first one, and the gradient of one; worst: {what}"
        uncovered: tuple[str, ...] = ("dropout within packed rows",)
        if not all(alone.kinds.trained[0, a:b].any() for a, b in alone.documents(0)):
            uncovered += ("documents of which nothing is learned",)
        return self.measured(
            worst, tolerance, "share of a document's own values", why, where=where, uncovered=uncovered
        )

    def _each(self, bench: Bench, row: TokenBatch) -> tuple[float, str, str]:
        whole = bench.step(row.batch, training=False)[0]
        worst, where = 0.0, ""
        for begin, end in row.documents(0):
            calls = bench.step(row.part(0, begin, end), training=False)[0]
            place: dict[Any, float] = {}
            for a, b in aligned(whole, calls):
                for there, here in zip(floats(a.output), floats(b.output)):
                    packed, alone = by_tokens(there, 1, row.ids.shape[1]), by_tokens(here, 1, end - begin)
                    if packed is not None and alone is not None and packed.shape[2] == alone.shape[2]:
                        off = ratio(most(packed[:, begin:end] - alone), most(alone))
                        place[a.key] = max(off, place.get(a.key, 0.0))
            last = ends(whole, place)
            off = max((place[call.key] for call in last), default=0.0)
            if off > worst:
                first = [call for call in whole if place.get(call.key, 0.0) > min(off, _EXACT)]
                worst, where = off, first[0].described if first else ""
        return worst, where, "one alone"

    def _changed(self, bench: Bench, row: TokenBatch) -> tuple[float, str, str]:
        (begin, end), *_ = row.documents(0)
        ids = row.ids.clone()
        for place in range(begin, end):
            ids[0, place] = _other_than(row.ids, ids[0, place])
        one, other = (bench.step(batch, training=False)[0] for batch in (row.batch, row.with_ids(ids)))
        inside = torch.zeros(row.ids.shape, dtype=torch.bool)
        inside[0, begin:end] = True
        leak, _, where = _leak_of_tokens(one, other, row, ~inside, inside, _EXACT)
        return leak, where, "another first one"

    def _learned(self, bench: Bench, row: TokenBatch) -> tuple[float, str, str]:
        """How far gradients of other documents follow from what one is to become."""
        trained = [place for place in row.documents(0) if row.kinds.trained[0, slice(*place)].any()]
        begin, end = trained[-1]
        labels = torch.full_like(row.labels, IGNORE)
        labels[0, begin:end] = row.labels[0, begin:end]
        if row.targets is row.labels:
            labels[0, end - 1] = IGNORE
        other = torch.where(labels == IGNORE, labels, _other_than(row.ids, row.ids[0, begin]))
        found, name = [], ""
        for each in (labels, other):
            calls, loss = bench.step(row.with_labels(each), training=False, graph=True)
            layers = [
                (call, tensor)
                for call in calls
                for tensor in floats(call.output)
                if tensor.requires_grad and by_tokens(tensor, 1, row.ids.shape[1]) is not None
            ]
            if loss is not None and layers:
                name = layers[0][0].described
                (gradient,) = torch.autograd.grad(loss, layers[0][1], allow_unused=True)
                found += [] if gradient is None else [by_tokens(gradient, 1, row.ids.shape[1])]
        if len(found) < 2 or found[0] is None or found[1] is None:
            return 0.0, "", "the gradient of one"
        off = found[0] - found[1]
        outside = max(most(off[:, :begin]), most(off[:, end:]))
        return ratio(outside, most(off[:, begin:end])), name, "the gradient of one"


def _moved(one: Sequence[Sequence[Tensor]], other: Sequence[Sequence[Tensor]]) -> list[tuple[float, float]]:
    """Of each way to read rows how much those before the last one move, and how much that does: of all tensors."""
    found: list[list[tuple[float, float]]] = []
    for a, b in zip(one, other):
        ways = [(most(x[:-1] - y[:-1]), most(x[-1] - y[-1])) for x, y in zip(a, b) if x.shape == y.shape]
        if ways:
            found.append([min(ways, key=lambda way: ratio(*way))])
    return [way for ways in found for way in ways]


def _least(moved: list[tuple[float, float]]) -> tuple[float, float]:
    """The worst share of all tensors of a call, and how much the changed row moves."""
    return max((ratio(*way) for way in moved), default=0.0), max((own for _, own in moved), default=0.0)


def _of_rows(tree: Any, rows: int) -> list[list[Tensor]]:
    return [ways for ways in (by_rows(tensor, rows) for tensor in floats(tree)) if ways]


def _leak_of_tokens(
    one: list[Call], other: list[Call], tokens: TokenBatch, still: Tensor, moves: Tensor, tolerance: float
) -> tuple[float, float, str]:
    """How much tokens move that must not, of what those do that should; that; and the first layer."""
    rows, length = tokens.ids.shape
    moved: dict[Any, tuple[float, float]] = {}
    logits = set()
    for a, b in aligned(one, other):
        for there, here in zip(floats(a.output), floats(b.output)):
            x, y = by_tokens(there, rows, length), by_tokens(here, rows, length)
            if x is None or y is None or x.shape != y.shape:
                continue
            by = (x - y).abs().amax(2).cpu()
            off = most(by[still]), most(by[moves])
            moved[a.key] = max(moved.get(a.key, off), off, key=lambda way: ratio(*way))
            if x.shape[2] > int(tokens.ids.max()):
                logits.add(a.key)
    last = ends(one, logits or moved)
    leak = max((ratio(*moved[call.key]) for call in last), default=0.0)
    own = max((moved[call.key][1] for call in last), default=0.0)
    where = next((call.described for call in one if ratio(*moved.get(call.key, (0.0, 0.0))) > tolerance), "")
    return leak, own, where


def _other_than(ids: Tensor, token: Tensor) -> Tensor:
    """A token of the batch that is another one."""
    others = ids[ids != token]
    return others[0] if len(others) else (token + 1) % 2


def _joined(tokens: TokenBatch) -> tuple[int, int] | None:
    """Where a document begins by its labels, and goes on by its positions.

    Its first label alone is left out between learned ones, and the same token ends all that come before such a place.
    """
    assert tokens.positions is not None
    learned = tokens.kinds.trained
    holes = torch.zeros_like(learned)
    holes[:, 1:-1] = learned[:, :-2] & ~learned[:, 1:-1] & learned[:, 2:]
    rows, places = holes.nonzero(as_tuple=True)
    goes_on = tokens.positions[rows, places] == tokens.positions[rows, places - 1] + 1
    if len(rows) < 2 or len(tokens.ids[rows, places - 1].unique()) > 1 or not goes_on.any():
        return None
    first = int(goes_on.nonzero()[0])
    return int(rows[first]), int(places[first])


def _same_rows(batch: Any, rows: int, one: int, other: int) -> bool:
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    differ = [not torch.equal(t[one], t[other]) for t in leaves if t.ndim and t.shape[0] == rows]
    return not any(differ)


OF_DATA: tuple[Claim, ...] = (RowsApart(), Causal(), DocumentsApart())
