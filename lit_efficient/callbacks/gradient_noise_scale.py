"""The gradient noise scale: how large a batch still pays, from gradients that a step computes anyway.

    B_crit ~ tr(S) / |G|^2          S: covariance of one sample's gradient, G: the mean gradient
    |G|^2 = (n |g_big|^2 - mean_i |g_i|^2) / (n - 1)        g_i: of n micro-batches of b_i samples, g_big their mean
    tr(S) = (mean_i |g_i|^2 - |g_big|^2) / (mean_i(1 / b_i) * (1 - 1 / n))

Saves: a search for the batch size: far below B_crit twice the batch takes half the steps, far above it just as many
Costs: a norm of each micro-batch's gradients in one optimizer step of ``every_n_steps``, and there a sum over processes
Source: McCandlish et al. (2018), https://arxiv.org/abs/1812.06162, appendix A.1; rules for the rate: Goyal et al.
    (2017), https://arxiv.org/abs/1706.02677; Malladi et al. (2022), https://arxiv.org/abs/2205.10287

Both are unbiased, and are averaged over steps before they are divided. Of Adam it says the order of magnitude: there
the noise counts after each coordinate is divided by its size.
"""

import math
from lightning.pytorch import LightningModule, Trainer
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from lit_efficient.application.gradients import gradients_of
from lit_efficient.declaration import Report
from lit_efficient.distributed.gradient_norm import gradient_norm
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, check_number
from lit_efficient.internals.lightning_loops import logged_step
from lit_efficient.internals.lightning_strategies import traits_of
from lit_efficient.internals.torch_optimizers import unscales
from lit_efficient.mechanisms.metering import samples_of, short_number
from lit_efficient.technique import Technique
from lit_efficient.traits import Trait, has_trait


