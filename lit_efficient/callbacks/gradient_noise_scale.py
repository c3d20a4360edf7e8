"""Gradient noise scale: estimate the largest useful batch size from gradients that a step computes anyway.

    B_crit ~ tr(S) / |G|^2          S: covariance of one sample's gradient, G: the mean gradient
    g_big = sum_i p_i g_i           g_i: mean gradient of micro-batch i, of b_i samples;  p_i: its share in the step
    s = mean_i(1 / b_i);    t = sum_i p_i^2 / b_i           (p_i = 1 / n and t = s / n for n equal micro-batches)
    |G|^2 = (s |g_big|^2 - t mean_i |g_i|^2) / (s - t);    tr(S) = (mean_i |g_i|^2 - |g_big|^2) / (s - t)

Saves: a search for the batch size: far below B_crit a doubled batch needs half the steps, far above it just as many
Costs: a norm of each micro-batch's gradients in one of ``every_n_steps`` optimizer steps, and a sum over processes
Source: McCandlish et al. (2018), https://arxiv.org/abs/1812.06162, appendix A.1; rules for the rate: Goyal et al.
    (2017), https://arxiv.org/abs/1706.02677; Malladi et al. (2022), https://arxiv.org/abs/2205.10287

Both estimates are unbiased, for equal micro-batches and for those that `TokenWeightedAccumulation` weighs. They are
averaged over steps before they are divided. For Adam the result is right only in its order of magnitude, because Adam
divides each coordinate of the gradient by its size.
"""

import math
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_efficient.application.gradients import gradients_of
from lit_efficient.application.loss import LossHooks
from lit_efficient.declaration import Report, parts_of, techniques_of
from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, check_number, diagnostic
from lit_efficient.internals.lightning_loops import logged_step
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_optimizers import unscales
from lit_efficient.mechanisms.metering import samples_of, short_number
from lit_efficient.mechanisms.moving import tensors_in
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait, has_trait


