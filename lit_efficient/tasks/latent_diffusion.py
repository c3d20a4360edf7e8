"""Train a diffusion network on latents, with sampling in validation.

    x_t = alpha x0 + sigma eps;   loss = mean |network(x_t, t, condition) - target|^2;   target: flow, eps, v, x0 or edm
    with weights and masks: loss = 1/B sum_i w_i mean_chw(m_i |network(x_t, t, condition) - target|^2)

w is ``loss_weight`` and m is ``mask`` of a batch, 1 where a batch has none. Neither sum is divided by the sum of its
weights, so accumulated gradients and those of several processes equal the gradients of one large batch. In a batch
of n images with w = 2 and n class images with w = 2 p, the loss is that of DreamBooth: the mean over the images, plus
p times the mean over the class images.

Validation computes the same loss with fixed random numbers, over all samples and by ranges of log SNR. Then it samples
images with guidance, which the data module scores. With a technique that evaluates averaged weights (EMA), ``val/loss``
is that of the average, and ``val/loss_raw`` that of the training weights, with the same random numbers.

Parts: the model without its training, :mod:`lit_efficient.tasks.latent_generator`; the interface to the data,
:mod:`lit_efficient.tasks.latent_source`; conditions, :mod:`lit_efficient.tasks.latent_conditions`; networks,
:mod:`lit_efficient.models.libraries.backbones`.

Costs: each validation samples ``samples.count`` images, with two network evaluations a step. With averaged weights,
each validation batch is evaluated twice.
Source: Rombach et al. (2022), https://arxiv.org/abs/2112.10752; Peebles and Xie (2022),
    https://arxiv.org/abs/2212.09748.
"""

import math
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lit_efficient.distributed.seeds import seed_rank
from lit_efficient.errors import ConfigurationError, check_number
from lit_efficient.internals.lightning_metrics import logs_in_bar
from lit_efficient.internals.lightning_strategies import data_rank
from lit_efficient.internals.lightning_trainer import trainer_of
from lit_efficient.losses import diffusion
from lit_efficient.losses.diffusion import Prediction
from lit_efficient.losses.diffusion_sampling import Sampler
from lit_efficient.losses.noise_process import DiffusionProcess, Schedule
from lit_efficient.losses.timesteps import (
    Distribution,
    TimestepSampling,
    check_sampling,
    on_latents,
    sample_timesteps,
    token_times,
)
from lit_efficient.mechanisms.averages.shadow import ShadowWeights
from lit_efficient.models.libraries.diffusers_model import DiffusersModelConfig
from lit_efficient.models.libraries.dit_to_diffusers import diffusers_fields
from lit_efficient.models.libraries.image_condition import ImageCondition
from lit_efficient.models.networks.class_token import join_token, split_token
from lit_efficient.models.networks.condition import Condition
from lit_efficient.models.networks.dit import DiTConfig
from lit_efficient.optimizers.fused_adamw import FusedAdamW
from lit_efficient.optimizers.schedules import warmup_cosine
from lit_efficient.protocol import builds_no_layers
from lit_efficient.surgery import moved
from lit_efficient.tasks import latent_source
from lit_efficient.tasks.latent_conditions import Conditioning, TextTraining
from lit_efficient.tasks.latent_generator import FIXED_SEED, LatentGenerator, Samples, check, to_uint8
from lit_efficient.tasks.latent_source import LatentSource
from lit_efficient.tasks.loss_by_noise import LossByNoise

__all__ = ["LatentDiffusion", "LatentSource", "Samples", "to_uint8"]

_WARMUP_STEPS = 100
_TINY = 1e-12


class Noised(NamedTuple):
    """Noisy latents of a training step."""

    x: Tensor  # [B, c, h, w]
    t: Tensor  # times, [B]; with two times for each sample [B, N]
    target: Tensor  # target of the network, [B, c, h, w]
    cleaner: tuple[Tensor, Tensor] | None = None  # with two times: the same latents at the earlier one, and that, [B]


