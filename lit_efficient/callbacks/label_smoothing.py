"""Label smoothing: a share of the target is spread over all classes, or the whole vocabulary.

    loss = -(1 - e) log p(y) - e mean_v log p(v)

Saves: confidence that data with wrong labels does not deserve: better calibrated, often better accuracy or BLEU
Costs: one mean over the logits; the training loss has a floor above 0, and a larger perplexity may come with it
Source: Szegedy et al. (2016), https://arxiv.org/abs/1512.00567; Vaswani et al. (2017), https://arxiv.org/abs/1706.03762
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_efficient.application.loss import LossHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.losses.deferred_logits import ChunkedLoss
from lit_efficient.technique import Technique


class Smoothed:
    """What stands in for ``F.cross_entropy``; a function and no mode of torch's, in which a compiler traces less."""

    def __init__(self, epsilon: float, chunked: Sequence[Any]) -> None:
        self.epsilon, self.chunked = epsilon, chunked
        self.own = F.cross_entropy
        self.calls = 0

    @property
    def used(self) -> bool:
        """Whether a loss was smoothed so far."""
        return self.calls > 0 or any(network.chunked_loss_used for network in self.chunked)

    def cross_entropy(
        self,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Torch's, with smoothed targets; by the operator, as a compiled graph has torch's function by its name."""
        if label_smoothing:
            raise _twice("F.cross_entropy")
        self.calls += 1
        if size_average is not None or reduce is not None:  # what reduction was once
            reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
        mode = ("none", "mean", "sum").index(reduction)
        return torch.ops.aten.cross_entropy_loss(input, target, weight, mode, ignore_index, self.epsilon)


@contextmanager
def smooth_labels(epsilon: float, *networks: nn.Module) -> Iterator[Smoothed]:
    """A context in which every call of ``F.cross_entropy`` (and ``nn.CrossEntropyLoss``) has smoothed targets.

    Args:
        epsilon: Share of the target that is spread, at least 0 and below 1.
        *networks: Those in which the chunked cross-entropy may be, which is smoothed, too.

    Yields:
        What tells, as ``used``, whether a loss was smoothed.

    Raises:
        ConfigurationError: For an argument out of range, and a loss that has a ``label_smoothing`` of its own.
    """
    check_number("smooth_labels", "epsilon", epsilon, least=0, below=1)
    parts: list[Any] = [part for network in networks for part in network.modules()]
    chunked = [part for part in parts if isinstance(getattr(part, "chunked_loss", None), ChunkedLoss)]
    before = [(part, part.chunked_loss, part.chunked_loss_used) for part in chunked]
    if any(how.label_smoothing for _, how, _ in before):
        raise _twice("ChunkedCrossEntropy")
    for part, how, _ in before:
        part.chunked_loss, part.chunked_loss_used = replace(how, label_smoothing=epsilon), False
    smoothed = Smoothed(epsilon, chunked)
    try:
        F.cross_entropy = smoothed.cross_entropy
        yield smoothed
    finally:
        F.cross_entropy = smoothed.own
        for part, how, used in before:
            part.chunked_loss, part.chunked_loss_used = how, part.chunked_loss_used or used


def _twice(where: str) -> ConfigurationError:
    return ConfigurationError(
        f"LabelSmoothing: {where} has a label_smoothing of its own, and labels are smoothed once: keep one of the two"
    )


class LabelSmoothing(LossHooks, Technique):
    """Smooth the labels of every cross-entropy that ``training_step`` computes.

    Acts on ``F.cross_entropy`` and ``nn.CrossEntropyLoss``, wherever the step calls them: in the losses of our tasks,
    of transformers' models and of your own code, and on the losses that are computed in chunks. The logged training
    loss is the smoothed one; validation is without. Labels that are ignored stay ignored.

    Args:
        epsilon: Share of the target that is spread over all classes, at least 0 and below 1.

    Raises:
        ConfigurationError: For an argument out of range; in the first step if it computes no cross-entropy, or one with
            a label_smoothing of its own.
    """

    phase = Phase.LOSS
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "less confidence in labels that may be wrong")}

    def __init__(self, epsilon: float = 0.1) -> None:
        super().__init__()
        check_number("LabelSmoothing", "epsilon", epsilon, least=0, below=1)
        self.epsilon = epsilon
        self._used = False

    def describe(self, module: nn.Module) -> Report:
        return Report(f"{self.epsilon:g} of each target is spread over all classes")

    @contextmanager
    def watch_step(self, module: nn.Module, batch: Any) -> Iterator[None]:
        with smooth_labels(self.epsilon, module) as smoothed:
            yield
            self._used = self._used or smoothed.used

    def extra_loss(self, output: Any, module: nn.Module, batch: Any) -> Tensor | None:
        """Nothing: the loss is another one already."""
        return None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._used and outputs is not None:
            raise ConfigurationError(
                f"LabelSmoothing: {type(pl_module).__name__}.training_step did not call F.cross_entropy, so no label "
                "was smoothed: call it by that name (not one that is imported by itself), or smooth your own loss"
            )
