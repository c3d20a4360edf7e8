"""Distribution matching distillation (DMD2): samples whose distribution is that of the teacher's samples.

    d loss / d x0 = (fake(x_t) - real(x_t)) / mean |x0 - real(x_t)|,   x0 = G(noise),   x_t: x0 with noise
    fake: learns to denoise G's samples, in each step;   real: the teacher, with guidance;   G: in every 5th step

real and fake predict the clean data. For several steps of sampling, G gets what it makes of noise in the steps before
(backward simulation). Data only gives conditions and sizes. The paper's discriminator, which needs data, is left out.

Saves: nearly all steps of sampling: 1 to 4 instead of 25 to 50, each without a second evaluation for guidance
Costs: a second network that trains, a copy of the weights for the teacher (not with adapters); in a step one evaluation
    of G and of fake with gradients, and in every 5th two of the teacher and one of fake without gradients
Source: Yin et al. (2024), https://arxiv.org/abs/2405.14867.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses import diffusion
from lit_efficient.losses.consistency import (
    consistency_output,
    consistency_times,
    distribution_matching_gradient,
    distribution_matching_loss,
)
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.networks.condition import Condition
from lit_efficient.surgery import moved
from lit_efficient.tasks import latent_source
from lit_efficient.tasks.distilled_diffusion import DistilledDiffusion
from lit_efficient.tasks.latent_generator import Samples

_FAKE = "fake."
_ASIDE = "training_only"  # key in checkpoints: tensors by their name in the module
_MATCHED = (0.02, 0.98)  # times at which both distributions are compared


class DistributionMatching(DistilledDiffusion):
    """`LatentDiffusion` that is trained on its own samples. Data, metrics, sampling and checkpoints are the same.

    ``fake`` is a second network that trains in each step, and the network trains in one of ``fake_steps`` steps. Both
    are in one optimizer, which leaves out parameters without gradients. With several processes, the strategy must
    allow this (``ddp_find_unused_parameters_true``). ``train/matching`` is the mean absolute gradient of the samples,
    and ``train/fake`` the loss of the second network. ``val/loss`` is the loss of diffusion: judge samples instead.

    Args:
        teacher: Checkpoint of `LatentDiffusion`, or a network of diffusers with trained weights, whose pipeline gives
            the settings as in `LatentDiffusion`.
        teacher_guidance: Guidance scale of the teacher, which is distilled into the network. 1 is no guidance.
        fake_steps: Steps of the second network for each of the network, at least 1.
        sampling_steps: Steps of the sampler, 1 to 50, for which the network is trained.
        learning_rate: As in `LatentDiffusion`, for both networks.
        samples: As in `LatentDiffusion`.
        override: As in `LatentDiffusion`.
    """

    reads = ()
    training_only = ("fake",)

    def __init__(
        self,
        teacher: str | DiffusersModelConfig,
        teacher_guidance: float = 2.0,
        fake_steps: int = 5,
        sampling_steps: int = 1,
        learning_rate: float = 1e-4,
        samples: Samples = Samples(),  # noqa: B008 (frozen)
        override: list[str] | None = None,
    ) -> None:
        super().__init__(teacher, teacher_guidance, sampling_steps, learning_rate, samples, override)
        check_number("DistributionMatching", "fake_steps", fake_steps, least=1, whole=True)
        self.fake_steps = fake_steps
        self.save_hyperparameters({"teacher_guidance": teacher_guidance, "fake_steps": fake_steps})
        self.fake: torch.nn.Module | None = None

    def configure_model(self) -> None:
        super().configure_model()
        if self.fake is None:
            self.fake = copy.deepcopy(self.network)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Return the loss of both networks, and per sample the loss, time and log-SNR of the second network."""
        assert self.fake is not None
        count = latent_source.batch_size(batch)
        condition = self.conditioning.of_batch(batch, self.device)
        size = latent_source.latent_size(batch, self.codec)
        if size is None:
            raise ConfigurationError("DistributionMatching: batches must have latents or images, which give the size")
        trains = self.trainer.global_step % self.fake_steps == 0
        x0 = self.generated(condition, (count, self.shape.channels, *size), trains)
        clean = x0.detach()

        t = self._times(count, *self.process.t_range)
        eps = torch.randn_like(clean)
        output = self.prediction_of(self.fake, diffusion.add_noise(clean, eps, t, self.process), t, condition)
        target = diffusion.target(clean, eps, t, self.process, self.prediction)
        sample_loss = (output - target).square().flatten(1).mean(dim=1)
        self.log("train/fake", sample_loss.mean(), batch_size=count)
        if trains:
            gradient = self.matching_gradient(clean, condition)
            self.log("train/matching", gradient.abs().mean(), batch_size=count)
            sample_loss = sample_loss + distribution_matching_loss(x0, gradient)
        loss = sample_loss.mean()
        self.log("train/loss", loss, prog_bar=logs_in_bar(loss), batch_size=count)
        return {"loss": loss, "sample_loss": sample_loss, "timesteps": t, "log_snr": self.process.log_snr(t)}

    def generated(self, condition: Condition, shape: tuple[int, int, int, int], trains: bool) -> Tensor:
        """Return samples of the network after a random number of its steps, [B, c, h, w], with gradients in the last.

        Args:
            condition: Conditions of the samples.
            shape: Shape of the samples.
            trains: Whether the last step has gradients.
        """
        times = moved(consistency_times(self.sampling_steps), self.device)  # without a wait
        last = int(torch.randint(len(times), (1,), device="cpu"))
        trainer = trainer_of(self)
        if trainer is not None and trainer.world_size > 1:  # sharded weights are gathered by all processes together
            last = trainer.strategy.broadcast(last)
        x0 = torch.zeros(shape, device=self.device)
        for i in range(last + 1):
            t = times[i].expand(len(x0))
            noise = torch.randn_like(x0)
            x = noise if i == 0 else diffusion.add_noise(x0, noise, t, self.process)
            with torch.set_grad_enabled(trains and i == last):
                x0 = consistency_output(self(x, t, condition), x, t, self.process, self.prediction)
        return x0

    @torch.no_grad()
    def matching_gradient(self, x0: Tensor, condition: Condition) -> Tensor:
        """Return the gradient of the loss with respect to samples, [B, c, h, w]."""
        assert self.fake is not None
        t = self._times(len(x0), *_MATCHED)
        x = diffusion.add_noise(x0, torch.randn_like(x0), t, self.process)
        found = []
        for output in (self.taught(x, t, condition), self.prediction_of(self.fake, x, t, condition)):
            clean, _ = diffusion.to_x0_eps(output, x, t, self.process, self.prediction)
            found.append(clean)
        real, fake = found
        return distribution_matching_gradient(x0, real, fake)

    def _times(self, count: int, least: float, most: float) -> Tensor:
        drawn = torch.rand(count, device=self.device) * (most - least) + least
        return self.process.on_grid(drawn)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the second network apart from the weights, so that the network loads without it."""
        super().on_save_checkpoint(checkpoint)
        weights = checkpoint.get("state_dict", {})
        aside = checkpoint.setdefault("lit_efficient", {}).setdefault(_ASIDE, {})
        for name in [name for name in weights if name.startswith(_FAKE)]:
            aside[name] = weights.pop(name)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        aside = checkpoint.get("lit_efficient", {}).get(_ASIDE, {})
        if self.fake is not None and "state_dict" in checkpoint:
            checkpoint["state_dict"] |= {name: one for name, one in aside.items() if name.startswith(_FAKE)}