def noise_and_signal(small: Tensor, big: Tensor, inverse: Tensor, joint: Tensor) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of tr(S) and |G|^2. Their means, divided, are the noise scale in samples.

    Args:
        small: Mean of the squared norms of the micro-batches' gradients, [].
        big: Squared norm of the weighted mean of these gradients, [].
        inverse: Mean of 1 / samples of the micro-batches, [].
        joint: Sum of (share in the weighted mean)^2 / samples, [], below ``inverse``.
    """
    return (small - big) / (inverse - joint), (big * inverse - small * joint) / (inverse - joint)


def scaled_rate(rate: float, batch: float, new_batch: float, rule: Literal["linear", "sqrt"] = "linear") -> float:
    """Return the learning rate for another batch size: proportional (SGD), or by the square root (Adam).

    Args:
        rate: Learning rate that is right for ``batch``.
        batch: Number of samples in an optimizer step, above 0.
        new_batch: The new number, above 0. No rule holds above the noise scale.
        rule: ``linear`` or ``sqrt``.

    Raises:
        ConfigurationError: For an argument out of range.

    Example:
        >>> scaled_rate(0.1, 256, 1024), scaled_rate(0.1, 256, 1024, "sqrt")
        (0.4, 0.2)
    """
    check_choice("scaled_rate", "rule", rule, ("linear", "sqrt"))
    check_number("scaled_rate", "batch", batch, above=0)
    check_number("scaled_rate", "new_batch", new_batch, above=0)
    ratio = new_batch / batch
    return rate * (ratio if rule == "linear" else math.sqrt(ratio))


class GradientNoiseScale(Technique):
    """Estimate the critical batch size during training, and log at the end which batch and rates to use.

    Compares the gradients of the micro-batches of all processes with their mean, so it needs accumulation or several
    processes (DDP). Language models weigh micro-batches by their tokens, which the estimate takes into account. The
    estimate in samples is logged as ``noise_scale`` whenever the trainer logs, and returned by
    ``noise_scale()`` at any time. Training does not change.

    Args:
        every_n_steps: Number of optimizer steps of which one is measured, at least 1.
        decay: Decay of the moving averages per measured step, at least 0 and below 1.

    Raises:
        ConfigurationError: For an argument out of range, if each step has one micro-batch on one process, and for
            batches whose samples cannot be counted.
        ConflictError: With manual optimization, and if no process has whole gradients (FSDP, DeepSpeed).
    """

    traits = frozenset({Trait.LEAVES_TRACES, Trait.NEEDS_ALL_GRADIENTS})
    reasons = {
        Trait.NEEDS_WHOLE_ROWS: "it compares gradients of several batches, but processes share those of one batch",
    }
    computes = "same"
    helps = {"speed": (0, "estimates the largest useful batch")}

    def __init__(self, every_n_steps: int = 10, decay: float = 0.99) -> None:
        super().__init__()
        check_number("GradientNoiseScale", "every_n_steps", every_n_steps, least=1, whole=True)
        check_number("GradientNoiseScale", "decay", decay, least=0, below=1)
        self.every_n_steps = every_n_steps
        self.decay = decay
        self._sums: Tensor | None = None  # decayed sums of tr(S) and |G|^2, and of their weights: [3], on the device
        self._squares: list[Tensor] = []  # squared norms of each parameter's gradient in each micro-batch of the step
        self._inverse: list[float] = []  # 1 / samples of these micro-batches
        self._weights: list[float] = []  # weights of these micro-batches in the step, such as their numbers of tokens
        self._factor = 1.0  # factor by which another technique multiplies the loss of the current micro-batch
        self._rates: list[float] = []  # highest rate of each group in the steps of the run
        self._samples = 0  # samples of the last measured step, on all processes
        self._hooks: list[RemovableHandle] = []  # hooks on the parameters during a measured step
        self._listens = False  # True during the backward pass of a measured step
        self._begins = False  # True in the first micro-batch of a step
        self._batch = 0  # samples of the current micro-batch
        self._window: dict[str, Any] | None = None  # squares and inverses of a step that a checkpoint interrupted

    def check(self, trainer: Trainer, module: LightningModule) -> None:
        if not module.automatic_optimization:
            raise ConflictError(
                f"GradientNoiseScale: {type(module).__name__} uses manual optimization, so that its micro-batches are "
                "unknown: call noise_and_signal on the norms of your gradients"
            )
        traits = traits_of(trainer.strategy)
        if traits.shards:
            raise ConflictError(
                f"GradientNoiseScale: under {traits.name} no process has whole gradients: measure with strategy='ddp'"
            )
        changes = any(has_trait(part, Trait.CHANGES_ACCUMULATION) for part in parts_of(trainer))
        if trainer.world_size == 1 and trainer.accumulate_grad_batches == 1 and not changes:
            raise ConfigurationError(
                "GradientNoiseScale compares the gradients of micro-batches with their mean, but each step has one: "
                "set accumulate_grad_batches to 2 or more (and halve the batch), or use several processes"
            )

    def describe(self, module: nn.Module) -> Report:
        return Report(f"measured in one step of {self.every_n_steps}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._begins = batch_idx % trainer.accumulate_grad_batches == 0
        self._batch = samples_of(batch)
        if not self._batch and next(tensors_in(batch), None) is None:
            raise ConfigurationError(
                f"GradientNoiseScale needs the number of samples of a batch, and a {type(batch).__name__} holds no "
                "tensors in dictionaries, tuples, lists or dataclasses: leave GradientNoiseScale out, or give such "
                "batches"
            )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Add hooks to the parameters if a step that is to be measured begins, or continues after a resume."""
        window = self._window
        self._window = None
        if not self._hooks and trainer.global_step % self.every_n_steps == 0:
            stepped = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
            continues = bool(window) and not self._begins and any(p.grad is not None for p in stepped)
            if window and continues:
                self._squares = list(window["squares"].to(loss.device))
                self._inverse = list(window["inverse"])
                self._weights = list(window["weights"])
            if self._begins or continues:
                self._hooks = [p.register_hook(self._note) for p in stepped if p.requires_grad]
        weight, self._factor = _weight_of(trainer)
        self._listens = bool(self._hooks) and weight > 0  # a micro-batch without tokens has no gradient
        if self._listens:
            self._inverse.append(1 / max(1, self._batch))
            self._weights.append(weight)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listens = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._note_rates(optimizer)
        if self._hooks:
            with diagnostic("GradientNoiseScale", "the gradients of a step"):
                self._measure(trainer, optimizer)

    def _measure(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Add the estimates of a step to the decayed sums."""
        squares = self._squares
        inverse = self._inverse
        weights = self._weights
        self._stop()
        norm = gradient_norm(gradients_of(optimizer).values())
        if norm is None or not squares:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        accumulated = trainer.accumulate_grad_batches
        # The loss of a micro-batch is divided by the number of accumulated ones, and multiplied by the scaler.
        own = torch.stack(squares).sum() * (accumulated / scale) ** 2
        joint = math.fsum(weight**2 * one for weight, one in zip(weights, inverse))
        sums = torch.stack([own, *own.new_tensor([len(inverse), math.fsum(inverse), math.fsum(weights), joint])])
        if trainer.world_size > 1:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        total, count, inverses, weight, joints = sums.unbind()
        mean = norm.to(own) / (scale if unscales(optimizer) else 1.0)
        if not _is_weighted(trainer):
            mean = mean * (accumulated / len(inverse))  # the last step of an epoch may have fewer
        if len(inverse) * trainer.world_size > 1:
            estimates = noise_and_signal(total / count, mean.square(), inverses / count, joints / weight.square())
            found = torch.stack([*estimates, torch.ones_like(mean)])
            if self._sums is None:
                before = torch.zeros_like(found)
            else:
                before = self._sums.to(found)
            # A step with gradients or squares that are not finite is ignored, without a wait for the device.
            self._sums = torch.where(found.isfinite().all(), before * self.decay + found, before)
        self._samples = round(sum(1 / one for one in inverse)) * trainer.world_size

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        step = logged_step(trainer)
        every = trainer.log_every_n_steps
        if every and self._sums is not None and (step + 1) % every == 0:
            for logger in trainer.loggers:
                logger.log_metrics({"noise_scale": self.noise_scale()}, step=step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()
        if self._sums is not None and trainer.optimizers:
            rank_zero_info(self.advice(self._rates))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()
        super().on_exception(trainer, pl_module, exception)

    def noise_scale(self) -> float:
        """Return the estimate in samples: infinite if noise hides the gradient, NaN before the first measurement."""
        if self._sums is None:
            return math.nan
        noise, signal, weight = self._sums.tolist()
        if signal > 0:
            return float(max(noise, 0.0) / signal)
        return math.inf if weight else math.nan

    def advice(self, rates: list[float]) -> str:
        """Return a sentence that names the batch and the rates to use, from the groups' highest rates."""
        scale = self.noise_scale()
        text = f"GradientNoiseScale: {short_number(scale)} samples, with {self._samples} per step"
        if not math.isfinite(scale) or not scale:
            return f"{text}: this gives no estimate yet: measure more steps, or set a higher decay"
        new = max(1, round(scale))
        if new > self._samples:
            change = "larger batches still save steps"
        else:
            change = "smaller batches would save samples"
        distinct = [float(rate) for rate in dict.fromkeys(rates)]
        linear = [scaled_rate(rate, self._samples, new) for rate in distinct]
        root = [scaled_rate(rate, self._samples, new, "sqrt") for rate in distinct]
        return (
            f"{text}: {change}. With {new} per step, replace the rate {_shown(distinct)} by {_shown(linear)} (linear "
            f"rule, SGD) or {_shown(root)} (square-root rule, Adam)"
        )

    def state_dict(self) -> dict[str, object]:
        sums = None if self._sums is None else self._sums.detach().cpu().clone()
        state: dict[str, object] = {"sums": sums, "samples": self._samples, "rates": self._rates}
        # Only this process's micro-batches are known here, so with several processes the step is measured again.
        if self._squares and not distributed.is_initialized():
            squares = torch.stack(self._squares).cpu()
            state["window"] = {"squares": squares, "inverse": list(self._inverse), "weights": list(self._weights)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sums = state_dict["sums"]
        self._samples = state_dict["samples"]
        self._rates = list(state_dict["rates"])
        self._window = state_dict.get("window")

    def _note(self, gradient: Tensor) -> None:
        """Record a parameter's gradient before it is added to earlier ones, or averaged over processes."""
        if self._listens:
            if gradient.is_sparse:
                values = gradient.coalesce().values()
            else:
                values = gradient.detach()
            wide = values if values.is_complex() else values.float()
            self._squares.append((torch.linalg.vector_norm(wide).float() / self._factor).square())

    def _note_rates(self, optimizer: Optimizer) -> None:
        """Keep the highest rate of each group. A schedule may end at 0, which says nothing about the rate to use."""
        rates = [group["lr"] for group in optimizer.param_groups]
        if any(isinstance(rate, Tensor) and rate.device.type != "cpu" for rate in rates) and not self._hooks:
            return  # reading waits for the device, which happens in measured steps only
        now = [float(rate) for rate in rates]
        if len(now) == len(self._rates):
            self._rates = [*map(max, now, self._rates)]
        else:
            self._rates = now

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._squares = []
        self._inverse = []
        self._weights = []
        self._listens = False


def _weight_of(trainer: Trainer) -> tuple[float, float]:
    """Return the weight of the current micro-batch in its step, and the factor that its loss is multiplied by."""
    for technique in techniques_of(trainer):
        if isinstance(technique, LossHooks) and technique.batch_weight is not None:
            return float(technique.batch_weight), technique.batch_factor
    return 1.0, 1.0


def _is_weighted(trainer: Trainer) -> bool:
    return any(isinstance(one, LossHooks) and one.batch_weight is not None for one in techniques_of(trainer))


def _shown(rates: list[float]) -> str:
    return ", ".join(f"{rate:.3g}" for rate in rates)
