"""Train a latent diffusion model that samples in one to four steps, from data alone: MeanFlow and shortcut models.

    loss = mean_i w_i |u(x_t, t, h) - target|^2;    sample: x_(t - h) = x_t - h u(x_t, t, h)

The network gets the length h of an interval as a second time and predicts the average velocity over it. Objectives and
sampler: :mod:`lit_efficient.losses.few_steps`. Guidance is a part of the target, so that a step of sampling evaluates
the network once.

Saves: nearly all steps of sampling, without a teacher; a step with guidance is one evaluation of the network, not two
Costs: about two evaluations without gradients on a quarter of the batch; guidance is one or two more on the batch
Source: Geng et al. (2025), https://arxiv.org/abs/2505.13447; Frans et al. (2024), https://arxiv.org/abs/2410.12557.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lit_efficient.errors import check_choice
from lit_efficient.files.records import rebuild
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.losses import diffusion
from lit_efficient.losses.diffusion_sampling import Sampler, guide, sampling_times
from lit_efficient.losses.few_steps import (
    AverageVelocity,
    MeanFlow,
    Shortcut,
    average_velocity_sample,
    error_weight,
    interval_rows,
    mean_flow_target,
    mean_flow_times,
    shortcut_target,
    shortcut_times,
)
from lit_efficient.losses.noise_process import DiffusionProcess
from lit_efficient.losses.timesteps import Distribution, TimestepSampling, sample_timesteps
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.networks.dit import DiTConfig
from lit_efficient.tasks import latent_source
from lit_efficient.tasks.latent_diffusion import LatentDiffusion
from lit_efficient.tasks.latent_generator import Samples, check

Objective = Literal["mean_flow", "shortcut"]

_NAMED: dict[Objective, MeanFlow | Shortcut] = {"mean_flow": MeanFlow(), "shortcut": Shortcut()}
# Distributions of the authors' code.
_TIMES = {MeanFlow: TimestepSampling("logit_normal", location=-0.4), Shortcut: TimestepSampling("uniform")}


class FewStepDiffusion(LatentDiffusion):
    """`LatentDiffusion` of average velocities. Data, metrics, checkpoints and prediction are the same.

    ``val/loss`` is the loss of flow matching, for intervals of the shortest length and without guidance. Samples in
    validation take ``sampling_steps`` steps. ``train/error`` is the squared error without the weights of MeanFlow.

    Args:
        backbone: Shape of the diffusion transformer. Its ``variant.interval`` is set.
        objective: mean_flow, shortcut, or one of them with settings (`MeanFlow`, `Shortcut`).
        timestep_sampling: As in `LatentDiffusion`. null takes that of the authors' code: logit_normal with the location
            -0.4 for MeanFlow, and uniform for shortcut models.
        label_dropout: Probability that the conditions of a training sample are hidden, in [0, 1).
        guidance_scale: Strength of classifier-free guidance, which is trained into the network. 1 is no guidance.
        sampling_steps: Steps of the sampler. For shortcut models a power of 2, and less than ``finest`` with guidance.
        learning_rate: As in `LatentDiffusion`.
        samples: As in `LatentDiffusion`.
    """

    loads_as = "FewStepDiffusion"
    reads = ("loss_weight",)

    def __init__(
        self,
        backbone: DiTConfig = DiTConfig(),  # noqa: B008 (frozen)
        objective: Objective | MeanFlow | Shortcut = "mean_flow",
        timestep_sampling: Distribution | TimestepSampling | None = None,
        label_dropout: float = 0.1,
        guidance_scale: float = 1.0,
        sampling_steps: int = 1,
        learning_rate: float = 3e-3,
        samples: Samples = Samples(),  # noqa: B008 (frozen)
    ) -> None:
        objective = _as_objective(objective)
        known = rebuild(DiTConfig, backbone) if isinstance(backbone, dict) else backbone
        features = known.variant.class_token.features
        check("backbone.variant.class_token.features", features, "0 for FewStepDiffusion", features == 0)
        known = replace(known, variant=replace(known.variant, interval=True))
        if timestep_sampling is None:
            timestep_sampling = _TIMES[type(objective)]
        super().__init__(
            known,
            "flow",
            "flow",
            timestep_sampling,
            label_dropout,
            guidance_scale,
            sampling_steps,
            learning_rate=learning_rate,
            samples=samples,
        )
        self.objective = objective
        self._trained_guidance = guidance_scale  # `sample` may set another guidance_scale
        self._check_steps(sampling_steps)
        self.save_hyperparameters({"objective": asdict(objective)})

    @property
    def shortest(self) -> float:
        """Length of the intervals whose target is the velocity itself."""
        if isinstance(self.objective, Shortcut):
            return 1.0 / self.objective.finest
        return 0.0

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Return the loss, and per sample the loss, time, log-SNR, prediction and target for techniques."""
        count = latent_source.batch_size(batch)
        condition = self.conditioning.of_batch(batch, self.device)
        hidden = torch.zeros(count, dtype=torch.bool, device=self.device)
        shown = condition
        if self.shape.conditions and self.label_dropout:
            hidden = torch.rand(count, device=self.device) < self.label_dropout
            if isinstance(self.objective, Shortcut):  # as in the authors' code
                hidden[interval_rows(count, self.objective.bootstrap_share)] = False
            shown = condition.dropped(hidden, self.conditioning.null(self.device))
        x0 = latent_source.draw_latents(latent_source.with_posterior(batch, self.codec), None)
        t, length = self._times(x0)
        eps = torch.randn_like(x0)
        x = diffusion.add_noise(x0, eps, t, self.process)
        target = self._target(x, t, length, eps - x0, shown, condition, hidden)
        output = self(x, t, replace(shown, interval=length))
        error = (output - target).square().flatten(1)
        sample_loss = error.mean(dim=1)
        self.log("train/error", sample_loss.mean(), batch_size=count)
        if isinstance(self.objective, MeanFlow) and self.objective.power:
            total = error.sum(dim=1)
            sample_loss = total * error_weight(total, self.objective.power, self.objective.offset)
        if "loss_weight" in batch:
            sample_loss = sample_loss * latent_source.weights_of(batch, x0)
        loss = sample_loss.mean()
        self.log("train/loss", loss, prog_bar=logs_in_bar(loss), batch_size=count)
        found = {"loss": loss, "sample_loss": sample_loss, "timesteps": t, "log_snr": self.process.log_snr(t)}
        return found | {"predicted": output, "target": target}

    def _times(self, x0: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.tokens((x0.shape[2], x0.shape[3]))
        draw = partial(sample_timesteps, len(x0), self.timestep_sampling, None, x0.device, self.process, tokens)
        if isinstance(self.objective, MeanFlow):
            return mean_flow_times(draw(), draw(), self.objective.interval_share)
        return shortcut_times(draw(), self.objective.bootstrap_share, self.objective.finest)

    @torch.no_grad()
    def _target(
        self, x: Tensor, t: Tensor, length: Tensor, v: Tensor, shown: Condition, condition: Condition, hidden: Tensor
    ) -> Tensor:
        """Return the target of the average velocity, [B, c, h, w].

        Args:
            x: Noisy latents, [B, c, h, w].
            t: Times, [B].
            length: Lengths of the intervals, [B].
            v: Velocities, [B, c, h, w].
            shown: Conditions that the network gets.
            condition: Conditions before the dropout.
            hidden: True for samples whose conditions are hidden, [B] bool.
        """
        if isinstance(self.objective, MeanFlow):
            v = torch.where(diffusion.per_sample(hidden, v), v, self._guided_velocity(x, t, v, condition))
            rows = interval_rows(len(x), self.objective.interval_share)
            u = self._average_velocity(shown.rows(rows))
            longer = mean_flow_target(u, x[rows], t[rows], length[rows], v[rows])
        else:
            rows = interval_rows(len(x), self.objective.bootstrap_share)
            longer = shortcut_target(self._guided_steps(shown.rows(rows)), x[rows], t[rows], length[rows])
        return torch.cat([v[: rows.start], longer])

    def _average_velocity(self, condition: Condition) -> AverageVelocity:
        return lambda x, t, h: self(x, t, replace(condition, interval=h))

    def _guided_velocity(self, x: Tensor, t: Tensor, v: Tensor, condition: Condition) -> Tensor:
        """Return MeanFlow's velocity with guidance, from the velocity of the data and that of the network."""
        if self.guidance_scale == 1.0:
            return v
        assert isinstance(self.objective, MeanFlow)
        zero = torch.zeros_like(t)
        null = self.conditioning.null(self.device).repeated(len(x))
        unconditional = self._average_velocity(null)(x, t, zero)
        guided = guide(v, unconditional, self.guidance_scale)
        mix = self.objective.guidance_mix
        if not mix:
            return guided
        # kappa of the paper, with omega = guidance_scale (1 - kappa)
        return torch.lerp(guided, self._average_velocity(condition)(x, t, zero), mix)

    def _guided_steps(self, condition: Condition) -> AverageVelocity:
        """Return the network, with guidance for the shortest steps."""
        conditional = self._average_velocity(condition)
        if self.guidance_scale == 1.0:
            return conditional

        def u(x: Tensor, t: Tensor, h: Tensor) -> Tensor:
            null = self.conditioning.null(self.device).repeated(len(x))
            found = conditional(x, t, h)
            guided = guide(found, self._average_velocity(null)(x, t, h), self.guidance_scale)
            return torch.where(diffusion.per_sample(h <= self.shortest, x), guided, found)

        return u

    def _losses(
        self, batch: dict[str, Any], condition: Condition, process: DiffusionProcess, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        count = latent_source.batch_size(batch)
        shortest = torch.full((count,), self.shortest, device=self.device)
        return super()._losses(batch, replace(condition, interval=shortest), process, generator)

    def _integrated(
        self,
        condition: Condition,
        noise: Tensor,
        null: Callable[[], Condition],
        scale: float,
        steps: int,
        sampler: Sampler,
        generator: torch.Generator | Sequence[torch.Generator] | None,
    ) -> Tensor:
        self._check_steps(steps)
        allowed = f"{self._trained_guidance:g}, because guidance is trained into the network"
        check("guidance_scale", scale, allowed, scale == self._trained_guidance)
        allowed = "builtin for FewStepDiffusion, whose objective gives the sampler"
        check("sampler.name", sampler.name, allowed, sampler.name == "builtin")
        return average_velocity_sample(self._average_velocity(condition), noise, sampling_times(steps, "flow"))

    def _check_steps(self, steps: int) -> None:
        if not isinstance(self.objective, Shortcut):
            return
        most = self.objective.finest
        if self._trained_guidance != 1.0:
            most //= 2  # the shortest steps are trained without guidance
        allowed = f"a power of 2 of at most {most} for this shortcut model"
        check("sampling_steps", steps, allowed, steps <= most and not steps & (steps - 1))


def _as_objective(given: Objective | MeanFlow | Shortcut | Mapping[str, Any]) -> MeanFlow | Shortcut:
    """Return the objective with its settings. Checkpoints hold them as a dictionary."""
    if isinstance(given, Mapping):
        return Shortcut(**given) if "finest" in given else MeanFlow(**given)
    if isinstance(given, MeanFlow | Shortcut):
        return given
    check_choice("FewStepDiffusion", "objective", given, tuple(_NAMED))
    return _NAMED[given]