class LatentDiffusion(LatentGenerator):
    """Training of a latent diffusion model with classes, captions, both or neither, depending on the backbone.

    Batches contain latents, their posterior or images, and labels, captions or their embeddings. Optional weights of
    the samples (``loss_weight``) and of the positions of the latents (``mask``) multiply the loss. Autoencoder and text
    encoder come from the data module. They are not submodules, so ``parameters()`` only contains parameters that train.
    They are stored in the checkpoint, which is enough to sample images. Random weights are drawn on the device of the
    run, so a GPU and a CPU give different weights for one seed.

    Args:
        backbone: The network: shape of this package's diffusion transformer, or a model of diffusers. A UNet with
            classes needs one more row than there are classes (``num_class_embeds``), for "no label".
        prediction: Target that the network predicts: flow, eps, v, x0 or edm. eps learns classes many times slower.
            null takes that of the backbone's pipeline, or flow.
        schedule: Noise schedule by name (flow, cosine, squared_cosine, linear, scaled_linear, edm), or the whole
            process: betas, zero terminal SNR, offset noise and input perturbation. null takes that of the backbone's
            pipeline, or flow.
        timestep_sampling: Distribution of training times by name (uniform, logit_normal, mode, log_normal), or with
            location, scale, shift and a second time for some tokens. null takes logit_normal; for a network from a
            pipeline that has a table of betas uniform, and for edm log_normal.
        label_dropout: Probability that the conditions of a training sample are hidden, in [0, 1). Label and text are
            hidden together.
        guidance_scale: Strength of classifier-free guidance in sampling. 1 is no guidance.
        sampling_steps: Steps of the sampler.
        sampler: Sampler by name (builtin, and ddim, euler, heun, dpmsolver++ or a scheduler class of diffusers), or
            with shift, rescaling of the guidance, the empty prompt and options of the class.
        learning_rate: Peak learning rate of AdamW, with 100 steps of warm-up (a tenth of short runs), then a cosine to
            zero.
        samples: Number of images that are sampled in each validation, their captions, and their decoder.
        override: Settings in which this config may contradict the pipeline of the backbone: prediction_type, schedule,
            timestep_shift, empty_prompt, vae_scaling, text_encoder. Other contradictions are refused.
        image_condition: Image that the network sees beside the noisy latents: ControlNet, inpainting, or editing by
            Flux Kontext and Qwen-Image-Edit. null for none.
        text_training: Text encoders that train with the network, or whose adapters (`LoRA`) or new tokens
            (`TextualInversion`) do. Captions are then encoded in each step. null keeps all text encoders frozen.
    """

    logs: ClassVar[tuple[str, ...]] = ("train/loss", "val/loss")  # and others with these prefixes
    commands_after_fit: tuple[str, ...] = ("sample --ckpt {ckpt} --output {output}.png",)

    def __init__(
        self,
        backbone: DiTConfig | DiffusersModelConfig = DiTConfig(),  # noqa: B008 (frozen)
        prediction: Prediction | None = None,
        schedule: Schedule | DiffusionProcess | None = None,
        timestep_sampling: Distribution | TimestepSampling | None = None,
        label_dropout: float = 0.1,
        guidance_scale: float = 2.0,
        sampling_steps: int = 20,
        sampler: str | Sampler = "builtin",
        learning_rate: float = 3e-3,
        samples: Samples = Samples(),  # noqa: B008 (frozen)
        override: list[str] | None = None,
        image_condition: ImageCondition | None = None,
        text_training: TextTraining | None = None,
    ) -> None:
        super().__init__(
            backbone,
            prediction,
            schedule,
            guidance_scale,
            sampling_steps,
            sampler,
            samples,
            override or [],
            image_condition,
            text_training,
        )
        self.timestep_sampling = self.settings.timestep_sampling(timestep_sampling, self.process)
        check_sampling("LatentDiffusion", self.timestep_sampling, self.process)
        share = self.timestep_sampling.second_share
        if share:
            allowed = f"0 for {self.shape.name}, which takes one time for each sample"
            if isinstance(self.backbone, DiTConfig):
                allowed = "0 with variant.class_token and in FewStepDiffusion"
            check("timestep_sampling.second_share", share, allowed, self.shape.token_times)
        check_number("LatentDiffusion", "label_dropout", label_dropout, least=0, below=1)
        check_number("LatentDiffusion", "learning_rate", learning_rate, above=0)
        if label_dropout == 0.0:
            allowed = "1 when label_dropout is 0, because the empty condition is not trained"
            check("guidance_scale", guidance_scale, allowed, guidance_scale == 1.0)
        self.label_dropout = label_dropout
        self.learning_rate = learning_rate
        # Primitives only, so that checkpoints load with weights_only=True.
        self.save_hyperparameters(
            {
                "prediction": self.prediction,
                "label_dropout": label_dropout,
                "guidance_scale": guidance_scale,
                "sampling_steps": sampling_steps,
                "learning_rate": learning_rate,
                "backbone": asdict(self.backbone),
                "schedule": asdict(self.process),
                "timestep_sampling": asdict(self.timestep_sampling),
                "sampler": asdict(self.sampler),
                "samples": asdict(self.samples),
                "override": list(self.settings.override),
                "image_condition": None if self.image_condition is None else asdict(self.image_condition),
                "text_training": None if self.text_training is None else asdict(self.text_training),
            }
        )
        self._by_noise = LossByNoise()
        self._judged = True
        if self.image_condition is not None:
            self.commands_after_fit = ()  # `sample` needs images of the user for the network

    @property
    def reads(self) -> tuple[str, ...]:
        """Optional entries of batches that this task uses."""
        if self.image_condition is None or self.image_condition.kind == "inpaint":
            return ("loss_weight", "mask")
        return ("loss_weight", "mask", "condition")

    @builds_no_layers
    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and isinstance(self.backbone, DiTConfig):
            _warn_about_export(self.backbone)
        if stage == "fit" and self.codec is not None and self.text_encoder is None and self.shape.takes_text:
            allowed = "0 without a text encoder, which embeds the empty caption: add one to the data (text_encoder)"
            check("label_dropout", self.label_dropout, allowed, self.label_dropout == 0.0)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.text_training is not None and self.text_training.until < 1:
            until = self.text_training.until
            allowed = "1 for a run without an end: set trainer.max_steps or trainer.max_epochs"
            check("text_training.until", until, allowed, math.isfinite(self.trainer.estimated_stepping_batches))
            allowed = "1 with several processes, which wait for the gradients of all parameters"
            check("text_training.until", until, allowed, self.trainer.world_size == 1)

    def on_train_start(self) -> None:
        super().on_train_start()
        seed_rank(data_rank(self.trainer))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Return the loss, and per sample the loss, time, log-SNR, prediction and target for techniques.

        With two times for each sample the result has a function ``cleaner`` in the place of time and log-SNR: it runs
        the network on the same latents, all of them at the earlier time.
        """
        count = latent_source.batch_size(batch)
        condition, batch = self.with_image(self._trained_condition(batch, count), batch, None)
        encoded = latent_source.with_posterior(batch, self.codec)
        output = self._losses(encoded, condition, self.process, None)
        if "class_loss" in output:
            output["sample_loss"] = output["sample_loss"] + self.shape.class_token.weight * output.pop("class_loss")
            output["loss"] = output["sample_loss"].mean()
        logged = output["loss"]
        if "loss_weight" in batch:
            # Weights would show a small batch as a small loss.
            logged = logged / batch["loss_weight"].float().mean().clamp_min(_TINY).to(logged)
        self.log("train/loss", logged, prog_bar=logs_in_bar(logged), batch_size=count)
        return output

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate("val", batch, batch_idx)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._evaluate("test", batch, batch_idx)

    def _text_trains(self) -> bool:
        """Return whether this step trains text encoders."""
        if self.text_training is None:
            return False
        until = self.text_training.until
        return until == 1 or self.trainer.global_step < until * self.trainer.estimated_stepping_batches

    def explain_not_finite(self) -> str | None:
        """Return the reason why the last batch has no finite loss, if it is the autoencoder."""
        if self.codec is None:
            return None
        return self.codec.explain_not_finite()

    def on_validation_epoch_start(self) -> None:
        self._by_noise.reset()
        self._prompts.begin()

    def on_test_epoch_start(self) -> None:
        self._by_noise.reset()
        self._prompts.begin()

    def on_validation_epoch_end(self) -> None:
        """Log the losses by noise level, then sample and score images: only a few in the sanity check."""
        self._conclude("val")

    def on_test_epoch_end(self) -> None:
        self._conclude("test")

    def configure_optimizers(self) -> Any:
        """Return AdamW with warm-up and a cosine to zero over the length of the run."""
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = FusedAdamW(trainable, self.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
        total = float(self.trainer.estimated_stepping_batches)
        warmup = int(min(_WARMUP_STEPS, total // 10))
        factor = partial(warmup_cosine, warmup=warmup, total=total)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _trained_condition(self, batch: dict[str, Any], count: int) -> Condition:
        """Return the conditions of ``count`` samples, some of which are hidden."""
        hidden = self._drawn_hidden(count)
        with torch.set_grad_enabled(self._text_trains()):
            return self._condition(batch, hidden, self.conditioning)

    def _drawn_hidden(self, count: int) -> Tensor | None:
        """Draw the samples [B] whose conditions are hidden; ``None`` for a network without conditions."""
        if not self.shape.conditions:
            return None
        return torch.rand(count, device=self.device) < self.label_dropout

    def _condition(self, batch: dict[str, Any], hidden: Tensor | None, conditioning: Conditioning) -> Condition:
        """Return the conditions of a batch without those that are hidden."""
        condition = conditioning.of_batch(batch, self.device)
        if hidden is None or not self.label_dropout:
            return condition
        return condition.dropped(hidden, conditioning.null(self.device))

    def _losses(
        self, batch: dict[str, Any], condition: Condition, process: DiffusionProcess, generator: torch.Generator | None
    ) -> dict[str, Tensor]:
        """Return the loss and its parts per sample. ``generator`` draws all random numbers (None: the global one)."""
        x0 = latent_source.draw_latents(batch, generator)
        features = self.shape.class_token.features
        if features:
            x0 = join_token(x0, self._class_features(batch, features))
        return self._errors(batch, self._noised(x0, process, generator), condition, process)

    def _noised(
        self, x0: Tensor, process: DiffusionProcess, generator: torch.Generator | None, pairs: bool = False
    ) -> Noised:
        """Draw times and noise for latents. With ``pairs`` the second half of them gets those of the first half."""
        drawn = x0.chunk(2)[0] if pairs else x0
        size = (x0.shape[2], x0.shape[3])
        tokens = self.tokens(size)
        draw = partial(sample_timesteps, len(drawn), self.timestep_sampling, generator, x0.device, process, tokens)
        t = draw()
        eps, seen = diffusion.draw_noise(drawn, process, generator)
        if pairs:
            t, eps, seen = t.repeat(2), eps.repeat(2, 1, 1, 1), seen.repeat(2, 1, 1, 1)
        cleaner = None
        share = self.timestep_sampling.second_share
        if share and generator is None:  # evaluations have one time for each sample, as sampling does
            second = draw()
            earlier = torch.minimum(t, second)
            cleaner = (diffusion.add_noise(x0, seen, earlier, process), earlier)
            t = token_times(t, second, share, tokens)
        at = on_latents(t, size, self.shape.sides.multiple)
        target = diffusion.target(x0, eps, at, process, self.prediction)
        return Noised(diffusion.add_noise(x0, seen, at, process), t, target, cleaner)

    def _errors(
        self, batch: dict[str, Any], noised: Noised, condition: Condition, process: DiffusionProcess
    ) -> dict[str, Tensor]:
        """Return the loss of noisy latents and its parts per sample."""
        features = self.shape.class_token.features
        target = noised.target
        t = noised.t
        output = self(noised.x, t, condition)
        losses = {}
        if features:
            output, predicted_token = split_token(output, features)
            target, target_token = split_token(target, features)
            losses["class_loss"] = (predicted_token - target_token).square().mean(dim=1)
        errors = (output - target).square()
        if "mask" in batch:
            errors = errors * latent_source.mask_of(batch, errors)
        sample_loss = errors.flatten(1).mean(dim=1)
        if "loss_weight" in batch:
            weights = latent_source.weights_of(batch, errors)
            sample_loss = sample_loss * weights
            losses |= {name: loss * weights for name, loss in losses.items()}
        found: dict[str, Any] = {"loss": sample_loss.mean(), "sample_loss": sample_loss}
        if noised.cleaner is None:
            found |= {"timesteps": t, "log_snr": process.log_snr(t)}
        else:
            found["cleaner"] = partial(self, *noised.cleaner, condition)
        return losses | found | {"predicted": output, "target": target}

    def _class_features(self, batch: dict[str, Any], features: int) -> Tensor:
        """Return the class token of an encoder for each clean image, [B, features]."""
        callbacks: list[Any] = getattr(trainer_of(self), "callbacks", None) or []
        source = next((one for one in callbacks if getattr(one, "gives_class_token", False)), None)
        if "class_token" not in batch and source is None:
            raise ConfigurationError(
                "LatentDiffusion: the backbone has a variant.class_token, but there is no source of class tokens: add "
                "class_token [B, features] to batches, or use HiddenAlignment with head.class_layer, whose teacher "
                "computes it"
            )
        given = batch["class_token"] if "class_token" in batch else source.class_token(self, batch)  # type: ignore[union-attr]
        found: Tensor = moved(given, self.device)
        allowed = f"[B, {features}], as variant.class_token.features says"
        check("the shape of class_token", list(found.shape), allowed, found.ndim == 2 and found.shape[1] == features)
        return found

    def _evaluate(self, stage: str, batch: dict[str, Any], batch_idx: int) -> None:
        seed = FIXED_SEED + batch_idx * self.trainer.world_size + data_rank(self.trainer)
        process = replace(self.process, input_perturbation=0.0)  # only for training; samplers do not perturb
        condition = self.conditioning.of_batch(batch, self.device)
        condition, batch = self.with_image(condition, batch, torch.Generator().manual_seed(seed))
        encoded = latent_source.with_posterior(batch, self.codec)
        if self.shape.takes_text:
            self._prompts.gather(batch, condition.image)

        def evaluate() -> dict[str, Tensor]:
            return self._losses(encoded, condition, process, torch.Generator().manual_seed(seed))

        losses = evaluate()
        self._by_noise.add(losses["sample_loss"], losses["log_snr"])
        shared: dict[str, Any] = {"batch_size": latent_source.batch_size(batch), "sync_dist": True}
        self.log(f"{stage}/loss", losses["loss"], prog_bar=True, **shared)
        if "class_loss" in losses:
            self.log(f"{stage}/class_loss", losses["class_loss"].mean(), **shared)
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        average = next((callback for callback in callbacks if isinstance(callback, ShadowWeights)), None)
        if average is not None:
            with average.raw(self) as averaged:
                self.log(f"{stage}/loss_raw", evaluate()["loss"] if averaged else losses["loss"], **shared)

    def _conclude(self, stage: str) -> None:
        if self.shape.takes_text:
            final = not self.trainer.sanity_checking
            self._prompts.settle(data_rank(self.trainer), final, self.image_condition is not None)
        averages = self._by_noise.averages(lambda totals: self.trainer.strategy.reduce(totals, reduce_op="sum"))
        for name, value in averages.items():
            self.log(f"{stage}/loss_{name}", value, sync_dist=True)
        self._judge(stage)

    def _judge(self, stage: str) -> None:
        """Sample and score images. Every process does so with the same images, as a sharded network requires."""
        data = self._source()
        if data is None or self.samples.count == 0 or not self._judged:
            return
        score = getattr(data, "score_samples", None)
        if self.codec is None or score is None or not getattr(data, "judges_samples", True):
            self._judged = False
            rank_zero_info(
                f"LatentDiffusion: {type(data).__name__} cannot score samples, or has no autoencoder to decode them: "
                "there are no scores"
            )
            return
        count = self.samples.count
        if self.trainer.sanity_checking:
            count = min(count, max(2, self.shape.num_classes or 2))
        asked = self.in_turn(count)
        labels = asked.get("labels", self._prompts.labels_of(count) if "captions" in asked else None)
        latents = self.sample(**asked, generator=torch.Generator().manual_seed(FIXED_SEED))
        for name, value in score(self._decode(latents), labels, asked.get("captions")).items():
            self.log(f"{stage}/{name}", value, prog_bar=name == "sample_accuracy", sync_dist=True)


def _warn_about_export(config: DiTConfig) -> None:
    """Report before training that a network cannot be exported."""
    try:
        diffusers_fields(config)
    except ConfigurationError as error:
        reason = str(error).rstrip(".")
        rank_zero_info(
            f"LatentDiffusion: `export --format diffusers` does not support this network: {reason}. Other formats and "
            "sampling are not affected"
        )
