"""Exponential moving average of the weights: evaluate with a smoother network than the one that trains.

    average <- average + (1 - decay_n) (weights - average),    decay_n = min(decay, 1 - (1 + n)^-power)

Saves: learning-rate decay and training steps to the same quality; diffusion models are hardly usable without it
Costs: 4 bytes a parameter, in validation 16-bit weights once more, and one pass over memory each update
Source: Polyak and Juditsky (1992); warm-ups of ema-pytorch and diffusers; switch EMA: https://arxiv.org/abs/2402.09240
"""

from lightning.pytorch import LightningModule, Trainer
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_efficient.declaration import Phase, Report
from lit_efficient.errors import ConfigurationError, ConflictError, check_choice, check_number, refusal
from lit_efficient.internals.torch_shards import is_sharded
from lit_efficient.mechanisms.averages.shadow import ShadowWeights, outside_autograd
from lit_efficient.mechanisms.averages.weights import averageable, decay_at, placed_like, precise, update_, whole
from lit_efficient.traits import Trait


class EMA(ShadowWeights):
    """Keep a moving average of the weights and use it in validation, test, prediction and weights-only checkpoints.

    The module itself always holds its raw weights, after the fit as well: ``with ema.averaged(module):`` puts the
    average in. Checkpoints for resuming hold both. Averages are float32 whatever the network's format; buffers are the
    module's own. Steps are those of the optimizers, however many micro-batches one has.

    Args:
        decay: Share of the average that an update keeps, in [0, 1).
        warmup: How the decay rises to that: ``inverse_gamma``, ``tf``, or null for at once.
        power: Exponent of ``inverse_gamma``, above 0: 2/3 for a million steps and more, 3/4 for fewer.
        every_n_steps: Update after each n-th optimizer step, at least 1.
        start_step: Optimizer steps before the first update, at least 0; until then evaluation uses the raw weights.
        trainable_only: Leave out frozen parameters. Those that are thawed later are averaged, too: from the start if
            ``GradualUnfreezing`` or ``ReplaceHead`` holds them back, else from the end of the epoch of their thaw.
            Quantised ones are never averaged.
        device: Where the average lives, as in ``cpu``; null for the parameters' own device.
        switch_every: Copy the average into the trained weights after every so many optimizer steps (switch EMA); null
            for never.

    Raises:
        ConfigurationError: For an argument out of range, and if there is nothing to average.
    """

    label = "ema"
    phase = Phase.AVERAGE
    traits = frozenset({Trait.SWAPS_WEIGHTS})
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
            raise refusal("EMA", "device", "one that torch knows (cpu, cuda:0)", device) from error
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
        self._parameters: dict[str, nn.Parameter] = {}  # of a fit that is under way
        self._step = 0

    def average(self, module: Any) -> Mapping[str, Tensor] | None:
        return self._average if self._updates else None

    def shares(self, steps: int) -> list[float] | None:
        found: list[float] = []
        for since in range(steps - self.start_step):
            decay = decay_at(since, self.decay, self.warmup, self.power) if any(found) else 0.0
            due = (self.start_step + since) % self.every_n_steps == 0
            found = [share * decay for share in found] + [1 - decay] if due else [*found, 0.0]
        return [0.0] * self.start_step + found if any(found) and not self.switch_every else None

    def forget(self) -> None:
        self._average, self._updates = {}, 0

    def describe(self, module: Any) -> Report:
        tracked = self._tracked(module)
        elements = sum(p.numel() for p in tracked.values())
        size = sum(p.numel() * precise(p.dtype).itemsize for p in tracked.values())
        warmup = f" after {self.warmup} warm-up" if self.warmup else ""
        switch = f", copied into the weights every {self.switch_every} steps" if self.switch_every else ""
        return Report(
            f"{len(tracked)} tensors, {elements:,} parameters ({size / 2**20:.1f} MiB), decay {self.decay:g}"
            f"{warmup}{switch}",
            parameters=elements,
            details={"average_bytes": size},
        )

    def _tracked(self, module: Any) -> dict[str, nn.Parameter]:
        tracked = averageable(module, self.trainable_only)
        if not tracked:
            raise ConfigurationError(
                f"EMA: none of the {sum(1 for _ in module.parameters())} parameters of {type(module).__name__} trains: "
                "there is nothing to average"
            )
        return tracked

    @outside_autograd
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Allocate the average, or put a restored one where the parameters are: all weights are restored by now."""
        self._parameters = self._tracked(pl_module)
        sharded = next((n for n, p in self._parameters.items() if is_sharded(p)), None)
        if sharded is not None and self.device is not None:
            raise ConflictError(
                f"EMA: device={self.device!r} cannot be combined with sharded parameters ({sharded!r} is one): leave "
                "it out, the average is sharded as they are"
            )
        if self._updates:  # what was thawed before the checkpoint may be thawed again only later
            named = dict(pl_module.named_parameters())
            self._parameters |= {n: named[n] for n in self._average if n in named}
        if self._updates and (different := self._average.keys() ^ self._parameters.keys()):
            raise ConfigurationError(
                f"EMA: the restored average and the trained parameters differ in {len(different)} names "
                f"({min(different)!r} is one): train the same parameters as before, or start from weights alone"
            )
        source = self._average if self._updates else self._parameters
        self._average = {
            n: placed_like(source[n], p, precise(p.dtype), self.device) for n, p in self._parameters.items()
        }
        self._step = trainer.global_step

    @outside_autograd
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int) -> None:
        before, step = self._step, trainer.global_step
        self._step = step
        since = step - 1 - self.start_step
        # Several optimizers count several steps at once: has a multiple been passed?
        if since >= 0 and (step - 1) // self.every_n_steps > (before - 1) // self.every_n_steps:
            decay = decay_at(since, self.decay, self.warmup, self.power) if self._updates else 0.0
            update_(list(self._average.values()), list(self._parameters.values()), decay)
            self._updates += 1
        if self.switch_every and self._updates and step // self.switch_every > before // self.switch_every:
            update_(list(self._parameters.values()), list(self._average.values()), 0.0)

    @outside_autograd
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, p in self._tracked(pl_module).items():
            if name not in self._parameters:
                self._parameters[name] = p
                self._average[name] = placed_like(p, p, precise(p.dtype), self.device)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the parameters: a strategy may replace them."""
        self._parameters = {}

    def state_dict(self) -> dict[str, Any]:
        average = {name: whole(tensor) for name, tensor in self._average.items()} if self._updates else {}
        return {"average": average, "updates": self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average, self._updates = dict(state_dict["average"]), int(state_dict["updates"])
