"""Claims about the training of a language model: which tokens are predicted, and how much each one counts.

    d_t = gradient of -log p(next token) at the input of the output head;    the step's gradient there is g_t = w_t d_t

The next tokens come from the batch, and the cross-entropy is torch's over all logits. The weight w_t tells which tokens
contribute to the loss and how much, whether the loss is computed at once, in chunks, or without logits.
"""

import contextlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_efficient.declaration import overrides, techniques_of
from lit_efficient.evidence.verifying.claims import Verdict
from lit_efficient.evidence.verifying.layer_calls import Bench, BenchClaim, few_rows
from lit_efficient.evidence.verifying.recorded_calls import Call, as_it_is, floats, recorded
from lit_efficient.evidence.verifying.token_batches import NO_TOKENS, TokenBatch, token_batch
from lit_efficient.internals.torch_trees import tree_leaves
from lit_efficient.losses.next_token import IGNORE

# Tolerances in float32, and below.
_EXACT = 1e-3
_COARSE = 0.1
_NO_GRADIENT = "the input of the output head has no gradient, or does not belong to all tokens"


class _Unknown(Exception):
    """Reason why the gradients of a step cannot be attributed to tokens."""


@dataclass
class Learned:
    """Contribution of each token to the gradient of a step.

    Args:
        tokens: The rows of the step.
        head: Name and class of the output head.
        pieces: Number of calls of the head; 0 if the step computes no logits.
        loss: Loss of the step, with its graph.
        each: Cross-entropy of each token over all logits ``[B, T]``, with its graph.
        own: Gradient of the step at the input of the head ``[B, T, H]``.
        dense: Gradients of the sum of all cross-entropies there, by the distance of the predicted token (0 to 2).
    """

    tokens: TokenBatch
    head: str
    pieces: int
    loss: Tensor
    each: Tensor
    own: Tensor
    dense: dict[int, Tensor]

    def weights(self, ahead: int = 1) -> tuple[Tensor, float]:
        """Return the weight of each position ``[B, T]``, and the share of the gradient that weights do not explain."""
        own = self.own.double()
        dense = self.dense[ahead].double()
        weights = (own * dense).sum(-1) / dense.square().sum(-1).clamp(min=1e-60)
        return weights, float((own - weights[..., None] * dense).norm() / own.norm().clamp(min=1e-60))

    @property
    def shown(self) -> Tensor:
        """True for each position that predicts a token according to the batch ``[B, T]``."""
        return self.tokens.targets[:, : self.own.shape[1]] != IGNORE


def learned(bench: Bench, tokens: TokenBatch | None = None) -> Learned:
    """Return the contribution of each token, by default for the first two rows of the batch.

    Raises:
        _Unknown: If it cannot be determined.
    """
    tokens = tokens or token_batch(few_rows(bench.batch, 2)[0])
    if tokens is None:
        raise _Unknown(NO_TOKENS)
    calls, loss = bench.step(tokens.batch, training=False, graph=True)
    vocabulary = _vocabulary(calls, tokens)
    if loss is None or not loss.requires_grad or not vocabulary:
        raise _Unknown("there is no loss that depends on embedded tokens")
    heads = _heads(calls, vocabulary)
    pieces = len(heads)
    inputs = _inputs(heads)
    own_inputs = inputs
    if not heads:
        # The step computes no logits. The network does so if it is called without labels.
        own_calls = calls
        calls = _calls_without_labels(bench, calls, tokens)
        heads = _heads(calls, vocabulary)
        if not heads:
            raise _Unknown("no layer computes logits for the vocabulary")
        inputs = _inputs(heads)
        own_inputs = _inputs(call for call in own_calls if call.name == heads[0].name)
    logits = _logits(calls, heads, tokens, vocabulary)
    if logits is None or not all(tensor.requires_grad for tensor in [*own_inputs, *inputs]):
        raise _Unknown(_NO_GRADIENT)
    own = _gradient(loss, own_inputs, tokens)
    dense = {}
    # Predictions at distance 0 and 2 reveal labels that are shifted wrongly.
    each = {ahead: _cross_entropy(logits, tokens, ahead) for ahead in (0, 1, 2)}
    for ahead, losses in each.items():
        gradient = _gradient(losses.sum(), inputs, tokens)
        if gradient is not None:
            dense[ahead] = gradient
    if own is None or 1 not in dense or own.shape != dense[1].shape:
        raise _Unknown(_NO_GRADIENT)
    return Learned(tokens, heads[0].described, pieces, loss, each[1], own, dense)


