"""Contrastive flow matching: predict each sample's flow, and push it away from that of another sample of the batch.

    loss <- loss - weight * mean_i |v(x_i, t_i) - (eps_j - x0_j)|^2,    j != i drawn from the batch;  weight 0.05

Saves: training steps; the paper reports up to 9 times fewer to the same FID for SiT on ImageNet, and with REPA up to 5
    times fewer sampling steps
Costs: two elementwise operations on the batch per step
Source: Stoica et al. (2025), https://arxiv.org/abs/2506.05350
"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.application.loss import LossHooks
from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, ConflictError, check_number
from lit_efficient.internals.lightning_strategies import data_rank
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait


def contrastive_flow_loss(predicted: Tensor, target: Tensor, others: Tensor) -> Tensor:
    """Return minus the mean squared difference per element to the targets of other samples: a scalar without weight.

    Args:
        predicted: Flows that the network predicts, [B, ...].
        target: Flows of the samples, noise minus data, [B, ...].
        others: For each row the index of another row, [B].

    Source: Stoica et al. (2025), https://arxiv.org/abs/2506.05350.
    """
    wide = torch.promote_types(predicted.dtype, torch.float32)
    return -(predicted.to(wide) - target.detach().to(wide)[others]).square().mean()


def draw_others(batch: int, generator: torch.Generator | None = None, device: torch.device | None = None) -> Tensor:
    """Return for each of ``batch`` rows, at least 2, the index of another row, uniformly distributed: [B]."""
    steps = torch.randint(1, batch, (batch,), generator=generator, device=device)
    return (torch.arange(batch, device=device) + steps) % batch


class ContrastiveFlowMatching(LossHooks, Technique):
    """Push the predicted flow of each sample away from the flow of another sample (contrastive flow matching).

    ``training_step`` returns ``{"loss", "predicted", "target"}`` with flows [B, ...], as ``LatentDiffusion`` does. The
    term is added to the loss, and weights of samples do not apply to it. The other sample is any other sample of the
    batch, also one of the same class, as in the authors' code. The draw depends on ``seed``, the index of the batch
    and the rank. A batch with one sample, as at the end of the data, has no term. The value of the term without its
    weight is logged as ``train/contrastive_flow``.

    Args:
        weight: Weight of the term, lambda in the paper, at least 0 and below 1; from 1 on the loss has no minimum.
        seed: Seed of the draws.

    Raises:
        ConfigurationError: For an argument out of range, in the first step for modules that do not return the flows,
            and after an epoch in which each batch had one sample.
        ConflictError: If the module predicts something else than the flow, whose target depends on the time.
    """

    phase = Phase.LOSS
    reasons = {
        Trait.NEEDS_WHOLE_BATCH: "each sample is contrasted with another sample of its batch",
    }
    helps = {"speed": (12, "fewer steps of flow matching, at no cost per step")}

    def __init__(self, weight: float = 0.05, seed: int = 0) -> None:
        super().__init__()
        check_number("ContrastiveFlowMatching", "weight", weight, least=0, below=1)
        self.weight = weight
        self.seed = seed
        self._sizes: set[int] = set()  # sizes of the epoch's batches

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        prediction = getattr(module, "prediction", None)
        if isinstance(prediction, str) and prediction != "flow":
            raise ConflictError(
                f"ContrastiveFlowMatching: {type(module).__name__} predicts {prediction!r}, but only the flow has a "
                "target that does not depend on the time: use prediction='flow', or leave ContrastiveFlowMatching out"
            )

    def describe(self, module: nn.Module) -> Report:
        return Report(f"away from another sample's flow, weight {self.weight:g}")

    def flows(self, output: object, module: nn.Module) -> tuple[Tensor, Tensor]:
        """Return predicted flows and their targets, [B, ...] each. Override it for outputs of another form."""
        found = output if isinstance(output, dict) else {}
        predicted = found.get("predicted")
        target = found.get("target")
        if predicted is None or target is None or predicted.shape != target.shape:
            raise ConfigurationError(
                f'ContrastiveFlowMatching: {type(module).__name__}.training_step must return "predicted" and "target", '
                f"flows of one shape [B, ...], with the loss; it returned {sorted(found) or type(output).__name__}"
            )
        return predicted, target

    def extra_loss(self, output: object, module: Any, batch: object) -> Tensor | None:
        """Return the weighted term, or ``None`` for a batch with one sample."""
        predicted, target = self.flows(output, module)
        self._sizes.add(len(predicted))
        if len(predicted) < 2:
            return None
        seed = mix_seed(self.seed, module.trainer.fit_loop.total_batch_idx, data_rank(module.trainer))
        generator = torch.Generator(predicted.device).manual_seed(seed)
        term = contrastive_flow_loss(predicted, target, draw_others(len(predicted), generator, predicted.device))
        module.log("train/contrastive_flow", term.detach(), batch_size=1)
        return self.weight * term

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        sizes = self._sizes
        self._sizes = set()
        if sizes == {1}:
            raise ConfigurationError(
                "ContrastiveFlowMatching: each batch of the epoch had 1 sample per process: use batches with at least 2"
            )
