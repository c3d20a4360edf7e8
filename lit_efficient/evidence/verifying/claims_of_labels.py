"""Claims on what a language model learns: which tokens, to become which, and each with which weight.

    d_t = gradient of -log p(next token) at what the output head gets;    the step's own gradient there is g_t = w_t d_t

The next tokens are those that the batch shows, and the cross-entropy is torch's over the whole logits. So w_t says
which tokens are learned and how much each counts, however the loss is computed: at once, in chunks, without logits.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.declaration import overrides, techniques_of
from lit_efficient.evidence.verifying.claims import Claim, Verdict
from lit_efficient.evidence.verifying.layer_calls import Bench, BenchClaim, few_rows
from lit_efficient.evidence.verifying.recorded_calls import Call, as_it_is, floats, recorded
from lit_efficient.evidence.verifying.token_batches import NO_TOKENS, TokenBatch, token_batch
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.losses.next_token import IGNORE

_EXACT, _COARSE = 1e-3, 0.1


@dataclass
class Learned:
    """What a step learns of each token of some rows."""

    tokens: TokenBatch  # the rows
    head: str  # the output head's name and class
    pieces: int  # into how many calls of the head the rows were cut; 0 where it gave no logits
    loss: Tensor  # the step's loss, with its graph
    each: Tensor  # each token's cross-entropy over the whole logits ``[B, T]``, with its graph
    own: Tensor  # the step's gradient at what the head gets ``[B, T, H]``
    dense: dict[int, Tensor]  # by how many tokens ahead it looks: that of the sum of all cross-entropies

    def weights(self, ahead: int = 1) -> tuple[Tensor, float]:
        """How much each position counts ``[B, T]``, and which share of the gradients that does not explain."""
        own, dense = self.own.double(), self.dense[ahead].double()
        weights = (own * dense).sum(-1) / dense.square().sum(-1).clamp(min=1e-60)
        return weights, float((own - weights[..., None] * dense).norm() / own.norm().clamp(min=1e-60))

    @property
    def shown(self) -> Tensor:
        """Which positions learn by what the batch shows ``[B, T]``."""
        return self.tokens.targets[:, : self.own.shape[1]] != IGNORE


def learned(bench: Bench, tokens: TokenBatch | None = None) -> Learned | str:
    """What a step learns of each token, of the first rows if none are given, or why that is not known."""
    tokens = tokens or token_batch(few_rows(bench.batch, 2)[0])
    if tokens is None:
        return NO_TOKENS
    calls, loss = bench.step(tokens.batch, training=False, graph=True)
    vocabulary = _vocabulary(calls, tokens)
    if loss is None or not loss.requires_grad or not vocabulary:
        return "there is no loss that follows from embedded tokens"
    heads = _heads(calls, vocabulary)
    pieces, whole = len(heads), calls
    if not heads:
        whole = _without_labels(bench, calls, tokens)
        heads = _heads(whole, vocabulary)
        calls = [call for call in calls if heads and call.name == heads[0].name]
    if not heads:
        return "no layer gives logits for the vocabulary"
    given = [_once(call.args[0] for call in of) for of in (calls if not pieces else heads, heads)]
    logits = _logits(whole, heads, tokens, vocabulary)
    if logits is None or not all(tensor.requires_grad for tensor in [*given[0], *given[1]]):
        return "what the output head gets has no gradient, or is not that of all tokens"
    each = {ahead: _cross_entropy(logits, tokens, ahead) for ahead in (0, 1, 2)}
    dense = {ahead: _gradient(losses.sum(), given[1], tokens) for ahead, losses in each.items()}
    own = _gradient(loss, given[0], tokens)
    if own is None or dense[1] is None or own.shape != dense[1].shape:
        return "what the output head gets has no gradient, or is not that of all tokens"
    dense_ones = {k: v for k, v in dense.items() if v is not None}
    return Learned(tokens, heads[0].described, pieces, loss, each[1], own, dense_ones)


class _LearnedClaim(BenchClaim):
    """A claim on what a step learns of each token."""

    def tried(self, bench: Bench) -> Verdict:
        found = learned(bench)
        if isinstance(found, str):
            return self.idle(found)
        return self.judged(bench, found, bench.tolerance(_EXACT, _COARSE))

    @abstractmethod
    def judged(self, bench: Bench, found: Learned, tolerance: float) -> Verdict:
        """Whether it is true of what is learned."""

    def more(self) -> Verdict:
        """There are other terms in the loss."""
        return self.idle("the loss is more than the cross-entropy of next tokens")


class LearnsWhatIsShown(_LearnedClaim):
    """A position is learned if and only if its label counts, and learns the token that follows it."""

    name = "labels"
    sentence = "what is learned is what `preview` shows, no filling: those tokens, and each from the one before it"

    def judged(self, bench: Bench, found: Learned, tolerance: float) -> Verdict:
        if filling := _filling(found.tokens):
            why = "tokens that fill rows up, behind the first one of each, count as labels"
            return self.measured(float(filling), 0.0, "tokens", why, where="the batch: labels")
        unit = "positions of them learn something else"
        for ahead in (0, 2):
            if found.weights(ahead)[1] <= tolerance < found.weights()[1]:
                what = "itself" if ahead == 0 else "the token after the next one"
                count = float(found.shown.sum())
                return self.measured(count, 0.0, unit, f"each token learns to predict {what}", where=found.head)
        weights, unexplained = found.weights()
        if unexplained > tolerance:
            return self.more()
        learns = weights.abs() > tolerance * weights.abs().max()
        weighing = [type(by).__name__ for by in techniques_of(bench.trainer) if overrides(by, "sample_weights")]
        if weighing and len(learns) > 1 and (found.shown.any(1) & ~learns.any(1)).any():
            return self._rows_alone(bench, found, tolerance, weighing)
        wrong = learns != found.shown
        too_much, too_little = int((wrong & learns).sum()), int((wrong & ~learns).sum())
        why = f"of {wrong.numel()} positions {int(found.shown.sum())} are shown as learned"
        why += f", {too_much} others are, too, and {too_little} are not" if wrong.any() else ""
        return self.measured(float(wrong.sum()), 0.0, unit, why, where=found.head)

    def _rows_alone(self, bench: Bench, found: Learned, tolerance: float, weighing: list[str]) -> Verdict:
        """The worst of the rows, each as a batch of its own: of a batch some samples may count nothing."""
        rows = [token_batch(found.tokens.part(row, 0, found.tokens.ids.shape[1])) for row in range(len(found.shown))]
        alone = [learned(bench, row) for row in rows if row is not None]
        verdicts = [self.judged(bench, one, tolerance) for one in alone if isinstance(one, Learned)]
        worst = max(verdicts, key=lambda verdict: verdict.number or 0.0)
        uncovered = f"which samples of a batch count nothing: {', '.join(weighing)} weighs them"
        return replace(worst, why=f"of each row alone: {worst.why}", uncovered=(uncovered,))


class CountsAlike(_LearnedClaim):
    """The weights of a row's tokens in the loss are equal."""

    name, sentence = (
        "chunked",
        "a loss in chunks is that of the whole logits, and each learned token of a row counts alike",
    )

    def judged(self, bench: Bench, found: Learned, tolerance: float) -> Verdict:
        weights, unexplained = found.weights()
        if unexplained > tolerance:
            return self.more()
        shape = found.tokens.ids.shape
        if any(leaf.shape == shape and leaf.is_floating_point() for leaf in tree_leaves(found.tokens.batch)):
            return self.idle("the batch weighs its tokens")
        spread = 0.0
        for own, shown in zip(weights, found.shown):
            if shown.any():
                mean = own[shown].mean()
                spread = max(spread, float(((own[shown] - mean) / mean).abs().max()))
        off = _value_off(found, weights, [p for p in bench.module.parameters() if p.requires_grad], tolerance)
        if off > tolerance:
            why = "the loss is another number than the sum of the cross-entropies whose gradients it has"
            return self.measured(off, tolerance, "relative difference of the loss", why, where=found.head)
        how = {0: "without logits", 1: "at once"}.get(found.pieces, f"in {found.pieces} chunks")
        why = f"the loss is computed {how}, and its gradients compared with those of the whole logits' cross-entropy"
        return self.measured(spread, tolerance, "largest difference of a token's weight", why, where=found.head)