class _LearnedClaim(BenchClaim):
    """A claim about the contributions of tokens."""

    def tried(self, bench: Bench) -> Verdict:
        try:
            return self.judged(bench, bench.tolerance(_EXACT, _COARSE))
        except _Unknown as reason:
            return self.idle(str(reason))

    @abstractmethod
    def judged(self, bench: Bench, tolerance: float) -> Verdict:
        """Return whether the property holds.

        Raises:
            _Unknown: If the contributions cannot be determined.
        """


def _explained(found: Learned, tolerance: float) -> Tensor:
    """Return the weights of all positions.

    Raises:
        _Unknown: If the loss has other terms.
    """
    weights, unexplained = found.weights()
    if unexplained > tolerance:
        raise _Unknown("the loss has other terms than the cross-entropy of next tokens")
    return weights


class LearnsWhatIsShown(_LearnedClaim):
    """A position contributes to the loss if and only if its label counts, and predicts the token after it."""

    name = "labels"
    sentence = "the loss predicts exactly the tokens that `preview` shows, each from the one before, and no padding"
    unit = "positions that predict something else"

    def judged(self, bench: Bench, tolerance: float) -> Verdict:
        return self._judged(bench, learned(bench), tolerance)

    def _judged(self, bench: Bench, found: Learned, tolerance: float) -> Verdict:
        padding = _predicted_padding(found.tokens)
        if padding:
            why = "padding tokens count as labels, beyond the first one of a row"
            return self.measured(padding, 0, why, "the batch: labels", unit="tokens")
        for ahead, what in ((0, "itself"), (2, "the token after the next one")):
            if found.weights(ahead)[1] <= tolerance < found.weights()[1]:
                return self.measured(int(found.shown.sum()), 0, f"each token is trained to predict {what}", found.head)
        weights = _explained(found, tolerance)
        learns = weights.abs() > tolerance * weights.abs().max()
        weighing = [type(by).__name__ for by in techniques_of(bench.trainer) if overrides(by, "sample_weights")]
        if weighing and len(learns) > 1 and (found.shown.any(1) & ~learns.any(1)).any():
            return self._rows_alone(bench, found, tolerance, weighing)
        wrong = learns != found.shown
        why = f"of {wrong.numel()} positions {int(found.shown.sum())} have a label that counts"
        if wrong.any():
            more = int((wrong & learns).sum())
            less = int((wrong & ~learns).sum())
            why += f"; {more} others contribute to the loss, and {less} of them do not"
        return self.measured(int(wrong.sum()), 0, why, found.head)

    def _rows_alone(self, bench: Bench, found: Learned, tolerance: float, weighing: list[str]) -> Verdict:
        """Return the worst verdict of each row as a batch, because a technique may give samples a weight of 0."""
        verdicts = []
        for row in range(len(found.shown)):
            tokens = token_batch(found.tokens.part(row, 0, found.tokens.ids.shape[1]))
            if tokens is not None:
                with contextlib.suppress(_Unknown):
                    verdicts.append(self._judged(bench, learned(bench, tokens), tolerance))
        if not verdicts:
            raise _Unknown("the contributions of tokens are unknown for every row alone")
        worst = max(verdicts, key=lambda verdict: verdict.number or 0.0)
        uncovered = f"samples of a batch with a weight of 0: {', '.join(weighing)} weighs samples"
        return replace(worst, why=f"of each row alone: {worst.why}", uncovered=(uncovered,))


