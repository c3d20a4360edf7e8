"""Label smoothing: spread a share of each target over all classes, or over the whole vocabulary.

    loss = -(1 - e) log p(y) - e mean_v log p(v)

Saves: overconfidence in labels that may be wrong: calibration is better, and often accuracy or BLEU
Costs: one mean over the logits; the training loss cannot reach 0, and perplexity may be larger
Source: Szegedy et al. (2016), https://arxiv.org/abs/1512.00567; Vaswani et al. (2017), https://arxiv.org/abs/1706.03762
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lit_efficient.application.loss import LossHooks, refuse_log_probs
from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.losses.deferred_logits import ChunkedLoss
from lit_efficient.technique import Technique


class Smoothed:
    """Replacement of ``F.cross_entropy`` that smooths its targets.

    It is a function and not a ``TorchFunctionMode``, because ``torch.compile`` traces less code inside such a mode.
    """

    def __init__(self, epsilon: float, chunked: Sequence[Any]) -> None:
        self.epsilon = epsilon
        self.chunked = chunked
        self.own = F.cross_entropy
        self.calls = 0

    @property
    def used(self) -> bool:
        """Whether a loss has been smoothed so far."""
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
        """Return ``F.cross_entropy`` with smoothed targets; the arguments are the same.

        Torch's operator is called, and not the function: a compiled graph refers to ``F.cross_entropy`` by its name,
        which is this replacement.
        """
        if label_smoothing:
            raise _smoothed_twice("F.cross_entropy")
        self.calls += 1
        if size_average is not None or reduce is not None:  # the deprecated form of reduction
            if reduce is False:
                reduction = "none"
            elif size_average is False:
                reduction = "sum"
            else:
                reduction = "mean"
        mode = ("none", "mean", "sum").index(reduction)
        return torch.ops.aten.cross_entropy_loss(input, target, weight, mode, ignore_index, self.epsilon)


@contextmanager
def smooth_labels(epsilon: float, *networks: nn.Module) -> Iterator[Smoothed]:
    """Smooth the targets of every call of ``F.cross_entropy`` and ``nn.CrossEntropyLoss`` within this context.

    Args:
        epsilon: Share of the target that is spread, at least 0 and below 1.
        *networks: Networks that may compute the chunked cross-entropy, which is also smoothed.

    Yields:
        The replacement of ``F.cross_entropy``. Its attribute ``used`` is true once a loss has been smoothed.

    Raises:
        ConfigurationError: For an argument out of range, and for a loss that already has a ``label_smoothing``.
    """
    check_number("smooth_labels", "epsilon", epsilon, least=0, below=1)
    parts: list[Any] = [part for network in networks for part in network.modules()]
    chunked = [part for part in parts if isinstance(getattr(part, "chunked_loss", None), ChunkedLoss)]
    before = [(part, part.chunked_loss, part.chunked_loss_used) for part in chunked]
    if any(loss.label_smoothing for _, loss, _ in before):
        raise _smoothed_twice("ChunkedCrossEntropy")
    for part, loss, _ in before:
        part.chunked_loss = replace(loss, label_smoothing=epsilon)
        part.chunked_loss_used = False
    smoothed = Smoothed(epsilon, chunked)
    try:
        F.cross_entropy = smoothed.cross_entropy
        yield smoothed
    finally:
        F.cross_entropy = smoothed.own
        for part, loss, used in before:
            part.chunked_loss = loss
            part.chunked_loss_used = part.chunked_loss_used or used


def _smoothed_twice(where: str) -> ConfigurationError:
    return ConfigurationError(
        f"LabelSmoothing: {where} has a label_smoothing of its own, so that labels would be smoothed twice. Use only "
        "one of them"
    )


class LabelSmoothing(LossHooks, Technique):
    """Smooth the labels of every cross-entropy that ``training_step`` computes.

    The technique changes ``F.cross_entropy`` and ``nn.CrossEntropyLoss`` during the step: in the tasks of this package,
    in transformers' models and in your own code. It also changes losses that are computed in chunks. The logged
    training loss is the smoothed one, and validation losses are not smoothed. Ignored labels stay ignored.

    Args:
        epsilon: Share of the target that is spread over all classes, at least 0 and below 1.

    Raises:
        ConfigurationError: For an argument out of range. In the first step, if it computes no cross-entropy or one with
            a label_smoothing of its own.
    """

    phase = Phase.LOSS
    helps: ClassVar[dict[str, tuple[int, str]]] = {"quality": (0, "less confidence in labels that may be wrong")}

    def __init__(self, epsilon: float = 0.1) -> None:
        super().__init__()
        check_number("LabelSmoothing", "epsilon", epsilon, least=0, below=1)
        self.epsilon = epsilon
        self._used = False

    def check(self, trainer: Any, module: nn.Module) -> None:
        refuse_log_probs("LabelSmoothing", module)

    def describe(self, module: nn.Module) -> Report:
        return Report(f"{self.epsilon:g} of each target is spread over all classes")

    @contextmanager
    def watch_step(self, module: nn.Module, batch: object) -> Iterator[None]:
        with smooth_labels(self.epsilon, module) as smoothed:
            yield
            self._used = self._used or smoothed.used

    def extra_loss(self, output: object, module: nn.Module, batch: object) -> Tensor | None:
        """Return ``None``, because the loss itself has been smoothed."""
        return None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if not self._used and outputs is not None:
            raise ConfigurationError(
                f"LabelSmoothing: {type(pl_module).__name__}.training_step did not call F.cross_entropy, so that no "
                "label was smoothed. Call it as F.cross_entropy, not under a name imported from torch.nn.functional, "
                "or leave out LabelSmoothing"
            )