class BehindTheHead(BenchClaim):
    """What is learned of the first tokens of a row does not follow from what the head gets of later ones."""

    name, sentence = "logits", "behind the output head, too, no token takes part in what is learned of an earlier one"

    def tried(self, bench: Bench) -> Verdict:
        tokens = token_batch(few_rows(bench.batch, 2)[0])
        if tokens is None:
            return self.idle(NO_TOKENS)
        half = tokens.ids.shape[1] // 2
        found: list[Learned] = []
        for end in (half, half // 2):
            labels = tokens.labels.clone()
            labels[:, end + (tokens.targets is not tokens.labels) :] = IGNORE
            part = token_batch(tokens.with_labels(labels))
            one = learned(bench, part) if part is not None else "nothing is learned in the first quarter of the rows"
            if isinstance(one, str):
                return self.idle(one)
            found.append(one)
        late, other = (one.own[:, half:].double().flatten() for one in found)
        # What is learned of all tokens, whatever their labels, has one direction; what comes from early labels has not.
        rest = late - other * (late @ other / (other @ other).clamp(min=1e-60))
        share = float(rest.norm() / found[0].own.double().norm().clamp(min=1e-60))
        why = "the first half of each row learned alone, and what follows from what the head got of the other half"
        return self.measured(share, bench.tolerance(_EXACT, _COARSE), "share of the gradient", why, where=found[0].head)


def _value_off(found: Learned, weights: Tensor, parameters: Sequence[Tensor], tolerance: float) -> float:
    """How far the loss is from its tokens' weighted cross-entropies; 0 where another term has gradients of its own."""
    rest = found.loss.float() - (weights.to(found.each) * found.each).sum()
    own, more = (
        _norm(torch.autograd.grad(x, parameters, retain_graph=True, allow_unused=True)) for x in (found.loss, rest)
    )
    return float(rest.detach().abs() / found.loss.detach().abs()) if more <= tolerance * own else 0.0


def _norm(gradients: Sequence[Tensor | None]) -> float:
    return float(sum(float(one.double().square().sum()) for one in gradients if one is not None) ** 0.5)


def _filling(tokens: TokenBatch) -> int:
    """How many filling tokens are learned; the first one may end the row's text."""
    padded = tokens.kinds.padded
    if len(tokens.ids[padded].unique()) != 1:  # what a mask hides is no filling then
        return 0
    return int((padded[:, :-1] & padded[:, 1:] & tokens.kinds.trained[:, 1:]).sum())


def _vocabulary(calls: Sequence[Call], tokens: TokenBatch) -> int:
    """How many rows the layer has that tokens are looked up in."""
    for call in calls:
        weight = getattr(call.part, "weight", None)
        reads = any(isinstance(arg, Tensor) and _holds(arg, tokens) for arg in call.args)
        if reads and isinstance(weight, Tensor) and weight.ndim == 2:
            return int(weight.shape[0])
    return 0


def _holds(tensor: Tensor, tokens: TokenBatch) -> bool:
    whole = not tensor.is_floating_point() and tensor.numel() == tokens.ids.numel()
    return whole and torch.equal(tensor.reshape(-1), tokens.ids.reshape(-1))


def _heads(calls: Sequence[Call], vocabulary: int) -> list[Call]:
    """The calls of the last layer that gives logits for what it gets; nothing goes on with them but what holds it."""
    found = [
        (i, call)
        for i, call in enumerate(calls)
        if isinstance(call.output, Tensor)
        and call.output.ndim > 1
        and call.output.shape[-1] == vocabulary
        and call.args
        and isinstance(call.args[0], Tensor)
        and call.args[0].is_floating_point()
        and call.args[0].shape[-1] != vocabulary
    ]
    if not found:
        return []
    last, head = found[-1]
    behind = [call for call in calls[last + 1 :] if not head.name.startswith(f"{call.name}.")]
    goes_on = any(tensor.ndim > 1 and tensor.shape[-1] > 1 for call in behind for tensor in floats(call.output))
    return [] if goes_on else [call for _, call in found if call.name == head.name]


def _without_labels(bench: Bench, calls: Sequence[Call], tokens: TokenBatch) -> list[Call]:
    """The calls of the network if it is asked for logits alone."""
    for call in calls:
        given = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
        if call.outermost and any(_holds(leaf, tokens) for leaf in given):
            kwargs = {name: value for name, value in call.kwargs.items() if "labels" not in name}
            with recorded(call.part, as_it_is) as found, bench.trainer.precision_plugin.train_step_context():
                call.part(*call.args, **kwargs)
            return [Call(f"{call.name}.{one.name}", *list(vars(one).values())[1:]) for one in found]
    return []


def _logits(calls: Sequence[Call], heads: Sequence[Call], tokens: TokenBatch, vocabulary: int) -> Tensor | None:
    """Those of all tokens ``[B, T, V]``, as the network leaves them."""
    behind = [call for call in calls if call.outermost and call.outer == heads[0].outer and len(heads) == 1]
    for call in behind:
        for tensor in floats(call.output):
            if tensor.ndim > 1 and tensor.shape[-1] == vocabulary:
                return _joined([tensor], tokens)
    return _joined([call.output for call in heads], tokens)


def _joined(pieces: Sequence[Tensor], tokens: TokenBatch) -> Tensor | None:
    rows, length = tokens.ids.shape
    in_time = pieces[0].ndim == 3 and all(piece.shape[0] == rows for piece in pieces)
    joined = torch.cat([*pieces], 1) if in_time else torch.cat([piece.flatten(0, -2) for piece in pieces])
    for size in (length, length - 1):  # the last position has nothing to predict
        if joined.shape[: joined.ndim - 1].numel() == rows * size:
            return joined.reshape(rows, size, -1)
    return None


def _cross_entropy(logits: Tensor, tokens: TokenBatch, ahead: int) -> Tensor:
    """Those of all tokens so many ahead ``[B, T]``, whether they count or not."""
    ids = tokens.ids
    later = F.pad(ids[:, ahead:], (0, ahead), value=IGNORE)
    if ahead == 1:
        later = torch.where(later == IGNORE, tokens.targets, later)
    targets = later[:, : logits.shape[1]]
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view(targets.shape)


def _gradient(loss: Tensor, given: Sequence[Tensor], tokens: TokenBatch) -> Tensor | None:
    found = torch.autograd.grad(loss, [*given], retain_graph=True, allow_unused=True)
    return _joined([torch.zeros_like(x) if g is None else g for x, g in zip(given, found)], tokens)


def _once(tensors: Any) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


OF_LABELS: tuple[Claim, ...] = (LearnsWhatIsShown(), CountsAlike(), BehindTheHead())