class CountsAlike(_LearnedClaim):
    """All predicted tokens of a row have the same weight in the loss."""

    name = "chunked"
    sentence = "a loss in chunks is equal to that over all logits, and each predicted token of a row counts equally"
    unit = "largest relative difference of a token's weight"

    def judged(self, bench: Bench, tolerance: float) -> Verdict:
        found = learned(bench)
        weights = _explained(found, tolerance)
        shape = found.tokens.ids.shape
        if any(leaf.shape == shape and leaf.is_floating_point() for leaf in tree_leaves(found.tokens.batch)):
            return self.idle("the batch has weights for its tokens")
        # Rows may have different weights, but tokens of a row may not.
        spread = 0.0
        for own, shown in zip(weights, found.shown):
            if shown.any():
                mean = own[shown].mean()
                spread = max(spread, float(((own[shown] - mean) / mean).abs().max()))
        off = _difference_of_loss(found, weights, [p for p in bench.module.parameters() if p.requires_grad], tolerance)
        if off > tolerance:
            why = "the value of the loss is not the sum of the cross-entropies whose gradients it has"
            return self.measured(off, tolerance, why, found.head, unit="relative difference of the loss")
        how = {0: "without logits", 1: "at once"}.get(found.pieces, f"in {found.pieces} chunks")
        why = f"the loss is computed {how}; its gradients were compared with those of the cross-entropy of all logits"
        return self.measured(spread, tolerance, why, found.head)


