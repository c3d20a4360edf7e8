"""Chunked cross-entropy: a language model's loss without its logits.

    for each chunk of c tokens: logits = W h_c [c, V] -> loss and gradients of h_c and W;    the logits are overwritten

Saves: the logits and their gradients, 8 N V bytes and more; what is left is the head's gradient and c rows of logits
Costs: nothing on a CPU, where smaller logits are faster; no logits in the output of a call with labels
Source: Wijmans et al. (2024), https://arxiv.org/abs/2411.09009; measured by benchmarks/cross_entropy.py

The formulas are in :mod:`lit_efficient.losses.chunked_cross_entropy`.
"""

from typing import Any, ClassVar

import torch
from torch import nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, check_choice, check_number
from lit_efficient.losses.chunked_cross_entropy import BACKENDS, TokenLoss, chunk_size_of, takes_liger
from lit_efficient.losses.deferred_logits import (
    ChunkedLoss,
    defer,
    output_head,
    takes_labels,
    vocabulary_of,
)
from lit_efficient.losses.liger_cross_entropy import installed, why_not
from lit_efficient.technique import Technique


class ChunkedCrossEntropy(Technique):
    """Compute the loss of a causal language model from its hidden states, a chunk of tokens at a time.

    Acts where the network is called with ``labels``, in training and validation alike: transformers'
    ``...ForCausalLM``, our ``GPT``, and any network with ``forward(..., labels=...)``, a ``head`` and
    ``loss_function = token_losses``. The output's ``logits`` are then ``None``. Calls without labels (generation) are
    untouched. The head may be tied, frozen, quantised or under adapters; scale and softcap of the logits are those that
    the network's own forward applies, and auxiliary losses of experts stay.

    Args:
        chunk_size: Tokens at a time, at least 1; ``None``: 256 on a CPU, and on a GPU as many as have 1 GiB of logits.
        backend: What makes losses and gradients of a chunk's logits: ``torch``; ``liger``, one kernel of liger-kernel,
            on a GPU; ``auto`` is Liger's where it is installed and gives the right numbers, which is tried once.
        z_loss: Weight of the squared log-partition function, at least 0 (1e-4 in PaLM); in training only.
        label_smoothing: Share of the target spread over the vocabulary, at least 0 and below 1; in training only.

    Raises:
        ConfigurationError: For an argument out of range, without such a network, in the first step if ``training_step``
            never called it with labels, and where a network does anything to its logits but scale and bound them.
    """

    phase = Phase.RECOMPUTE
    computes: ClassVar[str] = "same"
    helps: ClassVar[dict[str, tuple[int, str]]] = {"memory": (3, "the logits of a language model, for nothing")}

    def __init__(
        self, chunk_size: int | None = None, backend: str = "auto", z_loss: float = 0.0, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        check_number("ChunkedCrossEntropy", "chunk_size", chunk_size, least=1, whole=True, null=True)
        check_choice("ChunkedCrossEntropy", "backend", backend, BACKENDS)
        if backend == "liger" and not installed():
            raise ConfigurationError(
                "ChunkedCrossEntropy: backend='liger' needs the package liger-kernel; install it, or use auto or torch"
            )
        self._terms = TokenLoss(label_smoothing=label_smoothing, z_loss=z_loss)
        self.chunk_size = chunk_size
        self.backend = backend
        self.z_loss = z_loss
        self.label_smoothing = label_smoothing
        self._device = torch.device("cpu")  # without a trainer

    def check(self, trainer: Any, module: Any) -> None:
        self._device = trainer.strategy.root_device
        takes_liger(self.backend, self._device, torch.float32, self._terms)

    def transform(self, module: nn.Module) -> Report:
        found = [(name, part) for name, part in module.named_modules() if takes_labels(part)]
        if not found:
            raise ConfigurationError(
                f"ChunkedCrossEntropy: {type(module).__name__} holds no causal language model that takes labels (a "
                "transformers ...ForCausalLM, GPT, or a network with a head, forward(..., labels) and loss_function = "
                "token_losses); where you compute the loss yourself, call chunked_cross_entropy on the hidden states"
            )
        how = ChunkedLoss(self.chunk_size, self.backend, self.label_smoothing, self.z_loss)
        sizes = []
        for _, network in found:
            head: Any = output_head(network)
            sizes.append(vocabulary_of(head))
            defer(network, how)
        size = self.chunk_size or chunk_size_of(self._device, max(sizes), 2**31)
        chunk = size * max(sizes) * 4 / 2**20
        reason = self.backend if self.backend == "torch" else why_not(self._device, torch.float32, self._terms)
        maker = "torch" if reason else "liger"
        if reason and self.backend == "auto" and self._device.type != "cpu":
            maker += f" ({reason})"
        return Report(
            f"{size} tokens x {max(sizes):,} logits at a time ({chunk:.1f} MiB), {maker}",
            modules=tuple(name for name, _ in found),
            details={"chunk_size": size, "vocabulary": max(sizes)},
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        networks = [part for part in pl_module.modules() if hasattr(part, "chunked_loss_used")]
        if not any(network.chunked_loss_used for network in networks):
            raise ConfigurationError(
                f"ChunkedCrossEntropy: {type(pl_module).__name__}.training_step never called "
                f"{type(networks[0]).__name__} with labels, so its logits were whole: call network(..., labels=labels) "
                "and use the loss that it returns"
            )
