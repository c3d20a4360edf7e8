"""Selective backpropagation: train on samples of each batch with a high loss, without a backward pass of the others.

    chosen: ceil(keep * B) samples, drawn with weights P(loss_past <= loss_i)^beta;    loss = their mean

Saves: time: a step costs (1 + 3 keep) / 3 of a plain step if a backward pass costs two forward passes; the paper
    reports up to 3.5 times less time to the same error
Costs: a forward pass of each whole batch without gradients for the losses; wrong labels are chosen more often
Source: Jiang et al. (2019), https://arxiv.org/abs/1910.00762
"""

from inspect import signature
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.application.loss import own_training_step
from lit_efficient.declaration import Phase, Report
from lit_efficient.distributed.ranks import gather_objects
from lit_efficient.distributed.seeds import mix_seed
from lit_efficient.errors import ConfigurationError, ConflictError, check_number
from lit_efficient.internals.lightning_strategies import data_rank, traits_of
from lit_efficient.internals.wraps import does_nothing, wrapped
from lit_efficient.losses.selection import choose, selection_odds, share_of
from lit_efficient.mechanisms.moving import take_rows, tensors_in
from lit_efficient.mechanisms.ramps import BatchChanges
from lit_efficient.mechanisms.rewind import other_randomness, random_states
from lit_efficient.models.probes.modes import evaluating
from lit_efficient.protocol import sample_losses
from lit_efficient.traits import Trait


class SelectiveBackprop(BatchChanges):
    """Run each batch once without gradients for its losses, and train on samples chosen by their losses.

    The losses are the ``sample_loss`` [B] that ``training_step`` returns. They are computed in evaluation mode with the
    random state of the following step. This pass logs nothing, but metrics that the step updates itself count twice.
    Tokens and accumulation only count the chosen samples. While memory is measured, batches stay whole.

    Args:
        keep: Share of the samples to train on, above 0 and at most 1. The number is rounded up.
        beta: Exponent of the weights, at least 0. Larger values prefer high losses more; 0 draws uniformly.
        history: Number of past losses that each loss is compared with, at least 1.
        seed: Seed of the draws, which also depend on the number of the batch and the rank.

    Raises:
        ConfigurationError: For an argument out of range, or if ``training_step`` takes an iterator. In the first step
            if ``training_step`` returns no sample losses, or if the batch has no tensor with one row per sample.
        ConflictError: With manual optimization, and with FSDP1.
    """

    phase = Phase.LOSS
    traits = frozenset({Trait.DRAWS_WORK, Trait.TAKES_LESS_THAN_MEASURED})
    reasons: ClassVar[dict[Trait, str]] = {
        Trait.NEEDS_WHOLE_BATCH: "samples are chosen from a whole batch",
    }
    helps: ClassVar[dict[str, tuple[int, str]]] = {"speed": (0, "no backward pass for samples with a low loss")}

    def __init__(self, keep: float = 0.5, beta: float = 1.0, history: int = 1024, seed: int = 0) -> None:
        super().__init__()
        check_number("SelectiveBackprop", "keep", keep, above=0, most=1)
        check_number("SelectiveBackprop", "beta", beta, least=0)
        check_number("SelectiveBackprop", "history", history, least=1, whole=True)
        self.keep = keep
        self.beta = beta
        self.history = history
        self.seed = seed
        self._past = torch.empty(0, dtype=torch.float32, device="cpu")
        self._trainer: Any = None  # the trainer between ``setup`` and ``teardown``

    def check(self, trainer: Trainer, module: Any) -> None:
        if not module.automatic_optimization:
            raise ConflictError(
                f"SelectiveBackprop: training_step first runs for its losses, but {type(module).__name__} uses manual "
                "optimization and would make a step there. Use selection_odds and choose inside training_step"
            )
        traits = traits_of(trainer.strategy)
        if traits.flattens and not traits.is_zero:
            raise ConflictError(
                f"SelectiveBackprop: the module cannot be called directly with {traits.name}. Use strategy='ddp' "
                "or ModelParallelStrategy"
            )
        if "dataloader_iter" in signature(module.training_step).parameters:
            raise ConfigurationError("SelectiveBackprop: training_step takes an iterator. Let it take a batch")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._trainer = trainer
        if stage == "fit":  # of an earlier run; a checkpoint restores its own later
            self._past = torch.empty(0, dtype=torch.float32, device="cpu")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = None
        super().teardown(trainer, pl_module, stage)

    def describe(self, module: nn.Module) -> Report:
        return Report(f"{self.keep:.0%} of each batch, chosen by loss with the exponent {self.beta:g}")

    def change(self, batch: object, step: int) -> Any:
        """Return the chosen samples of a batch, in their order."""
        if self.keep == 1:
            return batch
        losses = self._losses(batch)
        everyone = gather_objects(losses.cpu())  # batches of processes may differ in size
        self._past = torch.cat((self._past, *everyone))[-self.history :]
        size = len(losses)
        if size == 0:  # a step that is skipped or not finite happens with the whole batch
            return batch
        trainer = self._trainer
        seed = mix_seed(self.seed, trainer.fit_loop.total_batch_idx, data_rank(trainer))
        generator = torch.Generator("cpu").manual_seed(seed)
        odds = selection_odds(losses, self._past, self.beta)
        rows = choose(odds, share_of(self.keep, size), generator)
        chosen = take_rows(batch, rows, size)
        if len(rows) < size and not _differs(batch, chosen):
            raise ConfigurationError(
                f"SelectiveBackprop: training_step returned {size} sample losses, but the batch has no tensor of "
                f"{size} rows. Return one loss per row of the batch"
            )
        return chosen

    def _losses(self, batch: object) -> Tensor:
        """Return the losses [B] of the samples, or an empty tensor if the step is skipped or a loss is not finite.

        The pass changes no random state and logs nothing.
        """
        trainer = self._trainer
        module = trainer.lightning_module
        owner = type(module).__name__
        # The batch arrives here before Lightning moves it.
        on_device = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        step = own_training_step(module)
        args = (on_device, trainer.fit_loop.epoch_loop.batch_idx + 1)[: len(signature(step).parameters)]
        without_logs = wrapped(module, does_nothing, "log", "log_dict")
        precision = trainer.precision_plugin.train_step_context()
        with other_randomness(random_states()), torch.no_grad(), evaluating(module), without_logs, precision:
            output = step(*args)
        if output is None:
            return torch.empty(0)
        losses = sample_losses(output, f"SelectiveBackprop got no sample losses from {owner}.training_step").float()
        if not losses.isfinite().all():
            return losses[:0]
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return the past losses."""
        if not len(self._past):
            return {}
        return {"past": self._past}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._past = state_dict["past"]


def _differs(batch: object, chosen: object) -> bool:
    return any(a.shape != b.shape for a, b in zip(tensors_in(batch), tensors_in(chosen), strict=True))