class BehindTheHead(_LearnedClaim):
    """Gradients for the labels of early tokens do not reach later inputs of the output head."""

    name = "logits"
    sentence = "after the output head too, the prediction of a token depends on no later token"
    unit = "share of the gradient"

    def judged(self, bench: Bench, tolerance: float) -> Verdict:
        tokens = token_batch(few_rows(bench.batch, 2)[0])
        if tokens is None:
            raise _Unknown(NO_TOKENS)
        half = tokens.ids.shape[1] // 2
        found = []
        for end in (half, half // 2):
            labels = tokens.labels.clone()
            labels[:, end + (tokens.targets is not tokens.labels) :] = IGNORE
            part = token_batch(tokens.with_labels(labels))
            if part is None:
                raise _Unknown("the first quarter of the rows has no labels")
            found.append(learned(bench, part))
        late, other = (one.own[:, half:].double().flatten() for one in found)
        # Terms of the loss that do not depend on labels have the same direction in both. Only the rest counts.
        rest = late - other * (late @ other / (other @ other).clamp(min=1e-60))
        share = float(rest.norm() / found[0].own.double().norm().clamp(min=1e-60))
        why = "labels in the first half of each row only, and their gradient at inputs of the head in the other half"
        return self.measured(share, tolerance, why, found[0].head)


def _difference_of_loss(found: Learned, weights: Tensor, parameters: Sequence[Tensor], tolerance: float) -> float:
    """Return the relative difference of the loss from the weighted cross-entropies; 0 if it has other terms."""
    rest = found.loss.float() - (weights.to(found.each) * found.each).sum()
    grad = partial(torch.autograd.grad, inputs=parameters, retain_graph=True, allow_unused=True)
    if _norm(grad(rest)) > tolerance * _norm(grad(found.loss)):
        return 0.0
    return float(rest.detach().abs() / found.loss.detach().abs())


def _norm(gradients: Sequence[Tensor | None]) -> float:
    return math.sqrt(sum(float(one.double().square().sum()) for one in gradients if one is not None))


def _predicted_padding(tokens: TokenBatch) -> int:
    """Return the number of padding tokens that are predicted. The first one of a row may mark the end of its text."""
    padded = tokens.kinds.padded
    # Padding consists of a single token.
    if len(tokens.ids[padded].unique()) != 1:
        return 0  # the mask hides something else than padding
    return int((padded[:, :-1] & padded[:, 1:] & tokens.kinds.trained[:, 1:]).sum())


def _vocabulary(calls: Sequence[Call], tokens: TokenBatch) -> int:
    """Return the number of rows of the embedding that receives the tokens; 0 if there is none."""
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
    """Return the calls of the output head: the last layer that computes logits, if no other layer uses them."""
    found = [(i, call) for i, call in enumerate(calls) if _computes_logits(call, vocabulary)]
    if not found:
        return []
    last, head = found[-1]
    for call in calls[last + 1 :]:
        # Layers that contain the head return its logits. A loss has a single number, or one for each token.
        uses = any(tensor.ndim > 1 and tensor.shape[-1] > 1 for tensor in floats(call.output))
        if uses and not head.name.startswith(f"{call.name}."):
            return []
    return [call for _, call in found if call.name == head.name]


def _computes_logits(call: Call, vocabulary: int) -> bool:
    if not call.args:
        return False
    given = call.args[0]
    if not isinstance(call.output, Tensor) or not isinstance(given, Tensor):
        return False
    widens = call.output.ndim > 1 and call.output.shape[-1] == vocabulary and given.shape[-1] != vocabulary
    return widens and given.is_floating_point()


def _calls_without_labels(bench: Bench, calls: Sequence[Call], tokens: TokenBatch) -> list[Call]:
    """Call the network again without labels, so that it computes logits, and return the calls of its layers."""
    for call in calls:
        given = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
        if call.outermost and any(_holds(leaf, tokens) for leaf in given):
            kwargs = {name: value for name, value in call.kwargs.items() if "labels" not in name}
            with recorded(call.part, as_it_is) as found, bench.trainer.precision_plugin.train_step_context():
                call.part(*call.args, **kwargs)
            return [replace(one, name=f"{call.name}.{one.name}") for one in found]
    return []


def _logits(calls: Sequence[Call], heads: Sequence[Call], tokens: TokenBatch, vocabulary: int) -> Tensor | None:
    """Return the logits of all tokens ``[B, T, V]``, as the network returns them; ``None`` if they have no such shape.

    The network may change the logits after its head, for example by a scale.
    """
    if len(heads) == 1:
        for call in calls:
            if call.outermost and call.outer == heads[0].outer:
                for tensor in floats(call.output):
                    if tensor.ndim > 1 and tensor.shape[-1] == vocabulary:
                        return _joined([tensor], tokens)
    return _joined([call.output for call in heads], tokens)


def _joined(pieces: Sequence[Tensor], tokens: TokenBatch) -> Tensor | None:
    """Join pieces along the tokens to ``[B, T, ...]``; ``None`` if they do not have all tokens."""
    rows, length = tokens.ids.shape
    if pieces[0].ndim == 3 and all(piece.shape[0] == rows for piece in pieces):
        joined = torch.cat([*pieces], 1)
    else:
        joined = torch.cat([piece.flatten(0, -2) for piece in pieces])
    for size in (length, length - 1):  # the last token predicts nothing
        if joined.shape[:-1].numel() == rows * size:
            return joined.reshape(rows, size, -1)
    return None


def _cross_entropy(logits: Tensor, tokens: TokenBatch, ahead: int) -> Tensor:
    """Return the cross-entropy of the token ``ahead`` places later for each position ``[B, T]``, labelled or not."""
    later = F.pad(tokens.ids[:, ahead:], (0, ahead), value=IGNORE)
    if ahead == 1:
        later = torch.where(later == IGNORE, tokens.targets, later)
    targets = later[:, : logits.shape[1]]
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view(targets.shape)


def _gradient(loss: Tensor, inputs: Sequence[Tensor], tokens: TokenBatch) -> Tensor | None:
    found = torch.autograd.grad(loss, [*inputs], retain_graph=True, materialize_grads=True, allow_unused=True)
    return _joined(found, tokens)


def _inputs(calls: Iterable[Call]) -> list[Tensor]:
    """Return the inputs of calls, each tensor once."""
    return list({id(call.args[0]): call.args[0] for call in calls}.values())


OF_LABELS: tuple[BenchClaim, ...] = (LearnsWhatIsShown(), CountsAlike(), BehindTheHead())
