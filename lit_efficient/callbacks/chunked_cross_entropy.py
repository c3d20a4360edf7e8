"""Chunked cross-entropy: compute the loss of a language model without all of its logits.

    for each chunk of c tokens: logits = W h_c [c, V] -> loss and gradients of h_c and W;    the logits are overwritten

Saves: the logits and their gradients, at least 8 N V bytes; the head's gradient and c rows of logits remain
Costs: nothing on a CPU, where smaller logits are faster; a call with labels returns no logits
Source: Wijmans et al. (2024), https://arxiv.org/abs/2411.09009; measured by benchmarks/cross_entropy.py

The formulas are in :mod:`lit_efficient.losses.chunked_cross_entropy`.
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lit_efficient.application.loss import refuse_log_probs
from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import ConfigurationError, check_choice, check_number
from lit_efficient.losses.chunked_cross_entropy import BACKENDS, TokenLoss, chunk_size_of, takes_liger
from lit_efficient.losses.deferred_logits import (
    ChunkedLoss,
    defer,
    output_head,
    takes_labels,
    vocabulary_of,
    width_of,
)
from lit_efficient.losses.liger_cross_entropy import installed, why_not
from lit_efficient.technique import Technique


class ChunkedCrossEntropy(Technique):
    """Compute the loss of a causal language model from its hidden states, one chunk of tokens at a time.

    Acts where the network is called with ``labels``, in training and validation: transformers' ``...ForCausalLM``, our
    ``GPT``, and any network with ``forward(..., labels=...)``, a ``head`` and ``loss_function = token_losses``. The
    output's ``logits`` are then ``None``. Calls without labels (generation) do not change. The head may be tied,
    frozen, quantised or adapted. Scale and softcap of the logits, and auxiliary losses of experts, are those of the
    network's own forward.

    Args:
        chunk_size: Number of tokens in a chunk, at least 1. ``None``: 64 to 256 on a CPU, depending on the head,
            and on a GPU the number of tokens with 1 GiB of logits, or with 256 MiB if the head is frozen.
        backend: Implementation of the loss of a chunk: ``torch``; ``liger``, a kernel of liger-kernel for GPUs; or
            ``auto``, which is ``liger`` if it is installed and a trial gives the right numbers.
        z_loss: Weight of the squared log-partition function, at least 0 (1e-4 in PaLM). In training only.
        label_smoothing: Fraction of the target that is spread over the vocabulary, at least 0 and below 1. In training
            only.

    Raises:
        ConfigurationError: For an argument out of range; if there is no such network; in the first step if
            ``training_step`` did not call it with labels; and if a network changes its logits by more than scaling and
            bounding them.
    """

    phase = Phase.RECOMPUTE
    computes = "same"
    helps = {"memory": (3, "the logits of a language model, at little cost")}

    def __init__(
        self, chunk_size: int | None = None, backend: str = "auto", z_loss: float = 0.0, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        check_number("ChunkedCrossEntropy", "chunk_size", chunk_size, least=1, whole=True, null=True)
        check_choice("ChunkedCrossEntropy", "backend", backend, BACKENDS)
        check_number("ChunkedCrossEntropy", "z_loss", z_loss, least=0)
        check_number("ChunkedCrossEntropy", "label_smoothing", label_smoothing, least=0, below=1)
        if backend == "liger" and not installed():
            raise ConfigurationError(
                "ChunkedCrossEntropy: backend='liger' needs the package liger-kernel; install it, or use auto or torch"
            )
        self._terms = TokenLoss(label_smoothing=label_smoothing, z_loss=z_loss)
        self.chunk_size = chunk_size
        self.backend = backend
        self.z_loss = z_loss
        self.label_smoothing = label_smoothing
        self._device = torch.device("cpu")  # used without a trainer

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        for name in ("label_smoothing", "z_loss"):
            if getattr(self, name):
                refuse_log_probs(f"ChunkedCrossEntropy: {name}={getattr(self, name)}", module)
        self._device = trainer.strategy.root_device
        takes_liger(self.backend, self._device, torch.float32, self._terms)

    def transform(self, module: nn.Module) -> Report:
        found = [(name, part) for name, part in module.named_modules() if takes_labels(part)]
        if not found:
            raise ConfigurationError(
                f"ChunkedCrossEntropy: {type(module).__name__} has no causal language model that takes labels (a "
                "transformers ...ForCausalLM, GPT, or a network with a head, forward(..., labels) and loss_function = "
                "token_losses). If you compute the loss yourself, call chunked_cross_entropy on the hidden states"
            )
        settings = ChunkedLoss(self.chunk_size, self.backend, self.label_smoothing, self.z_loss)
        vocabulary = 0
        width: int | None = None
        trains = False
        for _, network in found:
            head: Any = output_head(network)
            vocabulary = max(vocabulary, vocabulary_of(head))
            width = width_of(head)
            trains |= any(parameter.requires_grad for parameter in head.parameters())
            defer(network, settings)
        size = self.chunk_size or chunk_size_of(self._device, vocabulary, 2**31, trains=trains, width=width)
        reason = self.backend
        if self.backend != "torch":
            reason = why_not(self._device, torch.float32, self._terms)
        kernel = "torch" if reason else "liger"
        # A CPU never has Liger's kernel, which needs no explanation.
        if reason and self.backend == "auto" and self._device.type != "cpu":
            kernel += f" ({reason})"
        return Report(
            f"{size} tokens x {vocabulary:,} logits at a time ({format_bytes(size * vocabulary * 4)}), {kernel}",
            modules=tuple(name for name, _ in found),
            details={"chunk_size": size, "vocabulary": vocabulary},
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        networks = [part for part in pl_module.modules() if hasattr(part, "chunked_loss_used")]
        if not any(network.chunked_loss_used for network in networks):
            raise ConfigurationError(
                f"ChunkedCrossEntropy: {type(pl_module).__name__}.training_step did not call "
                f"{type(networks[0]).__name__} with labels, so all of its logits were computed: call "
                "network(..., labels=labels) and use the loss that it returns"
            )
