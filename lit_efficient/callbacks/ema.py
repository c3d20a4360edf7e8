"""Exponential moving average of the weights: evaluate with smoother weights than those that train.

    average <- average + (1 - decay_n) (weights - average),    decay_n = min(decay, 1 - (1 + n)^-power)

Saves: learning-rate decay, and training steps to the same quality; diffusion models are hardly usable without it
Costs: 4 bytes per parameter, during validation another copy of 16-bit weights, and one pass over memory per update
Source: Polyak and Juditsky (1992); warm-ups of ema-pytorch and diffusers; switch EMA: https://arxiv.org/abs/2402.09240
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report, format_bytes
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, check_number, refusal
from lit_efficient.internals.torch_shards import is_sharded
from lit_efficient.mechanisms.averages.shadow import ShadowWeights, outside_autograd
from lit_efficient.mechanisms.averages.weights import decay_at, placed_like, precise, tracked_weights, update_, whole
from lit_efficient.traits import Trait


class EMA(ShadowWeights):
    """Keep a moving average of the weights and use it in validation, test, prediction and weights-only checkpoints.

    The module holds its raw weights, also after the fit: ``with ema.averaged(module):`` puts the average into it.
    Checkpoints for resuming hold both. Averages are float32, or wider if the weights are. Buffers are not averaged.
    Steps are optimizer steps, whatever the number of micro-batches.

    Args:
        decay: Fraction of the average that an update keeps, in [0, 1).
        warmup: Rise of the decay to ``decay``: ``inverse_gamma``, ``tf``, or null for no rise.
        power: Exponent of ``inverse_gamma``, above 0: 2/3 for a million steps and more, 3/4 for fewer.
        every_n_steps: Number of optimizer steps between two updates, at least 1.
        start_step: Number of optimizer steps before the first update, at least 0. Until then evaluation uses the raw
            weights.
        trainable_only: Leave out frozen parameters. Parameters that are unfrozen later are averaged: from the start if
            ``GradualUnfreezing`` or ``ReplaceHead`` unfreezes them, else from the end of the epoch in which they are
            unfrozen. Quantised parameters are never averaged.
        device: Device of the average, for example ``cpu``; null for the device of each parameter.
        switch_every: Number of optimizer steps after which the average is copied into the trained weights each time
            (switch EMA); null for never.

    Raises:
        ConfigurationError: For an argument out of range, if no parameter trains, and if a restored average has other
            parameters.
        ConflictError: For ``device`` with sharded parameters.
    """

    counts_steps = True
    label = "ema"
    phase = Phase.AVERAGE
    traits = frozenset({Trait.FOLLOWS_PARAMETERS, Trait.SWAPS_WEIGHTS})
    helps = {"quality": (1, "evaluates with averaged weights")}

    def __init__(
        self,
        decay: float = 0.9999,
        warmup: str | None = "inverse_gamma",
        power: float = 2 / 3,
        every_n_steps: int = 1,
        start_step: int = 0,
        trainable_only: bool = True,
        device: str | None = None,
        switch_every: int | None = None,
    ) -> None:
        super().__init__()
        check_number("EMA", "decay", decay, least=0, below=1)
        check_choice("EMA", "warmup", warmup, ("inverse_gamma", "tf"), null=True)
        check_number("EMA", "power", power, above=0)
        check_number("EMA", "every_n_steps", every_n_steps, least=1, whole=True)
        check_number("EMA", "start_step", start_step, least=0, whole=True)
        check_number("EMA", "switch_every", switch_every, least=1, whole=True, null=True)
        try:
            torch.device(device or "cpu")
        except RuntimeError as error:
            raise refusal("EMA", "device", "a device that torch knows (cpu, cuda:0)", device) from error
        self.decay = decay
        self.warmup = warmup
        self.power = power
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.trainable_only = trainable_only
        self.device = device
        self.switch_every = switch_every
        self._average: dict[str, Tensor] = {}
        self._updates = 0
        self._parameters: dict[str, nn.Parameter] = {}  # averaged parameters during a fit
        self._step = 0

    def average(self, module: nn.Module) -> Mapping[str, Tensor] | None:
        return self._average if self._updates else None

    def shares(self, steps: int) -> list[float] | None:
        found: list[float] = []
        for since in range(steps - self.start_step):
            share = 0.0
            if (self.start_step + since) % self.every_n_steps == 0:
                decay = self._decay(since, first=not any(found))
                found = [earlier * decay for earlier in found]
                share = 1 - decay
            found.append(share)
        if self.switch_every or not any(found):
            return None
        return [0.0] * self.start_step + found

    def _decay(self, since: int, first: bool) -> float:
        """Return the decay of the update ``since`` steps after the start. The first update copies the weights."""
        if first:
            return 0.0
        return decay_at(since, self.decay, self.warmup, self.power)

    def forget(self) -> None:
        self._average = {}
        self._updates = 0

    def describe(self, module: nn.Module) -> Report:
        tracked = self._tracked(module).values()
        elements = sum(p.numel() for p in tracked)
        size = sum(p.numel() * precise(p.dtype).itemsize for p in tracked)
        summary = f"{len(tracked)} tensors, {elements:,} parameters ({format_bytes(size)}), decay {self.decay:g}"
        if self.warmup:
            summary += f" after {self.warmup} warm-up"
        if self.switch_every:
            summary += f", copied into the weights every {self.switch_every} steps"
        return Report(summary, parameters=elements, details={"average_bytes": size})

    def _tracked(self, module: nn.Module) -> dict[str, nn.Parameter]:
        return tracked_weights(module, "EMA", self.trainable_only)

    def _placed(self, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return a copy of ``tensor`` as the average of ``parameter``, sharded in the same way."""
        return placed_like(tensor, parameter, precise(parameter.dtype), self.device)

    @outside_autograd
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Allocate the average, or put a restored one where the parameters are, after all weights are restored."""
        self._parameters = self._tracked(pl_module)
        sharded = next((n for n, p in self._parameters.items() if is_sharded(p)), None)
        if sharded is not None and self.device is not None:
            raise ConflictError(
                f"EMA: device={self.device!r} cannot be combined with sharded parameters (such as {sharded!r}): leave "
                "device out, the average is sharded like the parameters"
            )
        source: Mapping[str, Tensor] = self._parameters
        if self._updates:
            source = self._average
            # Parameters that were unfrozen before the checkpoint may still be frozen in this run.
            named = dict(pl_module.named_parameters())
            self._parameters |= {n: named[n] for n in source if n in named}
            different = source.keys() ^ self._parameters.keys()
            if different:
                raise ConfigurationError(
                    f"EMA: the restored average and the trained parameters differ in {len(different)} names (such as "
                    f"{min(different)!r}): train the same parameters as before, or start from the weights only"
                )
        self._average = {n: self._placed(source[n], p) for n, p in self._parameters.items()}
        self._step = trainer.global_step

    @outside_autograd
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        before = self._step
        step = trainer.global_step
        self._step = step
        since = step - 1 - self.start_step
        # Several optimizers count several steps at a time, so a multiple may be passed without being reached.
        if since >= 0 and (step - 1) // self.every_n_steps > (before - 1) // self.every_n_steps:
            decay = self._decay(since, first=not self._updates)
            update_(list(self._average.values()), list(self._parameters.values()), decay)
            self._updates += 1
        if self.switch_every and self._updates and step // self.switch_every > before // self.switch_every:
            update_(list(self._parameters.values()), list(self._average.values()), 0.0)

    @outside_autograd
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        for name, p in self._tracked(pl_module).items():
            if name not in self._parameters:
                self._parameters[name] = p
                self._average[name] = self._placed(p, p)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the references to the parameters: a strategy may replace them."""
        self._parameters = {}

    def state_dict(self) -> dict[str, object]:
        if self._updates:
            average = {name: whole(tensor) for name, tensor in self._average.items()}
        else:
            average = {}
        return {"average": average, "updates": self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average = dict(state_dict["average"])
        self._updates = int(state_dict["updates"])