def noise_and_signal(small: Tensor, big: Tensor, count: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Unbiased estimates of tr(S) and |G|^2; their quotient, after averaging both, is the noise scale in samples.

    Args:
        small: Mean of the squared norms of the micro-batches' gradients, [].
        big: Squared norm of the mean of these gradients, [].
        count: Number of micro-batches, 2 or more, [].
        inverse: Mean of 1 / samples of the micro-batches, [].
    """
    return (small - big) / (inverse * (1 - 1 / count)), (count * big - small) / (count - 1)


def scaled_rate(rate: float, batch: float, new_batch: float, rule: Literal["linear", "sqrt"] = "linear") -> float:
    """The learning rate for another batch size: in proportion (SGD), or to the square root (Adam and its kin).

    Args:
        rate: That is right for ``batch``.
        batch: Samples of an optimizer step, above 0.
        new_batch: The same of the other one, above 0; above the noise scale no rule holds.
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
    """Estimate the critical batch size while training, and say at the end which batch and rates would be right.

    Compares the gradients of micro-batches, of all processes, with their mean: it needs accumulation or several
    processes (DDP). Logged as ``noise_scale`` (samples) whenever the trainer logs; ``noise_scale()`` gives it any time.
    Training is not changed.

    Args:
        every_n_steps: It looks at one optimizer step in so many, 1 or more.
        decay: Of the moving averages, for each step that it looks at, at least 0 and below 1.

    Raises:
        ConfigurationError: For an argument out of range, and where all steps have one micro-batch of one process.
        ConflictError: With manual optimization, and where no process has whole gradients (FSDP, DeepSpeed).
    """

    traits = frozenset({Trait.LEAVES_TRACES, Trait.NEEDS_ALL_GRADIENTS})
    reasons = {
        Trait.NEEDS_WHOLE_ROWS: "gradients of one batch are shared by processes, and it compares those of several",
    }
    computes = "same"
    conflicts = {
        "TokenWeightedAccumulation": "it weighs micro-batches by their tokens, and the estimate takes them as equal",
    }
    helps = {"speed": (0, "says how large a batch still pays")}

    def __init__(self, every_n_steps: int = 10, decay: float = 0.99) -> None:
        super().__init__()
        check_number("GradientNoiseScale", "every_n_steps", every_n_steps, least=1, whole=True)
        check_number("GradientNoiseScale", "decay", decay, least=0, below=1)
        self.every_n_steps, self.decay = every_n_steps, decay
        self._sums: Tensor | None = None  # decayed sums of tr(S) and |G|^2, and of their weights: [3], on the device
        self._squares: list[Tensor] = []  # of each parameter's gradients of the micro-batches under way
        self._inverse: list[float] = []  # 1 / samples of these
        self._samples = 0  # of the last step that was looked at, of all processes
        self._hooks: list[Any] = []
        self._listens = self._begins = False
        self._batch = 0  # samples of the micro-batch under way
        self._window: dict[str, Any] | None = None  # squares and inverses of a step that a checkpoint interrupted

    def check(self, trainer: Trainer, module: Any) -> None:
        if not module.automatic_optimization:
            raise ConflictError(
                f"GradientNoiseScale: {type(module).__name__} optimizes manually, so that nobody knows its micro-"
                "batches: call noise_and_signal on the norms of your gradients"
            )
        traits = traits_of(trainer.strategy)
        if traits.shards:
            raise ConflictError(
                f"GradientNoiseScale: under {traits.name} no process has whole gradients: measure with strategy='ddp'"
            )
        changes = any(has_trait(callback, Trait.CHANGES_ACCUMULATION) for callback in trainer.callbacks)
        if trainer.world_size == 1 and trainer.accumulate_grad_batches == 1 and not changes:
            raise ConfigurationError(
                "GradientNoiseScale compares the gradients of micro-batches with their mean, but a step has one: set "
                "accumulate_grad_batches to 2 or more (and halve the batch), or use several processes"
            )

    def describe(self, module: nn.Module) -> Report:
        return Report(f"measured in one step of {self.every_n_steps}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._begins = batch_idx % trainer.accumulate_grad_batches == 0
        self._batch = samples_of(batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Listen to the micro-batch, if it begins a window to look at or goes on with one."""
        window, self._window = self._window, None
        may_listen = not self._hooks and (self._begins or window) and trainer.global_step % self.every_n_steps == 0
        if may_listen:
            stepped = [p for o in trainer.optimizers for group in o.param_groups for p in group["params"]]
            if window and not self._begins and any(p.grad is not None for p in stepped):
                self._squares, self._inverse = list(window["squares"].to(loss.device)), list(window["inverse"])
            if self._begins or self._squares:
                self._hooks = [p.register_hook(self._note) for p in stepped if p.requires_grad]
        self._listens = bool(self._hooks)
        if self._listens:
            self._inverse.append(1 / max(1, self._batch))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listens = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._hooks:
            return
        squares, inverse = self._squares, self._inverse
        self._stop()
        norm = gradient_norm(gradients_of(optimizer).values())
        if norm is None or not squares:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        share = trainer.accumulate_grad_batches
        own = torch.stack(squares).sum() * (share / scale) ** 2
        sums = torch.stack([own, own.new_tensor(len(inverse)), own.new_tensor(math.fsum(inverse))])
        if trainer.world_size > 1:
            sums = trainer.strategy.reduce(sums, reduce_op="sum")
        total, count, inverses = sums.unbind()
        unscaled = norm.to(own) / (scale if unscales(optimizer) else 1.0)
        big = (unscaled * (share / len(inverse))).square()  # the last window of an epoch may be a short one
        if len(inverse) * trainer.world_size > 1:
            found = torch.stack([*noise_and_signal(total / count, big, count, inverses / count), torch.ones_like(big)])
            before = torch.zeros_like(found) if self._sums is None else self._sums.to(found)
            # A step that is not finite, or whose squares are not, says nothing.
            self._sums = torch.where(found.isfinite().all(), before * self.decay + found, before)
        self._samples = round(sum(1 / one for one in inverse)) * trainer.world_size

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int) -> None:
        every = trainer.log_every_n_steps
        if trainer.loggers and every and self._sums is not None and (logged_step(trainer) + 1) % every == 0:
            for logger in trainer.loggers:
                logger.log_metrics({"noise_scale": self.noise_scale()}, step=logged_step(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()
        if self._sums is not None and trainer.optimizers:
            rank_zero_info(self.advice([float(group["lr"]) for group in trainer.optimizers[0].param_groups]))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()
        super().on_exception(trainer, pl_module, exception)

    def noise_scale(self) -> float:
        """The critical batch so far, in samples: infinite where noise hides the gradient, NaN before any estimate."""
        noise, signal, weight = (0.0,) * 3 if self._sums is None else self._sums.tolist()
        return max(noise, 0.0) / signal if signal > 0 else math.inf if weight else math.nan

    def advice(self, rates: list[float]) -> str:
        """What batch and which rates (those of now, by group) would be right, in a sentence."""
        scale, now = self.noise_scale(), self._samples
        text = f"GradientNoiseScale: {short_number(scale)} samples, with {now} a step"
        if not math.isfinite(scale) or not scale:
            return f"{text}: this says nothing of a batch yet: look at more steps, or take a higher decay"
        new = max(1, round(scale))
        shown = [
            f"{', '.join(f'{scaled_rate(rate, now, new, rule):.3g}' for rate in dict.fromkeys(rates))} ({why})"  # type: ignore[arg-type]
            for rule, why in (("linear", "linear rule, SGD"), ("sqrt", "square-root rule, Adam"))
        ]
        change = "larger batches still save steps" if new > now else "smaller batches would save samples"
        now_shown = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(rates))
        return f"{text}: {change}. With {new} a step, instead of the rate {now_shown} take {' or '.join(shown)}"

    def state_dict(self) -> dict[str, Any]:
        sums = None if self._sums is None else self._sums.detach().cpu().clone()
        state: dict[str, Any] = {"sums": sums, "samples": self._samples}
        if self._squares and not distributed.is_initialized():  # of other processes' micro-batches nobody knows here
            state["window"] = {"squares": torch.stack(self._squares).cpu(), "inverse": list(self._inverse)}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sums, self._samples = state_dict["sums"], state_dict["samples"]
        self._window = state_dict.get("window")

    def _note(self, gradient: Tensor) -> None:
        """Before a parameter's gradient is added to that of earlier micro-batches, or averaged over processes."""
        if self._listens:
            values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach().float()
            self._squares.append(torch.linalg.vector_norm(values).square())

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._squares, self._inverse, self._listens = [], [], [], False
