"""Latent consistency distillation (LCM): a network that jumps from any point of the teacher's path to its end.

    loss = mean_i |f(x_t, t) - f'(x_s, s)|,    x_s: a step of the teacher with guidance;  f': an average of f

Formulas, times and sampler: :mod:`lit_efficient.losses.consistency`. The guidance of the teacher is fixed.

Saves: nearly all steps of sampling: 1 to 8 instead of 25 to 50, each without a second evaluation for guidance
Costs: in a step two evaluations of the teacher (one without guidance) and one of f' without gradients; a copy of the
    weights for the teacher (not with adapters), and one for f'
Source: Luo et al. (2023), https://arxiv.org/abs/2310.04378; LCM-LoRA: https://arxiv.org/abs/2311.05556.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConflictError, check_number, checks_types
from lit_efficient.losses import diffusion
from lit_efficient.losses.consistency import GRID, consistency_output, ddim_step, huber_loss
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.probes.modes import call_with
from lit_efficient.surgery import is_sharded, moved
from lit_efficient.tasks import latent_source
from lit_efficient.tasks.distilled_diffusion import DistilledDiffusion
from lit_efficient.tasks.latent_generator import Samples

_KEY = "consistency_target"


@checks_types
@dataclass(frozen=True)
class ConsistencyLoss:
    """Settings of the loss of consistency distillation.

    Args:
        average: Decay of the average of the weights that gives the targets, in [0, 1). With 0 the network itself gives
            them, as in LCM-LoRA, which needs no copy.
        huber: Constant c of the Huber loss ``sqrt(d^2 + c^2) - c``, at least 0. 0 is the squared error.
    """

    average: float = 0.95
    huber: float = 0.001

    def __post_init__(self) -> None:
        check_number("ConsistencyLoss", "average", self.average, least=0, below=1)
        check_number("ConsistencyLoss", "huber", self.huber, least=0)


class ConsistencyDistillation(DistilledDiffusion):
    """`LatentDiffusion` of consistency models. Data, metrics, sampling and checkpoints are the same.

    ``val/loss`` is the loss of the distillation. Checkpoints load as `LatentDiffusion` with the sampler ``lcm``, and
    exports for diffusers have the ``LCMScheduler``.

    Args:
        teacher: Checkpoint of `LatentDiffusion`, or a network of diffusers with trained weights, whose pipeline gives
            the settings as in `LatentDiffusion`.
        teacher_guidance: Guidance scale of the teacher, which is distilled into the network. 1 is no guidance.
        loss: Settings of the loss.
        sampling_steps: Steps of the sampler, 1 to 50.
        learning_rate: As in `LatentDiffusion`.
        samples: As in `LatentDiffusion`.
        override: As in `LatentDiffusion`.
    """

    reads = ("loss_weight",)

    def __init__(
        self,
        teacher: str | DiffusersModelConfig,
        teacher_guidance: float = 2.0,
        loss: ConsistencyLoss = ConsistencyLoss(),
        sampling_steps: int = 4,
        learning_rate: float = 1e-4,
        samples: Samples = Samples(),  # noqa: B008 (frozen)
        override: list[str] | None = None,
    ) -> None:
        super().__init__(teacher, teacher_guidance, sampling_steps, learning_rate, samples, override)
        self.loss = loss
        self.save_hyperparameters({"teacher_guidance": teacher_guidance, "loss": asdict(loss)})
        # Averaged weights that train, by their name in the network, in float32: bfloat16 would round small steps away.
        self._target: dict[str, Tensor] = {}
        self._averaged_at = 0  # optimizer step of the last update

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.network is not None
        trained = {name: p for name, p in self.network.named_parameters() if p.requires_grad}
        if self.loss.average and any(map(is_sharded, trained.values())):
            raise ConflictError(
                f"ConsistencyDistillation: loss.average={self.loss.average} needs whole weights, and the strategy "
                "shards them: set it to 0"
            )
        if self.loss.average and not self._target:
            for name, p in trained.items():
                wide = torch.promote_types(p.dtype, torch.float32)
                self._target[name] = p.detach().to(wide, copy=True)
        self._target = {name: moved(tensor, self.device) for name, tensor in self._target.items()}
        self._averaged_at = self.trainer.global_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self._follow()

    def _follow(self) -> None:
        """Update the average, unless it has the last step of the optimizer."""
        if self.trainer.global_step == self._averaged_at:  # a micro-batch
            return
        self._averaged_at = self.trainer.global_step
        assert self.network is not None
        weights = dict(self.network.named_parameters())
        for name, tensor in self._target.items():
            tensor.lerp_(weights[name].detach().to(tensor.dtype), 1.0 - self.loss.average)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.trainer.training:  # a callback may save between the step and `on_train_batch_end` of the module
            self._follow()
        checkpoint[_KEY] = {name: tensor.clone() for name, tensor in self._target.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.loss.average:
            self._target = dict(checkpoint.get(_KEY, {}))

    def _losses(
        self, batch: dict[str, Any], condition: Condition, process: DiffusionProcess, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        """Return the loss and its parts per sample. ``generator`` draws all random numbers (None: the global one)."""
        x0 = latent_source.draw_latents(batch, generator)
        drawn_on = x0.device if generator is None else generator.device
        index = moved(torch.randint(1, GRID + 1, (len(x0),), generator=generator, device=drawn_on), x0.device)
        t = index / GRID
        then = ((index - 1) / GRID).clamp(min=process.t_range[0])
        _, noise = diffusion.draw_noise(x0, process, generator)
        x = diffusion.add_noise(x0, noise, t, process)
        found = consistency_output(self(x, t, condition), x, t, process, self.prediction)
        with torch.no_grad():
            earlier = ddim_step(self.taught(x, t, condition), x, t, then, process, self.prediction)
            output = self._averaged(lambda: self(earlier, then, condition))
            target = consistency_output(output, earlier, then, process, self.prediction)
        sample_loss = huber_loss(found, target, self.loss.huber)
        if "loss_weight" in batch:
            sample_loss = sample_loss * latent_source.weights_of(batch, x0)
        losses = {"loss": sample_loss.mean(), "sample_loss": sample_loss}
        return losses | {"timesteps": t, "log_snr": process.log_snr(t)}

    def _averaged(self, function: Callable[[], Tensor]) -> Tensor:
        """Call ``function`` while the network has the averaged weights."""
        assert self.network is not None
        weights = dict(self.network.named_parameters())
        average = {name: tensor.to(weights[name].dtype) for name, tensor in self._target.items()}
        output: Tensor = call_with(self.network, average, function)
        return output
